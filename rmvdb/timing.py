"""Elapsed time by this machine's clocks, of which only differences mean anything; the calls under way; locks of a process."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

#: Seconds that a write may take after its announcement. Defined here, so that reading settings needs no slow import.
WRITE_LASTS = 30.0


# --- locks ------------------------------------------------------------------------------------------------------------

_all: WeakSet[ProcessLock] = WeakSet()


class ProcessLock:
    """A lock that a forked child finds free: `with name.now:` holds the lock of this process.

    A thread of the parent may hold it for minutes, as one that loads a model does. The child has no such thread, so none would
    release it there.

    `make`: `threading.Lock` or `threading.RLock`.
    """

    def __init__(self, make: Callable[[], AbstractContextManager[Any]] = threading.Lock) -> None:
        self._make = make
        self.renew()
        _all.add(self)

    def renew(self) -> None:
        """Make it anew. A block that holds the former one releases that."""
        self.now = self._make()


def _in_child() -> None:
    for each in list(_all):
        each.renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


# --- clocks -----------------------------------------------------------------------------------------------------------


def seconds_since_boot() -> float:
    """Return the seconds by a clock that is never set. It counts sleep, but not a hypervisor's pause, so more time may pass."""
    # The monotonic clock of Linux stops while a laptop sleeps or a virtual machine is suspended.
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


class Uptime:
    """Seconds that may have passed, by the clock that counted more. Leases, deadlines and plans age by it.

    After a hypervisor's pause, the machine's count continues where it stopped, but the time of day, once it is set again, does
    not. If an administrator sets the time of day forward, a client asks for its plan again, and a worker does a batch again.
    """

    #: Seconds by which the time of day may be ahead of the count at one reading, because its speed is adjusted all the time.
    STEP = 0.1

    def __init__(self) -> None:
        self._lock = ProcessLock()
        self._passed = self._counted = seconds_since_boot()
        self._shown = time.time()

    def __call__(self) -> float:
        """Return the seconds until now."""
        with self._lock.now:
            now, shown = seconds_since_boot(), time.time()
            by_count, by_day = now - self._counted, shown - self._shown
            self._passed += by_day if by_day > by_count + self.STEP else by_count
            self._counted, self._shown = now, shown
            return self._passed


#: The uptime of this process.
uptime = Uptime()


# --- calls to registry and engine under way, so that the command line can say what it waits for ------------------------


@dataclass(slots=True)
class Wait:
    """One call under way."""

    #: The registry or engine, with its address.
    what: str
    #: Seconds for which rmvdb tries it again.
    patience: float
    #: Whether it may be slow by nature. Then the command line reports it only after a failed try.
    slow: bool
    failed: bool = False
    since: float = field(default_factory=time.monotonic)


_numbers = itertools.count()
_under_way: dict[int, Wait] = {}
_mine = threading.local()


@contextmanager
def under_way(what: str, patience: float, *, slow: bool = False) -> Iterator[None]:
    """Note a call of this thread while the block runs."""
    number, outer, wait = next(_numbers), getattr(_mine, "wait", None), Wait(what, patience, slow)
    _under_way[number] = _mine.wait = wait
    try:
        yield
    finally:
        _mine.wait = outer
        del _under_way[number]


def tried_in_vain() -> None:
    """Note that a try of this thread's call failed, and another follows."""
    if (wait := getattr(_mine, "wait", None)) is not None:
        wait.failed = True


def longer_than(seconds: float) -> dict[str, Wait]:
    """Return the oldest call under way for over so many seconds, by registry or engine."""
    before, oldest = time.monotonic() - seconds, dict[str, Wait]()
    for wait in list(_under_way.values()):
        if wait.since < before and (wait.failed or not wait.slow):
            oldest.setdefault(wait.what, wait)
    return oldest
