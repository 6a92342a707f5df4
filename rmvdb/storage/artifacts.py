"""Transforms and calibrations as files named by their SHA-256. The registry keeps their names and their contents."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from rmvdb.errors import ArtifactError, RmvdbError
from rmvdb.storage import files
from rmvdb.storage.folders import Folder

_SHA256 = re.compile(r"[0-9a-f]{64}")
_SUFFIX = re.compile(r"[A-Za-z0-9]{1,20}")


class Artifacts:
    """A folder of files `<sha256>.<suffix>`. A file never changes."""

    def __init__(
        self,
        folder: Path,
        *,
        elsewhere: Callable[[str], bytes | None] = lambda _: None,
        bucket: Callable[[], Folder | None] = lambda: None,
    ) -> None:
        """`elsewhere` returns the bytes of a file that this folder does not have, or None: the registry's. They are kept here.

        `bucket` returns a folder that keeps every file, too: the registry may be lost, and this machine's folder with it. It is
        called only if it is needed, because an application needs no access to the bucket.
        """
        self.folder, self._elsewhere, self._bucket = folder, elsewhere, bucket

    def put(self, data: bytes, *, suffix: str) -> str:
        """Keep these bytes, the same ones once, and return their SHA-256. Raise DiskFull if there is no space."""
        suffix = suffix.removeprefix(".")
        if not _SUFFIX.fullmatch(suffix):
            raise ArtifactError(f"{suffix!r} cannot end a file's name; use letters and digits, such as 'safetensors'")
        digest = files.sha256(data)
        # Write even if it exists: that repairs an altered file, and a rename over the same bytes harms no reader.
        files.durable_write(self.folder / f"{digest}.{suffix}", data)
        if (bucket := self._bucket()) is not None:
            bucket.write(f"{digest}.{suffix}", data)
        return digest

    def get(self, sha256: str) -> bytes:
        """Return the bytes of that SHA-256. Raise ArtifactError, with the file's name, if it is missing or altered everywhere."""
        try:
            return files.verified_read(self.path(sha256), sha256)
        except ArtifactError:
            data = self._elsewhere(sha256)
            if data is None or files.sha256(data) != sha256:
                data = self._from_bucket(sha256)
            if data is None:
                raise
        with contextlib.suppress(RmvdbError):  # a full disk, or one that cannot be written: it is read again next time
            files.durable_write(next(iter(self._paths(sha256)), self.folder / f"{sha256}.kept"), data)
        return data

    def here(self, names: Iterable[str]) -> Iterator[tuple[str, bytes]]:
        """Yield each of these files that this folder or the bucket has, by its SHA-256, unaltered."""
        for sha256 in names:
            with contextlib.suppress(ArtifactError):
                try:
                    data: bytes | None = files.verified_read(self.path(sha256), sha256)
                except ArtifactError:
                    data = self._from_bucket(sha256)
                if data is not None:
                    yield sha256, data

    def lacking(self, names: Iterable[str]) -> list[str]:
        """Return those of these files that the bucket does not have. Without a bucket, return none."""
        if (bucket := self._bucket()) is None:
            return []
        return sorted(set(names) - {entry.path.partition(".")[0] for entry in bucket.entries()})

    def _from_bucket(self, sha256: str) -> bytes | None:
        """Return the bytes that the bucket keeps. None if there is no bucket, or it lacks the file."""
        if (bucket := self._bucket()) is None:
            return None
        return next((bucket.verified(entry.path, sha256) for entry in bucket.entries() if entry.path.startswith(sha256)), None)

    def path(self, sha256: str) -> Path:
        """Return the artifact's path. Raise ArtifactError if it is missing."""
        if not _SHA256.fullmatch(sha256):
            raise ArtifactError(f"{sha256!r} is not the SHA-256 of an artifact; one has 64 digits of 0-9 and a-f")
        paths = self._paths(sha256)
        if not paths:
            raise ArtifactError(
                f"{self.folder / sha256} is missing; put it back from a backup, or plan the upgrade again to make a new one"
            )
        return paths[0]

    def _paths(self, sha256: str) -> list[Path]:
        return sorted(self.folder.glob(f"{sha256}.*"))
