"""The effect of small flushes on a bare Milvus 2.3.5, without rmvdb: why rmvdb flushes only rows that get an index.

    python tests/bench/small_flushes.py [ROUNDS]

Prints JSON lines: of flushed segments of several sizes, and of growing ones with and without a dynamic field, how many of the
records that match a filter a search misses; and how many acknowledged deletions and replacements are undone once the server was
killed and started again, with a flush every half second, with one at the beginning, and with none. On a real Milvus server, in a
network of its own.
"""

from __future__ import annotations

import itertools
import json
import logging
import random
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pymilvus import DataType, MilvusClient, MilvusException

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.support.milvus_server import MilvusServer

ROUNDS = int(sys.argv[1]) if len(sys.argv) > 1 else 4
SIZES = (400, 662, 663, 800, 1_023, 1_024, 2_500)
#: Rows that are not flushed.
GROWING = (2_500, 6_000, 10_000, 20_000)
RECORDS, SHARDS, DIM, GONE = 2_000, 40, 20, -1
#: Seconds between two flushes, and of writing in a round.
FLUSH, WRITING = 0.5, 10.0

_random = np.random.default_rng(0)


def main() -> None:
    """Print all tables."""
    logging.disable(logging.CRITICAL)  # pymilvus prints a traceback for each call that a starting server refuses
    with tempfile.TemporaryDirectory(prefix="rmvdb-bench-") as folder:
        with MilvusServer(Path(folder) / "segments") as server:
            client = MilvusClient(server.address)
            for size in SIZES:
                print(json.dumps({"segment": size} | missed(client, size)), flush=True)
            for dynamic, size in itertools.product((True, False), GROWING):
                found = missed(client, size, flushed=False, dynamic=dynamic)
                print(json.dumps({"growing": size, "dynamic field": dynamic} | found), flush=True)
        for flushes in ("often", "once", "never"):
            with MilvusServer(Path(folder) / flushes) as server:
                print(json.dumps({"flushes": flushes, "undone after each restart": undone(server, flushes)}), flush=True)


def missed(client: MilvusClient, size: int, *, flushed: bool = True, dynamic: bool = False) -> dict[str, Any]:
    """Return how many records a search with a filter misses, of how many that match it, in one segment."""
    _make(client, "segment", dynamic=dynamic)
    _write(client, "segment", range(size), 0)
    if flushed:
        _flush(client, size)
    lost = wanted = 0
    for shard in range(0, SHARDS, 4):
        there = client.query("segment", filter=f"shard == {shard}", output_fields=["id"], consistency_level="Strong")
        far = _random.normal(size=(1, DIM)).astype(np.float32)
        [hits] = client.search("segment", list(far), filter=f"shard == {shard}", limit=1_000, consistency_level="Strong")
        lost, wanted = lost + len(there) - len(hits), wanted + len(there)
    client.drop_collection("segment")
    return {"missed": lost, "of": wanted}


def _flush(client: MilvusClient, size: int) -> None:
    """Flush the segment, and wait until it is loaded, and indexed if it is large enough for that."""
    client.flush("segment")
    deadline = time.monotonic() + 120.0
    while not (loaded := client.list_loaded_segments("segment")) or (size >= 1_024 and not loaded[0].index_name):
        if time.monotonic() > deadline:
            raise TimeoutError("the segment was not loaded")
        time.sleep(0.5)


def undone(server: MilvusServer, flushes: str) -> list[int]:
    """Of each round how many records are not as the last acknowledged write left them, ten seconds after a restart."""
    client, chosen, truth, counts = MilvusClient(server.address), random.Random(5), dict.fromkeys(range(RECORDS), 0), []
    _make(client, "t")
    _write(client, "t", range(RECORDS), 0)
    for round in range(ROUNDS):
        over = threading.Event()
        flusher = threading.Thread(target=_flush_often, args=(server, over))
        if flushes == "once":
            client.flush("t")
        if flushes == "often":
            flusher.start()
        end, edition = time.monotonic() + WRITING, 1_000 * (round + 1)
        while time.monotonic() < end:
            ids, edition = chosen.sample(range(RECORDS), chosen.choice((1, 3, 20))), edition + 1
            if chosen.random() < 0.7:
                _write(client, "t", ids, edition)
                truth |= dict.fromkeys(ids, edition)
            else:
                client.delete("t", ids=ids)
                truth |= dict.fromkeys(ids, GONE)
            time.sleep(chosen.uniform(0.02, 0.15))
        over.set()
        if flushes == "often":
            flusher.join()
        server.stop(kill=True)
        server.start()
        client = MilvusClient(server.address)
        wrong = _differing(client, truth)
        counts.append(len(wrong))
        _write(client, "t", wrong, 0)
        truth |= dict.fromkeys(wrong, 0)
    return counts


def _make(client: MilvusClient, name: str, *, dynamic: bool = False) -> None:
    schema = MilvusClient.create_schema(auto_id=False, enable_dynamic_field=dynamic)
    schema.add_field("id", DataType.INT64, is_primary=True)
    schema.add_field("edition", DataType.INT64)
    schema.add_field("shard", DataType.INT64)
    schema.add_field("vector", DataType.FLOAT_VECTOR, dim=DIM)
    index = client.prepare_index_params()
    index.add_index("vector", index_type="AUTOINDEX", metric_type="COSINE")
    client.create_collection(name, schema=schema, index_params=index)


def _write(client: MilvusClient, name: str, ids: Sequence[int], edition: int) -> None:
    for start in range(0, len(ids), 250):
        part = ids[start : start + 250]
        vectors = _random.normal(size=(len(part), DIM)).astype(np.float32)
        pairs = zip(part, vectors, strict=True)
        rows = [{"id": id, "edition": edition, "shard": id % SHARDS, "vector": vector} for id, vector in pairs]
        client.upsert(name, rows)


def _flush_often(server: MilvusServer, over: threading.Event) -> None:
    client = MilvusClient(server.address)
    while not over.wait(FLUSH):
        client.flush("t")


def _differing(client: MilvusClient, truth: Mapping[int, int]) -> list[int]:
    """Return the records that differ ten seconds after the server answers again. For a moment it shows old versions."""
    deadline = time.monotonic() + 120.0
    while True:
        try:
            client.query("t", filter="id >= 0", limit=1, consistency_level="Strong")
            break
        except MilvusException:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)
    time.sleep(10.0)
    rows = client.query("t", filter="id >= 0", output_fields=["edition"], consistency_level="Strong", limit=16_000)
    found = {row["id"]: row["edition"] for row in rows}
    return [id for id, edition in truth.items() if found.get(id, GONE) != edition]


if __name__ == "__main__":
    main()
