"""A call among others, and while the database is away."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest
from sqlalchemy import event, text

from rmvdb.errors import RegistryError, RegistryUnavailable
from rmvdb.registry import engine, schema, waiting
from rmvdb.registry.registry import Registry
from rmvdb.registry.tables import REVISION, GalleryRow
from rmvdb.types import BatchState
from tests.support.photos import OLD, add_gallery, add_upgrade, at_once, claim, shape
from tests.support.postgres import PASSWORD, Postgres
from tests.support.waiting import wait_until


@pytest.mark.parametrize("what", ["version", "artifact", "client", "worker", "collection"])
def test_eight_that_register_the_same_at_once_register_it_once(registry: Registry, gallery: GalleryRow, what: str) -> None:
    register: dict[str, Callable[[], object]] = {
        "version": lambda: registry.add_version(name="v2", embedder="models:new", dim=8, metric="COSINE"),
        "artifact": lambda: registry.add_artifact(sha256="c" * 64, kind="reverse", suffix=".st", size=1),
        "client": lambda: registry.refresh("photos", client="c1", ready=1, trouble=""),
        "worker": lambda: registry.renew("w1", None, lease=1.0),
        "collection": lambda: registry.add_collection(gallery.id, model="v1", schema=shape("photos_2"), search={}),
    }

    at_once(8, lambda _: register[what]())

    assert len(registry.versions()) == (2 if what == "version" else 1)
    assert len(registry.clients(gallery.id)) == (1 if what == "client" else 0)
    assert len(registry.collections(gallery.id)) == (2 if what == "collection" else 1)


@pytest.fixture
def far_registry(stoppable_postgres: Postgres) -> Iterator[Registry]:
    """A registry with a gallery on a server that can be stopped."""
    url = stoppable_postgres.database()
    schema.upgrade(url)
    registry = Registry(url, patience=120)
    add_gallery(registry)
    yield registry
    registry.close()


@pytest.mark.postgres
def test_a_server_that_takes_no_more_connections_is_named_with_its_setting(
    far_registry: Registry, stoppable_postgres: Postgres
) -> None:
    stoppable_postgres.run("ALTER SYSTEM SET max_connections = 12")
    stoppable_postgres.stop()
    stoppable_postgres.start()
    far_registry.galleries()
    far_registry.let_go()
    other = Registry(far_registry.url.render_as_string(hide_password=False), patience=0.5)
    address = stoppable_postgres.url("postgres").replace("+psycopg", "")
    with contextlib.ExitStack() as all_of_them:
        for _ in range(12):
            all_of_them.enter_context(psycopg.connect(address))
        with pytest.raises(
            RegistryUnavailable,
            match=r"All (12 )?connections that max_connections allows are in use\. Raise max_connections .* backfill\.retry_for",
        ):
            other.galleries()
    assert len(other.galleries()) == 1  # once there is room
    other.close()


def test_a_database_that_restarts_is_waited_for(far_registry: Registry, stoppable_postgres: Postgres) -> None:
    stoppable_postgres.stop()
    restart = threading.Timer(1.0, stoppable_postgres.start)
    restart.start()
    began = time.monotonic()
    plan = far_registry.plan("photos")
    waited = time.monotonic() - began
    restart.join()

    assert plan.legs == (OLD,)
    assert 0.5 < waited < 100


@pytest.mark.postgres
@pytest.mark.parametrize("rested", [True, False])
def test_connections_that_the_server_closed_are_opened_again(
    far_registry: Registry, stoppable_postgres: Postgres, monkeypatch: pytest.MonkeyPatch, rested: bool
) -> None:
    """One that rested is tried before the call, which therefore needs no other attempt. Otherwise the call is made again."""
    patience = 0.0 if rested else 20.0
    registry = Registry(far_registry.url.render_as_string(hide_password=False), patience=patience)
    monkeypatch.setattr(engine, "_RESTED", 0.0 if rested else 60.0)
    with ThreadPoolExecutor(3) as threads:
        list(threads.map(lambda _: registry.galleries(), range(6)))
    stoppable_postgres.run(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{registry.url.database}'")

    assert [row.name for row in registry.galleries()] == ["photos"]
    registry.close()


@pytest.mark.postgres
def test_a_database_that_stays_away_is_named_without_its_password(far_registry: Registry, stoppable_postgres: Postgres) -> None:
    impatient = Registry(far_registry.url.render_as_string(hide_password=False), patience=0.5)
    stoppable_postgres.stop()
    began = time.monotonic()

    with pytest.raises(RegistryUnavailable, match=r"The registry at postgresql\+psycopg://postgres:\*\*\*@") as caught:
        impatient.galleries()

    assert time.monotonic() - began < 15
    assert "did not answer for 0.5 s" in str(caught.value)
    assert "run the same command again" in str(caught.value)
    said = [str(caught.value)]
    cause = caught.value.__cause__
    while cause is not None:
        said.append(str(cause))
        cause = cause.__cause__ or cause.__context__
    assert not [sentence for sentence in said if PASSWORD in sentence]
    stoppable_postgres.start()
    assert [row.name for row in impatient.galleries()] == ["photos"]
    impatient.close()


@pytest.mark.postgres
def test_a_database_that_only_reads_since_another_took_over_is_waited_for(
    far_registry: Registry, stoppable_postgres: Postgres
) -> None:
    def reads_only(word: str) -> None:
        address = far_registry.url.render_as_string(hide_password=False).replace("+psycopg", "")
        with psycopg.connect(address, autocommit=True) as connection:
            connection.execute("set default_transaction_read_only = off")
            connection.execute(f"alter system set default_transaction_read_only = {word}")  # type: ignore[arg-type]
            connection.execute("select pg_reload_conf()")

    refused = threading.Event()
    event.listen(far_registry.engine, "handle_error", lambda _: refused.set())
    far_registry.refresh("photos", client="c1", ready=1, trouble="")
    reads_only("on")
    with far_registry.engine.connect() as connection:
        wait_until(lambda: connection.execute(text("SHOW default_transaction_read_only")).scalar() == "on")
    with ThreadPoolExecutor(1) as pool:
        told = pool.submit(far_registry.refresh, "photos", client="c1", ready=7, trouble="")
        try:
            assert refused.wait(60)
        finally:
            reads_only("off")
        told.result(timeout=60)
    (client,) = far_registry.clients(far_registry.gallery("photos").id)

    assert client.ready == 7


@pytest.mark.postgres
def test_rights_that_are_missing_are_named(postgres: Postgres, postgres_url: str) -> None:
    if not postgres.run("SELECT 1 FROM pg_roles WHERE rolname = 'guest'"):
        postgres.run("CREATE ROLE guest LOGIN")
    as_guest = postgres_url.replace("://postgres:", "://guest:")
    postgres.run("GRANT USAGE ON SCHEMA public TO guest", "test")
    with pytest.raises(RegistryError, match=r"refused: permission denied for schema public; give its user the rights"):
        schema.upgrade(as_guest)
    schema.upgrade(postgres_url)
    guest = Registry(as_guest, patience=20)
    with pytest.raises(RegistryError, match=r"refused: permission denied for table \w+; give its user the rights"):
        guest.galleries()
    guest.close()


@pytest.mark.postgres
def test_a_caller_without_a_free_connection_hears_so(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    schema.upgrade(postgres_url)
    registry = Registry(postgres_url, patience=20)
    monkeypatch.setattr(registry.engine.pool, "_timeout", 0.2)
    with contextlib.ExitStack() as others:
        for _ in range(15):
            others.enter_context(registry.engine.connect())
        with pytest.raises(RegistryUnavailable, match=r"did not answer for 20 s .*QueuePool limit"):
            registry.galleries()
    assert registry.galleries() == []
    registry.close()


@pytest.mark.postgres
def test_work_goes_on_while_the_database_restarts_under_it(far_registry: Registry, stoppable_postgres: Postgres) -> None:
    upgrade = add_upgrade(far_registry, far_registry.gallery("photos"))
    far_registry.add_batches(upgrade.id, [([number], None) for number in range(200)], first=1)
    half = threading.Event()

    def work(number: int) -> list[int]:
        mine = []
        while batch := claim(far_registry, upgrade, f"w{number}"):
            far_registry.retire(batch, moved=1, requeue=[])
            mine.append(batch.id)
            if len(mine) == 10:
                half.set()
        return mine

    with ThreadPoolExecutor(3) as pool:
        workers = [pool.submit(work, number) for number in range(3)]
        assert half.wait(60)
        stoppable_postgres.stop()
        stoppable_postgres.start()
        taken = [batch for worker in workers for batch in worker.result()]

    assert len(taken) == len(set(taken))
    # A claim whose commit got no answer belongs to no worker until its lease has run out. None is lost.
    assert far_registry.counts(upgrade.id)[BatchState.RETIRED][0] >= 197


@pytest.mark.postgres
def test_a_process_that_is_suspended_in_a_transaction_delays_others_only_shortly(
    stoppable_postgres: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds the gallery's row, which every client reads to renew its plan."""
    url = stoppable_postgres.database()
    schema.upgrade(url)
    monkeypatch.setattr("rmvdb.registry.engine._SUSPENDED", 1000)
    suspended, other = Registry(url, patience=5), Registry(url, patience=5)
    add_gallery(other)
    connection = suspended.engine.connect()
    connection.execute(text("SELECT id FROM galleries FOR UPDATE"))
    with ThreadPoolExecutor(1) as pool:
        told = pool.submit(other.refresh, "photos", client="c1", ready=1, trouble="").result(timeout=60)
    assert told.plan.legs == (OLD,)
    with pytest.raises(Exception, match=r"idle-in-transaction|closed"):
        connection.execute(text("SELECT 1"))
    connection.close()
    assert [version.name for version in suspended.versions()] == [version.name for version in other.versions()]
    suspended.close()
    other.close()


