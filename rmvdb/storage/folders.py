"""Folders of files, on this machine's disk or in a bucket. Paths in them are relative, with forward slashes."""

from __future__ import annotations

import abc
import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from rmvdb.errors import ArtifactError
from rmvdb.storage import files


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A file of a folder."""

    path: str
    bytes: int
    #: Seconds since 1970 of its last write, by the clock of the disk or the bucket.
    written: float

    @property
    def name(self) -> str:
        """The file's name without its folders."""
        return PurePosixPath(self.path).name


class Folder(abc.ABC):
    """A folder of files. Each file is written whole or not at all."""

    @abc.abstractmethod
    def folder(self, name: str) -> Folder:
        """Return the folder of that name in this one."""

    @abc.abstractmethod
    def where(self, path: str) -> str:
        """Return the file's whole path or address, for messages. Raise ArtifactError if it leaves this folder."""

    @abc.abstractmethod
    def write(self, path: str, data: bytes | memoryview) -> None:
        """Write the whole file or nothing. When this returns, the file survives a power cut.

        Raises: DiskFull, ArtifactError, HomeUnreachable. An earlier file of that name is then unchanged.
        """

    @abc.abstractmethod
    def read(self, path: str) -> bytes:
        """Return the file's bytes.

        Raises: ArtifactError with its name if it cannot be read; its cause is FileNotFoundError if it is missing.
            HomeUnreachable if the bucket does not answer.
        """

    @abc.abstractmethod
    def entries(self, path: str = "", *, begins: str = "") -> Iterator[Entry]:
        """Yield all files below this path whose names begin so, in the order of their paths; none if there is no such folder.

        Raises: ArtifactError if the folder cannot be read, HomeUnreachable if the bucket does not answer.
        """

    @abc.abstractmethod
    def has(self, path: str) -> bool:
        """Tell whether there is such a folder in this one. A bucket has it only while it holds a file."""

    @abc.abstractmethod
    def remove(self, path: str) -> None:
        """Remove one file. Do nothing if there is none."""

    @abc.abstractmethod
    def clear(self, path: str = "") -> None:
        """Remove all files below this path. Do nothing if there is none."""

    def verified(self, path: str, sha256: str) -> bytes:
        """Return the file's bytes. Raise ArtifactError, with its name, if it is missing, unreadable or not of that SHA-256."""
        return files.verified(self.where(path), self.read(path), sha256)


@dataclass(frozen=True, slots=True)
class LocalFolder(Folder):
    """A folder on this machine's disk, or on one that is mounted."""

    path: Path

    def folder(self, name: str) -> LocalFolder:
        """Return the folder of that name in this one."""
        return LocalFolder(self.path / name)

    def where(self, path: str) -> str:
        """Return the file's whole path."""
        return str(files.inside(self.path, path))

    def write(self, path: str, data: bytes | memoryview) -> None:
        """Write the whole file or nothing, as `files.durable_write` does."""
        files.durable_write(files.inside(self.path, path), data)

    def read(self, path: str) -> bytes:
        """Return the file's bytes."""
        return files.read(files.inside(self.path, path))

    def entries(self, path: str = "", *, begins: str = "") -> Iterator[Entry]:
        """Yield all files below this path, and what passes for one, such as a pipe; but no links."""
        with _translated(self.path / path):
            try:
                found = sorted(os.scandir(self.path / path), key=lambda each: each.name)
            except (FileNotFoundError, NotADirectoryError):
                return
            for each in found:
                relative = f"{path}/{each.name}" if path else each.name
                if each.is_dir(follow_symlinks=False):
                    yield from self.entries(relative, begins=begins)
                elif each.name.startswith(begins) and not each.is_symlink():
                    with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                        status = each.stat()
                        yield Entry(path=relative, bytes=status.st_size, written=status.st_mtime_ns / 1e9)

    def has(self, path: str) -> bool:
        """Tell whether there is such a folder in this one."""
        with _translated(self.path / path):
            return (self.path / path).is_dir()

    def remove(self, path: str) -> None:
        """Remove one file. Do nothing if there is none."""
        files.remove(files.inside(self.path, path))

    def clear(self, path: str = "") -> None:
        """Remove the folder of this path with everything in it."""
        files.remove(files.inside(self.path, path) if path else self.path)


@contextlib.contextmanager
def _translated(folder: Path) -> Iterator[None]:
    """Raise ArtifactError if the system refuses to list the folder: a command that root ran may have made it."""
    try:
        yield
    except OSError as exc:
        raise ArtifactError(
            f"{folder} cannot be read ({exc.strerror}); correct its owner or its rights (chown, chmod) and run the step again"
        ) from exc


def parent(path: str) -> str:
    """Return the folder of a file."""
    return str(PurePosixPath(path).parent)


def checked(path: str, within: str) -> str:
    """Return the path. Raise ArtifactError if it leaves the folder `within`."""
    if not path or "\0" in path or path.startswith("/") or ".." in PurePosixPath(path).parts:
        raise ArtifactError(f"{path!r} is not a file in {within}; the registry and that folder do not belong together")
    return path
