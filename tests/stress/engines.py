"""The engines and registries that a stress run works on, and how each can be made to fail."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, runtime_checkable

import psycopg

from tests.stress import sqlite_clock
from tests.support.milvus_server import MilvusServer
from tests.support.postgres import Postgres

#: Searches find each record that the server holds, and a restart forgets none, so that the run can count what rmvdb loses. By
#: default 2.3.5 looks at part of a flushed segment until the segment's index is loaded, also for some tenths of a second after it
#: hands the segment over. If it compacts segments just after a restart, it may forget the last deletions and replacements at the
#: next restart.
EXACT = {"queryNode.segcore.interimIndex.enableIndex": "false", "dataCoord.compaction.enableAutoCompaction": "false"}


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


@runtime_checkable
class Settable(Part, Protocol):
    """One whose clock an administrator may set."""

    def jump(self, seconds: float) -> None:
        """Set its clock, forward or back."""
        ...


@runtime_checkable
class Freezable(Part, Protocol):
    """One that may stand still."""

    def freeze(self, seconds: float) -> None:
        """Suspend it: it refuses nothing and answers nothing."""
        ...


class Rewindable(Part, Protocol):
    """One of which a copy is kept, and put back later: it has gone back to that moment."""

    def keep(self) -> None:
        """Keep a copy of it as it is now."""
        ...

    def go_back(self) -> None:
        """Become as the copy is."""
        ...


class Emptied(Rewindable, Protocol):
    """A registry, which is lost and made again."""

    def empty(self) -> None:
        """Remove its contents while no process has it open."""
        ...


class LiteFile:
    """A Milvus Lite file below the project's folder; the next process that needs it starts its server again."""

    address = None

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def restart(self, *, kill: bool) -> None:
        """Kill the server or its owner. The next user starts another."""
        for pid in self._processes()[: 1 if kill else None]:
            os.kill(pid, signal.SIGKILL)

    def stall(self, seconds: float) -> None:
        """Suspend the server."""
        _stall(self._processes(), seconds)

    def keep(self) -> None:
        """Copy the file while no process serves it."""
        with self._unserved() as file:
            _copied(file, self._kept)

    def go_back(self) -> None:
        """Put the copy back while no process serves the file."""
        with self._unserved() as file:
            for end in ("-wal", "-shm"):
                file.with_name(file.name + end).unlink(missing_ok=True)
            shutil.copy(self._kept, file)

    @property
    def _kept(self) -> Path:
        return self._folder / "kept.db"

    @contextmanager
    def _unserved(self) -> Iterator[Path]:
        """Give the file. No process starts its server meanwhile: it would need this lock (rmvdb/engines/lite)."""
        file = self._folder / ".rmvdb" / "milvus.db"
        with (file.parent / ".milvus.db.address").open("r+b") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self.restart(kill=False)
            while self._processes():
                time.sleep(0.02)
            yield file

    def _processes(self) -> list[int]:
        """Return the file's server and its owner, in that order."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = path.read_bytes().split(b"\0")
            except OSError:
                continue  # it ended while we looked
            if any(word == bytes(self._folder / ".rmvdb" / "milvus.db") for word in words):
                found.append((b"rmvdb.engines.lite" in words, int(path.parent.name)))
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

    def keep(self) -> None:
        """Copy its folder while it is stopped."""
        self._server.stop()
        shutil.rmtree(self._kept, ignore_errors=True)
        shutil.copytree(self._server.folder, self._kept)
        self._server.start()

    def go_back(self) -> None:
        """Replace its folder by the copy."""
        self._server.stop(kill=True)
        shutil.rmtree(self._server.folder)
        shutil.copytree(self._kept, self._server.folder)
        self._server.start()

    @property
    def _kept(self) -> Path:
        return self._server.folder.with_name("kept")


class Database:
    """A real PostgreSQL of the run's own."""

    def __init__(self, server: Postgres) -> None:
        self._server = server
        self.address = server.database()
        self._name = self.address.rsplit("/", 1)[-1].split("?")[0]
        self._ahead = 0.0
        self._server.settable_clock(self._name)

    def restart(self, *, kill: bool) -> None:
        """Stop and start it on the same data."""
        self._server.stop()
        time.sleep(0.5)
        self._server.start()

    def stall(self, seconds: float) -> None:
        """Lock every row of the work list for a while, as a long transaction of another program does."""
        with contextlib.suppress(psycopg.errors.DeadlockDetected):  # of two that wait for each other the database may choose this
            self._server.run(f"BEGIN; LOCK TABLE batches, intents; SELECT pg_sleep({seconds}); COMMIT", self._name)

    def jump(self, seconds: float) -> None:
        """Set its clock, forward or back."""
        self._ahead += seconds
        self._server.set_clock(self._name, self._ahead)

    def freeze(self, seconds: float) -> None:
        """Suspend it with all its sessions: it refuses nothing and answers nothing."""
        _stall(self._server.processes(), seconds)

    def keep(self) -> None:
        """Copy its folder while it is stopped."""
        self._server.stop()
        self._server.keep()
        self._server.start()

    def go_back(self) -> None:
        """Replace its folder by the copy."""
        self._server.stop()
        self._server.go_back()
        self._server.start()

    def empty(self) -> None:
        """Drop all its tables; its clock shows what it showed."""
        self._server.empty(self._name)
        self._server.settable_clock(self._name)
        self._server.set_clock(self._name, self._ahead)


class File:
    """A SQLite file below the project's folder; it has no process that could fail, and its clock is its users' own."""

    address = None

    def __init__(self, folder: Path) -> None:
        self._folder, self._ahead = folder, 0.0
        self._file, self._kept = folder / ".rmvdb" / "registry.sqlite", folder / "kept-registry.db"

    def settable_clock(self) -> None:
        """Let this process, and those that begin in the folder from now on, see the clock that `jump` sets."""
        shutil.copy(sqlite_clock.__file__, self._folder / "sitecustomize.py")
        sqlite_clock.install(self._folder)

    def jump(self, seconds: float) -> None:
        """Set its clock, forward or back."""
        self._ahead += seconds
        sqlite_clock.set_ahead(self._folder, self._ahead)

    def keep(self) -> None:
        """Copy it as SQLite does, between two transactions."""
        _copied(self._file, self._kept)

    def go_back(self) -> None:
        """Replace its contents by the copy, even if processes have it open."""
        _copied(self._kept, self._file)

    def empty(self) -> None:
        """Remove it."""
        for end in ("", "-wal", "-shm"):
            self._file.with_name(self._file.name + end).unlink(missing_ok=True)


@contextmanager
def engine(kind: str, folder: Path) -> Iterator[Rewindable]:
    """Give the engine of that name: lite or server."""
    if kind == "lite":
        yield LiteFile(folder)
        return
    with MilvusServer(folder / "milvus", settings=EXACT) as server:
        yield Server(server)


@contextmanager
def registry(kind: str, folder: Path) -> Iterator[Emptied]:
    """Give the registry of that name: sqlite or postgres."""
    if kind == "sqlite":
        file = File(folder)
        file.settable_clock()
        yield file
        return
    server = Postgres()
    try:
        yield Database(server)
    finally:
        server.remove()


def _copied(source: Path, target: Path) -> None:
    with contextlib.closing(sqlite3.connect(source)) as there, contextlib.closing(sqlite3.connect(target, timeout=60)) as here:
        there.backup(here)


def _stall(pids: list[int], seconds: float) -> None:
    for sent in (signal.SIGSTOP, signal.SIGCONT):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
                os.kill(pid, sent)
        if sent is signal.SIGSTOP:
            time.sleep(seconds)
