"""The end of a third version's upgrade, and the way back to the second."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rmvdb.backfill.task import Task
from rmvdb.learning.method import Method
from rmvdb.planning.question import Question
from rmvdb.registry.upgrade_plan import EpochName
from rmvdb.types import Blend, Id, Phase, Record
from rmvdb.upgrade import change_epoch
from tests.support.inprocess import Crash, Gallery, drive, vector
from tests.support.lost import lose, rebuilding
from tests.support.third_version import V1, V2, listed, searching, write


@pytest.mark.parametrize("case", ["deployed", "rolled back", "with a damaged file", "not deployed"])
def test_lost_under_a_third_version_the_upgrade_before_it_can_go_on_to_its_end(gallery: Gallery, case: str) -> None:
    first, task, deployed = gallery.upgrade, gallery.task, case != "not deployed"
    if deployed:
        gallery.supersede()
        gallery.worker().run(gallery.task, gallery.backfill, until=0.6)
        gone = next(id for id in gallery.records(gallery.task.new[0]) if id < 20)  # that was moved twice
        with gallery.client() as client:
            client.delete([gone])
        del gallery.source.of[gone]
        if case == "rolled back":
            assert gallery.conductor().roll_back(gallery.upgrade) is not None
        if case == "with a damaged file":
            file = next((gallery.folder / "archive").rglob(f"{gallery.upgrade.id}/{V2}/*.parquet"))
            file.write_bytes(b"damaged")
    else:
        copying = gallery.conductor()
        question = copying.resolve(Question(gallery="texts", from_version="v1", to_version="v3", method=Method.NAIVE))
        gallery.upgrade = copying.begin(question, copying.plan(question), gallery.worker())
    lose(gallery)
    rebuilding(gallery).run()
    if deployed:  # its list is made again, so that its order and its share hold if it goes on
        assert not gallery.registry.upgrade(first.id).listed
    with gallery.client() as client:
        write(gallery, client, 7, 27, 90)
    conductor, now = gallery.conductor(), gallery.registry.active_upgrade(first.gallery_id)
    assert now is not None
    back = now if case == "rolled back" else conductor.roll_back(now)
    assert (back is not None) == deployed
    if back is not None:
        conductor.clean_up(conductor.advance(back, gallery.worker()))
    gallery.upgrade, gallery.task = gallery.registry.upgrade(first.id), task
    row = gallery.conductor().advance(gallery.upgrade, gallery.worker())
    assert row.phase == Phase.CUT_OVER, row.reason
    gallery.expect_moved()


def test_at_the_end_one_collection_is_left(gallery: Gallery) -> None:
    gallery.supersede()
    with searching(gallery) as wrong:
        row = gallery.conductor().advance(gallery.upgrade, gallery.worker())
        assert row.phase == Phase.CUT_OVER
        gallery.conductor().clean_up(row)
    assert wrong == []
    assert [gallery.store.exists(each) for each in (V1, V2, *gallery.task.new)] == [False, False, True]
    held = gallery.records(*gallery.task.new)
    assert held.keys() == gallery.source.of.keys()
    assert gallery.registry.active_upgrade(row.gallery_id) is None
    assert [len(gallery.registry.batches(each.id)) for each in gallery.registry.upgrades()] == [0, 0]
    assert not list(gallery.archive.folder.path.rglob("*.parquet"))


def test_records_that_come_into_any_old_collection_late_are_moved(gallery: Gallery) -> None:
    gallery.supersede()
    drive(gallery)
    gallery.source.of |= {70: "t70", 71: "t71", 72: "t72"}
    gallery.store.upsert(V1, [Record(id=id, vector=vector("v1", f"t{id}"), fields={"n": 0}) for id in (70, 72)])
    gallery.store.upsert(V2, [Record(id=id, vector=vector("v2", f"t{id}"), fields={"n": 0}) for id in (71, 72)])
    gallery.conductor().complete(gallery.upgrade, gallery.worker())
    gallery.expect_moved()
    assert sorted(len(ids) for ids in listed(gallery)[-2:]) == [1, 2]


def roll_back(gallery: Gallery, *, until: float) -> Task:
    """Upgrade v2 → v3 as far as `until`, write, and roll back. Return the roll back's task."""
    gallery.worker().run(gallery.task, gallery.backfill, until=until)
    with gallery.client() as client:
        write(gallery, client, 24, 33, 8, 18, 80)
        client.delete([26, 39, 9, 19])
        for id in (26, 39, 9, 19):
            del gallery.source.of[id]
    conductor = gallery.conductor()
    with searching(gallery) as wrong:
        back = conductor.roll_back(gallery.upgrade)
        assert back is not None
        row = conductor.advance(back, gallery.worker())
        task = conductor.task(row)
        assert row.phase == Phase.CUT_OVER
        conductor.clean_up(row)
    assert wrong == []
    return task


