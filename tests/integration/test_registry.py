"""The registry on SQLite and on PostgreSQL: what each method promises, alone and among others."""

from __future__ import annotations

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
    UnknownName,
    UpgradeRunning,
    WrongPhase,
)
from rmvdb.registry import Opened, Registry, pack_ids, schema_from_json, schema_to_json, unpack_ids
from rmvdb.tables import BatchRow, GalleryRow, UpgradeRow
from rmvdb.types import BatchState, Field, IdType, Leg, Metric, Phase, Schema
from tests.support.postgres import PASSWORD, Postgres

TIMES = {"max_age": 5.0, "longest_search": 5.0, "staleness": 1.0}
OLD = Leg(collection="photos_1", model="v1", metric=Metric.COSINE, embedder="v1")
NEW = Leg(collection="photos_2", model="v2", metric=Metric.COSINE, embedder="v2", transforms=("a" * 64,), calibration="b" * 64)

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
        "old_collection": "photos_1",
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


def test_an_epoch_waits_for_claims_and_new_claims_wait_for_it(
    registry: Registry, gallery: GalleryRow, upgrade: UpgradeRow
) -> None:
    registry.add_batches(upgrade.id, [([1, 2], None), ([3], None)], first=1)
    batch = claimed(registry, upgrade)
    epoch = registry.announce("photos", [NEW], TIMES)
    waiting = registry.activate("photos", epoch)
    refused = claim(registry, upgrade, "w2")
    registry.advance(batch, BatchState.COPIED)

    assert waiting == [f"worker w1 is at batch {batch.id}"]
    assert refused is None
    assert registry.activate("photos", epoch) == []
    assert claim(registry, upgrade, "w2") is not None


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
    assert registry.open_count(gallery.id) == 0


# --- upgrades ---------------------------------------------------------------------------------------------------------


def test_a_gallery_has_one_upgrade_at_a_time(registry: Registry, gallery: GalleryRow, upgrade: UpgradeRow) -> None:
    with pytest.raises(UpgradeRunning, match="Another upgrade of this gallery has not ended"):
        add_upgrade(registry, gallery)
    active = registry.active_upgrade(gallery.id)

    assert active is not None
    assert active.id == upgrade.id


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
    assert registry.lead(upgrade.id, "w1", 60)
    assert registry.lead(upgrade.id, "w1", 60)
    assert not registry.lead(upgrade.id, "w2", 60)
    assert registry.lead(upgrade.id, "w1", 0)
    assert registry.lead(upgrade.id, "w2", 0.05)
    time.sleep(0.1)
    assert registry.lead(upgrade.id, "w3", 60)


def test_of_eight_that_would_conduct_one_does(registry: Registry, upgrade: UpgradeRow) -> None:
    assert sum(at_once(8, lambda number: registry.lead(upgrade.id, f"w{number}", 60))) == 1


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
    registry.advance(batch, BatchState.COPIED)
    waiting = claim(registry, upgrade, "w2", grace=60.0)
    due = claimed(registry, upgrade, "w2")
    registry.advance(due, BatchState.REMOVING, remove=pack_ids([1, 2]), again=pack_ids([3]))
    registry.retire(due, moved=2, again=[3])
    first, requeued = registry.batches(upgrade.id)

    assert waiting is None
    assert due.id == batch.id
    assert (first.state, first.count, first.worker, first.archive) == ("retired", 2, None, {"path": "a.parquet"})
    assert unpack_ids(first.remove) == [1, 2]
    assert (requeued.state, requeued.priority, unpack_ids(requeued.ids)) == ("pending", first.priority, [3])


def test_a_batch_whose_grace_is_over_comes_before_a_fresh_one(registry: Registry, upgrade: UpgradeRow) -> None:
    registry.add_batches(upgrade.id, [([1], None), ([2], None)], first=1)
    first = claimed(registry, upgrade)
    registry.advance(first, BatchState.WRITING)
    registry.advance(first, BatchState.COPIED)

    assert claimed(registry, upgrade).id == first.id


def test_a_worker_that_may_not_copy_only_ends_what_is_copied(registry: Registry, upgrade: UpgradeRow) -> None:
    registry.add_batches(upgrade.id, [([1], None), ([2], None)], first=1)
    first = claimed(registry, upgrade)
    registry.advance(first, BatchState.COPIED)
    due = claimed(registry, upgrade, copy=False)
    none = claim(registry, upgrade, copy=False)

    assert due.id == first.id
    assert none is None


@pytest.mark.parametrize("state", [BatchState.CLAIMED, BatchState.WRITING, BatchState.COPIED, BatchState.REMOVING])
def test_a_dead_workers_batch_is_taken_over_and_its_token_is_worthless(
    registry: Registry, upgrade: UpgradeRow, state: BatchState
) -> None:
    registry.add_batches(upgrade.id, [([1], None)], first=1)
    batch = claimed(registry, upgrade, "dead", lease=0.2)
    registry.advance(batch, state)
    if state == BatchState.COPIED:
        batch = claimed(registry, upgrade, "dead", lease=0.2)
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


def test_a_worker_that_ends_well_frees_its_claims_at_once(registry: Registry, upgrade: UpgradeRow) -> None:
    registry.add_batches(upgrade.id, [([1], None), ([2], None), ([3], None)], first=1)
    fresh, written, copied = (claimed(registry, upgrade) for _ in range(3))
    registry.advance(written, BatchState.WRITING)
    registry.advance(copied, BatchState.REMOVING)
    registry.renew("w1", upgrade.id, lease=60)
    registry.retire_worker("w1")
    free = [claimed(registry, upgrade, "w2").id for _ in range(2)]

    assert free == [copied.id, fresh.id]
    assert claim(registry, upgrade, "w2") is None
    assert registry.workers(upgrade.id, within=60) == []


