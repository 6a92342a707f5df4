"""A database of a Milvus server, named in the address: everything happens in it, and nothing in another one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pymilvus import MilvusClient

from tests.acceptance.conftest import NAIVE
from tests.support.milvus_server import MilvusServer
from tests.support.on_servers import clear
from tests.support.project import Project

pytestmark = pytest.mark.server
IDS = list(range(1, 101))


@pytest.fixture
def database(milvus_server: MilvusServer) -> Iterator[str]:
    """The address of a database of its own."""
    client = MilvusClient(milvus_server.address)
    client.create_database("photos")
    yield f"{milvus_server.address}/photos"
    client.drop_database("photos")  # refuses one that holds a collection: whatever an upgrade made is removed
    client.close()


def collections(address: str) -> list[str]:
    client = MilvusClient(address)
    found = client.list_collections()
    client.close()
    return sorted(found)


def test_an_upgrade_stays_in_its_database(tmp_path: Path, milvus_server: MilvusServer, database: str) -> None:
    elsewhere = collections(milvus_server.address)
    project = Project(tmp_path / "project", milvus=database, retry_for=60.0).prepare(IDS)
    try:
        models = project.models()
        before = collections(database)
        assert before
        project.ask(*NAIVE, "--until", "0.5")
        with project.client() as client:
            assert len(client.plan.legs) == 2
            client.upsert(models.item(1000))
            assert client.search(models.item(1000), limit=1)[0].id == 1000
            assert sorted(hit.id for hit in client.search(models.item(1), limit=200)) == [*IDS, 1000]
        project.ask(*NAIVE)
        project.ask("cleanup", "--yes")
        assert project.collections() == {"v2": 101}
        assert project.ask("doctor").stdout.count("FAIL") == 0
        assert set(collections(database)) - set(before)
        assert collections(milvus_server.address) == elsewhere
    finally:
        clear(project)
        for left in collections(database):  # the owners' marks
            MilvusClient(database).drop_collection(left)


def test_two_databases_hold_a_collection_of_one_name(tmp_path: Path, milvus_server: MilvusServer, database: str) -> None:
    """Each is the gallery of a project of its own, and neither owns the other's."""
    here, there = (
        Project(tmp_path / name, milvus=place, retry_for=60.0)
        for name, place in (("here", milvus_server.address), ("there", database))
    )
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


def test_a_database_that_does_not_exist_is_named(tmp_path: Path, milvus_server: MilvusServer) -> None:
    project = Project(tmp_path, milvus=f"{milvus_server.address}/nowhere")
    project.ask("init")
    said = project.ask("doctor", code=1).stdout
    assert "nowhere" in said
    assert "create" in said
