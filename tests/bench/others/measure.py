"""The measurements of a system at a moment of its backfill."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.bench.curves import memo
from tests.bench.curves.cases import Case
from tests.bench.curves.measure import quality

#: The moment at which records are changed, and how many.
WRITES_AT, WRITES = 0.5, 10
#: The moment up to which the backfill is timed.
TIMED_TO = 0.8


def moment(case: Case, make: Callable[[Case, Path], Any], at: Path, t: float) -> dict[str, Any]:
    """Make the system anew, bring it to t, ask every query once, and change records at the middle."""
    system = make(case, at)
    try:
        began = time.perf_counter()
        moved = system.go(t) if t else 0
        seconds = time.perf_counter() - began
        found: dict[str, Any] = {"t": t, "moved": round(system.moved, 3), **asked(case, system)}
        if moved and t == (1 if hasattr(system, "undo") else TIMED_TO):
            found["records_per_s"] = round(moved / seconds, 1)
        if hasattr(system, "chosen"):
            found["chosen"] = system.chosen
        if t == WRITES_AT:
            found |= writes(case, system)
        return found
    finally:
        system.close()


def asked(case: Case, system: Any) -> dict[str, Any]:
    """Ask each query once: the quality, the time of the median query, and what was embedded for one."""
    system.search(case.queries[0])  # connections and caches of the first call
    memo.asked.clear()
    ranked, times = [], []
    for query in case.queries:
        began = time.perf_counter()
        ranked.append(system.search(query))
        times.append(1000 * (time.perf_counter() - began))
    return {
        "quality": round(quality(ranked, case.relevant, case.metric), 4),
        "ms": round(statistics.median(times), 1),
        "extractions": round(memo.asked["items"] / len(case.queries), 2),
    }


def writes(case: Case, system: Any) -> dict[str, int]:
    """Give some records other texts, and look for each text at once and after the backfill."""
    rows = [int(row) for row in np.random.default_rng(2).permutation(len(case.records))[:WRITES]]
    texts = [str(case.queries[number]) for number in range(WRITES)]
    for row, text in zip(rows, texts, strict=True):
        system.write(row, text)
    at_once = seen(system, rows, texts)
    if hasattr(system, "undo"):
        system.undo([(row, str(case.records[row]["text"])) for row in rows])
    system.go(1.0)
    return {"written": WRITES, "found_at_once": at_once, "found_after": seen(system, rows, texts)}


def seen(system: Any, rows: list[int], texts: list[str]) -> int:
    """Return how many of these records are among the first three for their own text."""
    return sum(row in system.search(text)[:3] for row, text in zip(rows, texts, strict=True))
