"""The batches in hand: copying and retiring do not wait for each other, and a look in vain is not repeated at once."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from rmvdb.backfill import hand
from rmvdb.backfill.hand import HALVES, Hand
from rmvdb.types import BatchState

COPIES, RETIRES = BatchState.CLAIMED, BatchState.COPIED


def taken(*halves: BatchState) -> tuple[Hand, list[Future[None]]]:
    """A hand of width three that holds batches of these halves."""
    held, work = Hand(3), [Future[None]() for _ in halves]
    for each, half in zip(work, halves, strict=True):
        held.take(each, half)
    return held, work


def test_each_half_of_the_work_leaves_a_place_for_the_other_and_all_together_keep_to_the_width() -> None:
    assert Hand(3).room() == set(HALVES)
    assert taken(COPIES, COPIES)[0].room() == {RETIRES}
    assert taken(RETIRES, RETIRES)[0].room() == {COPIES}
    assert taken(COPIES, RETIRES)[0].room() == set(HALVES)
    assert taken(COPIES, COPIES, RETIRES)[0].room() == set()


def test_a_single_place_serves_both_halves() -> None:
    held = Hand(1)
    assert held.room() == set(HALVES)
    held.take(Future[None](), COPIES)
    assert held.room() == set()


def test_a_batch_that_has_ended_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    held, work = taken(COPIES, COPIES)
    work[0].set_result(None)
    held.reap(patience=0.0)
    assert (len(held), held.room()) == (1, set(HALVES))


def test_the_error_of_a_batch_is_raised() -> None:
    held, work = taken(COPIES)
    work[0].set_exception(ValueError("this one"))
    with pytest.raises(ValueError, match="this one"):
        held.reap(patience=0.0)


def test_after_a_look_in_vain_only_the_other_half_is_looked_for_and_each_pause_is_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    held, now = Hand(2), [100.0]
    monkeypatch.setattr(hand.time, "monotonic", lambda: now[0])
    held.note({RETIRES}, vain=True)
    assert held.room() == {COPIES}
    assert held.idle == 0.0
    held.note({COPIES}, vain=True)
    assert held.room() == set()
    assert held.idle == pytest.approx(hand.IDLE)
    now[0] += hand.IDLE
    held.note({RETIRES}, vain=True)
    now[0] += hand.IDLE
    assert held.room() == {COPIES}
    now[0] += hand.IDLE
    assert held.room() == set(HALVES)
    held.note(set(HALVES), vain=False)
    held.note({RETIRES}, vain=True)
    assert held.idle == 0.0  # for the other half
