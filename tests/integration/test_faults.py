"""What a kill, a suspension, a late call or another program does between two steps of the protocol, one test each.

tests/model finds these by exhaustion; here the real code goes through them.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
from sqlalchemy import text

from rmvdb import errors
from rmvdb.backfill.batches import Backfill
from rmvdb.engines.faiss import FaissStore
from rmvdb.items.digest import item_digest
from rmvdb.items.field import FieldSource
from rmvdb.planning.sample import Sample, Sampler, vectors_of
from rmvdb.protocols import always
from rmvdb.registry.claims import Claim
from rmvdb.registry.codec import key, unpack_ids
from rmvdb.registry.tables import BatchRow
from rmvdb.serving.client import Client
from rmvdb.serving.current_plan import CurrentPlan
from rmvdb.serving.latency import Latency
from rmvdb.serving.loaded_models import Chain, LoadedModels
from rmvdb.storage.archive import ArchiveFile
from rmvdb.storage.embedding_cache import EmbeddingCache
from rmvdb.timing import uptime
from rmvdb.types import BatchState, Id, Leg, Metric, Phase, Record, ServingPlan
from rmvdb.upgrade import complete, work_list
from tests.support import inprocess
from tests.support.clocks import DatabaseClock
from tests.support.inprocess import DIMS, TIMES, Gallery, TextEmbedder, make, vector
from tests.support.waiting import run_out, wait_until


@pytest.fixture
def gallery(tmp_path: Path) -> Iterator[Gallery]:
    """Eight texts in one batch, both collections served."""
    made = make(tmp_path, records=8)
    yield made
    made.registry.close()


@pytest.fixture
def planned(tmp_path: Path) -> Iterator[Gallery]:
    """Eight texts in the old collection, which is served alone; its clients keep a plan for two seconds."""
    made = make(tmp_path, records=8, deployed=False, times=TIMES | {"max_age": 2.0})
    yield made
    made.registry.close()


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A write may last 6 s, and no call of it leaves after 5 s."""
    monkeypatch.setattr("rmvdb.serving.announced_writes.WRITE_LASTS", 6.0)


class Killed(BaseException):
    """The process ends here."""


def killed(*_: Any, **__: Any) -> NoReturn:
    raise Killed


@contextmanager
def dying(monkeypatch: pytest.MonkeyPatch, gallery: Gallery, method: str) -> Iterator[None]:
    """Whoever calls that method of the registry is killed before the call leaves."""
    with monkeypatch.context() as patched:
        patched.setattr(gallery.registry, method, killed)
        with pytest.raises(Killed):
            yield


def drive(gallery: Gallery, *, seconds: float = 20.0) -> None:
    """Work until every batch is retired; fails where that takes longer."""
    stop = threading.Event()
    timer = threading.Timer(seconds, stop.set)
    timer.start()
    gallery.worker().run(gallery.task, gallery.backfill, stop=stop)
    timer.cancel()
    assert gallery.registry.counts(gallery.upgrade.id).keys() == {BatchState.RETIRED}


def claimed(gallery: Gallery) -> BatchRow:
    batch = gallery.registry.claim(gallery.upgrade.id, "w", lease=60.0, grace=0.0, copy=True)
    assert batch is not None
    return batch


def copied(gallery: Gallery) -> None:
    gallery.backfill.copy(gallery.task, claimed(gallery), always)


def decided(gallery: Gallery) -> None:
    """The batch waits for an heir: its worker died after it had decided what leaves, and before anything left."""
    copied(gallery)
    batch = claimed(gallery)
    gallery.store.before = once("delete", gallery.task.old[0], killed)
    with pytest.raises(Killed):
        gallery.backfill.retire(gallery.task, batch, always)
    gallery.store.before = lambda *_: None
    run_out(gallery.registry)


def remove(gallery: Gallery, id: Id) -> None:
    """As another program does, straight from the old collection."""
    gallery.source.of.pop(id)
    gallery.store.delete(gallery.task.old[0], [id])


def once(call: str, collection: str, act: Callable[[], object]) -> Callable[[str, str], None]:
    """A hook that acts at the first such call."""
    waiting = [act]

    def hook(made: str, where: str) -> None:
        if (made, where) == (call, collection) and waiting:
            waiting.pop()()

    return hook


