"""Rebuilds that are refused: the manifest is older than what the gallery holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from rmvdb import errors
from rmvdb.learning.method import Method
from rmvdb.planning.question import Question
from tests.support.inprocess import drive, make
from tests.support.lost import lose, rebuilding


@pytest.mark.parametrize("under", ["one version", "an upgrade"])
def test_a_manifest_that_is_older_than_a_filled_collection_is_refused(tmp_path: Path, under: str) -> None:
    """Else the records that lie there alone would vanish from searches, without a word."""
    gallery = make(tmp_path)
    if under == "one version":
        gallery.conductor().advance(gallery.upgrade, gallery.worker())
        gallery.conductor().clean_up(gallery.registry.upgrade(gallery.upgrade.id))
    else:
        gallery.worker().run(gallery.task, gallery.backfill, until=0.5)
    older = (tmp_path / "manifest.json").read_bytes()
    if under == "an upgrade":
        gallery.supersede()
    else:
        conductor = gallery.conductor()
        question = conductor.resolve(
            Question(gallery="texts", from_version="v2", to_version="v3", method=Method.NAIVE, order="random")
        )
        row = conductor.begin(question, conductor.plan(question), gallery.worker())
        conductor.deploy(row)
        conductor.list_work(gallery.registry.upgrade(row.id))
        gallery.upgrade = gallery.registry.upgrade(row.id)
        gallery.task = conductor.task(gallery.upgrade)
    filled = gallery.upgrade.new_collection
    gallery.worker().run(gallery.task, gallery.backfill, until=0.5)
    assert gallery.store.count(filled)
    newer = (tmp_path / "manifest.json").read_bytes()
    lose(gallery)
    (tmp_path / "manifest.json").write_bytes(older)
    with pytest.raises(errors.RegistryError, match=f"has records in collection '{filled}', which .* put a later manifest back"):
        rebuilding(gallery).run()
    lose(gallery)
    (tmp_path / "manifest.json").write_bytes(newer)
    rebuilding(gallery).run()
    with gallery.client() as client:
        assert client.count() == 40
    drive(gallery)
    gallery.registry.close()
