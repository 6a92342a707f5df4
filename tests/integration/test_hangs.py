"""A registry that hangs: it refuses nothing and answers nothing, as a locked table, a suspended server or a locked file do."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import event, text

from rmvdb import errors
from rmvdb.registry import schema
from rmvdb.registry.registry import Registry
from rmvdb.serving.announced_writes import Writes
from rmvdb.serving.current_plan import CurrentPlan
from rmvdb.serving.latency import Latency
from tests.support.clocks import DatabaseClock
from tests.support.inprocess import make
from tests.support.photos import OLD, TIMES, add_gallery
from tests.support.postgres import Postgres
from tests.support.waiting import wait_until

#: Longer than any test waits: what hangs hangs until it is let go.
PATIENCE = 60.0


@pytest.fixture
def hanging(stoppable_postgres: Postgres) -> Iterator[Registry]:
    """A registry with a gallery on a server of the test's own."""
    url = stoppable_postgres.database()
    schema.upgrade(url)
    registry = Registry(url, patience=PATIENCE)
    add_gallery(registry)
    yield registry
    registry.close()


@contextmanager
def locked(registry: Registry) -> Iterator[None]:
    """Lock a table, as an administrator may."""
    address = registry.url.render_as_string(hide_password=False).replace("+psycopg", "")
    with psycopg.connect(address) as connection:
        connection.execute("LOCK TABLE galleries IN ACCESS EXCLUSIVE MODE")
        yield


@contextmanager
def suspended(server: Postgres) -> Iterator[None]:
    """Suspend the server's processes. Its kernel still accepts all data."""
    processes = server.processes()
    try:
        _send(processes, signal.SIGSTOP)
        yield
    finally:
        _send(processes, signal.SIGCONT)


