"""The second half of a batch, copied → retired, one grace later: it empties the old collections."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from rmvdb import errors
from rmvdb.backfill.fate import Decision, Evidence, Fate, LaterEvidence, later_fate, record_fate, too_many
from rmvdb.backfill.records import BatchRecords, root_of, same
from rmvdb.backfill.task import Task, grace
from rmvdb.engines.finding import TOGETHER, not_found
from rmvdb.protocols import Permit
from rmvdb.registry.codec import key, pack_ids, schema_from_json, unpack_ids
from rmvdb.registry.tables import BatchRow, CollectionRow, IntentRow
from rmvdb.storage.archive import ArchiveFile, Reading
from rmvdb.text import counted
from rmvdb.types import BatchState, Id, Moment, Record

#: Seconds to wait before each repeat of searches that missed a record.
_PATIENCE = (0.2, 2.0, 10.0)
#: The shares that an approximate index may pass over: of one batch's sample, and of all samples once there are many.
_OF_ONE, _OF_ALL, _MANY = 0.25, 0.05, 100


@dataclass(frozen=True, kw_only=True, slots=True)
class _Seen:
    """The result of a look at a copied batch, as sets of ids."""

    #: The records that the batch read.
    read: set[Id]
    #: The records that its last copy made a vector of.
    made: set[Id]
    #: The records that an old collection holds now.
    in_old: set[Id]
    #: Records in both whose content is as it was read.
    same: set[Id]


class Retiring(BatchRecords):
    """Empties the old collections."""

    def retire(self, task: Task, batch: BatchRow, in_time: Permit) -> None:
        """Bring a batch from copied to retired, one grace later: compare with the readings, write down which ids leave, remove
        them."""
        if not task.removal_allowed:
            raise errors.NeedsConsent(
                f"Collection {task.old[-1]!r} was not made by rmvdb; to let records leave it, run the upgrade again with "
                "--execute (rmvdb rollback puts them back)"
            )
        self._owner.settle_now_and_then(task.gallery)
        self._expect_found(task, batch)
        if batch.state == BatchState.REMOVING:
            decision = self._decide_again(task, batch, _decided(batch))
        else:
            decision = self._decide(task, batch, self._lost(task, batch))
        packed = {
            "remove": pack_ids(decision.remove),
            "remove_from_new": pack_ids(decision.remove_from_new),
            "requeue": pack_ids(decision.requeue),
        }
        # Each try gets a number of its own. Before anything is removed, the mark shows whether the registry has gone back.
        self._owner.note(task.gallery, self._registry.advance(batch, BatchState.REMOVING, left=batch.left, **packed))
        if not task.in_place:
            # If the registry goes back to before this line, it must not take these removals for another program's deletions.
            self._archive.leave(*task.archive_folders, str(root_of(batch)), f"{batch.id}-{batch.token}", ids=decision.remove)
        announced = self._registry.intents(task.upgrade, decision.remove_from_new) if decision.remove_from_new else {}
        self._delete(task.new, [id for id in decision.remove_from_new if key(id) not in announced], in_time)
        if not task.in_place:
            self._delete(task.old, decision.remove, in_time)
        # A write that is only announced may never be made, and its copy would stay.
        requeue = decision.requeue + [id for id in decision.remove_from_new if key(id) in announced]
        self._registry.retire(batch, moved=len(decision.remove), requeue=requeue)

    def _delete(self, collections: Sequence[str], ids: Sequence[Id], in_time: Permit) -> None:
        for collection in collections:
            self._store.delete(collection, ids, permit=in_time)

    # --- searches find copied records --------------------------------------------------------------------------------

    @property
    def settles_at_once(self) -> bool:
        """Whether searches find a copied record without `settle`."""
        return self._store.settles_at_once

    def settle(self, task: Task, report: Callable[[str, int, int], None] = lambda *_: None, *, missed: bool = False) -> float:
        """Wait until searches find everything copied before the returned time, by the registry's clock.

        `report` gets a collection, the number of its rows that are indexed, and the number of all. `missed`: a search has missed
        a record.
        """
        began, moment, now = self._registry.now(), self._store.moment(), self._registry.progress(task.upgrade)
        for collection in task.new:
            heard = functools.partial(report, collection)
            self._store.settle(collection, coming=now.total - now.done, missed=missed, report=heard)
        self._settled_at = moment
        return began

    def _expect_found(self, task: Task, batch: BatchRow) -> None:
        """Raise EngineError, and so keep the batch in old, unless searches find its records in new.

        Searches with a filter must find all of them, searches without one a sample. They show what was copied before the last
        `settle`, so that none of them waits for the engine's clock.
        """
        ids = unpack_ids(batch.ids)
        for patience in (*_PATIENCE, None):
            moment = self._settled_at or self._store.moment()
            for collection in task.new:
                missed = self._missed(collection, ids, moment)
                if missed and patience is None:
                    id, how = next(iter(missed.items()))
                    raise errors.EngineError(
                        f"Collection {collection!r} holds record {id!r}, and {how}; the batch stays in "
                        f"{' and '.join(task.old)} until that is fixed. Look at the index of {collection!r}, then run the same "
                        "command again"
                    )
                if missed and patience is not None:
                    time.sleep(patience)
                    self.settle(task, missed=patience == _PATIENCE[-1])
                    break
            else:
                return

    def _missed(self, collection: str, ids: Sequence[Id], moment: Moment) -> dict[Id, str]:
        """Return the records that searches miss, and how. An approximate index may pass over a few.

        The answers show each write before `moment`, so that the engine's clock is waited for once.
        """
        row = self._row(collection)
        get = functools.partial(self._store.get, strong=not moment, after=moment)
        held = [record.id for record in get(collection, ids, fields=())]
        sample = get(collection, held[:: max(1, len(held) // TOGETHER)][:TOGETHER], fields=(), vector=True)
        missed = not_found(self._store, schema_from_json(row.schema), sample, among=held, search=row.search, after=moment)
        few = len(missed.passed_over)
        with self._counting:
            self._searched, self._passed_over = self._searched + len(sample), self._passed_over + few
            often = self._passed_over > _OF_ALL * max(_MANY, self._searched)
        return missed.hidden or (missed.passed_over if few > max(1, _OF_ONE * len(sample)) or (few and often) else {})

    def _row(self, collection: str) -> CollectionRow:
        """Return the registry's row of a collection, of which no column that is read here ever changes."""
        if collection not in self._rows:
            self._rows[collection] = self._registry.collection(collection)
        return self._rows[collection]

    # --- what becomes of each record ----------------------------------------------------------------------------------

    def _lost(self, task: Task, batch: BatchRow) -> set[Id]:
        """Return records that `copy` left because the target held them, and that the target has lost since."""
        left = unpack_ids(batch.left) if batch.origin != {} else []
        there = self._in_place(task, batch, left) if left else set()
        lost = set(left) - there
        if lost:
            batch.left = pack_ids([id for id in left if id in there])
        return lost

    def _decide(self, task: Task, batch: BatchRow, lost: Collection[Id]) -> Decision:
        # A moment of its own: another program's change may come until then, and is seen.
        ids, moment = unpack_ids(batch.ids), self._store.moment()
        seen = self._look(task, batch, moment)
        announced = self._registry.intents(task.upgrade, ids)
        # Read last of all: nothing leaves old before new has been asked for it. Records left as they are there are an exception.
        new = seen.in_old if task.in_place else self._in_new(task, ids, after=moment) | set(unpack_ids(batch.left))
        left = self._left_before(task, batch, seen)
        settled = self._settled(task, announced)
        uncopied = {*unpack_ids(batch.requeue), *lost}
        fates: dict[Fate, list[Id]] = {each: [] for each in Fate}
        for id in ids:
            evidence = Evidence(
                written=_how_written(announced.get(key(id)), settled), uncopied=id in uncopied, read=id in seen.read,
                in_old=id in seen.in_old, same=id in seen.same, in_new=id in new, left=id in left,
            )  # fmt: skip
            fates[record_fate(evidence)].append(id)
        self._forget_lost(task, [id for id in fates[Fate.REQUEUE] if id not in new], announced, settled)
        decision = Decision(remove=fates[Fate.REMOVE], remove_from_new=fates[Fate.REMOVE_FROM_NEW], requeue=fates[Fate.REQUEUE])
        return decision if task.in_place else self._doubt(task, batch, len(seen.read), self._spare(task, batch, decision))

    def _look(self, task: Task, batch: BatchRow, moment: Moment) -> _Seen:
        """Compare the batch's readings with the present records. Both are freed before any other call."""
        was = self._was(batch)
        held = self._read(task, unpack_ids(batch.ids), after=moment)
        now = {record.id: record for records in held.values() for record in records}
        both = was.keys() & now.keys()
        agree = {id for id in both if (was[id].is_copied_to(now[id]) if task.in_place else same(was[id].record, now[id]))}
        return _Seen(read=set(was), made={id for id in was if was[id].made is not None}, in_old=set(now), same=agree)

    def _was(self, batch: BatchRow) -> dict[Id, Reading]:
        return {each.record.id: each for readings in self._readings(batch.archive).values() for each in readings}

    def _left_before(self, task: Task, batch: BatchRow, seen: _Seen) -> set[Id]:
        """Return the records that this batch, or one that descends from it, has taken out of the old collections.

        If this batch's last copy did not read a record there, a batch that this one descends from counts, too.
        """
        gone = seen.read - seen.in_old
        if not gone or task.in_place:
            return set()
        if batch.restore:  # the lost records were in no old collection when they were put back
            return gone
        noted = self._archive.left(*task.archive_folders, str(root_of(batch)))
        return {id for id in gone if id in noted and (noted[id] >= batch.id or id not in seen.made)}

    def _settled(self, task: Task, announced: Mapping[str, IntentRow]) -> float:
        """Return the time, by the registry's clock, before which a write was done a grace ago."""
        done = any(intent.done for intent in announced.values())
        return self._registry.now() - grace(self._registry, task) if done else 0.0

    def _forget_lost(self, task: Task, absent: Sequence[Id], announced: Mapping[str, IntentRow], settled: float) -> None:
        """Forget upserts that the engine lost when it went back: their records are copied like others again.

        `absent` are records that the new collection does not hold. A deletion is never forgotten: the record is absent because of
        it. Nor is an upsert of a moment ago: new may have been read before it.
        """
        intents = {id: announced[key(id)] for id in absent if _how_written(announced.get(key(id)), settled) == "upsert"}
        if intents:
            self._registry.forget_done(task.upgrade, list(intents), upto=max(intent.id for intent in intents.values()))

    def _spare(self, task: Task, batch: BatchRow, decision: Decision) -> Decision:
        """Return the decision without taking from the new collection what a client wrote there and the registry has forgotten.

        After a deletion a client's next write is in the new collection only. If the registry goes back to before that write, the
        record looks like one that another program deleted. But no batch copied it as it is.
        """
        if not decision.remove_from_new:
            return decision
        get = functools.partial(self._store.get, ids=decision.remove_from_new, vector=True)
        held = {each.id: each for collection in reversed(task.new) for each in get(collection)}
        known, copied = set[Id](), set[Id]()
        for file in self._copies(task, batch):
            for each in self._archive.found(file):
                if each.made is not None and each.record.id in held:
                    known.add(each.record.id)
                    copied |= {each.record.id} if each.is_copied_to(held[each.record.id]) else set()
            if copied == held.keys():  # looked at after each file: to list the next ones reads the whole folder
                return decision
        written = known - copied
        return replace(
            decision,
            remove=[*decision.remove, *(id for id in decision.remove_from_new if id in written)],
            remove_from_new=[id for id in decision.remove_from_new if id not in written],
        )

    def _copies(self, task: Task, batch: BatchRow) -> Iterator[ArchiveFile]:
        """Yield the archive's files, first those of this batch and of the one that it descends from, which mostly suffice."""
        yield from (ArchiveFile(**file) for file in (batch.archive or {}).values())
        for begins in (f"{batch.id}-", f"{root_of(batch)}-", ""):
            yield from self._archive.files(*task.archive_folders, begins=begins)

    def _doubt(self, task: Task, batch: BatchRow, read: int, decision: Decision) -> Decision:
        """Return the decision if few records are missing: they count as deleted.

        Raises:
            RecordsMissing: Many are missing, and the batch was not retired as a whole before.
        """
        gone = decision.remove_from_new
        if not too_many(len(gone), read, task.missing):
            return decision
        if len(gone) == read:
            was = self._was(batch)
            stored = {each.id: each for name in task.new for each in self._store.get(name, gone, vector=True)}
            if all(id in stored and was[id].is_copied_to(stored[id]) for id in gone):
                return replace(decision, remove=[*decision.remove, *gone], remove_from_new=[])
        raise errors.RecordsMissing(
            f"{len(gone)} of the {counted(read, 'record')} of a batch are gone from {' and '.join(task.old)} since it was "
            f"copied, such as {gone[0]!r}, and rmvdb did not remove them; nothing was taken out of {task.new[0]}. If another "
            "program deleted them: run the same command again with --accept-missing. If the registry is an older copy: "
            "rmvdb registry rebuild"
        )

    def _decide_again(self, task: Task, batch: BatchRow, decided: Decision) -> Decision:
        """Check an earlier decision: the worker that made it died, perhaps long ago, and records may have changed since."""
        if task.in_place:
            return decided  # nothing leaves
        moment = self._store.moment()
        held = self._read(task, decided.remove, after=moment)
        announced = self._registry.intents(task.upgrade, [record.id for records in held.values() for record in records])
        new = self._in_new(task, decided.remove, after=moment) | set(unpack_ids(batch.left))
        was = {
            each.record.id: (collection, each.record)
            for collection, readings in self._readings(batch.archive).items()
            for each in readings
        }

        def fate(collection: str, record: Record) -> Fate:
            intent = announced.get(key(record.id))
            place, reading = was.get(record.id, (task.old[-1], None))
            evidence = LaterEvidence(
                written=intent.kind if intent else "",
                in_new=record.id in new,
                older=reading is not None and task.old.index(collection) > task.old.index(place),
                same=reading is not None and collection == place and same(reading, record),
            )
            return later_fate(evidence)

        again = {record.id for name, records in held.items() for record in records if fate(name, record) is Fate.REQUEUE}
        self._forget_lost(task, [id for id in again if id not in new], announced, self._settled(task, announced))
        left = [id for id in decided.remove if id not in again]
        now = replace(decided, remove=left, requeue=[*decided.requeue, *(id for id in decided.remove if id in again)])
        return self._spare(task, batch, now)


def _decided(batch: BatchRow) -> Decision:
    """Return the decision that an earlier try wrote down."""
    remove, remove_from_new, requeue = (unpack_ids(ids) for ids in (batch.remove, batch.remove_from_new, batch.requeue))
    return Decision(remove=remove, remove_from_new=remove_from_new, requeue=requeue)


def _how_written(intent: IntentRow | None, settled: float) -> str:
    """Return the word of `Evidence` for a write.

    A done write put the truth into the new collection. A search that looked there before must still find the record in the old
    one, so the grace counts from the write.
    """
    if intent is None:
        return ""
    return intent.kind if intent.done and (intent.done_at or 0.0) <= settled else "open"
