"""Merged searches of two legs on a real server, against pymilvus that searches the same two collections at once."""

from __future__ import annotations

import itertools
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pymilvus import MilvusClient

from rmvdb.engines.milvus import MilvusStore
from rmvdb.types import Index, Vectors
from tests.bench.speed import asynchronous
from tests.bench.speed.row import Options, Row, compared, in_turns, spread
from tests.bench.speed.world import COLLECTIONS, SEARCH, World, world
from tests.support.milvus_server import MilvusServer

THREADS = 16
BATCH = 64
#: Calls of a batch, and rounds of all threads, are fewer: each has as many queries.
FEWER = 8


def measure(options: Options) -> Iterator[Row]:
    """Measure on a server of its own."""
    index = Index(type="HNSW", params={"M": 16, "efConstruction": 200}, search=SEARCH)
    with tempfile.TemporaryDirectory(prefix="rmvdb-bench-") as folder, MilvusServer(Path(folder)) as server:
        store = MilvusStore(lambda: server.address, timeout=60.0)
        try:
            with world(store, options, index=index) as made, ThreadPoolExecutor(2 * THREADS) as pool:
                yield from _rows(made, Bare(server.address, pool), options)
        finally:
            store.close()


class Bare:
    """Both collections searched at once by pymilvus alone, with queries that are ready."""

    def __init__(self, address: str, pool: ThreadPoolExecutor) -> None:
        self._client, self._pool = MilvusClient(uri=address), pool

    def search(self, new: Vectors, old: Vectors) -> object:
        """Search the newer collection here and the older one in another thread."""
        older = self._pool.submit(self._one, COLLECTIONS[1], old)
        return self._one(COLLECTIONS[0], new), older.result()

    def _one(self, collection: str, queries: Vectors) -> object:
        return self._client.search(
            collection,
            data=list(queries),
            limit=10,
            output_fields=["id"],
            search_params={"metric_type": "COSINE", "params": dict(SEARCH)},
            consistency_level="Bounded",
        )


def _rows(made: World, bare: Bare, options: Options) -> Iterator[Row]:
    against, size = "both legs at once", f"{options.records:,} × {options.dim}, t {options.t:g}"
    ours, theirs = in_turns(*_sides(made, bare, 1), calls=options.calls)
    yield compared(f"search p50, {size}", ours, theirs, against=against, target=1.10)
    yield compared(f"search p99, {size}", ours, theirs, against=against, target=1.25, share=0.99)
    ours, theirs = in_turns(*_sides(made, bare, BATCH), calls=max(2, options.calls // FEWER))
    yield compared(f"{BATCH} queries a call p50, {size}", ours, theirs, against=against, target=1.10)
    yield _at_once(made, bare, options, f"{THREADS} threads, {size}", against)
    yield from asynchronous.rows(made, options, size)


def _sides(made: World, bare: Bare, batch: int) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return a call of each side. Both take the same queries, one after the other."""
    starts = [itertools.cycle(range(0, len(made.queries) - batch, 7)) for _ in range(2)]

    def ours() -> object:
        at = next(starts[0])
        return made.client.search(vector=made.queries[at : at + batch], model="v2", limit=10)

    def theirs() -> object:
        at = next(starts[1])
        return bare.search(made.queries[at : at + batch], made.mapped[at : at + batch])

    return ours, theirs


def _at_once(made: World, bare: Bare, options: Options, name: str, against: str) -> Row:
    """Let threads search as fast as they can, each side in turns. The rates are searches a second."""
    rates: tuple[list[float], list[float]] = ([], [])
    each = max(1, options.calls // FEWER)
    with ThreadPoolExecutor(THREADS) as callers:
        for _ in range(4):
            for side, call in enumerate(_sides(made, bare, 1)):
                began = time.perf_counter()
                list(callers.map(lambda _, call=call: [call() for _ in range(each)], range(THREADS)))
                rates[side].append(THREADS * each / (time.perf_counter() - began))
    ours, theirs = (sorted(side)[len(side) // 2] for side in rates)
    return Row(
        name=f"{name}, {os.cpu_count()} cores",
        ratio=ours / theirs,
        target=0.90,
        better="higher",
        unit="searches/s",
        ours=ours,
        ours_spread=spread(rates[0]),
        against=against,
        theirs=theirs,
        theirs_spread=spread(rates[1]),
    )
