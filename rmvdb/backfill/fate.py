"""The fate of each record of a copied batch, decided in one place from all the evidence about it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from rmvdb.types import Id

#: This many records of a batch may be missing from the old collections, whatever share of it they are.
FEW = 3


class Fate(StrEnum):
    """The fate of one record."""

    #: It leaves the old collections.
    REMOVE = "remove"
    #: Another program deleted it from the old collection: it is removed from the new one.
    REMOVE_FROM_NEW = "remove_from_new"
    #: It is moved again, by a batch of its own.
    REQUEUE = "requeue"
    #: It was never there.
    NOTHING = "nothing"


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """The evidence about one record once the grace of its batch is over."""

    #: The last write that clients announced: "" if there is none, "open" if it is not done or was done less than a grace ago,
    #: else its kind, "upsert" or "delete".
    written: str = ""
    #: Nothing copied it. A client announced its write and never made it, or `copy` left it in a place where it is missing now.
    uncopied: bool = False
    #: The batch read it from an old collection and copied it.
    read: bool = False
    #: An old collection holds it.
    in_old: bool = False
    #: The old collection's content is what the batch read.
    same: bool = False
    #: The new collection holds it.
    in_new: bool = False
    #: An earlier decision took it out of the old collection (`Archive.leave`); the registry may have forgotten that.
    left: bool = False


def record_fate(of: Evidence) -> Fate:
    """Decide by the first line that fits. Nothing leaves an old collection unless the new one holds it.

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
    | | | yes | no | | | yes | REMOVE: it left before, and the registry has gone back since |
    | | | yes | no | | | no | REMOVE_FROM_NEW: another program deleted it (but see `Retiring._spare`) |
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
class LaterEvidence:
    """The evidence about a record that an earlier try decided to remove and that an old collection still holds."""

    #: The kind of the last write that clients announced, done or not; "" if there is none.
    written: str = ""
    #: The new collection holds it.
    in_new: bool = False
    #: The batch read it from a newer collection than the one that holds it now.
    older: bool = False
    #: The collection that the batch read it from holds it as it was read.
    same: bool = False


def later_fate(of: LaterEvidence) -> Fate:
    """Decide again, by the first line that fits, before an earlier decision to remove is carried out.

    | written | in new | older | same | fate |
    |---|---|---|---|---|
    | delete | | | | REMOVE |
    | | no | | | REQUEUE: the new collection has lost it |
    | upsert | yes | | | REMOVE |
    | | yes | yes | | REMOVE: clients never saw this copy |
    | | yes | no | yes | REMOVE |
    | | yes | no | no | REQUEUE: it was changed, or came into a newer collection, or its reading is lost |
    """
    if of.written == "delete":
        return Fate.REMOVE
    if not of.in_new:
        return Fate.REQUEUE
    return Fate.REMOVE if of.written or of.older or of.same else Fate.REQUEUE


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """The fates of a copied batch's ids; written down before they are carried out."""

    remove: list[Id]
    remove_from_new: list[Id]
    requeue: list[Id]


def too_many(gone: int, of: int, share: float) -> bool:
    """Return whether more records are missing than single deletions by another program explain."""
    return gone > max(FEW, share * of)
