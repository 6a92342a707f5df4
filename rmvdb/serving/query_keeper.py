"""Keeps a sample of the queries that a client is asked. No search waits for it, and none fails by it."""

from __future__ import annotations

import heapq
import itertools
import logging
import random
import threading
from collections.abc import Sequence

from rmvdb import errors
from rmvdb.registry.codec import item_to_row
from rmvdb.registry.kept_queries import AskedQuery
from rmvdb.registry.registry import Registry
from rmvdb.registry.waiting import within
from rmvdb.timing import uptime
from rmvdb.types import Item

log = logging.getLogger(__name__)
#: An application may have seeded the shared generator, and forked children share the state of any other.
_random = random.SystemRandom()

#: Seconds between two writes, and the fewest seconds between two if many queries wait.
EVERY, APART = 60.0, 1.0
#: The most queries that a client holds, and the most bytes. If more come, those of the largest priorities go.
HELD, HELD_BYTES = 500, 4 * 1024 * 1024
#: Seconds after which a client without anything to write asks what the registry keeps: its queries may be cleared, or too old.
REFRESH = 600.0
#: Seconds that one write may take.
KEEP_LASTS = 3.0


class QueryKeeper:
    """Holds some queries in memory, and writes them to the registry in the background. Safe to share between threads.

    While the registry is away, it keeps the queries in memory, up to its bound. Others are lost.
    """

    def __init__(self, gallery: str, *, registry: Registry, most: int, days: float, draws: random.Random = _random) -> None:
        """`most`, `days`: how many queries of the gallery the registry keeps, and for how long. `draws`: gives the priorities."""
        self._gallery, self._registry, self._most, self._days, self._draws = gallery, registry, most, days, draws
        #: The priority from which on the registry keeps no query, and when it said so.
        self._bar, self._asked = 1.0, uptime()
        #: Each as its negative priority, a number that makes ties comparable, when it was asked, its kind and its bytes.
        self._held: list[tuple[float, int, float, str, bytes]] = []
        self._bytes, self._numbers = 0, itertools.count()
        self._lock = threading.Lock()
        self._stop, self._wake = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._keep_writing, name=f"rmvdb-queries-{gallery}", daemon=True)
        self._thread.start()

    def offer(self, items: Sequence[Item]) -> None:
        """Consider the items of an answered search. An item that a row cannot hold is not kept."""
        for item in items:
            priority = self._draws.random()
            if priority >= self._bar:
                continue
            if (row := _row(item)) is not None:
                with self._lock:
                    self._hold((-priority, next(self._numbers), uptime(), *row))
        if len(self._held) >= HELD // 2:
            self._wake.set()

    def close(self) -> None:
        """Write the waiting queries, and end. If the registry is away, this gives up soon."""
        self._stop.set()
        self._wake.set()
        self._thread.join(timeout=2 * KEEP_LASTS)

    def _hold(self, query: tuple[float, int, float, str, bytes]) -> None:
        heapq.heappush(self._held, query)
        self._bytes += len(query[-1])
        while len(self._held) > HELD or self._bytes > HELD_BYTES:
            self._bytes -= len(heapq.heappop(self._held)[-1])

    def _keep_writing(self) -> None:
        while not self._stop.is_set():
            self._wake.wait(EVERY)
            self._wake.clear()
            self._write()
            self._stop.wait(APART)
        self._write()

    def _write(self) -> None:
        with self._lock:
            taken, self._held, self._bytes = self._held, [], 0
        if not taken and uptime() - self._asked < REFRESH:
            return
        now = uptime()
        asked = [AskedQuery(priority=-low, kind=kind, payload=data, age=now - at) for low, _, at, kind, data in taken]
        try:
            with within(KEEP_LASTS):
                self._bar = self._registry.keep_queries(self._gallery, asked, most=self._most, days=self._days)
            self._asked = uptime()
        except errors.RegistryUnavailable:
            with self._lock:
                for query in taken:
                    self._hold(query)
        except Exception as exc:  # noqa: BLE001 (later ones may be kept)
            # Log its class alone: the message may hold a query.
            log.info("The queries of %s could not be kept: %s", self._gallery, type(exc).__name__, extra={"action": "keep"})
        self._registry.let_go()


def _row(item: Item) -> tuple[str, bytes] | None:
    try:
        return item_to_row(item)
    except Exception:  # noqa: BLE001 (an item is any object of the application, and its search is answered)
        return None
