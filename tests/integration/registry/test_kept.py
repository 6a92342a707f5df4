"""The changes that the registry hands to the manifest, and when."""

from __future__ import annotations

import base64
import time
from typing import Any

import pytest

from rmvdb.errors import DiskFull, UnknownName, UpgradeRunning
from rmvdb.registry.manifest_rows import Contents
from rmvdb.registry.registry import Registry
from rmvdb.registry.tables import MANIFEST_TABLES, GalleryRow, Table, UpgradeRow
from rmvdb.types import Phase
from tests.support.photos import NEW, OLD, TIMES, add_gallery, add_upgrade, at_once, claimed, opened, set_aside, shape


@pytest.fixture
def kept(registry: Registry) -> list[Contents]:
    """Collect the contents that the registry hands over from here on."""
    handed: list[Contents] = []
    registry._keeper = handed.append
    return handed


def test_every_table_is_kept_or_made_again() -> None:
    made_again = {"batches", "intents", "quarantined", "clients", "workers", "clock", "traces", "kept_queries", "asked_for"}
    made_again |= {"artifact_parts"}  # from the files in home

    assert {table.__tablename__ for table in MANIFEST_TABLES} | made_again == set(Table.metadata.tables)
    assert {table.__tablename__ for table in MANIFEST_TABLES} & made_again == set()


def test_every_change_of_what_is_kept_is_handed_over_and_is_in_what_is_handed_over(
    registry: Registry, kept: list[Contents]
) -> None:
    def handed(table: str) -> Any:
        assert kept, "nothing was handed over"
        assert kept[-1] == registry.contents()
        rows = kept[-1][table]
        kept.clear()
        return rows[-1]

    registry.add_artifact(sha256="a" * 64, kind="head", suffix="safetensors", size=3)
    assert handed("artifacts")["size"] == 3
    probes = bytes(range(256))
    registry.add_version(name="v1", embedder="models:old", dim=4, metric="COSINE", probes=probes)
    assert handed("model_versions")["probes"] == base64.b64encode(probes).decode()
    gallery = add_gallery(registry)
    assert handed("galleries")["epoch"] == 1
    registry.set_source("photos", "field:caption")
    assert handed("galleries")["source"] == "field:caption"
    registry.add_collection(gallery.id, model="v1", schema=shape("photos_2"), search={})
    assert handed("collections")["name"] == "photos_2"
    registry.allow_removal("photos_2")
    assert handed("collections")["removal_allowed"] is True
    registry.mark_dropped("photos_2")
    assert handed("collections")["dropped_at"] > 0
    upgrade = add_upgrade(registry, gallery)
    assert handed("phase_history")["note"] == "registered"
    registry.set_upgrade(upgrade.id, rate=5.0)
    assert handed("upgrades")["rate"] == 5.0
    epoch = registry.announce("photos", [NEW, OLD], TIMES)
    assert handed("serving_plans")["epoch"] == epoch
    registry.activate("photos", epoch)
    assert handed("galleries")["epoch"] == epoch
    again = {"gallery_id": gallery.id, "from_version": "v2", "to_version": "v1", "method": "reverse", "order": "archive"}
    again |= {"old_collections": ["photos_2"], "new_collection": "photos_1", "undoes": upgrade.id, "phase": Phase.PLANNED}
    registry.supersede(upgrade.id, epoch=epoch, note="rolled back", **again)
    assert handed("upgrades")["undoes"] == upgrade.id


def test_a_gallery_that_is_removed_is_handed_over_no_more_and_leaves_the_others_alone(
    registry: Registry, upgrade: UpgradeRow, kept: list[Contents]
) -> None:
    registry.add_batches(upgrade.id, [([1, 2], None)], first=1)
    set_aside(registry, upgrade, {3: "broken"})
    registry.close_intents(opened(registry, [1]))
    add_gallery(registry, "texts", schema=shape("texts_1"))
    others = registry.contents()
    with pytest.raises(UpgradeRunning, match=r"Gallery 'photos' is in upgrade 1 from v1 to v2 \(serving both\); end it first"):
        registry.remove_gallery("photos")
    assert registry.contents() == others
    registry.end(upgrade.id, note="over")
    registry.remove_gallery("photos")

    mine = registry.gallery("texts").id
    assert [row["name"] for row in kept[-1]["galleries"]] == ["texts"]
    assert kept[-1]["upgrades"] == kept[-1]["phase_history"] == []
    for table in ("collections", "serving_plans"):
        assert kept[-1][table] == [row for row in others[table] if row["gallery_id"] == mine]
    assert kept[-1]["model_versions"] == others["model_versions"]
    with pytest.raises(UnknownName):
        registry.gallery("photos")


def test_calls_of_applications_and_workers_hand_nothing_over(
    registry: Registry, upgrade: UpgradeRow, kept: list[Contents]
) -> None:
    registry.refresh("photos", client="c", ready=2, trouble="")
    registry.close_intents(opened(registry, [1]))
    registry.add_batches(upgrade.id, [([1, 2], None)], first=1)
    batch = claimed(registry, upgrade)
    registry.renew("w1", upgrade.id, lease=60.0)
    registry.copied(batch, requeue=[], aside={2: "broken"})
    registry.retire_worker("w1")
    registry.leave("c")

    assert kept == []


def test_the_leader_and_the_waiting_processes_are_not_in_the_manifest(
    registry: Registry, upgrade: UpgradeRow, kept: list[Contents]
) -> None:
    leader_token = registry.lead(upgrade.id, "w1", 10.0)
    assert leader_token is not None
    before = registry.contents()
    kept.clear()
    registry.keep_leading(upgrade.id, leader_token, 20.0)
    registry.set_upgrade(upgrade.id, copying={"epoch": 1, "after": 7}, leader_token=leader_token)
    registry.keep_leading(upgrade.id, leader_token, 0)
    opened(registry, [1])
    assert kept == []
    epoch = registry.announce("photos", [OLD], TIMES)
    announced = registry.contents()
    registry.activate("photos", epoch, force=True)  # waits for the open write

    assert registry.contents() == announced
    assert announced["upgrades"] == before["upgrades"]


def test_a_change_that_cannot_be_handed_over_is_not_made(registry: Registry, gallery: GalleryRow) -> None:
    def full(_: Contents) -> None:
        raise DiskFull("no space")

    registry._keeper = full
    with pytest.raises(DiskFull):
        registry.set_source("photos", "field:caption")

    assert registry.gallery("photos").source is None


def test_of_two_changes_at_once_the_last_one_handed_over_holds_both(registry: Registry, gallery: GalleryRow) -> None:
    handed: list[Contents] = []

    def slow(contents: Contents) -> None:
        time.sleep(0.2)
        handed.append(contents)

    registry._keeper = slow
    at_once(4, lambda number: registry.add_artifact(sha256=f"{number}" * 64, kind="head", suffix="x", size=number))

    assert handed[-1] == registry.contents()
    assert len(handed[-1]["artifacts"]) == 4


def test_a_conductor_that_waits_for_the_leadership_changes_no_row_of_the_manifest(
    registry: Registry, upgrade: UpgradeRow, kept: list[Contents]
) -> None:
    assert registry.lead(upgrade.id, "one", 60.0) is not None
    kept.clear()
    assert registry.lead(upgrade.id, "two", 60.0) is None
    assert kept == []
