"""The operator's view: which process an upgrade waits for, which is silent, how far a list is, and a readable log."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update

from rmvdb.registry.tables import BatchRow
from rmvdb.upgrade.status import status
from tests.acceptance.conftest import NAIVE
from tests.support.inprocess import make
from tests.support.photos import claimed
from tests.support.project import Project
from tests.support.waiting import wait_until


def test_a_command_says_what_it_waits_for_and_how_long(tmp_path: Path) -> None:
    project = Project(tmp_path / "p", registry="postgresql+psycopg://me:secret@127.0.0.1:1/rmvdb", retry_for=7.0)
    began, process = time.monotonic(), project.start("status")
    assert process.stderr is not None
    first = process.stderr.readline()
    assert re.fullmatch(r"waiting for the registry at postgresql\+psycopg://me:\*+@127.0.0.1:1/rmvdb: [23] s of 7 s\n", first), (
        first
    )
    assert time.monotonic() - began < 30.0
    rest = process.communicate(timeout=120)[1]
    assert process.returncode == 1
    assert len([line for line in rest.splitlines() if line.startswith("waiting for")]) in (1, 2)  # after twice the time each
    assert "did not answer for 7 s" in rest


def test_a_worker_that_was_killed_is_shown_as_silent_and_since_when(tmp_path: Path) -> None:
    gallery = make(tmp_path)
    registry, row = gallery.registry, gallery.registry.gallery("texts")
    for name, ago in (("alive:1:a", 3.0), ("killed:2:b", 14.0)):
        registry.renew(name, gallery.upgrade.id, lease=60.0)
        with registry.engine.begin() as connection:
            connection.exec_driver_sql("UPDATE workers SET heard_at = heard_at - ? WHERE id = ?", (ago, name))
    now = status(registry, row)
    assert now.workers == ["alive:1:a"]
    assert now.silent in (["killed:2:b, silent since 14 s"], ["killed:2:b, silent since 15 s"])
    registry.close()


def test_the_time_left_is_until_it_is_as_far_as_was_asked_and_ends_there(tmp_path: Path) -> None:
    gallery = make(tmp_path)
    registry, upgrade = gallery.registry, gallery.upgrade
    registry.set_upgrade(upgrade.id, plan=replace(upgrade.plan, until=0.75), phase="serving both")
    registry.renew("alive:1:a", upgrade.id, lease=60.0)
    seen, begun = [], registry.now()
    for seconds in (9.0, 4.0, 0.0):
        batch = claimed(registry, upgrade, grace=60.0)
        registry.copied(batch, requeue=[], aside={})
        then = begun - seconds
        with registry.engine.begin() as connection:
            connection.execute(update(BatchRow).where(BatchRow.id == batch.id).values(copied_at=then))
        seen.append(status(registry, registry.gallery("texts")))
    assert [now.t for now in seen] == [0.25, 0.5, 0.75]
    assert seen[1].rate == pytest.approx(2.0, rel=0.05)  # of what was copied meanwhile
    assert seen[1].eta == pytest.approx(5.0, rel=0.05)  # for 10 records, not 20
    assert seen[2].eta is None  # though batches are in hand
    registry.close()


def test_status_shows_which_process_makes_the_work_list_and_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rmvdb.upgrade.work_list.NOTED_EVERY", 0.0)
    gallery = make(tmp_path)
    registry, upgrade, seen = gallery.registry, gallery.upgrade.id, list[str]()
    registry.discard_list(upgrade)
    registry.set_upgrade(upgrade, listed=False)
    real = registry.set_upgrade

    def note(number: int, **values: Any) -> None:
        real(number, **values)
        if "listing" in values:
            seen.append(status(registry, registry.gallery("texts")).doing)

    monkeypatch.setattr(registry, "set_upgrade", note)
    worker = gallery.worker()
    gallery.conductor().advance(registry.upgrade(upgrade), worker)
    by = worker.name.rsplit(":", 1)[0]
    assert seen[-1] == f"both collections are searched; listing: 40 of 40 records, by {by}"
    registry.close()


def test_a_line_of_a_workers_log_has_time_and_level_and_none_comes_twice(project: Project) -> None:
    project.ask(*NAIVE, "--detach")
    project.fault(v2={"raise_all": True})
    worker, lines = project.start("worker"), list[str]()
    assert worker.stdout is not None
    reader = threading.Thread(target=lambda: lines.extend(worker.stdout))  # type: ignore[arg-type]
    reader.start()
    try:
        wait_until(lambda: any(" ERROR " in line for line in lines))
        time.sleep(8.0)  # longer than until the next try
    finally:
        worker.send_signal(signal.SIGTERM)
        worker.wait(timeout=120)
        reader.join()
    parts = [re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (INFO|WARNING|ERROR) (.+)\n", line) for line in lines]
    assert all(parts), lines
    said = [part[2] for part in parts if part]
    assert said[0] == "worker started; Ctrl-C ends it"
    assert len(said) == len(set(said)), said


def test_garbage_is_shown_and_removed_only_with_consent(tmp_path: Path) -> None:
    project = Project(tmp_path / "p")
    project.ask("init")
    assert project.ask("gc").stdout == "nothing to remove\n"
    left = tmp_path / "p" / ".rmvdb" / "cache" / "plans" / "old"
    left.parent.mkdir(parents=True)
    left.write_text("a")
    assert project.json("gc", "--dry-run")["files"] == 0  # it is young
    os.utime(left, (1, 1))
    assert project.json("gc", "--dry-run")["files"] == 1
    assert "Nothing was removed; run the same command with --yes to agree" in project.ask("gc", code=2).stderr
    assert left.exists()
    assert project.ask("gc", "--yes").stdout.endswith("removed\n")
    assert not left.exists()
