"""The records that clients wrote during an upgrade, compared with what the new collection holds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from rmvdb.backfill.task import Task
from rmvdb.protocols import VectorStore
from rmvdb.registry.codec import key
from rmvdb.registry.registry import Registry
from rmvdb.registry.tables import IntentRow
from rmvdb.serving import sketch
from rmvdb.types import Id, IdType
from rmvdb.upgrade.id_hashes import hashes

#: Records that are read at once.
PAGE = 1_000


class ClientWrites:
    """Reads the intents of an upgrade."""

    def __init__(self, registry: Registry, store: VectorStore) -> None:
        self._registry, self._store = registry, store

    def reach(self, task: Task) -> bool:
        """Whether clients write into the collection that is compared. After an instant roll back they write into the original."""
        return self._registry.upgrade(task.upgrade).new_collection == task.new[0]

    def there_and_gone(self, task: Task) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
        """Return hashes of the ids whose last write is a done upsert, and of those whose last write is, or may be, a deletion."""
        there: dict[str, bool] = {}
        after = 0
        while page := self._registry.written(task.upgrade, after=after):
            # A killed writer's upsert may be missing, and its deletion may have happened.
            there |= {row.record: row.kind == "upsert" for row in page if row.done or row.kind == "delete"}
            after = page[-1].id
        return (
            hashes([record for record, is_there in there.items() if is_there]),
            hashes([record for record, is_there in there.items() if not is_there]),
        )

    def upserted(self, task: Task) -> dict[str, tuple[int, bytes]]:
        """Return, for each record whose last write is a done upsert, that intent's id and sketch; the sketch may be empty."""
        made: dict[str, tuple[int, bytes]] = {}
        after = 0
        while page := self._registry.written(task.upgrade, after=after):
            for row in page:
                made.pop(row.record, None)  # a later write that is not done may or may not have reached the engine
                if row.done and row.kind == "upsert":
                    made[row.record] = row.id, row.sketch or b""
            after = page[-1].id
        return made

    def ids(self, task: Task, records: Iterable[str]) -> list[Id]:
        """Return the ids behind keys of records."""
        numbers = self._registry.collection(task.new[0]).schema["id_type"] == IdType.INT64
        return [int(record) if numbers else record for record in records]

    def unchanged_since(self, task: Task, ids: Sequence[Id], last: Callable[[Id], int]) -> list[Id]:
        """Return the ids whose last intent is still the one that `last` gives."""
        now = self._registry.announced(task.upgrade, ids)
        return [id for id in ids if (intent := now.get(key(id))) is not None and intent.id == last(id)]

    def absent(self, task: Task, made: Mapping[str, tuple[int, bytes]]) -> list[Id]:
        """Return the upserted ids that no collection holds."""
        ids_absent: list[Id] = []
        ids = self.ids(task, made)
        for start in range(0, len(ids), PAGE):
            part = ids[start : start + PAGE]
            there = {each.id for name in {*task.new, *task.old} for each in self._store.get(name, part, fields=())}
            missing = [id for id in part if id not in there]
            ids_absent += self.unchanged_since(task, missing, lambda id: made[key(id)][0])
        return ids_absent

    def differing(self, task: Task, made: Mapping[str, tuple[int, bytes]], look: Callable[[], None]) -> list[Id]:
        """Return the upserted ids whose vector differs from that of their last write, and still differs after a grace."""
        made = {record: write for record, write in made.items() if write[1]}
        other = self._differing_now(task, self.ids(task, made), made, look)
        end = time.monotonic() + task.grace
        while other and time.monotonic() < end:  # a server may show the former record for a moment
            time.sleep(0.1)
            other = self._differing_now(task, other, made, look)
        return other

    def _differing_now(
        self, task: Task, ids: Sequence[Id], made: Mapping[str, tuple[int, bytes]], look: Callable[[], None]
    ) -> list[Id]:
        found: list[Id] = []
        for start in range(0, len(ids), PAGE):
            look()
            stored = self._store.get(task.new[0], ids[start : start + PAGE], fields=(), vector=True)
            sketches = {each.id: sketch.of(each.vector) for each in stored if each.vector is not None}
            other = [id for id, there in sketches.items() if not sketch.near(there, made[key(id)][1])]
            found += self.unchanged_since(task, other, lambda id: made[key(id)][0])
        return found

    def though_deleted(self, task: Task, collection: str, ids: Sequence[Id], written: Mapping[str, IntentRow]) -> list[Id]:
        """Return the ids that their last write deleted and that the collection holds all the same."""
        deleted = {id: written[key(id)].id for id in ids if key(id) in written and _is_deletion(written[key(id)])}
        # A record that was deleted after its page was read, or written again since, is no difference.
        back = [record.id for record in self._store.get(collection, list(deleted), fields=())]
        return self.unchanged_since(task, back, deleted.__getitem__)


def _is_deletion(intent: IntentRow) -> bool:
    return intent.done and intent.kind == "delete"
