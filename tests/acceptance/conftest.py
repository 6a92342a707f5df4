"""Galleries are made by the real commands, each kind once, and every test gets a copy of a folder."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.project import Project

#: The records of the gallery that `project` gives.
IDS = list(range(1, 401))
UPGRADE = ("upgrade", "--from", "v1", "--to", "v2", "--labels", "label")
#: With ψ and ρ, which `planned` has already. On a busy machine two minutes may be too short to show that ρ keeps the quality.
TRAINED = (*UPGRADE, "--method", "rm", "--minutes", "30")
#: Without training, for what depends on no method.
NAIVE = (*UPGRADE, "--method", "naive")


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project whose gallery `things` holds IDS at v1; nothing runs in it."""
    return once(tmp_path_factory, "template", lambda folder: Project(folder).prepare(IDS, processes=True))


@pytest.fixture(scope="session")
def planned_template(template: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, with the plan of an upgrade by TRAINED in its cache."""

    def plan(folder: Path) -> Project:
        project = copy(template, folder)
        project.ask("plan", *TRAINED[1:])
        return project

    return once(tmp_path_factory, "planned", plan)


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], Project]) -> Path:
    """Return a folder that nothing runs in, made by whichever process of this test run asks first."""
    own = factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / name
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            made = make(own / f"{name}-made")
            made.stop_engine()
            made.folder.rename(folder)
    return folder


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
    """Return a copy of this project, in which nothing runs."""
    shutil.copytree(template, folder, ignore=shutil.ignore_patterns(".milvus.db.*", "calls-*"))
    return Project(folder)


def everything_is_found(project: Project, *, missing: int = 0) -> None:
    """Expect that one search finds each of IDS once, but for so many."""
    with project.client() as client:
        hits = client.search(project.models().item(1), limit=len(IDS) + 10)
    assert len({hit.id for hit in hits}) == len(hits) == len(IDS) - missing
