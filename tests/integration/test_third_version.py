"""A third version while v1 → v2 is unfinished: three collections, the protocols over them, and the way back, in one process."""

from __future__ import annotations

import copy
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rmvdb import errors
from rmvdb.backfill.task import Task
from rmvdb.errors import WrongPhase
from rmvdb.learning.method import Method
from rmvdb.planning.question import Question
from rmvdb.protocols import Source
from rmvdb.registry.codec import pack_ids, unpack_ids
from rmvdb.registry.tables import BatchRow, UpgradeRow
from rmvdb.storage.artifacts import Artifacts
from rmvdb.types import BatchState, Id, Item, Phase, Record
from rmvdb.upgrade import change_epoch, verify
from rmvdb.upgrade.context import UpgradeContext
from rmvdb.upgrade.report import VerifyReport
from tests.integration.test_rebuild import lose, rebuilding
from tests.support.inprocess import Crash, Gallery, die_and_drive_again, drive, make, vector
from tests.support.waiting import run_out

V1, V2 = "texts_v1", "texts_v2"


def go_half_way(made: Gallery) -> None:
    """Forty texts to the middle of v1 → v2: 1 to 20 are moved, and some were written since."""
    made.worker().run(made.task, made.backfill, until=0.5)
    with made.client() as client:
        # In v2 alone; in both; new.
        write(made, client, 5, 25, 50)
        client.delete([6, 30])
        del made.source.of[6], made.source.of[30]


@pytest.fixture
def gallery(tmp_path: Path) -> Iterator[Gallery]:
    """A gallery half way."""
    made = make(tmp_path)
    go_half_way(made)
    yield made
    made.registry.close()


def write(gallery: Gallery, client: object, *ids: int) -> None:
    for id in ids:
        gallery.source.of[id] = f"newer {id}"
        client.upsert([{"id": id, "item": gallery.source.of[id], "n": 1}])  # type: ignore[attr-defined]


def listed(gallery: Gallery, state: BatchState | None = None) -> list[list[Id]]:
    return [unpack_ids(row.ids) for row in gallery.registry.batches(gallery.upgrade.id, state=state)]


@contextmanager
def searching(gallery: Gallery) -> Iterator[list[str]]:
    """An application that asks for every record again and again; what was wrong with its answers."""
    wrong: list[str] = []
    stop = threading.Event()
    always = set(gallery.source.of)

    def ask() -> None:
        with gallery.client() as client:
            while not stop.is_set():
                found = [hit.id for hit in client.search("anything", limit=100)]
                got = [record.id for record in client.get(sorted(always))]
                wrong.extend(f"twice: {id}" for id, times in Counter(found).items() if times > 1)
                wrong.extend(f"missed: {id} among {client.plan.legs}" for id in always - set(found))
                wrong.extend(f"not got: {id}" for id in always - set(got))

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield wrong
    finally:
        stop.set()
        thread.join()


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


def test_each_record_is_listed_once_those_of_the_oldest_collection_first(gallery: Gallery) -> None:
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


def test_whoever_takes_a_removal_over_leaves_out_the_older_copy_of_a_record(gallery: Gallery) -> None:
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
    before = gallery.records(V1, V2)  # as it is in v2 where it is in both
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
def test_a_worker_that_dies_before_any_write_leaves_a_state_that_a_rerun_mends(
    deaths: dict[int, Future[None]], number: int
) -> None:
    deaths[number].result(timeout=200)


@pytest.mark.parametrize("call", ["upsert", "delete"])
def test_what_is_written_while_its_batch_is_copied_or_waits_wins(gallery: Gallery, call: str) -> None:
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


def test_a_plan_measures_on_nothing_that_was_trained_on_before(tmp_path: Path) -> None:
    gallery = make(tmp_path, records=300, batch=50)
    gallery.worker().run(gallery.task, gallery.backfill, until=0.5)  # 1 to 150
    before = set(range(51, 201))
    trained_on = Artifacts(tmp_path / "artifacts").put(pack_ids(before), suffix="ids")
    gallery.registry.set_upgrade(gallery.upgrade.id, plan=replace(gallery.upgrade.plan, trained_on=trained_on))
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


# --- the place of another upgrade -------------------------------------------------------------------------------------


