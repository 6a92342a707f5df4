"""Galleries are made by the real commands, each kind once, and every test gets a copy of a folder."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.project import Project

#: The records of the gallery that `project` gives.
IDS = list(range(1, 401))
UPGRADE = ("upgrade", "--from", "v1", "--to", "v2", "--labels", "label")
#: With ψ and ρ, which `planned` has already.
TRAINED = (*UPGRADE, "--method", "rm")
#: Without training, for what depends on no method.
NAIVE = (*UPGRADE, "--method", "naive")


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project whose gallery `things` holds IDS at v1; nothing runs in it."""
    project = Project(tmp_path_factory.mktemp("template")).prepare(IDS, processes=True)
    project.stop_engine()
    return project.folder


@pytest.fixture(scope="session")
def planned_template(template: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, with the plan of an upgrade by TRAINED in its cache."""
    project = copy(template, tmp_path_factory.mktemp("planned") / "project")
    project.ask("plan", *TRAINED[1:])
    project.stop_engine()
    return project.folder


@pytest.fixture
def project(template: Path, tmp_path: Path) -> Iterator[Project]:
    """A project of the test's own: 400 records at v1, v2 registered."""
    project = copy(template, tmp_path / "project")
    yield project
    project.stop_engine()


@pytest.fixture
def planned(planned_template: Path, tmp_path: Path) -> Iterator[Project]:
    """A project of the test's own as `project`, where TRAINED goes on with a plan: ψ and ρ are trained once for all tests."""
    project = copy(planned_template, tmp_path / "project")
    yield project
    project.stop_engine()


def copy(template: Path, folder: Path) -> Project:
    """Another project that is as this one, in which nothing runs."""
    shutil.copytree(template, folder, ignore=shutil.ignore_patterns(".milvus.db.*", "calls-*"))
    return Project(folder)
