"""The limits of a backfill, kept by a real worker on a real registry: how fast, how much of the time, beside which searches."""

from __future__ import annotations

import gc
import itertools
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from rmvdb.backfill.batches import Backfill
from rmvdb.backfill.throttle import Limits, Throttle
from rmvdb.engines.faiss import FaissStore
from rmvdb.serving import latency
from rmvdb.serving.client import Client
from rmvdb.serving.latency import ENOUGH, WINDOW
from rmvdb.types import BatchState, Phase, Progress, Record
from rmvdb.upgrade.status import status
from tests.support.inprocess import TIMES, UNLIMITED, Gallery, make

#: Searches of these galleries take a few milliseconds; this is far above, and a slow one takes longer.
CEILING_MS = 400.0
SLOW = 0.6


@pytest.fixture
def gallery(tmp_path: Path) -> Iterator[Gallery]:
    """Forty texts in four batches."""
    made = make(tmp_path)
    yield made
    made.registry.close()


@pytest.fixture
def patient(tmp_path: Path) -> Iterator[Gallery]:
    """The same, but a search may take a second, and a batch waits longer than that before it leaves."""
    made = make(tmp_path, times=TIMES | {"longest_search": 1.0})
    yield made
    made.registry.close()


class Timed:
    """A backfill that remembers when each copy began and ended."""

    def __init__(self, backfill: Backfill) -> None:
        self._backfill = backfill
        self.copies: list[tuple[float, float]] = []

    def copy(self, *args: Any) -> None:
        began = time.monotonic()
        self._backfill.copy(*args)
        self.copies.append((began, time.monotonic()))

    def retire(self, *args: Any) -> None:
        self._backfill.retire(*args)

    @property
    def settles_at_once(self) -> bool:
        return self._backfill.settles_at_once

    @property
    def rests(self) -> list[float]:
        """The seconds between two bursts."""
        return [begun - ended for (_, ended), (begun, _) in itertools.pairwise(self.bursts)]

    @property
    def bursts(self) -> list[tuple[float, float]]:
        """The times in which at least one copy was under way."""
        merged: list[tuple[float, float]] = []
        for began, ended in sorted(self.copies):
            if merged and began <= merged[-1][1]:
                began, ended = merged[-1][0], max(ended, merged.pop()[1])
            merged.append((began, ended))
        return merged


@contextmanager
def working(gallery: Gallery, *, width: int = 2, limits: Limits = UNLIMITED, backfill: Any = None) -> Iterator[Future[Progress]]:
    """Run a worker while the block runs. Stop it at the end if it has not ended by itself."""
    stop, worker = threading.Event(), gallery.worker(width=width, limits=limits, lease=60)
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(worker.run, gallery.task, backfill or gallery.backfill, stop=stop)
        try:
            yield ended
        finally:
            stop.set()
            ended.result()


