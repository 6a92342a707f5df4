"""Progress as the stress run sees it, and the services that it may restart, stall and pause."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
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
from tests.stress.truth import GONE, Truth, Verdict
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


@pytest.mark.parametrize(
    ("hits", "kind"),
    [
        ([(0, 0), (4, 2)], ""),
        ([(0, 0)], "lost"),
        ([(0, 0), (4, 2), (4, 2)], "duplicated"),
        ([(0, 0), (4, 0)], "stale_reads"),
        ([(0, 0), (4, 2), (8, 0)], "resurrected"),
    ],
)
def test_a_wrong_answer_is_counted(hits: list[tuple[int, int]], kind: str) -> None:
    truth, verdict = Truth(9, shards=4), Verdict()
    truth.read([{"begin": 1.0, "write": 1, "ids": [4], "edition": 2}, {"end": 2.0, "write": 1}], "writer")
    truth.read([{"begin": 1.0, "write": 2, "ids": [8], "edition": GONE}, {"end": 2.0, "write": 2}], "writer")
    truth.judge(0, hits, 3.0, 4.0, verdict, "searcher")
    counts = {name: getattr(verdict, name) for name in ("lost", "duplicated", "stale_reads", "resurrected")}
    assert counts == {name: int(name == kind) for name in counts}


@pytest.mark.parametrize("silent", [True, False])
def test_a_failed_search_is_excused_only_if_plain_searches_failed_too(run: Run, silent: bool) -> None:
    run.unanswered = [(9.0, 12.0)] if silent else []
    run._judge("searcher", {"failed": "no answer", "started": 10.0, "at": 11.0})
    assert (run.excused, run.verdict.failed_searches) == (int(silent), int(not silent))


def test_an_application_that_ends_by_itself_is_counted(run: Run) -> None:
    out = run.project.folder / "searcher-0.out"
    trace = 'Traceback (most recent call last):\n  File "x.py", line 1\n    boom()\n'
    handled = f"{trace}KeyError: 'handled'\n\nDuring handling of the above exception, another exception occurred:\n\n"
    out.write_text(f"a warning\n{handled}{trace}rmvdb.errors.EngineUnavailable: away\n{trace}KeyError: 'b'\n")
    over = threading.Thread(target=lambda: None)
    run._expect_no_crash(over)
    assert run.verdict.failed_searches == 1
    assert run.verdict.examples == ["failed_searches: searcher-0.out: KeyError: 'b'"]
    run.intrusions = 21
    with pytest.raises(Broken, match="0 were refused as such"):
        run._expect_no_crash(over)
