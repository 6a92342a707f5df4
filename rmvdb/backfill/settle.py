"""Until when searches find the copied records."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from rmvdb.backfill.batches import Backfill
from rmvdb.backfill.task import Task


class Settled:
    """The time before which searches find every copied record. One flush, beside the copying, serves all batches copied by then.

    `pause`: the fewest seconds between two flushes. `waiting`: whether a batch waits for one.
    """

    def __init__(self, task: Task, backfill: Backfill, *, pause: float, waiting: Callable[[], bool]) -> None:
        self._task, self._backfill, self._pause, self._waiting = task, backfill, pause, waiting
        self._thread: threading.Thread | None = None
        self._begun, self._error = float("-inf"), list[BaseException]()
        #: By the registry's clock; None if the engine needs no flush.
        self._until: float | None = None if backfill.settles_at_once else 0.0
        #: The things it waits for, in words.
        self.reasons: list[str] = []

    def until(self) -> float | None:
        """Return the time, and begin another flush if batches wait for one. Raises what the last flush raised."""
        if self._error:
            raise self._error.pop()
        running = self._thread is not None and self._thread.is_alive()
        since = time.monotonic() - self._begun
        if self._until is not None and not running and since > self._pause and self._waiting():
            self._begun = time.monotonic()
            # The end does not wait for it: a flush is the engine's work and changes no record.
            self._thread = threading.Thread(target=self._settle, name="rmvdb-settle", daemon=True)
            self._thread.start()
        return self._until

    def _settle(self) -> None:
        try:
            self._until = self._backfill.settle(self._task, self._hear)
        except BaseException as exc:  # noqa: BLE001 (it is raised where the batches are driven)
            self._error.append(exc)
        self.reasons = []

    def _hear(self, collection: str, indexed: int, rows: int) -> None:
        self.reasons = [f"waiting until {collection} has an index of its {rows} rows; {indexed} have one"]
