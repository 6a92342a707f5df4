"""Conductors wait for clients, for workers and for one another, and say so."""

from __future__ import annotations

import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import text as statement

from rmvdb import errors
from rmvdb.app import daemon
from rmvdb.app.window import Window
from rmvdb.learning.method import Method
from rmvdb.planning.question import Question
from rmvdb.registry.codec import unpack_ids
from rmvdb.registry.tables import UpgradeRow
from rmvdb.registry.upgrade_plan import EpochName
from rmvdb.serving.client import Client
from rmvdb.types import Phase, Record
from rmvdb.upgrade import change_epoch
from rmvdb.upgrade import complete as completing
from rmvdb.upgrade.context import UpgradeContext
from rmvdb.upgrade.run import Conductor
from rmvdb.upgrade.status import status
from tests.support.inprocess import TIMES, Gallery, make, vector
from tests.support.waiting import wait_until


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

    assert Counter(id for batch in gallery.registry.batches(row.id) for id in unpack_ids(batch.ids)) == dict.fromkeys(
        range(1, 41), 1
    )
    assert gallery.registry.progress(row.id).done == 10


@pytest.mark.parametrize("step", ["deploy", "switch", "roll back"])
def test_a_conductor_that_is_suspended_before_it_serves_sends_no_client_back(
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
    """A late client does not repeat a verification of hours."""
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


def test_a_command_for_a_cut_over_waits_for_the_process_that_conducts_it(
    gallery: Gallery, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_forced_cut_over_counts_for_the_process_that_conducts_it(gallery: Gallery, monkeypatch: pytest.MonkeyPatch) -> None:
    gallery.worker().run(gallery.task, gallery.backfill)
    worker, command, said = gallery.conductor(), gallery.conductor(), list[str]()
    command.say, complete, epoch = said.append, worker.complete, gallery.registry.plan("texts").epoch

    def completed(*args: Any) -> None:
        """Complete. Then add a client that cannot load the next plan."""
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
        gallery.registry.resume(gallery.upgrade.id)

    conductor.say = say
    gallery.registry.pause(gallery.upgrade.id)
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


def test_a_conductor_that_waited_for_the_leadership_continues_from_the_upgrades_new_state(tmp_path: Path) -> None:
    gallery = make(tmp_path, deployed=False)
    for _ in range(2):
        assert gallery.conductor().advance(gallery.upgrade, gallery.worker()).phase == Phase.CUT_OVER
        assert [leg.collection for leg in gallery.registry.plan("texts").legs] == ["texts_v2"]
    gallery.registry.close()


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


def test_a_record_that_is_released_at_the_last_look_is_moved_before_the_cut_over(
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


def test_who_begins_the_same_upgrade_a_moment_later_is_told_to_run_the_command_again(tmp_path: Path) -> None:
    """Not to roll back: that would undo what a colleague has just begun."""
    gallery = make(tmp_path, deployed=False)
    question = Question(gallery="texts", from_version="v1", to_version="v2", method=Method.NAIVE, order="random")
    with pytest.raises(
        errors.UpgradeRunning, match=r"has just begun the upgrade .* to v2 \(planned\); run the same command again"
    ):
        gallery.conductor().resolve(question)
    gallery.registry.close()


def test_an_upgrade_goes_on_though_applications_wrote_other_items_than_the_source_has(gallery: Gallery) -> None:
    """rmvdb itself did not make the vectors of these records: they show nothing about the model."""
    conductor, row = gallery.conductor(), gallery.upgrade
    with gallery.client() as client:
        client.upsert([{"id": id, "item": f"another {id}", "n": 1} for id in range(1, 9)])
    assert conductor.advance(gallery.registry.upgrade(row.id), gallery.worker()).phase == Phase.CUT_OVER


def test_what_an_interrupted_clean_up_left_is_forgotten_by_the_next_upgrade(
    gallery: Gallery, monkeypatch: pytest.MonkeyPatch
) -> None:
    conductor, first = gallery.conductor(), gallery.upgrade.id
    conductor.advance(gallery.upgrade, gallery.worker())
    with monkeypatch.context() as patch:
        patch.setattr("rmvdb.upgrade.clean_up.forget_ended", lambda _: None)
        conductor.clean_up(gallery.registry.upgrade(first))
    assert gallery.registry.batches(first)
    question = Question(gallery="texts", from_version="v2", to_version="v3", method=Method.NAIVE, order="random")
    question = conductor.resolve(question)
    conductor.begin(question, conductor.plan(question), gallery.worker())
    assert not gallery.registry.batches(first)
