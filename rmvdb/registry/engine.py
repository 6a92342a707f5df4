"""Connections to SQLite and PostgreSQL, and the meaning of their failures."""

from __future__ import annotations

import contextlib
import errno
import functools
import math
import os
import shutil
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Dialect, Engine, create_engine, event, make_url
from sqlalchemy.exc import DBAPIError, DisconnectionError, IntegrityError, InterfaceError, InvalidatePoolError, OperationalError

from rmvdb import errors
from rmvdb.registry import forking, waiting
from rmvdb.storage import files
from rmvdb.text import parsed, without_password
from rmvdb.timing import seconds_since_boot

#: rmvdb notices within seconds that a server has vanished.
_POSTGRES = {
    "connect_timeout": 5,
    "tcp_user_timeout": 10_000,
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    # A pooler that gives each transaction another session has no statement that an earlier one prepared.
    "prepare_threshold": None,
}
#: Milliseconds after which PostgreSQL ends an idle transaction: its process may be suspended while it locks rows.
_SUSPENDED = 10_000
#: Milliseconds for which one statement may wait for locks, and run. rmvdb tries it again.
_LOCKED, _RUNS = 5_000, 30_000
#: Seconds of rest after which a connection is tried before it is used, because the server may have closed it meanwhile.
_RESTED = 1.0
#: The file descriptors that one connection needs.
_OPENED = 4
#: The least free bytes of a disk with which SQLite can open a database: its processes share a file of 32 KiB.
_LEAST_ROOM = 1 << 16
#: Milliseconds for which a statement waits for the one lock of SQLite.
_BUSY = 2_000
#: The error codes of SQLite for a file that it cannot lock, read or open right now.
_SQLITE_AWAY = (
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_PROTOCOL,
)
#: The SQLSTATEs of PostgreSQL for a server that is read-only since another took over, and for an idle transaction that it ended.
_DEMOTED = ("25006", "25P03")
_FULL_DISK = "The disk that holds the registry is full; free some space, then run the same command again"
#: Words of PostgreSQL if all its connections are in use (SQLSTATE 53300, which psycopg does not give for a failed connect).
_FULL = ("too many clients", "too many connections", "remaining connection slots")
#: Words of PostgreSQL if another try cannot help.
_REFUSALS = ("authentication failed", "does not exist", "no pg_hba.conf entry")


class Away(Exception):
    """The database cannot be reached, or is locked. Another try may help."""

    #: The sentence that ends the message, if no try helped.
    remedy = "Start it, or correct registry.url, then run the same command again."


class Full(Away):
    """All connections of PostgreSQL are in use. One may be free a moment later."""

    def __init__(self, words: str, most: str) -> None:
        super().__init__(words)
        self.remedy = (
            f"All {most}connections that max_connections allows are in use. Raise max_connections in postgresql.conf, use "
            "PgBouncer, or let rmvdb try for longer with backfill.retry_for."
        )


class Starved(Away):
    """This process has no file descriptor left for a connection. One may be free a moment later."""

    remedy = "This process has no free file descriptor. Close what it has open, or raise its limit (ulimit -n)."


def parsed_url(url: str) -> URL:
    """Parse the database's URL.

    Raises:
        ConfigError: the URL cannot be read. The message hides the password.
    """
    if (result := parsed(url)) is None:
        raise errors.ConfigError(
            f"registry.url = {without_password(url)!r} cannot be read; write postgresql://user:password@host:5432/database, with "
            "%40, %3A and %2F for @, : and / in the password"
        )
    return result


