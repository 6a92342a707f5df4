"""`--instant-rollback`: the original stays whole and current, and the way back is one epoch."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rmvdb import errors
from rmvdb.learning.method import Method
from rmvdb.planning.question import Question
from rmvdb.registry.codec import unpack_ids
from rmvdb.registry.tables import UpgradeRow
from rmvdb.types import Phase
from rmvdb.upgrade import verify
from tests.support.inprocess import Gallery, make
from tests.support.kept_original import (
    ORIGINAL,
    back,
    begin,
    busy,
    die_in_the_copy,
    expect_holds,
    expect_original,
    go_on,
    put,
    scheduled,
)
from tests.support.lost import lose, rebuilding


@pytest.mark.parametrize("until", [0.0, 0.5, 1.0])
def test_the_way_back_is_an_epoch_and_the_original_holds_every_write(gallery: Gallery, until: float) -> None:
    with busy(gallery) as wrong:
        row = go_on(gallery, begin(gallery, until=until))
        assert row.phase == (Phase.CUT_OVER if until == 1.0 else Phase.SERVING_BOTH)
        assert [leg.collection for leg in gallery.registry.plan("texts").mirrors] == [ORIGINAL]
        undone = back(gallery, row)
    assert wrong == []
    plan = gallery.registry.plan("texts")
    assert ([leg.collection for leg in plan.legs], plan.mirrors) == ([ORIGINAL], ())
    assert (undone.phase, undone.undoes) == (Phase.CUT_OVER, row.id)
    expect_original(gallery)
    gallery.conductor().clean_up(undone)
    assert [gallery.store.exists(each) for each in (ORIGINAL, row.new_collection, *row.old_collections)] == [True, False, False]
    with gallery.client() as client:
        put(gallery, client, 5, "at the end")
        assert client.count() == len(gallery.source.of)
    expect_original(gallery)


def test_cut_over_and_clean_up_leave_the_new_collection_alone(gallery: Gallery) -> None:
    with busy(gallery) as wrong:
        row = go_on(gallery, begin(gallery))
        gallery.conductor().clean_up(row)
    assert wrong == []
    assert gallery.store.exists(row.new_collection)
    assert not any(map(gallery.store.exists, row.leaving))
    expect_holds(gallery, row.new_collection, "v2")
    plan = gallery.registry.plan("texts")
    assert ([leg.collection for leg in plan.legs], plan.mirrors) == ([row.new_collection], ())
    assert gallery.registry.active_upgrade(gallery.registry.gallery("texts").id) is None


def test_records_that_an_engine_lost_when_it_went_back_are_found_and_put_back(gallery: Gallery) -> None:
    """In place its records are there, with the vectors that were there before; else they are nowhere but in the original."""
    begun = begin(gallery, until=0.2)
    deploying_only = gallery.registry.upgrade(go_on(gallery, begun).id)
    filled = deploying_only.new_collection
    before = gallery.records(filled)
    gallery.registry.set_upgrade(begun.id, plan=replace(deploying_only.plan, until=1.0))
    conductor = gallery.conductor()
    conductor.backfill(gallery.registry.upgrade(begun.id), gallery.worker(), until=1.0)
    gone = sorted(set(gallery.source.of) - {id for row in gallery.registry.batches(begun.id)[:2] for id in unpack_ids(row.ids)})
    gallery.store.delete(filled, gone)
    gallery.store.upsert(filled, [before[id] for id in gone if id in before], as_read=True)

    row = gallery.registry.upgrade(begun.id)
    report = verify.verify(conductor, row)
    assert report.problems >= (len(gone) if row.in_place else 1)
    lost = conductor.lost(row)
    assert sorted(id for ids in lost.archived.values() for id in ids) == gone
    conductor.repair(row, lost, gallery.worker())
    assert verify.verify(conductor, row).ok
    expect_holds(gallery, filled, "v2")


def test_in_the_middle_of_the_backfill_nothing_differs_and_a_repair_keeps_no_record_from_its_batch(gallery: Gallery) -> None:
    """In place the collection holds records that wait for their batch, still lifted."""
    begun = go_on(gallery, begin(gallery, until=0.3))
    conductor = gallery.conductor()
    assert verify.verify(conductor, begun).ok
    lost = conductor.lost(begun)
    assert lost.unexplained.unknown == []
    conductor.repair(begun, lost, gallery.worker())
    row = go_on(gallery, _further(gallery, begun))
    assert row.phase == Phase.CUT_OVER
    expect_holds(gallery, row.new_collection, "v2")


def _further(gallery: Gallery, row: UpgradeRow) -> UpgradeRow:
    now = gallery.registry.upgrade(row.id)
    gallery.registry.set_upgrade(row.id, plan=replace(now.plan, until=1.0, cutover=True))
    return gallery.registry.upgrade(row.id)


def test_while_it_backfills_the_original_is_not_touched(gallery: Gallery) -> None:
    before = gallery.records(ORIGINAL)
    calls: list[tuple[str, str]] = []
    gallery.store.after = lambda call, collection: calls.append((call, collection))
    row = go_on(gallery, begin(gallery))
    assert {collection for _, collection in calls} == {row.new_collection, *row.old_collections}
    after = gallery.records(ORIGINAL)
    assert after.keys() == before.keys()
    assert all(np.array_equal(after[id].vector, before[id].vector) for id in before)  # type: ignore[arg-type]
    assert row.in_place or gallery.records(*row.old_collections) == {}


@pytest.mark.parametrize("moment", ["copying", "half moved", "rolled back"])
def test_the_registry_may_be_lost_meanwhile(gallery: Gallery, moment: str) -> None:
    row = begin(gallery, until=0.5 if moment == "half moved" else 1.0)
    if moment == "copying":
        die_in_the_copy(gallery, row)
    else:
        go_on(gallery, row)
    with gallery.client() as client:
        put(gallery, client, 4, "before the loss")
        put(gallery, client, 90, "new before the loss")
        client.delete(6)
        gallery.source.of.pop(6)
    back_row = gallery.conductor().roll_back(gallery.registry.upgrade(row.id)) if moment == "rolled back" else None
    lose(gallery)
    rebuilding(gallery).run()
    with gallery.client() as client:
        put(gallery, client, 5, "after the loss")
        assert client.count() == len(gallery.source.of)
    if back_row is None:
        plan = gallery.registry.upgrade(row.id).plan
        gallery.registry.set_upgrade(row.id, plan=replace(plan, until=1.0, cutover=True))
        go_on(gallery, row)
        expect_holds(gallery, row.new_collection, "v2")
        back_row = gallery.conductor().roll_back(gallery.registry.upgrade(row.id))
    gallery.conductor().clean_up(go_on(gallery, back_row))
    expect_original(gallery)


def test_a_schedule_changes_what_is_searched_and_the_original_is_kept_all_the_while(tmp_path: Path) -> None:
    gallery = make(tmp_path, records=200, deployed=False)
    assert gallery.conductor().roll_back(gallery.upgrade) is None
    conductor = gallery.conductor()
    question = Question(
        gallery="texts", from_version="v1", to_version="v2", method=Method.RQT, order="random", instant_rollback=True
    )
    question = conductor.resolve(question)
    plan = scheduled(conductor.plan(question))
    with busy(gallery) as wrong:
        row = go_on(gallery, conductor.begin(question, plan, gallery.worker(), until=0.2, cutover=False))
        early = gallery.registry.plan("texts")
        gallery.registry.set_upgrade(row.id, plan=replace(row.plan, until=0.6))
        row = go_on(gallery, row)
        later = gallery.registry.plan("texts")
        back(gallery, row)
    assert wrong == []
    assert [(leg.embedder, len(leg.transforms)) for leg in early.legs] == [("v2", 0), ("v1", 0)]
    assert [(leg.embedder, len(leg.transforms)) for leg in later.legs] == [("v2", 0), ("v2", 1)]
    assert [leg.collection for plan in (early, later) for leg in plan.mirrors] == [ORIGINAL, ORIGINAL]
    expect_original(gallery)
    gallery.registry.close()


def test_nothing_takes_the_place_of_an_upgrade_that_keeps_the_original(gallery: Gallery) -> None:
    go_on(gallery, begin(gallery, until=0.5))
    with pytest.raises(errors.UpgradeRunning, match=r"is in an upgrade from v1 to v2 \(serving both\) that keeps the original"):
        begin(gallery, to="v3")


def test_it_keeps_one_collection_not_several(tmp_path: Path) -> None:
    made = make(tmp_path)
    question = Question(gallery="texts", from_version="v1", to_version="v3", method=Method.NAIVE, instant_rollback=True)
    with pytest.raises(errors.UsageError, match="lies in 2 collections, and --instant-rollback copies one"):
        made.conductor().resolve(question)
    several = made.conductor().resolve(replace(question, instant_rollback=False, method=None))
    assert several.old == ("texts_v2", ORIGINAL)
    with pytest.raises(errors.UsageError, match="lies in 2 collections, and --method fct copies one"):
        made.conductor().resolve(replace(question, instant_rollback=False, method=Method.FCT))
    with pytest.raises(errors.UsageError, match="lifts one collection, and the gallery lies in 2"):
        made.conductor().simulate(several, methods=[Method.FCT])
    made.registry.close()


def test_every_worker_stops_where_a_schedule_switches(tmp_path: Path) -> None:
    gallery = make(tmp_path, records=200, deployed=False)
    assert gallery.conductor().roll_back(gallery.upgrade) is None
    conductor = gallery.conductor()
    question = conductor.resolve(Question(gallery="texts", from_version="v1", to_version="v2", method=Method.RQT, order="random"))
    row = conductor.begin(question, scheduled(conductor.plan(question)), gallery.worker())
    gallery.loaded_models.embedder("v2").seconds = 0.1  # type: ignore[attr-defined]
    switched, over = list[float](), threading.Event()

    def say(words: str) -> None:
        if "the new model alone embeds" in words:
            switched.append(gallery.registry.progress(row.id).t)

    def work() -> None:
        """Work as the other workers of `rmvdb worker` do."""
        while not over.is_set():
            now = gallery.registry.upgrade(row.id)
            if now.phase == Phase.SERVING_BOTH and now.listed:
                gallery.conductor().backfill(now, gallery.worker(width=1))
            time.sleep(0.05)

    other = threading.Thread(target=work)
    other.start()
    conductor.say = say
    try:
        ended = conductor.advance(row, gallery.worker(width=1))
    finally:
        over.set()
        other.join()
    assert ended.phase == Phase.CUT_OVER
    assert len(switched) == 1
    assert 0.3 <= switched[0] < 0.6
    gallery.registry.close()
