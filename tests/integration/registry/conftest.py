"""The fixtures of the registry's tests: a gallery called photos, and its upgrade."""

from __future__ import annotations

import pytest

from rmvdb.registry.registry import Registry
from rmvdb.registry.tables import GalleryRow, UpgradeRow
from tests.support.photos import NEW, OLD, TIMES, add_gallery, add_upgrade


@pytest.fixture
def gallery(registry: Registry) -> GalleryRow:
    """A gallery called photos."""
    return add_gallery(registry)


@pytest.fixture
def upgrade(registry: Registry, gallery: GalleryRow) -> UpgradeRow:
    """A running upgrade of photos, deployed, with no work yet."""
    row = add_upgrade(registry, gallery)
    registry.activate("photos", registry.announce("photos", [NEW, OLD], TIMES))
    return row
