"""One filled gallery is made by the real commands, and every test gets a copy of its folder."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.project import Project

#: The records of the gallery that `project` gives.
IDS = list(range(1, 401))


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project whose gallery `things` holds IDS at v1; nothing runs in it."""
    project = Project(tmp_path_factory.mktemp("template")).prepare(IDS)
    project.stop_engine()
    return project.folder


@pytest.fixture
def project(template: Path, tmp_path: Path) -> Iterator[Project]:
    """A project of the test's own: 400 records at v1, v2 registered."""
    folder = tmp_path / "project"
    shutil.copytree(template, folder, ignore=shutil.ignore_patterns(".milvus.db.*", "calls-*"))
    project = Project(folder)
    yield project
    project.stop_engine()
