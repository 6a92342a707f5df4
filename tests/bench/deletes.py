"""Measure what many deletions do to a search of the old collection, and what a compaction on request changes.

    python tests/bench/deletes.py [RECORDS]

A share t of the records of an indexed collection is deleted as batches do it, in steps, at some of which a compaction is asked
for. After each step both sides are timed in turns: a search of that collection by pymilvus, and a merged search by
rmvdb whose other collection stays as it is. Prints JSON lines: t, whether a compaction ran, the p50 of both, the records that a
search of ten finds of the ten nearest, and the seconds of the compaction. On a real Milvus server, in a network of its own.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from pymilvus import MilvusClient

sys.path.insert(0, str(Path(__file__).parents[2]))

from rmvdb.engines.milvus import MilvusStore
from rmvdb.types import Index, Record
from tests.bench.speed.row import Options, in_turns, quantile
from tests.bench.speed.world import COLLECTIONS, SEARCH, World, vectors, world
from tests.bench.speed.writes import SETTINGS
from tests.support.milvus_server import MilvusServer

RECORDS = int(sys.argv[1]) if len(sys.argv) > 1 else 50_000
DIM, CALLS, BATCH = 128, 80, 1000
#: Steps of a run: the share that is deleted by then, and whether a compaction is asked for there.
RUNS = ([(0.5, False), (0.9, False)], [(0.9, True)], [(0.5, True), (0.9, True)])
#: Seconds that a compaction may take.
LONGEST = 300.0


def main() -> None:
    """Every run, on a server of its own."""
    for number, run in enumerate(RUNS):
        folder = Path(tempfile.mkdtemp(prefix="rmvdb-bench-"))
        with MilvusServer(folder, settings=SETTINGS) as server:
            store = MilvusStore(lambda server=server: server.address, timeout=60.0)  # type: ignore[misc]
            index = Index(type="HNSW", params={"M": 16, "efConstruction": 200}, search=SEARCH)
            # The new collection holds a tenth as many others, from the beginning to the end.
            with world(store, Options(records=RECORDS, dim=DIM, t=0.0), index=index) as made:
                _fill_new(made)
                client = MilvusClient(uri=server.address)
                measured(made, client, {"run": number, "t": 0.0, "compacted": False}, deleted=0)
                gone = 0
                for t, compacts in run:
                    gone = _delete(made, client, gone, round(t * RECORDS))
                    row: dict[str, Any] = {"run": number, "t": t, "compacted": False}
                    measured(made, client, row, deleted=gone)
                    if compacts:
                        took = _compact(client)
                        measured(made, client, row | {"compacted": True, "compaction_s": round(took, 1)}, deleted=gone)
            store.close()
        shutil.rmtree(folder)


def measured(made: World, client: MilvusClient, row: dict[str, Any], *, deleted: int) -> None:
    """Time both sides in turns, and print a line."""
    queries, at = made.mapped, iter(range(10_000))

    def bare() -> None:
        _search(client, queries[next(at) % len(queries)])

    def ours() -> None:
        made.client.search(vector=made.queries[next(at) % len(queries)], model="v2", limit=10)

    merged, alone = in_turns(ours, bare, calls=CALLS)
    figures = {"old_p50_ms": round(quantile(alone, 0.5), 2), "merged_p50_ms": round(quantile(merged, 0.5), 2)}
    print(json.dumps(row | figures | {"recall_at_10": _recall(made, client, deleted)}), flush=True)


def _search(client: MilvusClient, query: Any) -> list[int]:
    [hits] = client.search(
        COLLECTIONS[1],
        data=[query],
        limit=10,
        search_params={"metric_type": "COSINE", "params": dict(SEARCH)},
        consistency_level="Bounded",
    )
    return [hit["id"] for hit in hits]


def _recall(made: World, client: MilvusClient, deleted: int) -> float:
    """Return the share of the ten nearest that are left which searches find."""
    left, found = vectors(RECORDS, DIM, seed=1)[deleted:], 0
    queries = made.mapped[:50]
    nearest = deleted + np.argsort(-(queries @ left.T), axis=1)[:, :10]
    for query, ids in zip(queries, nearest, strict=True):
        found += len(set(ids.tolist()).intersection(_search(client, query)))
    return round(found / nearest.size, 3)


def _fill_new(made: World) -> None:
    few = vectors(RECORDS // 10, DIM, seed=2)
    made.store.upsert(COLLECTIONS[0], [Record(id=RECORDS + at, vector=each, fields={}) for at, each in enumerate(few)])
    made.store.settle(COLLECTIONS[0])


def _delete(made: World, client: MilvusClient, first: int, end: int) -> int:
    for start in range(first, end, BATCH):
        made.store.delete(COLLECTIONS[1], list(range(start, min(start + BATCH, end))))
    client.flush(COLLECTIONS[1])
    time.sleep(6.0)  # until bounded searches show it
    return end


def _compact(client: MilvusClient) -> float:
    """Ask for a compaction, and wait until it has ended and its segments have an index and are searched."""
    began = time.monotonic()
    job = client.compact(COLLECTIONS[1])
    while client.get_compaction_state(job) != "Completed":
        assert time.monotonic() - began < LONGEST, "the compaction has not ended"
        time.sleep(0.5)
    while _unindexed(client):
        assert time.monotonic() - began < LONGEST, "no index has been built since"
        time.sleep(0.5)
    time.sleep(3.0)
    return time.monotonic() - began


def _unindexed(client: MilvusClient) -> bool:
    return bool(client.describe_index(COLLECTIONS[1], client.list_indexes(COLLECTIONS[1])[0]).get("pending_index_rows"))


if __name__ == "__main__":
    main()
