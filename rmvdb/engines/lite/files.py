"""The files of a Milvus Lite database: whether rmvdb can serve it, what lies beside it, and errors of the system about them."""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import os
import socket
import stat
from pathlib import Path
from typing import IO

from rmvdb.errors import DiskFull, EngineError, EngineUnavailable, RmvdbError

_SQLITE = b"SQLite format 3\0"


def error_of(path: Path | str, exc: OSError) -> RmvdbError:
    """Translate an error of the system about the database or a file beside it."""
    if isinstance(exc, PermissionError):
        return EngineError(f"{path} cannot be used: no permission to write {exc.filename}; give it or choose another path")
    if exc.errno == errno.ENOSPC:
        return DiskFull(f"The disk that holds {path} is full; make room, then run the same command again")
    if exc.errno in (errno.EMFILE, errno.ENFILE):
        return EngineUnavailable(
            f"{path} cannot be opened: this process has no free file descriptor; close what it has open, or raise its limit "
            "(ulimit -n)"
        )
    if exc.filename is None:  # for instance, the system cannot start a process just now
        return EngineUnavailable(f"The server of {path} cannot be started: {exc.strerror}; look at the machine's load")
    return EngineError(f"{path} cannot be used: {exc.strerror} ({exc.filename}); correct that or choose another path")


def usable(path: Path | str) -> Path:
    """Return the absolute path. Raises EngineError if rmvdb cannot serve a database there."""
    path = Path(path).resolve()
    if not path.parent.is_dir():
        raise EngineError(f"{path} cannot be used: the folder {path.parent} does not exist; create it")
    if not _package():
        raise EngineError(f"{path} cannot be served: milvus-lite is not installed; install it, or use a Milvus server")
    if path.is_dir() and binary_of_lite_2():
        raise EngineError(
            f"{path} is a folder: it was made by Milvus Lite 3, and Milvus Lite 2 is installed; install milvus-lite>=3"
        )
    if path.is_file() and not _is_lite_2(path):
        raise EngineError(f"{path} is not a Milvus Lite file; choose another path")
    if path.is_file() and not binary_of_lite_2():
        raise EngineError(f"{path} was made by Milvus Lite 2, and Milvus Lite 3 is installed; install milvus-lite<3")
    return path


def _is_lite_2(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_SQLITE)) in (b"", _SQLITE)


def _package() -> Path | None:
    # Found without an import: milvus-lite 2.5 imports pkg_resources, which setuptools has dropped.
    spec = importlib.util.find_spec("milvus_lite")
    return Path(spec.origin).parent if spec and spec.origin else None


def binary_of_lite_2() -> Path | None:
    """Return the server program of Milvus Lite 2; None for Lite 3, which is Python."""
    package = _package()
    binary = package / "lib" / "milvus" if package else None
    return binary if binary and binary.exists() else None


def beside(path: Path, what: str) -> Path:
    """Return the path of a file beside the database."""
    return path.parent / f".{path.name}.{what}"


def open_private(file: Path) -> IO[bytes]:
    """Open a file beside the database, and create it if needed, so that its owner alone can open it."""
    file_object = os.fdopen(os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600), "r+b", buffering=0)
    tighten(file_object.fileno())
    return file_object


def tighten(file: int | Path) -> None:
    """Remove other users' rights to a file or folder of this user; earlier versions gave them."""
    found = os.stat(file)  # noqa: PTH116 - a descriptor, too
    if found.st_uid == os.geteuid() and stat.S_IMODE(found.st_mode) & 0o077:
        os.chmod(file, stat.S_IMODE(found.st_mode) & 0o700)  # noqa: PTH101 - the same


def temporary_prefix(path: Path) -> str:
    """Return how the name of a temporary folder begins that holds the socket of this database, if it cannot lie beside it.

    The folder's number is part of it: another folder of this name, such as a copy, gets another name.
    """
    found = path.parent.stat()
    return f"rmvdb-{hashlib.sha256(f'{found.st_dev} {found.st_ino} {path}'.encode()).hexdigest()[:16]}-"


def serves(address: str, path: Path) -> bool:
    """Return whether the server of this database listens at this address.

    If the folder of a database is copied, the copied address names the server of the original. Writes would go there.
    """
    socket_path = Path(address.removeprefix("unix:"))
    ours = socket_path == beside(path, "sock") or socket_path.parent.name.startswith(temporary_prefix(path))
    return ours and answers(address)


def answers(address: str) -> bool:
    """Return whether a server listens at this address."""
    if not address.startswith("unix:"):
        return False
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(address.removeprefix("unix:"))
        except OSError:
            return False
    return True
