"""Shares one Milvus Lite file between the processes of a machine: `address(path)` gives the socket of the one that serves it.

Milvus Lite lets one process open a file, and its server ends with that process. So the owner is neither the application nor
the command line but a small process of rmvdb's own (`python -m rmvdb.engines.lite <path>`), started by whoever comes first.
Beside `x.db` lie

    .x.db.lock      Milvus Lite's own lock, held by the owner: pymilvus does not open the file meanwhile
    .x.db.lease     held shared by every process that uses the file, exclusively by an owner that ends
    .x.db.address   where the owner's server listens; locked by whoever reads it or starts an owner
    .x.db.log       what the server said last
    .x.db.turn, .x.db.room    the gate: searches share it, a replacement is alone (Lite deletes, then inserts)

All of them, and the file itself, are their owner's alone: who could open them could hold their locks. All locks are the
kernel's: they go with their process however it ends. The server goes with its owner (Linux: by a death
signal; elsewhere because it watches the first lock itself).
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import errno
import fcntl
import importlib.util
import json
import math
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NoReturn

from rmvdb.errors import DiskFull, EngineError, EngineUnavailable, RmvdbError

#: Seconds without any user after which the owner ends.
IDLE = 60.0
#: Seconds that a server may take to start, and to let go of a file.
_START, _RELEASE = 60.0, 10.0
#: Seconds for which a lock that another process holds is waited for: it may be starting a server, or ending one.
_PATIENCE = _START + 3 * _RELEASE
#: Seconds between two starts of a server that does not start, at the most; the second follows the first at once.
_REST = 30.0
_SQLITE = b"SQLite format 3\0"
#: A Unix socket's path has room for 104 bytes on macOS and 108 on Linux; gRPC would decode other characters.
_SOCKET = re.compile(r"[A-Za-z0-9._/-]{1,100}")

#: Bytes that must be free for a replacement: Lite 2 writes first what is deleted, then what is inserted, each in full.
ROOM = 32 * 2**20
#: How many may go on at the same time, once the gate is held by somebody who is suspended.
STALLED_WRITERS = 8

_leases: dict[Path, IO[bytes]] = {}
_leases_lock = threading.Lock()


def address(path: Path | str, *, idle: float = IDLE) -> str:
    """Where the server of this Milvus Lite file listens, such as "unix:/data/.x.db.sock"; starts its owner if there is none.

    From then on this process counts as a user of the file, until it ends or calls `release`. The owner ends after `idle`
    seconds without users. Raises EngineError for a path that cannot be used, EngineUnavailable if the server does not start.
    """
    try:
        path = _usable(path)
        _hold(path)
        place = _beside(path, "address")
        with contextlib.suppress(FileNotFoundError):
            if _answers(known := place.read_text(errors="replace")):
                return known
        with _opened(place) as file:
            _lock(file, fcntl.LOCK_EX, place)
            return _known_or_started(path, file, idle)
    except OSError as exc:
        raise _translated(path, exc) from exc


def _known_or_started(path: Path, file: IO[bytes], idle: float) -> str:
    """The address in this file, which is locked, or that of an owner that is started now."""
    if _answers(known := _text(file)):
        return known
    failures = _Failures.read(known, path)
    failures.expect_rest_over()
    try:
        return _start_owner(path, idle)
    except EngineUnavailable as exc:
        if _answers(known := _text(file)):
            return known  # one was starting, whose starter was killed
        file.truncate(0)
        file.write(failures.another(str(exc)).encode())
        raise


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _translated(path: Path | str, exc: OSError) -> RmvdbError:
    if isinstance(exc, PermissionError):
        return EngineError(f"{path} cannot be used: no permission to write {exc.filename}; give it or choose another path")
    if exc.errno == errno.ENOSPC:
        return DiskFull(f"The disk that holds {path} is full; make room, then run the same command again")
    if exc.errno in (errno.EMFILE, errno.ENFILE):
        return EngineUnavailable(
            f"{path} cannot be opened: this process has no free file descriptor; close what it has open, or raise its limit "
            "(ulimit -n)"
        )
    if exc.filename is None:  # no process can be started just now, say
        return EngineUnavailable(f"The server of {path} cannot be started: {exc.strerror}; look at the machine's load")
    return EngineError(f"{path} cannot be used: {exc.strerror} ({exc.filename}); correct that or choose another path")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Failures:
    """Starts of a file's server that failed one after the other, as they are kept in the place of its address."""

    #: Which state of the file the server did not open: one that was changed since is tried at once.
    file: str
    count: int = 0
    until: float = 0.0
    sentence: str = ""

    @classmethod
    def read(cls, text: str, path: Path) -> _Failures:
        """Those that this text keeps of the file as it is now."""
        fresh = cls(file=_state(path))
        try:
            kept = cls(**json.loads(text))
        except (ValueError, TypeError):
            return fresh
        return kept if kept.file == fresh.file else fresh

    def expect_rest_over(self) -> None:
        """EngineUnavailable, with what the last start said, until the next one is due."""
        if 0.0 < (left := self.until - time.time()) <= _REST:
            raise EngineUnavailable(
                f"{self.sentence} ({self.count} starts failed; the next one may be made in {math.ceil(left)} s)"
            )

    def another(self, sentence: str) -> str:
        """The text that keeps one more."""
        rest = min(_REST, 2.0 ** (self.count - 1)) if self.count else 0.0
        more = dataclasses.replace(self, count=self.count + 1, until=time.time() + rest, sentence=sentence)
        return json.dumps(dataclasses.asdict(more))