def _send(processes: Sequence[int], sent: signal.Signals) -> None:
    """Send a signal to each of them. A session may have ended since they were listed."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, sent)


@pytest.mark.postgres
@pytest.mark.parametrize("how", ["locked", "suspended"])
def test_a_search_goes_by_the_plan_that_it_has_until_that_is_too_old_and_then_says_so(
    hanging: Registry, stoppable_postgres: Postgres, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rmvdb.serving.current_plan.WAITS", 2.0)
    plans = CurrentPlan("photos", registry=hanging, prepare=lambda _: None, name="one", latency=Latency())
    age = plans.current().max_age
    with locked(hanging) if how == "locked" else suspended(stoppable_postgres):
        began = time.monotonic()
        plans.current()
        assert time.monotonic() - began < age  # at once
        time.sleep(age + 0.5)
        for _ in range(2):
            began = time.monotonic()
            with pytest.raises(errors.StalePlan, match=r"a search by it could miss records: The registry .*answer"):
                plans.current()
            assert time.monotonic() - began < age + 15.0
    wait_until(lambda: _served(plans), seconds=90)
    plans.close()


def _served(plans: CurrentPlan) -> bool:
    try:
        return bool(plans.current().legs == (OLD,))
    except errors.StalePlan:
        return False


@pytest.mark.postgres
@pytest.mark.parametrize("how", ["locked", "suspended"])
def test_a_write_ends_by_its_time(
    hanging: Registry, stoppable_postgres: Postgres, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rmvdb.serving.announced_writes.WRITE_LASTS", 3.0)
    writes = Writes("photos", registry=hanging, name="one", engine_timeout=1.0)
    with locked(hanging) if how == "locked" else suspended(stoppable_postgres):
        began = time.monotonic()
        with pytest.raises(errors.RegistryUnavailable, match=r"did not answer for 3 s"), writes.announced("upsert", [1]):
            pass
        assert time.monotonic() - began < 20.0
    with writes.announced("upsert", [1]) as (plan, _):
        assert plan.legs == (OLD,)


def test_a_search_that_waits_for_another_threads_question_hears_why_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rmvdb.serving.current_plan.WAITS", 1.0)
    gallery, asked = make(tmp_path, records=8, times=TIMES | {"max_age": 0.2}), threading.Event()

    def refresh(*_: object, **__: object) -> None:
        asked.set()
        time.sleep(2.0)  # for longer than it should
        raise errors.RegistryUnavailable("the file is locked")

    with gallery.client() as client:
        with monkeypatch.context() as away:
            away.setattr(gallery.registry, "refresh", refresh)
            assert asked.wait(30)
            time.sleep(0.3)  # its plan is too old by now
            with pytest.raises(errors.StalePlan, match="the file is locked"):
                client.search("t1", limit=1)
        wait_until(lambda: client.search("t1", limit=1)[0].id == 1)
    gallery.registry.close()


def test_a_file_that_another_process_has_locked_ends_nothing_but_by_its_time(tmp_path: Path) -> None:
    gallery = make(tmp_path, records=8, times=TIMES | {"max_age": 1.0})
    with gallery.client() as client:
        file = sqlite3.connect(tmp_path / "registry.sqlite", isolation_level=None)
        file.execute("BEGIN IMMEDIATE")
        try:
            assert client.search("t1", limit=1)[0].id == 1
            time.sleep(1.5)
            began = time.monotonic()
            with pytest.raises(errors.StalePlan, match="locked"):
                client.search("t1", limit=1)
            assert time.monotonic() - began < 20.0
        finally:
            file.execute("ROLLBACK")
            file.close()
        wait_until(lambda: client.search("t1", limit=1)[0].id == 1)
    gallery.registry.close()


# --- durable, and not a standby --------------------------------------------------------------------------------------------


@pytest.mark.postgres
def test_commits_of_the_protocol_are_durable_under_any_setting_of_the_database(postgres: Postgres, postgres_url: str) -> None:
    schema.upgrade(postgres_url)
    postgres.run("ALTER DATABASE test SET synchronous_commit = off")
    try:
        registry = Registry(postgres_url)
        add_gallery(registry)
        seen: list[str] = []
        registry._keeper = lambda _: None
        registry._keep = lambda s: seen.append(s.scalar(text("SHOW synchronous_commit")))  # type: ignore[method-assign, arg-type]
        registry.set_source("photos", "field:path")
        assert seen == ["on"]
        registry.close()
    finally:
        postgres.run("ALTER DATABASE test RESET synchronous_commit")


@pytest.mark.postgres
def test_a_standby_is_no_registry(postgres: Postgres, postgres_url: str) -> None:
    schema.upgrade(postgres_url)
    registry = Registry(postgres_url, patience=1.0)
    add_gallery(registry)
    postgres.run("CREATE FUNCTION pg_is_in_recovery() RETURNS bool LANGUAGE sql AS 'SELECT true'", "test")
    postgres.run("ALTER DATABASE test SET search_path = public, pg_catalog")
    registry.engine.dispose()
    try:
        with pytest.raises(errors.RegistryUnavailable, match=r"it is a standby, which only reads; registry\.url must"):
            registry.galleries()
    finally:
        postgres.run("ALTER DATABASE test RESET search_path")
        registry.close()


# --- another schema --------------------------------------------------------------------------------------------------------


def test_a_process_ends_at_its_next_call_once_another_upgraded_the_schema(registry: Registry) -> None:
    add_gallery(registry)
    plans = CurrentPlan("photos", registry=registry, prepare=lambda _: None, name="one", latency=Latency())
    with registry.engine.begin() as connection:
        connection.execute(text(f"UPDATE {schema.REVISION_TABLE} SET version_num = '9999'"))
    calls: list[Callable[[], object]] = [
        registry.galleries,
        lambda: registry.renew("w1", None, lease=1.0),
        lambda: registry.open_intents("photos", "upsert", [1], client="c", lasting=1.0),
        plans.refresh,
    ]
    for call in calls:
        with pytest.raises(errors.SchemaOutdated, match=r"at revision 9999, which this .* install the newer"):
            call()
    time.sleep(plans._held[0].max_age)
    with pytest.raises(errors.StalePlan, match="install the newer release"):
        plans.current()
    plans.close()


# --- connections -----------------------------------------------------------------------------------------------------------


@pytest.mark.postgres
def test_a_client_that_does_nothing_keeps_no_connection(postgres: Postgres, postgres_url: str) -> None:
    schema.upgrade(postgres_url)
    registry = Registry(postgres_url)
    add_gallery(registry)
    plans = CurrentPlan("photos", registry=registry, prepare=lambda _: None, name="one", latency=Latency())
    held = "SELECT count(*) FROM pg_stat_activity WHERE datname = 'test'"
    wait_until(lambda: postgres.run(held) == [(0,)], seconds=30)
    plans.close()
    registry.close()


@pytest.mark.postgres
def test_a_server_without_a_free_connection_names_the_setting_and_how_many_there_are(hanging: Registry) -> None:
    impatient = Registry(hanging.url.render_as_string(hide_password=False), patience=1.0)
    impatient.galleries()
    impatient.engine.dispose()
    address, held = hanging.url.render_as_string(hide_password=False).replace("+psycopg", ""), []
    try:
        with contextlib.suppress(psycopg.OperationalError):
            while True:
                held.append(psycopg.connect(address))
        with pytest.raises(
            errors.RegistryUnavailable, match=r"All 100 connections that max_connections allows are in use\. Raise"
        ):
            impatient.galleries()
    finally:
        for each in held:
            each.close()
        impatient.close()


@pytest.mark.postgres
def test_two_hundred_clients_share_the_twenty_connections_of_a_server(hanging: Registry, stoppable_postgres: Postgres) -> None:
    """Each needs one for a moment, gives it back once it is connected, and tries again while the server refuses it."""
    stoppable_postgres.run("ALTER SYSTEM SET max_connections = 20")
    stoppable_postgres.stop()
    stoppable_postgres.start()
    hanging.let_go()
    url, clients = hanging.url.render_as_string(hide_password=False), list[tuple[CurrentPlan, Registry]]()

    def connect(number: int) -> int:
        registry = Registry(url, patience=5 * PATIENCE)
        plans = CurrentPlan(
            "photos",
            registry=registry,
            prepare=lambda _: None,
            name=f"client {number}",
            latency=Latency(),
        )
        clients.append((plans, registry))
        return plans._held[0].epoch

    def close(client: tuple[CurrentPlan, Registry]) -> None:
        for each in client:
            each.close()

    with ThreadPoolExecutor(200) as pool:
        try:
            served = list(pool.map(connect, range(200)))
        finally:
            list(pool.map(close, clients))

    assert served == [1] * 200


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = make(tmp_path, records=8).registry
    monkeypatch.setattr("rmvdb.registry.engine.os.access", lambda *_: False)  # root may write anywhere but on such a mount
    event.listen(registry.engine, "connect", lambda connection, _: connection.execute("PRAGMA query_only=ON"))
    registry.engine.dispose()
    with pytest.raises(errors.RegistryError, match=r"registry\.sqlite cannot be written: permission denied, this user may"):
        registry.set_source("texts", "field:path")
    registry.close()


# --- a machine that stood still ------------------------------------------------------------------------------------------


def test_a_plan_from_before_a_pause_that_only_the_databases_clock_shows_is_asked_for_again(registry: Registry) -> None:
    add_gallery(registry)
    plans = CurrentPlan("photos", registry=registry, prepare=lambda _: None, name="one", latency=Latency())
    clock = DatabaseClock(registry)
    plans._held = plans._held[0].__class__(**{**_fields(plans), "max_age": 600.0}), plans._held[1]
    before = plans.current()
    assert before.max_age == 600.0
    clock.set(60.0)  # of which this process counted nothing
    registry.now()  # any call of the process finds it
    assert plans.current().max_age == TIMES["max_age"]
    plans.close()


def _fields(plans: CurrentPlan) -> dict[str, object]:
    plan = plans._held[0]
    return {name: getattr(plan, name) for name in plan.__dataclass_fields__}


def test_an_answer_in_which_the_databases_clock_shows_a_pause_is_asked_for_again(tmp_path: Path) -> None:
    gallery = make(tmp_path, records=8)
    clock, real, early = DatabaseClock(gallery.registry), gallery.store.search, [True, True]

    def search(*args: Any, **options: Any) -> Any:
        if early and early.pop():  # of each leg: it stood still between its plan and its question, and the records moved
            clock.set(60.0)
            gallery.registry.now()
            return [[]]
        return real(*args, **options)

    with gallery.client() as client:
        gallery.store.search = search  # type: ignore[method-assign]
        assert [hit.id for hit in client.search("t3", limit=1)] == [3]
    gallery.registry.close()


def test_a_pause_that_the_time_of_day_shows_makes_a_plan_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hypervisor stops every clock of the machine; the time of day is set once it goes on."""
    from rmvdb import timing

    counted, day = [1000.0], [5000.0]
    monkeypatch.setattr(timing, "seconds_since_boot", lambda: counted[0])
    monkeypatch.setattr(timing.time, "time", lambda: day[0])
    passed = timing.Uptime()
    began = passed()
    counted[0] += 1.0
    day[0] += 61.0
    assert passed() - began == pytest.approx(61.0)
    counted[0] += 2.0
    day[0] -= 3600.0
    assert passed() - began == pytest.approx(63.0)
