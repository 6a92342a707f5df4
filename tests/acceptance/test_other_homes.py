"""An application on another machine: it has the registry, the engine, the models and their code, and an empty home."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import delete

from rmvdb.registry.registry import Registry
from rmvdb.registry.tables import ArtifactPartRow
from rmvdb.types import Hit
from tests.support.project import Project

IDS = list(range(1, 201))


@pytest.fixture
def first(tmp_path: Path) -> Iterator[Project]:
    """A machine where an upgrade by ψ, ρ and calibrations is half done."""
    project = Project(tmp_path / "first").prepare(IDS)
    project.ask("upgrade", "--from", "v1", "--to", "v2", "--labels", "label", "--method", "rm", "--until", "0.5", "--no-cutover")
    yield project
    project.stop_engine()


def another(first: Project) -> Project:
    """Return a machine with an empty home."""
    with first.opened() as opened:
        milvus, registry = opened.settings.milvus.uri, opened.settings.registry.url.get_secret_value()
    return Project(first.folder.parent / "another", milvus=milvus, registry=registry)


def answers(project: Project) -> list[list[Hit]]:
    models = project.models()
    with project.client() as client:
        return client.search([models.item(id) for id in IDS[:20]], limit=20, rescore=0)


def test_an_application_with_a_home_of_its_own_searches_as_the_others_do(first: Project) -> None:
    there = another(first)
    assert answers(there) == answers(first)
    kept = sorted((there.folder / ".rmvdb" / "artifacts").iterdir())
    assert kept
    for file in kept:
        file.write_bytes(b"altered")
    assert answers(there) == answers(first)


def test_db_upgrade_gives_the_registry_the_contents_that_it_lacks(first: Project) -> None:
    with first.opened() as opened:
        names = {path.stem for path in opened.settings.artifacts.iterdir()}
        used = {name for name in names if opened.registry.contents_of(name) is not None}
        assert used
        forget_contents(opened.registry)
        assert set(opened.registry.artifacts_without_contents()) == used
    first.ask("db", "upgrade")
    with first.opened() as opened:
        assert opened.registry.artifacts_without_contents() == []


def forget_contents(registry: Registry) -> None:
    """Remove the contents, as after an update from an earlier version."""
    with registry.engine.begin() as connection:
        connection.execute(delete(ArtifactPartRow))
