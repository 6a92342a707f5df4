"""Each batch moves its records once, whatever is written, deleted or killed meanwhile."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from sqlalchemy import text as statement

from rmvdb import errors
from rmvdb.registry.codec import unpack_ids
from rmvdb.serving.loaded_models import Chain, LoadedModels
from rmvdb.timing import uptime
from rmvdb.types import BatchState, Item, Vectors
from tests.support.inprocess import DIMS, Crash, Gallery, TextEmbedder, die_and_drive_again, drive, make, vector
from tests.support.waiting import run_out


def test_every_record_is_moved_and_the_old_collection_is_empty(gallery: Gallery) -> None:
    drive(gallery)
    gallery.expect_moved()
    assert {record.fields["n"] for record in gallery.held()["new"].values()} == {0}


@pytest.mark.parametrize("number", range(1, 13))
def test_a_worker_that_dies_before_any_write_leaves_a_state_that_a_rerun_completes(gallery: Gallery, number: int) -> None:
    die_and_drive_again(gallery, number)


def test_a_rerun_after_a_crash_in_mid_removal_takes_nothing_out_of_the_new_collection(gallery: Gallery) -> None:
    removed = []

    def before(call: str, collection: str) -> None:
        # The removal reaches the engine, and then the worker dies before it can say so.
        if call == "delete" and collection in gallery.task.old and not removed:
            removed.append(True)
            gallery.store.before = lambda call, collection: None
            row = gallery.registry.batches(gallery.upgrade.id, state=BatchState.REMOVING)[0]
            gallery.store.delete(collection, unpack_ids(row.remove))
            raise Crash

    gallery.store.before = before
    with pytest.raises(Crash):
        drive(gallery)
    drive(gallery)
    gallery.expect_moved()


def test_a_write_between_read_and_copy_is_not_overwritten(gallery: Gallery) -> None:
    with gallery.client() as client:

        def before(call: str, collection: str) -> None:
            if collection in gallery.task.new and 3 in gallery.in_state(BatchState.WRITING):  # the client must wait
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
            if collection in gallery.task.old and 12 in gallery.in_state(BatchState.COPIED):
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


def test_a_record_that_another_program_changes_before_the_comparison_is_moved_again(gallery: Gallery) -> None:
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


def test_an_item_that_changes_just_before_its_record_is_written_is_not_a_difference(gallery: Gallery) -> None:
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


def test_an_item_that_broke_after_it_was_embedded_is_not_compared(gallery: Gallery) -> None:
    drive(gallery)
    gallery.source.of[3] = "broken"
    report = gallery.verify()
    assert report.examples == []
    assert report.embedded_again == len(gallery.source.of) - 1
