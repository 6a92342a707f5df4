"""Writes, the searches after them and filtered searches on a real server, against pymilvus that does the same."""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from pymilvus import MilvusClient

from rmvdb.engines.milvus import MilvusStore
from rmvdb.types import Index, Vectors
from tests.bench.speed.row import Options, Row, compared, in_turns
from tests.bench.speed.world import COLLECTIONS, SEARCH, World, world
from tests.support.milvus_server import MilvusServer

#: The tick of a server's clock as Milvus ships it. The tests' server has a faster one.
SETTINGS = {"proxy.timeTickInterval": 200, "common.session.ttl": 60}
#: Searches in the half second between two writes, and the pause before each.
SEARCHES, PAUSE = 20, 0.02
#: Calls of a row that waits for the clock are fewer.
FEWER = 8


def measure(options: Options) -> Iterator[Row]:
    """Measure on a server of its own."""
    index = Index(type="HNSW", params={"M": 16, "efConstruction": 200}, search=SEARCH)
    with (
        tempfile.TemporaryDirectory(prefix="rmvdb-bench-") as folder,
        MilvusServer(Path(folder), settings=SETTINGS) as server,
        ThreadPoolExecutor(2) as pool,
    ):
        store = MilvusStore(lambda: server.address, timeout=60.0)
        try:
            with world(store, options, index=index) as made:
                yield from _rows(made, Bare(server.address, pool), options)
        finally:
            store.close()


class Bare:
    """Both collections written and searched by pymilvus alone, with vectors that are ready."""

    def __init__(self, address: str, pool: ThreadPoolExecutor) -> None:
        self._client, self._pool = MilvusClient(uri=address), pool

    def upsert(self, id: int, new: Vectors, old: Vectors) -> None:
        """Write the record into both."""
        for collection, vector in zip(COLLECTIONS, (new, old), strict=True):
            self._client.upsert(collection, [{"id": id, "vector": vector}])

    def search(self, new: Vectors, old: Vectors, *, filter: str = "", level: str = "Session") -> object:
        """Search both at once. "Session" shows the last upsert into the collection."""
        older = self._pool.submit(self._one, COLLECTIONS[1], old, filter, level)
        return self._one(COLLECTIONS[0], new, filter, level), older.result()

    def _one(self, collection: str, query: Vectors, filter: str, level: str) -> object:
        return self._client.search(
            collection,
            data=[query],
            limit=10,
            filter=filter,
            output_fields=["id"],
            search_params={"metric_type": "COSINE", "params": dict(SEARCH)},
            consistency_level=level,
        )


def _rows(made: World, bare: Bare, options: Options) -> Iterator[Row]:
    size = f"{options.records:,} × {options.dim}, t {options.t:g}"
    new, old = made.queries[0], made.mapped[0]
    one = f"id == {options.records - 1}"  # in the old collection alone
    ours, theirs = in_turns(
        lambda: made.client.search(vector=new, model="v2", limit=10, filter=one),
        lambda: bare.search(new, old, filter=one, level="Bounded"),
        calls=options.calls,
    )
    yield compared(f"filter that one record matches p50, {size}", ours, theirs, against="both legs at once", target=1.10)
    ids = [itertools.cycle(range(options.records - 50, options.records)) for _ in range(2)]
    ours, theirs = in_turns(
        lambda: made.client.upsert({"id": next(ids[0]), "item": new}),
        lambda: bare.upsert(next(ids[1]), new, old),
        calls=max(2, options.calls // FEWER),
    )
    yield compared(f"upsert, two legs p50, {size}", ours, theirs, against="two upserts", target=1.5)
    ours, theirs = _between_writes(made, bare, options)
    name, against = f"search of a client that writes twice a second, {size}", "both legs at once, Session"
    yield compared(f"{name}, p50", ours, theirs, against=against, target=1.15)
    yield compared(f"{name}, p99", ours, theirs, against=against, target=1.30, share=0.99)


def _between_writes(made: World, bare: Bare, options: Options) -> tuple[list[float], list[float]]:
    """Write, then search for half a second, each side in turns. Return the milliseconds of each search."""
    numbers, rng = itertools.count(options.records), np.random.default_rng(5)

    def ours(new: Vectors, old: Vectors) -> Callable[[], object]:
        made.client.upsert({"id": next(numbers), "item": new})
        return lambda: made.client.search(vector=new, model="v2", limit=10)

    def theirs(new: Vectors, old: Vectors) -> Callable[[], object]:
        bare.upsert(next(numbers), new, old)
        return lambda: bare.search(new, old)

    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(max(2, options.calls // SEARCHES)):
        at = int(rng.integers(len(made.queries)))
        for side, write in enumerate((ours, theirs)):
            search = write(made.queries[at], made.mapped[at])
            for _ in range(SEARCHES):
                began = time.perf_counter()
                search()
                times[side].append(1000 * (time.perf_counter() - began))
                time.sleep(PAUSE)
    return times
