"""The kernel's locks on the files beside a Milvus Lite database; they end with their process, however it ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from rmvdb.engines.lite.files import beside, error_of, open_private
from rmvdb.errors import DiskFull, EngineUnavailable

#: Seconds that a server may take to start, and to release a file.
START, RELEASE = 60.0, 10.0
#: Seconds to wait for a lock that another process has: that process may be starting a server, or ending one.
_PATIENCE = START + 3 * RELEASE
#: Bytes that must be free for a replacement: Lite 2 writes first the deletion, then the insertion, each in full.
ROOM = 32 * 2**20
#: The most writers that may go on at the same time, once a suspended process has the gate.
STALLED_WRITERS = 8


@contextlib.contextmanager
def gate(path: Path | str, *, alone: bool, patience: float = 2.0) -> Iterator[None]:
    """Pass with others (a search) or alone (a replacement), so that no search falls between Lite's delete and its insert.

    Measured without the gate: 21 of 160 searches missed a record that was being replaced. After `patience` seconds a process
    goes on all the same: a process that is suspended inside must not stop all others.

    Raises:
        DiskFull: Less than `ROOM` is free for a replacement. If Lite wrote the delete and could not write the insert, the record
            would be lost.
    """
    path = Path(path).resolve()
    deadline = time.monotonic() + patience
    try:
        files = contextlib.ExitStack()
        turn, room = (files.enter_context(open_private(beside(path, what))) for what in ("turn", "room"))
    except OSError as exc:
        files.close()
        raise error_of(path, exc) from exc
    with files, unlocked_after(turn, room):
        # Each process takes a turn first, and a replacement keeps it: a stream of searches cannot keep a writer waiting.
        _wait_for(turn, alone=alone, deadline=deadline)
        if not alone:
            fcntl.flock(turn, fcntl.LOCK_UN)
        passed = _wait_for(room, alone=alone, deadline=deadline)
        if alone:
            _expect_room(path, ROOM if passed else STALLED_WRITERS * ROOM)  # here, because each waiting writer takes some of it
        yield


def _expect_room(path: Path, needed: int) -> None:
    disk = shutil.disk_usage(path.parent)
    if disk.total and disk.free < needed:  # some file systems give no sizes
        raise DiskFull(f"The disk that holds {path} has less than {needed >> 20} MiB free; make room, then write again")


def _wait_for(lock: IO[bytes], *, alone: bool, deadline: float) -> bool:
    """Return whether the lock was acquired before the deadline."""
    while True:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)


@contextlib.contextmanager
def unlocked_after(*files: IO[bytes]) -> Iterator[None]:
    """Unlock the files at the end. A process that was forked meanwhile has them open, so closing them would not unlock them."""
    try:
        yield
    finally:
        for file in files:
            fcntl.flock(file, fcntl.LOCK_UN)


def lock(file: IO[bytes], how: int, name: Path) -> None:
    """Lock the file. Raises EngineUnavailable if another process keeps it for too long."""
    deadline = time.monotonic() + _PATIENCE
    while True:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(file, how | fcntl.LOCK_NB)
            return
        if time.monotonic() > deadline:
            raise EngineUnavailable(
                f"{name} is locked by another process for over {_PATIENCE:g} s; end that process (fuser {name} tells which it is)"
            )
        time.sleep(0.01)


class EngineLock:
    """Milvus Lite's own lock on the database. pymilvus removes the lock's file even if it is refused; then this makes it
    again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._name = beside(path, "lock")
        self._locked: list[IO[bytes]] = []

    def __enter__(self) -> EngineLock:
        deadline = time.monotonic() + RELEASE
        # A server that has just lost its owner may keep the lock for a moment.
        while not self.keep():
            if time.monotonic() > deadline:
                raise EngineUnavailable(
                    f"{self._path} is open in another program; close it there (pymilvus keeps it until its process ends)"
                )
            time.sleep(0.05)
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._locked:
            file.close()

    def keep(self) -> bool:
        """Take or keep the lock on the file that exists now; return whether this process has it."""
        if self._locked and self._is_there(self._locked[-1]):
            return True
        file = self._name.open("ab")
        with contextlib.suppress(BlockingIOError):
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if self._is_there(file):
                self._locked.append(file)
                return True
        file.close()
        return False

    def _is_there(self, file: IO[bytes]) -> bool:
        try:
            return os.fstat(file.fileno()).st_ino == self._name.stat().st_ino
        except FileNotFoundError:
            return False
