"""The next action of a worker, decided from the progress of the upgrade, its settings, and the worker's batches in hand."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

from rmvdb.registry.tables import UpgradeRow
from rmvdb.types import BatchState, Phase, Progress


class Action(StrEnum):
    """The next action of a worker."""

    #: Ask for another batch.
    CLAIM = "claim"
    #: Look again a little later.
    WAIT = "wait"
    #: End the run.
    STOP = "stop"


@dataclass(frozen=True, kw_only=True, slots=True)
class Goal:
    """How far a worker is to work, and with how many batches at once."""

    #: The share of the work list to copy; from 1 on, the run goes to the end.
    until: float
    #: The most batches in hand.
    width: int
    #: Whether to stay with an upgrade that is paused.
    patient: bool

    def wants_more(self, progress: Progress) -> bool:
        """Return whether more batches are to be copied than are done or begun.

        To the end means to the end: a batch may come back when all seem copied.
        """
        return self.until >= 1.0 or progress.done + progress.begun < self.until * progress.total

    def is_short(self, progress: Progress) -> bool:
        """Return whether records are left to copy that nothing has begun: then `status` shows what holds copying back."""
        return min(progress.left, self.until * progress.total - progress.done) > progress.begun


def next_action(
    progress: Progress,
    row: UpgradeRow,
    in_hand: int,
    goal: Goal,
    *,
    stopping: bool = False,
    states: Collection[BatchState] | None = None,
    held: bool = False,
) -> Action:
    """Decide by the first line that fits.

    `states`: the states of the upgrade's batches, read after a claim that gave nothing; None before such a claim. `held`: a limit
    has let no batch begin for long.

    | in hand | stopping | claimed in vain | upgrade ended | batches to work on | action |
    |---|---|---|---|---|---|
    | fewer than width | no | no | | | CLAIM |
    | some | | | | | WAIT |
    | none | yes | | | | STOP |
    | none | no | yes | yes | | STOP |
    | none | no | yes | no | none | STOP |
    | none | no | yes | no | some | WAIT |

    Batches to work on are those not retired. Pending ones do not count if the share is reached, or if the upgrade is paused or
    held and the worker is not patient: others wait for it.
    """
    if not stopping and in_hand < goal.width and states is None:
        return Action.CLAIM
    if in_hand:
        return Action.WAIT
    if stopping or row.phase == Phase.ENDED:
        return Action.STOP
    copies = goal.wants_more(progress) and (goal.patient or not (row.paused or held))
    done = {BatchState.RETIRED} if copies else {BatchState.RETIRED, BatchState.PENDING}
    return Action.WAIT if set(states or ()) - done else Action.STOP
