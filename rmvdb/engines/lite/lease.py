"""A process' lease on a Milvus Lite file: `address` takes it, `release` gives it back."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

from rmvdb.engines.lite.files import beside, error_of, open_private, serves, usable
from rmvdb.engines.lite.locks import RELEASE, START, lock, unlocked_after
from rmvdb.errors import EngineUnavailable
from rmvdb.timing import ProcessLock

#: Seconds without any user after which the owner ends.
IDLE = 60.0
#: The most seconds between two starts of a server that does not start; the second start follows the first at once.
_REST = 30.0

_leases: dict[Path, IO[bytes]] = {}
_leases_lock = ProcessLock()


def address(path: Path | str, *, idle: float = IDLE) -> str:
    """Return where the server of this Milvus Lite file listens, such as "unix:/data/.x.db.sock"; start its owner if needed.

    From then on this process counts as a user of the file, until it ends or calls `release`. The owner ends after `idle`
    seconds without users.

    Raises:
        EngineError: The path cannot be used.
        EngineUnavailable: The server does not start.
    """
    try:
        path = usable(path)
        _hold(path)
        place = beside(path, "address")
        with contextlib.suppress(FileNotFoundError):
            if serves(known := place.read_text(errors="replace"), path):
                return known
        with open_private(place) as file, unlocked_after(file):
            lock(file, fcntl.LOCK_EX, place)
            return _known_or_started(path, file, idle)
    except OSError as exc:
        raise error_of(path, exc) from exc


def _known_or_started(path: Path, file: IO[bytes], idle: float) -> str:
    """Return the address in this locked file; if no server listens there, start an owner and return its address."""
    if serves(known := _text(file), path):
        return known
    failures = _Failures.read(known, path)
    failures.expect_rest_over()
    try:
        return _start_owner(path, idle)
    except EngineUnavailable as exc:
        if serves(known := _text(file), path):
            return known  # the process that started the owner was killed while the owner started
        file.truncate(0)
        file.write(failures.another(str(exc)).encode())
        raise


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Failures:
    """Failed starts of a file's server, one after the other. They are kept where its address would be."""

    #: The state of the file that the server did not open. If the file has changed since, a start is tried at once.
    file: str
    count: int = 0
    until: float = 0.0
    sentence: str = ""

    @classmethod
    def read(cls, text: str, path: Path) -> _Failures:
        """Parse a text; the failures of another state of the file do not count."""
        fresh = cls(file=_state(path))
        try:
            failures = cls(**json.loads(text))
        except (ValueError, TypeError):
            return fresh
        return failures if failures.file == fresh.file else fresh

    def expect_rest_over(self) -> None:
        """Raise EngineUnavailable, with the message of the last start, until the next start is due."""
        if 0.0 < (left := self.until - time.time()) <= _REST:
            raise EngineUnavailable(
                f"{self.sentence} ({self.count} starts failed; the next one may be made in {math.ceil(left)} s)"
            )

    def another(self, sentence: str) -> str:
        """Return the text that keeps one more failure."""
        rest = min(_REST, 2.0 ** (self.count - 1)) if self.count else 0.0
        more = dataclasses.replace(self, count=self.count + 1, until=time.time() + rest, sentence=sentence)
        return json.dumps(dataclasses.asdict(more))


def _state(path: Path) -> str:
    with contextlib.suppress(FileNotFoundError):
        found = path.stat()
        return f"{found.st_ino} {found.st_size} {found.st_mtime_ns}"
    return ""


def release(path: Path | str) -> None:
    """Stop counting as a user of the file; do nothing if this process is not one."""
    with _leases_lock.now:
        lease = _leases.pop(Path(path).resolve(), None)
    if lease is not None:
        lease.close()


def _hold(path: Path) -> None:
    with _leases_lock.now:
        if path not in _leases:
            lease = open_private(beside(path, "lease"))
            # Waits while an owner ends: its address is gone once this process has the lease.
            try:
                lock(lease, fcntl.LOCK_SH, beside(path, "lease"))
            except BaseException:
                lease.close()
                raise
            _leases[path] = lease
        # Shows the owner a user that comes and goes between two of its looks.
        os.utime(beside(path, "lease"))


def _start_owner(path: Path, idle: float) -> str:
    command = [sys.executable, "-m", "rmvdb.engines.lite", str(path), "--idle", str(idle)]
    with open_private(beside(path, "log")) as log:
        try:
            # Returns when the owner has closed its output, after its address or the reason why it has none.
            done = subprocess.run(  # noqa: S603 - our own program
                command,
                cwd=Path(__file__).parents[3],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
                timeout=START + RELEASE + 10.0,
                check=False,
            )
        except subprocess.TimeoutExpired as exc:
            raise EngineUnavailable(f"The server of {path} did not start in time; see {beside(path, 'log')}") from exc
    answer = done.stdout.decode().strip()
    if not answer.startswith("unix:"):
        raise EngineUnavailable(answer or f"The server of {path} did not start; see {beside(path, 'log')}")
    return answer
