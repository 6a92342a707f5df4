"""A registry of SQLite that this user may not write: every command names the file and says why."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.support.project import Project
from tests.support.small_disk import with_read_only

#: root may write any file, unless it goes without that right.
AS_A_USER = ("setpriv", "--bounding-set=-dac_override,-dac_read_search", "--") if os.geteuid() == 0 else ()
COMMANDS = (
    "status", "doctor", "db check", "db upgrade", "init", "registry rebuild", "model list", "model remove v1", "gallery list",
    "gallery show", "gallery remove things --yes", "history", "pause", "resume", "throttle --rate 1", "verify", "cutover",
    "cleanup --yes", "rollback", "gc --dry-run", "quarantine list", "queries export", "queries clear --yes", "search words",
    "plan --from v1 --to v2", "upgrade --from v1 --to v2",
)  # fmt: skip
EACH = """
import sys
from rmvdb.cli import main as cli
for line in sys.stdin:
    try:
        cli.main(line.split(), prog_name="rmvdb")
        code = 0
    except SystemExit as exc:
        code = exc.code
    print("ended", code, flush=True)
"""


def file_only(home: Path) -> Path:
    (home / "registry.sqlite").chmod(0o400)
    return home / "registry.sqlite"


def folder(home: Path) -> Path:
    home.chmod(0o500)
    return home


def missing_in_folder(home: Path) -> Path:
    (home / "registry.sqlite").unlink()
    return folder(home)


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such rights")
@pytest.mark.parametrize("take_away", [file_only, folder, missing_in_folder])
def test_a_registry_that_cannot_be_written_is_named_by_every_command(tmp_path: Path, take_away: Callable[[Path], Path]) -> None:
    project = Project(tmp_path / "project", retry_for=1.0)
    project.ask("init")
    for each in (home := project.folder / ".rmvdb").glob("registry.sqlite-*"):
        each.unlink()
    denied = take_away(home)
    # A rebuild looks for the manifest first.
    commands = [words for words in COMMANDS if (home / "registry.sqlite").exists() or words != "registry rebuild"]
    said = each_command(project, *commands)
    home.chmod(0o700)
    for words, told in zip(commands, said, strict=True):
        sentence = f"The registry {home}/registry.sqlite cannot be written: permission denied, this user may not write {denied};"
        assert sentence in told, (words, told)
        assert told.splitlines()[-1] == "ended 1", (words, told)


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such rights")
def test_a_home_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    project = Project(tmp_path / "project", retry_for=1.0)
    project.ask("init")
    (home := project.folder / ".rmvdb").chmod(0)
    said = each_command(project, "status", "doctor")
    home.chmod(0o700)
    assert all(f"Error: {home}/registry.sqlite cannot be looked at: permission denied;" in told for told in said), said


def test_a_registry_on_a_disk_that_is_mounted_read_only_is_named_by_every_command(tmp_path: Path) -> None:
    project = Project(tmp_path / "project", retry_for=1.0)
    project.ask("init")
    home = project.folder / ".rmvdb"
    for words, told in zip(COMMANDS, each_command(project, *COMMANDS, by=with_read_only(home)), strict=True):
        sentence = f"The registry {home}/registry.sqlite cannot be written: the disk of {home}/registry.sqlite is mounted"
        assert f"{sentence} read-only; mount it for writing, or set registry.url" in told, (words, told)
        assert told.splitlines()[-1] == "ended 1", (words, told)


def test_a_home_on_a_disk_that_is_mounted_read_only_is_named_by_the_commands_that_write_there(project: Project) -> None:
    """The registry is elsewhere. Commands that only read still work."""
    home, elsewhere = project.folder / ".rmvdb", project.folder / "elsewhere"
    elsewhere.mkdir()
    for name in ("registry.sqlite", "milvus.db"):
        (home / name).rename(elsewhere / name)
    told_where = f"RMVDB_REGISTRY__URL=sqlite:///{elsewhere}/registry.sqlite", f"RMVDB_MILVUS__URI={elsewhere}/milvus.db"
    commands = (
        "status", "search words", "model add v3 --embedder models:v2", "model remove v2",
        "plan --from v1 --to v2 --method naive", "model list",
    )  # fmt: skip
    status, search, add, remove, plan, models = each_command(project, *commands, by=[*with_read_only(home), "env", *told_where])
    assert status.endswith("ended 0")
    assert search.endswith("ended 0")
    for told in (add, remove):
        assert f"{home}/manifest.json could not be written (Read-only file system)" in told
        assert told.endswith("ended 1")
    assert f"{home}/cache" in plan
    assert "Read-only file system" in plan
    assert plan.endswith("ended 1")
    assert "v3" not in models  # the registry is never ahead of its manifest


def test_a_milvus_lite_file_on_a_disk_that_is_mounted_read_only_is_named(project: Project) -> None:
    (disk := project.folder / "disk").mkdir()
    (project.folder / ".rmvdb" / "milvus.db").rename(file := disk / "milvus.db")
    by = [*with_read_only(disk), "env", f"RMVDB_MILVUS__URI={file}"]
    for told in each_command(project, "search words", "gallery show things", by=by):
        assert f"Error: {file} cannot be used: Read-only file system ({disk}/" in told
        assert "; correct that or choose another path" in told
        assert told.endswith("ended 1")


def each_command(project: Project, *commands: str, by: Sequence[str] = AS_A_USER) -> list[str]:
    """Return the output and the exit code of each command, run by a user who is not root, in one process."""
    done = subprocess.run(
        [*by, sys.executable, "-c", EACH],
        cwd=project.folder,
        env=project.environment,
        input="\n".join(commands),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=True,
    )
    parts = done.stdout.split("ended ")
    return [f"{told}ended {after.split()[0]}" for told, after in itertools.pairwise(parts)]
