"""Seconds that pass for a machine, those in which it sleeps among them: leases, deadlines and plans grow old meanwhile."""

from __future__ import annotations

import time


def uptime() -> float:
    """Seconds since some moment in the past, by a clock that nobody sets; only differences say anything."""
    # A monotonic clock of Linux stands still while a laptop sleeps, or a virtual machine is suspended.
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()
