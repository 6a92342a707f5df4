"""When a worker that keeps to a window may work."""

from __future__ import annotations

import datetime as dt
import threading
from types import SimpleNamespace
from zoneinfo import ZoneInfo

import pytest

from rmvdb import errors
from rmvdb.app.daemon import Scheduler, Window


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
        ("*", "sun mon tue wed thu fri sat"),
    ],
)
def test_days_of_the_week_are_those_of_cron(days: str, are: str) -> None:
    window = Window(f"0 1 * * {days}")
    week = [dt.datetime.fromisoformat(f"2026-03-0{day}T01:30").astimezone() for day in range(1, 8)]
    assert {f"{day:%a}".lower() for day in week if window.is_open(day)} == set(are.split())


@pytest.mark.parametrize("days", ["8", "5-2", "1-5/0", "someday", "sat-tue"])
def test_days_that_are_none_are_refused(days: str) -> None:
    with pytest.raises(errors.UsageError, match="is no cron expression"):
        Window(f"0 1 * * {days}")


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
    window._trigger.timezone = zone = ZoneInfo("Europe/Berlin")
    passed = [midnight + dt.timedelta(minutes=minutes) for minutes in range(5, 720, 10)]
    expected = [now for now in passed if midnight + dt.timedelta(hours=hours[0]) < now < midnight + dt.timedelta(hours=hours[1])]
    assert [now for now in passed if window.is_open(now.astimezone(zone))] == expected


@pytest.mark.parametrize(
    ("trouble", "saying"),
    [
        (errors.Quarantined("1 record is quarantined"), "1 record is quarantined"),
        (PermissionError(13, "Permission denied", "cache"), "PermissionError: [Errno 13] Permission denied: 'cache'"),
    ],
)
def test_a_gallery_that_cannot_go_on_keeps_no_worker_from_the_others(
    monkeypatch: pytest.MonkeyPatch, trouble: Exception, saying: str
) -> None:
    said, worked = list[str](), list[str]()
    app = SimpleNamespace(worker=lambda: None)
    scheduler = Scheduler(app, galleries=(), window=Window(None), say=said.append)  # type: ignore[arg-type]

    def work(gallery: str, upgrade: int) -> None:
        worked.append(gallery)
        if gallery == "a":
            raise trouble

    looks = {"a": 0, "b": 0}
    monkeypatch.setattr(scheduler, "_upgrades", lambda: {"a": 1, "b": 2})
    monkeypatch.setattr(scheduler, "_watched", lambda: {"a": 1, "b": 2})
    monkeypatch.setattr(scheduler, "_seen", lambda gallery, upgrade: looks[gallery])
    monkeypatch.setattr(scheduler, "_tell", lambda upgrade: None)
    monkeypatch.setattr(scheduler, "_work", work)
    clock = [0.0]
    monkeypatch.setattr("rmvdb.app.daemon.time", SimpleNamespace(monotonic=lambda: clock[0]))
    scheduler._step()
    scheduler._step()
    assert worked == ["a", "b", "b"]
    for _ in range(2):
        clock[0] += 6
        scheduler._step()
    assert worked == ["a", "b", "b", "a", "b", "b"]
    looks["a"] += 1  # somebody has done something about it
    scheduler._step()
    assert worked[-2:] == ["a", "b"]
    for _ in range(4):
        clock[0] += 1
        looks["a"] += 1  # others work on it all the while: that is no reason to try once a second
        scheduler._step()
    assert worked[-4:] == ["b", "b", "b", "b"]
    clock[0] += 1.1
    scheduler._step()
    assert worked[-2:] == ["a", "b"]
    assert said == [saying]  # once


def test_a_stop_is_not_lost_while_the_window_is_looked_at() -> None:
    app = SimpleNamespace(worker=lambda: SimpleNamespace(resting=""))
    scheduler = Scheduler(app, galleries=(), window=Window(None), say=lambda _: None)  # type: ignore[arg-type]

    class Late(threading.Event):
        def clear(self) -> None:  # the stop comes just before
            scheduler._stop.set()
            super().clear()

    scheduler._rest = Late()
    scheduler._at = 1
    scheduler._tell = lambda upgrade: None  # type: ignore[method-assign]
    scheduler._look()
    assert scheduler._rest.is_set()


@pytest.mark.parametrize(
    ("trouble", "waits"),
    [
        (errors.VerifyFailed("1 difference"), [5, 10, 20, 40, 80, 160, 320, 600, 600]),
        (errors.EngineUnavailable("no answer"), [5, 5, 5]),
        (errors.NotServed("client web cannot serve epoch 2 yet"), [5, 5, 5]),
    ],
)
def test_what_fails_again_and_again_is_tried_ever_more_seldom(
    monkeypatch: pytest.MonkeyPatch, trouble: errors.RmvdbError, waits: list[int]
) -> None:
    clock, looks = [0.0], [0]
    monkeypatch.setattr("rmvdb.app.daemon.time", SimpleNamespace(monotonic=lambda: clock[0]))
    scheduler = Scheduler(SimpleNamespace(worker=lambda: None), galleries=(), window=Window(None), say=lambda _: None)  # type: ignore[arg-type]
    monkeypatch.setattr(scheduler, "_seen", lambda gallery, upgrade: looks[0])
    for seconds in waits:
        assert scheduler._is_due("a", 1)
        scheduler._put_off("a", 1, trouble)
        clock[0] += seconds - 0.1
        assert not scheduler._is_due("a", 1)
        clock[0] += 0.2
    looks[0] += 1
    scheduler._put_off("a", 1, trouble)
    clock[0] += 5.1
    assert scheduler._is_due("a", 1)
