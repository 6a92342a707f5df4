"""Waiting for what comes in its own time, and time that need not be waited for."""

from __future__ import annotations

import time
from collections.abc import Callable

from sqlalchemy import text

from rmvdb.registry import Registry


def wait_until(true: Callable[[], bool], *, seconds: float = 20.0) -> None:
    """Look again and again; AssertionError where it is not so within so many seconds."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it never came so far"
        time.sleep(0.05)


def run_out(registry: Registry) -> None:
    """As if so much time had passed that every lease has run out."""
    with registry.engine.begin() as connection:
        connection.execute(text("UPDATE batches SET lease_until = lease_until - 86400"))
