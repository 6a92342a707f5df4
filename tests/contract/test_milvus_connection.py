"""Connections to a Milvus that is slow, killed, moved or not there."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rmvdb.engines import lite
from rmvdb.engines.milvus import MilvusStore
from rmvdb.errors import EngineError, EngineUnavailable, LeaseLost
from tests.support.engines import lite_only
from tests.support.milvus_server import MilvusServer, unavailable
from tests.support.records import (
    FLAT,
    filled,
    plain,
    stacked,
    vectors_of,
)


def test_pymilvus_is_not_loaded_before_it_is_needed() -> None:
    program = (
        "import sys; from rmvdb.engines import faiss, lite, milvus; sys.exit('pymilvus' in sys.modules or 'faiss' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_threads_that_use_pymilvus_first_do_not_load_scipy_side_by_side() -> None:
    """One of them failed: "partially initialized module 'scipy.sparse._lil'"."""
    program = """
import sys, threading, time
import scipy.sparse
from pymilvus.client.utils import SciPyHelper
from rmvdb.engines.milvus import driver

inside, most, looked, together = 0, 0, SciPyHelper._init, threading.Barrier(16)

def init():
    global inside, most
    if not SciPyHelper._checked:
        inside += 1
        most = max(most, inside)
        time.sleep(0.1)
        looked()
        inside -= 1

SciPyHelper._init = init

def use():
    together.wait()
    driver.pymilvus()
    SciPyHelper.is_scipy_sparse([1.0])

