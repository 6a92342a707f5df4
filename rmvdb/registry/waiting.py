"""How long a call waits for a database that does not answer.

A suspended server, or one with a locked table, refuses nothing: its kernel accepts all data. So a call that waits looks at the
clock ten times a second, and closes the connection when its time is over.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from rmvdb.timing import seconds_since_boot

#: Seconds of silence after which a call closes its connection: longer than the server lets a statement run.
SILENT = 40.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a registry: when it began, and when it must end."""

    began: float
    ends: float


#: Whether the statements of this thread may take as long as they need. A server that is gone is noticed all the same.
_UNHURRIED: ContextVar[bool] = ContextVar("unhurried", default=False)
#: When the calls of this thread must end.
_ENDS: ContextVar[float] = ContextVar("ends", default=float("inf"))


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Limit the calls of this thread to so many seconds together."""
    before = _ENDS.set(min(_ENDS.get(), seconds_since_boot() + seconds))
    try:
        yield
    finally:
        _ENDS.reset(before)


def call(patience: float) -> Call:
    """Begin a call that is tried again for so many seconds."""
    began = seconds_since_boot()
    return Call(began=began, ends=min(began + patience, _ENDS.get()))


def connect(_: Any, __: Any, arguments: Any, options: Any) -> Any:
    """Connect to PostgreSQL, with a limit on each wait."""
    import psycopg

    class Connection(psycopg.Connection[Any]):
        """A connection that gives up a silent server."""

        def wait(self, gen: Any, *args: Any, **kwargs: Any) -> Any:
            """Wait as psycopg does, which looks up ten times a second."""
            return super().wait(_watched(self, gen), *args, **kwargs)

    return Connection.connect(*arguments, **options)


@contextmanager
def unhurried() -> Iterator[None]:
    """Let the statements of the block take as long as they need."""
    before = _UNHURRIED.set(True)
    try:
        yield
    finally:
        _UNHURRIED.reset(before)


def _watched(connection: Any, steps: Generator[Any, int, Any]) -> Generator[Any, int, Any]:
    """Yield the steps of one exchange with the server.

    Raises:
        OperationalError: the server is silent for too long.
    """
    from psycopg import OperationalError

    began = seconds_since_boot()
    limit = min(began + SILENT, max(_ENDS.get(), began + 1.0))  # the last attempt of a call has a moment, too
    if _UNHURRIED.get():
        limit = math.inf
    try:
        asked = next(steps)
        while True:
            ready = yield asked
            if not ready and seconds_since_boot() > limit:
                connection.pgconn.finish()
                raise OperationalError(f"it did not answer for {seconds_since_boot() - began:.0f} s")
            asked = steps.send(ready)
    except StopIteration as end:
        return end.value