@pytest.mark.parametrize("until", [0.0, 0.25, 0.7, 1.0])
def test_a_roll_back_puts_every_record_back_where_it_was(gallery: Gallery, until: float) -> None:
    first, before = gallery.upgrade, gallery.records(V2, V1)
    before |= gallery.records(V2)
    places = {each: set(gallery.records(each)) for each in (V1, V2)}
    gallery.supersede()
    roll_back(gallery, until=until)
    written, deleted = {24, 33, 8, 18, 80}, {26, 39, 9, 19}
    now = {each: gallery.records(each) for each in (V1, V2)}
    assert not gallery.store.exists(gallery.task.new[0])
    for collection, held in now.items():
        expected = places[collection] - written - deleted - ({25} if collection == V1 else set())
        assert expected <= held.keys()
        assert all(np.array_equal(held[id].vector, before[id].vector) for id in expected)  # type: ignore[arg-type]
        assert all(held[id].fields == before[id].fields for id in expected)
    assert not (now[V1].keys() | now[V2].keys()) & deleted
    assert written <= now[V2].keys()
    assert all(np.allclose(now[V2][id].vector, vector("v2", f"newer {id}"), atol=1e-6) for id in written)  # type: ignore[arg-type]
    assert [leg.model for leg in gallery.registry.plan("texts").legs] == ["v2", "v1"]
    active = gallery.registry.active_upgrade(first.gallery_id)
    assert active is not None
    assert (active.id, active.phase) == (first.id, Phase.SERVING_BOTH)


def test_a_reader_of_one_collection_after_the_other_misses_no_record_that_goes_back(gallery: Gallery) -> None:
    gallery.supersede()
    drive(gallery)
    conductor = gallery.conductor()
    back = conductor.roll_back(gallery.upgrade)
    assert back is not None
    conductor.deploy(back)
    conductor.list_work(gallery.registry.upgrade(back.id))
    task, get = conductor.task(gallery.registry.upgrade(back.id)), gallery.store.get

    def slowly(collection: str, ids: list[Id], **options: object) -> list[Record]:
        gallery.store.get = get  # type: ignore[method-assign]
        found = get(collection, ids, **options)  # type: ignore[arg-type]
        gallery.worker().run(task, gallery.backfill)  # everything goes back before the next collection is read
        return found

    with gallery.client() as client:
        gallery.store.get = slowly  # type: ignore[method-assign, assignment]
        assert {record.id for record in client.get(sorted(gallery.source.of))} == set(gallery.source.of)
        assert gallery.held()["new"] == {}


@pytest.mark.parametrize("until", [0.25, 0.7])
def test_after_a_roll_back_the_first_upgrade_goes_on_to_its_end(gallery: Gallery, until: float) -> None:
    first, task = gallery.upgrade, gallery.task
    gallery.supersede()
    roll_back(gallery, until=until)
    gallery.upgrade, gallery.task = gallery.registry.upgrade(first.id), task
    with searching(gallery) as wrong:
        row = gallery.conductor().advance(gallery.upgrade, gallery.worker())
    assert wrong == []
    assert row.phase == Phase.CUT_OVER, row.reason
    gallery.expect_moved()
    gallery.conductor().clean_up(row)
    assert [gallery.store.exists(each) for each in (V1, V2)] == [False, True]


def test_after_a_roll_back_the_first_upgrade_can_be_rolled_back_too(gallery: Gallery) -> None:
    first, conductor = gallery.upgrade, gallery.conductor()
    gallery.supersede()
    roll_back(gallery, until=0.7)
    back = conductor.roll_back(gallery.registry.upgrade(first.id))
    assert back is not None
    row = conductor.advance(back, gallery.worker())
    conductor.clean_up(row)
    gallery.task = Task(upgrade=row.id, gallery="texts", old=(), new=(V1,), version="v1", grace=0.0)
    gallery.expect_moved()
    assert gallery.registry.active_upgrade(first.gallery_id) is None


