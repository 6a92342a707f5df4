"""rmvdb's own time in a search: a store that has its hits ready answers at once, so that the rest is rmvdb."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Any

from rmvdb.engines.faiss import FaissStore
from rmvdb.types import Hit, Index, Vectors
from tests.bench.speed.row import Options, Row, counted
from tests.bench.speed.world import COLLECTIONS, world


class Ready(FaissStore):
    """A store whose searches cost nothing: ten hits of each collection, five of them in both."""

    def search(self, collection: str, vectors: Vectors, **_: Any) -> list[list[Hit]]:
        """Return the same hits for each query."""
        return [HITS[collection]] * len(vectors)


def _hits(collection: str, ids: Sequence[int]) -> list[Hit]:
    return [Hit(id=id, distance=0.05 * at, leg=collection, raw=0.05 * at) for at, id in enumerate(ids)]


HITS = {name: _hits(name, range(start, start + 10)) for name, start in zip(COLLECTIONS, (0, 5), strict=True)}


def measure(options: Options) -> Iterator[Row]:
    """Measure whole calls of `client.search` with a vector, limit 10, two legs with ψ and calibrations."""
    with world(Ready(), options, index=Index(type="FLAT"), fill=False) as made:
        starts, took, worked = itertools.cycle(range(len(made.queries) - 1)), [], []
        for number in range(10 * options.calls):
            query = made.queries[next(starts)]
            began, spent = time.perf_counter(), time.process_time()
            made.client.search(vector=query, model="v2", limit=10)
            if number >= options.calls // 10:
                took.append(1e6 * (time.perf_counter() - began))
                worked.append(1e6 * (time.process_time() - spent))
    yield counted("own time of a search p50", took, target=100.0, unit="µs")
    # Of a processor, in all threads: on a busy machine the clock shows for the most part how long a thread waits for its turn.
    yield counted("own processor time of a search p50", worked, target=100.0, unit="µs")
    yield counted("own time of a search p99", took, target=250.0, unit="µs", share=0.99)
