"""Peak memory of a process that lists a made-up gallery and moves some of it, against a tenth as many records."""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rmvdb.backfill.throttle import Limits
from rmvdb.backfill.worker import Worker
from rmvdb.engines.faiss import FaissStore
from rmvdb.planning.orders.random import Random
from rmvdb.planning.orders.table import order_spec
from rmvdb.types import Id, Index, Progress, Record, Vectors
from rmvdb.upgrade.sorted_ids import batches_in_order
from tests.bench.speed.moving import BATCH, WIDTH, Moving
from tests.bench.speed.row import Options, Row, compared
from tests.bench.speed.world import COLLECTIONS, world

#: Batches that are added to the work list at once, and those that are copied.
AT_ONCE, MOVED = 50, 12
TIMES = {"max_age": 0.05, "longest_search": 0.05, "staleness": 0.0}


def measure(options: Options) -> Iterator[Row]:
    """Measure each size in a process of its own."""
    for whole in (True, False):
        peaks = [_peak(size, options.dim, whole=whole) for size in (options.records, max(options.records // 10, 1))]
        how = "sorted" if whole else "as they come"
        name = f"peak memory of a worker, {options.records:,} records listed {how}"
        yield compared(name, peaks[:1], peaks[1:], against="a tenth of them", target=1.1, unit="MB")


def _peak(records: int, dim: int, *, whole: bool) -> float:
    command = [sys.executable, "-m", "tests.bench.speed.memory", str(records), str(dim), str(int(whole))]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])


class MadeUp(FaissStore):
    """A store whose old collection is not there: its records are made when they are asked for."""

    records = dim = 0

    def get(self, collection: str, ids: Sequence[Id], **options: Any) -> list[Record]:
        """As in FaissStore; of the old collection every id that is asked for."""
        if collection != COLLECTIONS[1]:
            return super().get(collection, ids, **options)
        return [Record(id=id, vector=_vector(id), fields={}) for id in ids]

    def scan(self, collection: str, *, page: int = 1000, **options: Any) -> Iterator[list[Record]]:
        """As in FaissStore; of the old collection all its records."""
        if collection != COLLECTIONS[1]:
            yield from super().scan(collection, page=page, **options)
            return
        for start in range(0, self.records, page):
            yield [Record(id=id) for id in range(start, min(start + page, self.records))]


def _vector(id: Id) -> Vectors:
    return np.full(MadeUp.dim, float(int(id) % 97 + 1), np.float32)


class Flat:
    """A source of items that are vectors, of any id."""

    def load(self, records: Sequence[Record]) -> dict[Id, Vectors]:
        """Return a vector of each."""
        return {record.id: _vector(record.id) for record in records}


def main(records: int, dim: int, *, whole: bool) -> None:
    """List all of them, move some, and print the megabytes of this process at its largest."""
    MadeUp.records, MadeUp.dim = records, dim
    store, stop = MadeUp(), threading.Event()
    options = Options(records=records, dim=dim, t=0.0)
    with world(store, options, index=Index(type="FLAT"), fill=False, times=TIMES) as made, tempfile.TemporaryDirectory() as name:
        made.client.close()
        moving, first = Moving(made, Path(name), Flat(), made.loaded_models, times=TIMES), 1
        listed = batches_in_order(
            store, COLLECTIONS[1], Random(), batch=BATCH, folder=Path(name), leave_out=lambda _: set(),
            vector=order_spec("random").reads_records, whole=whole,
        )  # fmt: skip
        some: list[tuple[list[Id], None]] = []
        for ids in listed:
            some.append((ids, None))
            if len(some) == AT_ONCE:
                made.registry.add_batches(moving.task.upgrade, some, first=first)
                first, some = first + len(some), []
        made.registry.add_batches(moving.task.upgrade, some, first=first)

        def progress(now: Progress) -> None:
            if now.done >= min(MOVED * BATCH, now.total):
                stop.set()

        worker = Worker(registry=made.registry, lease=40.0, longest_call=10.0, width=WIDTH, limits=Limits())
        worker.run(moving.task, moving.backfill, stop=stop, progress=progress)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), whole=bool(int(sys.argv[3])))
