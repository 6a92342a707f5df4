"""How long searches take, as their callers see it."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

#: Seconds for which a search counts.
WINDOW = 30.0
#: The fewest searches for a p99. If fewer ended in the window, older ones count, too: very slow searches are few.
ENOUGH = 20
#: The most searches that are remembered. If more ended in the window, the last ones count.
REMEMBERED = 10_000


class Latency:
    """The wall times of one client's latest searches. Safe to share between threads."""

    def __init__(self) -> None:
        #: When each ended, and its milliseconds.
        self._searches: deque[tuple[float, float]] = deque(maxlen=REMEMBERED)
        self._lock = threading.Lock()

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Count the block as one search, even if it fails: its caller waited, too."""
        began = time.monotonic()
        try:
            yield
        finally:
            ended = time.monotonic()
            with self._lock:
                self._searches.append((ended, 1000 * (ended - began)))

    def p99(self) -> tuple[int, float]:
        """Return how many searches count, and the milliseconds in which 99 % of them ended. 0 and 0.0 after a silent window."""
        with self._lock:
            self._forget(before=time.monotonic() - WINDOW)
            took = [milliseconds for _, milliseconds in self._searches]
        return len(took), sorted(took)[math.ceil(0.99 * len(took)) - 1] if took else 0.0

    def _forget(self, *, before: float) -> None:
        if self._searches and self._searches[-1][0] < before:
            self._searches.clear()
        while len(self._searches) > ENOUGH and self._searches[0][0] < before:
            self._searches.popleft()
