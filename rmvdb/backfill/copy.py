"""The first half of a batch, claimed → copied: it fills the new collection."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rmvdb import errors
from rmvdb.backfill.task import Task
from rmvdb.backfill.vectors import NewVectors
from rmvdb.protocols import Permit
from rmvdb.registry.codec import key, pack_ids, unpack_ids
from rmvdb.registry.tables import BatchRow
from rmvdb.types import BatchState, Id, Record


class Copying(NewVectors):
    """Fills the new collection."""

    def copy(self, task: Task, batch: BatchRow, in_time: Permit) -> None:
        """Bring a batch from claimed to copied: read, load, embed, archive, then *writing*, look at the intents, upsert into new.

        `in_time` runs before every attempt of a write. It raises LeaseLost if the claim may end before the write does.
        """
        self._owner.settle_now_and_then(task.gallery)
        ids = unpack_ids(batch.ids)
        held = self._read(task, ids, after=self._store.moment())
        old = [record for records in held.values() for record in records]
        present = {record.id for record in old}
        if batch.restore:
            old += self._lost_since(task, batch, present)
        stand_ins = self._stand_ins(task, batch, old)
        left = self._left(task, batch, [record.id for record in old if record.id not in stand_ins])
        lost = self._lost_before(task, batch, {record.id for record in old})
        moving = [*(record for record in old if record.id not in left), *lost]
        made, reasons = self._embed(task, batch, moving, stand_ins)
        kept = self._kept_earlier(task, batch, present)
        known = {record.id for records in kept.values() for record in records}
        kept[task.old[0]] = [*kept.get(task.old[0], []), *(record for record in lost if record.id not in known)]
        for collection, records in held.items():
            kept[collection] = [*records, *kept.get(collection, [])]
        archived = {
            collection: self._keep(task, batch, collection, records, made[task.new[0]]) for collection, records in kept.items()
        }
        restore = batch.restore or bool(lost)
        self._registry.advance(batch, BatchState.WRITING, archive=archived, left=pack_ids(left), restore=restore)
        # Both sides announce, then look: a client that writes from here on sees *writing* and waits.
        announced = self._registry.intents(task.upgrade, ids)
        for collection, records in made.items():
            unannounced = [each for each in records if key(each.id) not in announced]
            reasons |= self._upsert(collection, unannounced, in_time)
        # A record that a client was writing was not copied. However that write ends, the old record must not leave uncopied.
        uncopied = [id for id in ids if key(id) in announced]
        aside = {id: why for id, why in reasons.items() if key(id) not in announced}
        self._stay_findable(task, kept, set(aside) - present, in_time)
        self._registry.copied(batch, requeue=uncopied, aside=aside)

    def _stay_findable(self, task: Task, kept: Mapping[str, Sequence[Record]], ids: set[Id], in_time: Permit) -> None:
        """Write records that only the archive holds back where they were read: quarantined records stay findable."""
        for collection in task.old:
            records = [each for each in kept.get(collection, ()) if each.id in ids and each.vector is not None]
            if records:
                self._store.upsert(collection, records, as_read=True, permit=in_time)
                ids -= {record.id for record in records}

    def _upsert(self, collection: str, records: Sequence[Record], in_time: Permit, *, part: bool = False) -> dict[Id, str]:
        """Write records. Return the reason for each that ends the engine, or whose id the engine cannot write.

        Raises:
            Unwritable: the collection takes none of several records, so that it is not a record that is odd.
        """
        try:
            self._store.upsert(collection, records, as_read=True, permit=in_time)
        except errors.EngineKilled as exc:
            if not exc.ids:
                raise
            return dict.fromkeys(exc.ids, str(exc))
        except errors.Unwritable as exc:
            if len(records) == 1:
                return {records[0].id: str(exc)}
            half = len(records) // 2
            refused: dict[Id, str] = {}
            for some in (records[:half], records[half:]):
                refused |= self._upsert(collection, some, in_time, part=True)
            if len(refused) == len(records) and not part:
                raise
            return refused
        return {}

    def _lost_since(self, task: Task, batch: BatchRow, present: set[Id]) -> list[Record]:
        """Return from the archive the records of a batch that were moved once and that neither collection holds any more."""
        kept = self._kept_earlier(task, batch, present)
        there = self._in_new(task, [record.id for records in kept.values() for record in records])
        return [record for records in kept.values() for record in records if record.id not in there]

    def _lost_before(self, task: Task, batch: BatchRow, present: set[Id]) -> list[Record]:
        """For a roll back: return records that the upgrade had moved, and that no collection holds any more, without vectors.

        The engine has gone back since, or another program emptied the collection. The archive holds them, and no client deleted
        them.
        """
        ids = [id for id in unpack_ids(batch.ids) if id not in present] if task.undoes is not None and batch.origin else []
        if not ids:
            return []
        known = {key(id) for id in self._in_new(task, ids)} | self._written(task, ids)
        wanted = {id for id in ids if key(id) not in known}
        records = {each.id: each for kept in self._kept(batch.origin).values() for each in kept if each.id in wanted}
        return [Record(id=id, fields=record.fields) for id, record in records.items()]

    def _left(self, task: Task, batch: BatchRow, ids: Sequence[Id]) -> set[Id]:
        """Return, for a roll back, the records that their target already holds. They only leave where they are now.

        A record that never left is still there, unless another program deleted it. One that did leave is there only if another
        program wrote it. This is decided once: later tries find there what the first try wrote.
        """
        if task.undoes is None:
            return set()
        written = self._written(task, ids)
        unwritten = [id for id in ids if key(id) not in written]
        if batch.archive is not None:
            return set(unpack_ids(batch.left)).intersection(unwritten)
        if batch.origin == {}:
            return set(unwritten)
        return self._in_place(task, batch, unwritten)

    def _keep(
        self, task: Task, batch: BatchRow, collection: str, records: Sequence[Record], made: Sequence[Record]
    ) -> dict[str, Any]:
        name = *task.archive_folders, collection, f"{batch.id}-{batch.token}"
        return asdict(self._archive.write(*name, records=records, made=made))
