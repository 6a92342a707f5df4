"""Counts of the records that searches find, for the backfill order `traffic`, which moves those first."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence

from rmvdb.types import Hit, Id

#: The name of the order.
TRAFFIC = "traffic"
#: Hits that count of one leg's answer to one query. Applications hardly ever show those further down.
CANDIDATES = 100
#: Seconds between two reports of a client to the registry.
PERIOD = 60.0


class TrafficCounter:
    """How often one client's searches found each record. Safe to share between threads."""

    def __init__(self, most: int) -> None:
        """Count at most `most` records. If there are more, forget the rarer half. 0 counts nothing."""
        self._most = most
        self._counts: Counter[Id] = Counter()
        self._since = time.monotonic()
        self._lock = threading.Lock()

    def count(self, answers: Iterable[Sequence[Hit]]) -> None:
        """Count the candidates of a search: one list for each leg and query."""
        if not self._most:
            return
        ids = [hit.id for hits in answers for hit in hits[:CANDIDATES]]
        with self._lock:
            self._counts.update(ids)
            if len(self._counts) > self._most:
                frequent = sorted(self._counts, key=self._counts.__getitem__)[len(self._counts) - self._most // 2 :]
                self._counts = Counter({id: self._counts[id] for id in frequent})

    def due(self) -> dict[Id, int]:
        """Return the counts as `take` does, if a period is over, else nothing."""
        return self.take() if time.monotonic() - self._since >= PERIOD else {}

    def take(self) -> dict[Id, int]:
        """Return how often each record was found since the last call. Start counting again."""
        with self._lock:
            counts, self._counts, self._since = self._counts, Counter(), time.monotonic()
        return dict(counts)
