"""A conductor is killed, and two conductors do the same work."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from rmvdb.registry.codec import unpack_ids
from rmvdb.types import BatchState, Phase, Record
from rmvdb.upgrade import complete
from tests.support.faults import drive, dying, once, roll_back
from tests.support.inprocess import Gallery, vector


def test_an_option_that_changes_during_the_backfill_counts(gallery: Gallery) -> None:
    def later() -> None:
        row = gallery.registry.upgrade(gallery.upgrade.id)
        gallery.registry.set_upgrade(row.id, plan=replace(row.plan, cutover=False))

    gallery.store.before = once("upsert", gallery.task.new[0], later)
    row = gallery.conductor().advance(gallery.upgrade, gallery.worker())
    assert row.phase == Phase.SERVING_BOTH
    gallery.expect_moved()


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
