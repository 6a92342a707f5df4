"""Statements that a client sends to the registry: while it does nothing, and while it searches."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from sqlalchemy import Engine, event

from rmvdb.types import Index
from tests.bench.speed.own_time import Ready
from tests.bench.speed.row import Options, Row, counted
from tests.bench.speed.world import World, world


def measure(options: Options) -> Iterator[Row]:
    """Count for `seconds` each. COMMIT of a transaction does not count: the driver sends it. A heartbeat has none."""
    with world(Ready(), options, index=Index(type="FLAT"), fill=False) as made:
        idle = _rate(options.seconds, lambda: time.sleep(0.05))
        searching = _rate(options.seconds, lambda: _search(made))
    yield counted("registry statements of an idle client", [idle], target=0.2, unit="/s")
    yield counted("registry statements of a searching client", [searching], target=0.2, unit="/s")


def _search(made: World) -> None:
    made.client.search(vector=made.queries[0], model="v2", limit=10)


def _rate(seconds: float, act: Any) -> float:
    """Act for so many seconds. Return the statements a second meanwhile."""

    def acted() -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            act()

    return len(sent(acted)) / seconds


def sent(act: Callable[[], object]) -> list[str]:
    """Return the statements that all threads of this process send while it acts."""
    found: list[str] = []

    def note(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        if not statement.startswith("BEGIN"):
            found.append(statement)

    event.listen(Engine, "before_cursor_execute", note)
    try:
        act()
    finally:
        event.remove(Engine, "before_cursor_execute", note)
    return found