def _state(path: Path) -> str:
    with contextlib.suppress(FileNotFoundError):
        found = path.stat()
        return f"{found.st_ino} {found.st_size} {found.st_mtime_ns}"
    return ""


def release(path: Path | str) -> None:
    """Stop counting as a user of the file; does nothing where this process is none."""
    with _leases_lock:
        lease = _leases.pop(Path(path).resolve(), None)
    if lease is not None:
        lease.close()


@contextlib.contextmanager
def gate(path: Path | str, *, alone: bool, patience: float = 2.0) -> Iterator[None]:
    """Pass with others (a search), or alone (a replacement), so that no search falls between Lite's delete and its insert.

    Measured without it: 21 of 160 searches missed a record that was being replaced. Whoever waits longer than `patience`
    seconds goes on all the same: a process suspended inside must not stop all others. Raises DiskFull where who is
    alone finds less than `ROOM` free: with its delete written and its insert refused Lite would have lost the record.
    """
    path = Path(path).resolve()
    deadline = time.monotonic() + patience
    try:
        opened = contextlib.ExitStack()
        turn, room = (opened.enter_context(_opened(_beside(path, what))) for what in ("turn", "room"))
    except OSError as exc:
        opened.close()
        raise _translated(path, exc) from exc
    with opened:
        # Everybody takes a turn first, and who wants to be alone keeps it: a stream of searches cannot keep a writer waiting.
        _wait_for(turn, alone=alone, deadline=deadline)
        if not alone:
            fcntl.flock(turn, fcntl.LOCK_UN)
        passed = _wait_for(room, alone=alone, deadline=deadline)
        if alone:
            _expect_room(path, ROOM if passed else STALLED_WRITERS * ROOM)  # here: of many that wait each takes some of it
        yield


def _expect_room(path: Path, needed: int) -> None:
    disk = shutil.disk_usage(path.parent)
    if disk.total and disk.free < needed:  # some file systems tell no sizes
        raise DiskFull(f"The disk that holds {path} has less than {needed >> 20} MiB free; make room, then write again")


def _wait_for(lock: IO[bytes], *, alone: bool, deadline: float) -> bool:
    """Whether it was got before the deadline."""
    while True:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)


def _usable(path: Path | str) -> Path:
    path = Path(path).resolve()
    if not path.parent.is_dir():
        raise EngineError(f"{path} cannot be used: the folder {path.parent} does not exist; create it")
    if not _package():
        raise EngineError(f"{path} cannot be served: milvus-lite is not installed; install it, or use a Milvus server")
    if path.is_dir() and _binary():
        raise EngineError(
            f"{path} is a folder: it was made by Milvus Lite 3, and Milvus Lite 2 is installed; install milvus-lite>=3"
        )
    if path.is_file() and not _is_lite_2(path):
        raise EngineError(f"{path} is not a Milvus Lite file; choose another path")
    if path.is_file() and not _binary():
        raise EngineError(f"{path} was made by Milvus Lite 2, and Milvus Lite 3 is installed; install milvus-lite<3")
    return path


def _is_lite_2(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_SQLITE)) in (b"", _SQLITE)


def _package() -> Path | None:
    # Found, not imported: milvus-lite 2.5 imports pkg_resources, which setuptools has dropped.
    spec = importlib.util.find_spec("milvus_lite")
    return Path(spec.origin).parent if spec and spec.origin else None


