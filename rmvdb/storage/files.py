"""Files that are written whole or not at all, and names that cannot leave their folder."""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import os
import re
import secrets
import shutil
from pathlib import Path
from urllib.parse import quote

from rmvdb.errors import ArtifactError, ConfigError, DiskFull, RmvdbError
from rmvdb.storage import ownership

#: Bytes of a quoted name. Systems allow 255; the rest is for prefixes and suffixes.
_LONGEST_NAME = 120
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT}


def sha256(data: bytes | memoryview) -> str:
    """Return the SHA-256 of these bytes as 64 hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def make_folder(folder: Path, what: str) -> None:
    """Make the folder and its parents if they are missing. Raise ConfigError, which names the setting `what`, if that fails."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as exc:
        reason = exc.strerror or type(exc).__name__
        raise ConfigError(f"The folder {str(folder)!r} cannot be made ({reason}); set {what} to one that can be written") from exc


def expanded(path: Path) -> Path:
    """Return the path with the home of a user for ~. Raise ConfigError if that home is not known."""
    try:
        return path.expanduser()
    except RuntimeError as exc:
        raise ConfigError(
            f"{str(path)!r} cannot be found, because the home of its user is unknown; write the whole path"
        ) from exc


def durable_write(path: Path, data: bytes | memoryview, *, mode: int | None = None) -> None:
    """Write the whole file or nothing. When this returns, the file survives a power cut.

    Other users cannot read it, unless its `mode` lets them or its folder is shared with one group alone.

    Raises: DiskFull if there is no space, ArtifactError if the system refuses for another reason. In both cases an earlier file
    of that name is unchanged, and nothing else is left behind.
    """
    # Another name first, then a rename: a reader never sees half a file, whenever this process is killed.
    pending = path.with_name(f".{path.name[:80]}.{secrets.token_hex(6)}.tmp")
    try:
        _make_folder(path.parent)
        _write_and_sync(pending, data, ownership.private_mode(path.parent) & 0o666 if mode is None else mode)
        pending.replace(path)
        _sync_folder(path.parent)
    except OSError as exc:
        raise _refused(path, len(data), exc) from exc
    finally:
        with contextlib.suppress(OSError):
            pending.unlink(missing_ok=True)


def is_pending(name: str) -> bool:
    """Return whether `durable_write` was writing a file under this name. A killed process leaves it."""
    return re.fullmatch(r"\..+\.[0-9a-f]{12}\.tmp", name) is not None


def read(path: Path) -> bytes:
    """Return the file's bytes. Raise ArtifactError, with its name, if it is missing, unreadable or no regular file."""
    try:
        if path.exists() and not path.is_file():  # reading a pipe would block
            raise ArtifactError(f"{path} is not a regular file; put it back from a backup or repeat the step that wrote it")
        return path.read_bytes()
    except FileNotFoundError as exc:
        raise ArtifactError(f"{path} is missing; put it back from a backup or repeat the step that wrote it") from exc
    except OSError as exc:
        raise ArtifactError(f"{path} cannot be read ({exc.strerror}); fix that and run the step again") from exc


def verified(name: str, data: bytes, digest: str) -> bytes:
    """Return the bytes of the file of this name. Raise ArtifactError if they are not of that SHA-256."""
    if sha256(data) != digest:
        raise ArtifactError(
            f"{name} was altered: its SHA-256 is not {digest[:12]}…; put it back from a backup or repeat the step that wrote it"
        )
    return data


def verified_read(path: Path, digest: str) -> bytes:
    """Return the file's bytes. Raise ArtifactError, with its name, if it is missing, unreadable or not of that SHA-256."""
    return verified(str(path), read(path), digest)


def remove(path: Path) -> None:
    """Remove a file, or a folder with everything in it. Do nothing if there is none."""
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as exc:
        raise ArtifactError(f"{path} cannot be removed ({exc.strerror}); fix that and run the step again") from exc


def file_name(name: str) -> str:
    """Return a file name for any text. Distinct texts have distinct names, and a name never leads to another folder."""
    quoted = quote(name, safe=" ", errors="surrogatepass") or "%"
    if len(quoted) > _LONGEST_NAME:
        # Quoted names never contain "%~", so a shortened one cannot be taken for another.
        quoted = f"{quoted[:_LONGEST_NAME]}%~{sha256(quoted.encode())[:32]}"
    return f"%2E{quoted[1:]}" if quoted.startswith(".") else quoted


def inside(folder: Path, relative: str) -> Path:
    """Return the file of that relative path. Raise ArtifactError if it leaves the folder."""
    path = folder / relative
    if not relative or "\0" in relative or not Path(os.path.normpath(path)).is_relative_to(os.path.normpath(folder)):
        raise ArtifactError(f"{relative!r} is not a file in {folder}; the registry and that folder do not belong together")
    if not path.resolve().is_relative_to(folder.resolve()):  # the file may be whole
        way_out = "let that whole folder be a link, or put the files into it"
        sentence = f"{relative!r} is not a file in {folder}: it leads out by a link"
        raise ArtifactError(f"{sentence}; {way_out}") from PermissionError(relative)
    return path


def _make_folder(folder: Path) -> None:
    """Make the folder and its parents so that they survive a power cut, too."""
    if folder.is_dir():
        return
    _make_folder(folder.parent)
    folder.mkdir(mode=ownership.private_mode(folder.parent), exist_ok=True)
    _sync_folder(folder.parent)


def make_private(path: Path) -> None:
    """Make an empty file that others cannot read, if there is none, before a library makes one that everybody can read."""
    with contextlib.suppress(OSError):  # the library reports the problem
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, ownership.private_mode(path.parent) & 0o666))


def _write_and_sync(path: Path, data: bytes | memoryview, mode: int) -> None:
    with open(path, "xb", opener=functools.partial(os.open, mode=mode)) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Write the folder, which makes a rename in it durable."""
    if os.name == "nt":  # Windows cannot open a folder, and writes its entries through
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _refused(path: Path, needed: int, exc: OSError) -> RmvdbError:
    if exc.errno in _NO_SPACE:
        return DiskFull(
            f"{path} could not be written: the disk is full and the file needs {needed:,} bytes; make room and run the step again"
        )
    return ArtifactError(f"{path} could not be written ({exc.strerror}); fix that and run the step again")