def test_a_locked_file_is_waited_for(sqlite_url: str) -> None:
    schema.upgrade(sqlite_url)
    registry = Registry(sqlite_url, patience=20)
    with ThreadPoolExecutor(1) as pool:
        with registry.engine.begin():
            waiting = pool.submit(registry.versions)
            time.sleep(0.5)
            early = waiting.done()
        versions = waiting.result()
    registry.close()

    assert not early
    assert versions == []


def test_a_registry_survives_a_process_that_dies_in_a_transaction(registry: Registry, gallery: GalleryRow) -> None:
    connection = registry.engine.connect()
    connection.execute(text("UPDATE galleries SET epoch = 99"))
    connection.invalidate()
    connection.close()

    assert registry.plan("photos").epoch == 1


@pytest.mark.postgres
def test_a_statement_of_a_migration_may_take_longer_than_any_other(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "SILENT", 0.5)
    registry = Registry(postgres_url, patience=1.0)
    slow = text("SELECT pg_sleep(2)")
    with waiting.unhurried(), registry.engine.begin() as connection:
        connection.execute(slow)
    with pytest.raises(engine.Away), registry.engine.begin() as connection:
        connection.execute(slow)
    registry.close()


def test_a_database_that_may_lose_acknowledged_changes_is_refused(registry: Registry) -> None:
    with pytest.raises(RegistryError, match="may lose changes that it acknowledged: synchronous_commit is 'off'"):
        registry._expect(REVISION, False, "off")
    registry._expect(REVISION, False, "on")