def _binary() -> Path | None:
    """The server program of Milvus Lite 2; None for Lite 3, which is Python."""
    package = _package()
    binary = package / "lib" / "milvus" if package else None
    return binary if binary and binary.exists() else None


def _beside(path: Path, what: str) -> Path:
    return path.parent / f".{path.name}.{what}"


def _opened(file: Path) -> IO[bytes]:
    """A file beside the database, made if it is not there, that its owner alone can open."""
    opened = os.fdopen(os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600), "r+b", buffering=0)
    _tighten(opened.fileno())
    return opened


def _tighten(file: int | Path) -> None:
    """Take others' rights to a file or folder of this user away, as earlier versions gave them."""
    found = os.stat(file)  # noqa: PTH116 - also of a descriptor
    if found.st_uid == os.geteuid() and stat.S_IMODE(found.st_mode) & 0o077:
        os.chmod(file, stat.S_IMODE(found.st_mode) & 0o700)  # noqa: PTH101 - the same


def _lock(file: IO[bytes], how: int, name: Path) -> None:
    """Lock the file; EngineUnavailable if others hold it for too long."""
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


def _hold(path: Path) -> None:
    with _leases_lock:
        if path not in _leases:
            lease = _opened(_beside(path, "lease"))
            # Waits while an owner ends: its address is gone when the lease is ours.
            try:
                _lock(lease, fcntl.LOCK_SH, _beside(path, "lease"))
            except EngineUnavailable:
                lease.close()
                raise
            _leases[path] = lease
        # A user that comes and goes between two looks of the owner is seen by this.
        os.utime(_beside(path, "lease"))


def _answers(address: str) -> bool:
    if not address.startswith("unix:"):
        return False
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(address.removeprefix("unix:"))
        except OSError:
            return False
    return True


def _start_owner(path: Path, idle: float) -> str:
    command = [sys.executable, "-m", "rmvdb.engines.lite", str(path), "--idle", str(idle)]
    with _opened(_beside(path, "log")) as log:
        try:
            # Returns when the owner has closed its output: it has told its address, or why there is none.
            said = subprocess.run(  # noqa: S603 - our own program
                command,
                cwd=Path(__file__).parents[2],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
                timeout=_START + _RELEASE + 10.0,
                check=False,
            )
        except subprocess.TimeoutExpired as exc:
            raise EngineUnavailable(f"The server of {path} did not start in time; see {_beside(path, 'log')}") from exc
    answer = said.stdout.decode().strip()
    if not answer.startswith("unix:"):
        raise EngineUnavailable(answer or f"The server of {path} did not start; see {_beside(path, 'log')}")
    return answer


# The owner


def main(arguments: list[str] | None = None) -> None:
    """Serve one Milvus Lite file until nobody has used it for a while; tells its address on the output once it listens."""
    parser = argparse.ArgumentParser(prog="python -m rmvdb.engines.lite", description=main.__doc__)
    parser.add_argument("path", type=Path)
    parser.add_argument("--idle", type=float, default=IDLE, help="seconds without users after which to end (%(default)s)")
    options = parser.parse_args(arguments)
    if os.fork():
        os._exit(0)  # the owner is nobody's child: who started it need not wait for it
    signal.signal(signal.SIGTERM, _ended)
    os.umask(0o077)  # of what it makes from here on, and its server
    try:
        _serve(options.path.resolve(), options.idle)
    except EngineUnavailable as exc:
        _tell(str(exc))


def _ended(*_: object) -> NoReturn:
    raise SystemExit(0)


def _serve(path: Path, idle: float) -> None:
    place = _beside(path, "address")
    for made in (path, *path.parent.glob(f".{path.name}.*")):
        if made.exists() and made.stat().st_uid == os.geteuid():
            _tighten(made)
    with _Lock(path) as lock, _socket(path) as listening, _server(path, listening) as server:
        try:
            _wait_until_ready(path, server, listening)
            place.write_text(f"unix:{listening}")
            _tell(f"unix:{listening}")
            with _opened(_beside(path, "lease")) as lease:
                _wait_until_unused(server, lease, lock, idle)
                # Still holding the lease if it was idle, so that a newcomer waits until all of this is gone.
                _stop(server)
                place.write_text("")
        finally:
            _stop(server)


