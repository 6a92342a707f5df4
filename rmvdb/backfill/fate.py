"""What becomes of each record of a batch that is copied: decided from everything that is known of it, in one place."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from rmvdb.types import Id

#: So many records of a batch may be gone from the old collections, whatever share of it they are.
FEW = 3


class Fate(StrEnum):
    """What becomes of one record."""

    #: It leaves the old collections.
    REMOVE = "remove"
    #: Another program deleted it from the old collection: it is taken out of the new one.
    REMOVE_FROM_NEW = "remove_from_new"
    #: It is moved again, by a batch of its own.
    REQUEUE = "requeue"
    #: It was never there.
    NOTHING = "nothing"


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """What is known of one record once the grace of its batch is over."""

    #: "" where no client announced a write of it; "open", also for a write that was done less than a grace ago; or what the last
    #: write that was done was: "upsert" or "delete".
    written: str = ""
    #: It was not copied: a write that was never made was to do it, or it was left in a place where it is no more.
    uncopied: bool = False
    #: The batch read it from an old collection and copied it.
    read: bool = False
    #: An old collection holds it.
    in_old: bool = False
    #: What the old collection holds is what the batch read.
    same: bool = False
    #: The new collection holds it.
    in_new: bool = False
    #: A batch had decided before that it leaves the old collection (`Archive.leave`); the registry may have forgotten that.
    left: bool = False


def record_fate(of: Evidence) -> Fate:
    """Decide by the first line that fits; nothing leaves an old collection that the new one does not hold.

    | written | uncopied | read | in old | same | in new | left | fate |
    |---|---|---|---|---|---|---|---|
    | open | | | | | | | REQUEUE: the write may still change it |
    | delete | | | | | | | REMOVE |
    | upsert | | | yes | | no | | REQUEUE: the new collection has lost the write |
    | upsert | | | | | | | REMOVE |
    | | yes | | | | | | REQUEUE: nothing copied it |
    | | | no | yes | | | | REQUEUE: it came after the batch was read |
    | | | no | no | | | | NOTHING |
    | | | yes | yes | no | | | REQUEUE: another program changed it |
    | | | yes | yes | yes | no | | REQUEUE: the new collection has lost it |
    | | | yes | yes | yes | yes | | REMOVE |
    | | | yes | no | | | yes | REMOVE: it left before, the registry has gone back since |
    | | | yes | no | | | no | REMOVE_FROM_NEW: another program deleted it |
    """
    if of.written == "open":
        return Fate.REQUEUE
    lost = of.in_old and not of.in_new
    if of.written:
        return Fate.REQUEUE if lost and of.written == "upsert" else Fate.REMOVE
    if of.uncopied:
        return Fate.REQUEUE
    if not of.read:
        return Fate.REQUEUE if of.in_old else Fate.NOTHING
    if of.in_old:
        return Fate.REMOVE if of.same and of.in_new else Fate.REQUEUE
    return Fate.REMOVE if of.left else Fate.REMOVE_FROM_NEW


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """What is to be done with the ids of a copied batch; written down before it is done."""

    remove: list[Id]
    remove_from_new: list[Id]
    requeue: list[Id]


def too_many(gone: int, of: int, share: float) -> bool:
    """Whether so many missing records, of a number, are more than another program's single deletions."""
    return gone > max(FEW, share * of)
