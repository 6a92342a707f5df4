"""The registry on SQLite and on PostgreSQL: what each method promises, alone and among others."""

from __future__ import annotations

import base64
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event, text

from rmvdb import schema
from rmvdb.errors import (
    AlreadyExists,
    ArtifactError,
    DiskFull,
    LeaseLost,
    RegistryError,
    RegistryUnavailable,
    SchemaOutdated,
    UnknownName,
    UpgradeRunning,
    UsageError,
    WrongPhase,
)
from rmvdb.registry import Contents, Opened, Registry, pack_ids, plans, schema_from_json, schema_to_json, unpack_ids
from rmvdb.tables import KEPT, BatchRow, GalleryRow, Table, UpgradeRow
from rmvdb.types import BatchState, Field, IdType, Leg, Metric, Phase, Progress, Schema
from tests.support.postgres import PASSWORD, Postgres

TIMES = {"max_age": 5.0, "longest_search": 5.0, "staleness": 1.0}
OLD = Leg(collection="photos_1", model="v1", metric=Metric.COSINE, embedder="v1")
NEW = Leg(collection="photos_2", model="v2", metric=Metric.COSINE, embedder="v2", transforms=("a" * 64,), calibration="b" * 64)

NEWEST = Leg(collection="photos_3", model="v3", metric=Metric.COSINE, embedder="v3")
OLD_AGAIN = Leg(collection="photos_3", model="v1", metric=Metric.COSINE, embedder="v1")


def shape(collection: str = "photos_1") -> Schema:
    """A schema with everything that a schema can have."""
    fields = (Field(name="tag", type="VARCHAR", params={"max_length": 64}), Field(name="year", type="INT64"))
    return Schema(collection=collection, dim=4, metric=Metric.COSINE, id_type=IdType.INT64, fields=fields)


def add_gallery(registry: Registry, name: str = "photos", **values: Any) -> GalleryRow:
    """A gallery of one collection in model v1."""
    registry.add_version(name="v1", embedder="models:old", dim=4, metric="COSINE")
    defaults: dict[str, Any] = {
        "model": "v1",
        "schema": shape(f"{name}_1"),
        "adopted": True,
        "source": None,
        "search": {"ef": 64},
        "times": TIMES,
    }
    return registry.add_gallery(name=name, **defaults | values)


def add_upgrade(registry: Registry, gallery: GalleryRow, **values: Any) -> UpgradeRow:
    """An upgrade of that gallery to v2."""
    registry.add_version(name="v2", embedder="models:new", dim=8, metric="COSINE")
    defaults = {
        "from_version": "v1",
        "to_version": "v2",
        "old_collections": ["photos_1"],
        "new_collection": "photos_2",
        "phase": Phase.SERVING_BOTH,
        "method": "reverse",
        "order": "confidence",
    }
    return registry.add_upgrade(gallery_id=gallery.id, **defaults | values)


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


def claim(registry: Registry, upgrade: UpgradeRow, worker: str = "w1", **changed: Any) -> BatchRow | None:
    """Claim as a worker does, for a minute unless told otherwise."""
    settings: dict[str, Any] = {"lease": 60.0, "longest_call": 0.0, "grace": 0.0, "copy": True}
    return registry.claim(upgrade.id, worker, **settings | changed)


def claimed(registry: Registry, upgrade: UpgradeRow, worker: str = "w1", **changed: Any) -> BatchRow:
    """Claim where there must be work."""
    batch = claim(registry, upgrade, worker, **changed)
    assert batch is not None
    return batch


def set_aside(registry: Registry, upgrade: UpgradeRow, reasons: dict[int, str]) -> None:
    """A batch of these records was copied, and none of them could be."""
    registry.add_batches(upgrade.id, [(list(reasons), None)], first=registry.next_priority(upgrade.id))
    registry.copied(claimed(registry, upgrade), again=[], aside=reasons)


def opened(registry: Registry, ids: list[int], *, client: str = "c1", lasting: float = 60.0) -> Opened:
    """Open intents where no epoch is changing."""
    made = registry.open_intents("photos", "upsert", ids, client=client, lasting=lasting)
    assert made is not None
    return made


def at_once(count: int, work: Callable[[int], Any]) -> list[Any]:
    """Run `work(0)`, `work(1)` … in threads that begin together; their results."""
    together = threading.Barrier(count)

    def begin(number: int) -> Any:
        together.wait()
        return work(number)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(begin, range(count)))


# --- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ids", [[], [3, 1, 2], [-(2**63), 2**63 - 1], ["a", "ü,\"'", "0"]])
def test_packed_ids_come_back_in_order_and_of_their_kind(ids: list[int] | list[str]) -> None:
    assert unpack_ids(pack_ids(ids)) == ids


def test_nothing_packed_is_no_ids() -> None:
    assert unpack_ids(None) == []


def test_a_schema_comes_back_as_it_was(registry: Registry, gallery: GalleryRow) -> None:
    row = registry.collection("photos_1")

    assert schema_from_json(row.schema) == shape()
    assert schema_from_json(schema_to_json(shape())) == shape()
    assert row.search == {"ef": 64}
    assert row.adopted


def test_the_clock_is_the_databases_and_counts_seconds_since_1970(registry: Registry) -> None:
    before = registry.now()
    time.sleep(0.05)
    passed = registry.now() - before

    assert abs(before - time.time()) < 60
    assert 0.04 < passed < 5


# --- what the manifest holds ------------------------------------------------------------------------------------------


@pytest.fixture
def kept(registry: Registry) -> list[Contents]:
    """What the registry hands over from here on."""
    handed: list[Contents] = []
    registry._keeper = handed.append
    return handed


def test_every_table_is_kept_or_made_again() -> None:
    made_again = {"batches", "intents", "quarantined", "clients", "workers", "traffic"}

    assert {table.__tablename__ for table in KEPT} | made_again == set(Table.metadata.tables)
    assert {table.__tablename__ for table in KEPT} & made_again == set()


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
    registry.add_traffic("photos", {1: 2})
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


def test_a_gallery_that_a_client_serves_is_not_removed(registry: Registry, gallery: GalleryRow) -> None:
    registry.refresh("photos", client="web-3", ready=1, trouble="")
    with pytest.raises(UsageError, match="Gallery 'photos' is served by client web-3; close it first"):
        registry.remove_gallery("photos")
    registry.leave("web-3")
    registry.remove_gallery("photos")

    assert registry.galleries() == []


def test_no_upgrade_is_numbered_like_one_that_was_removed(registry: Registry, upgrade: UpgradeRow) -> None:
    registry.end(upgrade.id, note="over")
    registry.remove_gallery("photos")

    assert add_upgrade(registry, add_gallery(registry)).id == upgrade.id + 1


def test_a_model_version_is_removed_when_nothing_needs_it_any_more(registry: Registry, upgrade: UpgradeRow) -> None:
    registry.add_artifact(sha256="a" * 64, kind="head", suffix="safetensors", size=3)
    registry.add_version(name="v2+a", embedder="models:new", dim=8, metric="COSINE", base="v2", head="a" * 64)
    registry.end(upgrade.id, note="over")
    for version in ("v1", "v2"):  # v2 is in the history alone
        with pytest.raises(UsageError, match=f"'{version}' is part of gallery 'photos' or its history; .* gallery remove photos"):
            registry.remove_version(version)
    registry.remove_gallery("photos")
    with pytest.raises(UsageError, match=r"'v2\+a' refers to 'v2'"):
        registry.remove_version("v2")
    for version in ("v2+a", "v2", "v1"):
        registry.remove_version(version)

    assert registry.versions() == []


def test_what_applications_and_workers_do_hands_nothing_over(
    registry: Registry, upgrade: UpgradeRow, kept: list[Contents]
) -> None:
    registry.refresh("photos", client="c", ready=2, trouble="")
    registry.close_intents(opened(registry, [1]))
    registry.add_batches(upgrade.id, [([1, 2], None)], first=1)
    batch = claimed(registry, upgrade)
    registry.renew("w1", upgrade.id, lease=60.0)
    registry.copied(batch, again=[], aside={2: "broken"})
    registry.retire_worker("w1")
    registry.leave("c")

    assert kept == []


def test_who_leads_and_who_waits_is_no_part_of_it(registry: Registry, upgrade: UpgradeRow, kept: list[Contents]) -> None:
    baton = registry.lead(upgrade.id, "w1", 10.0)
    assert baton is not None
    before = registry.contents()
    kept.clear()
    registry.keep_leading(upgrade.id, baton, 20.0)
    registry.set_upgrade(upgrade.id, copying={"epoch": 1, "after": 7}, baton=baton)
    registry.keep_leading(upgrade.id, baton, 0)
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


def restored(registry: Registry, url: str) -> Contents:
    """What a registry with everything in it holds, after its tables were dropped and it was restored from that."""
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


def test_what_is_added_to_a_restored_registry_has_new_numbers(registry: Registry, database_url: str) -> None:
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