def make_engine(url: str) -> Engine:
    """Make the engine that opens every connection to this database and translates its failures."""
    facts: dict[str, str] = {}
    if make_url(url).get_backend_name() != "sqlite":
        try:
            engine = create_engine(url, connect_args=_POSTGRES, isolation_level="READ COMMITTED")
        except ModuleNotFoundError as exc:
            raise errors.RegistryError(f"PostgreSQL needs {exc.name}; install it: pip install 'rmvdb[postgres]'") from exc
        event.listen(engine, "do_connect", waiting.connect)
        event.listen(engine, "connect", functools.partial(_prepare_postgres, facts))
        event.listen(engine, "checkin", lambda _, record: record.info.update(rests_since=seconds_since_boot()))
        event.listen(engine, "checkout", functools.partial(_try_rested, engine.dialect))
    else:
        engine = create_engine(url, connect_args={"timeout": _BUSY / 1000})
        if (database := make_url(url).database) and database != ":memory:":
            files.make_folder(Path(database).parent, "home, or registry.url,")
            # SQLite gives the files -wal and -shm the rights of this one.
            event.listen(engine, "do_connect", lambda *_: files.make_private(Path(database)))
            event.listen(engine, "connect", lambda _, record: record.info.update(file=_file_at(database)))
            event.listen(engine, "checkout", functools.partial(_leave_removed_file, database))
            forking.watch(engine)
        event.listen(engine, "connect", _prepare_sqlite)
        event.listen(engine, "begin", _begin_immediate)
    event.listen(engine, "handle_error", functools.partial(_translate, facts), retval=True)
    return engine


def at_once(engine: Engine) -> Connection:
    """Connect so that a statement is a transaction of its own, without BEGIN and COMMIT."""
    level = {} if engine.dialect.name == "sqlite" else {"isolation_level": "AUTOCOMMIT"}
    return engine.connect().execution_options(at_once=True, **level)


def safe_settings() -> dict[str, str]:
    """Return the settings that each transaction of PostgreSQL needs, whatever its user's or its database's defaults are.

    They keep every change that was acknowledged, and bound every wait.
    """
    return {
        "synchronous_commit": "on",
        "idle_in_transaction_session_timeout": str(_SUSPENDED),
        "lock_timeout": str(_LOCKED),
        "statement_timeout": str(_RUNS),
    }


def _prepare_postgres(facts: dict[str, str], connection: Any, _: Any) -> None:
    # Not as options of the connection: poolers refuse options that they do not know.
    settings = ", ".join(f"set_config('{name}', '{value}', false)" for name, value in safe_settings().items())
    connection.autocommit = True  # without BEGIN and COMMIT
    with connection.cursor() as cursor:
        row = cursor.execute(f"SELECT current_setting('max_connections'), {settings}").fetchone()
    connection.autocommit = False
    facts["max_connections"] = row[0]


def _try_rested(dialect: Dialect, connection: Any, record: Any, _: Any) -> None:
    # A sooner one is as likely broken as one in use, and then the call is made again.
    if seconds_since_boot() - record.info.get("rests_since", math.inf) > _RESTED:
        try:
            dialect.do_ping(connection)
        except dialect.loaded_dbapi.Error as exc:
            raise InvalidatePoolError(f"the connection broke: {exc}") from exc  # the pool opens all connections again


def _prepare_sqlite(connection: Any, _: Any) -> None:
    connection.isolation_level = None  # SQLAlchemy sends BEGIN itself, below
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", f"busy_timeout={_BUSY}"):
        connection.execute(f"PRAGMA {pragma}")


def _leave_removed_file(database: str, _: Any, record: Any, __: Any) -> None:
    # If the file was removed, SQLite would still read and write it, while other processes use a new file of that name.
    if record.info["file"] != _file_at(database):
        raise DisconnectionError(f"{database} is not the file that was opened")  # the pool opens it again


def _file_at(database: str) -> tuple[int, int] | None:
    try:
        status = Path(database).stat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


def _begin_immediate(connection: Connection) -> None:
    # Replaces row locks in SQLite: a transaction locks the database as it begins, so its reads and writes see one state.
    if "at_once" not in connection.get_execution_options():
        connection.exec_driver_sql("BEGIN IMMEDIATE")


