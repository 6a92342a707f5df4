"""Another registry over the same engine, and a registry that goes back."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from rmvdb.catalog import galleries
from rmvdb.registry.manifest import Manifest
from rmvdb.registry.registry import Registry
from rmvdb.storage.folders import LocalFolder
from rmvdb.types import Index
from rmvdb.upgrade.rebuild import Rebuild
from tests.support.inprocess import DIMS, TIMES, Gallery
from tests.support.migrated import migrate

FILE = "registry.sqlite"


def copied(gallery: Gallery) -> Path:
    """Return a backup of the registry as it is now."""
    gallery.registry.engine.dispose()
    backup = gallery.folder / "backup.sqlite"
    for end in ("", "-wal"):
        if (file := gallery.folder / f"{FILE}{end}").exists():
            shutil.copy(file, f"{backup}{end}")
    return backup


def put_back(gallery: Gallery, backup: Path) -> None:
    """Put the backup of the database back while all programs run on, without a manifest that would show it."""
    (gallery.folder / "manifest.json").unlink()
    gallery.registry.engine.dispose()
    for end in ("", "-wal", "-shm"):
        (gallery.folder / f"{FILE}{end}").unlink(missing_ok=True)
        if Path(f"{backup}{end}").exists():
            shutil.copy(f"{backup}{end}", gallery.folder / f"{FILE}{end}")


def another(folder: Path) -> Registry:
    """Return a registry that another `rmvdb init` made, with the same model versions."""
    folder.mkdir()
    url = f"sqlite:///{folder}/{FILE}"
    migrate(url)
    registry = Registry(url, keep=Manifest(LocalFolder(folder)).write)
    for name, dim in DIMS.items():
        registry.add_version(
            name=name, embedder=f"tests:{name}", options={}, classifier=None, dim=dim, metric="COSINE", fingerprint=None,
            probes=None, probe_kind=None, base=None, head=None,
        )  # fmt: skip
    return registry


def take(
    gallery: Gallery, registry: Registry | None = None, say: Callable[[str], None] = lambda _: None, *, name: str = "texts"
) -> list[str]:
    """As `rmvdb gallery take NAME --from-lost-registry`; nothing of the lost registry is under way, so nothing is waited for."""
    registry = registry or gallery.registry
    manifest = Manifest(LocalFolder(Path(str(registry.url.database)).parent))
    rebuild = Rebuild(
        registry=registry, store=gallery.store, archive=gallery.archive, manifest=manifest, lock=gallery.folder / "lock",
        quiet=0.0, say=say,
    )  # fmt: skip
    return rebuild.take(name)


def adopt(registry: Registry, gallery: Gallery, collection: str, model: str = "v1", *, name: str = "texts") -> None:
    """Adopt as `rmvdb gallery add --collection` does."""
    galleries.add_gallery(
        registry, gallery.store, gallery.loaded_models, name=name, model=model, collection=collection, id_type=None, fields=(),
        source=None, loaded_source=None, chosen_index=Index(type="FLAT"), times=TIMES,
    )  # fmt: skip


def drive_until_copied(gallery: Gallery) -> None:
    """Copy every batch, and stop before any record leaves."""
    worker = gallery.worker()
    while (batch := gallery.registry.claim(gallery.upgrade.id, worker.name, lease=60.0, grace=1e6, copy=True)) is not None:
        gallery.backfill.copy(gallery.task, batch, lambda: None)