def test_a_file_that_was_removed_is_not_written_to_any_more(sqlite_url: str, tmp_path: Path) -> None:
    schema.upgrade(sqlite_url)
    registry = Registry(sqlite_url)
    add_gallery(registry)
    for path in tmp_path.glob("registry.sqlite*"):
        path.unlink()
    with pytest.raises(SchemaOutdated):
        registry.galleries()
    schema.upgrade(sqlite_url)

    assert registry.galleries() == []
    registry.close()


# --- model versions, artifacts, galleries -----------------------------------------------------------------------------


def test_a_model_version_registered_twice_is_one(registry: Registry) -> None:
    first = registry.add_version(name="v1", embedder="models:old", options={"size": 2}, dim=4, metric="COSINE")
    again = registry.add_version(name="v1", embedder="models:old", options={"size": 2}, dim=4, metric="COSINE")

    assert again.id == first.id
    assert [row.name for row in registry.versions()] == ["v1"]
    assert registry.version("v1").options == {"size": 2}


def test_a_model_version_never_changes(registry: Registry) -> None:
    registry.add_version(name="v1", embedder="models:old", dim=4, metric="COSINE")

    with pytest.raises(AlreadyExists, match="'v1' is registered with another dim"):
        registry.add_version(name="v1", embedder="models:old", dim=8, metric="COSINE")


def test_a_misspelt_name_gets_the_right_one(registry: Registry, gallery: GalleryRow) -> None:
    with pytest.raises(UnknownName, match=r"No gallery is called 'photo'; did you mean 'photos'\?"):
        registry.gallery("photo")
    with pytest.raises(UnknownName, match=r"No model version is called 'v11'; did you mean 'v1'\?"):
        registry.version("v11")
    with pytest.raises(UnknownName, match=r"No collection is called 'fotos_1'; did you mean 'photos_1'\?"):
        registry.collection("fotos_1")


def test_an_empty_registry_says_how_to_begin(registry: Registry) -> None:
    with pytest.raises(UnknownName, match="register one: rmvdb model add"):
        registry.version("v1")
    with pytest.raises(UnknownName, match="make one: rmvdb gallery add"):
        registry.gallery("photos")


def test_an_artifact_is_found_by_its_hash(registry: Registry) -> None:
    for _ in range(2):
        registry.add_artifact(sha256="c" * 64, kind="reverse", suffix=".safetensors", size=2**40)

    assert registry.artifact("c" * 64).size == 2**40
    with pytest.raises(ArtifactError, match="not in the registry"):
        registry.artifact("d" * 64)


def test_a_new_gallery_is_served_by_its_one_collection(registry: Registry, gallery: GalleryRow) -> None:
    plan = registry.plan("photos")

    assert [row.name for row in registry.galleries()] == ["photos"]
    assert plan.epoch == 1
    assert plan.legs == (OLD,)
    assert plan.grace == 11.0


def test_a_gallery_of_a_model_with_a_head_embeds_with_its_base(registry: Registry) -> None:
    registry.add_artifact(sha256="e" * 64, kind="head", suffix=".safetensors", size=1)
    registry.add_version(name="v1", embedder="models:old", dim=4, metric="COSINE")
    registry.add_version(name="v1+head", embedder="models:old", dim=4, metric="COSINE", base="v1", head="e" * 64)
    add_gallery(registry, model="v1+head")

    (leg,) = registry.plan("photos").legs

    assert (leg.model, leg.embedder, leg.transforms) == ("v1+head", "v1", ("e" * 64,))


def test_a_name_is_taken_once(registry: Registry, gallery: GalleryRow) -> None:
    with pytest.raises(AlreadyExists, match="Gallery 'photos' exists"):
        add_gallery(registry)
    with pytest.raises(AlreadyExists, match="Collection 'photos_1' belongs to gallery 'photos'"):
        add_gallery(registry, "pictures", schema=shape("photos_1"))


def test_a_dropped_collections_name_is_not_used_again(registry: Registry, gallery: GalleryRow) -> None:
    registry.mark_dropped("photos_1")

    with pytest.raises(AlreadyExists, match="Collection 'photos_1' belongs to gallery 'photos'"):
        add_gallery(registry, "pictures", schema=shape("photos_1"))


def test_a_collections_life_is_remembered(registry: Registry, gallery: GalleryRow) -> None:
    for _ in range(2):
        registry.add_collection(gallery.id, model="v1", schema=shape("photos_2"), search={})
    registry.allow_removal("photos_1")
    registry.mark_dropped("photos_1")
    first, second = registry.collections(gallery.id)

    assert (first.name, first.removal_allowed, first.dropped_at is not None) == ("photos_1", True, True)
    assert (second.name, second.adopted, second.removal_allowed, second.dropped_at) == ("photos_2", False, False, None)


def test_a_source_can_be_changed(registry: Registry, gallery: GalleryRow) -> None:
    registry.set_source("photos", "sources:folder")

    assert registry.gallery("photos").source == "sources:folder"


@pytest.mark.parametrize("what", ["version", "artifact", "client", "worker", "collection"])
def test_eight_that_register_the_same_at_once_register_it_once(registry: Registry, gallery: GalleryRow, what: str) -> None:
    register: dict[str, Callable[[], object]] = {
        "version": lambda: registry.add_version(name="v2", embedder="models:new", dim=8, metric="COSINE"),
        "artifact": lambda: registry.add_artifact(sha256="c" * 64, kind="reverse", suffix=".st", size=1),
        "client": lambda: registry.refresh("photos", client="c1", ready=1, trouble=""),
        "worker": lambda: registry.renew("w1", None, lease=1.0),
        "collection": lambda: registry.add_collection(gallery.id, model="v1", schema=shape("photos_2"), search={}),
    }

    at_once(8, lambda _: register[what]())

    assert len(registry.versions()) == (2 if what == "version" else 1)
    assert len(registry.clients(gallery.id)) == (1 if what == "client" else 0)
    assert len(registry.collections(gallery.id)) == (2 if what == "collection" else 1)


# --- epochs -----------------------------------------------------------------------------------------------------------


def test_a_plan_is_announced_then_put_in_force(registry: Registry, gallery: GalleryRow) -> None:
    epoch = registry.announce("photos", [NEW, OLD], TIMES)
    serving = registry.refresh("photos", client="c1", ready=epoch, trouble="")
    waiting = registry.activate("photos", epoch)

    assert (serving.plan.epoch, serving.plan.legs) == (1, (OLD,))
    assert serving.next is not None
    assert (serving.next.epoch, serving.next.legs) == (2, (NEW, OLD))
    assert waiting == []
    assert registry.plan("photos") == serving.next
    assert registry.refresh("photos", client="c1", ready=2, trouble="").next is None


def test_the_same_plan_announced_again_is_the_same_epoch(registry: Registry, gallery: GalleryRow) -> None:
    first = registry.announce("photos", [NEW, OLD], TIMES)
    again = registry.announce("photos", [NEW, OLD], TIMES)
    registry.activate("photos", first)

    assert again == first
    assert registry.announce("photos", [NEW, OLD], TIMES) == first


def test_an_epoch_is_never_used_again(registry: Registry, gallery: GalleryRow) -> None:
    for expected, legs in enumerate(([NEW, OLD], [NEW], [NEW, OLD], [OLD]), start=2):
        assert registry.announce("photos", legs, TIMES) == expected
        assert registry.activate("photos", expected) == []

    assert registry.plan("photos").legs == (OLD,)


def test_an_announcement_is_taken_back_by_announcing_the_plan_in_force(registry: Registry, gallery: GalleryRow) -> None:
    registry.announce("photos", [NEW, OLD], TIMES)

    epoch = registry.announce("photos", [OLD], TIMES)

    assert epoch == 1
    assert registry.activate("photos", epoch) == []
    assert registry.refresh("photos", client="c1", ready=1, trouble="").next is None


@pytest.mark.parametrize("stale", [1, 2, 9])
def test_only_the_announced_plan_comes_into_force(registry: Registry, gallery: GalleryRow, stale: int) -> None:
    registry.activate("photos", registry.announce("photos", [NEW, OLD], TIMES))
    registry.activate("photos", registry.announce("photos", [NEW], TIMES))
    registry.announce("photos", [OLD], TIMES)

    with pytest.raises(WrongPhase, match=f"epoch {stale} of gallery 'photos' is not the announced one, which is 4"):
        registry.activate("photos", stale)
    assert registry.plan("photos").epoch == 3


def test_an_epoch_waits_for_clients_that_cannot_serve_it(registry: Registry, gallery: GalleryRow) -> None:
    epoch = registry.announce("photos", [NEW, OLD], TIMES)
    registry.refresh("photos", client="ready", ready=epoch, trouble="")
    registry.refresh("photos", client="broken", ready=1, trouble="no module 'clip'")

    assert registry.activate("photos", epoch) == ["client broken cannot serve epoch 2 yet: no module 'clip'"]
    assert registry.plan("photos").epoch == 1
    assert registry.open_intents("photos", "upsert", [1], client="c1", lasting=1.0) is not None


