"""Progress as the stress run sees it, and the services that it may restart, stall and pause."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from rmvdb.types import Phase
from tests.stress import __main__ as command
from tests.stress import sqlite_clock
from tests.stress.engines import Breakable, File, LiteFile
from tests.stress.parts import PATIENCE, Broken
from tests.stress.run import Run
from tests.support.inprocess import make
from tests.support.project import Project


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run that has not begun, on a gallery in this process whose upgrade serves both."""
    gallery = make(tmp_path / "gallery")
    made = Run(
        project=Project(tmp_path / "project"),
        engine=LiteFile(tmp_path),
        registry=File(tmp_path),
        records=40,
        seconds=1.0,
        seed=1,
        instant_rollback=False,
        roll_back=False,
        method=None,
        say=lambda _: None,
    )
    registry: Any = gallery.registry
    real = registry.gallery
    registry.gallery = lambda name: real("texts")
    made.app = SimpleNamespace(registry=registry)  # type: ignore[assignment]
    return made


def test_only_what_has_processes_is_restarted_and_stalled(run: Run) -> None:
    assert run.breakable == [run.engine]
    assert not isinstance(run.registry, Breakable)


def test_a_verification_that_advances_is_progress_and_one_that_begins_again_is_not(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, upgrade = [1000.0], run._status()["upgrade"]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    for _ in range(2):  # while things are killed, nothing need come further
        assert run._goes_on()
        now[0] += PATIENCE
    run.over.set()
    for verified, goes_on in ((10, True), (20, True), (5, False), (20, False), (21, True)):
        now[0] += PATIENCE
        run.app.registry.set_upgrade(upgrade, verifying={"fields_compared": verified})
        assert run._goes_on() is goes_on


def test_a_paused_process_is_resumed(run: Run) -> None:
    row = run.app.registry.upgrade(run._status()["upgrade"])
    assert row.phase in (Phase.PLANNED, Phase.SERVING_BOTH)
    run._pause()
    assert run.app.registry.upgrade(row.id).paused
    run._resume()
    assert not run.app.registry.upgrade(row.id).paused
    assert (run.pauses, run.paused) == (1, None)


def test_a_run_that_could_not_begin_or_broke_is_not_a_success(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object, **__: object) -> NoReturn:
        raise Broken("the upgrade stands still")

    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setattr(command, "run", broken)
    monkeypatch.setattr(command, "unavailable", lambda: "no wheel of it")
    monkeypatch.setattr("sys.argv", ["stress", "--engine", "server", "--registry", "sqlite"])
    assert command.main() == 1
    assert capsys.readouterr().out == "no run on a server: no wheel of it\n"
    monkeypatch.setattr("sys.argv", ["stress", "--engine", "lite", "--registry", "sqlite"])
    assert command.main() == 1
    *_, said, last = capsys.readouterr().out.splitlines()
    assert (said, json.loads(last)["broken"]) == ("the upgrade stands still", 1)


def test_processes_in_the_folder_see_the_clock_of_sqlite_jump(tmp_path: Path) -> None:
    file = File(tmp_path)
    shutil.copy(sqlite_clock.__file__, tmp_path / "sitecustomize.py")
    asked = "import sqlite3; print(sqlite3.connect(':memory:').execute(\"select julianday('now')\").fetchone()[0])"

    def days() -> float:
        environment = os.environ | {"PYTHONPATH": str(tmp_path)}
        return float(subprocess.run([sys.executable, "-c", asked], env=environment, capture_output=True, check=True).stdout)

    before = days()
    file.jump(7200.0)
    assert days() - before == pytest.approx(2 / 24, abs=1e-3)
    file.jump(-600.0)
    assert days() - before == pytest.approx(110 / 24 / 60, abs=1e-3)
