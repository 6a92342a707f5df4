"""When a process compares the marks beside the data with its registry."""

from __future__ import annotations

from pathlib import Path

import pytest

from rmvdb.errors import NotOwner
from rmvdb.registry import mark
from rmvdb.registry.mark import Owner
from rmvdb.registry.tables import BatchRow
from rmvdb.types import Id
from rmvdb.upgrade.leadership import recording_failure
from tests.support.inprocess import Gallery, make
from tests.support.registries import another


def claimed(gallery: Gallery) -> BatchRow:
    batch = gallery.registry.claim(gallery.upgrade.id, "one", lease=60.0, grace=1e6, copy=True)
    assert batch is not None
    return batch


def new(gallery: Gallery) -> set[Id]:
    return set(gallery.held()["new"])


@pytest.mark.parametrize("interval", [0.0, 3600.0])
def test_a_worker_compares_the_marks_now_and_then_before_it_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interval: float
) -> None:
    """It copies a batch, another registry takes the gallery, and the worker claims the next batch."""
    gallery, other = make(tmp_path), another(tmp_path / "other")
    monkeypatch.setattr(mark, "COMPARE_EVERY", interval)
    gallery.backfill.copy(gallery.task, claimed(gallery), lambda: None)
    Owner(other, gallery.store).take_over("texts", ["texts_v1", "texts_v2"], lambda: None)
    before, batch = new(gallery), claimed(gallery)
    if interval:  # it compared a moment ago
        gallery.backfill.copy(gallery.task, batch, lambda: None)
        assert new(gallery) > before
    else:
        with pytest.raises(NotOwner, match="of another registry"):
            gallery.backfill.copy(gallery.task, batch, lambda: None)
        assert new(gallery) == before


def test_a_conductor_compares_the_marks_before_the_first_step(tmp_path: Path) -> None:
    """Also if that step itself would not look at them."""
    gallery = make(tmp_path)
    Owner(another(tmp_path / "other"), gallery.store).take_over("texts", ["texts_v1", "texts_v2"], lambda: None)
    begun = list[str]()
    with (
        pytest.raises(NotOwner, match="of another registry"),
        recording_failure(gallery.conductor(), gallery.upgrade, gallery.worker()),
    ):
        begun.append("step")
    assert begun == []
