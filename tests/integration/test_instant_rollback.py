"""`--instant-rollback` in one process: the original stays whole and current, a copy is emptied, the way back is one epoch.

The same with the method fct, whose copy is lifted into the new space.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rmvdb import errors
from rmvdb.backfill.throttle import Limits
from rmvdb.learning.method import Method
from rmvdb.planning.plan import Plan, Stage
from rmvdb.planning.question import Question
from rmvdb.registry.codec import unpack_ids
from rmvdb.registry.tables import UpgradeRow
from rmvdb.serving.announced_writes import Writes
from rmvdb.serving.client import Client
from rmvdb.timing import WRITE_LASTS
from rmvdb.types import Id, Phase, Record
from rmvdb.upgrade import change_epoch, clean_up, deploy, keep_original, verify
from rmvdb.upgrade.copy_collection import PASSES
from rmvdb.upgrade.status import status
from tests.integration.test_rebuild import lose, rebuilding
from tests.support.inprocess import UNLIMITED, Crash, Gallery, TextEmbedder, make, vector
from tests.support.waiting import grow_old, wait_until

ORIGINAL = "texts_v1"
METHOD = Method.NAIVE


@pytest.fixture(params=[Method.NAIVE, Method.FCT])
def method(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Method:
    """How the copy is searched: as the original is, or lifted, by few records."""
    monkeypatch.setattr("rmvdb.planning.trial.LEAST_PAIRS", 20)
    monkeypatch.setattr("tests.integration.test_instant_rollback.METHOD", request.param)
    found: Method = request.param
    return found


@pytest.fixture
def gallery(tmp_path: Path, method: Method) -> Iterator[Gallery]:
    """Forty texts at v1 and no upgrade."""
    made = make(tmp_path, deployed=False)
    assert made.conductor().roll_back(made.upgrade) is None
    yield made
    made.registry.close()


def begin(gallery: Gallery, *, until: float = 1.0, to: str = "v2", method: Method | None = None) -> UpgradeRow:
    """As `rmvdb upgrade --instant-rollback` begins, or `rmvdb upgrade --method fct`."""
    conductor, method = gallery.conductor(), method or METHOD
    instantly = method is not Method.FCT
    question = Question(
        gallery="texts", from_version="v1", to_version=to, method=method, order="random", instant_rollback=instantly
    )
    question = conductor.resolve(question)
    assert question.instant_rollback
    plan = conductor.plan(question)
    if plan.prediction and method is Method.FCT:  # forty texts, that others change meanwhile, say nothing of the quality
        plan = replace(plan, prediction=plan.prediction | {"verdict": "ok"})
    return conductor.begin(question, plan, gallery.worker(), until=until, cutover=until == 1.0)


def scheduled(plan: Plan) -> Plan:
    """The plan on a schedule: until t = 0.3 each model embeds the queries for its own collection."""
    return replace(plan, switch=0.3, stages=(Stage(calibrations=(None, None)), *plan.stages))


def go_on(gallery: Gallery, row: UpgradeRow | None) -> UpgradeRow:
    assert row is not None
    return gallery.conductor().advance(gallery.registry.upgrade(row.id), gallery.worker())


def back(gallery: Gallery, row: UpgradeRow) -> UpgradeRow:
    return go_on(gallery, gallery.conductor().roll_back(gallery.registry.upgrade(row.id)))


def expect_original(gallery: Gallery) -> None:
    """The original holds every text as v1 embeds it, and nothing else."""
    expect_holds(gallery, ORIGINAL, "v1")


def expect_holds(gallery: Gallery, collection: str, version: str) -> None:
    held = gallery.records(collection)
    assert held.keys() == gallery.source.of.keys()
    for id, record in held.items():
        assert np.allclose(record.vector, vector(version, gallery.source.of[id]), atol=1e-6), id  # type: ignore[arg-type]


@contextmanager
def busy(gallery: Gallery) -> Iterator[list[str]]:
    """Applications that write the records from 1 on, delete from 30 on, insert from 100 on, and search; what they saw wrong."""
    wrong: list[str] = []
    stop = threading.Event()
    always = set(range(20, 30))

    def write() -> None:
        with gallery.client() as client:
            for turn in range(10_000):
                if stop.is_set():
                    return
                id, gone, fresh = 1 + turn % 19, 30 + turn, 100 + turn
                insist(put, gallery, client, id, f"{turn} of {id}")
                insist(put, gallery, client, fresh, f"fresh {fresh}")
                if gone < 38:
                    insist(client.delete, gone)
                    gallery.source.of.pop(gone)
                shown = {record.id for record in client.get([id, fresh, gone])}
                wrong.extend(f"written and not shown: {each}" for each in {id, fresh} - shown)
                wrong.extend(f"deleted and shown: {gone}" for _ in shown & {gone} if gone < 38)

    def search() -> None:
        with gallery.client() as client:
            while not stop.is_set():
                found = [hit.id for hit in client.search("anything", limit=10_000)]
                wrong.extend(f"twice: {id}" for id, times in Counter(found).items() if times > 1)
                wrong.extend(f"missed: {id} by {client.plan}" for id in always - set(found))

    threads = [threading.Thread(target=work) for work in (write, search)]
    for thread in threads:
        thread.start()
    try:
        yield wrong
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def insist(write: Callable[..., object], *args: object) -> None:
    """As applications do where a busy machine lets a write end too late."""
    for _ in range(1000):
        with suppress(errors.EngineError):
            write(*args)
            return
    write(*args)


def put(gallery: Gallery, client: Client, id: int, text: str) -> None:
    gallery.source.of[id] = text
    client.upsert([{"id": id, "item": text, "n": 1}])


def foreign(gallery: Gallery, id: int) -> None:
    """Another program inserts into the only collection that it knows."""
    gallery.source.of[id] = f"foreign {id}"
    gallery.store.upsert(ORIGINAL, [Record(id=id, vector=vector("v1", f"foreign {id}"), fields={"n": 2})])


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


def test_what_an_engine_that_has_gone_back_lost_is_found_and_put_back(gallery: Gallery) -> None:
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


def test_what_other_programs_insert_or_delete_in_the_original_is_done_before_the_cut_over(gallery: Gallery) -> None:
    row = go_on(gallery, begin(gallery, until=0.5))
    batches = gallery.registry.batches(row.id)
    [moved, *_], [waiting, *_] = (unpack_ids(batches[at].ids) for at in (0, -1))
    foreign(gallery, 60)
    for gone in (moved, waiting):
        gallery.store.delete(ORIGINAL, [gone])
        gallery.source.of.pop(gone)
    gallery.registry.set_upgrade(row.id, plan=replace(row.plan, until=1.0, cutover=True))
    row = go_on(gallery, row)
    assert row.phase == Phase.CUT_OVER
    expect_holds(gallery, row.new_collection, "v2")
    expect_original(gallery)


def test_what_comes_into_the_original_after_cut_over_is_not_dropped(gallery: Gallery) -> None:
    row = go_on(gallery, begin(gallery))
    foreign(gallery, 60)
    with pytest.raises(errors.WrongPhase, match=f"1 record came into '{ORIGINAL}' after cut-over"):
        gallery.conductor().clean_up(row)
    assert gallery.store.exists(ORIGINAL)
    assert go_on(gallery, gallery.conductor().roll_back(row)).phase == Phase.CUT_OVER
    expect_original(gallery)


def test_neither_an_insertion_under_way_nor_one_cut_off_keeps_from_cleaning_up(
    gallery: Gallery, monkeypatch: pytest.MonkeyPatch
) -> None:
    row, half, rest = go_on(gallery, begin(gallery)), threading.Event(), threading.Event()

    def after(call: str, collection: str) -> None:
        if collection == ORIGINAL and threading.current_thread() is not writer:
            raise KeyboardInterrupt
        if collection == ORIGINAL:
            half.set()
            rest.wait()

    def under_way(*_: object) -> None:
        writer.start()
        half.wait()
        threading.Timer(1.0, rest.set).start()

    def insert() -> None:
        with gallery.client() as client:
            put(gallery, client, 78, "under way")

    writer = threading.Thread(target=insert)
    gallery.store.after = after
    with gallery.client() as client, pytest.raises(KeyboardInterrupt):
        client.upsert([{"id": 77, "item": "cut off", "n": 9}])
    grow_old(gallery.registry, seconds=WRITE_LASTS - 5)
    monkeypatch.setattr(clean_up, "_wait_for_older_searches", under_way)
    gallery.conductor().clean_up(row)
    writer.join()
    expect_holds(gallery, row.new_collection, "v2")


def die_in_the_copy(gallery: Gallery, row: UpgradeRow) -> None:
    """The conductor ends after it has written some of the copy."""

    def die(call: str, collection: str) -> None:
        assert collection == row.old_collections[0]
        raise KeyboardInterrupt

    gallery.store.after = die
    with pytest.raises(KeyboardInterrupt):
        gallery.conductor().deploy(row)
    grow_old(gallery.registry, seconds=WRITE_LASTS + 1)
    gallery.store.after = lambda call, collection: None


def test_a_copy_that_was_interrupted_is_finished(gallery: Gallery) -> None:
    row = begin(gallery)
    die_in_the_copy(gallery, row)
    with gallery.client() as client:
        put(gallery, client, 15, "written into both")
    assert go_on(gallery, row).phase == Phase.CUT_OVER
    expect_holds(gallery, row.new_collection, "v2")
    expect_original(gallery)


def stop_after(gallery: Gallery, row: UpgradeRow, pages: int) -> bool:
    """Whether a conductor deploys before it has looked at more pages of the copy than these, where it ends."""
    left, conductor = iter(range(pages)), gallery.conductor()

    def report(*_: object) -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt

    conductor.report = report
    try:
        conductor.deploy(row)
    except KeyboardInterrupt:
        return False
    return True


@pytest.mark.usefixtures("_small_pages")
def test_of_a_copy_that_was_interrupted_only_what_is_left_is_read_and_then_all_is_compared(gallery: Gallery) -> None:
    row = begin(gallery)
    assert not stop_after(gallery, row, 1)
    doing = status(gallery.registry, gallery.registry.gallery("texts")).doing
    assert doing == f"planned; searches are as before; {ORIGINAL} is being copied, 20 of 40 records"
    real, conductor, read, shown = gallery.store.get, gallery.conductor(), set[Id](), list[tuple[int, set[Id]]]()

    def get(collection: str, ids: Sequence[Id], **options: Any) -> list[Record]:
        read.update(ids)
        return real(collection, ids, **options)

    gallery.store.get = get  # type: ignore[method-assign]
    conductor.report = lambda _, done, __: shown.append((done, set(read)))
    conductor.deploy(row)
    assert [done for done, _ in shown] == [30, 40, *[40] * 4, 10, 20, 30, 40, *[40] * 4]
    assert shown[1][1] == set(range(21, 41))


@pytest.mark.usefixtures("_small_pages")
def test_a_copy_that_is_interrupted_again_and_again_comes_to_its_end_with_what_changed_behind_it(gallery: Gallery) -> None:
    row = begin(gallery)
    assert not stop_after(gallery, row, 2)
    foreign(gallery, 3)
    foreign(gallery, 60)
    with gallery.client() as client:
        put(gallery, client, 15, "written into both")
    lives = iter(range(PASSES * 9))  # pages at the most: of five passes over 41 records twice, and some more
    while not stop_after(gallery, row, 1):
        assert next(lives, None) is not None, "the copy does not come to its end"
    copied, original = gallery.records(*row.old_collections), gallery.records(ORIGINAL)
    assert {id: each.fields for id, each in copied.items()} == {id: each.fields for id, each in original.items()}
    assert go_on(gallery, row).phase == Phase.CUT_OVER
    expect_holds(gallery, row.new_collection, "v2")
    expect_original(gallery)


@contextmanager
def copying(gallery: Gallery, row: UpgradeRow, *, limits: Limits = UNLIMITED) -> Iterator[list[float]]:
    """A worker with these limits deploys, ten records at a time; when pages of the copy were written."""
    pages: list[float] = []

    def count(call: str, collection: str) -> None:
        if (call, collection) == ("upsert", row.old_collections[0]):
            pages.append(time.monotonic())

    gallery.store.after = count
    with ThreadPoolExecutor(1) as pool:
        deployed = pool.submit(gallery.conductor().launch, row, gallery.worker(limits=limits))
        yield pages
        deployed.result(timeout=60)


@pytest.fixture
def _small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keep_original, "COPIED_AT_ONCE", 10)


@pytest.mark.usefixtures("_small_pages")
@pytest.mark.parametrize("whose", ["the worker's", "asked for"])
def test_the_copy_is_made_no_faster_than_the_rate(gallery: Gallery, whose: str) -> None:
    row = begin(gallery)
    if whose == "asked for":
        gallery.registry.set_upgrade(row.id, rate=20.0)
    began = time.monotonic()
    with copying(gallery, row, limits=UNLIMITED if whose == "asked for" else Limits(rate=20)) as pages:
        pass
    assert len(pages) == 4
    assert pages[-1] - began > 30 / 20
    assert gallery.registry.workers(row.id, within=60) == []


@pytest.mark.usefixtures("_small_pages")
@pytest.mark.parametrize("way", ["flag", "pause"])
def test_nothing_is_copied_while_the_flag_file_exists_or_it_is_paused(gallery: Gallery, tmp_path: Path, way: str) -> None:
    row, flag = begin(gallery), tmp_path / "hold"
    why = f"flag file {flag} exists" if way == "flag" else "paused; to continue, run rmvdb resume"
    flag.touch()
    if way == "pause":
        gallery.registry.set_upgrade(row.id, paused=True)
    with copying(gallery, row, limits=Limits(flag=flag if way == "flag" else None)) as pages:
        wait_until(lambda: status(gallery.registry, gallery.registry.gallery("texts")).held_back == why)
        time.sleep(1.0)
        held = list(pages)
        flag.unlink()
        gallery.registry.set_upgrade(row.id, paused=False)
    assert (held, len(pages)) == ([], 4)


def test_given_up_while_it_is_copied_nothing_is_left_of_it(gallery: Gallery) -> None:
    row, before = begin(gallery), gallery.registry.plan("texts").legs
    die_in_the_copy(gallery, row)
    with gallery.client() as client:
        assert len(client.plan.mirrors) == 1
        assert gallery.conductor().roll_back(gallery.registry.upgrade(row.id)) is None
        put(gallery, client, 1, "nothing to mirror")
    plan = gallery.registry.plan("texts")
    assert (plan.legs, plan.mirrors) == (before, ())
    assert not gallery.store.exists(row.old_collections[0])
    expect_original(gallery)


def test_two_may_give_it_up_at_once(gallery: Gallery, monkeypatch: pytest.MonkeyPatch) -> None:
    row = begin(gallery)
    die_in_the_copy(gallery, row)
    row, real = gallery.registry.upgrade(row.id), change_epoch.serve

    def serve(*args: Any, **options: Any) -> int:
        monkeypatch.setattr(change_epoch, "serve", real)
        assert gallery.conductor().roll_back(row) is None
        return real(*args, **options)

    monkeypatch.setattr(change_epoch, "serve", serve)
    assert gallery.conductor().roll_back(row) is None
    assert [each.phase for each in gallery.registry.history(row.id)].count(Phase.ENDED) == 1
    assert not gallery.store.exists(row.old_collections[0])
    expect_original(gallery)


def test_a_copy_that_was_given_up_for_a_moment_is_not_served(gallery: Gallery) -> None:
    """Whoever gives it up dies before that is written down, and what is written until then does not reach the copy."""
    row, conductor, other = begin(gallery), gallery.conductor(), gallery.conductor()
    real = other.registry.abandon

    def die(*_: object, **__: object) -> bool:
        raise KeyboardInterrupt

    def give_up(words: str) -> None:
        if "until every search would see it" in words:
            other.registry.abandon = die  # type: ignore[method-assign]
            with pytest.raises(KeyboardInterrupt):
                other.roll_back(gallery.registry.upgrade(row.id))
            other.registry.abandon = real  # type: ignore[method-assign]
            with gallery.client() as client:
                put(gallery, client, 3, "into the original alone")

    conductor.say = give_up
    with pytest.raises(errors.WrongPhase, match="is served differently since; run the same command again"):
        conductor.deploy(row)
    said: list[str] = []
    conductor.say = said.append
    conductor.deploy(row)
    assert [each for each in said if "from where it stood" in each] == []
    row = go_on(gallery, row)
    expect_holds(gallery, row.new_collection, "v2")
    expect_original(gallery)


def test_two_that_would_deploy_it_take_turns(gallery: Gallery) -> None:
    """`rmvdb upgrade --detach` beside a worker that sees the upgrade first."""
    row = begin(gallery)
    worker = threading.Thread(target=go_on, args=(gallery, row))
    worker.start()
    wait_until(lambda: gallery.registry.upgrade(row.id).conductor is not None)
    conductor = gallery.conductor()
    conductor.launch(row, gallery.worker())
    assert gallery.registry.upgrade(row.id).phase != Phase.PLANNED
    worker.join()
    assert gallery.registry.upgrade(row.id).phase == Phase.CUT_OVER
    copies = [note for note in gallery.registry.history(row.id) if note.phase == Phase.SERVING_BOTH]
    assert len(copies) == 2  # served, and the work list made
    expect_holds(gallery, row.new_collection, "v2")
    expect_original(gallery)


@pytest.mark.parametrize("served", [False, True])
def test_who_was_suspended_while_it_copied_stops(gallery: Gallery, served: bool) -> None:
    """Another has taken over, and may have begun to empty the copy."""
    row, first = begin(gallery, until=0.5), gallery.conductor()

    def taken_over(*_: object) -> None:
        first.report = lambda *_: None
        gallery.registry.keep_leading(row.id, leader_token, 0)
        if served:
            go_on(gallery, row)
        else:
            gallery.registry.lead(row.id, "second", 10.0)

    first.leader_token = leader_token = gallery.registry.lead(row.id, "first", 10.0)
    first.report = taken_over
    assert leader_token is not None
    with pytest.raises(errors.UpgradeRunning, match=f"took upgrade {row.id} over"):
        first.deploy(row)
    assert gallery.registry.upgrade(row.id).phase == (Phase.SERVING_BOTH if served else Phase.PLANNED)
    with pytest.raises(errors.UpgradeRunning):
        deploy._copy_original(first, row, force=False)


def test_who_was_suspended_while_it_wrote_a_page_does_not_say_how_far_the_copy_is(gallery: Gallery) -> None:
    row, first = begin(gallery), gallery.conductor()
    first.leader_token = leader_token = gallery.registry.lead(row.id, "first", 10.0)
    assert leader_token is not None

    def taken_over(*_: object) -> None:
        gallery.registry.keep_leading(row.id, leader_token, 0)
        gallery.registry.lead(row.id, "second", 10.0)

    gallery.store.after = taken_over
    with pytest.raises(errors.UpgradeRunning, match=f"took upgrade {row.id} over"):
        first.deploy(row)
    assert gallery.registry.upgrade(row.id).copying is None


def test_a_conductor_that_dies_once_the_new_collection_is_served_does_not_copy_again(gallery: Gallery) -> None:
    row, conductor = begin(gallery, until=0.0), gallery.conductor()
    real = conductor.registry.set_upgrade

    def die(*args: object, **values: object) -> None:
        if values.get("phase") == Phase.SERVING_BOTH:
            raise KeyboardInterrupt
        real(*args, **values)  # type: ignore[arg-type]

    conductor.registry.set_upgrade = die  # type: ignore[method-assign, assignment]
    with pytest.raises(KeyboardInterrupt):
        conductor.deploy(row)
    conductor.registry.set_upgrade = real  # type: ignore[method-assign]
    with gallery.client() as client:
        put(gallery, client, 3, "under the new plan")
    row = go_on(gallery, row)
    with gallery.client() as client:
        assert client.plan.legs[0].collection == row.new_collection
        assert [record.fields["n"] for record in client.get([3])] == [1]
    gallery.registry.set_upgrade(row.id, plan=replace(row.plan, until=1.0, cutover=True))
    go_on(gallery, row)
    expect_holds(gallery, row.new_collection, "v2")
    expect_original(gallery)


@pytest.mark.parametrize(
    ("kind", "id", "until"), [("upsert", 2, 0.0), ("delete", 2, 0.0), ("upsert", 2, 1.0), ("delete", 2, 1.0), ("upsert", 77, 1.0)]
)
def test_a_client_that_dies_between_the_mirror_and_the_rest_leaves_no_difference(
    gallery: Gallery, kind: str, id: int, until: float
) -> None:
    """Its write is made nowhere or everywhere, before the cut-over and after a roll back alike."""
    row = go_on(gallery, begin(gallery, until=0.5))

    def die(call: str, collection: str) -> None:
        if collection == ORIGINAL:
            raise KeyboardInterrupt

    gallery.store.after = die
    with gallery.client() as client, pytest.raises(KeyboardInterrupt):
        client.upsert([{"id": id, "item": "cut off", "n": 9}]) if kind == "upsert" else client.delete(id)
    grow_old(gallery.registry, seconds=WRITE_LASTS + 1)
    gallery.store.after = lambda call, collection: None
    with gallery.client() as client:
        assert [record.fields["n"] for record in client.get([id])] == ([0] if id == 2 else [])
    if until == 1.0:
        gallery.source.of = {each: text for each, text in gallery.source.of.items() if (each, kind) != (id, "delete")}
        if kind == "upsert":
            gallery.source.of[id] = "cut off"
        gallery.registry.set_upgrade(row.id, plan=replace(row.plan, until=1.0, cutover=True))
        row = go_on(gallery, row)
        assert row.phase == Phase.CUT_OVER
        assert gallery.records(row.new_collection).keys() == gallery.records(ORIGINAL).keys()
    back(gallery, row)
    with gallery.client() as client:
        assert [record.fields["n"] for record in client.get([id])] == ([9] if kind == "upsert" else [])


def test_clients_that_die_while_the_copy_is_made_leave_no_difference(gallery: Gallery) -> None:
    """They wrote the copy, which had been compared, and not the original: nowhere, before a roll back and after it."""
    row, conductor = begin(gallery), gallery.conductor()

    def die(call: str, collection: str) -> None:
        if collection == row.old_collections[0]:
            raise KeyboardInterrupt

    def cut_off(words: str) -> None:
        if "until every search would see it" in words:
            gallery.store.after = die
            with gallery.client() as client:
                for id in (2, 77):
                    with pytest.raises(KeyboardInterrupt):
                        client.upsert([{"id": id, "item": "cut off", "n": 9}])
                with pytest.raises(KeyboardInterrupt):
                    client.delete(3)
            grow_old(gallery.registry, seconds=WRITE_LASTS + 1)
            gallery.store.after = lambda call, collection: None

    conductor.say = cut_off
    conductor.deploy(row)
    assert gallery.records(*row.old_collections).keys() == gallery.source.of.keys()
    go_on(gallery, row)
    expect_holds(gallery, row.new_collection, "v2")
    expect_original(gallery)
    with gallery.client() as client:
        assert [(record.id, record.fields["n"]) for record in client.get([2, 3, 77])] == [(2, 0), (3, 0)]


def test_what_a_client_wrote_before_the_copy_was_finished_is_left_alone(gallery: Gallery) -> None:
    """Another had died at the same record while the copy was made, and so it is looked at again once the copy is served."""
    row, conductor = begin(gallery), gallery.conductor()
    real = conductor.registry.expired_writes

    def expired_writes(name: str) -> list[Id]:
        with gallery.client() as client:
            put(gallery, client, 2, "written since")
        return [2, *real(name)]

    conductor.registry.expired_writes = expired_writes  # type: ignore[method-assign]
    conductor.deploy(row)
    conductor.registry.expired_writes = real  # type: ignore[method-assign]
    go_on(gallery, row)
    expect_holds(gallery, row.new_collection, "v2")
    expect_original(gallery)


def test_what_a_client_deleted_stays_out_though_another_program_put_it_back(gallery: Gallery) -> None:
    row = go_on(gallery, begin(gallery, until=0.5))
    text = gallery.source.of.pop(2)
    with gallery.client() as client:
        client.delete(2)
    gallery.store.upsert(ORIGINAL, [Record(id=2, vector=vector("v1", text), fields={"n": 2})])
    gallery.registry.set_upgrade(row.id, plan=replace(row.plan, until=1.0, cutover=True))
    row = go_on(gallery, row)
    assert row.phase == Phase.CUT_OVER
    expect_holds(gallery, row.new_collection, "v2")
    with pytest.raises(errors.WrongPhase, match="came into"):
        gallery.conductor().clean_up(row)


def test_what_agrees_is_found_to_agree_range_by_range(gallery: Gallery, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by asking for every page of records in every collection: on a server each question waits for its turn."""
    row = go_on(gallery, begin(gallery, until=0.5))
    monkeypatch.setattr("rmvdb.upgrade.copy_collection.RANGE", 15)
    mirror, gets = keep_original.mirror(gallery.conductor(), row), list[str]()
    gallery.store.looked = lambda call, collection: gets.append(collection)
    assert mirror.agree(keep_original.beside(row)) == 0
    assert list(mirror.unknown(keep_original.beside(row))) == []
    assert gets == []
    gallery.store.delete(ORIGINAL, [3, 17, 40])  # one of each range
    gallery.store.upsert(ORIGINAL, [Record(id=id, vector=vector("v1", f"t{id}"), fields={"n": id}) for id in (-1, 90)])
    assert sorted(id for page in mirror.unknown(keep_original.beside(row)) for id in page) == [-1, 90]
    assert mirror.agree(keep_original.beside(row)) == 5
    assert mirror.agree(keep_original.beside(row)) == 0


