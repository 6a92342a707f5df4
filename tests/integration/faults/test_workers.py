"""A worker is killed, suspended, or hears an answer too late."""

from __future__ import annotations

import threading
import time
from typing import Any, NoReturn

import pytest

from rmvdb import errors
from rmvdb.backfill.hand import Hand
from rmvdb.engines.faiss import FaissStore
from rmvdb.protocols import always
from rmvdb.registry.claims import Claim
from rmvdb.registry.tables import BatchRow
from rmvdb.timing import uptime
from rmvdb.types import BatchState, Phase
from tests.support.faults import claimed, copied, drive, once, remove
from tests.support.inprocess import Gallery
from tests.support.waiting import run_out


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


@pytest.mark.parametrize("fields", [{"n": 1}, {}])
def test_a_delayed_call_that_overwrote_a_write_is_found_before_the_cut_over(
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


def test_a_worker_that_stops_waits_for_its_batches_and_does_not_spin(gallery: Gallery, monkeypatch: pytest.MonkeyPatch) -> None:
    stop, rounds, real = threading.Event(), list[float](), Hand.reap

    def slow() -> None:
        stop.set()
        time.sleep(1.0)

    def reap(self: Hand, *, patience: float) -> None:
        rounds.append(patience)
        real(self, patience=patience)

    monkeypatch.setattr(Hand, "reap", reap)
    gallery.store.before = once("upsert", gallery.task.new[0], slow)
    gallery.worker(width=3).run(gallery.task, gallery.backfill, stop=stop)
    assert len(rounds) < 60, len(rounds)
