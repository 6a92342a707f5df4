"""Registry rows and home files that nothing needs any more, neither an upgrade nor a rebuild."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rmvdb import errors
from rmvdb.registry.garbage import SHA256
from rmvdb.registry.manifest import Manifest
from rmvdb.registry.registry import Registry
from rmvdb.types import Phase

#: Seconds that an unneeded row stays, and an unneeded file. Rows and files of a command under way are younger.
ROWS, FILES = 3600.0, 86400.0


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
    artifacts: Path
    archive: Path
    cache: Path
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
        for path in [*self._old_archives(garbage), *self._old_cache(garbage), *self._old_artifacts(spared)]:
            garbage.files, garbage.bytes = garbage.files + 1, garbage.bytes + path.stat().st_size
            if remove:
                path.unlink(missing_ok=True)
        garbage.rows = self.registry.collect(older=ROWS, spared=spared, queries_days=self.queries_days, remove=remove)
        return garbage

    def _planned(self) -> set[str]:
        """Return the artifacts of plans that no upgrade has begun. A plan's pointer names a file that names the others."""
        pointers = _files(self.cache / "plans")
        named = {sha for path in pointers if path.stat().st_size < 1_000_000 for sha in _names(path)}
        return named | {sha for each in named for path in self.artifacts.glob(f"{each}.json") for sha in _names(path)}

    def _old_artifacts(self, spared: set[str]) -> Iterator[Path]:
        used = self.registry.artifacts_in_use() | spared
        yield from (path for path in _old(self.artifacts) if SHA256.fullmatch(path.stem) and path.stem not in used)

    def _old_archives(self, garbage: Found) -> Iterator[Path]:
        """Find archives of upgrades that ended for good. A folder that this registry does not know stays."""
        needed, known = self.registry.needed_upgrades(), {row.name: row.id for row in self.registry.galleries()}
        for folder in sorted(self.archive.glob("*/*")):
            gallery = known.get(folder.parent.name)
            upgrades = {str(row.id): row for row in self.registry.upgrades(gallery)} if gallery is not None else {}
            row = upgrades.get(folder.name)
            if row is None:
                garbage.kept.append(
                    f"{folder}: this registry knows no such upgrade; if no other registry does, remove it by hand"
                )
            elif row.phase == Phase.ENDED and row.id not in needed:
                yield from _old(folder)

    def _old_cache(self, garbage: Found) -> Iterator[Path]:
        if any(self.registry.active_upgrade(row.id) for row in self.registry.galleries()):
            garbage.kept.append(f"{self.cache}: a running upgrade reads it")
            return
        yield from _old(self.cache)


def _files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink()]


def _old(folder: Path) -> Iterator[Path]:
    before = time.time() - FILES
    return (path for path in _files(folder) if path.stat().st_mtime < before)


def _names(path: Path) -> list[str]:
    return SHA256.findall(path.read_text(encoding="utf-8", errors="replace"))