def test_an_epoch_can_be_forced_on_clients(registry: Registry, gallery: GalleryRow) -> None:
    epoch = registry.announce("photos", [NEW, OLD], TIMES)
    registry.refresh("photos", client="broken", ready=1, trouble="")

    assert registry.activate("photos", epoch, force=True) == []


def test_an_epoch_does_not_wait_for_clients_that_left_or_fell_silent(registry: Registry) -> None:
    add_gallery(registry, times=TIMES | {"max_age": 0.2})
    epoch = registry.announce("photos", [NEW, OLD], TIMES | {"max_age": 0.2})
    registry.refresh("photos", client="left", ready=1, trouble="")
    registry.leave("left")
    registry.refresh("photos", client="silent", ready=1, trouble="")
    before = registry.activate("photos", epoch)
    time.sleep(0.3)

    assert before == ["client silent cannot serve epoch 2 yet"]
    assert registry.activate("photos", epoch) == []
    assert registry.clients(registry.gallery("photos").id) == []


def test_the_slowest_client_is_one_that_lives_and_has_searched_enough(registry: Registry, gallery: GalleryRow) -> None:
    add_gallery(registry, "pictures")
    for name, client, searches, p99_ms in (
        ("photos", "fast", 500, 12.0),
        ("photos", "slow", 20, 180.5),
        ("photos", "seldom", 19, 900.0),
        ("photos", "left", 500, 900.0),
        ("pictures", "elsewhere", 500, 900.0),
    ):
        registry.refresh(name, client=client, ready=1, trouble="", searches=searches, p99_ms=p99_ms)
    registry.leave("left")
    slowest = registry.slowest_client("photos", enough=20, within=30)
    registry.refresh("photos", client="slow", ready=1, trouble="")
    then = registry.slowest_client("photos", enough=20, within=30)

    assert slowest is not None
    assert (slowest.id, slowest.searches, slowest.p99_ms) == ("slow", 20, 180.5)
    assert then is not None
    assert then.id == "fast"


def test_what_a_client_said_of_its_searches_outlasts_a_late_heartbeat_and_not_its_window(registry: Registry) -> None:
    add_gallery(registry, times=TIMES | {"max_age": 0.1})
    registry.refresh("photos", client="silent", ready=1, trouble="", searches=100, p99_ms=900.0)
    time.sleep(0.3)

    assert registry.clients(registry.gallery("photos").id) == []
    assert registry.slowest_client("photos", enough=20, within=30.0) is not None
    assert registry.slowest_client("photos", enough=20, within=0.2) is None


def test_an_epoch_waits_for_open_writes_and_new_writes_wait_for_it(registry: Registry, gallery: GalleryRow) -> None:
    write = opened(registry, [7])
    epoch = registry.announce("photos", [NEW, OLD], TIMES)
    waiting = registry.activate("photos", epoch)
    refused = registry.open_intents("photos", "upsert", [8], client="c2", lasting=60)
    registry.close_intents(write)

    assert waiting == ["c1 is writing record 7"]
    assert refused is None
    assert registry.activate("photos", epoch) == []
    assert opened(registry, [8]).plan.epoch == epoch


def test_a_forced_epoch_waits_for_open_writes_all_the_same(registry: Registry, gallery: GalleryRow) -> None:
    opened(registry, [7])
    epoch = registry.announce("photos", [NEW, OLD], TIMES)

    assert registry.activate("photos", epoch, force=True) == ["c1 is writing record 7"]


def test_an_epoch_does_not_wait_for_a_writer_that_died(registry: Registry, gallery: GalleryRow) -> None:
    opened(registry, [7], lasting=0.1)
    epoch = registry.announce("photos", [NEW, OLD], TIMES)
    time.sleep(0.2)

    assert registry.activate("photos", epoch) == []


def test_an_epoch_waits_for_claims_and_then_new_ones_wait_for_it(
    registry: Registry, gallery: GalleryRow, upgrade: UpgradeRow
) -> None:
    registry.add_batches(upgrade.id, [([1, 2], None), ([3], None)], first=1)
    batch = claimed(registry, upgrade)
    epoch = registry.announce("photos", [NEW], TIMES)
    for_claims = registry.activate("photos", epoch)
    write = opened(registry, [7])  # a batch may take long: writes go on meanwhile
    registry.copied(batch, again=[], aside={})
    for_writes = registry.activate("photos", epoch)
    refused = claim(registry, upgrade, "w2")
    registry.close_intents(write)

    assert for_claims == [f"worker w1 is at batch {batch.id}"]
    assert for_writes == ["c1 is writing record 7"]
    assert refused is None
    assert registry.activate("photos", epoch) == []
    assert claim(registry, upgrade, "w2") is not None


def test_nobody_else_waits_for_a_write_that_takes_long(registry: Registry, gallery: GalleryRow) -> None:
    opened(registry, [7], client="killed", lasting=2.0)
    time.sleep(plans.LONG + 0.1)
    epoch = registry.announce("photos", [NEW, OLD], TIMES)
    waiting = registry.activate("photos", epoch)
    registry.close_intents(opened(registry, [8], client="alive"))
    time.sleep(1.0)

    assert waiting == ["killed is writing record 7"]
    assert registry.activate("photos", epoch) == []


def test_an_epoch_waits_for_a_claim_that_compares(registry: Registry, upgrade: UpgradeRow) -> None:
    registry.add_batches(upgrade.id, [([1], None)], first=1)
    registry.copied(claimed(registry, upgrade), again=[], aside={})
    batch = claimed(registry, upgrade)
    waiting = registry.activate("photos", registry.announce("photos", [OLD], TIMES))

    assert batch.state == BatchState.COPIED
    assert waiting == [f"worker w1 is at batch {batch.id}"]


def test_an_epoch_waits_for_what_a_worker_left_half_written(registry: Registry, upgrade: UpgradeRow) -> None:
    registry.add_batches(upgrade.id, [([1], None)], first=1)
    batch = claimed(registry, upgrade, lease=0.6)
    registry.advance(batch, BatchState.WRITING)
    registry.retire_worker("w1")
    epoch = registry.announce("photos", [OLD], TIMES)
    waiting = registry.activate("photos", epoch)
    time.sleep(0.7)

    assert waiting == [f"a call that failed may still arrive for batch {batch.id}"]
    assert registry.activate("photos", epoch) == []


def test_nothing_is_claimed_of_an_upgrade_that_ends_meanwhile(registry: Registry, upgrade: UpgradeRow) -> None:
    registry.add_batches(upgrade.id, [([1], None)], first=1)
    with ThreadPoolExecutor(1) as pool:
        with registry.engine.begin() as connection:
            locked = "" if registry.url.get_backend_name() == "sqlite" else "FOR UPDATE"
            connection.execute(text(f"SELECT id FROM galleries {locked}"))
            claiming = pool.submit(claim, registry, upgrade)
            time.sleep(0.3)
            connection.execute(text("UPDATE upgrades SET phase = 'ended'"))
        claimed_ = claiming.result()

    assert claimed_ is None


def test_no_write_slips_through_while_epochs_change(registry: Registry, gallery: GalleryRow) -> None:
    """Every write is made under the plan that is in force when it is opened and when it is closed."""
    wrong: list[str] = []
    stop = threading.Event()

    def write(number: int) -> None:
        while not stop.is_set():
            made = registry.open_intents("photos", "upsert", [number], client=f"c{number}", lasting=30)
            if made is not None:
                if registry.plan("photos").epoch != made.plan.epoch:
                    wrong.append(f"opened under {made.plan.epoch}")
                registry.close_intents(made)
            time.sleep(0.001)

    with ThreadPoolExecutor(3) as pool:
        writers = [pool.submit(write, number) for number in range(3)]
        try:
            for legs in ([NEW, OLD], [NEW], [NEW, OLD], [OLD], [NEW, OLD]):
                epoch = registry.announce("photos", legs, TIMES)
                while registry.activate("photos", epoch):
                    time.sleep(0.002)
        finally:
            stop.set()
        for writer in writers:
            writer.result()

    assert wrong == []
    assert registry.plan("photos").epoch == 6
    assert registry.open_writes(gallery.id) == set()


# --- upgrades ---------------------------------------------------------------------------------------------------------


def test_a_gallery_has_one_upgrade_at_a_time(registry: Registry, gallery: GalleryRow, upgrade: UpgradeRow) -> None:
    with pytest.raises(UpgradeRunning, match="Another upgrade of this gallery has not ended"):
        add_upgrade(registry, gallery)
    active = registry.active_upgrade(gallery.id)

    assert active is not None
    assert active.id == upgrade.id


def test_what_depends_on_the_number_of_an_upgrade_is_registered_with_it_or_nothing_is(
    registry: Registry, gallery: GalleryRow
) -> None:
    def crash(number: int) -> dict[str, Any]:
        raise ZeroDivisionError(number)

    registry.add_version(name="v2", embedder="models:new", dim=8, metric="COSINE")
    with pytest.raises(ZeroDivisionError):
        add_upgrade(registry, gallery, details=crash)
    none = registry.upgrades()
    row = add_upgrade(registry, gallery, details=lambda number: {"new_collection": f"u{number}", "plan": {"number": number}})
    found = registry.upgrade(row.id)

    assert none == []
    assert (found.new_collection, found.plan) == (f"u{row.id}", {"number": row.id})


