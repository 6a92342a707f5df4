"""What is left behind and may go: rows of the registry, files of the home folder. Nothing that an upgrade or a rebuild needs."""

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

#: Seconds for which a row stays that nothing needs, and a file: what is under way is younger.
ROWS, FILES = 3600.0, 86400.0


@dataclass(kw_only=True, slots=True)
class Found:
    """What may go, or is gone."""

    #: Rows by what they are.
    rows: dict[str, int]
    files: int = 0
    bytes: int = 0
    #: What stays though no upgrade is on, and why, a sentence each.
    kept: list[str] = field(default_factory=list)

    @property
    def nothing(self) -> bool:
        """Whether there is nothing to take."""
        return not (self.files or any(self.rows.values()))

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class Collector:
    """Takes what is left behind, beside running workers and clients."""

    registry: Registry
    manifest: Manifest
    artifacts: Path
    archive: Path
    cache: Path

    def run(self, *, remove: bool) -> Found:
        """Find what may go, and take it if `remove`.

        Raises:
            RegistryError: a registry that is not whole knows less than the files it would be made again from.
        """
        galleries = self.registry.galleries()
        if not galleries:
            self.manifest.check_forgotten()
        if any(row.rebuilding for row in galleries):
            raise errors.RegistryError("The registry is being rebuilt; let rmvdb registry rebuild end, then run rmvdb gc again")
        spared = self._planned()
        found = Found(rows={})
        # Files first: a file whose row is gone would never be found again.
        for path in [*self._old_archives(found), *self._old_cache(found), *self._old_artifacts(spared)]:
            found.files, found.bytes = found.files + 1, found.bytes + path.stat().st_size
            if remove:
                path.unlink(missing_ok=True)
        found.rows = self.registry.collect(older=ROWS, spared=spared, remove=remove)
        return found

    def _planned(self) -> set[str]:
        """Artifacts that a plan which was made and not begun refers to: its pointer names a file that names the others."""
        pointers = _files(self.cache / "plans")
        named = {sha for path in pointers if path.stat().st_size < 1_000_000 for sha in _names(path)}
        return named | {sha for each in named for path in self.artifacts.glob(f"{each}.json") for sha in _names(path)}

    def _old_artifacts(self, spared: set[str]) -> Iterator[Path]:
        used = self.registry.artifacts_in_use() | spared
        yield from (path for path in _old(self.artifacts) if SHA256.fullmatch(path.stem) and path.stem not in used)

    def _old_archives(self, found: Found) -> Iterator[Path]:
        """Old vectors of upgrades of this registry that ended for good; a folder that it does not know is not judged."""
        needed, known = self.registry.needed_upgrades(), {row.name: row.id for row in self.registry.galleries()}
        for folder in sorted(self.archive.glob("*/*")):
            gallery = known.get(folder.parent.name)
            upgrades = {str(row.id): row for row in self.registry.upgrades(gallery)} if gallery is not None else {}
            row = upgrades.get(folder.name)
            if row is None:
                found.kept.append(f"{folder}: this registry knows no such upgrade; remove it by hand if no other one does")
            elif row.phase == Phase.ENDED and row.id not in needed:
                yield from _old(folder)

    def _old_cache(self, found: Found) -> Iterator[Path]:
        if any(self.registry.active_upgrade(row.id) for row in self.registry.galleries()):
            found.kept.append(f"{self.cache}: an upgrade that is on reads it")
            return
        yield from _old(self.cache)


def _files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink()]


def _old(folder: Path) -> Iterator[Path]:
    before = time.time() - FILES
    return (path for path in _files(folder) if path.stat().st_mtime < before)


def _names(path: Path) -> list[str]:
    return SHA256.findall(path.read_text(encoding="utf-8", errors="replace"))
