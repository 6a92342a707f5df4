"""The records that batches moved, as the registry and the archive know them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rmvdb.backfill.task import Task
from rmvdb.registry.codec import key, unpack_ids
from rmvdb.registry.registry import Registry
from rmvdb.registry.tables import BatchRow
from rmvdb.storage.archive import Archive, ArchiveFile, Reading
from rmvdb.types import BatchState, Id
from rmvdb.upgrade.id_hashes import hashes

#: The states of a batch under way, in their order. Read in this order, a batch that goes on meanwhile is seen in its next state.
IN_HAND = (BatchState.CLAIMED, BatchState.WRITING, BatchState.COPIED, BatchState.REMOVING)


class MovedBatch(NamedTuple):
    """One retired batch."""

    id: int
    #: Its archive files, by old collection; for a roll back, also the files that the vectors came from.
    archive: Mapping[str, Any]
    origin: Mapping[str, Any]
    #: Hashes of the ids that it took out of the old collections, and of the ids that it removed from new because they were gone
    #: from old.
    removed: npt.NDArray[np.uint64]
    gone: npt.NDArray[np.uint64]
    #: Hashes of the ids that a roll back left where they were. They must be there; another program may have changed them.
    left: npt.NDArray[np.uint64]


class MovedBatches:
    """Reads the retired batches of an upgrade."""

    def __init__(self, registry: Registry, archive: Archive) -> None:
        self._registry, self._archive = registry, archive

    def rows(self, task: Task, state: BatchState) -> Iterator[BatchRow]:
        """Read the batches in one state, in the order of their ids."""
        after = 0
        while page := self._registry.batches(task.upgrade, after=after, limit=50, state=state):
            yield from page
            after = page[-1].id

    def retired(self, task: Task) -> Iterator[MovedBatch]:
        """Read the retired batches, in the order in which they were listed."""
        for row in self.rows(task, BatchState.RETIRED):
            if row.archive and row.remove is not None:
                removed, left = hashes(moved_ids(row)), hashes(unpack_ids(row.left))
                yield MovedBatch(row.id, row.archive, row.origin or {}, removed, hashes(unpack_ids(row.remove_from_new)), left)

    def waiting(self, task: Task) -> npt.NDArray[np.uint64]:
        """Return hashes of the ids that wait for their batch, and of quarantined ones. In place their records are in the new
        collection all the while.
        """
        ids = [hashes(unpack_ids(row.ids)) for row in self.rows(task, BatchState.PENDING)]
        return np.concatenate([*ids, hashes([row.record for row in self._registry.quarantined(task.upgrade)])])

    def under_way(self, task: Task, batches: Sequence[MovedBatch]) -> npt.NDArray[np.uint64]:
        """Return hashes of the ids in hand now, of those moved by batches that were retired after `batches` were read, and of
        quarantined ones: an earlier try may have copied them, before another program changed them.
        """
        ids = [hashes(unpack_ids(row.ids)) for state in IN_HAND for row in self.rows(task, state)]
        if not task.in_place:  # there `waiting` has them
            ids.append(hashes([row.record for row in self._registry.quarantined(task.upgrade)]))
        if self._registry.counts(task.upgrade).get(BatchState.RETIRED, (0, 0))[0] > len(batches):
            known = {batch.id for batch in batches}
            ids += [batch.removed for batch in self.retired(task) if batch.id not in known]
        return np.concatenate([hashes([]), *ids])

    def readings(
        self, task: Task, batch: MovedBatch, newest: Mapping[int, int], left_out: Callable[[str], None]
    ) -> Iterator[Reading]:
        """Read the records of a batch as they should be now: as the batch read them, or for a roll back as they had been.

        Records that a later batch moved again are left out. `left_out` hears of damaged files.
        """
        origin = self._origin(task, batch)
        as_it_was = set(batch.left.tolist())
        removed = (hash for hash in batch.removed.tolist() if hash not in as_it_was)
        left = {hash for hash in removed if newest.get(hash, batch.id) == batch.id}
        for file in batch.archive.values():
            read = self._archive.found(ArchiveFile(**file), left_out=left_out)
            hashed = hashes([reading.record.id for reading in read]).tolist()
            for reading, hash in zip(read, hashed, strict=True):
                if hash in left:
                    was = origin.get(reading.record.id)
                    yield reading if was is None else Reading(record=was.put_back_for(reading.record), made=None)

    def _origin(self, task: Task, batch: MovedBatch) -> dict[Id, Reading]:
        """Return, for a roll back, the archived record behind each record, except for records that were written since."""
        if task.undoes is None:
            return {}
        readings = {each.record.id: each for file in batch.origin.values() for each in self._archive.found(ArchiveFile(**file))}
        written = self._registry.announced(task.undoes, readings)
        return {id: reading for id, reading in readings.items() if key(id) not in written}


def moved_ids(row: BatchRow) -> list[Id]:
    """Return the ids that a retired batch moved, or that a roll back left where the upgrade had been about to remove them.

    Ids that no batch had been about to remove belong to another program.
    """
    left = set() if row.origin else set(unpack_ids(row.left))
    return [id for id in unpack_ids(row.remove) if id not in left]


def newest_by_hash(batches: Sequence[MovedBatch]) -> dict[int, int]:
    """Return, for each id that several batches had, the last batch that moved it or found it gone.

    Several batches have an id if another program put the record back.
    """
    hands = [np.concatenate([batch.removed, batch.gone]) for batch in batches]
    had = np.concatenate([hashes([]), *hands])
    by = np.repeat(np.array([batch.id for batch in batches], np.int64), np.array([len(each) for each in hands], np.int64))
    different, times = np.unique(had, return_counts=True)
    repeated = np.isin(had, different[times > 1])
    return dict(zip(had[repeated].tolist(), by[repeated].tolist(), strict=True))