class _Lock:
    """Milvus Lite's own lock on the file. pymilvus removes the lock's file even where it is refused: then it is made anew."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._name = _beside(path, "lock")
        self._held: list[IO[bytes]] = []

    def __enter__(self) -> _Lock:
        deadline = time.monotonic() + _RELEASE
        # A server that has just lost its owner may keep it for a moment.
        while not self.keep():
            if time.monotonic() > deadline:
                raise EngineUnavailable(
                    f"{self._path} is open in another program; close it there (pymilvus keeps it until its process ends)"
                )
            time.sleep(0.05)
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._held:
            file.close()

    def keep(self) -> bool:
        """Whether the lock is ours, on the file that is there now."""
        if self._held and self._is_there(self._held[-1]):
            return True
        file = self._name.open("ab")
        with contextlib.suppress(BlockingIOError):
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if self._is_there(file):
                self._held.append(file)
                return True
        file.close()
        return False

    def _is_there(self, file: IO[bytes]) -> bool:
        try:
            return os.fstat(file.fileno()).st_ino == self._name.stat().st_ino
        except FileNotFoundError:
            return False


@contextlib.contextmanager
def _socket(path: Path) -> Iterator[Path]:
    """Where to listen: beside the file, or in a private temporary folder where that path is too long or odd."""
    listening = _beside(path, "sock")
    with contextlib.ExitStack() as stack:
        if not _SOCKET.fullmatch(str(listening)):
            listening = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rmvdb-"))) / "sock"
        listening.unlink(missing_ok=True)
        yield listening
        listening.unlink(missing_ok=True)


@contextlib.contextmanager
def _server(path: Path, listening: Path) -> Iterator[subprocess.Popen[bytes]]:
    binary = _binary()
    if binary:
        command = [str(binary), str(path), f"unix:{listening}", "ERROR", str(_beside(path, "lock"))]
        # Else it leaves files of its log in the system's temporary folder each time it starts, and tells of each search there.
        quiet = {"GLOG_logtostderr": "1", "GLOG_minloglevel": "2"}
        environment = quiet | os.environ | {"LD_LIBRARY_PATH": str(binary.parent), "DYLD_LIBRARY_PATH": str(binary.parent)}
    else:
        program = (
            "import sys; from milvus_lite.adapter.grpc.server import run_server; run_server(sys.argv[1], 'unix', sys.argv[2])"
        )
        command, environment = [sys.executable, "-c", program, str(path), str(listening)], dict(os.environ)
    with _beside(path, "log").open("wb") as log:
        server = subprocess.Popen(  # noqa: S603 - Milvus Lite's own server
            command,
            cwd=path.parent,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            preexec_fn=_ready_to_end,
        )
    yield server


def _ready_to_end() -> None:
    # A shell lets what it starts in the background ignore interrupts, and all that comes of it does, too; `_stop` sends one.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _wait_until_ready(path: Path, server: subprocess.Popen[bytes], listening: Path) -> None:
    deadline = time.monotonic() + _START
    while not _answers(f"unix:{listening}"):
        if server.poll() is not None or time.monotonic() > deadline:
            lines = _beside(path, "log").read_text(errors="replace").strip().splitlines()
            raise EngineUnavailable(f"Milvus Lite does not open {path}: {lines[-1] if lines else 'it does not say why'}")
        time.sleep(0.02)


def _wait_until_unused(server: subprocess.Popen[bytes], lease: IO[bytes], lock: _Lock, idle: float) -> None:
    """Returns when the server has ended or the lock is lost, or holding the lease when nobody has held it for a while."""
    free_since = time.time()
    while server.poll() is None and lock.keep():
        try:
            fcntl.flock(lease, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            free_since = time.time()
        else:
            if time.time() - max(free_since, os.fstat(lease.fileno()).st_mtime) >= idle:
                return
            fcntl.flock(lease, fcntl.LOCK_UN)
        time.sleep(min(0.2, idle / 4 + 0.01))


def _stop(server: subprocess.Popen[bytes]) -> None:
    # Lite 3 closes its files on an interrupt, Lite 2 ends on any.
    for sent in (signal.SIGINT, signal.SIGKILL):
        server.send_signal(sent)  # nothing happens where it has ended
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(_RELEASE / 2)
            return


def _tell(line: str) -> None:
    """Say one line to whoever started this process, and no more."""
    with contextlib.suppress(BrokenPipeError):
        os.write(1, line.encode())
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)


if __name__ == "__main__":
    main()