def test_of_eight_that_begin_an_upgrade_at_once_one_does(registry: Registry, gallery: GalleryRow) -> None:
    registry.add_version(name="v2", embedder="models:new", dim=8, metric="COSINE")

    def begin(_: int) -> str:
        try:
            add_upgrade(registry, gallery)
        except UpgradeRunning:
            return "refused"
        return "begun"

    assert Counter(at_once(8, begin)) == {"begun": 1, "refused": 7}


def test_the_next_upgrade_begins_when_the_last_has_ended(registry: Registry, gallery: GalleryRow, upgrade: UpgradeRow) -> None:
    registry.set_upgrade(upgrade.id, phase=Phase.ENDED)
    none = registry.active_upgrade(gallery.id)
    second = add_upgrade(registry, gallery, undoes=upgrade.id)
    other = add_gallery(registry, "pictures")
    third = add_upgrade(registry, other)

    assert none is None
    assert registry.upgrade(upgrade.id).ended_at is not None
    assert registry.upgrade(second.id).undoes == upgrade.id
    assert [row.id for row in registry.upgrades(gallery.id)] == [upgrade.id, second.id]
    assert [row.id for row in registry.upgrades()] == [upgrade.id, second.id, third.id]


def supersede(registry: Registry, upgrade: UpgradeRow, **values: Any) -> UpgradeRow:
    """An upgrade to v3 in the place of one to v2."""
    registry.add_version(name="v3", embedder="models:newest", dim=8, metric="COSINE")
    plan = registry.plan("photos")
    defaults: dict[str, Any] = {
        "epoch": plan.epoch, "note": "superseded", "gallery_id": upgrade.gallery_id, "from_version": "v2", "to_version": "v3",
        "old_collections": ["photos_2", "photos_1"], "new_collection": "photos_3", "supersedes": upgrade.id,
        "phase": Phase.PLANNED, "method": "naive", "order": "random",
    }  # fmt: skip
    return registry.supersede(upgrade.id, **defaults | values)


def test_an_upgrade_takes_the_place_of_another_at_one_stroke(
    registry: Registry, gallery: GalleryRow, upgrade: UpgradeRow
) -> None:
    heir = supersede(registry, upgrade)
    again = supersede(registry, upgrade)  # the answer of the first was lost
    active = registry.active_upgrade(gallery.id)

    assert active is not None
    assert active.id == heir.id == again.id
    assert (heir.supersedes, heir.old_collections) == (upgrade.id, ["photos_2", "photos_1"])
    assert registry.history(upgrade.id)[-1].note == "superseded"
    assert [each.note for each in registry.history(heir.id)] == [f"takes the place of upgrade {upgrade.id}"]


def test_an_upgrades_columns_may_depend_on_its_number(registry: Registry, upgrade: UpgradeRow) -> None:
    heir = supersede(registry, upgrade, details=lambda number: {"new_collection": f"photos_u{number}"})

    assert registry.upgrade(heir.id).new_collection == f"photos_u{heir.id}"


def test_of_eight_that_take_the_place_of_one_upgrade_one_does(registry: Registry, upgrade: UpgradeRow) -> None:
    for number in range(8):
        registry.add_version(name=f"w{number}", embedder="models:w", dim=8, metric="COSINE")

    def begin(number: int) -> str:
        try:
            return supersede(registry, upgrade, to_version=f"w{number}").to_version
        except WrongPhase:
            return "refused"

    assert Counter(at_once(8, begin)).most_common(1) == [("refused", 7)]


def test_no_upgrade_takes_the_place_of_one_that_is_just_changing_what_is_served(registry: Registry, upgrade: UpgradeRow) -> None:
    seen = registry.plan("photos").epoch
    registry.activate("photos", registry.announce("photos", [NEW], TIMES, upgrade=upgrade.id))

    with pytest.raises(WrongPhase, match="'photos' is served differently since; run the same command again"):
        supersede(registry, upgrade, epoch=seen)
    assert registry.upgrade(upgrade.id).phase == Phase.SERVING_BOTH


def test_an_upgrade_that_has_ended_changes_nothing_more(registry: Registry, upgrade: UpgradeRow) -> None:
    """Its conductor may be in the middle of a step when another upgrade takes its place."""
    announced = registry.announce("photos", [NEW], TIMES, upgrade=upgrade.id)
    supersede(registry, upgrade)

    with pytest.raises(WrongPhase, match=f"Plan epoch {announced} of gallery 'photos' is not the announced one; none is"):
        registry.activate("photos", announced)
    ended = f"Upgrade {upgrade.id} has ended; see what took its place: rmvdb history"
    with pytest.raises(WrongPhase, match=ended):
        registry.announce("photos", [NEW], TIMES, upgrade=upgrade.id)
    with pytest.raises(WrongPhase, match=ended):
        registry.set_upgrade(upgrade.id, phase=Phase.CUT_OVER)
    with pytest.raises(WrongPhase, match=ended):
        registry.add_batches(upgrade.id, [([1], None)], first=1)
    with pytest.raises(WrongPhase, match=ended):
        registry.add_late(upgrade.id, [1])
    assert [leg.collection for leg in registry.plan("photos").legs] == ["photos_2", "photos_1"]


def test_an_upgrade_goes_on_with_the_writes_made_while_another_had_its_place(
    registry: Registry, gallery: GalleryRow, upgrade: UpgradeRow
) -> None:
    registry.set_upgrade(upgrade.id, paused=True)
    registry.add_batches(upgrade.id, [([1, 2], None)], first=1)
    registry.close_intents(opened(registry, [1]))
    heir = supersede(registry, upgrade)
    registry.set_upgrade(heir.id, phase=Phase.SERVING_BOTH)
    registry.activate("photos", registry.announce("photos", [NEWEST, NEW, OLD], TIMES, upgrade=heir.id))
    registry.add_batches(heir.id, [([1, 2], None)], first=1)
    registry.close_intents(opened(registry, [2]))
    registry.end(heir.id, note="given up", resume=upgrade.id)
    registry.end(heir.id, note="given up", resume=upgrade.id)  # the answer of the first was lost
    active = registry.active_upgrade(gallery.id)

    assert active is not None
    assert (active.id, active.phase, active.paused, active.ended_at) == (upgrade.id, Phase.SERVING_BOTH, False, None)
    assert [row.record for row in registry.written(upgrade.id)] == ["1", "2"]
    assert registry.listed_ids(upgrade.id) == {1, 2}
    assert registry.batches(heir.id) == []
    assert [each.note for each in registry.history(upgrade.id)][1:] == ["superseded", f"goes on after upgrade {heir.id}"]
    assert registry.history(heir.id)[-1].note == "given up"


def test_phases_and_notes_make_the_history(registry: Registry, upgrade: UpgradeRow) -> None:
    registry.set_upgrade(upgrade.id, paused=True, rate=50.0)
    registry.set_upgrade(upgrade.id, reason="the disk is full", note="stopped")
    registry.set_upgrade(upgrade.id, phase=Phase.CUT_OVER, plan={"until": 0.5})
    row = registry.upgrade(upgrade.id)

    assert [(each.phase, each.note) for each in registry.history(upgrade.id)] == [
        ("serving both", "registered"),
        ("serving both", "stopped"),
        ("cut over", ""),
    ]
    assert (row.phase, row.paused, row.rate, row.reason, row.plan) == ("cut over", True, 50.0, "the disk is full", {"until": 0.5})


def test_one_process_conducts_until_it_hands_over_or_falls_silent(registry: Registry, upgrade: UpgradeRow) -> None:
    first = registry.lead(upgrade.id, "w1", 60)
    assert first is not None
    assert registry.keep_leading(upgrade.id, first, 60)
    assert registry.lead(upgrade.id, "w2", 60) is None
    assert registry.keep_leading(upgrade.id, first, 0)
    second = registry.lead(upgrade.id, "w2", 0.05)
    time.sleep(0.1)
    third = registry.lead(upgrade.id, "w3", 60)
    assert second is not None
    assert third is not None
    assert first < second < third
    assert not registry.keep_leading(upgrade.id, second, 60)


def test_of_eight_that_would_conduct_one_does(registry: Registry, upgrade: UpgradeRow) -> None:
    batons = at_once(8, lambda number: registry.lead(upgrade.id, f"w{number}", 60))
    assert len([baton for baton in batons if baton is not None]) == 1


# --- batches and claims -----------------------------------------------------------------------------------------------