def test_agreeing_takes_out_nothing_that_a_client_put_back_meanwhile(gallery: Gallery) -> None:
    row = go_on(gallery, begin(gallery, until=1.0))
    gallery.store.delete(ORIGINAL, [2, 3])
    gallery.source.of.pop(3)
    mirror, real, done = keep_original.mirror(gallery.conductor(), row), Writes.announced, threading.Event()

    def announced(self: Writes, kind: str, ids: list[int], **options: object) -> object:
        if kind == "delete" and not done.is_set():
            done.set()
            with gallery.client() as client:
                put(gallery, client, 2, "back again")
        return real(self, kind, ids, **options)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Writes, "announced", announced)
        assert mirror.agree(keep_original.beside(row)) == 1
    expect_holds(gallery, row.new_collection, "v2")
    assert gallery.conductor().verify(gallery.registry.upgrade(row.id)).ok


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


@pytest.mark.parametrize("there", [True, False])
def test_the_original_is_written_by_its_own_model_where_there_is_one_else_through_psi(tmp_path: Path, there: bool) -> None:
    gallery = make(tmp_path, records=200, deployed=False)
    assert gallery.conductor().roll_back(gallery.upgrade) is None
    gallery.loaded_models._load_embedder = TextEmbedder if there else without_v1
    before = gallery.registry.plan("texts").legs
    given_up = begin(gallery, method=Method.RQT)
    die_in_the_copy(gallery, given_up)
    assert gallery.conductor().roll_back(gallery.registry.upgrade(given_up.id)) is None
    assert gallery.registry.plan("texts").legs == before
    row = go_on(gallery, begin(gallery, until=0.5, method=Method.RQT))
    psi = gallery.registry.plan("texts").legs[-1].transforms
    assert len(psi) == 1
    with gallery.client() as client:
        put(gallery, client, 7, "written since")
    [written] = gallery.store.get(ORIGINAL, [7], vector=True)
    led = gallery.loaded_models.apply(psi, vector("v2", "written since")[None])[0]
    own = vector("v1", "written since")
    assert np.allclose(written.vector, own if there else led, atol=1e-6)  # type: ignore[arg-type]
    back(gallery, row)
    with gallery.client() as client:
        assert client.plan.embedders == (("v1",) if there else ("v2",))
        assert client.search("written since", limit=1)[0].id == 7
    gallery.registry.close()


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


