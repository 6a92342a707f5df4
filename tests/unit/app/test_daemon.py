"""A worker that stays, with galleries that cannot go on, and at its end."""

from __future__ import annotations

import datetime as dt
import threading
import time
from types import SimpleNamespace

import pytest

from rmvdb import errors
from rmvdb.app.daemon import Scheduler
from rmvdb.app.window import Window
from tests.support.waiting import wait_until


@pytest.mark.parametrize(
    ("trouble", "saying"),
    [
        (errors.Quarantined("1 record is quarantined"), "1 record is quarantined"),
        (PermissionError(13, "Permission denied", "cache"), "PermissionError: [Errno 13] Permission denied: 'cache'"),
        (SystemExit("run download.sh"), "SystemExit: run download.sh"),
    ],
)
def test_a_gallery_that_cannot_go_on_keeps_no_worker_from_the_others(
    monkeypatch: pytest.MonkeyPatch, trouble: BaseException, saying: str
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
    looks["a"] += 1  # the cause is gone
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
def test_a_step_that_keeps_failing_is_tried_ever_more_seldom(
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


@pytest.mark.parametrize("step", [-3600.0, 30 * 365.25 * 86400])
def test_a_worker_goes_on_though_the_time_of_day_is_set(monkeypatch: pytest.MonkeyPatch, step: float) -> None:
    """An hour back it stood still for an hour; 30 years forward it made a list of a billion steps."""
    registry = SimpleNamespace(retire_worker=lambda name: None)
    app = SimpleNamespace(worker=lambda: SimpleNamespace(resting="", name="w"), registry=registry)
    scheduler = Scheduler(app, galleries=(), window=Window(None), say=lambda _: None)  # type: ignore[arg-type]
    ahead, steps, stop = [0.0], list[float](), threading.Event()
    monkeypatch.setattr(scheduler, "_step", lambda: steps.append(time.monotonic()))
    monkeypatch.setattr(scheduler, "_look", lambda: None)

    class Shifted(dt.datetime):
        @classmethod
        def now(cls, tz: dt.tzinfo | None = None) -> dt.datetime:  # type: ignore[override]
            return dt.datetime.now(tz) + dt.timedelta(seconds=ahead[0])

    monkeypatch.setattr("apscheduler.schedulers.base.datetime", Shifted)
    monkeypatch.setattr("apscheduler.schedulers.blocking.datetime", Shifted, raising=False)
    monkeypatch.setattr("rmvdb.app.daemon.dt", SimpleNamespace(datetime=Shifted, UTC=dt.UTC, timedelta=dt.timedelta))
    shifted = SimpleNamespace(monotonic=time.monotonic, time=lambda: time.time() + ahead[0])
    monkeypatch.setattr("rmvdb.app.daemon.time", shifted)
    thread = threading.Thread(target=scheduler.run, args=[stop])
    thread.start()
    try:
        wait_until(lambda: len(steps) >= 2)
        ahead[0], before = step, len(steps)
        wait_until(lambda: len(steps) >= before + 2, seconds=20.0)
    finally:
        stop.set()
        thread.join()