def test_batches_are_claimed_in_order_each_once(registry: Registry, upgrade: UpgradeRow) -> None:
    registry.add_batches(upgrade.id, [([5, 6], None), ([7], {"path": "a.parquet"})], first=1)
    registry.add_batches(upgrade.id, [([1], None)], first=0)
    order = [claimed(registry, upgrade) for _ in range(3)]

    assert [unpack_ids(batch.ids) for batch in order] == [[1], [5, 6], [7]]
    assert [batch.origin for batch in order] == [None, None, {"path": "a.parquet"}]
    assert {(batch.state, batch.worker, batch.token) for batch in order} == {("claimed", "w1", 1)}
    assert claim(registry, upgrade) is None


def test_a_list_made_again_after_a_crash_has_every_batch_once(registry: Registry, upgrade: UpgradeRow) -> None:
    registry.add_batches(upgrade.id, [([1], None), ([2], None)], first=1)
    registry.add_batches(upgrade.id, [([1], None), ([2], None), ([3], None)], first=1)

    assert [unpack_ids(batch.ids) for batch in registry.batches(upgrade.id)] == [[1], [2], [3]]
    assert registry.next_priority(upgrade.id) == 4


def test_many_workers_claim_each_batch_once(registry: Registry, upgrade: UpgradeRow) -> None:
    registry.add_batches(upgrade.id, [([number], None) for number in range(60)], first=1)

    def work(number: int) -> list[int]:
        mine = []
        while batch := claim(registry, upgrade, f"w{number}"):
            mine.append(batch.id)
        return mine

    taken = [batch for mine in at_once(6, work) for batch in mine]

    assert sorted(taken) == [batch.id for batch in registry.batches(upgrade.id)]


def test_a_batch_goes_its_way(registry: Registry, upgrade: UpgradeRow) -> None:
    registry.add_batches(upgrade.id, [([1, 2, 3], None)], first=1)
    batch = claimed(registry, upgrade)
    registry.advance(batch, BatchState.CLAIMED, archive={"path": "a.parquet"})
    registry.advance(batch, BatchState.WRITING)
    registry.copied(batch, again=[], aside={})
    waiting = claim(registry, upgrade, "w2", grace=60.0)
    due = claimed(registry, upgrade, "w2")
    registry.advance(due, BatchState.REMOVING, remove=pack_ids([1, 2]), again=pack_ids([3]))
    registry.retire(due, moved=2, again=[3])
    first, requeued = registry.batches(upgrade.id)

    assert waiting is None
    assert due.id == batch.id
    assert (first.state, first.count, first.worker, first.archive) == ("retired", 2, None, {"path": "a.parquet"})
    assert unpack_ids(first.remove) == [1, 2]
    assert (requeued.state, requeued.priority, unpack_ids(requeued.ids)) == ("claimed", first.priority, [3])


def test_a_batch_whose_grace_is_over_comes_before_a_fresh_one(registry: Registry, upgrade: UpgradeRow) -> None:
    registry.add_batches(upgrade.id, [([1], None), ([2], None)], first=1)
    first = claimed(registry, upgrade)
    registry.advance(first, BatchState.WRITING)
    registry.copied(first, again=[], aside={})

    assert claimed(registry, upgrade).id == first.id


def test_a_worker_that_may_not_copy_only_ends_what_is_copied(registry: Registry, upgrade: UpgradeRow) -> None:
    registry.add_batches(upgrade.id, [([1], None), ([2], None)], first=1)
    first = claimed(registry, upgrade)
    registry.copied(first, again=[], aside={})
    due = claimed(registry, upgrade, copy=False)
    none = claim(registry, upgrade, copy=False)

    assert due.id == first.id
    assert none is None


@pytest.mark.parametrize("held_up", ["until", "pause"])
def test_what_was_begun_is_finished_though_nothing_fresh_may_begin(registry: Registry, upgrade: UpgradeRow, held_up: str) -> None:
    registry.add_batches(upgrade.id, [([1, 2], None), ([3], None), ([4], None), ([5], None)], first=1)
    copied = claimed(registry, upgrade)
    written, _ = (claimed(registry, upgrade, "dead", lease=0.05) for _ in range(2))
    registry.advance(written, BatchState.WRITING, archive={"photos_1": {"path": "a.parquet"}})
    registry.copied(copied, again=[], aside={})
    registry.retire(claimed(registry, upgrade), moved=1, again=[2])  # changed in the old collection after it was copied
    time.sleep(0.1)
    registry.set_upgrade(upgrade.id, paused=held_up == "pause")
    begun = [unpack_ids(claimed(registry, upgrade, copy=held_up == "pause").ids) for _ in range(3)]
    none = claim(registry, upgrade, copy=held_up == "pause")
    registry.retire_worker("w1")
    still = [unpack_ids(claimed(registry, upgrade, copy=held_up == "pause").ids) for _ in range(2)]

    assert (begun, none) == ([[2], [3], [4]], None)
    assert still == [[2], [3]]  # of the third nothing was written
    assert claim(registry, upgrade, copy=held_up == "pause") is None


@pytest.mark.parametrize("state", [BatchState.CLAIMED, BatchState.WRITING, BatchState.COPIED, BatchState.REMOVING])
def test_a_dead_workers_batch_is_taken_over_and_its_token_is_worthless(
    registry: Registry, upgrade: UpgradeRow, state: BatchState
) -> None:
    registry.add_batches(upgrade.id, [([1], None)], first=1)
    batch = claimed(registry, upgrade, "dead", lease=0.2)
    if state == BatchState.COPIED:
        registry.copied(batch, again=[], aside={})
        batch = claimed(registry, upgrade, "dead", lease=0.2)
    else:
        registry.advance(batch, state)
    early = claim(registry, upgrade, "w2", longest_call=0.2)
    time.sleep(0.3)
    still_early = claim(registry, upgrade, "w2", longest_call=60)
    taken = claimed(registry, upgrade, "w2")

    assert (early, still_early) == (None, None)
    assert (taken.id, taken.worker, taken.token) == (batch.id, "w2", batch.token + 1)
    with pytest.raises(LeaseLost, match=f"Batch {batch.id} was taken over by another worker"):
        registry.advance(batch, BatchState.WRITING)
    with pytest.raises(LeaseLost, match=f"Batch {batch.id} was taken over by another worker"):
        registry.retire(batch, moved=1, again=[])


def test_a_batch_that_was_being_written_is_begun_again(registry: Registry, upgrade: UpgradeRow) -> None:
    registry.add_batches(upgrade.id, [([1], None)], first=1)
    registry.advance(claimed(registry, upgrade, "dead", lease=0.05), BatchState.WRITING)
    time.sleep(0.1)

    assert claimed(registry, upgrade, "w2").state == BatchState.CLAIMED


def test_a_heartbeat_keeps_claims_alive(registry: Registry, upgrade: UpgradeRow) -> None:
    registry.add_batches(upgrade.id, [([1], None)], first=1)
    batch = claimed(registry, upgrade, "w1", lease=0.5)
    for _ in range(4):
        time.sleep(0.2)
        assert registry.renew("w1", upgrade.id, lease=0.5) == {batch.id}

    assert claim(registry, upgrade, "w2") is None
    assert [row.id for row in registry.workers(upgrade.id, within=60)] == ["w1"]
    assert registry.workers(upgrade.id, within=0) == []


def test_a_heartbeat_does_not_revive_a_lease_that_has_run_out(registry: Registry, upgrade: UpgradeRow) -> None:
    """From then on clients write without asking that worker: what it would write could be older than theirs."""
    registry.add_batches(upgrade.id, [([1], None)], first=1)
    registry.advance(claimed(registry, upgrade, "suspended", lease=0.1), BatchState.WRITING)
    time.sleep(0.2)
    held = registry.renew("suspended", upgrade.id, lease=60)

    assert held == set()
    assert not registry.blocked(opened(registry, [1]), [1])
    assert claim(registry, upgrade, "w2") is not None


def test_what_a_worker_leaves_is_free_at_once_where_nothing_of_it_was_written(registry: Registry, upgrade: UpgradeRow) -> None:
    registry.add_batches(upgrade.id, [([1], None), ([2], None)], first=1)
    registry.copied(claimed(registry, upgrade), again=[], aside={})
    compared, fresh = claimed(registry, upgrade), claimed(registry, upgrade)
    registry.renew("w1", upgrade.id, lease=60)
    registry.retire_worker("w1")
    free = {claimed(registry, upgrade, "w2").id for _ in range(2)}

    assert free == {fresh.id, compared.id}
    assert registry.workers(upgrade.id, within=60) == []


def test_a_worker_that_ends_frees_at_once_what_it_wrote_nothing_of(registry: Registry, upgrade: UpgradeRow) -> None:
    """A call of the others, which failed, may still arrive: they are free when their lease has run out."""
    registry.add_batches(upgrade.id, [([1], None), ([2], None), ([3], None)], first=1)
    fresh, written, copied = (claimed(registry, upgrade, lease=1.0) for _ in range(3))
    registry.advance(written, BatchState.WRITING)
    registry.advance(copied, BatchState.REMOVING)
    registry.renew("w1", upgrade.id, lease=1.0)
    registry.retire_worker("w1")
    free = claimed(registry, upgrade, "w2").id
    early = claim(registry, upgrade, "w2")
    time.sleep(1.1)
    late = [claimed(registry, upgrade, "w2").id for _ in range(2)]

    assert (free, early, late) == (fresh.id, None, [copied.id, written.id])
    assert registry.workers(upgrade.id, within=60) == []


