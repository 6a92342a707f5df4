"""An upgrade of the gallery of `world`, its batches worked on by one worker, and the seconds in which it had work."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from rmvdb.app.settings import BackfillSection
from rmvdb.backfill.batches import Backfill
from rmvdb.backfill.task import Task
from rmvdb.backfill.throttle import Limits
from rmvdb.backfill.worker import Worker
from rmvdb.protocols import Permit, Source
from rmvdb.registry.tables import BatchRow
from rmvdb.serving.loaded_models import LoadedModels
from rmvdb.storage.archive import Archive
from rmvdb.storage.folders import LocalFolder
from rmvdb.types import Id, Item, Phase, Record, Vectors
from tests.bench.speed.world import COLLECTIONS, World

#: A grace of six seconds: a server's searches may lag by five of them.
SHORT = {"max_age": 0.5, "longest_search": 0.5, "staleness": 5.0}
#: Batches in hand, as a worker has them by default, and the records of one.
WIDTH, BATCH = BackfillSection().width, 1000
#: Seconds without a batch in hand after which a worker waits for the end of a grace.
IDLE = 0.6


class Given:
    """A source whose items are rows of an array."""

    def __init__(self, made: Vectors) -> None:
        self._made = made

    def load(self, records: Sequence[Record]) -> Mapping[Id, Item]:
        """Return the row of each id."""
        return {record.id: self._made[int(record.id)] for record in records}


class Timed(Backfill):
    """A backfill that notes when each half of a batch began and ended."""

    def begin(self) -> None:
        """Forget the times so far."""
        self.spans: list[tuple[float, float]] = []

    def copy(self, task: Task, batch: BatchRow, in_time: Permit) -> None:
        """As in Backfill."""
        with self._noted():
            super().copy(task, batch, in_time)

    def retire(self, task: Task, batch: BatchRow, in_time: Permit) -> None:
        """As in Backfill."""
        with self._noted():
            super().retire(task, batch, in_time)

    @contextmanager
    def _noted(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.spans.append((began, time.perf_counter()))


class Moving:
    """An upgrade of `world`'s gallery from its second collection to its first, on its way."""

    def __init__(
        self,
        made: World,
        folder: Path,
        source: Source,
        loaded_models: LoadedModels,
        *,
        times: Mapping[str, float] = SHORT,
    ) -> None:
        self.registry, self.store = made.registry, made.store
        row = self.registry.add_upgrade(
            gallery_id=self.registry.gallery("bench").id, from_version="v1", to_version="v2", phase=Phase.SERVING_BOTH,
            old_collections=[COLLECTIONS[1]], new_collection=COLLECTIONS[0], method="naive", order="random", listed=True,
        )  # fmt: skip
        self.task = Task(
            upgrade=row.id, gallery="bench", old=(COLLECTIONS[1],), new=(COLLECTIONS[0],), version="v2", grace=sum(times.values())
        )
        self.archive = Archive(LocalFolder(folder))
        self.backfill = Timed(
            registry=self.registry, store=self.store, loaded_models=loaded_models, source=source, archive=self.archive
        )
        self.backfill.begin()

    def add(self, ids: Sequence[Id], *, batch: int = BATCH) -> None:
        """Put these ids on the work list."""
        parts = [(ids[at : at + batch], None) for at in range(0, len(ids), batch)]
        self.registry.add_batches(self.task.upgrade, parts, first=self.registry.next_priority(self.task.upgrade))

    def run(self) -> float:
        """Let one worker retire every batch. Return the seconds in which it had work: without the waits for a grace."""
        self.backfill.begin()
        worker = Worker(registry=self.registry, lease=40.0, longest_call=10.0, width=WIDTH, limits=Limits())
        began = time.perf_counter()
        worker.run(self.task, self.backfill)
        spans = [(began, began), *sorted(self.backfill.spans)]
        return sum(busy(spans))


def busy(spans: Sequence[tuple[float, float]]) -> Iterator[float]:
    """Yield the seconds from the first beginning to the last end, without the gaps of which each is longer than IDLE."""
    start, end = spans[0]
    for begin, stop in spans[1:]:
        if begin - end > IDLE:
            yield end - start
            start = begin
        end = max(end, stop)
    yield end - start
