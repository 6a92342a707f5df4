"""How much time passed by this machine's clocks, of which only differences say anything; and calls that are under way."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

#: Seconds for which a write may go on after it was announced; here, so that reading settings waits for nothing.
WRITE_LASTS = 30.0


def counted() -> float:
    """Seconds by a clock that nobody sets: at least so much time passed. Sleep counts, a pause by a hypervisor does not."""
    # A monotonic clock of Linux stands still while a laptop sleeps, or a virtual machine is suspended.
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


class Uptime:
    """Seconds that may have passed, by whichever clock counted more: leases, deadlines and plans grow old meanwhile.

    After a machine was paused by its hypervisor its own count stands where it stood, and the time of day, once it is set, does
    not. Where an administrator sets the time of day forward, a plan is asked for again and a batch is done again.
    """

    #: Seconds by which the time of day may run ahead of the count at one reading: it is slowed down and sped up all the time.
    STEP = 0.1

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._passed = self._counted = counted()
        self._shown = time.time()

    def __call__(self) -> float:
        """Now."""
        with self._lock:
            now, shown = counted(), time.time()
            by_count, by_day = now - self._counted, shown - self._shown
            self._passed += by_day if by_day > by_count + self.STEP else by_count
            self._counted, self._shown = now, shown
            return self._passed


#: Of this process.
uptime = Uptime()


# --- calls to registry and engine that are under way, so that a command line can say what it waits for -----------------


@dataclass(slots=True)
class Wait:
    """One call that has not ended."""

    #: Registry or engine, with its address.
    what: str
    #: Seconds for which it is tried again.
    patience: float
    #: Whether it may take long by itself, so that it is worth a word only once a try failed.
    slow: bool
    failed: bool = False
    since: float = field(default_factory=time.monotonic)


_numbers = itertools.count()
_under_way: dict[int, Wait] = {}
_mine = threading.local()


@contextmanager
def under_way(what: str, patience: float, *, slow: bool = False) -> Iterator[None]:
    """Note a call of this thread for as long as the block runs."""
    number, outer, wait = next(_numbers), getattr(_mine, "wait", None), Wait(what, patience, slow)
    _under_way[number] = _mine.wait = wait
    try:
        yield
    finally:
        _mine.wait = outer
        del _under_way[number]


def tried_in_vain() -> None:
    """Note that a try of this thread's call failed, and another one follows."""
    if (wait := getattr(_mine, "wait", None)) is not None:
        wait.failed = True


def longer_than(seconds: float) -> dict[str, Wait]:
    """The oldest call to each of those that have kept a call waiting for longer."""
    before, found = time.monotonic() - seconds, dict[str, Wait]()
    for wait in list(_under_way.values()):
        if wait.since < before and (wait.failed or not wait.slow):
            found.setdefault(wait.what, wait)
    return found
