"""A client that searches is suspended, cut off from the registry, or behind by an epoch."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any, NoReturn

import pytest
from sqlalchemy import text

from rmvdb import errors
from rmvdb.serving.client import Client
from rmvdb.serving.current_plan import CurrentPlan
from rmvdb.serving.latency import Latency
from rmvdb.types import Id
from tests.support.faults import drive, once, silent
from tests.support.inprocess import TIMES, Gallery
from tests.support.waiting import wait_until


@pytest.mark.parametrize(
    "ask",
    [
        pytest.param(lambda client: [hit.id for hit in client.search("t3", limit=1)], id="search"),
        pytest.param(lambda client: [record.id for record in client.get(3)], id="get"),
        pytest.param(lambda client: [record.id for record in client.query("id == 3")], id="query"),
        pytest.param(lambda client: client.count("id == 3") * [3], id="count"),
        pytest.param(lambda client: (client.count() == 8) * [3], id="count-all"),
    ],
)
def test_a_reader_suspended_between_its_plan_and_its_question_misses_nothing(
    planned: Gallery, ask: Callable[[Client], list[Id]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with planned.client() as client:
        current, suspended = client._current_plan.current, [True]

        def plan() -> Any:
            found = current()
            if suspended and suspended.pop():
                planned.conductor().deploy(planned.upgrade)
                drive(planned)
            return found

        monkeypatch.setattr(client._current_plan, "current", plan)
        assert ask(client) == [3]
        assert not suspended


class Wire:
    """A registry as one process has it, until it is cut."""

    def __init__(self, real: Any) -> None:
        self._real, self.is_cut = real, False

    def __getattr__(self, name: str) -> Any:
        if self.is_cut and name not in ("gaps", "let_go"):  # what this process does without asking
            raise errors.RegistryError("The registry cannot be reached")
        return getattr(self._real, name)


@pytest.mark.parametrize("is_cut", [False, True])
def test_a_client_of_a_plan_with_longer_times_misses_nothing_of_one_with_shorter_times(planned: Gallery, is_cut: bool) -> None:
    """Who conducts the upgrade is configured with other times than who made the gallery: clients go by those of their plan."""
    wire = Wire(planned.registry)
    hasty = replace(planned, times=TIMES)
    with Client("texts", registry=wire, store=planned.store, loaded_models=planned.loaded_models, engine_timeout=1.0) as client:  # type: ignore[arg-type]
        assert len(client.search("t3", limit=50)) == 8
        hasty.conductor().deploy(planned.upgrade)
        assert planned.registry.plan("texts").max_age == TIMES["max_age"]
        wire.is_cut = is_cut
        with ThreadPoolExecutor(1) as pool:
            driving = pool.submit(lambda: planned.worker().run(hasty.conductor().task(planned.upgrade), planned.backfill))
            while not driving.done():
                with suppress(errors.StalePlan, errors.RegistryError):
                    assert len(client.search("t3", limit=50)) == 8
            driving.result()
        wire.is_cut = False
    planned.expect_moved()


def test_a_client_of_a_plan_with_longer_times_is_waited_for_as_long_as_it_may_use_it(planned: Gallery) -> None:
    """A write under the new plan reaches the new collection alone, which that client does not search yet."""
    wire = Wire(planned.registry)
    hasty = replace(planned, times=TIMES)
    with Client("texts", registry=wire, store=planned.store, loaded_models=planned.loaded_models, engine_timeout=1.0) as client:  # type: ignore[arg-type]
        client.search("t3", limit=50)
        hasty.conductor().deploy(planned.upgrade)
        with planned.registry.engine.begin() as connection:
            connection.execute(text("UPDATE serving_plans SET max_age = 60 WHERE epoch = 1"))
        silent(client._current_plan)
        wire.is_cut = True
        planned.registry.refresh("texts", client=client.name, holds=1, ready=2, trouble="")
        time.sleep(3 * TIMES["max_age"])
        assert client.name in {row.id for row in planned.registry.clients(planned.upgrade.gallery_id)}
        wire.is_cut = False


def test_a_search_that_outlives_cut_over_and_clean_up_is_asked_again(gallery: Gallery) -> None:
    """Its model was being loaded, say: what it would search is gone by then."""

    def upgraded() -> None:
        row = gallery.conductor().advance(gallery.registry.upgrade(gallery.upgrade.id), gallery.worker())
        gallery.conductor().clean_up(row)

    with gallery.client() as client:
        gallery.store.before = once("search", gallery.task.old[0], upgraded)
        assert [hit.id for hit in client.search("t3", limit=1)] == [3]
    assert not gallery.store.exists(gallery.task.old[0])


def test_a_client_leaves_though_the_disk_of_the_registry_is_full(gallery: Gallery, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> NoReturn:
        raise errors.DiskFull("The disk that holds the registry is full")

    closed: list[str] = []
    client = gallery.client()
    client._closing = lambda: closed.append("closed")
    monkeypatch.setattr(gallery.registry, "leave", full)
    client.close()
    assert closed == ["closed"]


def test_a_search_refuses_while_the_registry_cannot_hear_that_its_client_lives(
    gallery: Gallery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that only reads the plan could serve by it while no other process waits for it."""

    def full(*_: object, **__: object) -> NoReturn:
        raise errors.DiskFull("The disk that holds the registry is full; free some space")

    with gallery.client() as client:
        with monkeypatch.context() as patched:
            patched.setattr(gallery.registry, "refresh", full)
            time.sleep(gallery.registry.plan("texts").max_age)
            with pytest.raises(errors.StalePlan, match="could miss records: The disk that holds the registry is full"):
                client.search("t1", limit=1)
        assert [hit.id for hit in client.search("t1", limit=1)] == [1]