def copied(gallery: Gallery) -> BatchRow:
    """A batch of v1 → v2 that is copied, by a worker that is gone."""
    batch = gallery.registry.claim(gallery.upgrade.id, "gone", lease=60, grace=60, copy=True)
    assert batch is not None
    gallery.backfill.copy(gallery.task, batch, lambda: None)
    return batch


def in_hand(gallery: Gallery, upgrade: int) -> set[str]:
    return {state.value for state in gallery.registry.counts(upgrade)} - {BatchState.PENDING, BatchState.RETIRED}


def test_what_is_in_hand_ends_before_another_upgrade_takes_the_place(gallery: Gallery) -> None:
    first = gallery.upgrade.id
    ids = unpack_ids(copied(gallery).ids)
    # Another program's changes are honoured up to the last comparison, which comes all the same.
    gallery.store.delete(V1, [ids[0]])
    gallery.store.upsert(V1, [Record(id=ids[1], vector=vector("v1", "changed"), fields={"n": 7})])
    gallery.source.of[ids[1]] = "changed"
    del gallery.source.of[ids[0]]
    gallery.supersede()
    assert in_hand(gallery, first) == set()
    assert len(gallery.registry.batches(first, state=BatchState.PENDING)) == 1
    held = gallery.records(V2)
    assert ids[0] not in held
    assert held[ids[1]].fields == {"n": 7}
    assert not gallery.records(V1).keys() & set(ids)
    drive(gallery)
    gallery.expect_moved()


def test_nothing_takes_the_place_of_an_upgrade_of_which_a_batch_is_in_hand_again(gallery: Gallery) -> None:
    """Somebody called `rmvdb resume` between the last look and the change, or a claim was on its way."""
    first, real, taken = gallery.upgrade, gallery.registry.supersede, list[Id]()

    def supersede(*args: Any, **options: Any) -> UpgradeRow:
        if not taken:
            gallery.registry.set_upgrade(first.id, paused=False)
            taken.extend(unpack_ids(copied(gallery).ids))
        return real(*args, **options)

    gallery.registry.supersede = supersede  # type: ignore[method-assign]
    with pytest.raises(WrongPhase, match=f"Batch .* of upgrade {first.id} is in hand again; run the same command again"):
        gallery.supersede()
    gallery.supersede()
    assert not gallery.records(V1).keys() & set(taken)
    drive(gallery)
    gallery.expect_moved()


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


def test_what_a_dead_worker_was_writing_is_finished_first(gallery: Gallery) -> None:
    first = gallery.upgrade.id
    batch = gallery.registry.claim(first, "dead", lease=60.0, grace=60, copy=True)
    assert batch is not None

    def die(call: str, collection: str) -> None:
        raise Crash

    gallery.store.before = die
    with pytest.raises(Crash):
        gallery.backfill.copy(gallery.task, batch, lambda: None)
    gallery.store.before = lambda call, collection: None
    run_out(gallery.registry)
    gallery.supersede()
    assert in_hand(gallery, first) == set()
    drive(gallery)
    gallery.expect_moved()


def test_an_older_copy_of_a_record_is_not_what_a_roll_back_leaves_in_place(gallery: Gallery) -> None:
    """25 was written into v2, and lies in v1 as it was; a worker dies once it has taken it out of v2 alone."""
    first = gallery.upgrade
    gallery.supersede()

    def die(call: str, collection: str) -> None:
        rows = gallery.registry.batches(gallery.upgrade.id, state=BatchState.REMOVING)
        if call == "delete" and collection == V1 and any(25 in unpack_ids(row.remove) for row in rows):
            raise Crash

    gallery.store.before = die
    with pytest.raises(Crash):
        drive(gallery, width=1)
    gallery.store.before = lambda *_: None
    assert (25 in gallery.records(V1), 25 in gallery.records(V2)) == (True, False)
    conductor = gallery.conductor()
    back = conductor.roll_back(gallery.registry.upgrade(gallery.upgrade.id))
    assert back is not None
    assert conductor.advance(back, gallery.worker()).phase == Phase.CUT_OVER
    conductor.clean_up(gallery.registry.upgrade(back.id))
    assert gallery.records(V2)[25].fields["n"] == 1
    assert conductor.advance(gallery.registry.upgrade(first.id), gallery.worker()).phase == Phase.CUT_OVER
    assert gallery.records(V2).keys() == gallery.source.of.keys()
    gallery.registry.close()


