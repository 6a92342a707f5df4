"""The records of a batch: in the old collections, in the new one, and in the archive."""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rmvdb.backfill.task import Task
from rmvdb.protocols import VectorStore
from rmvdb.registry.codec import unpack_ids
from rmvdb.registry.mark import Owner
from rmvdb.registry.registry import Registry
from rmvdb.registry.tables import BatchRow, CollectionRow
from rmvdb.storage.archive import Archive, ArchiveFile, Reading, same_fields
from rmvdb.types import Id, Moment, Record, Vectors


class BatchRecords:
    """Reads the records of a batch wherever they are; both halves of a batch build on it."""

    def __init__(self, *, registry: Registry, store: VectorStore, archive: Archive) -> None:
        self._registry, self._store, self._archive = registry, store, archive
        self._owner = Owner(registry, store)
        self._rows: dict[str, CollectionRow] = {}
        #: The engine's moment of the last `settle`: each batch that is due was copied before it.
        self._settled_at: Moment = 0
        #: Copied records that searches without a filter were asked for, and those that the index passed over.
        self._searched = self._passed_over = 0
        self._counting = threading.Lock()

    def _read(self, task: Task, ids: Sequence[Id], *, after: Moment = 0) -> dict[str, list[Record]]:
        """Read these ids by old collection, each from the newest that holds it: that copy is what clients see.

        It shows every write before that moment. After 0 it is strong.
        """
        held: dict[str, list[Record]] = {}
        for collection in task.old:
            if found := self._store.get(collection, ids, vector=True, strong=not after, after=after):
                held[collection] = found
                there = {record.id for record in found}
                ids = [id for id in ids if id not in there]
        return held

    def _in_new(self, task: Task, ids: Sequence[Id], *, after: Moment = 0) -> set[Id]:
        """Return the ids that the new collection holds as of that moment or later. After 0 the answer is strong."""
        get = functools.partial(self._store.get, fields=(), strong=not after, after=after)
        return {record.id for collection in task.new for record in get(collection, ids)}

    def _in_place(self, task: Task, batch: BatchRow, ids: Sequence[Id]) -> set[Id]:
        """Return the ids that are where a roll back puts them, or in a newer collection: clients never saw an older copy."""
        places = {name: at for at, name in enumerate(task.new)}
        home = {each.id: places[name] for name, kept in self._kept(batch.origin).items() for each in kept}
        # A damaged file does not tell its ids. To put a record back needlessly costs an embedding and loses nothing.
        unknown = min((places[name] for name in batch.origin or ()), default=len(task.new) - 1)
        found = {name: self._store.get(name, ids, fields=()) for name in places}
        return {each.id for name, records in found.items() for each in records if places[name] <= home.get(each.id, unknown)}

    def _written(self, task: Task, ids: Sequence[Id]) -> set[str]:
        """Return the keys of records that clients wrote, or may have written, since the upgrade began that a roll back undoes."""
        upgrades = (task.undoes, task.upgrade) if task.undoes else ()
        return {record for each in upgrades for record in self._registry.announced(each, ids)}

    def _kept(self, files: Mapping[str, Any] | None) -> dict[str, list[Record]]:
        """Return the records in these archive files, by the collection they were read from; a damaged file gives none."""
        kept = self._readings(files).items()
        return {collection: [reading.record for reading in readings] for collection, readings in kept}

    def _readings(self, files: Mapping[str, Any] | None) -> dict[str, list[Reading]]:
        return {collection: self._archive.found(ArchiveFile(**file)) for collection, file in (files or {}).items()}

    def _kept_earlier(self, task: Task, batch: BatchRow, present: set[Id]) -> dict[str, list[Record]]:
        """Return the records that an earlier try read, and perhaps copied, and that have left the old collections since.

        `retire` finds them missing. If the registry has forgotten that try, its file is in the archive all the same.
        """
        missing = set(unpack_ids(batch.ids)) - present
        earlier: dict[str, list[Record]] = {}
        if not missing:
            return earlier
        for collection, records in self._kept(batch.archive).items():
            earlier[collection] = [record for record in records if record.id in missing]
            missing -= {record.id for record in earlier[collection]}
        for collection in task.old if missing and not task.in_place else ():
            for file in self._archive.files(*task.archive_folders, collection, begins=f"{batch.id}-"):
                found = [each.record for each in self._archive.found(file) if each.record.id in missing]
                missing -= {record.id for record in found}
                earlier[collection] = earlier.get(collection, []) + found
        return earlier


def root_of(batch: BatchRow) -> int:
    """Return the number of the batch that this one descends from, by however many requeues."""
    return batch.root or batch.id


def same(one: Record, other: Record) -> bool:
    """Return whether two readings of a record agree, bit by bit."""
    return same_fields(one.fields, other.fields) and np.array_equal(vector_of(one), vector_of(other), equal_nan=True)


def vector_of(record: Record) -> Vectors:
    """Return the vector of a record; an empty one if it was read without."""
    return record.vector if record.vector is not None else np.empty(0, np.float32)
