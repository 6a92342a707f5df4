"""What a client counts of what its searches find: everything, up to a bound."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from rmvdb.serving import traffic
from rmvdb.serving.traffic import CANDIDATES, TrafficCounter
from rmvdb.types import Hit
from tests.support.waiting import Clock


def hits(*ids: int | str) -> list[Hit]:
    return [Hit(id=id, distance=float(at)) for at, id in enumerate(ids)]


def test_every_find_counts_once_until_it_is_taken() -> None:
    found = TrafficCounter(100)
    found.count([hits(1, 2), hits(2, 3)])
    found.count([hits("2", 2)])

    assert found.take() == {1: 1, 2: 3, 3: 1, "2": 1}
    assert found.take() == {}


def test_only_so_much_of_an_answer_counts() -> None:
    found = TrafficCounter(10 * CANDIDATES)
    found.count([hits(*range(2 * CANDIDATES))])

    assert found.take() == dict.fromkeys(range(CANDIDATES), 1)


def test_whatever_is_found_only_so_many_records_are_remembered_and_the_frequent_ones_are_among_them() -> None:
    found, rng, most = TrafficCounter(200), np.random.default_rng(0), 0
    for _ in range(2000):
        ids = [*rng.integers(0, 20, 5).tolist(), *rng.integers(100, 1_000_000, 5).tolist()]
        found.count([hits(*ids)])
        most = max(most, len(found._counts))
    counted = found.take()

    assert most <= 200
    assert sorted(sorted(counted, key=counted.__getitem__)[-20:]) == list(range(20))


def test_where_nothing_is_to_be_counted_nothing_is() -> None:
    found = TrafficCounter(0)
    found.count([hits(1, 2)])

    assert found.take() == {}


def test_it_is_due_once_a_period(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(traffic, "time", clock)
    found = TrafficCounter(100)
    found.count([hits(1)])
    before = found.due()
    clock.sleep(traffic.PERIOD)

    assert before == {}
    assert found.due() == {1: 1}
    found.count([hits(1)])
    assert found.due() == {}


def test_threads_that_search_at_once_are_all_counted() -> None:
    found, taken = TrafficCounter(100), 0
    threads = [threading.Thread(target=lambda: [found.count([hits(7, 8)]) for _ in range(2000)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        taken += found.take().get(7, 0)

    assert taken + found.take().get(7, 0) == 16_000
