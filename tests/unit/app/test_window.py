"""When a worker that keeps to a window may work."""

from __future__ import annotations

import datetime as dt
from zoneinfo import ZoneInfo

import pytest

from rmvdb import errors
from rmvdb.app.window import Window


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
        ("", "12:00", True),
    ],
)
def test_a_window_is_open_for_one_hour_from_each_firing(expression: str | None, clock: str, is_open: bool) -> None:
    now = dt.datetime.fromisoformat(f"2026-03-04T{clock}").astimezone()
    assert Window(expression).is_open(now) is is_open


@pytest.mark.parametrize(
    ("days", "are"),
    [
        ("0", "sun"),
        ("7", "sun"),
        ("1", "mon"),
        ("1-5", "mon tue wed thu fri"),
        ("5-7", "fri sat sun"),
        ("0,3,6", "sun wed sat"),
        ("1-5/2", "mon wed fri"),
        ("*/2", "sun tue thu sat"),
        ("2/3", "tue fri"),
        ("MON-Wed,6", "mon tue wed sat"),
        ("fri-sun", "fri sat sun"),
        ("5-2", "fri sat sun mon tue"),
        ("sat-tue", "sat sun mon tue"),
        ("*", "sun mon tue wed thu fri sat"),
    ],
)
def test_days_of_the_week_follow_cron(days: str, are: str) -> None:
    window = Window(f"0 1 * * {days}")
    week = [dt.datetime.fromisoformat(f"2026-03-0{day}T01:30").astimezone() for day in range(1, 8)]
    assert {f"{day:%a}".lower() for day in week if window.is_open(day)} == set(are.split())


@pytest.mark.parametrize(
    "expression",
    ["0 1 * * 8", "0 1 * * 1-5/0", "0 1 * * someday", "0 1 30 2 *", "0 24 * * *", "60 1 * * *", "0 1 * *", "0 1 * * * 7"],
)
def test_an_expression_that_cron_does_not_know_or_that_never_fires_is_refused(expression: str) -> None:
    with pytest.raises(errors.UsageError, match="is not a cron expression"):
        Window(expression)


@pytest.mark.parametrize(
    ("expression", "day", "hours"),
    [
        ("0 1-6 * * *", "2026-03-29T00:00+01:00", (1, 6)),  # 02:00 becomes 03:00
        ("0 2 * * *", "2026-03-29T00:00+01:00", (2, 3)),
        ("0 1-6 * * *", "2026-10-25T00:00+02:00", (1, 8)),  # 03:00 becomes 02:00
        ("0 5 * * *", "2026-10-25T00:00+02:00", (6, 7)),
    ],
)
def test_a_window_keeps_to_the_clock_on_the_wall_on_the_days_when_it_is_set(
    expression: str, day: str, hours: tuple[int, int]
) -> None:
    window, midnight = Window(expression), dt.datetime.fromisoformat(day)
    window.zone = zone = ZoneInfo("Europe/Berlin")
    passed = [midnight + dt.timedelta(minutes=minutes) for minutes in range(5, 720, 10)]
    expected = [now for now in passed if midnight + dt.timedelta(hours=hours[0]) < now < midnight + dt.timedelta(hours=hours[1])]
    assert [now for now in passed if window.is_open(now.astimezone(zone))] == expected


def test_a_machine_whose_time_zone_cannot_be_read_needs_one_for_a_window_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown() -> ZoneInfo:
        raise KeyError("CET-1CEST,M3.5.0,M10.5.0/3")

    monkeypatch.setattr("rmvdb.app.window.get_localzone", unknown)
    assert Window(None).is_open()
    with pytest.raises(errors.UsageError, match="set TZ to a name such as Europe/Berlin"):
        Window("0 1-6 * * *")