def test_a_list_can_be_made_again_without_what_has_begun(registry: Registry, upgrade: UpgradeRow) -> None:
    registry.add_batches(upgrade.id, [([1], None), ([2], None), ([3, 4], None)], first=1)
    registry.retire(claimed(registry, upgrade), moved=1, again=[])
    claimed(registry, upgrade)
    before = registry.listed_ids(upgrade.id)
    registry.discard_list(upgrade.id)

    assert before == {2, 3, 4}
    assert registry.listed_ids(upgrade.id) == {2}
    assert registry.next_priority(upgrade.id) == 3


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
    registry.advance(claimed(registry, upgrade), BatchState.COPIED)
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
    registry.advance(claimed(registry, upgrade), BatchState.COPIED)
    time.sleep(0.2)

    assert registry.progress(upgrade.id, window=0.1).rate is None


def test_an_empty_gallery_is_done(registry: Registry, upgrade: UpgradeRow) -> None:
    assert registry.progress(upgrade.id).t == 1.0
    assert registry.counts(upgrade.id) == {}


# --- intents ----------------------------------------------------------------------------------------------------------


def test_a_write_waits_while_its_record_is_being_written(registry: Registry, upgrade: UpgradeRow) -> None:
    registry.add_batches(upgrade.id, [([1, 2], None)], first=1)
    batch = claimed(registry, upgrade)
    mine, other = opened(registry, [2]), opened(registry, [3])
    read = registry.blocked(mine, [2])
    registry.advance(batch, BatchState.WRITING)
    writing = registry.blocked(mine, [2]), registry.blocked(other, [3])
    registry.advance(batch, BatchState.COPIED)

    assert not read
    assert writing == (True, False)
    assert not registry.blocked(mine, [2])


def test_a_write_does_not_wait_for_a_worker_that_died(registry: Registry, upgrade: UpgradeRow) -> None:
    registry.add_batches(upgrade.id, [([1], None)], first=1)
    registry.advance(claimed(registry, upgrade, lease=0.1), BatchState.WRITING)
    time.sleep(0.2)

    assert not registry.blocked(opened(registry, [1]), [1])


def test_of_two_writes_of_one_record_the_later_waits(registry: Registry, gallery: GalleryRow) -> None:
    first, second = opened(registry, [1, 2]), opened(registry, [2, 3])
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

    assert not registry.blocked(opened(registry, [1]), [1])
    assert registry.written(upgrade.id) == []


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


def test_done_writes_are_read_a_page_at_a_time(registry: Registry, upgrade: UpgradeRow) -> None:
    registry.close_intents(opened(registry, [1, 2, 3]))
    opened(registry, [4])
    page = registry.written(upgrade.id, limit=2)
    rest = registry.written(upgrade.id, after=page[-1].id)

    assert [row.record for row in [*page, *rest]] == ["1", "2", "3"]


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
        registry, gallery, undoes=upgrade.id, old_collection="photos_2", new_collection="photos_3", phase=Phase.PLANNED
    )
    during = opened(registry, [1])
    registry.close_intents(during)
    registry.activate("photos", registry.announce("photos", [OLD_AGAIN, NEW], TIMES))

    assert during.upgrade == upgrade.id
    assert opened(registry, [2]).upgrade == back.id


def test_a_write_outside_an_upgrade_leaves_nothing_behind(registry: Registry, gallery: GalleryRow) -> None:
    write = opened(registry, [1])
    during = registry.open_count(gallery.id)
    registry.close_intents(write)

    assert write.upgrade is None
    assert (during, registry.open_count(gallery.id)) == (1, 0)


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

    assert registry.open_count(gallery.id) == 0


# --- quarantine -------------------------------------------------------------------------------------------------------


def test_a_quarantined_record_counts_as_not_moved(registry: Registry, upgrade: UpgradeRow) -> None:
    registry.add_batches(upgrade.id, [([1, 2], None)], first=1)
    registry.quarantine(upgrade.id, {2: "cannot be read"})
    registry.quarantine(upgrade.id, {2: "x" * 5000})
    registry.retire(claimed(registry, upgrade), moved=1, again=[])
    progress = registry.progress(upgrade.id)

    assert [(row.record, len(row.reason)) for row in registry.quarantined(upgrade.id)] == [("2", 2000)]
    assert (progress.done, progress.total, progress.quarantined) == (1, 2, 1)


def test_a_released_record_is_tried_again_or_dropped(registry: Registry, upgrade: UpgradeRow) -> None:
    registry.quarantine(upgrade.id, {1: "cannot be read", 2: "cannot be read", 3: "cannot be read"})
    registry.release(upgrade.id, [1, 2], again=True)
    registry.release(upgrade.id, [3], again=False)

    assert registry.quarantined(upgrade.id) == []
    assert registry.listed_ids(upgrade.id) == {1, 2}


def test_clean_up_keeps_the_history_only(registry: Registry, upgrade: UpgradeRow) -> None:
    registry.add_batches(upgrade.id, [([1], None)], first=1)
    registry.close_intents(opened(registry, [1]))
    registry.quarantine(upgrade.id, {1: "cannot be read"})
    registry.forget_work(upgrade.id)

    assert registry.batches(upgrade.id) == []
    assert registry.written(upgrade.id) == []
    assert registry.quarantined(upgrade.id) == []
    assert len(registry.history(upgrade.id)) == 1


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
