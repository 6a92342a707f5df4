"""An older rmvdb meets a registry that a newer release has upgraded: it says so, and touches nothing."""

from __future__ import annotations

import sqlite3
import sys
from contextlib import closing
from pathlib import Path

import pytest

from rmvdb import errors
from rmvdb.cli import main as cli
from rmvdb.registry import schema
from tests.support.project import Project

sys.path.insert(0, str(Path(__file__).parents[2] / "docs"))
import generate

VERSIONS = ("--from", "v1", "--to", "v2")
#: The arguments of each command that needs some.
ARGUMENTS: dict[str, tuple[str, ...]] = {
    "model add": ("v3", "--embedder", "models:v3"),
    "model remove": ("v2",),
    "gallery add": ("more", "--model", "v1"),
    "gallery source": ("things", "call:models:items"),
    "gallery take": ("things", "--from-lost-registry", "--yes"),
    "gallery remove": ("things", "--yes"),
    "simulate": VERSIONS,
    "plan": VERSIONS,
    "upgrade": VERSIONS,
    "throttle": ("--rate", "5"),
    "cleanup": ("--yes",),
    "gc": ("--yes",),
    "quarantine drop": ("1", "--yes"),
    "quarantine retry": ("1",),
    "queries clear": ("--yes",),
    "search": ("anything",),
}
COMMANDS = [name.removeprefix("rmvdb ") for name, _ in generate.leaves(cli.main)]


@pytest.fixture(params=["only the revision", "a column, too"])
def newer(request: pytest.FixtureRequest, project: Project) -> Project:
    """A registry that a newer release has upgraded."""
    with closing(sqlite3.connect(project.folder / ".rmvdb" / "registry.sqlite")) as database:
        database.execute(f"UPDATE {schema.REVISION_TABLE} SET version_num = '9999'")
        if request.param == "a column, too":
            database.execute("ALTER TABLE clock RENAME COLUMN back TO backward")
        database.commit()
    return project


def contents(project: Project) -> list[str]:
    with closing(sqlite3.connect(project.folder / ".rmvdb" / "registry.sqlite")) as database:
        return list(database.iterdump())


def test_every_command_refuses_and_changes_nothing(newer: Project) -> None:
    assert set(ARGUMENTS) <= set(COMMANDS)
    before = contents(newer)
    for name in COMMANDS:
        if name == "worker":
            continue  # below
        done = newer.ask(*name.split(), *ARGUMENTS.get(name, ()), code=1)
        assert "at revision 9999, which this rmvdb does not know" in done.stderr + done.stdout, name
        assert "install the newer release" in done.stderr + done.stdout, name
        assert contents(newer) == before, name
    with pytest.raises(errors.SchemaOutdated, match="install the newer release"):
        newer.client()


def test_a_worker_ends_so_that_its_supervisor_sees_it(newer: Project) -> None:
    assert "install the newer release" in newer.run("worker", code=1, timeout=60).stderr


def test_a_worker_that_waits_for_work_ends_at_the_upgrade_of_the_schema(project: Project) -> None:
    worker = project.start("worker")
    assert worker.stdout is not None
    assert "worker started" in worker.stdout.readline()
    with closing(sqlite3.connect(project.folder / ".rmvdb" / "registry.sqlite", timeout=30)) as database:
        database.execute(f"UPDATE {schema.REVISION_TABLE} SET version_num = '9999'")
        database.commit()
    _, trouble = worker.communicate(timeout=60)
    assert worker.returncode == 1
    assert "install the newer release" in trouble
