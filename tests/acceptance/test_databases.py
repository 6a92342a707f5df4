"""A database of a Milvus server, named in the address: everything happens in it, and nothing in another one."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from pymilvus import MilvusClient

from tests.acceptance.conftest import NAIVE
from tests.support.milvus_server import MilvusServer
from tests.support.on_servers import clear
from tests.support.project import Project
from tests.support.waiting import wait_until

pytestmark = pytest.mark.server
IDS = list(range(1, 101))


@pytest.fixture(scope="module")
def tcp(milvus_server: MilvusServer) -> Iterator[str]:
    """The server's http address, as users have one: the path of a Unix socket has no room for a database."""
    path, stop = milvus_server.address.removeprefix("unix:"), threading.Event()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_unix_connection(path)
        writers.extend((writer, there[1]))
        await asyncio.gather(copy(reader, there[1]), copy(there[0], writer))

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(2**16):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)  # connections that are open at the end
        server = await asyncio.start_server(relay, "127.0.0.1", 0)
        address.append(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        while not stop.is_set():
            await asyncio.sleep(0.1)
        server.close()
        for writer in writers:
            writer.close()
        await asyncio.gather(*(each.wait_closed() for each in writers), return_exceptions=True)

    address, writers = list[str](), list[asyncio.StreamWriter]()
    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    wait_until(lambda: bool(address))
    yield address[0]
    stop.set()
    thread.join()


@pytest.fixture
def database(tcp: str) -> Iterator[str]:
    """The address of a database of its own."""
    client = MilvusClient(tcp)
    client.create_database("photos")
    yield f"{tcp}/photos"
    client.drop_database("photos")  # refuses one that holds a collection: whatever an upgrade made is removed
    client.close()


def collections(address: str) -> list[str]:
    client = MilvusClient(address)
    found = client.list_collections()
    client.close()
    return sorted(found)


def test_an_upgrade_stays_in_its_database(tmp_path: Path, tcp: str, database: str) -> None:
    elsewhere = collections(tcp)
    project = Project(tmp_path / "project", milvus=database, retry_for=60.0).prepare(IDS)
    try:
        models = project.models()
        before = collections(database)
        assert before
        project.ask(*NAIVE, "--until", "0.5")
        with project.client() as client:
            assert len(client.plan.legs) == 2
            client.upsert({"id": 1000, "item": models.item(1000)})
            assert client.search(models.item(1000), limit=1)[0].id == 1000
            assert sorted(hit.id for hit in client.search(models.item(1), limit=200)) == [*IDS, 1000]
        project.ask(*NAIVE)
        project.ask("cleanup", "--yes")
        assert project.collections() == {"v2": 101}
        assert project.ask("doctor").stdout.count("FAIL") == 0
        assert set(collections(database)) - set(before)
        assert collections(tcp) == elsewhere
    finally:
        clear(project)
        for left in collections(database):  # the owners' marks
            MilvusClient(database).drop_collection(left)


def test_two_databases_hold_a_collection_of_one_name(tmp_path: Path, tcp: str, database: str) -> None:
    """Each is the gallery of a project of its own, and neither owns the other's."""
    here, there = (Project(tmp_path / name, milvus=place, retry_for=60.0) for name, place in (("here", tcp), ("there", database)))
    try:
        for project in (here, there):
            project.prepare(IDS)
        there.ask(*NAIVE)
        assert there.collections()["v2"] == 100
        assert here.collections() == {"v1": 100}
    finally:
        for project in (here, there):
            clear(project)
        for left in collections(database):
            MilvusClient(database).drop_collection(left)


def test_a_database_that_does_not_exist_is_named(tmp_path: Path, tcp: str) -> None:
    project = Project(tmp_path, milvus=f"{tcp}/nowhere")
    project.ask("init")
    project.ask("model", "add", "v1", "--embedder", "models:v1")
    said = project.ask("gallery", "add", "things", "--model", "v1", "--source", "call:models:items", code=1).stderr
    assert "no such database" in said
    assert f"{tcp}/nowhere" in said