@pytest.mark.parametrize("state", [BatchState.WRITING, BatchState.REMOVING])
@pytest.mark.parametrize("leaves", ["worker", "batch"])
def test_what_a_worker_leaves_half_written_is_free_when_its_lease_has_run_out(
    registry: Registry, upgrade: UpgradeRow, state: BatchState, leaves: str
) -> None:
    """A call of it that failed may still arrive; until then clients wait, and its own heartbeat does not hold it."""
    registry.add_batches(upgrade.id, [([1], None)], first=1)
    batch = claimed(registry, upgrade, lease=0.6)
    registry.advance(batch, state, gone=pack_ids([1]))
    write = opened(registry, [1])
    registry.retire_worker("w1") if leaves == "worker" else registry.hand_back(batch)
    during = registry.blocked(write, [1]), claim(registry, upgrade, "w2"), registry.renew("w1", upgrade.id, lease=60)
    time.sleep(0.7)

    assert during == (True, None, set())
    assert not registry.blocked(write, [1])
    assert claimed(registry, upgrade, "w2").id == batch.id


def test_a_list_can_be_made_again_without_what_has_begun(registry: Registry, upgrade: UpgradeRow) -> None:
    registry.add_batches(upgrade.id, [([1], None), ([2], None), ([3, 4], None)], first=1)
    registry.retire(claimed(registry, upgrade), moved=1, again=[])
    claimed(registry, upgrade)
    before = registry.listed_ids(upgrade.id)
    registry.discard_list(upgrade.id)

    assert before == {2, 3, 4}
    assert registry.listed_ids(upgrade.id) == {2}
    assert registry.next_priority(upgrade.id) == 3


def test_late_records_are_listed_once_behind_everything(registry: Registry, upgrade: UpgradeRow) -> None:
    registry.add_batches(upgrade.id, [([1], None), ([2], None)], first=1)
    registry.retire(claimed(registry, upgrade), moved=1, again=[])
    at_once(6, lambda _: registry.add_late(upgrade.id, [1, 2, 3]))

    assert [(row.priority, unpack_ids(row.ids)) for row in registry.batches(upgrade.id, state=BatchState.PENDING)] == [
        (2, [2]),
        (3, [1, 3]),
    ]


def test_batches_are_read_a_page_at_a_time(registry: Registry, upgrade: UpgradeRow) -> None:
    registry.add_batches(upgrade.id, [([number], None) for number in range(5)], first=1)
    claimed(registry, upgrade)
    page = registry.batches(upgrade.id, limit=2)
    rest = registry.batches(upgrade.id, after=page[-1].id)
    pending = registry.batches(upgrade.id, state=BatchState.PENDING)

    assert [unpack_ids(batch.ids) for batch in [*page, *rest]] == [[0], [1], [2], [3], [4]]
    assert len(pending) == 4


def test_a_worker_whose_clock_is_wrong_takes_nothing_over(
    registry: Registry, upgrade: UpgradeRow, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry.add_batches(upgrade.id, [([1], None)], first=1)
    claimed(registry, upgrade, "w1", lease=60)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 86400)
    ahead = claim(registry, upgrade, "w2")
    monkeypatch.setattr(time, "time", lambda: now - 86400)
    behind = claim(registry, upgrade, "w2")

    assert (ahead, behind) == (None, None)


# --- progress ---------------------------------------------------------------------------------------------------------


def test_progress_counts_what_is_in_the_new_collection(registry: Registry, upgrade: UpgradeRow) -> None:
    registry.add_batches(upgrade.id, [([1, 2, 3, 4], None), ([5, 6], None), ([7, 8, 9, 10], None)], first=1)
    empty = registry.progress(upgrade.id)
    registry.advance(claimed(registry, upgrade), BatchState.WRITING)
    writing = registry.progress(upgrade.id)
    registry.copied(claimed(registry, upgrade), again=[], aside={})
    copied = registry.progress(upgrade.id)

    assert (empty.done, empty.total, empty.rate, empty.t) == (0, 10, None, 0.0)
    assert writing.done == 0
    assert (copied.done, copied.total, copied.t) == (2, 10, 0.2)
    assert copied.rate is not None
    assert 0 < copied.rate <= 2
    assert copied.eta is not None
    assert registry.counts(upgrade.id) == {
        BatchState.WRITING: (1, 4),
        BatchState.COPIED: (1, 2),
        BatchState.PENDING: (1, 4),
    }


def test_no_time_left_is_told_before_one_percent() -> None:
    assert Progress(done=9, total=1000, rate=5.0).eta is None
    assert Progress(done=10, total=1000, rate=5.0).eta == 198.0
    assert Progress(done=500, total=1000, rate=None).eta is None


def test_progress_ends_at_one_when_the_last_record_is_moved(registry: Registry, upgrade: UpgradeRow) -> None:
    registry.add_batches(upgrade.id, [([1, 2], None), ([3, 4], None)], first=1)
    registry.retire(claimed(registry, upgrade), moved=1, again=[2])
    after_one = registry.progress(upgrade.id)
    while batch := claim(registry, upgrade):
        registry.retire(batch, moved=batch.count, again=[])
    end = registry.progress(upgrade.id)

    assert (after_one.done, after_one.total) == (1, 4)
    assert (end.done, end.total, end.t) == (4, 4, 1.0)


def test_progress_has_no_rate_when_nothing_moved_lately(registry: Registry, upgrade: UpgradeRow) -> None:
    registry.add_batches(upgrade.id, [([1], None), ([2], None)], first=1)
    registry.copied(claimed(registry, upgrade), again=[], aside={})
    time.sleep(0.2)

    assert registry.progress(upgrade.id, window=0.1).rate is None


def test_an_empty_gallery_is_done(registry: Registry, upgrade: UpgradeRow) -> None:
    assert registry.progress(upgrade.id).t == 1.0
    assert registry.counts(upgrade.id) == {}


def test_a_batch_ended_twice_because_its_answer_was_lost_lists_its_rest_once(registry: Registry, upgrade: UpgradeRow) -> None:
    registry.add_batches(upgrade.id, [([1, 2], None)], first=1)
    batch = claimed(registry, upgrade)
    for _ in range(2):
        registry.retire(batch, moved=1, again=[2])

    assert [row.count for row in registry.batches(upgrade.id)] == [1, 1]


# --- intents ----------------------------------------------------------------------------------------------------------


def test_a_write_waits_while_its_record_is_being_written(registry: Registry, upgrade: UpgradeRow) -> None:
    registry.add_batches(upgrade.id, [([1, 2], None)], first=1)
    batch = claimed(registry, upgrade)
    mine, other = opened(registry, [2]), opened(registry, [3])
    read = registry.blocked(mine, [2])
    registry.advance(batch, BatchState.WRITING)
    writing = registry.blocked(mine, [2]), registry.blocked(other, [3])
    registry.copied(batch, again=[], aside={})

    assert not read
    assert writing == (True, False)
    assert not registry.blocked(mine, [2])


def test_a_write_does_not_wait_for_a_worker_that_died(registry: Registry, upgrade: UpgradeRow) -> None:
    registry.add_batches(upgrade.id, [([1], None)], first=1)
    registry.advance(claimed(registry, upgrade, lease=0.1), BatchState.WRITING)
    time.sleep(0.2)

    assert not registry.blocked(opened(registry, [1]), [1])


def test_of_two_writes_of_one_record_the_later_waits(registry: Registry, gallery: GalleryRow) -> None:
    first, second = opened(registry, [1, 2], client="c1#1"), opened(registry, [2, 3], client="c1#2")
    before = registry.blocked(first, [1, 2]), registry.blocked(second, [2, 3])
    registry.close_intents(first)

    assert before == (False, True)
    assert not registry.blocked(second, [2, 3])


@pytest.mark.parametrize("end", ["withdrawn", "expired"])
def test_a_write_that_was_given_up_is_in_nobodys_way(registry: Registry, upgrade: UpgradeRow, end: str) -> None:
    first = opened(registry, [1], lasting=60 if end == "withdrawn" else 0.1)
    if end == "withdrawn":
        registry.withdraw_intents(first)
    time.sleep(0.2)

    second = opened(registry, [1], client="c2")

    assert not registry.blocked(second, [1])
    assert registry.open_writes(upgrade.gallery_id) == set(second.intents)


@pytest.mark.parametrize("planned", [False, True])
def test_what_writes_left_that_never_ended_goes_with_the_next_write_while_no_upgrade_is_on(
    registry: Registry, gallery: GalleryRow, *, planned: bool
) -> None:
    """While one is, a copy may be being made, which has to be asked for these."""
    opened(registry, [1, 2], client="killed", lasting=0.1)
    under_way = opened(registry, [3], client="c2")
    if planned:
        add_upgrade(registry, gallery, phase=Phase.PLANNED)
    time.sleep(0.2)
    opened(registry, [4], client="c3")

    assert sorted(registry.cut_off("photos")) == ([1, 2] if planned else [])
    assert set(under_way.intents) < registry.open_writes(gallery.id)


