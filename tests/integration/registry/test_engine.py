"""SQLite and PostgreSQL as they are connected to: their clock, and what they say when something is wrong."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from sqlalchemy import event

from rmvdb.errors import ConfigError, DiskFull, RegistryError, RegistryUnavailable, SchemaOutdated
from rmvdb.registry import schema
from rmvdb.registry.registry import Registry
from tests.support.descriptors import few_descriptors
from tests.support.photos import add_gallery, opened
from tests.support.small_disk import on_small_disk


def test_the_clock_is_the_databases_and_counts_seconds_since_1970(registry: Registry) -> None:
    before = registry.now()
    time.sleep(0.05)
    passed = registry.now() - before

    assert abs(before - time.time()) < 60
    assert 0.04 < passed < 5


def test_a_file_that_was_removed_is_not_written_to_any_more(sqlite_url: str, tmp_path: Path) -> None:
    schema.upgrade(sqlite_url)
    registry = Registry(sqlite_url)
    add_gallery(registry)
    for path in tmp_path.glob("registry.sqlite*"):
        path.unlink()
    with pytest.raises(SchemaOutdated):
        registry.galleries()
    schema.upgrade(sqlite_url)

    assert registry.galleries() == []
    registry.close()


@pytest.mark.postgres
@pytest.mark.parametrize("part", ["database", "user"])
def test_a_wrong_address_is_refused_at_once(postgres_url: str, part: str) -> None:
    wrong = Registry(postgres_url)
    change = {"database": {"database": "nowhere"}, "user": {"username": "nobody"}}[part]
    there = Registry(wrong.url.set(**change).render_as_string(hide_password=False))
    began = time.monotonic()

    with pytest.raises(RegistryError, match=r'"(nowhere|nobody)" does not exist; correct registry.url'):
        there.galleries()

    assert time.monotonic() - began < 5
    there.close()
    wrong.close()


def test_a_password_among_the_parameters_is_hidden_too() -> None:
    registry = Registry("postgresql+psycopg://me@localhost/rmvdb?password=hidden-word&sslmode=require")

    assert registry.shown_url == "postgresql+psycopg://me@localhost/rmvdb?password=***&sslmode=require"


@pytest.mark.parametrize("password", ["p@Tail99", "p@Tail99:x", "p@Tail99/x", "p@Tail99?x", "p?x@Tail99"])
def test_no_part_of_an_unescaped_password_is_shown(password: str) -> None:
    with pytest.raises(ConfigError, match="with %40, %3A and %2F for @, : and / in the password") as caught:
        Registry(f"postgresql+psycopg://user:{password}@127.0.0.1:1/db", patience=0.1).now()

    assert "Tail99" not in str(caught.value)


@pytest.mark.parametrize(
    "rest",
    ["user@server:p%40@h:1/db", "user:p@h/db?application_name=a@b", "user@h/db?password=a@b"],
)
def test_an_at_sign_elsewhere_is_taken_as_it_is(rest: str) -> None:
    registry = Registry(f"postgresql+psycopg://{rest}")

    assert registry.url.host == "h"


def test_a_file_that_is_no_database_is_named(tmp_path: Path) -> None:
    file = tmp_path / "registry.sqlite"
    file.write_bytes(b"something else entirely, and long enough to be looked at" * 100)
    registry = Registry(f"sqlite:///{file}")

    with pytest.raises(RegistryError, match="file is not a database"):
        registry.galleries()


@pytest.mark.parametrize("left", [0, 1, 2])
def test_no_free_descriptor_is_said_so(sqlite_url: str, left: int) -> None:
    schema.upgrade(sqlite_url)
    registry = Registry(sqlite_url, patience=0.2)
    with few_descriptors(left), pytest.raises(RegistryUnavailable, match=r"no free file descriptor.*ulimit -n"):
        registry.galleries()
    assert registry.galleries() == []
    registry.close()


def test_a_full_disk_says_so(sqlite_url: str) -> None:
    schema.upgrade(sqlite_url)
    registry = Registry(sqlite_url)
    add_gallery(registry)
    event.listen(registry.engine, "begin", lambda connection: connection.exec_driver_sql("PRAGMA max_page_count=1"))

    with pytest.raises(DiskFull, match="free some space, then run the same command again"):
        opened(registry, list(range(5000)))

    registry.close()


FULL = """
import sys
from pathlib import Path
from rmvdb.errors import DiskFull
from rmvdb.registry import schema
from rmvdb.registry.registry import Registry

home = Path(sys.argv[1])
url = f"sqlite:///{home}/registry.sqlite"
schema.upgrade(url)
try:
    with (home / "filler").open("wb") as filler:
        while True:
            filler.write(b"0" * 4096)
            filler.flush()
except OSError:
    pass
try:
    Registry(url, patience=60.0).galleries()
except DiskFull as exc:
    print(exc)
"""


def test_a_full_disk_is_not_a_registry_that_does_not_answer(tmp_path: Path) -> None:
    """SQLite says "disk I/O error": it cannot make the file that its processes share."""
    since = time.monotonic()
    assert on_small_disk(tmp_path, "3m", FULL).startswith("The disk that holds the registry is full; free some space")
    assert time.monotonic() - since < 40


@pytest.mark.postgres
def test_a_statement_may_run_in_a_session_that_has_not_prepared_it(postgres_url: str) -> None:
    """A pooler may give each transaction another session. psycopg prepared a statement at its sixth run."""
    schema.upgrade(postgres_url)
    registry = Registry(postgres_url, patience=5)
    add_gallery(registry)
    for _ in range(12):
        assert registry.gallery("photos").name == "photos"
    with registry.engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM pg_prepared_statements").scalar() == 0
        connection.exec_driver_sql("DEALLOCATE ALL")
    assert registry.gallery("photos").name == "photos"
    registry.close()


@pytest.mark.postgres
def test_a_users_default_isolation_is_not_taken_over(postgres_url: str) -> None:
    """At "repeatable read" a change of epoch would not see the writes that were announced while it waited for its lock."""
    registry = Registry(postgres_url)
    with registry.engine.begin() as connection:
        connection.exec_driver_sql("ALTER ROLE CURRENT_USER SET default_transaction_isolation = 'repeatable read'")
    try:
        again = Registry(postgres_url)
        with again.engine.begin() as connection:
            assert connection.exec_driver_sql("SHOW transaction_isolation").scalar() == "read committed"
        again.close()
    finally:
        with registry.engine.begin() as connection:
            connection.exec_driver_sql("ALTER ROLE CURRENT_USER RESET default_transaction_isolation")
        registry.close()
