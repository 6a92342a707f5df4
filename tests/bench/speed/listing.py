"""Listing the records of an upgrade on a real server, against pymilvus that reads their ids and vectors once."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from pymilvus import MilvusClient

from rmvdb.engines.milvus import MilvusStore
from rmvdb.planning.orders.table import Known, make_order, order_spec
from rmvdb.types import Index, Metric
from rmvdb.upgrade.sorted_ids import batches_in_order
from tests.bench.speed.row import Options, Row, compared, counted, in_turns
from tests.bench.speed.world import COLLECTIONS, World, world
from tests.bench.speed.writes import SETTINGS
from tests.support.milvus_server import MilvusServer

#: Records of a batch.
BATCH = 1000


def measure(options: Options) -> Iterator[Row]:
    """Measure on a server of its own, whose index is FLAT: a reading by key needs none."""
    whole = Options(records=options.records, dim=options.dim, t=0.0)
    with tempfile.TemporaryDirectory(prefix="rmvdb-bench-") as folder, MilvusServer(Path(folder), settings=SETTINGS) as server:
        store = MilvusStore(lambda: server.address, timeout=60.0)
        try:
            with world(store, whole, index=Index(type="FLAT")) as made:
                yield from _rows(made, MilvusClient(uri=server.address), f"{options.records:,} × {options.dim}")
        finally:
            store.close()


def _rows(made: World, bare: MilvusClient, size: str) -> Iterator[Row]:
    old = COLLECTIONS[1]
    sample = next(made.store.scan(old, vector=True))  # orders learn from a sample of fixed size, before the listing
    orders = {name: make_order(name, sample, Known(metric=Metric.COSINE)) for name in ("random", "cluster")}
    with tempfile.TemporaryDirectory(prefix="rmvdb-bench-") as folder:

        def listing(name: str) -> tuple[int, float]:
            """Return the records listed, and the share of the time after which the first batch was there."""
            began, moments, listed = time.perf_counter(), list[float](), 0
            reads = order_spec(name).reads_records
            batches = batches_in_order(
                made.store, old, orders[name], batch=BATCH, folder=Path(folder), leave_out=lambda _: set(), vector=reads,
                whole=reads,
            )  # fmt: skip
            for ids in batches:
                listed += len(ids)
                moments.append(time.perf_counter() - began)
            return listed, moments[0] / moments[-1]

        for name in orders:
            assert listing(name)[0] == read(bare, old)
            ours, theirs = in_turns(lambda name=name: listing(name), lambda: read(bare, old), calls=2)  # type: ignore[misc]
            yield compared(f"listing, order {name}, {size}", ours, theirs, against="ids and vectors read once", target=1.5)
        yield counted(
            f"part of a listing until its first batch, order random, {size}", [listing("random")[1]], target=0.5, unit=""
        )


def read(client: MilvusClient, collection: str) -> int:
    """Read ids and vectors once. Return how many."""
    pages, found = client.query_iterator(collection, batch_size=1000, output_fields=["id", "vector"]), 0
    while page := pages.next():
        found += len(page)
    pages.close()
    return found
