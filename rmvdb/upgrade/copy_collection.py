"""Keep the original collection whole beside an upgrade, so that a roll back is only a new epoch.

The backfill drains a copy. While the copy is made, the original is searched and the copy is a mirror. From then on the copy is
searched and the original is the mirror. A write reaches mirrors first: if its client is killed half-way, it shows nowhere before
a roll back, and whole after it. A copy may be *lifted*: it has the original's records, with vectors in the new space (FCT).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import numpy as np

from rmvdb.backfill.records import same
from rmvdb.protocols import VectorStore
from rmvdb.registry.upgrade_plan import EpochName
from rmvdb.serving.announced_writes import Writes
from rmvdb.storage.archive import same_fields
from rmvdb.types import Id, Leg, Record, ServingPlan, Vectors

#: Passes of the copy. If other programs still change the original after them, `agree` does the rest.
PASSES = 5
#: Ids that are compared side by side: as many as Milvus gives at once.
RANGE = 16_384
#: How far two liftings of one vector may lie apart, as a share of its length: the order of summing changes with the page.
NOISE = 1e-4

#: A context that waits, before its block, until so many records may be copied.
CopyPermit = Callable[[int], AbstractContextManager[None]]
#: The kind of the last done write, `upsert` or `delete`, of each record that a client wrote since the copy is served.
Done = Callable[[Sequence[Id]], Mapping[Id, str]]
#: A context around the write that takes in another program's records. From then on, earlier writes and moves of them do not
#: count.
ForgettingWrites = Callable[[Sequence[Id]], AbstractContextManager[None]]
#: The vectors (n, d_new) by which a copy holds these records of the original.
Lift = Callable[[Sequence[Record]], Vectors]


def epochs_with_copy(
    before: Leg, copy: Leg, served: Mapping[EpochName, Sequence[Leg]], kept: Leg
) -> dict[EpochName, Sequence[Leg]]:
    """Return the legs and mirrors of each epoch of an upgrade that keeps the original.

    `before` is the leg in force, `served` has the epochs of an upgrade of the copy, and `kept` says how the original is written
    from then on and searched after a roll back.
    """
    mirror = replace(kept, searched=False)
    return {
        EpochName.UNTOUCHED: [before],
        EpochName.COPYING: [before, replace(copy, searched=False)],
        **{name: [*legs, mirror] for name, legs in served.items() if name != EpochName.BEFORE},
        EpochName.ALONE: served[EpochName.FINAL],
        EpochName.ORIGINAL: [kept],
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyPosition:
    """How far a copy is."""

    #: The passes that have ended, and the side of this one: 0 for records of the original, 1 for records that only the copy has.
    passes: int = 0
    side: int = 0
    #: The last record compared on that side; how many of the original's records this pass has compared, of how many.
    after: Id | None = None
    done: int = 0
    total: int = 0
    #: Whether this pass has changed the copy, so that another one follows.
    changed: bool = False


class Mirror:
    """Copies one collection, and later lets the searched collections agree with it again, a page of records at a time.

    Each page is announced as a client's write is, so that no other process is at its records meanwhile.
    """

    def __init__(
        self,
        original: str,
        *,
        store: VectorStore,
        writes: Writes,
        done: Done,
        forgetting_writes: ForgettingWrites,
        page: int,
        lift: Lift | None = None,
    ) -> None:
        self._original, self._store, self._writes, self._done, self._forgetting_writes = (
            original,
            store,
            writes,
            done,
            forgetting_writes,
        )
        self._page, self._lift = page, lift

    def copy(
        self, target: str, permit: CopyPermit, progress: Callable[[CopyPosition], None], begun: CopyPosition | None = None
    ) -> None:
        """Copy until a pass over both collections changes nothing, or for `PASSES` passes if other programs change the original.

        It resumes from `begun`.
        """
        total = self._store.count(self._original)
        at = replace(begun or CopyPosition(), total=total)
        sides: Sequence[tuple[str, Callable[[Sequence[Id]], list[Id]]]] = (
            (self._original, lambda ids: self._different(target, ids)),
            (target, lambda ids: self._absent(ids, self._original)),
        )
        while at.passes < PASSES:
            for side, (collection, differing) in list(enumerate(sides))[at.side :]:
                for ids in self._ids(collection, after=at.after):
                    changed = self._repair_by_permit(permit, target, differing(ids)) > 0 or at.changed
                    at = replace(at, after=ids[-1], done=min(at.done + (0 if side else len(ids)), total), changed=changed)
                    progress(at)
                at = replace(at, side=side + 1, after=None)
            if not at.changed:
                return
            at = CopyPosition(passes=at.passes + 1, total=total)

    def finish(self, target: str, ids: Sequence[Id], look: Callable[[], None] = lambda: None) -> None:
        """Copy these records again: clients that were killed while the copy was made may have written it, and not the original.

        Records that were written since stay: the copy has the new model's own vector, and would not be embedded again. `look` is
        called when no other process is at a page. It may raise to end this.
        """

        def written(page: Sequence[Id]) -> Mapping[Id, str]:
            look()
            return self._done(page)

        for page in self._pages(ids):
            self._repair(target, page, leave_out=written)

    def agree(self, legs: Sequence[str], look: Callable[[], None] = lambda: None) -> int:
        """Bring records that only the original holds into the last leg, and take records that it lacks out of all legs. Return
        how many.

        Other programs inserted and deleted them there, or clients were killed in such a write. A record that a client deleted
        and another program put back stays out. `look` is called now and then. It may raise to end this.
        """
        changed = 0
        for ids, in_legs in self._side_by_side(legs):
            look()
            for strange in self._pages(ids - in_legs):
                done = self._done(strange)
                if strange := [id for id in strange if done.get(id) != "delete"]:
                    changed += self._take_in(strange, legs)
            for to_remove in self._pages(in_legs - ids):
                if to_remove := self._absent(to_remove, self._original):
                    changed += self._take_out(to_remove, legs)
        return changed

    def take_in(self, ids: Sequence[Id], legs: Sequence[str]) -> int:
        """Bring these records of the original into the last leg, unless a leg holds them or a client deleted them. Return how
        many."""
        return sum(self._take_in(page, legs) for page in self._pages(ids))

    def take_out(self, ids: Sequence[Id], legs: Sequence[str]) -> int:
        """Take those of these records that the original lacks out of all legs. Return how many."""
        return sum(self._take_out(gone, legs) for page in self._pages(ids) if (gone := self._absent(page, self._original)))

    def unknown(self, legs: Sequence[str]) -> Iterator[list[Id]]:
        """Find the records that only the original holds while no other process writes them, a page at a time."""
        for ids, in_legs in self._side_by_side(legs):
            for strange in self._pages(ids - in_legs):
                with self._writes.alone_at(strange):
                    gone = self._absent(strange, self._original)
                    strange = [id for id in self._absent(strange, *reversed(legs)) if id not in gone]
                yield strange

    def _side_by_side(self, legs: Sequence[str]) -> Iterator[tuple[set[Id], set[Id]]]:
        """Read the ids of the original, and those of all legs, range by range.

        The original is read first, and the leg that records leave next: a record only moves from a leg that was read before.
        """
        after: Id | None = None
        for ids in self._ids(self._original, page=RANGE):
            pages = (self._ids(leg, after=after, upto=ids[-1], page=RANGE) for leg in reversed(legs))
            yield set(ids), {id for page in itertools.chain.from_iterable(pages) for id in page}
            after = ids[-1]
        for leg in reversed(legs):  # behind the last record of the original
            for page in self._ids(leg, after=after, page=RANGE):
                yield set(), set(page)

    def _pages(self, ids: Collection[Id]) -> Iterator[list[Id]]:
        rest = list(ids)
        for start in range(0, len(rest), self._page):
            yield rest[start : start + self._page]

    def _ids(
        self, collection: str, *, after: Id | None = None, upto: Id | None = None, page: int | None = None
    ) -> Iterator[list[Id]]:
        for records in self._store.scan(collection, after=after, upto=upto, page=page or self._page):
            yield [record.id for record in records]

    def _absent(self, ids: Sequence[Id], *collections: str) -> list[Id]:
        """Return the ids that none of these collections holds. Name the one that records leave first."""
        for collection in collections:
            held = {record.id for record in self._store.get(collection, ids, fields=())} if ids else set()
            ids = [id for id in ids if id not in held]
        return list(ids)

    def _different(self, target: str, ids: Sequence[Id]) -> list[Id]:
        absent = set(self._absent(ids, target))
        there = [id for id in ids if id not in absent]
        if not there:
            return list(ids)
        copies = {record.id: record for record in self._whole(target, there)}
        agree = {each.id for each in self._wanted(there) if each.id in copies and self._same(each, copies[each.id])}
        return [id for id in ids if id not in agree]

    def _whole(self, collection: str, ids: Sequence[Id]) -> list[Record]:
        return self._store.get(collection, ids, vector=True)

    def _wanted(self, ids: Sequence[Id]) -> list[Record]:
        """Return the records that a copy should hold of these ids."""
        found = self._whole(self._original, ids)
        if self._lift is None or not found:
            return found
        return [replace(record, vector=vector) for record, vector in zip(found, self._lift(found), strict=True)]

    def _same(self, wanted: Record, there: Record) -> bool:
        if self._lift is None or wanted.vector is None or there.vector is None:
            return same(wanted, there)
        apart = float(np.linalg.norm(wanted.vector - there.vector))
        return same_fields(wanted.fields, there.fields) and apart <= NOISE * float(np.linalg.norm(wanted.vector))

    def _repair_by_permit(self, permit: CopyPermit, target: str, ids: Sequence[Id]) -> int:
        with permit(len(ids)):
            return self._repair(target, ids)

    def _repair(self, target: str, ids: Sequence[Id], *, leave_out: Done = lambda _: {}) -> int:
        """Write only records that differ while no client writes them: a client changes one collection after the other."""
        if not ids:
            return 0
        with self._writes.alone_at(ids) as (_, permit):
            left_out = leave_out(ids)
            ids = [id for id in ids if id not in left_out]
            copies = {record.id: record for record in self._whole(target, ids)}
            wanted = {record.id: record for record in self._wanted(ids)}
            changed = [each for id, each in wanted.items() if id not in copies or not self._same(each, copies[id])]
            if changed:
                self._store.upsert(target, changed, as_read=True, permit=permit)
            if surplus := [id for id in copies if id not in wanted]:
                self._store.delete(target, surplus, permit=permit)
        return len(changed) + len(surplus)

    def _take_in(self, ids: Sequence[Id], legs: Sequence[str]) -> int:
        with self._writes.alone_at(ids) as (_, permit):
            deleted = self._done(ids)
            strange = [id for id in self._absent(ids, *reversed(legs)) if deleted.get(id) != "delete"]
            wanted = self._wanted(strange)
            if wanted:
                with self._forgetting_writes([record.id for record in wanted]):
                    self._store.upsert(legs[-1], wanted, as_read=True, permit=permit)
        return len(wanted)

    def _take_out(self, ids: Sequence[Id], legs: Sequence[str]) -> int:
        gone: list[Id] = []

        def still_gone(_: ServingPlan) -> list[Id]:
            gone.extend(self._absent(ids, self._original))
            return gone

        with self._writes.announced("delete", ids, only=still_gone) as (_, permit):
            for leg in legs:
                self._store.delete(leg, gone, permit=permit)
        return len(gone)
