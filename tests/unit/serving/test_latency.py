"""The p99 that a client reports: of its latest searches, as long as they took."""

from __future__ import annotations

import threading

import pytest

from rmvdb.serving import latency
from rmvdb.serving.latency import Latency
from tests.support.waiting import Clock


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(latency, "time", made)
    return made


def search(measure: Latency, clock: Clock, *, times: int = 1, seconds: float = 0.0) -> None:
    for _ in range(times):
        with measure.measured():
            clock.sleep(seconds)


def test_without_a_search_there_is_nothing_to_say() -> None:
    assert Latency().p99() == (0, 0.0)


def test_one_slow_search_of_a_hundred_is_not_the_p99_and_two_are(clock: Clock) -> None:
    measure = Latency()
    search(measure, clock, seconds=0.1)
    search(measure, clock, times=99)
    count, of_one = measure.p99()
    search(measure, clock, seconds=0.1)
    _, of_two = measure.p99()

    assert count == 100
    assert of_one < 100 <= of_two


def test_a_search_that_fails_was_waited_for_too(clock: Clock) -> None:
    measure = Latency()

    @measure.measured()
    def fail() -> None:
        clock.sleep(0.05)
        raise TimeoutError

    with pytest.raises(TimeoutError):
        fail()
    count, p99_ms = measure.p99()

    assert count == 1
    assert p99_ms == pytest.approx(50)


def test_a_slow_search_counts_until_it_has_left_the_window(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    monkeypatch.setattr(latency, "WINDOW", 0.5)
    measure = Latency()
    search(measure, clock, times=2, seconds=0.2)
    slow = measure.p99()
    clock.sleep(0.6)
    search(measure, clock, times=latency.ENOUGH)
    count, p99_ms = measure.p99()

    assert slow[1] == pytest.approx(200)
    assert count == latency.ENOUGH
    assert p99_ms < 200


def test_searches_so_slow_that_few_end_in_the_window_count_all_the_same(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    monkeypatch.setattr(latency, "WINDOW", 0.1)
    measure = Latency()
    search(measure, clock, times=latency.ENOUGH, seconds=0.03)
    count, p99_ms = measure.p99()

    assert count == latency.ENOUGH
    assert p99_ms == pytest.approx(30)


def test_a_window_of_silence_forgets_everything(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    monkeypatch.setattr(latency, "WINDOW", 0.1)
    measure = Latency()
    search(measure, clock, times=2 * latency.ENOUGH)
    clock.sleep(0.2)

    assert measure.p99() == (0, 0.0)


def test_only_so_many_searches_are_remembered(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    monkeypatch.setattr(latency, "REMEMBERED", 50)
    measure = Latency()
    search(measure, clock, times=60)

    assert measure.p99()[0] == 50


def test_threads_that_search_at_once_are_all_counted(clock: Clock) -> None:
    measure = Latency()
    threads = [threading.Thread(target=search, args=(measure, clock), kwargs={"times": 500}) for _ in range(8)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        measure.p99()

    assert measure.p99()[0] == 4000
