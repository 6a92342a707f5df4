"""The batch protocol and the write protocol against each other, step by step, in one process."""

from __future__ import annotations

import copy
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from sqlalchemy import text as statement

from rmvdb import errors
from rmvdb.app import daemon
from rmvdb.app.window import Window
from rmvdb.catalog import galleries
from rmvdb.learning.method import Method
from rmvdb.planning.question import Question
from rmvdb.registry.mark import mark_of
from rmvdb.registry.tables import UpgradeRow
from rmvdb.registry.upgrade_plan import EpochName
from rmvdb.serving.client import Client
from rmvdb.serving.loaded_models import Chain, LoadedModels
from rmvdb.timing import uptime
from rmvdb.types import BatchState, Field, Id, IdType, Index, Item, Metric, Phase, Record, Schema, Vectors
from rmvdb.upgrade import change_epoch
from rmvdb.upgrade import complete as completing
from rmvdb.upgrade.context import UpgradeContext
from rmvdb.upgrade.run import Conductor
from rmvdb.upgrade.status import status
from tests.support.inprocess import DIMS, TIMES, Crash, Gallery, TextEmbedder, die_and_drive_again, drive, make, vector
from tests.support.waiting import run_out, wait_until


@pytest.fixture
def gallery(tmp_path: Path) -> Iterator[Gallery]:
    """Forty texts, both collections served, four batches listed."""
    made = make(tmp_path)
    yield made
    made.registry.close()


def test_every_record_is_moved_and_the_old_collection_is_empty(gallery: Gallery) -> None:
    drive(gallery)
    gallery.expect_moved()
    assert {record.fields["n"] for record in gallery.held()["new"].values()} == {0}


@pytest.mark.parametrize("number", range(1, 13))
def test_a_worker_that_dies_before_any_write_leaves_a_state_that_a_rerun_mends(gallery: Gallery, number: int) -> None:
    die_and_drive_again(gallery, number)


def test_a_rerun_after_a_crash_in_mid_removal_takes_nothing_out_of_the_new_collection(gallery: Gallery) -> None:
    removed = []

    def before(call: str, collection: str) -> None:
        # The removal reaches the engine, and then the worker dies before it can say so.
        if call == "delete" and collection in gallery.task.old and not removed:
            removed.append(True)
            gallery.store.before = lambda call, collection: None
            row = gallery.registry.batches(gallery.upgrade.id, state=BatchState.REMOVING)[0]
            gallery.store.delete(collection, _ids(row.remove))
            raise Crash

    gallery.store.before = before
    with pytest.raises(Crash):
        drive(gallery)
    drive(gallery)
    gallery.expect_moved()


def test_a_write_between_read_and_copy_is_not_overwritten(gallery: Gallery) -> None:
    with gallery.client() as client:

        def before(call: str, collection: str) -> None:
            if collection in gallery.task.new and 3 in in_state(gallery, BatchState.WRITING):  # the client must wait
                gallery.store.before = lambda call, collection: None
                writer.start()
                assert waited.wait(0.3) is False

        waited = threading.Event()
        writer = threading.Thread(target=lambda: (write(gallery, client, 3, "newer"), waited.set()))
        gallery.store.before = before
        gallery.worker(width=1, lease=30.0).run(gallery.task, gallery.backfill)
        writer.join()
        drive(gallery)
        late = [record.id for page in gallery.store.scan(*gallery.task.old) for record in page]
        assert late in ([], [3])
        assert np.allclose(gallery.held()["new"][3].vector, vector("v2", "newer"), atol=1e-6)


def test_a_write_before_its_batch_is_claimed_wins(gallery: Gallery) -> None:
    with gallery.client() as client:
        write(gallery, client, 3, "newer")
        assert np.allclose(gallery.held()["old"][3].vector, vector("v1", "newer"), atol=1e-6)
        drive(gallery)
    gallery.expect_moved()


