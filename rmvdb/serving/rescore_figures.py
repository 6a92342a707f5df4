"""How much one client's searches were rescored, and how long that took."""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque

#: Seconds for which a search counts, and the most that are remembered.
WINDOW, REMEMBERED = 30.0, 10_000


class RescoreFigures:
    """The latest figures of rescoring. Safe to share between threads."""

    def __init__(self) -> None:
        #: When each search ended, its queries and its milliseconds.
        self._searches: deque[tuple[float, int, float]] = deque(maxlen=REMEMBERED)
        #: When items were embedded or found, and how many.
        self._embedded: deque[tuple[float, int]] = deque(maxlen=REMEMBERED)
        self._cached: deque[tuple[float, int]] = deque(maxlen=REMEMBERED)
        self._lock = threading.Lock()

    def searched(self, *, queries: int, seconds: float) -> None:
        """Count one search of so many queries, and the seconds that rescoring added to it."""
        with self._lock:
            self._searches.append((time.monotonic(), queries, 1000 * seconds))

    def embedded(self, items: int) -> None:
        """Count items that were embedded."""
        with self._lock:
            self._embedded.append((time.monotonic(), items))

    def cached(self, items: int) -> None:
        """Count items whose vectors were kept from an earlier search."""
        with self._lock:
            self._cached.append((time.monotonic(), items))

    def latest(self) -> dict[str, float] | None:
        """Return the counts of the window, and the median of the milliseconds; None if no search was rescored."""
        with self._lock:
            for each in (self._searches, self._embedded, self._cached):
                while each and each[0][0] < time.monotonic() - WINDOW:
                    each.popleft()
            if not self._searches:
                return None
            return {
                "searches": len(self._searches),
                "queries": sum(queries for _, queries, _ in self._searches),
                "embedded": sum(items for _, items in self._embedded),
                "cached": sum(items for _, items in self._cached),
                "p50_ms": round(statistics.median(ms for _, _, ms in self._searches), 3),
            }
