"""The engines and registries that a stress run works on, and how each can be made to fail."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, runtime_checkable

import psycopg

from tests.support.milvus_server import MilvusServer
from tests.support.postgres import Postgres


class Part(Protocol):
    """An engine or a database: where it is."""

    #: For rmvdb.toml; None leaves the default.
    address: str | None


@runtime_checkable
class Breakable(Part, Protocol):
    """One that has processes, and what may happen to them."""

    def restart(self, *, kill: bool) -> None:
        """Stop it, at once with `kill`, and start it again; returns when it answers."""
        ...

    def stall(self, seconds: float) -> None:
        """Let it answer nothing for a while."""
        ...


class LiteFile:
    """A Milvus Lite file below the project's folder; its server is started again by whoever needs it next."""

    address = None

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def restart(self, *, kill: bool) -> None:
        """The server or its owner dies; the next user starts another."""
        for pid in self._processes()[: 1 if kill else None]:
            os.kill(pid, signal.SIGKILL)

    def stall(self, seconds: float) -> None:
        """Suspend the server."""
        _stall(self._processes(), seconds)

    def _processes(self) -> list[int]:
        """The file's server and its owner, in that order."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = path.read_bytes().split(b"\0")
            except OSError:
                continue  # it ended while we looked
            if any(word == bytes(self._folder / ".rmvdb" / "milvus.db") for word in words):
                found.append((b"rmvdb.lite" in words, int(path.parent.name)))
        return [pid for _, pid in sorted(found)]


class Server:
    """A real Milvus server of the run's own."""

    def __init__(self, server: MilvusServer) -> None:
        self._server = server
        self.address = server.address

    def restart(self, *, kill: bool) -> None:
        """Stop and start it on the same data."""
        self._server.stop(kill=kill)
        self._server.start()

    def stall(self, seconds: float) -> None:
        """Suspend it with all its threads."""
        _stall(self._server.processes(), seconds)


class Database:
    """A real PostgreSQL of the run's own."""

    def __init__(self, server: Postgres) -> None:
        self._server = server
        self.address = server.database()

    def restart(self, *, kill: bool) -> None:
        """Stop and start it on the same data."""
        self._server.stop()
        time.sleep(0.5)
        self._server.start()

    def stall(self, seconds: float) -> None:
        """Hold every row of the work list for a while, as a long transaction of somebody else would."""
        database = self.address.rsplit("/", 1)[-1].split("?")[0]
        with contextlib.suppress(psycopg.errors.DeadlockDetected):  # of two that wait for each other the database may choose this
            self._server.run(f"BEGIN; LOCK TABLE batches, intents; SELECT pg_sleep({seconds}); COMMIT", database)


class File:
    """A SQLite file below the project's folder; it has no process that could fail."""

    address = None


@contextmanager
def engine(kind: str, folder: Path) -> Iterator[Part]:
    """The engine of that name: lite or server."""
    if kind == "lite":
        yield LiteFile(folder)
        return
    with MilvusServer(folder / "milvus") as server:
        yield Server(server)


@contextmanager
def registry(kind: str) -> Iterator[Part]:
    """The registry of that name: sqlite or postgres."""
    if kind == "sqlite":
        yield File()
        return
    server = Postgres()
    try:
        yield Database(server)
    finally:
        server.remove()


def _stall(pids: list[int], seconds: float) -> None:
    for sent in (signal.SIGSTOP, signal.SIGCONT):
        for pid in pids:
            os.kill(pid, sent)
        if sent is signal.SIGSTOP:
            time.sleep(seconds)