# --- writers ----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("short")
def test_a_write_suspended_past_its_deadline_is_not_reported_as_done(gallery: Gallery) -> None:
    def suspended() -> None:
        time.sleep(6.1)
        drive(gallery)  # copies over what was written, which counts as never made

    with gallery.client() as client:
        gallery.store.after = once("upsert", gallery.task.new[0], suspended)
        with pytest.raises(errors.EngineError, match=r"took longer than 6 s; repeat the write"):
            client.upsert([{"id": 3, "item": "newer", "n": 1}])
    gallery.expect_moved()


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("case", ["a new record", "a record in both", "a record that has moved"])
def test_a_client_killed_in_a_write_does_not_keep_an_upgrade_from_its_end(
    gallery: Gallery, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    copied(gallery)
    if case == "a record in both":
        gallery.store.looked = once("get", gallery.task.old[0], killed)
    elif case == "a record that has moved":
        drive(gallery)
    with gallery.client() as client, dying(monkeypatch, gallery, "close_intents"):
        if case == "a record that has moved":
            client.delete([3])
        else:
            client.upsert([{"id": 99 if case == "a new record" else 3, "item": "newer", "n": 1}])
    time.sleep(6.1)
    drive(gallery)
    assert gallery.verify().examples == []


def test_a_client_that_has_not_heard_of_an_epoch_sees_what_another_writes_under_it(planned: Gallery) -> None:
    with planned.client() as other:
        planned.conductor().deploy(planned.upgrade)
        with planned.client() as writer:
            writer.upsert([{"id": 99, "item": "t99", "n": 1}])
            assert [hit.id for hit in other.search("t99", limit=1, consistency="Strong")] == [99]


def test_a_search_is_as_strong_as_it_or_its_client_says(planned: Gallery, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    real = planned.store.search

    def search(*words: object, strong: bool, **options: object) -> object:
        asked.append(strong)
        return real(*words, strong=strong, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(planned.store, "search", search)
    parts = {"registry": planned.registry, "store": planned.store, "loaded_models": planned.loaded_models}
    with planned.client() as usual, Client("texts", consistency="Strong", **parts) as strong:
        for client in (usual, strong):
            client.search("t1")
            client.search("t1", consistency="Bounded")
            client.search("t1", consistency="Strong")
        with pytest.raises(errors.UsageError, match="'strong'"):
            usual.search("t1", consistency="strong")  # type: ignore[call-overload]
    assert asked == [False, False, True, True, False, True]


@pytest.mark.usefixtures("short")
def test_a_half_made_write_does_not_mix_with_the_archive_in_a_roll_back(
    gallery: Gallery, monkeypatch: pytest.MonkeyPatch
) -> None:
    drive(gallery)
    gallery.source.of[3] = "newer"
    with gallery.client() as client, dying(monkeypatch, gallery, "close_intents"):
        client.upsert([{"id": 3, "item": "newer", "n": 1}])
    time.sleep(6.1)
    roll_back(gallery)
    (record,) = gallery.store.get(gallery.task.old[0], [3], vector=True)
    assert record.fields == {"n": 1}
    assert np.allclose(record.vector, vector("v1", "newer"), atol=1e-6)  # type: ignore[arg-type]


def roll_back(gallery: Gallery) -> None:
    conductor = gallery.conductor()
    back = conductor.roll_back(gallery.registry.upgrade(gallery.upgrade.id))
    assert back is not None
    conductor.deploy(back)
    conductor.list_work(gallery.registry.upgrade(back.id))
    conductor.backfill(gallery.registry.upgrade(back.id), gallery.worker())
    conductor.complete(gallery.registry.upgrade(back.id), gallery.worker())


# --- readers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ask",
    [
        pytest.param(lambda client: [hit.id for hit in client.search("t3", limit=1)], id="search"),
        pytest.param(lambda client: [record.id for record in client.get(3)], id="get"),
        pytest.param(lambda client: [record.id for record in client.query("id == 3")], id="query"),
        pytest.param(lambda client: client.count("id == 3") * [3], id="count"),
        pytest.param(lambda client: (client.count() == 8) * [3], id="count-all"),
    ],
)
def test_a_reader_suspended_between_its_plan_and_its_question_misses_nothing(
    planned: Gallery, ask: Callable[[Client], list[Id]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with planned.client() as client:
        current, suspended = client._current_plan.current, [True]

        def plan() -> Any:
            found = current()
            if suspended and suspended.pop():
                planned.conductor().deploy(planned.upgrade)
                drive(planned)
            return found

        monkeypatch.setattr(client._current_plan, "current", plan)
        assert ask(client) == [3]
        assert not suspended


class Wire:
    """A registry as one process has it, until it is cut."""

    def __init__(self, real: Any) -> None:
        self._real, self.is_cut = real, False

    def __getattr__(self, name: str) -> Any:
        if self.is_cut and name not in ("gaps", "let_go"):  # what this process does without asking
            raise errors.RegistryError("The registry cannot be reached")
        return getattr(self._real, name)


def silent(plans: CurrentPlan) -> None:
    """Its thread asks for no plan any more; searches do."""
    plans._stop.set()
    plans._wake.set()
    plans._thread.join()
    plans._stop.clear()


@pytest.mark.parametrize("is_cut", [False, True])
def test_a_client_of_a_plan_with_longer_times_misses_nothing_of_one_with_shorter_times(planned: Gallery, is_cut: bool) -> None:
    """Who conducts the upgrade is configured with other times than who made the gallery: clients go by those of their plan."""
    wire = Wire(planned.registry)
    hasty = replace(planned, times=TIMES)
    with Client("texts", registry=wire, store=planned.store, loaded_models=planned.loaded_models, engine_timeout=1.0) as client:  # type: ignore[arg-type]
        assert len(client.search("t3", limit=50)) == 8
        hasty.conductor().deploy(planned.upgrade)
        assert planned.registry.plan("texts").max_age == TIMES["max_age"]
        wire.is_cut = is_cut
        with ThreadPoolExecutor(1) as pool:
            driving = pool.submit(lambda: planned.worker().run(hasty.conductor().task(planned.upgrade), planned.backfill))
            while not driving.done():
                with suppress(errors.StalePlan, errors.RegistryError):
                    assert len(client.search("t3", limit=50)) == 8
            driving.result()
        wire.is_cut = False
    planned.expect_moved()


def test_a_client_of_a_plan_with_longer_times_is_waited_for_as_long_as_it_may_use_it(planned: Gallery) -> None:
    """A write under the new plan reaches the new collection alone, which that client does not search yet."""
    wire = Wire(planned.registry)
    hasty = replace(planned, times=TIMES)
    with Client("texts", registry=wire, store=planned.store, loaded_models=planned.loaded_models, engine_timeout=1.0) as client:  # type: ignore[arg-type]
        client.search("t3", limit=50)
        hasty.conductor().deploy(planned.upgrade)
        with planned.registry.engine.begin() as connection:
            connection.execute(text("UPDATE serving_plans SET max_age = 60 WHERE epoch = 1"))
        silent(client._current_plan)
        wire.is_cut = True
        planned.registry.refresh("texts", client=client.name, holds=1, ready=2, trouble="")
        time.sleep(3 * TIMES["max_age"])
        assert client.name in {row.id for row in planned.registry.clients(planned.upgrade.gallery_id)}
        wire.is_cut = False


def test_a_search_that_outlives_cut_over_and_clean_up_is_asked_again(gallery: Gallery) -> None:
    """Its model was being loaded, say: what it would search is gone by then."""

    def upgraded() -> None:
        row = gallery.conductor().advance(gallery.registry.upgrade(gallery.upgrade.id), gallery.worker())
        gallery.conductor().clean_up(row)

    with gallery.client() as client:
        gallery.store.before = once("search", gallery.task.old[0], upgraded)
        assert [hit.id for hit in client.search("t3", limit=1)] == [3]
    assert not gallery.store.exists(gallery.task.old[0])


def test_what_is_asked_of_an_upgrade_while_it_backfills_holds(gallery: Gallery) -> None:
    def later() -> None:
        row = gallery.registry.upgrade(gallery.upgrade.id)
        gallery.registry.set_upgrade(row.id, plan=replace(row.plan, cutover=False))

    gallery.store.before = once("upsert", gallery.task.new[0], later)
    row = gallery.conductor().advance(gallery.upgrade, gallery.worker())
    assert row.phase == Phase.SERVING_BOTH
    gallery.expect_moved()


# --- workers ----------------------------------------------------------------------------------------------------------


def unavailable() -> NoReturn:
    raise errors.EngineUnavailable("Milvus cannot be reached")


def test_a_batch_whose_write_failed_is_taken_up_by_the_same_worker_again(gallery: Gallery) -> None:
    worker, stop = gallery.worker(), threading.Event()
    gallery.store.before = once("upsert", gallery.task.new[0], unavailable)
    with pytest.raises(errors.EngineUnavailable):
        worker.run(gallery.task, gallery.backfill)
    timer = threading.Timer(60, stop.set)
    timer.start()
    worker.run(gallery.task, gallery.backfill, stop=stop)
    timer.cancel()
    gallery.expect_moved()


def test_a_removal_that_failed_and_arrives_later_takes_no_newer_record(gallery: Gallery) -> None:
    late = threading.Timer(0.3, FaissStore.delete, (gallery.store, gallery.task.new[0], [3]))

    def fails() -> None:
        late.start()
        unavailable()

    copied(gallery)
    remove(gallery, 3)
    gallery.store.before = once("delete", gallery.task.new[0], fails)
    with pytest.raises(errors.EngineUnavailable):
        gallery.worker().run(gallery.task, gallery.backfill)
    with gallery.client() as client:
        client.upsert([{"id": 3, "item": "newer", "n": 1}])
        late.join()
        assert [hit.id for hit in client.search("newer", limit=1)] == [3]


def test_a_worker_suspended_while_it_claims_does_not_think_that_the_claim_is_alive(
    gallery: Gallery, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, running = gallery.worker(), threading.Lock()
    claim, renew = gallery.registry.claim, worker._renew
    outlived: list[bool] = []

    def beat(upgrade: int) -> None:
        with running:
            renew(upgrade)

    def slow(*args: Any, **options: Any) -> BatchRow | None:
        batch = claim(*args, **options)
        if not outlived:
            outlived.append(False)
            with running:  # no thread of a suspended process runs
                time.sleep(1.7)
            time.sleep(0.05)  # and then its heartbeat may be the first
        return batch

    def written(call: str, collection: str) -> None:
        rows = gallery.registry.batches(gallery.upgrade.id, state=BatchState.WRITING)
        outlived.extend((row.lease_until or 0.0) < gallery.registry.now() for row in rows)

    monkeypatch.setattr(worker, "_renew", beat)
    monkeypatch.setattr(gallery.registry, "claim", slow)
    gallery.store.after = written
    worker.run(gallery.task, gallery.backfill)
    assert outlived
    assert not any(outlived)
    gallery.expect_moved()


def test_a_heartbeat_that_reaches_the_database_too_late_does_not_keep_a_claim(
    gallery: Gallery, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, renew, asked = gallery.worker(), gallery.registry.renew, uptime()

    def slow(*args: Any, **options: Any) -> set[Claim]:
        time.sleep(0.4)
        return renew(*args, **options)

    worker._renew(gallery.upgrade.id)
    batch = worker._claim(gallery.task, copy=True, settled=None)
    assert batch is not None
    in_time = worker._in_time(batch, asked)
    time.sleep(1.4)
    monkeypatch.setattr(gallery.registry, "renew", slow)
    worker._renew(gallery.upgrade.id)  # asked 0.2 s before the end of the lease, done 0.2 s after it
    with pytest.raises(errors.LeaseLost):
        in_time()


def test_a_record_is_not_lost_when_its_quarantine_is_lifted_in_the_grace(gallery: Gallery) -> None:
    text = gallery.source.of.pop(3)
    copied(gallery)
    gallery.source.of[3] = text
    gallery.registry.release(gallery.upgrade.id, [3], requeue=True)
    gallery.backfill.retire(gallery.task, claimed(gallery), always)
    drive(gallery)
    gallery.expect_moved()


# --- other programs ---------------------------------------------------------------------------------------------------


def test_what_was_deleted_between_two_tries_that_died_does_not_come_back(
    gallery: Gallery, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, step in enumerate(("copied", "intents")):
        with dying(monkeypatch, gallery, step):
            gallery.backfill.copy(gallery.task, claimed(gallery), always)
        if number == 0:
            remove(gallery, 3)
        run_out(gallery.registry)
    drive(gallery)
    gallery.expect_moved()


def test_what_was_changed_and_then_deleted_does_not_come_back(gallery: Gallery) -> None:
    copied(gallery)
    gallery.store.upsert(gallery.task.old[0], [Record(id=3, vector=vector("v1", "changed"), fields={"n": 7})])
    gallery.backfill.retire(gallery.task, claimed(gallery), always)
    remove(gallery, 3)
    drive(gallery)
    gallery.expect_moved()


def test_what_was_deleted_while_a_write_of_it_was_begun_and_not_made_does_not_come_back(
    gallery: Gallery, monkeypatch: pytest.MonkeyPatch
) -> None:
    advance = gallery.registry.advance

    def announced(batch: BatchRow, state: BatchState, **values: Any) -> int:
        number = advance(batch, state, **values)
        gallery.registry.open_intents("texts", "upsert", [3], client="killed", lasting=0.3)
        return number

    copied(gallery)
    remove(gallery, 3)
    with monkeypatch.context() as patched:
        patched.setattr(gallery.registry, "advance", announced)
        gallery.backfill.retire(gallery.task, claimed(gallery), always)
    time.sleep(0.4)
    drive(gallery)
    gallery.expect_moved()


# --- conductors -------------------------------------------------------------------------------------------------------


def test_a_late_record_that_two_conductors_find_is_listed_once(gallery: Gallery) -> None:
    drive(gallery)
    gallery.source.of[50] = "t50"
    gallery.store.upsert(gallery.task.old[0], [Record(id=50, vector=vector("v1", "t50"), fields={"n": 0})])
    for _ in range(2):
        assert complete._list_late(gallery.conductor(), gallery.upgrade, gallery.task.old[0]) == 1
    pending = gallery.registry.batches(gallery.upgrade.id, state=BatchState.PENDING)
    assert [unpack_ids(batch.ids) for batch in pending] == [[50]]
    drive(gallery)
    gallery.expect_moved()


def test_the_old_collection_is_not_called_empty_while_a_write_may_put_a_record_back(gallery: Gallery) -> None:
    drive(gallery)
    write = gallery.registry.open_intents("texts", "upsert", [3], client="slow", lasting=20)
    assert write is not None
    completing = threading.Thread(target=gallery.conductor().complete, args=(gallery.upgrade, gallery.worker()))
    completing.start()
    completing.join(timeout=4 * gallery.task.grace)
    # Its writer had found the record in old before it left there.
    gallery.store.upsert(gallery.task.old[0], [Record(id=3, vector=vector("v1", "t3"), fields={"n": 0})])
    gallery.registry.close_intents(write)
    completing.join(timeout=20)
    gallery.expect_moved()


def test_an_upgrade_whose_conductor_died_just_after_it_was_served_can_be_rolled_back(
    planned: Gallery, monkeypatch: pytest.MonkeyPatch
) -> None:
    with planned.client() as client:
        with dying(monkeypatch, planned, "set_upgrade"):
            planned.conductor().deploy(planned.upgrade)
        assert planned.registry.upgrade(planned.upgrade.id).phase == Phase.PLANNED
        planned.source.of[99] = "t99"
        client.upsert([{"id": 99, "item": "t99", "n": 1}])
        roll_back(planned)
        assert [hit.id for hit in client.search("t99", limit=1)] == [99]
    assert 99 in planned.held()["old"]


def test_a_client_leaves_though_the_disk_of_the_registry_is_full(gallery: Gallery, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> NoReturn:
        raise errors.DiskFull("The disk that holds the registry is full")

    closed: list[str] = []
    client = gallery.client()
    client._closing = lambda: closed.append("closed")
    monkeypatch.setattr(gallery.registry, "leave", full)
    client.close()
    assert closed == ["closed"]


def test_a_search_refuses_while_the_registry_cannot_hear_that_its_client_lives(
    gallery: Gallery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever only read the plan could serve by it after others have ceased to wait for a client that they had not heard of."""

    def full(*_: object, **__: object) -> NoReturn:
        raise errors.DiskFull("The disk that holds the registry is full; free some space")

    with gallery.client() as client:
        with monkeypatch.context() as patched:
            patched.setattr(gallery.registry, "refresh", full)
            time.sleep(gallery.registry.plan("texts").max_age)
            with pytest.raises(errors.StalePlan, match="could miss records: The disk that holds the registry is full"):
                client.search("t1", limit=1)
        assert [hit.id for hit in client.search("t1", limit=1)] == [1]


class Counted:
    """A lock that counts how often it was asked for."""

    def __init__(self) -> None:
        self._lock, self._numbers, self.asked = threading.Lock(), itertools.count(1), 0

    def __enter__(self) -> None:
        self.asked = next(self._numbers)
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


@pytest.mark.parametrize("away", [False, True])
def test_of_many_searches_that_find_their_plan_too_old_one_asks_and_all_hear_the_answer(
    planned: Gallery, monkeypatch: pytest.MonkeyPatch, away: bool
) -> None:
    registry, asked = planned.registry, []
    plans = CurrentPlan("texts", registry=registry, prepare=lambda _: None, name="one", latency=Latency())
    silent(plans)
    plans._lock = Counted()  # type: ignore[assignment]
    plans._held = replace(plans.current(), max_age=60.0), -math.inf

    def refresh(*args: Any, **kwargs: Any) -> Any:
        asked.append(time.monotonic())
        wait_until(lambda: plans._lock.asked == 20)  # type: ignore[attr-defined]
        if away:
            raise errors.RegistryError("the database is away")
        told = type(registry).refresh(registry, *args, **kwargs)
        return replace(told, plan=replace(told.plan, max_age=60.0))

    monkeypatch.setattr(registry, "refresh", refresh)
    together = threading.Barrier(20)

    def current(_: int) -> object:
        together.wait()
        try:
            return plans.current().epoch
        except errors.StalePlan as exc:
            return str(exc).endswith("the database is away")

    with ThreadPoolExecutor(20) as pool:
        assert set(pool.map(current, range(20))) == ({True} if away else {plans._held[0].epoch})
    assert len(asked) == 1


# --- what an audit found ------------------------------------------------------------------------------------------------


def test_a_heart_goes_on_beating_after_a_disk_that_was_full_for_a_moment(
    gallery: Gallery, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, real, beats = gallery.worker(lease=1.2), gallery.registry.renew, list[str]()

    def renew(*args: Any, **options: Any) -> set[int]:
        beats.append(threading.current_thread().name)
        if beats.count("rmvdb-heartbeat") == 1 and beats[-1] == "rmvdb-heartbeat":
            raise errors.DiskFull("full for a moment")
        return real(*args, **options)

    monkeypatch.setattr(gallery.registry, "renew", renew)
    gallery.loaded_models.embedder("v2").seconds = 0.5  # some heartbeats long
    stop = threading.Event()
    timer = threading.Timer(60.0, stop.set)
    timer.start()
    worker.run(gallery.task, gallery.backfill, stop=stop)
    timer.cancel()
    gallery.expect_moved()


def test_a_claim_that_the_database_has_given_to_another_is_lost_whatever_the_clock_of_its_worker_says(gallery: Gallery) -> None:
    """The machine was asleep, or the database's clock was set: what a heartbeat says decides."""
    worker = gallery.worker(lease=60.0)
    worker._renew(gallery.upgrade.id)
    asked = uptime()
    batch = worker._claim(gallery.task, copy=True, settled=None)
    assert batch is not None
    in_time = worker._in_time(batch, asked)
    worker._renew(gallery.upgrade.id)
    in_time()
    run_out(gallery.registry)
    worker._renew(gallery.upgrade.id)
    with pytest.raises(errors.LeaseLost):
        in_time()


def test_what_another_program_changes_while_a_removal_waits_for_its_heir_is_moved_again(gallery: Gallery) -> None:
    """Its worker died after it had decided; the record lies where it always was, for hours perhaps."""
    decided(gallery)
    gallery.store.upsert(gallery.task.old[0], [Record(id=3, vector=vector("v1", "t3"), fields={"n": 7})])
    gallery.store.delete(gallery.task.old[0], [4])  # as the first worker may have
    time.sleep(0.7)
    drive(gallery)
    assert gallery.held()["new"][3].fields == {"n": 7}
    gallery.expect_moved()
    assert gallery.verify().ok


def test_what_was_moved_put_back_copied_and_then_deleted_by_another_program_is_no_difference(gallery: Gallery) -> None:
    drive(gallery)
    gallery.store.upsert(gallery.task.old[0], [Record(id=3, vector=vector("v1", "t3"), fields={"n": 7})])
    complete._list_late(gallery.conductor(), gallery.upgrade, gallery.task.old[0])
    copied(gallery)
    remove(gallery, 3)
    row = gallery.conductor().advance(gallery.registry.upgrade(gallery.upgrade.id), gallery.worker())
    assert row.phase == Phase.CUT_OVER
    gallery.expect_moved()


def test_a_number_that_is_none_does_not_differ_from_itself(gallery: Gallery) -> None:
    """Else its record would be moved again for ever."""
    another = Record(id=3, vector=vector("v1", "t3"), fields={"n": float("nan")})
    gallery.store.upsert(gallery.task.old[0], [another], as_read=True)  # by another program: rmvdb writes none
    drive(gallery)
    assert len(gallery.registry.batches(gallery.upgrade.id)) == 1
    assert gallery.verify().ok


def test_a_write_that_is_refused_before_it_left_keeps_nobody_waiting(gallery: Gallery) -> None:
    with gallery.client() as one, gallery.client() as two:
        with pytest.raises(errors.RmvdbError):
            one.upsert([{"id": "3", "item": "x"}])  # a text where ids are numbers
        assert not gallery.registry.open_writes(gallery.upgrade.gallery_id)
        began = time.monotonic()
        two.upsert([{"id": 3, "item": "y", "n": 2}])
        assert time.monotonic() - began < 25.0  # thirty, if it did


@pytest.mark.parametrize("fields", [{"n": 1}, {}])
def test_a_call_that_was_held_up_after_its_permit_and_overwrote_a_write_is_found_before_cut_over(
    gallery: Gallery, monkeypatch: pytest.MonkeyPatch, fields: dict[str, int]
) -> None:
    """A process may be suspended between its look at the clock and the moment its call leaves; no clock helps against that."""
    worker, running, held_up = gallery.worker(), threading.Lock(), list[str]()
    renew, real = worker._renew, FaissStore.upsert

    def renewed(upgrade: int) -> None:
        with running:
            renew(upgrade)

    def upsert(self: FaissStore, collection: str, records: Any, *, permit: Any = always, **options: Any) -> None:
        if collection != gallery.task.new[0] or not threading.current_thread().name.startswith("rmvdb-batch") or held_up:
            return real(self, collection, records, permit=permit, **options)
        permit()
        held_up.append(collection)
        with running:  # its heart is as suspended as it is
            time.sleep(1.9)
            gallery.source.of[3] = "newer"
            with gallery.client() as client:
                client.upsert([{"id": 3, "item": "newer", **fields}])
        return real(self, collection, records, **options)

    monkeypatch.setattr(worker, "_renew", renewed)
    monkeypatch.setattr(FaissStore, "upsert", upsert)
    worker.run(gallery.task, gallery.backfill)
    with pytest.raises(errors.VerifyFailed, match="record 3 is in texts_v2 with another vector than its last write gave it"):
        gallery.conductor().advance(gallery.registry.upgrade(gallery.upgrade.id), gallery.worker())
    with gallery.client() as client:  # the way out
        client.upsert([{"id": 3, "item": "newer", **fields}])
    row = gallery.conductor().advance(gallery.registry.upgrade(gallery.upgrade.id), gallery.worker())
    assert row.phase == Phase.CUT_OVER
    gallery.expect_moved()


# --- the database's clock ------------------------------------------------------------------------------------------------


def test_nobody_waits_for_a_client_that_was_seen_before_the_clock_was_set_back(gallery: Gallery) -> None:
    clock, epoch = DatabaseClock(gallery.registry), gallery.registry.plan("texts").epoch
    gallery.registry.refresh("texts", client="killed", holds=epoch - 1, ready=epoch - 1, trouble="")
    clock.set(-600)
    with gallery.client() as client, ThreadPoolExecutor(1) as pool:
        pool.submit(client.upsert, [{"id": 3, "item": "newer", "n": 1}]).result(timeout=60)


def test_what_was_copied_before_the_clock_was_set_back_waits_for_one_more_grace(gallery: Gallery) -> None:
    clock = DatabaseClock(gallery.registry)
    copied(gallery)
    clock.set(-3600)
    began = time.monotonic()
    drive(gallery, seconds=60.0)
    assert time.monotonic() - began >= gallery.task.grace
    gallery.expect_moved()


def test_a_conductor_that_was_killed_before_the_clock_was_set_back_is_waited_for_no_longer(
    gallery: Gallery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rmvdb.upgrade.leadership.LEADER_LEASE", 1.0)
    clock = DatabaseClock(gallery.registry)
    gallery.registry.lead(gallery.upgrade.id, "killed", 1.0)
    clock.set(-3600)
    conductor = gallery.conductor()
    timer = threading.Timer(60.0, conductor.stop.set)
    timer.start()
    row = conductor.advance(gallery.registry.upgrade(gallery.upgrade.id), gallery.worker())
    assert row.phase == Phase.CUT_OVER


def test_a_write_does_not_wait_without_end_for_its_turn(gallery: Gallery, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rmvdb.serving.announced_writes.WRITE_WAITS", 0.5)
    with gallery.client() as client, gallery.registry.engine.begin() as connection:
        connection.execute(text("UPDATE galleries SET rebuilding = 1"))
        connection.commit()
        with pytest.raises(errors.EngineError, match=r"have waited for over 0\.5 s .* repeat the write"):
            client.upsert([{"id": 3, "item": "newer", "n": 1}])


def test_a_write_that_waited_past_its_deadline_is_not_made(gallery: Gallery, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut off from the database meanwhile; another one has begun since, which could not know of it."""
    monkeypatch.setattr("rmvdb.serving.announced_writes.WRITE_LASTS", 3.0)
    real, asked = gallery.registry.blocked, list[bool]()

    def blocked(*args: Any) -> bool:
        if not asked:
            asked.append(True)
            time.sleep(3.5)
            with gallery.client() as other:
                other.upsert([{"id": 3, "item": "other", "n": 2}])
            return True
        return real(*args)

    with gallery.client() as client:
        monkeypatch.setattr(gallery.registry, "blocked", blocked)
        with pytest.raises(errors.EngineError, match="took longer than 3 s; repeat the write"):
            client.upsert([{"id": 3, "item": "newer", "n": 1}])
        assert client.get([3])[0].fields == {"n": 2}


# --- a claim that nobody knows of ------------------------------------------------------------------------------------


def test_a_claim_whose_answer_was_lost_is_kept_by_no_heartbeat(gallery: Gallery, monkeypatch: pytest.MonkeyPatch) -> None:
    real, lost = gallery.registry.claim, list[int]()

    def claim(*args: Any, **options: Any) -> BatchRow | None:
        batch = real(*args, **options)
        if batch is not None and not lost:  # the connection broke when it was committed, and the question is put again
            lost.append(batch.id)
            return real(*args, **options)
        return batch

    monkeypatch.setattr(gallery.registry, "claim", claim)
    drive(gallery)
    assert lost
    gallery.expect_moved()


# --- loading a model ---------------------------------------------------------------------------------------------------


class SlowToLoad:
    """Loads v2's embedder until it is told to end; fails where nobody does within `seconds`."""

    def __init__(self, seconds: float = 30.0) -> None:
        self.seconds, self.began, self.may_end, self.failed = seconds, threading.Event(), threading.Event(), False

    def __call__(self, version: str) -> TextEmbedder:
        """The embedder."""
        if version == "v2":
            self.began.set()
            if not self.may_end.wait(self.seconds):
                self.failed = True
                raise errors.ModelError("no room for it")
        return TextEmbedder(version)


def application(gallery: Gallery, load: Callable[[str], Any]) -> Client:
    """A client in a process of its own, where models are loaded like that."""
    loaded_models = LoadedModels(
        load_embedder=load, load_chain=lambda version: Chain(embedder=version, dim=DIMS[version]), load_artifact=lambda _: b""
    )
    return Client("texts", registry=gallery.registry, store=gallery.store, loaded_models=loaded_models, engine_timeout=1.0)


@pytest.fixture
def hasty(tmp_path: Path) -> Iterator[Gallery]:
    """Eight texts in the old collection, which is served alone; a plan is old after a fifth of a second."""
    made = make(tmp_path, records=8, deployed=False)
    yield made
    made.registry.close()


@pytest.fixture
def _in_step(hasty: Gallery, monkeypatch: pytest.MonkeyPatch) -> None:
    """An epoch is asked for just after a client asked for its plan: a machine that stands still makes no client silent."""
    refresh, activate, asked = hasty.registry.refresh, hasty.registry.activate, threading.Event()

    def refreshed(*args: Any, **options: Any) -> Any:
        serving = refresh(*args, **options)
        if threading.current_thread().name.startswith("rmvdb-plans"):
            asked.set()
        return serving

    def activated(*args: Any, **options: Any) -> Any:
        asked.clear()
        assert asked.wait(60.0), "the client no longer asks"
        return activate(*args, **options)

    monkeypatch.setattr(hasty.registry, "refresh", refreshed)
    monkeypatch.setattr(hasty.registry, "activate", activated)


@pytest.mark.usefixtures("_in_step")
def test_searches_go_on_while_the_next_model_is_loaded_and_the_epoch_waits_for_it(hasty: Gallery) -> None:
    load, took = SlowToLoad(), list[float]()
    with application(hasty, load) as client, ThreadPoolExecutor(1) as pool:
        client.search("t3", limit=1)
        deploying = pool.submit(hasty.conductor().deploy, hasty.upgrade)
        try:
            assert load.began.wait(30.0)
            for _ in range(20):
                began = time.monotonic()
                assert [hit.id for hit in client.search("t3", limit=1)] == [3]
                took.append(time.monotonic() - began)
                time.sleep(hasty.times["max_age"] / 4)
            assert (load.failed, deploying.done()) == (False, False)
        finally:
            load.may_end.set()
        while not deploying.done():
            assert [hit.id for hit in client.search("t3", limit=1)] == [3]
        deploying.result()
        time.sleep(hasty.times["max_age"])
        assert len(client._current_plan.current().legs) == 2
        assert [hit.id for hit in client.search("t3", limit=1)] == [3]
    assert sorted(took)[10] < 0.5


@pytest.mark.usefixtures("_in_step")
def test_an_epoch_that_a_client_cannot_serve_does_not_begin_however_long_it_takes_to_see_that(hasty: Gallery) -> None:
    heard = list[str]()
    conductor = hasty.conductor()

    def say(words: str) -> None:
        heard.append(words)
        if "no room for it" in words:
            conductor.stop.set()

    conductor.say = say
    with application(hasty, SlowToLoad(seconds=3.0)) as client:
        client.search("t3", limit=1)
        with pytest.raises(errors.Stopped):
            conductor.deploy(hasty.upgrade)
        assert [hit.id for hit in client.search("t3", limit=1)] == [3]
    assert any("cannot serve epoch 2 yet: ModelError: no room for it" in words for words in heard), heard


def test_a_plan_that_cannot_be_loaded_puts_off_no_later_one(hasty: Gallery) -> None:
    tried = list[int]()

    def prepare(plan: ServingPlan) -> None:
        tried.append(plan.epoch)
        if plan.epoch == 2:
            raise errors.ModelError("no room for it")

    registry = hasty.registry
    plans = CurrentPlan("texts", registry=registry, prepare=prepare, name="one", latency=Latency())
    assert registry.announce("texts", plans.current().legs, hasty.times | {"staleness": 1.0}) == 2
    wait_until(lambda: plans._failed == 2)
    plans._again_at = math.inf  # as far away as after many tries
    assert registry.announce("texts", plans.current().legs, hasty.times | {"staleness": 2.0}) == 3
    wait_until(lambda: 3 in tried)
    plans.close()


def test_who_cannot_write_by_a_plan_does_not_serve_it(gallery: Gallery) -> None:
    """A roll back by ψ has queries of v2 and records of v1."""
    plan = gallery.registry.plan("texts")
    old = replace(plan.legs[1], embedder="v2", write_with="v1")

    def load(version: str) -> TextEmbedder:
        if version == "v1":
            raise errors.ModelError("no v1 here")
        return TextEmbedder(version)

    with application(gallery, load) as client, pytest.raises(errors.ModelError, match="no v1 here"):
        client._loaded_models.prepare(replace(plan, legs=(plan.legs[0], old)))


# --- bad items, and a broken source ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["broken", "missing"])
def test_a_batch_of_bad_items_is_set_aside_where_items_are_made_of_fields(gallery: Gallery, kind: str) -> None:
    gallery.registry.discard_list(gallery.upgrade.id)
    gallery.registry.add_batches(gallery.upgrade.id, [([1, 2, 3, 4], None), ([5, 6, 7, 8], None)], first=1)
    bad = {"text": "broken"} if kind == "broken" else {}
    texts = {id: bad if id > 4 else {"text": f"t{id}"} for id in gallery.source.of}
    old = [Record(id=id, vector=vector("v1", f"t{id}"), fields={"n": 0, **fields}) for id, fields in texts.items()]
    gallery.store.upsert(gallery.task.old[0], old)
    backfill = Backfill(
        registry=gallery.registry, store=gallery.store, loaded_models=gallery.loaded_models, source=FieldSource("text"),
        archive=gallery.archive,
    )  # fmt: skip
    gallery.worker(width=1, lease=30.0).run(gallery.task, backfill)
    assert {row.record for row in gallery.registry.quarantined(gallery.upgrade.id)} == {"5", "6", "7", "8"}


@pytest.mark.parametrize("kind", ["broken", "missing"])
def test_bad_items_that_come_first_in_the_order_are_set_aside_by_what_the_plan_embedded(tmp_path: Path, kind: str) -> None:
    """A classifier is least sure of blank pictures, so that nothing is in the new collection yet."""
    gallery = make(tmp_path, records=40)
    for id in range(1, 21):
        _spoil(gallery, id, kind)
    old, ids = gallery.held()["old"], list(range(31, 41))
    cache = EmbeddingCache(tmp_path / "embeddings", model="v2")
    items = [f"t{id}" for id in ids]
    cache.put(
        ids,
        vectors_of([old[id] for id in ids]),
        [item_digest(item) for item in items],
        np.stack([vector("v2", item) for item in items]),
    )
    backfill = Backfill(
        registry=gallery.registry, store=gallery.store, loaded_models=gallery.loaded_models, source=gallery.source,
        archive=gallery.archive, cache=cache,
    )  # fmt: skip
    gallery.worker(width=1).run(gallery.task, backfill)
    assert len(gallery.registry.quarantined(gallery.upgrade.id)) == 20
    assert set(gallery.held()["new"]) == set(range(21, 41))
    gallery.registry.close()


def test_an_item_that_changed_since_the_plan_is_embedded_again_though_the_old_model_does_not_see_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old model reads the first word only, and the record was written before the upgrade began."""
    monkeypatch.setattr(inprocess, "vector", lambda model, item: vector(model, item.split()[0] if model == "v1" else item))
    gallery = make(tmp_path, records=20, deployed=False)
    _sample(gallery)
    with gallery.client() as client:
        for id in (3, 4):
            gallery.source.of[id] += " and more"
            client.upsert([{"id": id, "item": gallery.source.of[id], "n": 1}])
    made = EmbeddingCache(gallery.folder / "embeddings", model="v2")
    old = gallery.records("texts_v1")
    items = [gallery.source.of[id] for id in old]
    assert made.knows(old) == set(old)
    assert set(made.get(list(old), vectors_of(list(old.values())), list(map(item_digest, items)))) == set(old) - {3, 4}
    gallery.conductor().deploy(gallery.upgrade)
    backfill = Backfill(
        registry=gallery.registry, store=gallery.store, loaded_models=gallery.loaded_models, source=gallery.source,
        archive=gallery.archive, cache=made,
    )  # fmt: skip
    gallery.worker().run(gallery.task, backfill)
    gallery.expect_moved()
    gallery.registry.close()


@pytest.mark.parametrize("kind", ["broken", "missing"])
@pytest.mark.parametrize("bad", [range(1, 11), range(1, 6), range(1, 41, 4)])
def test_what_the_plan_embedded_and_is_bad_since_is_set_aside_and_planned_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, bad: Sequence[int]
) -> None:
    """All of a batch, half of one, some of each."""
    monkeypatch.setattr("rmvdb.planning.sample.CHUNK", 10)
    gallery = make(tmp_path)
    assert _sample(gallery).skipped == 0
    for id in bad:
        _spoil(gallery, id, kind)
    assert _sample(gallery).skipped == len(bad)
    assert _sample(gallery).skipped == len(bad)
    backfill = Backfill(
        registry=gallery.registry, store=gallery.store, loaded_models=gallery.loaded_models, source=gallery.source,
        archive=gallery.archive, cache=EmbeddingCache(gallery.folder / "embeddings", model="v2"),
    )  # fmt: skip
    gallery.worker(width=1).run(gallery.task, backfill)
    assert {row.record for row in gallery.registry.quarantined(gallery.upgrade.id)} == set(map(str, bad))
    assert set(gallery.held()["new"]) == set(range(1, 41)) - set(bad)
    gallery.registry.close()


@pytest.mark.parametrize("kind", ["broken", "missing"])
@pytest.mark.parametrize("bad", [range(1, 11), range(11, 21), [21]])
def test_bad_items_that_lie_together_are_left_out_of_a_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, bad: Sequence[int]
) -> None:
    monkeypatch.setattr("rmvdb.planning.sample.CHUNK", 10)
    gallery = make(tmp_path, records=21)
    for id in bad:
        _spoil(gallery, id, kind)
    sample = _sample(gallery)
    assert {record.id for record in sample.records} == set(range(1, 22)) - set(bad)
    assert sample.skipped == len(bad)
    gallery.registry.close()


@pytest.mark.parametrize(("kind", "saying"), [("broken", "for each of 8 items"), ("missing", "no item for any of 8 records")])
def test_where_no_item_is_good_the_source_or_the_model_is_broken(gallery: Gallery, kind: str, saying: str) -> None:
    for id in range(1, 9):
        _spoil(gallery, id, kind)
    for act in (lambda: _sample(gallery), lambda: drive(gallery)):
        with pytest.raises(errors.RmvdbError, match=saying):
            act()
    assert not gallery.registry.quarantined(gallery.upgrade.id)


def _spoil(gallery: Gallery, id: Id, kind: str) -> None:
    if kind == "broken":
        gallery.source.of[id] = "broken"
    else:
        del gallery.source.of[id]


def _sample(gallery: Gallery) -> Sample:
    sampler = Sampler(
        store=gallery.store, loaded_models=gallery.loaded_models, source=gallery.source,
        cache=lambda version: EmbeddingCache(gallery.folder / "embeddings", model=version),
    )  # fmt: skip
    leg = Leg(collection=gallery.task.old[0], model="v1", metric=Metric.COSINE, embedder="v1")
    return sampler.sample("v2", [leg], [1000], frozenset(), lambda *_: None, seed=0)


def test_what_is_chosen_to_be_deleted_is_chosen_once_nobody_else_is_at_it(gallery: Gallery) -> None:
    begun = threading.Event()

    def slowly(call: str, _: str) -> None:
        if call == "upsert" and not begun.is_set():
            begun.set()
            time.sleep(0.5)

    def unwritten(ids: Sequence[Id]) -> list[Id]:
        written = gallery.registry.last_done(gallery.upgrade.id, ids)
        return [id for id in ids if key(id) not in written]

    with gallery.client() as writer, gallery.client() as client, ThreadPoolExecutor(1) as pool:
        gallery.store.before = slowly
        writing = pool.submit(writer.upsert, [{"id": 7, "item": "newer", "n": 1}])
        assert begun.wait(10.0)
        assert client.delete_those([7, 8], unwritten) == [8]
        writing.result()
        assert [record.id for record in client.get([7, 8])] == [7]
        assert client.delete_those([5, 5], lambda _: []) == []
        assert not gallery.registry.announced(gallery.upgrade.id, [5])


@pytest.mark.parametrize("source", ["mended", "broken"])
def test_a_quarantined_record_that_is_written_again_is_moved(gallery: Gallery, source: str) -> None:
    gallery.source.of[3] = "broken"
    conductor, worker = gallery.conductor(), gallery.worker()
    with pytest.raises(errors.Quarantined, match="1 record is quarantined, such as '3'"):
        conductor.advance(gallery.registry.upgrade(gallery.upgrade.id), worker)
    gallery.source.of[3] = source
    with gallery.client() as client:
        client.upsert([{"id": 3, "item": "mended", "n": 1}])
        row = conductor.advance(gallery.registry.upgrade(gallery.upgrade.id), worker)
        assert row.phase == Phase.CUT_OVER
        assert [hit.id for hit in client.search("mended", limit=8)].count(3) == 1
    gallery.source.of[3] = "mended"
    gallery.expect_moved()
    assert not gallery.registry.quarantined(gallery.upgrade.id)


# --- a damaged archive ----------------------------------------------------------------------------------------------------


def _damage(gallery: Gallery, kind: str) -> Path:
    file = next(gallery.archive.folder.rglob("*.parquet"))
    if kind == "missing":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-1] + b"x")
    return file


@pytest.mark.parametrize("kind", ["altered", "missing"])
def test_a_batch_whose_archive_is_damaged_comes_again_and_is_archived_anew(gallery: Gallery, kind: str) -> None:
    before = gallery.held()["old"]
    copied(gallery)
    _damage(gallery, kind)
    row = gallery.conductor().advance(gallery.registry.upgrade(gallery.upgrade.id), gallery.worker())
    assert row.phase == Phase.CUT_OVER
    gallery.expect_moved()
    back = gallery.conductor().roll_back(row)
    assert back is not None
    gallery.conductor().advance(back, gallery.worker())
    held = gallery.held()["old"]
    assert held.keys() == before.keys()
    assert all(np.array_equal(held[id].vector, before[id].vector) for id in before)  # type: ignore[arg-type]


def test_a_removal_that_was_decided_is_not_made_where_nothing_can_be_put_back_any_more(gallery: Gallery) -> None:
    decided(gallery)
    _damage(gallery, "altered")
    time.sleep(0.7)
    drive(gallery)
    gallery.expect_moved()
    retired = gallery.registry.batches(gallery.upgrade.id)
    assert [len(unpack_ids(row.remove)) for row in retired] == [0, 8]
    assert len(gallery.archive.read(ArchiveFile(**retired[1].archive["texts_v1"]))) == 8


@pytest.mark.parametrize("kind", ["altered", "missing"])
def test_a_roll_back_has_the_old_model_embed_what_a_damaged_archive_held(gallery: Gallery, kind: str) -> None:
    before = gallery.held()["old"]
    drive(gallery)
    file, conductor, said = _damage(gallery, kind), gallery.conductor(), list[str]()
    conductor.say = said.append
    row = conductor.advance(gallery.registry.upgrade(gallery.upgrade.id), gallery.worker())
    assert row.phase == Phase.CUT_OVER
    assert [words for words in said if words.startswith(f"left out: {file}")]
    back = conductor.roll_back(row)
    assert back is not None
    assert conductor.advance(back, gallery.worker()).phase == Phase.CUT_OVER
    held = gallery.held()
    assert held["old"].keys() == before.keys()
    assert not held["new"]
    assert all(np.allclose(held["old"][id].vector, before[id].vector, atol=1e-6) for id in before)  # type: ignore[arg-type]


def test_an_archive_that_is_away_stops_what_needs_it(gallery: Gallery) -> None:
    copied(gallery)
    gallery.archive.folder.rename(gallery.folder / "elsewhere")
    with pytest.raises(errors.ArtifactError, match="is missing; put it back"):
        drive(gallery)
    (gallery.folder / "elsewhere").rename(gallery.archive.folder)
    drive(gallery)
    gallery.expect_moved()


# --- the list of a roll back ----------------------------------------------------------------------------------------------


def test_a_roll_back_is_listed_a_page_at_a_time_with_each_record_once_by_its_last_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gallery = make(tmp_path, records=12, batch=2)
    drive(gallery)
    gallery.store.upsert(gallery.task.old[0], [Record(id=3, vector=vector("v1", "t3"), fields={"n": 7})])
    complete._list_late(gallery.conductor(), gallery.upgrade, gallery.task.old[0])
    drive(gallery)
    real, pages = gallery.registry.batches, list[list[weakref.ref[BatchRow]]]()

    def batches(*args: Any, **options: Any) -> Any:
        assert not [row for page in pages[:-1] for row in page if row() is not None]
        found = real(*args, **options | {"limit": 2})
        pages.append([weakref.ref(row) for row in found])
        return found

    monkeypatch.setattr(gallery.registry, "batches", batches)
    back = gallery.conductor().roll_back(gallery.registry.upgrade(gallery.upgrade.id))
    assert back is not None
    listed = [(ids, gallery.backfill._kept(file)) for ids, file in work_list._undone(gallery.conductor(), back)]
    assert [ids for ids, _ in listed] == [[3], [11, 12], [9, 10], [7, 8], [5, 6], [4], [1, 2]]
    assert listed[0][1]["texts_v1"][0].fields == {"n": 7}
    assert len(pages) == 10
    gallery.registry.close()
