"""How long a Milvus server shows nothing new after a restart: it reads again all that it had not flushed, time ticks included.

    python tests/bench/replay.py

20,000 records are moved from one collection to another by upserts and deletions, without a flush. Then the server is killed and
started, after different times. Prints, for each restart, the seconds until it takes calls, and from then until a read at Strong
of each collection is answered.
"""

from __future__ import annotations

import logging
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from pymilvus import DataType, MilvusClient

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.support.milvus_server import MilvusServer

RECORDS, STEP, DIM = 20_000, 250, 32
NAMES = ("old", "new")
#: Seconds without a call before a restart.
IDLE = (0.0, 60.0, 120.0)
LONGEST = 180.0


def make(client: MilvusClient, name: str) -> None:
    """Create an empty collection with an index."""
    schema = client.create_schema()
    schema.add_field("id", DataType.INT64, is_primary=True)
    schema.add_field("vector", DataType.FLOAT_VECTOR, dim=DIM)
    index = client.prepare_index_params()
    index.add_index("vector", index_type="HNSW", metric_type="COSINE", params={"M": 16, "efConstruction": 100})
    client.create_collection(name, schema=schema, index_params=index)


def put(client: MilvusClient, name: str, ids: range) -> None:
    """Write records."""
    vectors = np.random.default_rng(ids.start).random((len(ids), DIM), np.float32)
    client.upsert(name, [{"id": id, "vector": vector} for id, vector in zip(ids, vectors, strict=True)])


def shown_after(server: MilvusServer, name: str) -> float:
    """Return the seconds until a read at Strong is answered."""
    began = time.monotonic()
    while time.monotonic() < began + LONGEST:
        try:
            client = MilvusClient(uri=server.address, timeout=5)
            client.query(name, filter="", limit=1, consistency_level="Strong", timeout=5, retry_times=0)
            client.close()
            break
        except Exception:  # noqa: BLE001 (it is asked until it answers)
            time.sleep(0.2)
    return time.monotonic() - began


def restart(server: MilvusServer, after: str) -> None:
    """Kill the server, start it, and print how long it needs."""
    began = time.monotonic()
    server.stop(kill=True)
    server.start()
    up = time.monotonic() - began
    shown = [f"{name} {shown_after(server, name):.1f} s" for name in NAMES]  # in turn, so the first one's wait counts for both
    print(f"{after}: takes calls after {up:.1f} s; {', '.join(shown)}", flush=True)


def main() -> None:
    """Move the records, and restart the server again and again."""
    with tempfile.TemporaryDirectory(prefix="rmvdb-replay-") as folder, MilvusServer(Path(folder) / "milvus") as server:
        client = MilvusClient(uri=server.address)
        for name in NAMES:
            make(client, name)
        for first in range(0, RECORDS, STEP):
            put(client, "old", range(first, first + STEP))
        client.flush("old")
        restart(server, "written and flushed")
        client = MilvusClient(uri=server.address)
        for first in range(0, RECORDS, STEP):
            put(client, "new", range(first, first + STEP))
            client.delete("old", ids=list(range(first, first + STEP)))
        for idle in IDLE:
            time.sleep(idle)
            restart(server, f"moved, then idle for {idle:g} s")
        client = MilvusClient(uri=server.address)
        for name in NAMES:
            client.flush(name)
        restart(server, "both flushed")


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)  # pymilvus logs a traceback for each failed call
    main()
