"""Stores on every engine: each test that asks for `store` runs over faiss, Milvus Lite 2.5 and 3 and a real Milvus server."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rmvdb.engines import lite
from rmvdb.engines.faiss import FaissStore
from rmvdb.engines.milvus import MilvusStore
from rmvdb.protocols import VectorStore
from tests.support import lite3
from tests.support.milvus_server import MilvusServer, unavailable
from tests.support.project import Project


@pytest.fixture(autouse=True)
def _no_command_outlives_its_test() -> Iterator[None]:
    yield
    Project.kill_started()


@pytest.fixture(scope="module")
def milvus_server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MilvusServer]:
    """The file's Milvus server; a test that stops it takes one of its own.

    Not the session's: it starts in 3 s, and takes a tenth of a core for as long as it does nothing.
    """
    # No test kills it. On a busy machine it may wait for its turn for longer than its sessions with etcd last.
    yield from _server(request, tmp_path_factory.mktemp("milvus"), settings={"common.session.ttl": 60})


@pytest.fixture
def own_milvus_server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MilvusServer]:
    """A Milvus server of the test's own, to be stopped and started."""
    yield from _server(request, tmp_path_factory.mktemp("milvus"))


def _server(request: pytest.FixtureRequest, folder: Path, **options: Any) -> Iterator[MilvusServer]:
    """Yield a Milvus server whose folder, of some 200 MB, stays only if a test, its start or its end failed."""
    if reason := unavailable():
        pytest.skip(reason)
    before = request.session.testsfailed
    with MilvusServer(folder, **options) as server:
        yield server
    if request.session.testsfailed == before:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def server_store(milvus_server: MilvusServer) -> Iterator[MilvusStore]:
    """A store on the file's Milvus server."""
    store = MilvusStore(lambda: milvus_server.address)
    yield store
    store.close()


@pytest.fixture(scope="session")
def lite_file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The session's Milvus Lite file."""
    path = tmp_path_factory.mktemp("lite") / "milvus.db"
    yield path
    lite.release(path)


@pytest.fixture(scope="session")
def lite_store(lite_file: Path) -> Iterator[MilvusStore]:
    """A store on the session's Milvus Lite file."""
    store = MilvusStore(functools.partial(lite.address, lite_file, idle=2.0))
    yield store
    store.close()


@pytest.fixture(scope="session")
def lite3_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MilvusStore]:
    """A store on a file of Milvus Lite 3."""
    with contextlib.ExitStack() as stack:
        try:
            place = stack.enter_context(lite3.served(tmp_path_factory.mktemp("lite3") / "milvus.db"))
        except (RuntimeError, subprocess.TimeoutExpired) as exc:
            pytest.skip(str(exc))
        store = MilvusStore(lambda: place)
        yield store
        store.close()


@pytest.fixture(scope="session")
def remote_store() -> Iterator[MilvusStore]:
    """A store on the engine that MILVUS_TEST_ADDRESS names, such as a newer Milvus."""
    address = os.environ["MILVUS_TEST_ADDRESS"]
    store = MilvusStore(lambda: address)
    yield store
    store.close()


@pytest.fixture(scope="session")
def faiss_store() -> FaissStore:
    """A store in this process."""
    return FaissStore()


_SERVER = pytest.param("server_store", marks=pytest.mark.server, id="server")
_LITE = pytest.param("lite_store", id="lite")
_LITE3 = pytest.param("lite3_store", id="lite3")
_FAISS = pytest.param("faiss_store", id="faiss")
_REMOTE = [pytest.param("remote_store", id="remote")] if "MILVUS_TEST_ADDRESS" in os.environ else []


@pytest.fixture(params=[_FAISS, _LITE, _LITE3, _SERVER, *_REMOTE])
def store(request: pytest.FixtureRequest) -> VectorStore:
    """A store on each engine in turn."""
    found: VectorStore = request.getfixturevalue(request.param)
    return found


@pytest.fixture(params=[_LITE, _LITE3, _SERVER, *_REMOTE])
def milvus_store(request: pytest.FixtureRequest) -> MilvusStore:
    """A store on each Milvus in turn."""
    found: MilvusStore = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def collection(request: pytest.FixtureRequest) -> Iterator[str]:
    """The name of a collection that is not there yet; it is dropped after the test from the test's store."""
    name = f"c_{uuid.uuid4().hex}"
    yield name
    for fixture in ("store", "milvus_store", "server_store", "lite_store"):
        if fixture in request.fixturenames:
            request.getfixturevalue(fixture).drop(name)
            return
