"""A worker that stays, at several galleries."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from rmvdb import errors
from rmvdb.backfill.throttle import Limits
from rmvdb.learning.method import Method
from rmvdb.planning.question import Question
from rmvdb.registry.tables import UpgradeRow
from rmvdb.registry.upgrade_plan import EpochName, UpgradePlan
from rmvdb.types import BatchState, IdType, Index, Leg, Metric, Phase, Record, Schema
from rmvdb.upgrade.status import status
from tests.support.at_work import at_work
from tests.support.faults import copied
from tests.support.inprocess import DIMS, Gallery, make, vector
from tests.support.waiting import wait_until


@pytest.fixture
def gallery(tmp_path: Path) -> Iterator[Gallery]:
    """Eight texts of an upgrade that is planned."""
    made = make(tmp_path, records=8, deployed=False)
    yield made
    made.registry.close()


@pytest.mark.parametrize(("asked", "done"), [({"until": 0.5}, 20), ({"cutover": False}, 40)])
def test_an_upgrade_is_worked_on_once_and_goes_on_when_more_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any], done: int
) -> None:
    """Not once a second for as long as the upgrade rests."""
    gallery = make(tmp_path, records=40, deployed=False)
    registry, upgrade, leaders = gallery.registry, gallery.upgrade.id, list[str]()
    lead = registry.lead
    monkeypatch.setattr(registry, "lead", lambda *args, **options: leaders.append(args[1]) or lead(*args, **options))
    registry.set_upgrade(upgrade, plan=replace(gallery.upgrade.plan, **asked))
    with at_work(gallery):
        wait_until(lambda: registry.progress(upgrade).done == done and registry.progress(upgrade).begun == 0)
        time.sleep(2.0)  # it may be at the end of its last look
        before = len(leaders)
        time.sleep(3.0)
        assert len(leaders) == before
    with at_work(gallery):  # another one goes on with it once: its times may be longer
        wait_until(lambda: len(leaders) > before)
        time.sleep(2.0)
        assert len(leaders) == before + 1
        registry.set_upgrade(upgrade, plan=gallery.upgrade.plan)
        wait_until(lambda: registry.upgrade(upgrade).phase == Phase.CUT_OVER)
    registry.close()


def another(gallery: Gallery, name: str, *, records: int = 20) -> UpgradeRow:
    """Return the planned upgrade of another gallery beside it."""
    shapes = {
        each: Schema(collection=f"{name}_{each}", dim=DIMS[each], metric=Metric.COSINE, id_type=IdType.INT64)
        for each in ("v1", "v2")
    }
    for shape in shapes.values():
        gallery.store.create(shape, Index(type="FLAT"))
    ids = list(range(1, records + 1))
    gallery.source.of |= {id: f"t{id}" for id in ids}
    gallery.store.upsert(f"{name}_v1", [Record(id=id, vector=vector("v1", f"t{id}"), fields={"n": 0}) for id in ids])
    registry = gallery.registry
    row = registry.add_gallery(
        name=name, model="v1", schema=shapes["v1"], adopted=False, source="tests", search={}, times=gallery.times
    )
    registry.add_collection(row.id, model="v2", schema=shapes["v2"], search={})
    legs = [Leg(collection=f"{name}_{each}", model=each, metric=Metric.COSINE, embedder=each) for each in ("v2", "v1")]
    question = Question(gallery=name, from_version="v1", to_version="v2", method=Method.NAIVE, order="random")
    epochs = {EpochName.SERVING: tuple(legs), EpochName.FINAL: tuple(legs[:1]), EpochName.BEFORE: tuple(legs[1:])}
    upgrade = registry.add_upgrade(
        gallery_id=row.id, from_version="v1", to_version="v2", old_collections=[f"{name}_v1"], new_collection=f"{name}_v2",
        phase=Phase.PLANNED, method="naive", order="random",
        plan=UpgradePlan(epochs=epochs, question=asdict(question)),
    )  # fmt: skip
    registry.add_batches(upgrade.id, [(ids[at : at + 5], None) for at in range(0, records, 5)], first=1)
    registry.set_upgrade(upgrade.id, listed=True)
    return upgrade


def phase(gallery: Gallery, upgrade: UpgradeRow) -> str:
    return gallery.registry.upgrade(upgrade.id).phase


def test_a_paused_gallery_keeps_no_worker_from_the_others(gallery: Gallery) -> None:
    other = another(gallery, "other")
    gallery.registry.pause(gallery.upgrade.id)
    with at_work(gallery):
        wait_until(lambda: phase(gallery, other) == Phase.CUT_OVER)
        assert phase(gallery, gallery.upgrade) == Phase.PLANNED  # to deploy it is a change of epoch, too
        assert not gallery.registry.progress(gallery.upgrade.id).done
        gallery.registry.resume(gallery.upgrade.id)
        wait_until(lambda: phase(gallery, gallery.upgrade) == Phase.CUT_OVER)


def test_a_gallery_that_was_removed_keeps_no_worker_from_the_others(gallery: Gallery) -> None:
    with at_work(gallery, galleries=("gone", "texts")) as said:
        wait_until(lambda: phase(gallery, gallery.upgrade) == Phase.CUT_OVER)
    assert said.count("No gallery is called 'gone'; there are: texts") == 1


def test_batches_in_hand_are_finished_in_a_pause_before_a_worker_turns_to_another_gallery(gallery: Gallery) -> None:
    other = another(gallery, "other", records=5)
    gallery.conductor().deploy(gallery.upgrade)
    gallery.registry.discard_list(gallery.upgrade.id)
    gallery.registry.add_batches(gallery.upgrade.id, [([id, id + 1], None) for id in range(1, 9, 2)], first=1)
    gallery.loaded_models.embedder("v2").seconds = 3.0  # type: ignore[attr-defined]
    with at_work(gallery, lease=40.0):
        wait_until(lambda: bool(gallery.registry.progress(gallery.upgrade.id).begun))
        gallery.registry.pause(gallery.upgrade.id)
        wait_until(lambda: phase(gallery, other) == Phase.CUT_OVER)
        counts = gallery.registry.counts(gallery.upgrade.id)
        assert counts.keys() == {BatchState.RETIRED, BatchState.PENDING}
        gallery.registry.resume(gallery.upgrade.id)
        wait_until(lambda: phase(gallery, gallery.upgrade) == Phase.CUT_OVER)


def test_a_worker_that_starts_in_a_pause_finishes_what_is_in_hand_and_then_rests(
    gallery: Gallery, monkeypatch: pytest.MonkeyPatch
) -> None:
    gallery.conductor().deploy(gallery.upgrade)
    gallery.registry.discard_list(gallery.upgrade.id)
    gallery.registry.add_batches(gallery.upgrade.id, [([id, id + 1], None) for id in range(1, 9, 2)], first=1)
    copied(gallery)
    gallery.registry.pause(gallery.upgrade.id)
    leads, real = list[str](), gallery.registry.lead

    def lead(upgrade: int, worker: str, seconds: float) -> Any:
        leads.append(worker)
        return real(upgrade, worker, seconds)

    monkeypatch.setattr(gallery.registry, "lead", lead)
    with at_work(gallery):
        resting = {BatchState.RETIRED, BatchState.PENDING}
        wait_until(lambda: gallery.registry.counts(gallery.upgrade.id).keys() <= resting)
        time.sleep(2.5)
    assert leads == []


def test_status_tells_all_along_which_gallery_a_worker_is_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rmvdb.app.daemon.LOOK", 0.2)
    gallery = make(tmp_path, records=400, batch=5)
    other = another(gallery, "other")
    real = gallery.registry.renew

    def renew(worker: str, upgrade: int, *args: Any, **options: Any) -> Any:
        time.sleep(3.0 if upgrade == other.id else 0.0)  # a look that is slow, while work begins
        return real(worker, upgrade, *args, **options)

    monkeypatch.setattr(gallery.registry, "renew", renew)

    def workers(name: str) -> int:
        return len(status(gallery.registry, gallery.registry.gallery(name)).workers or [])

    with at_work(gallery, limits=Limits(rate=10.0), lease=40.0):
        wait_until(lambda: gallery.registry.progress(gallery.upgrade.id).done > 0)
        seen = [(workers("texts"), workers("other"), time.sleep(0.02)) for _ in range(60)]
        assert gallery.registry.progress(gallery.upgrade.id).t < 1.0
    assert {(texts, other) for texts, other, _ in seen} == {(1, 0)}
    gallery.registry.close()


def test_a_worker_with_a_long_lease_is_heard_of_as_often_as_any(gallery: Gallery, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rmvdb.backfill.worker.BEAT", 0.1)
    gallery.conductor().deploy(gallery.upgrade)
    gallery.loaded_models.embedder("v2").seconds = 3.0  # type: ignore[attr-defined]
    real, beats = gallery.registry.renew, list[str]()

    def renew(*args: Any, **options: Any) -> Any:
        beats.append(threading.current_thread().name)
        return real(*args, **options)

    monkeypatch.setattr(gallery.registry, "renew", renew)
    gallery.worker(lease=1200.0).run(gallery.task, gallery.backfill)
    assert beats.count("rmvdb-heartbeat") > 3


def test_late_records_in_a_pause_keep_no_worker(gallery: Gallery) -> None:
    conductor, worker = gallery.conductor(), gallery.worker()
    row = gallery.upgrade
    conductor.deploy(row)
    worker.run(gallery.task, gallery.backfill)
    gallery.registry.set_upgrade(row.id, listed=True)
    gallery.registry.pause(row.id)
    gallery.store.upsert("texts_v1", [Record(id=99, vector=vector("v1", "t99"), fields={"n": 0})])
    worker.patient = False
    with pytest.raises(errors.Stopped):
        conductor.complete(gallery.registry.upgrade(row.id), worker)
