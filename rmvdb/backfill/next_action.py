"""What a worker does next: decided from how far the upgrade is, what is asked of it, and what the worker has in hand."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

from rmvdb.registry.tables import UpgradeRow
from rmvdb.types import BatchState, Phase, Progress


class Action(StrEnum):
    """What a worker does next."""

    #: Ask for another batch.
    CLAIM = "claim"
    #: Look again a little later.
    WAIT = "wait"
    #: End the run.
    STOP = "stop"


@dataclass(frozen=True, kw_only=True, slots=True)
class Wish:
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
        """Return whether records are left to copy that nothing has begun: then what holds copying back is worth telling."""
        return min(progress.left, self.until * progress.total - progress.done) > progress.begun


def next_action(
    progress: Progress,
    row: UpgradeRow,
    in_hand: int,
    wish: Wish,
    *,
    stopping: bool = False,
    states: Collection[BatchState] | None = None,
) -> Action:
    """Decide by the first line that fits.

    `states`: the states of the upgrade's batches, read after a claim that gave nothing; None before such a claim.

    | in hand | stopping | claimed in vain | upgrade ended | batches to work on | action |
    |---|---|---|---|---|---|
    | fewer than width | no | no | | | CLAIM |
    | some | | | | | WAIT |
    | none | yes | | | | STOP |
    | none | no | yes | yes | | STOP |
    | none | no | yes | no | none | STOP |
    | none | no | yes | no | some | WAIT |

    Batches to work on are all that are not retired. A worker that copies nothing more leaves pending ones to others: the share
    is reached, or the upgrade is paused and the worker is not patient.
    """
    if not stopping and in_hand < wish.width and states is None:
        return Action.CLAIM
    if in_hand:
        return Action.WAIT
    if stopping or row.phase == Phase.ENDED:
        return Action.STOP
    copies = wish.wants_more(progress) and (wish.patient or not row.paused)
    done = {BatchState.RETIRED} if copies else {BatchState.RETIRED, BatchState.PENDING}
    return Action.WAIT if set(states or ()) - done else Action.STOP
