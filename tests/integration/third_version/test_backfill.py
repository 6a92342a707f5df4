"""A third version while v1 → v2 is unfinished: records of three collections are found, written and moved."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rmvdb.learning.method import Method
from rmvdb.learning.network import Network
from rmvdb.learning.transforms import Config, Transform
from rmvdb.planning.orders.table import Known, make_order
from rmvdb.planning.question import Question
from rmvdb.registry.codec import pack_ids, unpack_ids
from rmvdb.registry.upgrade_plan import EpochName
from rmvdb.storage.artifacts import Artifacts
from rmvdb.types import Id, Record
from rmvdb.upgrade import plan_step
from tests.support.inprocess import Crash, Gallery, die_and_drive_again, drive, make, vector
from tests.support.third_version import V1, V2, go_half_way, listed, searching, write


def test_before_it_begins_records_are_where_the_tests_below_need_them(gallery: Gallery) -> None:
    held = gallery.held()
    assert held["new"].keys() == {*range(1, 21), 25, 50} - {6}
    assert held["old"].keys() == set(range(21, 41)) - {30}


def test_every_record_comes_from_whichever_collection_shows_it_and_leaves_them_all(gallery: Gallery) -> None:
    with searching(gallery) as wrong:
        gallery.supersede()
        drive(gallery)
    gallery.expect_moved()
    assert wrong == []
    assert {id for id, record in gallery.held()["new"].items() if record.fields["n"] == 1} == {5, 25, 50}


def test_each_record_is_listed_once_and_the_oldest_collection_comes_first(gallery: Gallery) -> None:
    gallery.supersede()
    work = [set(ids) for ids in listed(gallery)]
    assert Counter(id for ids in work for id in ids) == Counter(list(gallery.source.of))
    assert set.union(*work[:2]) == set(range(21, 41)) - {25, 30}
    assert set.union(*work[2:]) == {*range(1, 21), 25, 50} - {6}


def test_a_record_in_two_collections_is_moved_as_clients_are_shown_it(gallery: Gallery) -> None:
    gallery.store.upsert(V1, [Record(id=3, vector=vector("v1", "t3"), fields={"n": 9})])
    gallery.supersede()
    drive(gallery)
    gallery.expect_moved()
    assert gallery.held()["new"][3].fields == {"n": 0}


def test_a_worker_that_takes_a_removal_over_leaves_out_the_older_copy_of_a_record(gallery: Gallery) -> None:
    """Its worker was killed when the newer copy had left, and the older one had not."""
    gallery.store.upsert(V1, [Record(id=3, vector=vector("v1", "t3"), fields={"n": 9})])
    gallery.supersede()
    batch = next(row for row in gallery.registry.batches(gallery.upgrade.id) if 3 in unpack_ids(row.ids))
    gone: list[str] = []

    def die(call: str, collection: str) -> None:
        ids = unpack_ids(gallery.registry.batches(gallery.upgrade.id, after=batch.id - 1, limit=1)[0].remove)
        if call == "delete" and collection == V1 and 3 in ids and not gone:
            gone.append(collection)
            raise Crash

    gallery.store.before = die
    with pytest.raises(Crash):
        drive(gallery, width=1)
    gallery.store.before = lambda call, collection: None
    assert 3 in gallery.records(V1)
    assert 3 not in gallery.records(V2)
    time.sleep(1.8)  # its lease
    drive(gallery)
    gallery.expect_moved()
    assert gallery.held()["new"][3].fields == {"n": 0}


def test_the_archive_knows_which_collection_each_record_was_in(gallery: Gallery) -> None:
    before = gallery.records(V1, V2)  # if a record is in both, as it is in v2
    gallery.supersede()
    drive(gallery)
    kept: dict[str, dict[Id, Record]] = {V1: {}, V2: {}}
    for row in gallery.registry.batches(gallery.upgrade.id):
        for collection, records in gallery.backfill._kept(row.archive).items():
            kept[collection] |= {record.id: record for record in records}
    assert kept[V1].keys() == set(range(21, 41)) - {25, 30}
    assert kept[V2].keys() == {*range(1, 21), 25, 50} - {6}
    assert all(np.array_equal(record.vector, before[id].vector) for id, record in (kept[V1] | kept[V2]).items())  # type: ignore[arg-type]


WRITES = range(1, 19)


@pytest.fixture(scope="module")
def deaths(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, Future[None]]]:
    """A worker's death before each of its writes, several at a time, since most of each is waiting."""
    with ThreadPoolExecutor(max_workers=4) as pool:
        yield {number: pool.submit(supersede_and_die, make(tmp_path_factory.mktemp("death")), number) for number in WRITES}


