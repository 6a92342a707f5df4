"""When a worker that keeps to a window may work."""

from __future__ import annotations

import datetime as dt
from types import SimpleNamespace

import pytest

from rmvdb import errors
from rmvdb.scheduler import Scheduler, Window


@pytest.mark.parametrize(
    ("expression", "clock", "is_open"),
    [
        ("0 1-6 * * *", "00:59", False),
        ("0 1-6 * * *", "01:00", True),
        ("0 1-6 * * *", "04:30", True),
        ("0 1-6 * * *", "06:59", True),
        ("0 1-6 * * *", "07:01", False),
        ("30 22 * * *", "23:29", True),
        ("30 22 * * *", "23:31", False),
        (None, "12:00", True),
    ],
)
def test_a_window_is_open_for_one_hour_from_each_firing(expression: str | None, clock: str, is_open: bool) -> None:
    now = dt.datetime.fromisoformat(f"2026-03-04T{clock}").astimezone()
    assert Window(expression).is_open(now) is is_open


def test_a_gallery_that_cannot_go_on_keeps_no_worker_from_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    said, worked = list[str](), list[str]()
    app = SimpleNamespace(worker=lambda: None)
    scheduler = Scheduler(app, galleries=(), window=Window(None), say=said.append)  # type: ignore[arg-type]

    def work(gallery: str, upgrade: int) -> None:
        worked.append(gallery)
        if gallery == "a":
            raise errors.WrongPhase("1 record is quarantined")

    monkeypatch.setattr(scheduler, "_upgrades", lambda: {"a": 1, "b": 2})
    monkeypatch.setattr(scheduler, "_work", work)
    scheduler._stop.set()  # nothing is waited for between two looks
    scheduler._step()
    scheduler._step()
    assert worked == ["a", "b", "a", "b"]
    assert said == ["1 record is quarantined"]  # once