def test_a_write_that_was_forgotten_marks_no_other_one_as_done(registry: Registry, gallery: GalleryRow) -> None:
    forgotten = opened(registry, [1])
    registry.withdraw_intents(forgotten)
    later = opened(registry, [1])
    registry.close_intents(forgotten)
    assert registry.open_writes(gallery.id) == set(later.intents)


@pytest.mark.parametrize("still", [True, False])
def test_who_was_overtaken_makes_no_work_list(registry: Registry, gallery: GalleryRow, *, still: bool) -> None:
    """Not after the one that overtook it has ended, either, when the baton is free again."""
    upgrade = add_upgrade(registry, gallery)
    first = registry.lead(upgrade.id, "first", 0.0001)
    time.sleep(0.01)
    second = registry.lead(upgrade.id, "second", 10.0)
    assert second is not None
    registry.add_batches(upgrade.id, [([1], None)], first=1, baton=second)
    if not still:
        registry.keep_leading(upgrade.id, second, 0)
    who = "second" if still else "Another process"
    for step in (
        lambda: registry.discard_list(upgrade.id, baton=first),
        lambda: registry.add_batches(upgrade.id, [([2], None)], first=2, baton=first),
        lambda: registry.set_upgrade(upgrade.id, listed=True, baton=first),
    ):
        with pytest.raises(UpgradeRunning, match=f"{who} took upgrade {upgrade.id} over while this one was suspended"):
            step()
    assert [unpack_ids(row.ids) for row in registry.batches(upgrade.id)] == [[1]]
    assert not registry.upgrade(upgrade.id).listed


def test_of_two_writes_announced_at_once_just_one_goes_first(registry: Registry, gallery: GalleryRow) -> None:
    slow = Registry(registry.url.render_as_string(hide_password=False))
    event.listen(slow.engine, "commit", lambda _: time.sleep(0.5))
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(opened, slow, [1], client="slow")
        time.sleep(0.2)
        second = opened(registry, [1])
        blocked = [registry.blocked(second, [1]), registry.blocked(first.result(), [1])]
    slow.close()

    assert sorted(blocked) == [False, True]


def test_two_clients_never_write_one_record_at_the_same_time(registry: Registry, upgrade: UpgradeRow) -> None:
    busy: Counter[int] = Counter()
    clashes: list[int] = []
    guard = threading.Lock()

    def write(number: int) -> None:
        for turn in range(12):
            ids = [1, 2] if (number + turn) % 2 else [2, 1]
            mine = opened(registry, ids, client=f"c{number}")
            while registry.blocked(mine, ids):
                time.sleep(0.001)
            with guard:
                busy.update(ids)
                clashes.extend(id for id in ids if busy[id] > 1)
            time.sleep(0.001)
            with guard:
                busy.subtract(ids)
            registry.close_intents(mine)

    at_once(6, write)

    assert clashes == []


def test_a_worker_sees_open_writes_and_the_last_done_one(registry: Registry, upgrade: UpgradeRow) -> None:
    registry.close_intents(opened(registry, [1]))
    removal = registry.open_intents("photos", "delete", [1], client="c1", lasting=60)
    assert removal is not None
    registry.close_intents(removal)
    registry.close_intents(opened(registry, [2]))
    opened(registry, [2])
    opened(registry, [3], lasting=0.05)
    time.sleep(0.1)
    found = registry.intents(upgrade.id, [1, 2, 3, 4])

    assert {record: (row.kind, row.done) for record, row in found.items()} == {"1": ("delete", True), "2": ("upsert", False)}


def test_writes_are_read_a_page_at_a_time(registry: Registry, upgrade: UpgradeRow) -> None:
    registry.close_intents(opened(registry, [1, 2, 3]))
    opened(registry, [4])
    page = registry.written(upgrade.id, limit=2)
    rest = registry.written(upgrade.id, after=page[-1].id)

    assert [(row.record, row.done) for row in [*page, *rest]] == [("1", True), ("2", True), ("3", True), ("4", False)]


def test_a_write_past_its_deadline_is_not_done(registry: Registry, upgrade: UpgradeRow) -> None:
    late, done = opened(registry, [1], lasting=0.1), opened(registry, [2])
    time.sleep(0.2)
    ended = registry.close_intents(late), registry.close_intents(done)

    assert ended == (False, True)
    assert registry.close_intents(done), "repeated, because the answer was lost"
    assert registry.intents(upgrade.id, [1, 2]).keys() == {"2"}


def test_a_write_past_its_deadline_is_not_done_outside_an_upgrade_either(registry: Registry, gallery: GalleryRow) -> None:
    late, done = opened(registry, [1], lasting=0.1), opened(registry, [2])
    time.sleep(0.2)

    assert not registry.close_intents(late)
    assert registry.close_intents(done)
    assert registry.close_intents(done)


def test_a_write_that_was_given_up_half_way_is_told_to_who_asks_for_it(registry: Registry, upgrade: UpgradeRow) -> None:
    registry.close_intents(opened(registry, [1, 2]))
    opened(registry, [2, 3], client="c2", lasting=0.1)
    time.sleep(0.2)
    found = registry.announced(upgrade.id, [1, 2, 3, 4])

    assert {record: row.done for record, row in found.items()} == {"1": True, "2": False, "3": False}


def test_a_write_waits_for_clients_that_serve_by_the_plan_before(registry: Registry, gallery: GalleryRow) -> None:
    def refresh(client: str, *, holds: int) -> None:
        registry.refresh("photos", client=client, holds=holds, ready=2, trouble="")

    refresh("new", holds=0)
    refresh("slow", holds=1)
    registry.activate("photos", registry.announce("photos", [NEW, OLD], TIMES))
    refused = [registry.open_intents("photos", "upsert", [1], client="c1", lasting=60)]
    for client in ("new", "slow"):
        refresh(client, holds=1)  # it is told of the new plan now, and may search by the one before until it says so
        refresh(client, holds=2)
        refused += [registry.open_intents("photos", "upsert", [1], client="c1", lasting=60)]

    assert [made and made.plan.epoch for made in refused] == [None, None, 2]


def test_a_write_does_not_wait_for_a_client_that_fell_silent(registry: Registry) -> None:
    add_gallery(registry, times=TIMES | {"max_age": 1.0})
    registry.refresh("photos", client="silent", ready=2, trouble="")
    registry.activate("photos", registry.announce("photos", [NEW, OLD], TIMES | {"max_age": 1.0}))
    before = registry.open_intents("photos", "upsert", [1], client="c1", lasting=60)
    time.sleep(1.1)

    assert before is None
    assert opened(registry, [1]).plan.epoch == 2


def test_a_write_under_the_old_plan_is_not_the_planned_upgrades(registry: Registry, gallery: GalleryRow) -> None:
    planned = add_upgrade(registry, gallery, phase=Phase.PLANNED)
    before = opened(registry, [1])
    registry.close_intents(before)
    registry.activate("photos", registry.announce("photos", [NEW, OLD], TIMES))

    assert before.upgrade is None
    assert opened(registry, [1]).upgrade == planned.id


def test_a_write_while_a_roll_back_is_planned_belongs_to_what_is_undone(
    registry: Registry, gallery: GalleryRow, upgrade: UpgradeRow
) -> None:
    registry.set_upgrade(upgrade.id, phase=Phase.ENDED)
    back = add_upgrade(
        registry, gallery, undoes=upgrade.id, old_collections=["photos_2"], new_collection="photos_3", phase=Phase.PLANNED
    )
    during = opened(registry, [1])
    registry.close_intents(during)
    registry.activate("photos", registry.announce("photos", [OLD_AGAIN, NEW], TIMES))

    assert during.upgrade == upgrade.id
    assert opened(registry, [2]).upgrade == back.id


def test_a_write_while_a_third_version_is_planned_belongs_to_what_it_supersedes(registry: Registry, upgrade: UpgradeRow) -> None:
    heir = supersede(registry, upgrade)
    during = opened(registry, [1])
    registry.close_intents(during)
    registry.activate("photos", registry.announce("photos", [NEWEST, NEW, OLD], TIMES, upgrade=heir.id))

    assert during.upgrade == upgrade.id
    assert opened(registry, [2]).upgrade == heir.id


def test_a_write_outside_an_upgrade_leaves_nothing_behind(registry: Registry, gallery: GalleryRow) -> None:
    write = opened(registry, [1])
    during = registry.open_writes(gallery.id)
    registry.close_intents(write)

    assert write.upgrade is None
    assert (during, registry.open_writes(gallery.id)) == (set(write.intents), set())


def test_thousands_of_records_are_one_write(registry: Registry, upgrade: UpgradeRow) -> None:
    many = list(range(5000))
    registry.add_batches(upgrade.id, [([4999], None)], first=1)
    batch = claimed(registry, upgrade)
    write = opened(registry, many)
    registry.advance(batch, BatchState.WRITING)
    blocked = registry.blocked(write, many)
    registry.close_intents(write)

    assert blocked
    assert len(registry.intents(upgrade.id, many)) == 5000