def _translate(facts: Mapping[str, str], context: Any) -> Exception | None:
    failure = context.original_exception
    words = str(failure).splitlines()[0] if str(failure) else type(failure).__name__
    if (
        "no such table" in words
        or "no such column" in words
        or "UndefinedTable" in type(failure).__name__
        or "UndefinedColumn" in type(failure).__name__
    ):
        return errors.SchemaOutdated(
            "The registry's tables are missing or old; run: rmvdb db upgrade, or rmvdb registry rebuild if it was lost"
        )
    if "disk is full" in words or "No space left" in words:
        return errors.DiskFull(_FULL_DISK)
    if getattr(failure, "sqlstate", "") in _DEMOTED:
        context.is_disconnect = True  # so that the pool looks for the server that took over
    if isinstance(failure, sqlite3.Error) and context.engine is not None and (refusal := unwritable(context.engine.url)):
        return refusal
    if isinstance(failure, sqlite3.OperationalError) and context.engine is not None and _is_full(context.engine.url):
        return errors.DiskFull(_FULL_DISK)
    if _is_away(context, words):
        full = any(word in words for word in _FULL)
        away = Full(words, _number(facts)) if full else Starved(words) if _starved() else Away(words)
        away.__cause__ = failure
        return away
    if "InsufficientPrivilege" in type(failure).__name__:
        return errors.RegistryError(
            f"The registry refused: {words}; give its user the rights that docs/how-to/least-privileges.md names"
        )
    refused = isinstance(context.sqlalchemy_exception, DBAPIError) and not isinstance(
        context.sqlalchemy_exception, IntegrityError
    )
    if type(failure) is sqlite3.DatabaseError or refused:
        return errors.RegistryError(f"The registry refused: {words}; correct registry.url or the database it names")
    return None


def _is_full(url: URL) -> bool:
    """Return whether the disk of a database of SQLite has no room for the file that its processes share: "disk I/O error"."""
    folder = Path(url.database or "").parent
    return folder.is_dir() and shutil.disk_usage(folder).free < _LEAST_ROOM


def _starved() -> bool:
    """Return whether this process lacks the descriptors of one connection: SQLite opens three files and then a folder."""
    with contextlib.ExitStack() as opened:
        try:
            for _ in range(_OPENED):
                opened.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        except OSError as exc:
            return exc.errno in (errno.EMFILE, errno.ENFILE)
    return False


def _number(facts: Mapping[str, str]) -> str:
    """Return how many connections the server allows, if an earlier connection of this process has read it."""
    return f"{facts['max_connections']} " if "max_connections" in facts else ""


def unwritable(url: URL) -> errors.RegistryError | None:
    """Return the error that names the file or the folder that this process may not write; None if SQLite can write."""
    if url.get_backend_name() != "sqlite" or not url.database or url.database == ":memory:":
        return None
    file = Path(url.database)
    needed = (*(file.with_name(f"{file.name}{end}") for end in ("", "-wal", "-shm")), file.parent)
    denied = next((path for path in needed if os.path.lexists(path) and not os.access(path, os.W_OK)), None)
    if denied is None:
        return None
    mounted = hasattr(os, "statvfs") and os.statvfs(denied).f_flag & os.ST_RDONLY
    why = f"the disk of {denied} is mounted read-only" if mounted else f"permission denied, this user may not write {denied}"
    way_out = "mount it for writing" if mounted else "correct that (chmod, chown)"
    return errors.RegistryError(f"The registry {file} cannot be written: {why}; {way_out}, or set registry.url")


def _is_away(context: Any, words: str) -> bool:
    failure = context.original_exception
    if isinstance(failure, sqlite3.Error):
        return getattr(failure, "sqlite_errorcode", sqlite3.SQLITE_OK) & 0xFF in _SQLITE_AWAY
    known = context.is_disconnect or isinstance(context.sqlalchemy_exception, OperationalError | InterfaceError)
    return known and not any(refusal in words for refusal in _REFUSALS)