def test_a_slow_search_is_answered_by_a_plan_that_is_fresh_and_else_refused_as_stale(planned: Gallery) -> None:
    wire, took = Wire(planned.registry), [0.5]
    with Client("texts", registry=wire, store=planned.store, loaded_models=planned.loaded_models, engine_timeout=1.0) as client:  # type: ignore[arg-type]
        silent(client._current_plan)
        client._current_plan.refresh()
        planned.store.before = lambda *_: time.sleep(took[0])
        wire.is_cut = True
        assert [hit.id for hit in client.search("t3", limit=1)] == [3]
        took[0] = 2.5  # its plan is too old by its end
        with pytest.raises(errors.StalePlan, match="could miss records: The registry cannot be reached"):
            client.search("t3", limit=1)
        wire.is_cut = False


class Counted:
    """A lock that counts how often it was asked for."""

    def __init__(self) -> None:
        self._lock, self._numbers, self.asked = threading.Lock(), itertools.count(1), 0

    def __enter__(self) -> None:
        self.asked = next(self._numbers)
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


@pytest.mark.parametrize("away", [False, True])
def test_of_many_searches_that_find_their_plan_too_old_one_asks_and_all_hear_the_answer(
    planned: Gallery, monkeypatch: pytest.MonkeyPatch, away: bool
) -> None:
    registry, asked = planned.registry, []
    plans = CurrentPlan("texts", registry=registry, prepare=lambda _: None, name="one", latency=Latency())
    silent(plans)
    plans._lock = Counted()  # type: ignore[assignment]
    plans._held = replace(plans.current(), max_age=60.0), -math.inf

    def refresh(*args: Any, **kwargs: Any) -> Any:
        asked.append(time.monotonic())
        wait_until(lambda: plans._lock.asked == 20)  # type: ignore[attr-defined]
        if away:
            raise errors.RegistryError("the database is away")
        told = type(registry).refresh(registry, *args, **kwargs)
        return replace(told, plan=replace(told.plan, max_age=60.0))

    monkeypatch.setattr(registry, "refresh", refresh)
    together = threading.Barrier(20)

    def current(_: int) -> object:
        together.wait()
        try:
            return plans.current().epoch
        except errors.StalePlan as exc:
            return str(exc).endswith("the database is away")

    with ThreadPoolExecutor(20) as pool:
        assert set(pool.map(current, range(20))) == ({True} if away else {plans._held[0].epoch})
    assert len(asked) == 1
