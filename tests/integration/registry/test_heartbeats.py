"""The cost of a client's heartbeat for the registry, and the changes that it must notice all the same."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import event, text

from rmvdb import errors
from rmvdb.registry import clock
from rmvdb.registry.clients import Serving
from rmvdb.registry.registry import Registry
from rmvdb.registry.tables import GalleryRow
from rmvdb.serving.current_plan import OFTEN, SELDOM, CurrentPlan
from rmvdb.serving.latency import Latency
from tests.support.clocks import DatabaseClock
from tests.support.photos import NEW, OLD, TIMES, add_gallery


@contextmanager
def statements(registry: Registry) -> Iterator[list[str]]:
    """The statements that this process sends meanwhile, BEGIN of SQLite included."""
    sent: list[str] = []

    def note(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        sent.append(statement)

    event.listen(registry.engine, "before_cursor_execute", note)
    try:
        yield sent
    finally:
        event.remove(registry.engine, "before_cursor_execute", note)


def beat(registry: Registry, known: Serving | None, *, ready: int = 1) -> Serving:
    """One heartbeat of a client that serves by what it knows."""
    return registry.refresh(
        "photos", client="c1", ready=ready, trouble="", holds=known.plan.epoch if known else 0, searches=7, known=known
    )


def age(registry: Registry, seconds: float) -> None:
    """Let the anchor be older than it is."""
    with registry.engine.begin() as connection:
        connection.execute(text("UPDATE clock SET shown = shown - :seconds, time = time - :seconds"), {"seconds": seconds})


def shown(registry: Registry) -> float:
    """Return the time that the database's clock showed when the anchor was set."""
    with registry.engine.begin() as connection:
        found: float = connection.scalar(text("SELECT shown FROM clock"))
    return found


def test_a_heartbeat_that_finds_the_plan_unchanged_is_one_statement_and_is_seen(registry: Registry, gallery: GalleryRow) -> None:
    told = beat(registry, None)
    registry.raise_trace("photos")  # as each batch does
    with statements(registry) as sent:
        again = beat(registry, told)
    (client,) = registry.clients(gallery.id)

    assert len(sent) == 1, sent
    assert again == replace(told, trace=told.trace + 1)
    assert (client.epoch, client.searches) == (told.plan.epoch, 7)
    assert client.seen_at == pytest.approx(registry.now(), abs=0.5)


def test_a_heartbeat_tells_of_a_plan_that_was_announced_and_of_one_in_force(registry: Registry, gallery: GalleryRow) -> None:
    told = beat(registry, None)
    epoch = registry.announce("photos", [NEW, OLD], TIMES)
    announced = beat(registry, told)
    with statements(registry) as sent:
        assert beat(registry, announced, ready=epoch) == announced
    assert registry.activate("photos", epoch) == []
    served = beat(registry, announced, ready=epoch)

    assert announced.next is not None
    assert announced.next.epoch == epoch
    assert len(sent) == 1, sent
    assert (served.plan.epoch, served.next) == (epoch, None)


def test_a_heartbeat_waits_for_an_epoch_that_is_changing(registry: Registry, gallery: GalleryRow, database_url: str) -> None:
    """Otherwise it would confirm the plan before, and its client would not be among those that the change has looked at."""
    told = beat(registry, None)
    epoch = registry.announce("photos", [NEW, OLD], TIMES)
    announced, conductor = beat(registry, told), Registry(database_url)
    with ThreadPoolExecutor(1) as pool:
        with conductor.engine.begin() as connection:
            connection.execute(text("UPDATE galleries SET epoch = next_epoch, next_epoch = NULL"))
            heartbeat = pool.submit(beat, registry, announced, ready=epoch)
            time.sleep(0.5)
            assert not heartbeat.done()
        assert heartbeat.result(30).plan.epoch == epoch
    conductor.close()


def test_a_heartbeat_of_a_client_that_is_not_known_any_more_makes_it_known(registry: Registry, gallery: GalleryRow) -> None:
    told = beat(registry, None)
    registry.leave("c1")
    beat(registry, told)
    assert [client.id for client in registry.clients(gallery.id)] == ["c1"]


def test_a_heartbeat_finds_that_the_registry_has_gone_back(registry: Registry, gallery: GalleryRow) -> None:
    told = beat(registry, None)
    assert beat(registry, replace(told, trace=told.trace + 5)).trace == told.trace
    with registry.engine.begin() as connection:
        connection.execute(text("UPDATE rmvdb_revision SET version_num = '9999'"))
    with pytest.raises(errors.SchemaOutdated):
        beat(registry, told)


def test_a_heartbeat_finds_that_the_databases_clock_was_set(registry: Registry, gallery: GalleryRow) -> None:
    database = DatabaseClock(registry)
    told, before, gaps = beat(registry, None), registry.now(), registry.gaps
    database.set(3600.0)
    beat(registry, told)

    assert registry.gaps == gaps + 1
    (client,) = registry.clients(gallery.id)
    assert client.seen_at == pytest.approx(before, abs=5.0)


def test_heartbeats_alone_keep_the_registrys_time_for_a_process_that_starts(
    registry: Registry, gallery: GalleryRow, database_url: str
) -> None:
    told, before = beat(registry, None), registry.now()
    age(registry, clock.OLD + 5.0)
    sent: list[str] = []
    while not sent or shown(registry) < before - clock.OLD:  # on a busy machine, a statement that comes too late changes nothing
        with statements(registry) as sent:
            told = beat(registry, told)
    fresh = Registry(database_url)

    assert len(sent) == 2, sent
    assert fresh.now() >= before
    fresh.close()


def test_a_heartbeat_sets_no_anchor_in_place_of_another_processes(registry: Registry, gallery: GalleryRow) -> None:
    told = beat(registry, None)
    age(registry, clock.OLD + 5.0)
    beat(registry, told)
    statement = registry._time.moved_on()
    if statement is None:  # the anchor has been read again since
        age(registry, clock.OLD + 5.0)
        registry._confirmed("photos", "c1", told, {"ready": 1})
        statement = registry._time.moved_on()
    assert statement is not None
    age(registry, 1.0)  # another process sets it
    with registry.engine.begin() as connection:
        assert connection.execute(statement).rowcount == 0


def test_a_client_asks_at_most_once_in_five_seconds_and_oftener_while_a_plan_is_announced(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_gallery(registry, times=TIMES | {"max_age": 1.5})
    plans = CurrentPlan("photos", registry=registry, prepare=lambda _: None, name="one", latency=Latency())
    time.sleep(0.2)
    with statements(registry) as sent:
        time.sleep(4.0)
    usual, least = plans._interval(), 0.9 * SELDOM * 1.5
    epoch = registry.announce("photos", [NEW, OLD], TIMES)
    plans._confirm()
    often = plans._interval()
    plans.close()

    assert epoch == 2
    assert len(sent) <= 4.0 / least + 1, sent
    assert usual >= least
    assert often <= OFTEN * 1.5


def test_the_default_age_of_a_plan_leaves_a_client_within_a_statement_in_five_seconds() -> None:
    from rmvdb.app.settings import SearchSection

    heartbeat = SearchSection().plan_max_age * SELDOM * 0.95
    assert 1 / heartbeat + 1 / clock.OLD <= 0.2
