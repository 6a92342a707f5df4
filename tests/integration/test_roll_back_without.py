"""A roll back while something that it needs is gone: a collection, or the model of an older blend."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rmvdb.errors import CollectionMissing
from rmvdb.types import Phase
from tests.support.inprocess import Gallery, make


@pytest.fixture
def gallery(tmp_path: Path) -> Iterator[Gallery]:
    """Forty texts, half of them moved."""
    made = make(tmp_path)
    made.worker().run(made.task, made.backfill, until=0.5)
    yield made
    made.registry.close()


@pytest.mark.parametrize(
    ("phase", "gone"), [("serving both", "texts_v2"), ("serving both", "texts_v1"), ("cut over", "texts_v1")]
)
def test_a_roll_back_names_the_command_that_makes_a_missing_collection_again(gallery: Gallery, phase: str, gone: str) -> None:
    """No search fails because of it, and what the archive holds comes back."""
    if phase == "cut over":
        gallery.conductor().advance(gallery.registry.upgrade(gallery.upgrade.id), gallery.worker())
    held = gallery.records(gone)
    gallery.store.drop(gone)
    row, conductor = gallery.registry.upgrade(gallery.upgrade.id), gallery.conductor()
    with pytest.raises(CollectionMissing, match="rmvdb verify --repair makes it again"):
        conductor.roll_back(row)
    assert gallery.registry.active_upgrade(gallery.upgrade.gallery_id) is not None
    assert gallery.registry.upgrade(row.id).phase == phase
    assert conductor.missing_collections(row) == [gone]
    conductor.make_again(row)
    conductor.repair(row, conductor.lost(row), gallery.worker())
    back = conductor.roll_back(gallery.registry.upgrade(row.id))
    assert back is not None
    assert conductor.advance(back, gallery.worker()).phase == Phase.CUT_OVER
    expected = gallery.source.of.keys() - (held.keys() if (phase, gone) == ("serving both", "texts_v1") else set())
    assert gallery.records("texts_v1").keys() == expected


@pytest.mark.parametrize("gone", ["texts_v1", "texts_v2"])
def test_a_collection_that_vanishes_during_a_roll_back_is_made_again(gallery: Gallery, gone: str) -> None:
    conductor = gallery.conductor()
    back = conductor.roll_back(gallery.registry.upgrade(gallery.upgrade.id))
    assert back is not None
    gallery.store.drop(gone)
    back = gallery.registry.upgrade(back.id)
    assert conductor.missing_collections(back) == [gone]
    conductor.make_again(back)
    assert conductor.missing_collections(back) == []
    assert conductor.advance(back, gallery.worker()).phase == Phase.CUT_OVER
