"""A worker's next action, line by line of its table."""

from __future__ import annotations

import pytest

from rmvdb.backfill.next_action import Action, Goal, next_action
from rmvdb.registry.tables import UpgradeRow
from rmvdb.types import BatchState, Phase, Progress

CLAIM, WAIT, STOP = Action.CLAIM, Action.WAIT, Action.STOP
PENDING, COPIED, RETIRED = BatchState.PENDING, BatchState.COPIED, BatchState.RETIRED
#: 100 records: 40 are copied, 20 are being copied.
MIDWAY = Progress(done=40, total=100, begun=20)
SERVING, ENDED = UpgradeRow(phase=Phase.SERVING_BOTH, paused=False), UpgradeRow(phase=Phase.ENDED, paused=False)
PAUSED = UpgradeRow(phase=Phase.SERVING_BOTH, paused=True)
TO_THE_END, PATIENT = Goal(until=1.0, width=2, patient=False), Goal(until=1.0, width=2, patient=True)


@pytest.mark.parametrize(
    ("row", "in_hand", "goal", "stopping", "states", "action"),
    [
        # fewer than width, and no claim in vain yet
        (SERVING, 0, TO_THE_END, False, None, CLAIM),
        (SERVING, 1, TO_THE_END, False, None, CLAIM),
        (PAUSED, 1, TO_THE_END, False, None, CLAIM),  # a copied batch is retired in a pause, too
        (ENDED, 0, TO_THE_END, False, None, CLAIM),
        # some in hand
        (SERVING, 2, TO_THE_END, False, None, WAIT),
        (SERVING, 2, TO_THE_END, True, None, WAIT),
        (SERVING, 1, TO_THE_END, True, None, WAIT),
        (SERVING, 1, TO_THE_END, False, {PENDING}, WAIT),
        # none in hand, and told to stop, or the upgrade has ended
        (SERVING, 0, TO_THE_END, True, None, STOP),
        (SERVING, 0, TO_THE_END, True, {PENDING}, STOP),
        (ENDED, 0, TO_THE_END, False, {PENDING, COPIED}, STOP),
        # a claim in vain
        (SERVING, 0, TO_THE_END, False, {RETIRED}, STOP),
        (SERVING, 0, TO_THE_END, False, set(), STOP),
        (SERVING, 0, TO_THE_END, False, {RETIRED, PENDING}, WAIT),
        (SERVING, 0, TO_THE_END, False, {RETIRED, COPIED}, WAIT),
        # a pause
        (PAUSED, 0, TO_THE_END, False, {PENDING}, STOP),
        (PAUSED, 0, PATIENT, False, {PENDING}, WAIT),
        (PAUSED, 0, TO_THE_END, False, {COPIED}, WAIT),
        # a share: 60 of 100 are copied or begun
        (SERVING, 0, Goal(until=0.6, width=2, patient=True), False, {PENDING}, STOP),
        (SERVING, 0, Goal(until=0.6, width=2, patient=True), False, {PENDING, COPIED}, WAIT),
        (SERVING, 0, Goal(until=0.61, width=2, patient=True), False, {PENDING}, WAIT),
    ],
)
def test_a_worker_does_this_next(
    row: UpgradeRow, in_hand: int, goal: Goal, stopping: bool, states: set[BatchState] | None, action: Action
) -> None:
    assert next_action(MIDWAY, row, in_hand, goal, stopping=stopping, states=states) is action


@pytest.mark.parametrize(
    ("progress", "until", "more", "short"),
    [
        (MIDWAY, 1.0, True, True),
        (Progress(done=40, total=100, begun=60), 1.0, True, False),  # a batch may come back
        (Progress(done=40, total=100, begun=50, quarantined=10), 1.0, True, False),
        (MIDWAY, 0.6, False, False),
        (MIDWAY, 0.7, True, True),
        (Progress(done=0, total=0), 0.5, False, False),
    ],
)
def test_a_worker_wants_more_until_its_share_is_done_or_begun(progress: Progress, until: float, more: bool, short: bool) -> None:
    goal = Goal(until=until, width=2, patient=False)
    assert goal.wants_more(progress) is more
    assert goal.is_short(progress) is short
