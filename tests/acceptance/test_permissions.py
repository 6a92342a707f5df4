"""A registry of SQLite that this user may not write: every command names the file and says why."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.project import Project

#: root may write any file, unless it goes without that right.
AS_A_USER = ("setpriv", "--bounding-set=-dac_override,-dac_read_search", "--") if os.geteuid() == 0 else ()
COMMANDS = (
    "status", "doctor", "db check", "db upgrade", "init", "registry rebuild", "model list", "model remove v1", "gallery list",
    "gallery show", "gallery remove things --yes", "history", "pause", "resume", "throttle --rate 1", "verify", "cutover",
    "cleanup --yes", "rollback", "gc --dry-run", "quarantine list", "search words", "plan --from v1 --to v2",
    "upgrade --from v1 --to v2",
)  # fmt: skip
EACH = """
import sys
from rmvdb import cli
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


def each_command(project: Project, *commands: str) -> list[str]:
    """What each of these commands says and how it ends, by a user without rights of root; one process for all."""
    done = subprocess.run(
        [*AS_A_USER, sys.executable, "-c", EACH],
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