def without_v1(version: str) -> TextEmbedder:
    """What loads the embedders of a process that has lost v1's."""
    if version == "v1":
        raise errors.ModelError("no v1 here")
    return TextEmbedder(version)


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


@pytest.mark.parametrize("written", ["by nobody", "by a client", "by a client, and moved"])
def test_what_another_program_deletes_and_inserts_again_is_found(gallery: Gallery, written: str) -> None:
    """Though a look at the end of the backfill came between, and took it out of the copy."""
    row = go_on(gallery, begin(gallery, until=0.9 if written != "by a client, and moved" else 1.0 - 1e-9))
    if written != "by nobody":
        with gallery.client() as client:
            put(gallery, client, 2, "written")
    gallery.store.delete(ORIGINAL, [2])
    keep_original.agree(gallery.conductor(), row)
    assert 2 not in gallery.records(*keep_original.beside(row))
    gallery.source.of[2] = "again"
    gallery.store.upsert(ORIGINAL, [Record(id=2, vector=vector("v1", "again"), fields={"n": 5})])
    gallery.registry.set_upgrade(row.id, plan=replace(row.plan, until=1.0, cutover=True))
    row = go_on(gallery, row)
    assert row.phase == Phase.CUT_OVER
    assert gallery.records(row.new_collection)[2].fields == {"n": 5}
    expect_holds(gallery, row.new_collection, "v2")
    gallery.conductor().clean_up(row)