def supersede_and_die(gallery: Gallery, number: int) -> None:
    go_half_way(gallery)
    gallery.supersede()
    die_and_drive_again(gallery, number)
    gallery.registry.close()


@pytest.mark.parametrize("number", WRITES)
def test_a_worker_that_dies_before_any_write_leaves_a_state_that_a_rerun_completes(
    deaths: dict[int, Future[None]], number: int
) -> None:
    deaths[number].result(timeout=200)


@pytest.mark.parametrize("call", ["upsert", "delete"])
def test_a_write_while_its_batch_is_copied_or_waits_wins(gallery: Gallery, call: str) -> None:
    """A record of v1 alone, of v2 alone and of both; one of each is written and one deleted, at two moments of their batches."""
    gallery.supersede()
    with gallery.client() as client:

        def before(called: str, collection: str) -> None:
            if called == call and collection in (gallery.task.new if call == "upsert" else gallery.task.old):
                gallery.store.before = lambda call, collection: None
                thread.start()

        def meanwhile() -> None:
            write(gallery, client, 22, 4, 25)
            client.delete([23, 7])

        thread = threading.Thread(target=meanwhile)
        gallery.store.before = before
        drive(gallery)
        thread.join()
        del gallery.source.of[23], gallery.source.of[7]
        drive(gallery)
        gallery.conductor().complete(gallery.upgrade, gallery.worker())
        gallery.expect_moved()
        assert {gallery.held()["new"][id].fields["n"] for id in (22, 4, 25)} == {1}


def test_a_record_written_under_three_legs_shows_nothing_that_it_replaced(gallery: Gallery) -> None:
    gallery.supersede()
    with gallery.client() as client:
        write(gallery, client, 22, 4, 25, 60)
        for id, collections in ((22, {V1}), (4, {V2}), (25, {V1, V2}), (60, set[str]())):
            held = {each for each in (V1, V2, *gallery.task.new) if id in gallery.records(each)}
            assert held == collections | {*gallery.task.new}
            assert {gallery.records(each)[id].fields["n"] for each in held} == {1}
        assert [hit.id for hit in client.search("newer 25", limit=3)][:1] == [25]
    drive(gallery)
    gallery.expect_moved()


def serve_by_a_map(gallery: Gallery, trained_on: str) -> None:
    """Let a ψ, trained on these records, serve the old collection."""
    psi = Transform(Network(Config(d_in=8, d_out=6, hidden=4)))
    sha256 = Artifacts(gallery.folder / "artifacts").put(psi.to_bytes(), suffix="safetensors")
    new, old = gallery.registry.plan("texts").legs
    legs = (new, replace(old, embedder="v2", transforms=(sha256,)))
    epochs = {**gallery.upgrade.plan.epochs, EpochName.SERVING: legs}
    gallery.registry.set_upgrade(gallery.upgrade.id, plan=replace(gallery.upgrade.plan, trained_on=trained_on, epochs=epochs))
    epoch = gallery.registry.announce("texts", legs, gallery.times)
    while gallery.registry.activate("texts", epoch):
        time.sleep(0.05)


def test_a_plan_measures_on_nothing_that_was_trained_on_before(tmp_path: Path) -> None:
    gallery = make(tmp_path, records=300, batch=50)
    gallery.worker().run(gallery.task, gallery.backfill, until=0.5)  # 1 to 150
    before = set(range(51, 201))
    trained_on = Artifacts(tmp_path / "artifacts").put(pack_ids(before), suffix="ids")
    serve_by_a_map(gallery, trained_on)
    conductor = gallery.conductor()
    question = conductor.resolve(Question(gallery="texts", from_version="v2", to_version="v3", method=Method.RQT))
    plan = conductor.plan(question)
    assert plan.trained_on is not None
    assert plan.prediction is not None
    trained = set(unpack_ids(Artifacts(tmp_path / "artifacts").get(plan.trained_on)))
    assert before & set(range(1, 151)) <= trained <= set(range(1, 151))
    assert plan.prediction["trained"] == len(trained)
    assert plan.prediction["held_out"] + plan.prediction["evaluated"] == 150 - len(trained) + 60  # and as many of v1's 100
    gallery.registry.close()


def test_an_order_that_learns_nothing_from_a_collection_is_random_there(gallery: Gallery) -> None:
    """Its records may lack the label that newer ones have, and the upgrade is deployed by then."""
    question = Question(gallery="texts", from_version="v1", to_version="v3", labels="category", order="centroid")
    leg = gallery.registry.plan("texts").legs[-1]
    order = plan_step.planner(gallery.conductor()).order(question, leg, None, "centroid")
    assert type(order) is type(make_order("random", [], Known(metric=leg.metric)))
