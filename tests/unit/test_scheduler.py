"""When a worker that keeps to a window may work."""

from __future__ import annotations

import datetime as dt

import pytest

from rmvdb.scheduler import Window


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