def test_thousands_of_records_can_be_given_up(registry: Registry, gallery: GalleryRow) -> None:
    registry.withdraw_intents(opened(registry, list(range(5000))))

    assert registry.open_writes(gallery.id) == set()


def test_a_write_announced_twice_because_its_answer_was_lost_waits_only_for_others(
    registry: Registry, gallery: GalleryRow
) -> None:
    opened(registry, [1, 2], client="c1#1")
    again = opened(registry, [1, 2], client="c1#1")

    assert registry.open_writes(gallery.id) == set(again.intents)
    assert not registry.blocked(again, [1, 2])
    assert registry.blocked(opened(registry, [2], client="c1#2"), [2])


# --- quarantine -------------------------------------------------------------------------------------------------------


def test_a_quarantined_record_counts_as_not_moved(registry: Registry, upgrade: UpgradeRow) -> None:
    registry.add_batches(upgrade.id, [([1, 2], None)], first=1)
    registry.copied(claimed(registry, upgrade), again=[], aside={2: "cannot be read"})
    due = claimed(registry, upgrade, grace=0.0)
    registry.copied(due, again=[], aside={2: "x" * 5000})
    registry.retire(due, moved=1, again=[])
    progress = registry.progress(upgrade.id)

    assert [(row.record, len(row.reason)) for row in registry.quarantined(upgrade.id)] == [("2", 2000)]
    assert (progress.done, progress.total, progress.quarantined) == (1, 2, 1)


def test_a_released_record_is_tried_again_or_dropped(registry: Registry, upgrade: UpgradeRow) -> None:
    set_aside(registry, upgrade, dict.fromkeys((1, 2, 3), "cannot be read"))
    registry.retire(claimed(registry, upgrade, grace=0.0), moved=0, again=[])
    registry.release(upgrade.id, [1, 2], again=True)
    registry.release(upgrade.id, [3], again=False)

    assert registry.quarantined(upgrade.id) == []
    assert registry.listed_ids(upgrade.id) == {1, 2}


def test_a_quarantined_record_leaves_its_batch(registry: Registry, upgrade: UpgradeRow) -> None:
    registry.add_batches(upgrade.id, [([1, 2], None)], first=1)
    registry.copied(claimed(registry, upgrade), again=[], aside={2: "cannot be read"})

    assert unpack_ids(claimed(registry, upgrade).ids) == [1]
    assert registry.listed_ids(upgrade.id) == {1}


def test_a_record_released_twice_is_listed_once(registry: Registry, upgrade: UpgradeRow) -> None:
    set_aside(registry, upgrade, {1: "cannot be read"})
    registry.retire(claimed(registry, upgrade, grace=0.0), moved=0, again=[])
    for _ in range(2):
        registry.release(upgrade.id, [1], again=True)

    assert [unpack_ids(row.ids) for row in registry.batches(upgrade.id, state=BatchState.PENDING)] == [[1]]


def test_clean_up_keeps_the_history_only(registry: Registry, upgrade: UpgradeRow) -> None:
    registry.add_batches(upgrade.id, [([1], None)], first=1)
    registry.close_intents(opened(registry, [1]))
    set_aside(registry, upgrade, {1: "cannot be read"})
    registry.end(upgrade.id, note="cleaned up")

    assert registry.batches(upgrade.id) == []
    assert registry.written(upgrade.id) == []
    assert registry.quarantined(upgrade.id) == []
    assert [each.note for each in registry.history(upgrade.id)] == ["registered", "cleaned up"]


# --- a database in trouble --------------------------------------------------------------------------------------------


@pytest.fixture
def far_registry(stoppable_postgres: Postgres) -> Iterator[Registry]:
    """A registry with a gallery on a server that can be stopped."""
    url = stoppable_postgres.database()
    schema.upgrade(url)
    registry = Registry(url, patience=20)
    add_gallery(registry)
    yield registry
    registry.close()


@pytest.mark.postgres
def test_a_database_that_restarts_is_waited_for(far_registry: Registry, stoppable_postgres: Postgres) -> None:
    stoppable_postgres.stop()
    restart = threading.Timer(1.0, stoppable_postgres.start)
    restart.start()
    began = time.monotonic()
    plan = far_registry.plan("photos")
    waited = time.monotonic() - began
    restart.join()

    assert plan.legs == (OLD,)
    assert 0.5 < waited < 15


@pytest.mark.postgres
def test_a_database_that_stays_away_is_named_without_its_password(far_registry: Registry, stoppable_postgres: Postgres) -> None:
    impatient = Registry(far_registry.url.render_as_string(hide_password=False), patience=0.5)
    stoppable_postgres.stop()
    began = time.monotonic()

    with pytest.raises(RegistryUnavailable, match=r"The registry at postgresql\+psycopg://postgres:\*\*\*@") as caught:
        impatient.galleries()

    assert time.monotonic() - began < 5
    assert "did not answer for 0.5 s" in str(caught.value)
    assert "run the same command again" in str(caught.value)
    said = [str(caught.value)]
    cause = caught.value.__cause__
    while cause is not None:
        said.append(str(cause))
        cause = cause.__cause__ or cause.__context__
    assert not [sentence for sentence in said if PASSWORD in sentence]
    stoppable_postgres.start()
    assert [row.name for row in impatient.galleries()] == ["photos"]
    impatient.close()


@pytest.mark.postgres
def test_work_goes_on_while_the_database_restarts_under_it(far_registry: Registry, stoppable_postgres: Postgres) -> None:
    upgrade = add_upgrade(far_registry, far_registry.gallery("photos"))
    far_registry.add_batches(upgrade.id, [([number], None) for number in range(200)], first=1)
    half = threading.Event()

    def work(number: int) -> list[int]:
        mine = []
        while batch := claim(far_registry, upgrade, f"w{number}"):
            far_registry.retire(batch, moved=1, again=[])
            mine.append(batch.id)
            if len(mine) == 10:
                half.set()
        return mine

    with ThreadPoolExecutor(3) as pool:
        workers = [pool.submit(work, number) for number in range(3)]
        half.wait()
        stoppable_postgres.stop()
        stoppable_postgres.start()
        taken = [batch for worker in workers for batch in worker.result()]

    assert len(taken) == len(set(taken))
    # A claim whose commit was not answered is nobody's until its lease has run out; none is lost.
    assert far_registry.counts(upgrade.id)[BatchState.RETIRED][0] >= 197


@pytest.mark.postgres
@pytest.mark.parametrize("part", ["database", "user"])
def test_a_wrong_address_is_refused_at_once(postgres_url: str, part: str) -> None:
    wrong = Registry(postgres_url)
    change = {"database": {"database": "nowhere"}, "user": {"username": "nobody"}}[part]
    there = Registry(wrong.url.set(**change).render_as_string(hide_password=False))
    began = time.monotonic()

    with pytest.raises(RegistryError, match=r'"(nowhere|nobody)" does not exist; mend registry.url'):
        there.galleries()

    assert time.monotonic() - began < 5
    there.close()
    wrong.close()


def test_a_password_among_the_parameters_is_hidden_too() -> None:
    registry = Registry("postgresql+psycopg://me@localhost/rmvdb?password=hidden-word&sslmode=require")

    assert registry.shown_url == "postgresql+psycopg://me@localhost/rmvdb?password=***&sslmode=require"


def test_a_locked_file_is_waited_for(sqlite_url: str) -> None:
    schema.upgrade(sqlite_url)
    registry = Registry(sqlite_url, patience=20)
    with ThreadPoolExecutor(1) as pool:
        with registry.engine.begin():
            waiting = pool.submit(registry.versions)
            time.sleep(0.5)
            early = waiting.done()
        versions = waiting.result()
    registry.close()

    assert not early
    assert versions == []


def test_a_file_that_is_no_database_is_named(tmp_path: Path) -> None:
    file = tmp_path / "registry.sqlite"
    file.write_bytes(b"something else entirely, and long enough to be looked at" * 100)
    registry = Registry(f"sqlite:///{file}")

    with pytest.raises(RegistryError, match="file is not a database"):
        registry.galleries()


def test_a_full_disk_says_so(sqlite_url: str) -> None:
    schema.upgrade(sqlite_url)
    registry = Registry(sqlite_url)
    add_gallery(registry)
    event.listen(registry.engine, "begin", lambda connection: connection.exec_driver_sql("PRAGMA max_page_count=1"))

    with pytest.raises(DiskFull, match="free some space, then run the same command again"):
        opened(registry, list(range(5000)))

    registry.close()


def test_a_registry_survives_a_process_that_dies_in_a_transaction(registry: Registry, gallery: GalleryRow) -> None:
    connection = registry.engine.connect()
    connection.execute(text("UPDATE galleries SET epoch = 99"))
    connection.invalidate()
    connection.close()

    assert registry.plan("photos").epoch == 1
