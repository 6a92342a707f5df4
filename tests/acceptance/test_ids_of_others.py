"""Ids that another program wrote and that Milvus Lite cannot delete: refused before anything moves, or quarantined alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from pymilvus import MilvusClient

from rmvdb.app.wiring import App
from tests.acceptance.conftest import NAIVE
from tests.support.project import Project

IDS = [f"photo-{n}.jpg" for n in range(1, 61)]
#: As the name of a file may be.
THEIRS = ("O'Hara.jpg", "O\nHara.jpg")


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """A gallery with texts as ids."""
    return Project(tmp_path / "project").prepare(IDS)


def write_theirs(project: Project, opened: App, theirs: str) -> str:
    """Write the record as another program does. Return its collection."""
    held = str(project.json("gallery", "show")["collections"][0]["name"])
    opened.store.version()
    client = MilvusClient(uri=opened.store.place(), dedicated=True)
    vector = project.models().v1().embed([project.models().item(theirs)])[0]
    client.insert(held, [{"id": theirs, "vector": vector.tolist()}])
    client.close()
    return held


@pytest.mark.parametrize("theirs", THEIRS)
def test_an_id_that_cannot_be_deleted_is_refused_before_a_gallery_is_added_or_an_upgrade_begins(
    project: Project, theirs: str
) -> None:
    with project.opened() as opened:
        held = write_theirs(project, opened, theirs)
        done = project.ask(*NAIVE, code=2)
        assert f"Error: Collection '{held}' holds the id {theirs!r}" in done.stderr
        assert opened.store.count(held) == len(IDS) + 1
        assert "no upgrade yet" in project.ask("status").stdout
        project.ask("gallery", "remove", "things", "--yes")
        opened.store.version()
        add = ("gallery", "add", "again", "--model", "v1", "--collection", held, "--source", "call:models:items")
        assert f"holds the id {theirs!r}, which milvus-lite" in project.ask(*add, code=2).stderr


@pytest.mark.parametrize("theirs", THEIRS)
def test_such_an_id_that_comes_during_an_upgrade_is_quarantined_and_the_others_are_moved(project: Project, theirs: str) -> None:
    project.ask(*NAIVE, "--until", "0.5")
    with project.opened() as opened:
        held = write_theirs(project, opened, theirs)
        assert "1 record is quarantined" in project.ask(*NAIVE, code=1).stderr
        [aside] = project.json("quarantine", "list")
        assert aside["id"] == theirs
        assert "cannot write or delete the id" in aside["reason"]
        assert opened.store.count(held) == 1
        # It is there all the same: a cut-over does not take it for deleted.
        assert "quarantined" in project.ask("cutover", code=1).stderr
        with project.client() as client:
            assert [record.id for record in client.get([theirs])] == [theirs]
            assert {hit.id for hit in client.search(project.models().item(theirs), limit=100)} == {*IDS, theirs}
        project.ask("rollback")
        assert opened.store.count(held) == len(IDS) + 1
