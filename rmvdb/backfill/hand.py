"""The batches that a worker has in hand, and for which half of the work it has room."""

from __future__ import annotations

import time
from collections.abc import Collection
from concurrent.futures import FIRST_COMPLETED, Future, wait

from rmvdb.registry.tables import BatchRow
from rmvdb.types import BatchState

#: Seconds between two looks at the upgrade: pause, limits, progress.
LOOK = 0.5
#: Seconds between the first two looks for a batch; twice as long after each look that gave none.
IDLE = 0.05
#: The states of a batch that is copied next, and of one that is retired next.
HALVES = (BatchState.CLAIMED, BatchState.COPIED)


def half_of(claimed: BatchRow) -> BatchState:
    """Return the half that a claimed batch is in: *claimed* is copied, *copied* or *removing* is retired."""
    return BatchState.CLAIMED if claimed.state == BatchState.CLAIMED else BatchState.COPIED


class Hand:
    """The batches in hand, `width` at the most, which bounds the memory. One place stays free for each half of the work, copying
    and retiring, so that neither waits until the other has ended.
    """

    def __init__(self, width: int) -> None:
        self._width = width
        self._at_work: dict[Future[None], BatchState] = {}
        #: For each half: when to look for a batch again, and how long to wait if that look gives none.
        self._until, self._pause = dict.fromkeys(HALVES, float("-inf")), dict.fromkeys(HALVES, IDLE)

    def __len__(self) -> int:
        return len(self._at_work)

    def room(self) -> set[BatchState]:
        """Return the halves that it has room for, except for those that had no batch a moment ago."""
        now = time.monotonic()
        return {half for half in self._free() if self._until[half] <= now}

    def note(self, room: Collection[BatchState], *, vain: bool) -> None:
        """Note a look for batches of these halves."""
        for half in room:
            self._until[half] = time.monotonic() + self._pause[half] if vain else float("-inf")
            self._pause[half] = min(2 * self._pause[half], LOOK) if vain else IDLE

    @property
    def idle(self) -> float:
        """The seconds until the next look is due, unless a batch ends before."""
        now = time.monotonic()
        return max(0.0, min((self._until[half] - now for half in self._free()), default=LOOK))

    def take(self, work: Future[None], half: BatchState) -> None:
        """Take a batch into hand."""
        self._at_work[work] = half

    def reap(self, *, patience: float) -> None:
        """Take out the batches that have ended, after so many seconds at most. Raise the error of one that failed."""
        done = wait(self._at_work, timeout=patience, return_when=FIRST_COMPLETED).done if self._at_work else set()
        for each in done:
            del self._at_work[each]
            each.result()

    def _free(self) -> list[BatchState]:
        halves = list(self._at_work.values())
        most = max(1, self._width - 1)
        return [half for half in HALVES if len(halves) < self._width and halves.count(half) < most]
