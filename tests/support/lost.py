"""A registry that is lost, and the rebuild that brings it back."""

from __future__ import annotations

from typing import Any

from rmvdb.registry.manifest import Manifest
from rmvdb.storage.archive import Archive
from rmvdb.storage.folders import LocalFolder
from rmvdb.upgrade.rebuild import Rebuild
from tests.support.inprocess import Gallery


def rebuilding(gallery: Gallery, **options: Any) -> Rebuild:
    """Return the rebuild. Nothing of the lost registry is under way, so it waits for nothing."""
    manifest, archive = Manifest(LocalFolder(gallery.folder)), Archive(LocalFolder(gallery.folder / "archive"))
    whatever = {"quiet": 0.0, "lock": gallery.folder / "lock"} | options
    return Rebuild(registry=gallery.registry, store=gallery.store, archive=archive, manifest=manifest, **whatever)


def lose(gallery: Gallery) -> None:
    """Remove the database under everybody's feet."""
    for path in gallery.folder.glob("registry.sqlite*"):
        path.unlink()
