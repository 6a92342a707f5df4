"""Another program changes or deletes records while rmvdb moves them."""

from __future__ import annotations

import time
from typing import Any

import pytest

from rmvdb.protocols import always
from rmvdb.registry.tables import BatchRow
from rmvdb.types import BatchState, Phase, Record
from rmvdb.upgrade import complete
from tests.support.faults import claimed, copied, decided, drive, dying, remove
from tests.support.inprocess import Gallery, vector
from tests.support.waiting import run_out


def test_a_record_that_was_deleted_between_two_killed_tries_does_not_come_back(
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


def test_a_record_that_was_changed_and_then_deleted_does_not_come_back(gallery: Gallery) -> None:
    copied(gallery)
    gallery.store.upsert(gallery.task.old[0], [Record(id=3, vector=vector("v1", "changed"), fields={"n": 7})])
    gallery.backfill.retire(gallery.task, claimed(gallery), always)
    remove(gallery, 3)
    drive(gallery)
    gallery.expect_moved()


def test_a_record_that_was_deleted_during_a_write_that_was_never_made_does_not_come_back(
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


def test_a_record_that_another_program_changes_while_a_removal_waits_for_the_next_worker_is_moved_again(gallery: Gallery) -> None:
    """Its worker died after it had decided; the record lies where it always was, for hours perhaps."""
    decided(gallery)
    gallery.store.upsert(gallery.task.old[0], [Record(id=3, vector=vector("v1", "t3"), fields={"n": 7})])
    gallery.store.delete(gallery.task.old[0], [4])  # as the first worker may have
    time.sleep(0.7)
    drive(gallery)
    assert gallery.held()["new"][3].fields == {"n": 7}
    gallery.expect_moved()
    assert gallery.verify().ok


def test_a_record_that_another_program_put_back_and_deleted_again_is_not_a_difference(gallery: Gallery) -> None:
    drive(gallery)
    gallery.store.upsert(gallery.task.old[0], [Record(id=3, vector=vector("v1", "t3"), fields={"n": 7})])
    complete._list_late(gallery.conductor(), gallery.upgrade, gallery.task.old[0])
    copied(gallery)
    remove(gallery, 3)
    row = gallery.conductor().advance(gallery.registry.upgrade(gallery.upgrade.id), gallery.worker())
    assert row.phase == Phase.CUT_OVER
    gallery.expect_moved()


def test_nan_does_not_differ_from_itself(gallery: Gallery) -> None:
    """Else its record would be moved again for ever."""
    another = Record(id=3, vector=vector("v1", "t3"), fields={"n": float("nan")})
    gallery.store.upsert(gallery.task.old[0], [another], as_read=True)  # by another program: rmvdb writes none
    drive(gallery)
    assert len(gallery.registry.batches(gallery.upgrade.id)) == 1
    assert gallery.verify().ok
