"""Registry rows and home files that nothing needs any more, neither an upgrade nor a rebuild."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain, groupby
from pathlib import PurePosixPath
from typing import Any, TypeAlias

from rmvdb import errors
from rmvdb.registry.garbage import SHA256
from rmvdb.registry.manifest import Manifest
from rmvdb.registry.registry import Registry
from rmvdb.storage import files
from rmvdb.storage.folders import Entry, Folder
from rmvdb.types import Phase

#: Seconds that an unneeded row stays, and an unneeded file. Rows and files of a command under way are younger.
ROWS, FILES = 3600.0, 86400.0
_Place: TypeAlias = tuple[Folder, Entry]


@dataclass(kw_only=True, slots=True)
class Found:
    """The garbage: removable, or removed."""

    #: Rows by kind.
    rows: dict[str, int]
    files: int = 0
    bytes: int = 0
    #: Files that stay, and why, a sentence each.
    kept: list[str] = field(default_factory=list)

    @property
    def nothing(self) -> bool:
        """Whether there is nothing to remove."""
        return not (self.files or any(self.rows.values()))

    def to_json(self) -> dict[str, Any]:
        """Return the rows and files as JSON values."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class Collector:
    """Removes garbage. Workers and clients may run meanwhile."""

    registry: Registry
    manifest: Manifest
    #: The folders of artifacts: this machine's, and the bucket's.
    artifacts: Sequence[Folder]
    archive: Folder
    #: The folders of kept embeddings and of plans.
    caches: Sequence[Folder]
    plans: Folder
    #: The days for which queries are kept.
    queries_days: float = 30.0

    def run(self, *, remove: bool) -> Found:
        """Find the garbage. Remove it if `remove` is true.

        Raises:
            RegistryError: the registry is not whole. It knows less than the files from which it would be rebuilt.
        """
        galleries = self.registry.galleries()
        if not galleries:
            self.manifest.check_forgotten()
        if any(row.rebuilding for row in galleries):
            raise errors.RegistryError("The registry is being rebuilt; wait for rmvdb registry rebuild, then run rmvdb gc again")
        spared = self._planned()
        garbage = Found(rows={})
        # Files first: a file whose row is gone would never be found again.
        for folder, entry in [*self._old_archives(garbage), *self._old_cache(garbage), *self._old_artifacts(spared)]:
            garbage.files, garbage.bytes = garbage.files + 1, garbage.bytes + entry.bytes
            if remove:
                folder.remove(entry.path)
        garbage.rows = self.registry.collect(older=ROWS, spared=spared, queries_days=self.queries_days, remove=remove)
        return garbage

    def _planned(self) -> set[str]:
        """Return the artifacts of plans that no upgrade has begun. A plan's pointer names a file that names the others."""
        named = {sha for entry in self.plans.entries() if entry.bytes < 1_000_000 for sha in _names(self.plans, entry)}
        own = [(folder, entry) for folder in self.artifacts for entry in folder.entries() if entry.path.endswith(".json")]
        plans = [(folder, entry) for folder, entry in own if PurePosixPath(entry.path).stem in named]
        return named | {sha for folder, entry in plans for sha in _names(folder, entry)}

    def _old_artifacts(self, spared: set[str]) -> Iterator[_Place]:
        used = self.registry.artifacts_in_use() | spared
        for folder, entry in chain.from_iterable(map(_old, self.artifacts)):
            stem = PurePosixPath(entry.path).stem
            if (SHA256.fullmatch(stem) and stem not in used) or files.is_pending(entry.name):
                yield folder, entry

    def _old_archives(self, garbage: Found) -> Iterator[_Place]:
        """Find archives of upgrades that ended for good. A folder that this registry does not know stays."""
        needed, known = self.registry.needed_upgrades(), {row.name: row.id for row in self.registry.galleries()}
        for (name, number), entries in groupby(self.archive.entries(), key=_upgrade_of):
            gallery = known.get(name)
            upgrades = {str(row.id): row for row in self.registry.upgrades(gallery)} if gallery is not None else {}
            row = upgrades.get(number)
            if row is None:
                where = self.archive.where(f"{name}/{number}")
                garbage.kept.append(f"{where}: this registry knows no such upgrade; if no other registry does, remove it by hand")
            elif row.phase == Phase.ENDED and row.id not in needed:
                yield from _old(self.archive, entries)

    def _old_cache(self, garbage: Found) -> Iterator[_Place]:
        if any(self.registry.active_upgrade(row.id) for row in self.registry.galleries()):
            garbage.kept.append(f"{self.caches[0].where('embeddings')}: a running upgrade reads it")
            return
        for folder in self.caches:
            yield from _old(folder)


def _upgrade_of(entry: Entry) -> tuple[str, str]:
    """Return the folders of a gallery and of an upgrade that a file of the archive is in."""
    parts = PurePosixPath(entry.path).parts
    return parts[0], parts[1] if len(parts) > 2 else ""


def _old(folder: Folder, entries: Iterable[Entry] | None = None) -> Iterator[_Place]:
    """Yield the files that were written long ago, of these or of all."""
    before = time.time() - FILES
    return ((folder, entry) for entry in (folder.entries() if entries is None else entries) if entry.written < before)


def _names(folder: Folder, entry: Entry) -> list[str]:
    return SHA256.findall(folder.read(entry.path).decode(errors="replace"))
