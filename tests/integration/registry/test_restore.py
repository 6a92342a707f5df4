"""A registry that was lost, filled again from what it handed out."""

from __future__ import annotations

import json

import pytest

from rmvdb.errors import AlreadyExists
from rmvdb.registry import schema
from rmvdb.registry.manifest_rows import Contents
from rmvdb.registry.registry import Registry
from rmvdb.registry.tables import GalleryRow
from rmvdb.types import Phase
from tests.support.photos import NEW, OLD, OLD_AGAIN, TIMES, add_gallery, add_upgrade, claim, opened


def restored(registry: Registry, url: str) -> Contents:
    """Return the contents of a full registry after its tables were dropped and it was restored from them."""
    gallery = add_gallery(registry, adopted=False)
    more = {"probes": b"\0\xff", "options": {"größe": [1.5]}, "compatible_with": "v1"}
    registry.add_version(name="v2", embedder="models:new", dim=8, metric="COSINE", **more)
    registry.add_artifact(sha256="a" * 64, kind="head", suffix="x", size=2**40)
    registry.add_version(name="v2+a", embedder="models:new", dim=8, metric="COSINE", base="v2", head="a" * 64)
    add_gallery(registry, "pictures")
    ended = add_upgrade(registry, gallery, phase=Phase.SERVING_BOTH)
    registry.supersede(
        ended.id, epoch=1, note="rolled back", gallery_id=gallery.id, from_version="v2", to_version="v1",
        old_collections=["photos_2"], new_collection="photos_1", undoes=ended.id,
        phase=Phase.SERVING_BOTH, method="naive", order="archive", listed=True,
    )  # fmt: skip
    registry.activate("photos", registry.announce("photos", [NEW, OLD], TIMES))
    registry.announce("photos", [OLD_AGAIN], TIMES)
    contents: Contents = json.loads(json.dumps(registry.contents()))
    schema.downgrade(url, "base")
    schema.upgrade(url)
    registry.restore(contents)
    return contents


def test_a_registry_is_restored_from_what_it_handed_over(registry: Registry, database_url: str) -> None:
    before = restored(registry, database_url)
    after = registry.contents()

    for table in ("artifacts", "model_versions", "collections"):
        assert after[table] == before[table]
    assert after["serving_plans"][: len(before["serving_plans"])] == before["serving_plans"]
    same = [{**row, "epoch": 0, "next_epoch": 0} for row in before["galleries"]]
    assert [{**row, "epoch": 0, "next_epoch": 0} for row in after["galleries"]] == same
    assert [row["listed"] for row in before["upgrades"]] == [False, True]
    assert after["upgrades"] == [{**row, "listed": False} for row in before["upgrades"]]
    assert [row["note"] for row in after["phase_history"]][-2:] == [
        "takes the place of upgrade 1",
        "brought back by registry rebuild",
    ]
    assert (registry.version("v2").probes, registry.version("v2").compatible_with) == (b"\0\xff", "v1")


def test_a_restored_gallery_is_served_as_before_at_an_epoch_after_every_one_there_was(
    registry: Registry, database_url: str
) -> None:
    before = restored(registry, database_url)
    plan = registry.plan("photos")

    assert plan.legs == (NEW, OLD)
    assert plan.epoch > max(row["epoch"] for row in before["serving_plans"])
    assert registry.refresh("photos", client="c", ready=0, trouble="").next is None


def test_rows_that_are_added_to_a_restored_registry_have_new_numbers(registry: Registry, database_url: str) -> None:
    restored(registry, database_url)
    registry.add_version(name="v3", embedder="models:third", dim=4, metric="COSINE")
    upgrade = add_upgrade(registry, registry.gallery("pictures"))

    assert registry.version("v3").id == len(registry.versions())
    assert upgrade.id == 3


def test_until_its_work_is_rebuilt_nothing_is_written_claimed_or_activated(registry: Registry, database_url: str) -> None:
    restored(registry, database_url)
    gallery = registry.gallery("photos")
    upgrade = registry.active_upgrade(gallery.id)
    assert upgrade is not None
    registry.add_batches(upgrade.id, [([1], None)], first=1)
    epoch = registry.announce("photos", [OLD], TIMES)

    assert registry.open_intents("photos", "upsert", [1], client="c", lasting=9.0) is None
    assert claim(registry, upgrade) is None
    assert registry.activate("photos", epoch, force=True) == ["its registry is being rebuilt"]

    registry.rebuilt(gallery.id)

    assert registry.activate("photos", epoch, force=True) == []
    assert claim(registry, upgrade) is not None
    opened(registry, [2])


def test_a_registry_that_holds_something_is_not_restored(registry: Registry, gallery: GalleryRow) -> None:
    before = registry.contents()

    with pytest.raises(AlreadyExists, match="is not empty; remove its file, or drop its tables, to have it rebuilt"):
        registry.restore(before)

    assert registry.contents() == before
