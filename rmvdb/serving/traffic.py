"""What real searches find: counted by clients, for the backfill order that puts it first."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence

from rmvdb.types import Hit, Id

#: The name of the order.
TRAFFIC = "traffic"
#: Of one leg's answer to one query so many hits count: what lies further down is hardly ever shown.
CANDIDATES = 100
#: Seconds for which a client counts before it tells the registry.
PERIOD = 60.0


class TrafficCounter:
    """How often one client's searches found each record. Safe to share between threads."""

    def __init__(self, most: int) -> None:
        """It remembers at most so many records: whenever there are more, the rarer half is forgotten. 0 counts nothing."""
        self._most = most
        self._found: Counter[Id] = Counter()
        self._since = time.monotonic()
        self._lock = threading.Lock()

    def count(self, answers: Iterable[Sequence[Hit]]) -> None:
        """Count the candidates of a search, a list of each leg and query."""
        if not self._most:
            return
        ids = [hit.id for hits in answers for hit in hits[:CANDIDATES]]
        with self._lock:
            self._found.update(ids)
            if len(self._found) > self._most:
                kept = sorted(self._found, key=self._found.__getitem__)[len(self._found) - self._most // 2 :]
                self._found = Counter({id: self._found[id] for id in kept})

    def due(self) -> dict[Id, int]:
        """What `take` gives, where a period is over, and nothing before."""
        return self.take() if time.monotonic() - self._since >= PERIOD else {}

    def take(self) -> dict[Id, int]:
        """How often each record was found since the last time, which begins anew."""
        with self._lock:
            found, self._found, self._since = self._found, Counter(), time.monotonic()
        return dict(found)
