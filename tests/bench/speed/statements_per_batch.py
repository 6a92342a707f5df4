"""Statements that a worker sends to the registry for each batch that it copies and retires."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from rmvdb.engines.faiss import FaissStore
from rmvdb.types import Index
from tests.bench.speed.moving import Given, Moving
from tests.bench.speed.row import Options, Row, counted
from tests.bench.speed.statements import sent
from tests.bench.speed.world import vectors, world

#: Without an engine that lags, a grace of a tenth of a second.
TIMES = {"max_age": 0.05, "longest_search": 0.05, "staleness": 0.0}
BATCHES = 60


def measure(options: Options) -> Iterator[Row]:
    """Count what a worker sends from its first batch to its last, looks at progress and heartbeats with it."""
    size = max(1, min(options.records, 12_000) // BATCHES)
    whole = Options(records=size * BATCHES, dim=options.dim, t=0.0)
    with world(FaissStore(), whole, index=Index(type="FLAT"), times=TIMES) as made, tempfile.TemporaryDirectory() as folder:
        moving = Moving(made, Path(folder), Given(vectors(whole.records, whole.dim, seed=1)), made.loaded_models, times=TIMES)
        made.client.close()  # an application's looks are not a worker's
        moving.add(range(whole.records), batch=size)
        statements = sent(moving.run)
    yield counted("registry statements per batch copied and retired", [len(statements) / BATCHES], target=12, unit="")