def test_a_third_version_that_was_never_deployed_is_given_up(gallery: Gallery) -> None:
    first = gallery.upgrade
    conductor = gallery.conductor()
    conductor.deploy = lambda *_, **__: None  # type: ignore[method-assign]
    gallery.conductor, real = (lambda: conductor), gallery.conductor  # type: ignore[method-assign]
    gallery.supersede()
    gallery.conductor = real  # type: ignore[method-assign]
    with gallery.client() as client:
        write(gallery, client, 27)
    assert real().roll_back(gallery.upgrade) is None
    active = gallery.registry.active_upgrade(first.gallery_id)
    assert active is not None
    assert (active.id, active.phase, active.paused) == (first.id, Phase.SERVING_BOTH, False)
    gallery.upgrade, gallery.task = active, real().task(active)
    drive(gallery)
    gallery.expect_moved()


def test_a_fourth_version_supersedes_the_third(gallery: Gallery) -> None:
    """Nothing counts to three: v2 → v3 takes another place as v1 → v2 did, and comes back as it did."""
    gallery.supersede()
    third = gallery.upgrade
    gallery.worker().run(gallery.task, gallery.backfill, until=0.4)
    before = {each: set(gallery.records(each)) for each in (V1, V2, *gallery.task.new)}
    gallery.supersede(to="v4")
    assert len(gallery.task.old) == 3
    with searching(gallery) as wrong:
        gallery.worker().run(gallery.task, gallery.backfill, until=0.6)
        conductor = gallery.conductor()
        back = conductor.roll_back(gallery.upgrade)
        assert back is not None
        conductor.clean_up(conductor.advance(back, gallery.worker()))
        assert {each: set(gallery.records(each)) for each in before} == before | {V1: before[V1] - {25}}
        gallery.supersede(to="v4")
        conductor = gallery.conductor()
        conductor.clean_up(conductor.advance(gallery.upgrade, gallery.worker()))
    assert wrong == []
    assert gallery.registry.upgrade(third.id).phase == Phase.ENDED
    assert [gallery.store.exists(each) for each in (*before, *gallery.task.new)] == [False, False, False, True]
    assert gallery.records(*gallery.task.new).keys() == gallery.source.of.keys()


def test_an_upgrade_that_goes_on_is_known_to_have_got_no_further_until_it_has(
    gallery: Gallery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`rmvdb rollback`, called again after a kill, tells by this what was given up from what goes on since."""
    first, conductor = gallery.upgrade, gallery.conductor()
    question = Question(gallery="texts", from_version="v1", to_version="v3", method=Method.NAIVE, order="random")
    question = conductor.resolve(question)
    third = conductor.begin(question, conductor.plan(question), gallery.worker())

    def die(*_: object, **__: object) -> None:
        raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(change_epoch, "serve", die)
        with pytest.raises(Crash):
            conductor.deploy(third)
    with monkeypatch.context() as patch:
        patch.setattr(gallery.store, "drop", die)
        with pytest.raises(Crash):
            conductor.roll_back(gallery.registry.upgrade(third.id))
    assert gallery.registry.active_upgrade(first.gallery_id).id == first.id  # type: ignore[union-attr]
    assert not gallery.registry.since_given_up(first.gallery_id)
    gallery.registry.begin_rebuild(first.gallery_id)  # the registry was lost at that moment, and is rebuilt
    gallery.registry.rebuilt(first.gallery_id)
    assert not gallery.registry.since_given_up(first.gallery_id)
    row = gallery.conductor().advance(gallery.registry.upgrade(first.id), gallery.worker())
    assert row.phase == Phase.CUT_OVER
    assert gallery.registry.since_given_up(first.gallery_id)
    assert gallery.conductor().drop_given_up() == [third.new_collection]


def test_a_way_back_to_a_plan_whose_blend_needs_a_model_that_is_gone_leaves_the_blend_out(
    gallery: Gallery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else no client could serve that plan, and the roll back would never end."""
    gallery.supersede()
    plan = gallery.upgrade.plan
    first, *older = plan.legs(EpochName.BEFORE)
    blended = [replace(leg, blend=Blend(embedder="v1", weight=0.5)) for leg in older]
    gallery.registry.set_upgrade(gallery.upgrade.id, plan=plan.with_epoch(EpochName.BEFORE, (first, *blended)))
    conductor = gallery.conductor()
    monkeypatch.setattr(conductor, "can_load", lambda version: version != "v1")
    back = conductor.roll_back(gallery.registry.upgrade(gallery.upgrade.id))
    assert back is not None
    assert [leg.blend for leg in back.plan.legs(EpochName.FINAL)] == [None, None]