def test_a_write_while_its_batch_waits_for_the_grace_wins(gallery: Gallery) -> None:
    with gallery.client() as client:

        def before(call: str, collection: str) -> None:
            if collection in gallery.task.old and call == "delete":
                gallery.store.before = lambda call, collection: None
                write(gallery, client, 12, "newer")

        gallery.store.before = before
        drive(gallery)
        assert np.allclose(gallery.held()["new"][12].vector, vector("v2", "newer"), atol=1e-6)


def test_a_record_left_to_a_write_that_was_never_made_is_moved_all_the_same(gallery: Gallery) -> None:
    # Open while its batch is copied, past its deadline when the batch is compared: as if its writer had been killed.
    gallery.registry.open_intents("texts", "upsert", [3, 33], client="killed", lasting=gallery.task.grace / 2)
    drive(gallery)
    gallery.expect_moved()


def test_a_written_record_leaves_the_old_collection_one_grace_after_the_write(gallery: Gallery) -> None:
    written: list[float] = []
    gone: list[float] = []
    with gallery.client() as client:

        def looked(call: str, collection: str) -> None:
            # Its batch is being compared with what was read, one grace after it was copied.
            if collection in gallery.task.old and 12 in in_state(gallery, BatchState.COPIED):
                gallery.store.looked = lambda call, collection: None
                written.append(time.monotonic())
                write(gallery, client, 12, "newer")

        def after(call: str, collection: str) -> None:
            if call == "delete" and not gone and 12 not in gallery.records(*gallery.task.old):
                gone.append(time.monotonic())

        gallery.store.looked, gallery.store.after = looked, after
        drive(gallery, width=1)
    gallery.expect_moved()
    assert gone[0] - written[0] >= gallery.task.grace


def test_a_deleted_record_never_comes_back(gallery: Gallery) -> None:
    with gallery.client() as client:
        client.delete([1, 15])

        def before(call: str, collection: str) -> None:
            if collection in gallery.task.new and call == "upsert":
                gallery.store.before = lambda call, collection: None
                deleter.start()

        deleter = threading.Thread(target=lambda: client.delete([30]))
        gallery.store.before = before
        drive(gallery, width=1)
        deleter.join()
        drive(gallery)
    for id in (1, 15, 30):
        del gallery.source.of[id]
    gallery.expect_moved()


def test_what_another_program_changes_before_the_comparison_is_moved_again(gallery: Gallery) -> None:
    from rmvdb.types import Record

    def before(call: str, collection: str) -> None:
        if collection in gallery.task.new and call == "upsert":
            gallery.store.before = lambda call, collection: None
            gallery.source.of[2] = "changed"
            gallery.store.upsert(gallery.task.old[0], [Record(id=2, vector=vector("v1", "changed"), fields={"n": 7})])
            gallery.store.delete(gallery.task.old[0], [5])
            del gallery.source.of[5]

    gallery.store.before = before
    drive(gallery)
    gallery.expect_moved()
    assert gallery.held()["new"][2].fields == {"n": 7}