threads = [threading.Thread(target=use) for _ in range(16)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
sys.exit(most != 1)
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_pymilvus_loads_scipy_only_for_a_program_that_uses_it() -> None:
    program = """
import sys
from rmvdb.engines.milvus import driver

driver.pymilvus()
from pymilvus.client.utils import SciPyHelper

assert not SciPyHelper.is_scipy_sparse([1.0])
assert "scipy.sparse" not in sys.modules
from scipy.sparse import csr_matrix

assert SciPyHelper.is_scipy_sparse(csr_matrix([[1.0]]))
assert not SciPyHelper.is_scipy_sparse([1.0])
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_a_refused_call_leaves_no_traceback_in_the_log(
    milvus_store: MilvusStore, collection: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.DEBUG, "rmvdb"), pytest.raises(EngineError):
        milvus_store.count(collection)
    assert "Traceback" not in caplog.text + "".join(capfd.readouterr())


@lite_only
def test_a_connection_to_lite_is_not_pinged(milvus_store: MilvusStore) -> None:
    """Lite ends one that is, with two lines on the output for errors."""
    milvus_store.version()
    program = "import sys, rmvdb.engines.milvus; rmvdb.engines.milvus.MilvusStore(lambda: sys.argv[1]).version()"
    traced = os.environ | {"GRPC_TRACE": "http_keepalive", "GRPC_VERBOSITY": "info"}
    words = [sys.executable, "-c", program, milvus_store._connection.place]
    done = subprocess.run(words, check=True, capture_output=True, text=True, env=traced)
    assert "Tracers: http_keepalive" in done.stderr
    assert "keepalive ping" not in done.stderr.lower()


def test_an_engine_that_is_not_there_is_given_up_in_time() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        place = f"http://127.0.0.1:{closed.getsockname()[1]}"
        store = MilvusStore(lambda: place, patience=3.0)
        started = time.monotonic()
        with pytest.raises(EngineUnavailable, match=f"Milvus at {place} cannot be reached .*see that it runs"):
            store.version()
        assert 2.0 < time.monotonic() - started < 40.0


def test_an_engine_that_never_answers_is_given_up_in_time() -> None:
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen()
        place = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        started = time.monotonic()
        with pytest.raises(EngineUnavailable, match=r"cannot be reached|no answer"):
            MilvusStore(lambda: place, patience=3.0, timeout=1.0).exists("any")
        assert time.monotonic() - started < 40.0


def test_the_address_is_asked_again_when_the_engine_has_moved(tmp_path: Path) -> None:
    files = [tmp_path / "one.db", tmp_path / "two.db"]
    place, asked = files[0], list[str]()

    def address() -> str:
        asked.append(lite.address(place, idle=1.0))
        return asked[-1]

    try:
        store = MilvusStore(address, staleness=1.5)
        assert store.staleness == 1.5
        store.create(plain("here"), FLAT)
        assert store.exists("here")
        before, place = len(asked), files[1]
        store.close()
        assert (store.exists("here"), len(asked) > before) == (False, True)
        store.close()
    finally:
        for file in files:
            lite.release(file)


@pytest.mark.server
def test_a_server_that_is_killed_is_waited_for(own_milvus_server: MilvusServer, collection: str) -> None:
    store = MilvusStore(lambda: own_milvus_server.address, patience=240.0)
    records = filled(store, collection, 30)
    own_milvus_server.stop(kill=True)
    with ThreadPoolExecutor() as pool:
        # The server starts in this thread: its death signal would come with the end of another one.
        waiting = pool.submit(store.search, collection, vectors_of(1), limit=30, strong=True)
        own_milvus_server.start()
        found = waiting.result()[0]
        assert {hit.id for hit in found} == {record.id for record in records}
        assert store.count(collection) == 30
        own_milvus_server.stop(kill=True)
        over = threading.Event()
        # Its lease ends while the server is away: no attempt of the write may leave any more.
        late = pool.submit(store.upsert, collection, [replace(records[0], id=99)], permit=_until(over))
        time.sleep(0.3)
        over.set()
        own_milvus_server.start()
        with pytest.raises(LeaseLost):
            late.result()
    assert store.get(collection, [99]) == []
    store.close()


def _until(over: threading.Event) -> Callable[[], None]:
    def permit() -> None:
        if over.is_set():
            raise LeaseLost("over")

    return permit


@pytest.fixture(scope="module")
def slow_clock_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MilvusStore]:
    """A server whose clock ticks every two seconds, so that it shows what waits for it."""
    if reason := unavailable():
        pytest.skip(reason)
    settings = {"proxy.timeTickInterval": 2000, "common.session.ttl": 60}
    with MilvusServer(tmp_path_factory.mktemp("milvus") / "slow", settings=settings) as server:
        store = MilvusStore(lambda: server.address)
        yield store
        store.close()


@pytest.mark.server
def test_a_moment_is_waited_for_once_and_a_strong_search_waits_each_time(slow_clock_store: MilvusStore, collection: str) -> None:
    records = filled(slow_clock_store, collection)
    query = stacked(records[:1])

    def seconds(**options: Any) -> float:
        began = time.monotonic()
        slow_clock_store.search(collection, query, limit=5, **options)
        return time.monotonic() - began

    slow_clock_store.delete(collection, [records[1].id])
    moment = slow_clock_store.moment()
    seconds(after=moment)
    assert sum(seconds(after=moment) for _ in range(5)) < sum(seconds(strong=True) for _ in range(5)) / 3
    assert records[1].id not in [hit.id for hit in slow_clock_store.search(collection, query, limit=60, after=moment)[0]]


@pytest.mark.server
def test_the_pages_of_a_scan_that_reads_ahead_do_not_wait_for_the_clock_one_by_one(
    slow_clock_store: MilvusStore, collection: str
) -> None:
    records = filled(slow_clock_store, collection)
    slow_clock_store.delete(collection, [records[0].id])
    began = time.monotonic()
    pages = list(slow_clock_store.scan(collection, fields=None, vector=True, page=5, ahead=True))
    assert time.monotonic() - began < 8 * 2.0  # 12 pages
    assert [len(page) for page in pages] == [5] * 11 + [4]
    assert sorted(record.id for record in records[1:]) == [record.id for page in pages for record in page]
    assert [record.id for record in next(slow_clock_store.scan(collection, vector=True, page=5, ahead=True))] == [
        r.id for r in pages[0]
    ]


def test_an_engine_that_is_not_there_tells_no_moment_and_is_not_waited_for() -> None:
    store, began = MilvusStore(lambda: "http://127.0.0.1:1", patience=60.0), time.monotonic()
    assert store.moment() == 0
    assert time.monotonic() - began < 20


@pytest.mark.server
def test_a_wrong_token_is_named_at_once(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue("milvus_server")  # skips if there can be none
    settings = {"common.security.authorizationEnabled": "true", "common.session.ttl": 60}
    with MilvusServer(tmp_path / "milvus", settings=settings) as server:
        good = MilvusStore(lambda: server.address, token="root:Milvus")
        assert good.exists("any") is False
        good.close()
        started = time.monotonic()
        with pytest.raises(EngineError, match=r"refused the token.*correct milvus.token"):
            MilvusStore(lambda: server.address, token="root:wrong", patience=120.0).exists("any")
        assert time.monotonic() - started < 60.0