def test_other_workers_leave_the_upgrade_that_is_superseded(gallery: Gallery) -> None:
    slow = copy.copy(gallery.backfill)
    slow._source = SlowTexts(gallery.source)
    other = threading.Thread(target=gallery.worker(width=1).run, args=(gallery.task, slow))
    with searching(gallery) as wrong:
        other.start()
        time.sleep(0.1)
        gallery.supersede()
        other.join(timeout=20)
        assert not other.is_alive()
        drive(gallery)
    assert wrong == []
    gallery.expect_moved()


class SlowTexts:
    """A source that takes its time."""

    def __init__(self, source: Source) -> None:
        self.source = source

    def load(self, records: Sequence[Record]) -> Mapping[Id, Item]:
        """As that source does."""
        time.sleep(2)
        return self.source.load(records)


def test_whoever_conducts_the_superseded_upgrade_changes_nothing_more(gallery: Gallery, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is about to cut over when the other one takes its place."""
    conductor, first = gallery.conductor(), gallery.upgrade
    drive(gallery)
    gallery.registry.set_upgrade(first.id, listed=True)
    monkeypatch.setattr(verify, "expect_verified", lambda *_: gallery.supersede() or Agreed())  # type: ignore[func-returns-value]
    with pytest.raises(errors.WrongPhase, match=f"Upgrade {first.id} has ended; see what took its place: rmvdb history"):
        conductor.cut_over(gallery.registry.upgrade(first.id), gallery.worker())
    assert [leg.model for leg in gallery.registry.plan("texts").legs] == ["v3", "v2", "v1"]
    drive(gallery)
    gallery.expect_moved()


class Agreed:
    """A verification that found no difference."""

    ok, records = True, 0


def test_what_fails_because_another_took_the_place_says_so(gallery: Gallery, monkeypatch: pytest.MonkeyPatch) -> None:
    """It compares what the other one moves meanwhile, and finds differences."""
    conductor, first, real = gallery.conductor(), gallery.upgrade, verify.expect_verified

    def meanwhile(context: UpgradeContext, upgrade: UpgradeRow) -> VerifyReport:
        gallery.supersede()
        drive(gallery)
        return real(context, upgrade)

    monkeypatch.setattr(verify, "expect_verified", meanwhile)
    with pytest.raises(errors.WrongPhase, match=f"Upgrade {first.id} has ended; see what took its place: rmvdb history"):
        conductor.advance(first, gallery.worker())
    assert not gallery.registry.upgrade(first.id).reason
    gallery.expect_moved()


def test_an_upgrade_that_could_not_be_superseded_goes_on(gallery: Gallery) -> None:
    def supersede(*_: object, **__: object) -> None:
        raise errors.WrongPhase("served differently since")

    real, gallery.registry.supersede = gallery.registry.supersede, supersede  # type: ignore[method-assign, assignment]
    with pytest.raises(errors.WrongPhase):
        gallery.supersede()
    gallery.registry.supersede = real  # type: ignore[method-assign]
    assert not gallery.registry.upgrade(gallery.upgrade.id).paused
    drive(gallery)
    gallery.expect_moved()


def test_only_a_running_upgrade_can_be_superseded(gallery: Gallery) -> None:
    conductor = gallery.conductor()
    back = conductor.roll_back(gallery.upgrade)
    assert back is not None
    with pytest.raises(errors.UpgradeRunning, match=r"is in a roll back from v2 to v1 \(planned\); end it first"):
        gallery.supersede()
    conductor.deploy(back)
    with pytest.raises(errors.UpgradeRunning, match=r"is in a roll back from v2 to v1 \(serving both\); end it first"):
        gallery.supersede()


# --- the end, and the way back ----------------------------------------------------------------------------------------


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
    assert not list(gallery.archive.folder.rglob("*.parquet"))


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
    """v2 → v3 as far as `until`, some writes, and back; the roll back's task."""
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


def test_who_reads_one_collection_after_the_other_misses_nothing_that_goes_back(gallery: Gallery) -> None:
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
    row = gallery.conductor().advance(gallery.registry.upgrade(first.id), gallery.worker())
    assert row.phase == Phase.CUT_OVER
    assert gallery.registry.since_given_up(first.gallery_id)
    assert gallery.conductor().drop_given_up() == [third.new_collection]
