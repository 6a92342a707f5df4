"""Two folders, each with its own `rmvdb init`, and one collection: every command of the second says which registry owns it."""

from __future__ import annotations

from pathlib import Path

import pytest

from rmvdb.errors import NotOwner
from rmvdb.registry.mark import Owner, mark_of
from rmvdb.timing import WRITE_LASTS
from tests.acceptance.conftest import IDS, NAIVE
from tests.support.project import Project


@pytest.fixture
def stranger(project: Project, tmp_path: Path) -> Project:
    """A folder whose rmvdb.toml names the same engine, and a registry of its own."""
    other = Project(tmp_path / "stranger", milvus=str(project.folder / ".rmvdb" / "milvus.db"))
    other.ask("init")
    other.ask("model", "add", "v1", "--embedder", "models:v1", "--classifier", "models:Classifier")
    other.ask("model", "add", "v2", "--embedder", "models:v2")
    return other


def collection_of(project: Project) -> str:
    return str(project.json("gallery", "show", "things")["collections"][0]["name"])


def adopt(project: Project, collection: str) -> tuple[str, ...]:
    return ("gallery", "add", "things", "--model", "v1", "--source", "call:models:items", "--collection", collection)


def found(project: Project) -> int:
    with project.client() as client:
        return len(client.search(project.models().item(1), limit=len(IDS) + 10))


def test_of_two_folders_that_adopt_one_collection_the_second_is_refused_and_the_first_upgrades_whole(
    project: Project, stranger: Project
) -> None:
    """Without this, both upgrades ended with 0, and each application found half of the records."""
    collection = collection_of(project)
    refused = stranger.ask(*adopt(stranger, collection), code=2).stderr
    with project.opened() as app:
        for part in (collection, "another registry", "registry.sqlite", "by host", "gallery take things --from-lost-registry"):
            assert part in refused
        marked = app.registry.identity()
    project.ask(*NAIVE, "--until", "0.5", "--execute")
    stranger.ask(*adopt(stranger, collection), code=2)
    project.ask(*NAIVE, "--execute")
    assert found(project) == len(IDS)
    owners = [line for line in project.ask("doctor").stdout.splitlines() if "owner" in line]
    assert owners == [f"ok    gallery things: owner: owned by sqlite:///{project.folder}/.rmvdb/registry.sqlite"]
    project.ask("cleanup", "--yes")
    with project.opened() as app:
        assert not app.store.exists(mark_of(collection))
        held = collection_of(project)
        mark = Owner(app.registry, app.store).read(held)
        assert mark is not None
        assert mark.owner == marked


def test_a_gallery_of_an_older_rmvdb_is_marked_by_db_upgrade_and_belongs_to_the_first_that_marks_it(
    project: Project, stranger: Project
) -> None:
    collection = collection_of(project)
    with project.opened() as app:
        app.store.drop(mark_of(collection))
    project.ask("db", "upgrade")
    stranger.ask(*adopt(stranger, collection), code=2)
    with project.opened() as app:
        app.store.drop(mark_of(collection))
    stranger.ask(*adopt(stranger, collection))

    for words in (NAIVE, ("doctor",), ("gallery", "source", "things", "call:models:items")):
        told = project.ask(*words, code=None)
        assert told.returncode != 0
        assert "of another registry" in told.stdout + told.stderr
        assert str(stranger.folder) in told.stdout + told.stderr
    with pytest.raises(NotOwner):
        project.client()
    assert found(stranger) == len(IDS)
    stranger.ask("gallery", "remove", "things", "--yes")
    project.ask("doctor")
    project.ask(*NAIVE, "--execute")
    assert found(project) == len(IDS)


def test_a_gallery_is_taken_from_a_registry_that_is_lost(project: Project, stranger: Project) -> None:
    collection = collection_of(project)
    assert "--from-lost-registry" in stranger.ask("gallery", "take", "things", code=2).stderr
    assert "--yes" in stranger.run("gallery", "take", "things", "--from-lost-registry", code=2).stderr
    told = stranger.ask("gallery", "take", "things", "--from-lost-registry", "--yes").stdout
    assert f"waiting {WRITE_LASTS:g} s, until no write or batch that the lost registry knew of is under way" in told
    assert f"gallery things is taken: {collection} is this registry's" in told
    stranger.ask(*adopt(stranger, collection))
    stranger.ask(*NAIVE, "--execute")
    assert found(stranger) == len(IDS)
    with pytest.raises(NotOwner):
        project.client()