def test_a_worker_that_was_suspended_for_longer_than_its_lease_writes_nothing_more(
    gallery: Gallery, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, asked = gallery.worker(lease=60.0), uptime()
    worker._renew(gallery.upgrade.id)
    batch = worker._claim(gallery.task, copy=True, settled=None)
    assert batch is not None
    still_mine = worker._in_time(batch, asked)
    still_mine()
    run_out(gallery.registry)
    monkeypatch.setattr("rmvdb.backfill.worker.uptime", lambda: uptime() + 86400)
    worker._renew(gallery.upgrade.id)  # a heartbeat that comes too late
    with pytest.raises(errors.LeaseLost):
        still_mine()


def test_two_workers_embed_at_the_same_time(gallery: Gallery) -> None:
    """Where the embedder is the bottleneck two are twice as fast as one: tests/bench/recovery.py has by how much."""
    met = threading.Event()
    at_once = threading.Barrier(2, action=met.set)

    class Meeting(TextEmbedder):
        def embed(self, items: Sequence[Item]) -> Vectors:
            if not met.is_set():
                at_once.wait(timeout=60.0)
            return super().embed(items)

    def work() -> None:
        own = copy.copy(gallery.backfill)
        own._loaded_models = LoadedModels(
            load_embedder=Meeting,
            load_chain=lambda version: Chain(embedder=version, dim=DIMS[version]),
            load_artifact=lambda _: b"",
        )
        own._one_at_a_time = threading.Lock()  # of a process
        gallery.worker().run(gallery.task, own)

    workers = [threading.Thread(target=work) for _ in range(2)]
    for thread in workers:
        thread.start()
    for thread in workers:
        thread.join()
    assert met.is_set()
    gallery.expect_moved()


def test_two_workers_move_every_record_once(gallery: Gallery) -> None:
    threads = [threading.Thread(target=drive, args=(gallery,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gallery.expect_moved()
    assert gallery.registry.progress(gallery.upgrade.id).total == 40


def write(gallery: Gallery, client: object, id: int, text: str) -> None:
    gallery.source.of[id] = text
    client.upsert([{"id": id, "item": text, "n": 1}])  # type: ignore[attr-defined]


def _ids(packed: bytes | None) -> list[Id]:
    from rmvdb.registry.codec import unpack_ids

    return unpack_ids(packed)


def in_state(gallery: Gallery, state: BatchState) -> set[Id]:
    """The ids of the batches in that state."""
    return {id for row in gallery.registry.batches(gallery.upgrade.id, state=state) for id in _ids(row.ids)}


def test_a_share_is_not_overrun_by_what_a_lost_worker_had_begun(gallery: Gallery) -> None:
    taken = gallery.registry.claim(gallery.task.upgrade, "lost", lease=1.5, grace=gallery.task.grace, copy=True)
    assert taken is not None
    assert taken.count == 10
    now = gallery.worker().run(gallery.task, gallery.backfill, until=0.4)
    assert (now.done, now.begun, now.total) == (20, 0, 40)


@pytest.mark.parametrize(
    ("records", "most", "sizes"),
    [
        (45, 1000, [20, 20, 5]),  # fewer than would be worth a batch
        (1250, 1000, [25] * 50),
        (1275, 1000, [25] * 51),
        (1250, 8, [8] * 156 + [2]),
    ],
)
def test_a_gallery_is_moved_in_many_batches_however_small_it_is(
    tmp_path: Path, records: int, most: int, sizes: list[int]
) -> None:
    gallery = make(tmp_path, records=records)
    conductor = gallery.conductor()
    conductor.services = replace(conductor.services, batch=most)
    gallery.registry.set_upgrade(gallery.upgrade.id, listed=False)
    conductor.list_work(gallery.registry.upgrade(gallery.upgrade.id))
    rows = sorted(gallery.registry.batches(gallery.upgrade.id, limit=1000), key=lambda row: row.priority)
    gallery.registry.close()
    assert [row.count for row in rows] == sizes


@pytest.mark.parametrize("moment", ["before it begins", "while it reads"])
def test_a_conductor_that_is_suspended_while_it_lists_lists_no_record_twice(gallery: Gallery, moment: str) -> None:
    """For so long that another takes its place, makes the list, begins and hands the leadership back."""
    row, first = gallery.upgrade, gallery.conductor()
    gallery.registry.set_upgrade(row.id, listed=False, plan=replace(row.plan, until=0.25, cutover=False))
    unlisted = gallery.registry.upgrade(row.id)
    first.leader_token = gallery.registry.lead(row.id, "first", 0.001)
    time.sleep(0.01)

    def overtaken(*_: object) -> None:
        first.report = lambda *_: None
        gallery.conductor().advance(unlisted, gallery.worker())

    if moment == "before it begins":
        overtaken()
    else:
        first.report = overtaken
    with pytest.raises(errors.UpgradeRunning, match=f"took upgrade {row.id} over"):
        first.list_work(unlisted)

    assert Counter(id for batch in gallery.registry.batches(row.id) for id in _ids(batch.ids)) == dict.fromkeys(range(1, 41), 1)
    assert gallery.registry.progress(row.id).done == 10


@pytest.mark.parametrize("step", ["deploy", "switch", "roll back"])
def test_a_conductor_that_is_suspended_before_it_serves_leads_nobody_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """For so long that another takes its place and cuts over."""
    gallery = make(tmp_path, deployed=step != "deploy")
    row, first, real, ended = gallery.upgrade, gallery.conductor(), change_epoch.serve, list[UpgradeRow]()
    if step == "switch":
        new, old = row.plan.legs(EpochName.SERVING)
        later = row.plan.with_epoch(EpochName.LATER, [new, replace(old, write_with="v1")])
        gallery.registry.set_upgrade(row.id, plan=replace(later, switch=0.3))
    elif step == "roll back":
        back = gallery.conductor().roll_back(gallery.conductor().advance(row, gallery.worker()))
        assert back is not None
        row = back

    def serve(context: UpgradeContext, *args: Any, **options: Any) -> int:
        if context is first and not ended:
            assert first.leader_token is not None
            gallery.registry.keep_leading(row.id, first.leader_token, 0)
            ended.append(gallery.conductor().advance(row, gallery.worker()))
        return real(context, *args, **options)

    monkeypatch.setattr(change_epoch, "serve", serve)
    with pytest.raises(errors.UpgradeRunning, match=f"took upgrade {row.id} over"):
        first.advance(row, gallery.worker())

    assert [each.phase for each in ended] == [Phase.CUT_OVER]
    assert [leg.collection for leg in gallery.registry.plan("texts").legs] == [row.new_collection]
    gallery.conductor().clean_up(ended[0])
    with gallery.client() as client:
        assert [hit.id for hit in client.search("t3", limit=1)] == [3]
    gallery.registry.close()


@pytest.mark.parametrize("moment", ["before it looks", "after it has looked"])
def test_no_alias_is_left_on_a_collection_that_is_dropped(gallery: Gallery, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    """A conductor is suspended where it moves aliases, for so long that another cuts over, and back."""
    stands_for, first, back = {"texts": "texts_v1"}, gallery.conductor(), list[UpgradeRow]()
    real, waiting = change_epoch.move_aliases, [moment]

    def overtaken() -> None:
        waiting.clear()
        assert first.leader_token is not None
        gallery.registry.keep_leading(gallery.upgrade.id, first.leader_token, 0)
        row = gallery.conductor().roll_back(gallery.conductor().advance(gallery.upgrade, gallery.worker()))
        assert row is not None
        back.append(row)
        gallery.conductor().advance(row, gallery.worker())

    def move_there(collection: str, target: str) -> list[str]:
        if waiting == ["after it has looked"]:
            overtaken()
        if stands_for["texts"] != collection:
            return []
        stands_for["texts"] = target
        return ["texts"]

    def move(context: UpgradeContext, upgrade: UpgradeRow) -> None:
        if waiting == ["before it looks"]:
            overtaken()
        real(context, upgrade)

    monkeypatch.setattr(gallery.store, "move_aliases", move_there)
    monkeypatch.setattr(change_epoch, "move_aliases", move)
    with pytest.raises(errors.WrongPhase, match="has ended"):
        first.advance(gallery.upgrade, gallery.worker())
    assert stands_for["texts"] == ("texts_v1" if moment == "before it looks" else "texts_v2")
    gallery.conductor().clean_up(gallery.registry.upgrade(back[0].id))
    assert stands_for["texts"] == "texts_v1"
    assert [gallery.store.exists(each) for each in ("texts_v1", "texts_v2")] == [True, False]


def test_a_client_that_cannot_serve_the_next_plan_keeps_no_worker_from_other_galleries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon, "PATIENCE", 0.5)
    gallery = make(tmp_path, deployed=False, times=TIMES | {"max_age": 60.0})
    gallery.registry.refresh("texts", client="web", ready=0, trouble="No module named v2", holds=1)
    said, worked = list[str](), list[str]()

    def conductor(name: str, **_: object) -> Conductor:
        worked.append(name)
        return gallery.conductor()

    settings = SimpleNamespace(backfill=SimpleNamespace(lease=1.6))
    app = SimpleNamespace(
        worker=gallery.worker, registry=gallery.registry, store=gallery.store, conductor=conductor, settings=settings
    )
    made = daemon.Scheduler(app, galleries=(), window=Window(None), say=said.append)  # type: ignore[arg-type]
    monkeypatch.setattr(made, "_upgrades", lambda: {"texts": gallery.upgrade.id, "others": gallery.upgrade.id})
    monkeypatch.setattr(made, "_once", lambda *_: said.append)  # it asks for the gallery's epoch, and there are no others
    made._stop.set()  # nothing is waited for between two looks
    made._step()
    assert worked == ["texts", "others"]
    assert said[0].startswith("Epoch 2 waits: client web cannot serve epoch 2 yet: No module named v2; end that process")
    assert status(gallery.registry, gallery.registry.gallery("texts")).stopped == said[0]
    gallery.registry.close()


def test_a_copy_is_put_off_for_a_client_that_cannot_load_the_model(tmp_path: Path) -> None:
    """Nothing is copied yet: another gallery has its turn, though one collection alone is searched."""
    gallery = make(tmp_path, deployed=False, times=TIMES | {"max_age": 60.0})
    gallery.registry.refresh("texts", client="web", ready=0, trouble="No module named v2", holds=1)
    new, old = gallery.upgrade.plan.legs(EpochName.SERVING)
    copying = [replace(new, searched=False), old]
    gallery.registry.set_upgrade(gallery.upgrade.id, plan=gallery.upgrade.plan.with_epoch(EpochName.COPYING, copying))
    conductor = gallery.conductor()
    conductor.patience = 0.3
    late = threading.Timer(20.0, conductor.stop.set)
    late.start()
    for _ in range(2):  # the second try goes on with the same epoch
        with pytest.raises(errors.NotServed, match="Epoch 2 waits: client web cannot serve epoch 2 yet: No module named v2"):
            change_epoch.serve(conductor, gallery.registry.upgrade(gallery.upgrade.id), EpochName.COPYING)
    gallery.registry.leave("web")
    assert change_epoch.serve(conductor, gallery.registry.upgrade(gallery.upgrade.id), EpochName.COPYING) == 2
    assert not gallery.registry.upgrade(gallery.upgrade.id).reason
    late.cancel()
    gallery.registry.close()


def test_a_cut_over_waits_for_its_clients_however_long_others_do(tmp_path: Path) -> None:
    """What was verified for hours is not verified again for a client that is late."""
    gallery = make(tmp_path, records=20, times=TIMES | {"max_age": 60.0})
    gallery.worker().run(gallery.task, gallery.backfill)
    epoch = gallery.registry.plan("texts").epoch
    gallery.registry.refresh("texts", client="web", ready=epoch, trouble="it is loading its models", holds=epoch)
    conductor, waited = gallery.conductor(), list[float]()
    conductor.patience = 0.0

    def wait(seconds: float) -> bool:
        waited.append(seconds)
        if len(waited) == 3:
            gallery.registry.leave("web")
        return False

    conductor.stop.wait = wait  # type: ignore[method-assign]
    conductor.advance(gallery.upgrade, gallery.worker())
    assert len(waited) >= 3
    assert gallery.registry.upgrade(gallery.upgrade.id).phase == Phase.CUT_OVER
    gallery.registry.close()


def test_who_asks_for_a_cut_over_waits_for_whoever_conducts_it(gallery: Gallery, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker sees what was asked for within a second, and begins."""
    gallery.worker().run(gallery.task, gallery.backfill)
    worker, begun, said = gallery.conductor(), threading.Event(), list[str]()
    complete = worker.complete

    def completed(*args: Any) -> None:
        begun.set()
        wait_until(lambda: bool(said))
        complete(*args)

    monkeypatch.setattr(worker, "complete", completed)
    with ThreadPoolExecutor(1) as pool:
        conducting = pool.submit(worker.advance, gallery.upgrade, gallery.worker())
        assert begun.wait(60)
        command = gallery.conductor()
        command.say = said.append
        command.finish(gallery.upgrade, gallery.worker())
        assert conducting.result().phase == Phase.CUT_OVER
    assert said[-1].startswith("cut over already")
    assert gallery.registry.upgrade(gallery.upgrade.id).reason == ""


def test_a_cut_over_that_is_forced_counts_for_whoever_conducts_it(gallery: Gallery, monkeypatch: pytest.MonkeyPatch) -> None:
    gallery.worker().run(gallery.task, gallery.backfill)
    worker, command, said = gallery.conductor(), gallery.conductor(), list[str]()
    command.say, complete, epoch = said.append, worker.complete, gallery.registry.plan("texts").epoch

    def completed(*args: Any) -> None:
        """A client that cannot load what comes next is there from now on."""
        complete(*args)
        with gallery.registry.engine.begin() as connection:
            connection.execute(statement("UPDATE serving_plans SET max_age = 300"))
        gallery.registry.refresh("texts", client="web", ready=epoch, trouble="No module named v2", holds=epoch)

    monkeypatch.setattr(worker, "complete", completed)
    with ThreadPoolExecutor(1) as pool:
        conducting = pool.submit(worker.advance, gallery.upgrade, gallery.worker())
        wait_until(lambda: gallery.registry.gallery("texts").next_epoch is not None)
        command.finish(gallery.upgrade, gallery.worker(), force=True)
        assert conducting.result().phase == Phase.CUT_OVER
    assert [words for words in said if "taking over if it is silent" in words] == said[:1]


def test_a_cut_over_that_cannot_be_is_refused_at_once_and_noted_nowhere(gallery: Gallery) -> None:
    """Though another process conducts the upgrade."""
    registry, upgrade = gallery.registry, gallery.upgrade.id
    registry.set_upgrade(upgrade, plan=replace(gallery.upgrade.plan, until=0.5, cutover=False))
    registry.lead(upgrade, "another", 60.0)
    with pytest.raises(errors.WrongPhase, match="asked to stop at 0 of 40 records; run rmvdb upgrade without --until"):
        gallery.conductor().finish(gallery.upgrade, gallery.worker())
    row = registry.upgrade(upgrade)
    assert (row.reason, row.plan.cutover) == ("", False)


def test_status_says_whom_an_upgrade_waits_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(change_epoch, "USUAL", 0.0)
    gallery, said = make(tmp_path, deployed=False, times=TIMES | {"max_age": 60.0}), list[str]()
    gallery.registry.refresh("texts", client="web", ready=0, trouble="No module named v2", holds=1)
    conductor = gallery.conductor()

    def wait(_: float) -> bool:
        said.append(status(gallery.registry, gallery.registry.gallery("texts")).stopped)
        gallery.registry.leave("web")
        return False

    conductor.stop.wait = wait  # type: ignore[method-assign]
    conductor.deploy(gallery.upgrade)
    assert ["No module named v2" in each for each in said] == [True]
    assert status(gallery.registry, gallery.registry.gallery("texts")).stopped == ""
    gallery.registry.close()


def test_a_cut_over_that_waits_for_the_end_of_a_pause_says_so(gallery: Gallery) -> None:
    said, conductor = list[str](), gallery.conductor()

    def say(words: str) -> None:
        said.append(words)
        gallery.registry.set_upgrade(gallery.upgrade.id, paused=False)

    conductor.say = say
    gallery.registry.set_upgrade(gallery.upgrade.id, paused=True)
    conductor.cut_over(gallery.registry.upgrade(gallery.upgrade.id), gallery.worker())
    assert said[0] == "40 of 40 records are left to move; paused, until rmvdb resume"


def test_longer_times_count_once_the_upgrade_goes_on_and_for_every_worker(gallery: Gallery) -> None:
    row = gallery.upgrade
    gallery.registry.set_upgrade(row.id, plan=replace(row.plan, until=0.0, cutover=False))
    gallery.times = TIMES | {"longest_search": 3.0}
    for _ in range(2):
        gallery.conductor().advance(row, gallery.worker())
        plan = gallery.registry.plan("texts")
        assert (plan.epoch, plan.longest_search, [leg.model for leg in plan.legs]) == (3, 3.0, ["v2", "v1"])
    gallery.times = TIMES
    gallery.conductor().advance(row, gallery.worker())
    assert gallery.registry.plan("texts").epoch == 3

    began = time.monotonic()
    gallery.worker().run(gallery.task, gallery.backfill, until=0.25)  # told of the grace as it was
    assert time.monotonic() - began > 3.0


def test_a_conductor_that_waited_for_the_baton_goes_on_from_where_the_upgrade_is_then(tmp_path: Path) -> None:
    gallery = make(tmp_path, deployed=False)
    for _ in range(2):
        assert gallery.conductor().advance(gallery.upgrade, gallery.worker()).phase == Phase.CUT_OVER
        assert [leg.collection for leg in gallery.registry.plan("texts").legs] == ["texts_v2"]
    gallery.registry.close()


def test_an_item_that_changes_just_before_its_record_is_written_is_no_difference(gallery: Gallery) -> None:
    gallery.worker().run(gallery.task, gallery.backfill)
    gallery.source.of[7] = "newer"
    found = gallery.verify()
    lies = f"record 7 embedded again lies {distance_of(7, 'newer'):.1e} from the stored vector"
    assert found.examples == [f"{lies}; if its item has changed, write it again"]
    with gallery.registry.engine.begin() as connection:  # clients of the plan before had longer times
        connection.execute(statement("UPDATE serving_plans SET grace_before = 60"))

    def write() -> None:
        time.sleep(0.1)  # less than the grace
        with gallery.client() as client:
            client.upsert([{"id": 7, "item": "newer"}])

    writer = threading.Thread(target=write)
    writer.start()
    try:
        assert gallery.verify().ok
    finally:
        writer.join()


def distance_of(id: int, text: str) -> float:
    return 1.0 - float(vector("v2", f"t{id}") @ vector("v2", text))


def test_two_projects_that_share_a_server_share_no_collection(tmp_path: Path) -> None:
    made = list[tuple[Gallery, list[str]]]()
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        gallery = make(tmp_path / name, records=2, deployed=False)
        assert gallery.conductor().roll_back(gallery.upgrade) is None
        gallery.store = made[0][0].store if made else gallery.store
        gallery.store.drop(mark_of("texts_v1"))  # only here have both a collection of that name
        row = galleries.add_gallery(
            gallery.registry, gallery.store, gallery.loaded_models, name="photos", model="v1", collection=None, id_type=None,
            fields=[], source=None, loaded_source=None, chosen_index=Index(type="FLAT"), times=TIMES,
        )  # fmt: skip
        question = Question(gallery="texts", from_version="v1", to_version="v2", method=Method.NAIVE, order="random")
        conductor = gallery.conductor()
        question = conductor.resolve(replace(question, instant_rollback=True))
        begun = conductor.begin(question, conductor.plan(question), gallery.worker())
        made.append((gallery, [gallery.registry.collections(row.id)[0].name, *begun.made]))
    (one, names), (other, others) = made
    assert len({*names, *others}) == 6

    with Client("photos", registry=one.registry, store=one.store, loaded_models=one.loaded_models) as client:
        client.upsert([{"id": 1, "item": "one's"}])
        galleries.remove_gallery(other.registry, other.store, other.registry.gallery("photos"), drop=True)
        assert [hit.id for hit in client.search("one's")] == [1]
    for gallery, _ in made:
        gallery.registry.close()


@pytest.mark.parametrize(("field", "what"), [("item", "item"), ("id", "key")])
def test_a_collection_that_no_client_could_write_is_not_adopted(gallery: Gallery, field: str, what: str) -> None:
    schema = Schema(
        collection="theirs", dim=DIMS["v1"], metric=Metric.COSINE, id_type=IdType.INT64, id_field="pk",
        fields=(Field(name=field, type="VARCHAR", params={"max_length": 9}),),
    )  # fmt: skip
    gallery.store.create(schema, Index(type="FLAT"))
    with pytest.raises(errors.CannotAdopt, match=f"has a field '{field}', by which name a record .* has its {what}"):
        galleries.add_gallery(
            gallery.registry, gallery.store, gallery.loaded_models, name="theirs", model="v1", collection="theirs", id_type=None,
            fields=[], source=None, loaded_source=None, chosen_index=Index(type="FLAT"), times=TIMES,
        )  # fmt: skip


def test_a_collections_name_fits_whatever_it_is_made_of(gallery: Gallery) -> None:
    name = galleries.collection_name("g" * 255, "v2+8fdcc5e6.β", "u7")
    assert re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,254}", name)


def test_fifty_threads_search_on_through_cut_over_and_clean_up(tmp_path: Path) -> None:
    """Five applications of ten threads; each answer is the whole gallery, and none fails."""
    gallery = make(tmp_path, times={"max_age": 1.0, "longest_search": 4.0, "staleness": 0.0})
    always, stop = set(gallery.source.of), threading.Event()
    wrong: list[str] = []
    answers: Counter[int] = Counter()

    def search(client: Client) -> None:
        while not stop.is_set():
            try:
                found = [hit.id for hit in client.search("anything", limit=100)]
            except errors.RmvdbError as exc:
                wrong.append(repr(exc))
                continue
            answers[client.plan.epoch] += 1
            time.sleep(0.1)  # the upgrade needs a share of the machine, too
            if len(found) != len(always) or set(found) != always:
                wrong.append(f"{len(found)} hits, missed {sorted(always - set(found))}")

    clients = [gallery.client() for _ in range(5)]
    threads = [threading.Thread(target=search, args=(client,)) for client in clients for _ in range(10)]
    for thread in threads:
        thread.start()
    try:
        row = gallery.conductor().advance(gallery.upgrade, gallery.worker(lease=12.0))
        assert row.phase == Phase.CUT_OVER
        gallery.conductor().clean_up(row)
        before = sum(answers.values())
        while sum(answers.values()) < before + 50:
            time.sleep(0.01)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        for client in clients:
            client.close()
    assert wrong == []
    assert len(answers) == 2  # both collections, then the new one
    assert not gallery.store.exists(gallery.task.old[0])
    gallery.registry.close()


def test_an_item_that_broke_after_it_was_embedded_is_not_compared(gallery: Gallery) -> None:
    drive(gallery)
    gallery.source.of[3] = "broken"
    report = gallery.verify()
    assert report.examples == []
    assert report.embedded_again == len(gallery.source.of) - 1


def test_a_gallery_whose_registration_was_not_answered_is_there(gallery: Gallery, monkeypatch: pytest.MonkeyPatch) -> None:
    real = gallery.registry.add_gallery

    def answered_late(**values: Any) -> None:
        real(**values)
        real(**values)  # as the registry repeats it

    monkeypatch.setattr(gallery.registry, "add_gallery", answered_late)
    row = galleries.add_gallery(
        gallery.registry, gallery.store, gallery.loaded_models, name="photos", model="v1", collection=None, id_type=None,
        fields=[], source=None, loaded_source=None, chosen_index=Index(type="FLAT"), times=TIMES,
    )  # fmt: skip
    assert gallery.store.exists(gallery.registry.collections(row.id)[0].name)


def test_a_collection_of_another_gallery_is_refused_as_such(gallery: Gallery) -> None:
    with pytest.raises(errors.AlreadyExists, match="Collection 'texts_v1' belongs to gallery 'texts' already"):
        galleries.add_gallery(
            gallery.registry, gallery.store, gallery.loaded_models, name="photos", model="v1", collection="texts_v1",
            id_type=None, fields=[], source=None, loaded_source=None, chosen_index=Index(type="FLAT"), times=TIMES,
        )  # fmt: skip


def test_what_is_given_back_at_the_last_look_is_moved_before_the_cut_over(
    gallery: Gallery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quarantined record that its application has written again, between the two looks."""
    looks = list[int]()

    def look(_: object, upgrade: UpgradeRow) -> None:
        looks.append(upgrade.id)
        if len(looks) == 2:
            gallery.source.of[99] = "t99"
            gallery.store.upsert("texts_v1", [Record(id=99, vector=vector("v1", "t99"), fields={"n": 0})])
            gallery.registry.add_late(upgrade.id, [99])

    monkeypatch.setattr(completing, "refuse_quarantined", look)
    row = gallery.conductor().advance(gallery.registry.upgrade(gallery.upgrade.id), gallery.worker())
    assert row.phase == Phase.CUT_OVER
    gallery.expect_moved()
