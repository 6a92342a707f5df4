"""The limits of a worker's copying. They hold back the beginning of a batch only: batches in hand, and retiring, go on."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from rmvdb.registry.tables import ClientRow, UpgradeRow

#: The most seconds of a burst that count for `nice`: a process may have been suspended in it, or have waited for an engine.
LONGEST_BURST = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """How gently one worker copies; None and 0 mean without a limit."""

    #: The most records a second.
    rate: float | None = None
    #: The share of its wall time, 0 to 1, during which it copies.
    nice: float | None = None
    #: Milliseconds. While the p99 of a client's searches is above, it begins no batch.
    p99_ms: float | None = None
    #: While this file exists, it begins no batch.
    flag: Path | None = None

    def changed_by(self, asked: UpgradeRow) -> Limits:
        """Return these limits, replaced by those that the upgrade sets."""
        own = {name: getattr(asked, name) for name in ("rate", "nice", "p99_ms")}
        return replace(self, **{name: value for name, value in own.items() if value is not None})

    @property
    def words(self) -> list[str]:
        """The limits that slow a worker down all the time."""
        rate = [f"throttled to {self.rate:g} records/s"] if self.rate else []
        nice = [f"nice {self.nice:g}: copies at most {100 * self.nice:g} % of the time"] if self.nice and self.nice < 1 else []
        return rate + nice


class Throttle:
    """Keeps one worker to its limits. One thread asks and begins batches; they may end in other threads.

    `nice`: up to `width` batches begin as one burst, and after a burst of d seconds none begins for d · (1 / share − 1) seconds.
    So batches may overlap, and the share of time holds all the same.
    """

    def __init__(self, limits: Limits, *, width: int) -> None:
        self._own, self._width = limits, width
        self._limits = limits
        #: The clients whose searches are too slow, in words.
        self._slow: list[str] = []
        self._lock = threading.Lock()
        #: When slow searches or the flag file last let a batch begin.
        self._free = time.monotonic()
        #: When the last batch began, and its records.
        self._begun, self._count = -math.inf, 0
        #: Batches being copied; batches of the latest burst, when it began, and when it ended.
        self._in_hand = 0
        self._burst, self._burst_began, self._burst_ended = 0, 0.0, 0.0

    def look(self, asked: UpgradeRow, slowest: Callable[[], ClientRow | None]) -> list[str]:
        """Read the limits of now and the speed of searches; return what holds the worker back, in words."""
        limits = self._limits = self._own.changed_by(asked)
        self._slow = _slow(limits.p99_ms, slowest()) if limits.p99_ms else []
        return limits.words + ([f"flag file {limits.flag} exists"] if self._flagged() else []) + self._slow

    def wait(self) -> float:
        """Return the seconds until a batch may begin: 0 is now, infinity is until something has changed."""
        if self._slow or self._flagged():
            return math.inf
        self._free = time.monotonic()
        return max(0.0, max(self._rate_until(), self._nice_until()) - time.monotonic())

    @property
    def held(self) -> float:
        """The seconds for which slow searches or the flag file have let no batch begin, as `wait` saw it."""
        return time.monotonic() - self._free

    def begin(self, count: int) -> None:
        """Note that the copying of a batch of `count` records begins."""
        with self._lock:
            self._begun, self._count = time.monotonic(), count
            # Cut bursts even without `nice`; otherwise turning it on would pause for the whole run so far.
            if self._in_hand == 0 or self._burst >= self._width:
                self._burst, self._burst_began = 0, self._begun
            self._burst += 1
            self._in_hand += 1

    def end(self) -> None:
        """Note that a batch is copied, or has failed."""
        with self._lock:
            self._in_hand -= 1
            self._burst_ended = time.monotonic()

    def _flagged(self) -> bool:
        return self._limits.flag is not None and os.access(self._limits.flag, os.F_OK)

    def _rate_until(self) -> float:
        return self._begun + self._count / self._limits.rate if self._limits.rate else -math.inf

    def _nice_until(self) -> float:
        share = self._limits.nice
        if not share or share >= 1:
            return -math.inf
        with self._lock:
            if self._in_hand:
                return math.inf if self._burst >= self._width else -math.inf
            took = min(self._burst_ended - self._burst_began, LONGEST_BURST)
            return self._burst_ended + took * (1 / share - 1)


def _slow(ceiling: float, client: ClientRow | None) -> list[str]:
    # The client's window keeps this from flapping: a slow search counts until it has left the window.
    if client is None or client.p99_ms <= ceiling:
        return []
    above = f"{client.p99_ms - ceiling:.1f} ms above the ceiling of {ceiling:g} ms"
    return [f"p99 of client {client.id} is {client.p99_ms:.1f} ms, {above}"]
