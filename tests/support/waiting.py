"""Waiting for what comes in its own time, and time that need not be waited for."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable

from sqlalchemy import text

from rmvdb.registry.registry import Registry


class Clock:
    """In place of the module `time`: no time passes but what a test sleeps."""

    def __init__(self) -> None:
        self._now = 1000.0

    def monotonic(self) -> float:
        """Seconds."""
        return self._now

    def sleep(self, seconds: float) -> None:
        """So much passes."""
        self._now += seconds


def seconds_of(call: Callable[[], object]) -> float:
    """Return how long a call takes."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def wait_until(true: Callable[[], object], *, seconds: float = 240.0, every: float = 0.05) -> None:
    """Look again and again. Raise AssertionError if it is not so within so many seconds."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"that was not so within {seconds:g} s"
        time.sleep(every)


def wait_for_processes(true: Callable[[], object], *, seconds: float = 240.0) -> None:
    """Wait until commands in processes of their own have come so far. Each look takes a share of their machine."""
    wait_until(true, seconds=seconds, every=0.2)


def wait_for_words(process: subprocess.Popen[str], words: str) -> None:
    """Read what a command says of its progress until it says these words."""
    assert process.stderr is not None  # where progress goes
    for line in process.stderr:
        if words in line:
            return
    raise AssertionError(f"it ended before it said {words!r}")


def run_out(registry: Registry, *, seconds: float = 86400) -> None:
    """As if so much time had passed, by default so much that every lease has run out."""
    with registry.engine.begin() as connection:
        connection.execute(text(f"UPDATE batches SET lease_until = lease_until - {seconds}"))


def grow_old(registry: Registry, *, seconds: float) -> None:
    """As if so much time had passed since writes were opened."""
    with registry.engine.begin() as connection:
        connection.execute(text(f"UPDATE intents SET opened_at = opened_at - {seconds}, deadline = deadline - {seconds}"))


def fall_silent(registry: Registry, client: str, *, seconds: float) -> None:
    """As if it had been seen last so long ago."""
    with registry.engine.begin() as connection:
        connection.execute(text(f"UPDATE clients SET seen_at = seen_at - {seconds} WHERE id = '{client}'"))