def until(true: Callable[[], object], *, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"that was not so within {seconds} s"
        time.sleep(0.02)


def done(gallery: Gallery) -> int:
    return gallery.registry.progress(gallery.upgrade.id).done


def held_back(gallery: Gallery) -> str:
    return status(gallery.registry, gallery.registry.gallery("texts")).held_back


def ask(gallery: Gallery, **values: Any) -> None:
    gallery.registry.set_upgrade(gallery.upgrade.id, **values)


def search(client: Client, times: int) -> None:
    for number in range(times):
        client.search(f"t{1 + number % 40}", limit=3)


# --- rate and share of time -------------------------------------------------------------------------------------------


#: Two moments with what is meant between them: readings of the clock before and after.
Span: TypeAlias = tuple[float, float]


def overheard(monkeypatch: pytest.MonkeyPatch) -> tuple[list[Span], list[tuple[int, Span]]]:
    """Record when each batch begins. For each answer that no batch may begin yet, record how many have begun, and when one
    may."""
    begun: list[Span] = []
    held: list[tuple[int, Span]] = []
    begin, wait = Throttle.begin, Throttle.wait

    def heard_begin(throttle: Throttle, count: int) -> None:
        before = time.monotonic()
        begin(throttle, count)
        begun.append((before, time.monotonic()))

    def heard_wait(throttle: Throttle) -> float:
        before = time.monotonic()
        left = wait(throttle)
        if left:
            held.append((len(begun), (before + left, time.monotonic() + left)))
        return left

    monkeypatch.setattr(Throttle, "begin", heard_begin)
    monkeypatch.setattr(Throttle, "wait", heard_wait)
    return begun, held


def test_batches_begin_at_the_rate_no_faster_and_no_slower(gallery: Gallery, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, held = overheard(monkeypatch)
    with working(gallery, limits=Limits(rate=25)) as ended:
        ended.result(timeout=60)

    # A busy machine looks late whether a batch may begin, so that the batches tell how fast it is, and the answers how slow.
    assert len(begun) == 4
    assert all(after - before >= 10 / 25 for (before, _), (_, after) in itertools.pairwise(begun))
    assert held
    for number, (earliest, latest) in held:
        before, after = begun[number - 1]
        assert earliest - after <= 10 / 25 + 1e-6
        assert latest - before >= 10 / 25 - 1e-6
    gallery.expect_moved()


@pytest.mark.parametrize("width", [1, 3])
def test_a_nice_worker_copies_for_its_share_of_the_time(tmp_path: Path, width: int) -> None:
    gallery = make(tmp_path, records=90)
    gallery.loaded_models.embedder("v2").seconds = 0.15  # type: ignore[attr-defined]
    timed = Timed(gallery.backfill)
    with working(gallery, width=width, limits=Limits(nice=0.4), backfill=timed) as ended:
        ended.result(timeout=60)
    *before, last = timed.bursts
    share = sum(ended - began for began, ended in before) / (last[0] - before[0][0])
    gallery.registry.close()

    assert 0.1 < share < 0.44
    assert (len(timed.bursts) == 9) == (width == 1)  # several in hand overlap


@pytest.mark.parametrize("limit", [{"rate": 0.01}, {"nice": 0.0001}])
@pytest.mark.parametrize("whose", ["worker", "upgrade"])
def test_a_limit_is_lifted_at_once_even_if_another_command_set_it(gallery: Gallery, limit: dict[str, float], whose: str) -> None:
    if whose == "upgrade":
        ask(gallery, **limit)
    with working(gallery, width=1, limits=Limits(**limit) if whose == "worker" else UNLIMITED) as ended:
        until(lambda: done(gallery) == 10)
        time.sleep(1)
        assert done(gallery) == 10
        ask(gallery, **dict.fromkeys(limit, 0.0))
        ended.result(timeout=30)
    gallery.expect_moved()


def test_a_share_asked_for_later_does_not_count_what_went_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gallery = make(tmp_path, records=400)
    gallery.loaded_models.embedder("v2").seconds = 0.1  # type: ignore[attr-defined]
    timed, rests, wait = Timed(gallery.backfill), list[float](), Throttle.wait

    def heard(throttle: Throttle) -> float:
        rests.append(wait(throttle))
        return rests[-1]

    monkeypatch.setattr(Throttle, "wait", heard)
    with working(gallery, width=3, backfill=timed):
        until(lambda: done(gallery) >= 150)  # over a second and a half without a pause
        ask(gallery, nice=0.2)
        until(lambda: max(timed.rests, default=0.0) > 1)
    gallery.registry.close()

    slowest = max(ended - began for began, ended in timed.copies)
    longest = max(rest for rest in rests if rest < math.inf)
    assert 0 < longest < max(5, 15 * slowest)  # four times what three batches take, and a little


# --- searches, and a flag file ----------------------------------------------------------------------------------------


def slow_searches(gallery: Gallery, client: Client) -> None:
    """Report enough slow searches of that client."""
    gallery.store.before = lambda call, collection: time.sleep(SLOW if call == "search" else 0)
    with ThreadPoolExecutor(8) as pool:
        for each in [pool.submit(search, client, 3) for _ in range(8)]:
            each.result()
    gallery.store.before = lambda call, collection: None
    until(lambda: gallery.registry.slowest_client("texts", enough=ENOUGH, within=WINDOW))


def test_nothing_is_copied_while_searches_are_slow_and_it_goes_on_when_they_are_fast_again(patient: Gallery) -> None:
    ask(patient, p99_ms=CEILING_MS)
    with patient.client() as client:
        slow_searches(patient, client)
        with working(patient) as ended:
            until(lambda: f"p99 of client {client.name} is " in held_back(patient))
            assert held_back(patient).endswith(f" ms above the ceiling of {CEILING_MS:g} ms")
            time.sleep(1)
            assert done(patient) == 0
            until(lambda: search(client, 100) or ended.done(), seconds=200)
    patient.expect_moved()


def test_it_goes_on_when_the_slow_client_has_stopped_searching(patient: Gallery, monkeypatch: pytest.MonkeyPatch) -> None:
    ask(patient, p99_ms=CEILING_MS)
    with patient.client() as client:
        slow_searches(patient, client)
        with working(patient) as ended:
            until(lambda: client.name in held_back(patient))
            monkeypatch.setattr(latency, "WINDOW", 0.5)
            ended.result(timeout=20)
    patient.expect_moved()


def test_it_goes_on_when_the_slow_client_has_left(patient: Gallery) -> None:
    ask(patient, p99_ms=CEILING_MS)
    with patient.client() as client:
        slow_searches(patient, client)
        with working(patient) as ended:
            until(lambda: client.name in held_back(patient))
            client._current_plan.close()
            ended.result(timeout=20)  # well within the window in which its searches would count
    patient.expect_moved()


def test_searches_below_the_ceiling_hold_nothing_back(patient: Gallery) -> None:
    ask(patient, p99_ms=60_000)
    with patient.client() as client:
        slow_searches(patient, client)
        with working(patient) as ended:
            ended.result(timeout=20)


def test_nothing_is_begun_while_the_flag_file_exists(gallery: Gallery, tmp_path: Path) -> None:
    flag = tmp_path / "hold"
    flag.touch()
    with working(gallery, limits=Limits(flag=flag)) as ended:
        until(lambda: held_back(gallery) == f"flag file {flag} exists")
        time.sleep(1)
        assert done(gallery) == 0
        flag.unlink()
        removed = time.monotonic()
        until(lambda: done(gallery) > 0)
        assert time.monotonic() - removed < 20  # half a second on an idle machine
        ended.result(timeout=30)
    gallery.expect_moved()


def test_batches_in_hand_are_finished_and_leave_the_old_collection_while_none_begins(gallery: Gallery, tmp_path: Path) -> None:
    flag = tmp_path / "hold"
    gallery.store.before = lambda call, collection: flag.touch() if collection in gallery.task.new else None
    with working(gallery, width=1, limits=Limits(flag=flag)):
        until(lambda: BatchState.RETIRED in gallery.registry.counts(gallery.upgrade.id))
        time.sleep(1)
        counts = gallery.registry.counts(gallery.upgrade.id)
    assert counts == {BatchState.RETIRED: (1, 10), BatchState.PENDING: (3, 30)}


# --- what status says -------------------------------------------------------------------------------------------------


def test_every_limit_is_said_while_something_is_left_to_copy_and_none_afterwards(patient: Gallery) -> None:
    ask(patient, rate=15.0)
    said, heard = [], threading.Event()
    patient.store.before = lambda call, _: heard.wait(60) if call == "delete" and done(patient) == 40 else None
    with working(patient, width=1, limits=Limits(nice=0.5)) as ended:
        while not ended.done():
            said.append(now := status(patient.registry, patient.registry.gallery("texts")))
            if now.done == 40 and now.workers and not now.held_back:
                heard.set()  # before the last batch leaves the old collection
            time.sleep(0.05)
    during = {now.held_back for now in said if now.done < 30 and now.workers}

    assert during - {""} == {"throttled to 15 records/s; nice 0.5: copies at most 50 % of the time"}
    assert heard.is_set()


def test_no_reason_is_left_after_cut_over(gallery: Gallery) -> None:
    ask(gallery, rate=15.0)
    gallery.registry.pause(gallery.upgrade.id)
    gallery.registry.renew("killed", gallery.upgrade.id, lease=60, note="throttled to 15 records/s")
    before = held_back(gallery)
    ask(gallery, phase=Phase.CUT_OVER)

    assert before == "paused; to continue, run rmvdb resume; throttled to 15 records/s"
    assert held_back(gallery) == ""


def test_a_reason_that_several_workers_have_is_said_once(gallery: Gallery) -> None:
    for name, note in (("w1", "nice 0.5"), ("w2", "nice 0.5"), ("w3", "outside its window")):
        gallery.registry.renew(name, gallery.upgrade.id, lease=60, note=note)

    assert held_back(gallery) == "nice 0.5; outside its window"


def test_status_says_that_an_index_is_waited_for(gallery: Gallery, monkeypatch: pytest.MonkeyPatch) -> None:
    indexed = threading.Event()

    def settle(_: str, *, coming: int = 0, missed: bool, report: Callable[[int, int], None]) -> None:
        report(10, 40)
        assert indexed.wait(60)

    monkeypatch.setattr(FaissStore, "settles_at_once", False)
    monkeypatch.setattr(gallery.store, "settle", settle)
    with working(gallery) as ended:
        until(lambda: "waiting until texts_v2 has an index of its 40 rows; 10 have one" in held_back(gallery))
        time.sleep(3 * gallery.task.grace)  # in which every copied batch would have been retired
        assert len(gallery.held()["old"]) == 40
        indexed.set()
        ended.result(60)
    gallery.expect_moved()


def test_searches_for_copied_records_wait_for_no_clock_but_that_of_the_last_flush(
    gallery: Gallery, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed, searched, moments, search = list[int](), list[int](), itertools.count(1), FaissStore.search

    def moment(_: FaissStore) -> int:
        now = next(moments)
        if threading.current_thread().name == "rmvdb-settle":
            flushed.append(now)
        return now

    def spied(store: FaissStore, collection: str, *args: Any, **options: Any) -> Any:
        searched.append(-1 if options.get("strong") else options.get("after", 0))
        return search(store, collection, *args, **options)

    monkeypatch.setattr(FaissStore, "settles_at_once", False)
    monkeypatch.setattr(FaissStore, "moment", moment)
    monkeypatch.setattr(FaissStore, "search", spied)
    with working(gallery) as ended:
        ended.result(60)

    assert set(searched) & set(flushed)
    assert set(searched) <= {0, *flushed}  # one with a filter by key asks for no moment, as applications do
    gallery.expect_moved()


def test_workers_do_not_wait_for_the_process_that_makes_the_work_list(gallery: Gallery) -> None:
    before = held_back(gallery)
    leader_token = gallery.registry.lead(gallery.upgrade.id, "w1", 60)
    conducted = held_back(gallery)
    assert leader_token is not None
    gallery.registry.keep_leading(gallery.upgrade.id, leader_token, 0)

    assert before == held_back(gallery) == "waiting for a worker: run rmvdb worker or rmvdb upgrade"
    assert conducted == ""


# --- back-pressure ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slow", ["embedder", "store"])
def test_a_slow_embedder_or_store_holds_up_the_work_not_the_memory(tmp_path: Path, slow: str) -> None:
    width, batch = 3, 20
    gallery = make(tmp_path, records=30 * batch, batch=batch)
    if slow == "embedder":
        gallery.loaded_models.embedder("v2").seconds = 0.05  # type: ignore[attr-defined]
    else:
        gallery.store.before = lambda call, collection: time.sleep(0.05 if collection in gallery.task.new else 0)
    begun, living, before = [], [], records_in_memory()
    with working(gallery, width=width) as ended:
        while not ended.done():
            begun.append(in_hand(gallery))
            living.append(records_in_memory() - before)
            time.sleep(0.1)  # its heartbeat needs a share of this process, too
    gallery.registry.close()

    # Of a batch in hand there are the old records and the new ones, or the two readings that are compared.
    assert 1 < max(begun) <= width
    assert batch <= max(living) <= 2 * width * batch


def records_in_memory() -> int:
    """Return how many there are in this process, those of other tests included."""
    gc.collect()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(
        60.0
    )  # no other thread runs meanwhile: Python fails at a tuple that it is making and this list refers to
    try:
        time.sleep(0.01)  # who waits already does so by the interval before
        return sum(type(each) is Record for each in gc.get_objects())
    finally:
        sys.setswitchinterval(interval)


def in_hand(gallery: Gallery) -> int:
    """Return the batches that a worker holds to copy them."""
    rows = gallery.registry.batches(gallery.upgrade.id)  # at one moment: a batch is in one state of them
    return sum(row.worker is not None and row.state in (BatchState.CLAIMED, BatchState.WRITING) for row in rows)


def test_a_worker_that_was_suspended_in_a_batch_does_not_rest_for_many_times_that(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("rmvdb.backfill.throttle.time.monotonic", lambda: now[0])
    throttle = Throttle(Limits(nice=0.1), width=1)
    throttle.begin(10)
    now[0] += 8 * 3600
    throttle.end()
    assert 0 < throttle.wait() <= 9 * 60


def test_a_worker_with_other_galleries_leaves_one_that_a_limit_holds_back(
    gallery: Gallery, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("rmvdb.backfill.worker.HELD", 0.5)
    (tmp_path / "hold").touch()
    worker = gallery.worker(limits=Limits(flag=str(tmp_path / "hold")))
    worker.patient = False
    began = time.monotonic()
    gallery.conductor().advance(gallery.registry.upgrade(gallery.upgrade.id), worker)
    assert time.monotonic() - began < 20
    assert len(gallery.held()["old"]) == 40

    (tmp_path / "hold").unlink()
    gallery.conductor().advance(gallery.registry.upgrade(gallery.upgrade.id), worker)
    assert gallery.registry.upgrade(gallery.upgrade.id).phase == Phase.CUT_OVER