@pytest.mark.parametrize("ending", ["fails", "is killed"])
def test_a_look_that_ends_while_it_takes_a_record_in_forgets_no_deletion(
    gallery: Gallery, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    row = go_on(gallery, begin(gallery, until=0.9))
    gallery.store.delete(ORIGINAL, [2])
    keep_original.agree(gallery.conductor(), row)
    gallery.store.upsert(ORIGINAL, [Record(id=2, vector=vector("v1", "t2"), fields={"n": 2})])

    def die(call: str, _: str) -> None:
        if call == "upsert":
            raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(gallery.store, "before", die)
        if ending == "is killed":
            patch.setattr(type(gallery.registry), "withdraw_intents", lambda *_: None)
        with pytest.raises(Crash):
            keep_original.agree(gallery.conductor(), row)
    gallery.store.delete(ORIGINAL, [2])
    gallery.source.of.pop(2)
    grow_old(gallery.registry, seconds=WRITE_LASTS + 1)  # what it had announced is past its deadline
    gallery.registry.set_upgrade(row.id, plan=replace(row.plan, until=1.0, cutover=True))
    row = go_on(gallery, row)
    assert row.phase == Phase.CUT_OVER
    expect_holds(gallery, row.new_collection, "v2")


def test_what_clients_write_after_an_instant_roll_back_is_no_difference(gallery: Gallery) -> None:
    """They write into the original, and what is compared is the copy."""
    row = go_on(gallery, begin(gallery, until=0.5))
    with gallery.client() as client:
        put(gallery, client, 3, "before")
    rolled = back(gallery, row)
    with gallery.client() as client:
        put(gallery, client, 3, "later")
        put(gallery, client, 91, "a new one")
    assert gallery.conductor().verify(gallery.registry.upgrade(rolled.id)).examples == []


def test_lost_after_the_cut_over_what_was_moved_or_written_is_no_difference(gallery: Gallery) -> None:
    row = go_on(gallery, begin(gallery))
    with gallery.client() as client:
        put(gallery, client, 3, "written")
        put(gallery, client, 91, "a new one")
    lose(gallery)
    rebuilding(gallery).run()
    report = gallery.conductor().verify(gallery.registry.upgrade(row.id))
    assert (report.records, report.examples) == (41, [])
    back(gallery, row)
    expect_original(gallery)


def test_a_record_that_was_taken_in_again_is_embedded_though_its_look_was_killed_before_it_forgot(
    gallery: Gallery, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = go_on(gallery, begin(gallery, until=0.9))
    gallery.store.delete(ORIGINAL, [2])
    keep_original.agree(gallery.conductor(), row)
    gallery.source.of[2] = "again"
    gallery.store.upsert(ORIGINAL, [Record(id=2, vector=vector("v1", "again"), fields={"n": 5})])

    def die(*_: object, **__: object) -> None:
        raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(gallery.registry, "forget_done", die)
        patch.setattr(type(gallery.registry), "withdraw_intents", lambda *_: None)
        with pytest.raises(Crash):
            keep_original.agree(gallery.conductor(), row)
    grow_old(gallery.registry, seconds=WRITE_LASTS + 1)  # what it had announced is past its deadline
    gallery.registry.set_upgrade(row.id, plan=replace(row.plan, until=1.0, cutover=True))
    row = go_on(gallery, row)
    assert row.phase == Phase.CUT_OVER
    expect_holds(gallery, row.new_collection, "v2")


def test_who_was_suspended_before_it_finished_the_copy_changes_nothing_of_what_is_moved(gallery: Gallery) -> None:
    row, first = begin(gallery), gallery.conductor()
    real = first.registry.expired_writes
    first.leader_token = leader_token = gallery.registry.lead(row.id, "first", 10.0)
    assert leader_token is not None

    def expired_writes(name: str) -> list[Id]:
        first.registry.expired_writes = real  # type: ignore[method-assign]
        gallery.registry.keep_leading(row.id, leader_token, 0)
        assert go_on(gallery, row).phase == Phase.CUT_OVER
        return [2, *real(name)]

    first.registry.expired_writes = expired_writes  # type: ignore[method-assign]
    with pytest.raises(errors.UpgradeRunning, match=f"took upgrade {row.id} over"):
        first.deploy(row)
    expect_holds(gallery, row.new_collection, "v2")


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
        """As the other workers of `rmvdb worker` do."""
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
