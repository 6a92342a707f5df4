"""The gate between the writes and searches of many processes: no record is missed, and a full disk loses none."""

from __future__ import annotations

import functools
import os
import shutil
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from rmvdb.engines import lite
from rmvdb.engines.lite import locks
from rmvdb.engines.milvus import MilvusStore
from rmvdb.errors import DiskFull
from rmvdb.types import Index, Record
from tests.support.lite_processes import SCHEMA
from tests.support.small_disk import on_small_disk
from tests.support.spawned import run_spawned

pytestmark = pytest.mark.skipif(not Path("/proc/self").exists(), reason="looks at processes through /proc, which is Linux's")


def test_a_search_never_misses_a_record_that_is_being_replaced(path: Path) -> None:
    store = MilvusStore(functools.partial(lite.address, path, idle=5.0), gate=functools.partial(lite.gate, path, patience=60.0))
    store.create(SCHEMA, Index(type="FLAT"))
    vectors = np.random.default_rng(0).normal(size=(300, SCHEMA.dim)).astype(np.float32)
    store.upsert("c", [Record(id=id, vector=vector) for id, vector in enumerate(vectors)])
    stop = threading.Event()

    def replace() -> None:
        while not stop.is_set():
            store.upsert("c", [Record(id=id, vector=vectors[id]) for id in range(50)])

    writer = threading.Thread(target=replace)
    writer.start()
    try:
        found = [len(hits) for _ in range(60) for hits in store.search("c", vectors[:5], limit=300)]
        known = [len(store.get("c", list(range(50)))) for _ in range(20)]
    finally:
        stop.set()
        writer.join()
    assert set(found) == {300}
    assert set(known) == {50}
    store.close()


#: Replaces records on a disk that is nearly full, then lets Lite read its file again.
NEARLY_FULL = """
import functools, os, sys, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import numpy as np
from rmvdb.engines import lite
from rmvdb.errors import DiskFull
from rmvdb.engines.milvus import MilvusStore
from rmvdb.types import Field, IdType, Index, Metric, Record, Schema

path = Path(sys.argv[1]) / "x.db"
store = MilvusStore(functools.partial(lite.address, path, idle=1.0), gate=functools.partial(lite.gate, path, patience=60.0))
schema = Schema(collection="c", dim=4, metric=Metric.L2, id_type=IdType.INT64, dynamic=True)
store.create(schema, Index(type="FLAT"))
records = [Record(id=id, vector=np.full(4, id, np.float32), fields={"n": 0}) for id in range(1000)]
store.upsert("c", records)
with (path.parent / "filler").open("wb", buffering=0) as file:
    try:
        while file.write(bytes(65536)):
            pass
    except OSError:
        pass
    file.truncate(file.tell() - 34 * 2**20)


def replace(at):
    long = {"n": 1, "text": os.urandom(15_000).hex()}
    try:
        store.upsert("c", [Record(id=each.id, vector=each.vector, fields=long) for each in records[at : at + 200]])
    except DiskFull as exc:
        return str(exc)
    return "ok"


with ThreadPoolExecutor(5) as pool:  # of those that wait for one another each takes some of what is free
    print(*pool.map(replace, range(0, 1000, 200)), sep="\\n")
(path.parent / "filler").unlink()
store.close()
lite.release(path)
time.sleep(4.0)
again = MilvusStore(functools.partial(lite.address, path, idle=1.0))
print(len(again.get("c", list(range(1000)))), again.count("c"))
"""


def test_a_replacement_on_a_disk_that_is_nearly_full_loses_nothing(tmp_path: Path) -> None:
    *refused, left = on_small_disk(tmp_path, "64m", NEARLY_FULL).splitlines()
    said = f"The disk that holds {tmp_path}/x.db has less than 32 MiB free; make room, then write again"
    assert set(refused) == {"ok", said}
    assert refused.count(said) >= 3
    assert left == "1000 1000"


def test_a_process_suspended_inside_the_gate_delays_others_only_shortly(path: Path) -> None:
    with lite.gate(path, alone=False):
        began = time.monotonic()
        with lite.gate(path, alone=True, patience=0.3):
            assert 0.25 < time.monotonic() - began < 15.0
    began = time.monotonic()
    with lite.gate(path, alone=True), lite.gate(path, alone=False, patience=0.1):
        assert time.monotonic() - began < 15.0


def test_a_writer_without_the_gate_needs_room_for_others_too(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "ROOM", shutil.disk_usage(path.parent).free // 4)
    with lite.gate(path, alone=True):
        pass
    with lite.gate(path, alone=False), pytest.raises(DiskFull, match="make room"), lite.gate(path, alone=True, patience=0.1):
        pass


def _fork_inside(file: Path) -> None:
    with lite.gate(file, alone=True):
        child = os.fork()
        if not child:
            signal.pause()
    began = time.monotonic()
    try:
        with lite.gate(file, alone=True, patience=30.0):
            assert time.monotonic() - began < 15.0
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_process_that_was_forked_while_a_thread_was_inside_the_gate_does_not_close_it(tmp_path: Path) -> None:
    run_spawned(_fork_inside, tmp_path / "x.db", seconds=120)
