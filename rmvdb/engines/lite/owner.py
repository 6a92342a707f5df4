"""The owner of a Milvus Lite file: a process that serves it until it has had no user for a while."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NoReturn

from rmvdb.engines.lite.files import answers, beside, binary_of_lite_2, open_private, temporary_prefix, tighten
from rmvdb.engines.lite.lease import IDLE
from rmvdb.engines.lite.locks import RELEASE, START, EngineLock
from rmvdb.errors import EngineUnavailable

#: A Unix socket's path has room for 104 bytes on macOS and 108 on Linux. gRPC would decode other characters.
_SOCKET = re.compile(r"[A-Za-z0-9._/-]{1,100}")


def main(arguments: list[str] | None = None) -> None:
    """Serve one Milvus Lite file until it has had no user for a while; print its address once it listens."""
    parser = argparse.ArgumentParser(prog="python -m rmvdb.engines.lite", description=main.__doc__)
    parser.add_argument("path", type=Path)
    parser.add_argument("--idle", type=float, default=IDLE, help="seconds without users after which to end (%(default)s)")
    options = parser.parse_args(arguments)
    if os.fork():
        os._exit(0)  # the owner outlives its parent, which need not wait for it
    signal.signal(signal.SIGTERM, _end)
    os.umask(0o077)  # for the files of this process and its server
    try:
        _serve(options.path.resolve(), options.idle)
    except EngineUnavailable as exc:
        _tell(str(exc))


def _end(*_: object) -> NoReturn:
    raise SystemExit(0)


def _serve(path: Path, idle: float) -> None:
    place = beside(path, "address")
    for made in (path, *path.parent.glob(f".{path.name}.*")):
        if made.exists() and made.stat().st_uid == os.geteuid():
            tighten(made)
    with EngineLock(path) as lock, _socket(path) as listening, _server(path, listening) as server:
        try:
            _wait_until_ready(path, server, listening)
            place.write_text(f"unix:{listening}")
            _tell(f"unix:{listening}")
            with open_private(beside(path, "lease")) as lease:
                _wait_until_unused(server, lease, lock, idle)
                # An idle owner still has the lease here, so that a newcomer waits until all of this is gone.
                _stop(server)
                place.write_text("")
        finally:
            _stop(server)


@contextlib.contextmanager
def _socket(path: Path) -> Iterator[Path]:
    """Return where to listen: beside the file, or in a private temporary folder if that path is too long or odd."""
    listening = beside(path, "sock")
    with contextlib.ExitStack() as stack:
        if not _SOCKET.fullmatch(str(listening)):
            listening = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=temporary_prefix(path)))) / "sock"
        listening.unlink(missing_ok=True)
        yield listening
        listening.unlink(missing_ok=True)


@contextlib.contextmanager
def _server(path: Path, listening: Path) -> Iterator[subprocess.Popen[bytes]]:
    binary = binary_of_lite_2()
    if binary:
        command = [str(binary), str(path), f"unix:{listening}", "ERROR", str(beside(path, "lock"))]
        # Otherwise each start leaves log files in the system's temporary folder, with a line for each search.
        quiet = {"GLOG_logtostderr": "1", "GLOG_minloglevel": "2"}
        environment = quiet | os.environ | {"LD_LIBRARY_PATH": str(binary.parent), "DYLD_LIBRARY_PATH": str(binary.parent)}
    else:
        program = (
            "import sys; from milvus_lite.adapter.grpc.server import run_server; run_server(sys.argv[1], 'unix', sys.argv[2])"
        )
        command, environment = [sys.executable, "-c", program, str(path), str(listening)], dict(os.environ)
    with beside(path, "log").open("wb") as log:
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
    # A shell's background jobs, and all their children, ignore interrupts; `_stop` sends one.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _wait_until_ready(path: Path, server: subprocess.Popen[bytes], listening: Path) -> None:
    deadline = time.monotonic() + START
    while not answers(f"unix:{listening}"):
        if server.poll() is not None or time.monotonic() > deadline:
            lines = beside(path, "log").read_text(errors="replace").strip().splitlines()
            raise EngineUnavailable(f"Milvus Lite does not open {path}: {lines[-1] if lines else 'its log is empty'}")
        time.sleep(0.02)


def _wait_until_unused(server: subprocess.Popen[bytes], lease: IO[bytes], lock: EngineLock, idle: float) -> None:
    """Return when the server has ended or the lock is lost; or, with the lease, when no user has had it for a while."""
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
    # Lite 3 closes its files on an interrupt. Lite 2 ends on any signal.
    for sent in (signal.SIGINT, signal.SIGKILL):
        server.send_signal(sent)  # does nothing if it has ended
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(RELEASE / 2)
            return


def _tell(line: str) -> None:
    """Print one line for the process that started this one, then close the output."""
    with contextlib.suppress(BrokenPipeError):
        os.write(1, line.encode())
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
