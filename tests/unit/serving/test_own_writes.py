"""The moment that a client's searches wait for."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest

from rmvdb.engines.faiss import FaissStore
from rmvdb.serving import own_writes
from rmvdb.serving.own_writes import OwnWrites
from rmvdb.types import Moment

STALENESS, TIMEOUT = 5.0, 10.0


class TickingStore(FaissStore):
    """A store whose clock tells 1, 2, 3, …; each answer waits for `before`."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers = itertools.count(1)
        self.before: Callable[[], None] = lambda: None

    def moment(self) -> Moment:
        """Return the next number."""
        number = next(self._numbers)
        self.before()
        return number


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    class Clock:
        now = 100.0

        set_forward = 0.0

    monkeypatch.setattr(own_writes, "uptime", lambda: Clock.now + Clock.set_forward)
    monkeypatch.setattr(own_writes, "seconds_since_boot", lambda: Clock.now)
    return Clock


@pytest.fixture
def store() -> TickingStore:
    return TickingStore()


@pytest.fixture
def writes(store: TickingStore) -> OwnWrites:
    return OwnWrites(store, engine_timeout=TIMEOUT)


@pytest.mark.usefixtures("clock")
def test_a_client_that_never_wrote_waits_for_nothing(writes: OwnWrites) -> None:
    assert writes.moment(STALENESS) is None


@pytest.mark.usefixtures("clock")
def test_searches_wait_for_a_moment_after_the_last_write_and_ask_for_no_other(writes: OwnWrites) -> None:
    writes.note()
    assert [writes.moment(STALENESS) for _ in range(3)] == [1, 1, 1]
    writes.note()
    assert [writes.moment(STALENESS) for _ in range(3)] == [2, 2, 2]


def test_a_moment_older_than_the_staleness_is_asked_for_again(writes: OwnWrites, clock: Any) -> None:
    """Otherwise the search might lack a record that a worker has moved since, and for which it waited just that staleness."""
    writes.note()
    clock.now += STALENESS
    assert [writes.moment(STALENESS) for _ in range(3)] == [2, 2, 2]


def test_searches_still_wait_for_a_write_after_the_time_of_day_was_set_forward(writes: OwnWrites, clock: Any) -> None:
    writes.note()
    clock.set_forward = 3600.0
    assert writes.moment(STALENESS) is not None


def test_searches_wait_for_nothing_once_the_engine_shows_the_write_to_everybody(writes: OwnWrites, clock: Any) -> None:
    writes.note()
    clock.now += STALENESS + TIMEOUT - 0.01
    assert writes.moment(STALENESS) is not None
    clock.now += 0.01
    assert writes.moment(STALENESS) is None


def test_a_moment_that_the_engine_does_not_tell_is_none_to_forget(clock: Any) -> None:
    writes = OwnWrites(FaissStore(), engine_timeout=TIMEOUT)
    writes.note()
    assert writes.moment(STALENESS) == 0
    clock.now += STALENESS
    assert writes.moment(STALENESS) == 0
    clock.now += TIMEOUT
    assert writes.moment(STALENESS) is None


def test_of_two_threads_the_one_that_wrote_last_counts_though_it_was_answered_first(
    writes: OwnWrites, store: TickingStore, clock: Any
) -> None:
    asked, answer = threading.Event(), threading.Event()

    def slow() -> None:
        asked.set()
        assert answer.wait(30)

    store.before = slow
    thread = threading.Thread(target=writes.note)
    thread.start()
    assert asked.wait(30)
    store.before = lambda: None
    clock.now += 1.0
    writes.note()
    answer.set()
    thread.join()
    assert writes.moment(STALENESS) == 2
