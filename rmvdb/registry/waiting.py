"""How long a call waits for a database that does not answer.

A suspended server, and one whose table is locked, refuses nothing: its kernel takes what is sent. So whoever waits looks at the
clock, ten times a second, and gives the connection up.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from rmvdb.timing import counted

#: Seconds of silence after which a connection is given up: longer than the server lets a statement run.
SILENT = 40.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a registry: when it began, and when it must have ended."""

    began: float
    ends: float


#: Until when the calls of this thread must have ended.
_ENDS: ContextVar[float] = ContextVar("ends", default=float("inf"))


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Let no call of this thread wait for longer than what is left of so many seconds."""
    before = _ENDS.set(min(_ENDS.get(), counted() + seconds))
    try:
        yield
    finally:
        _ENDS.reset(before)


def call(patience: float) -> Call:
    """One that begins now, and is tried again for so many seconds."""
    began = counted()
    return Call(began=began, ends=min(began + patience, _ENDS.get()))


def connect(_: Any, __: Any, arguments: Any, options: Any) -> Any:
    """A connection to PostgreSQL that does not wait without end."""
    import psycopg

    class Connection(psycopg.Connection[Any]):
        """Gives up a server that is silent."""

        def wait(self, gen: Any, *args: Any, **kwargs: Any) -> Any:
            """As psycopg's, which comes back from each wait ten times a second."""
            return super().wait(_watched(self, gen), *args, **kwargs)

    return Connection.connect(*arguments, **options)


def _watched(connection: Any, steps: Generator[Any, int, Any]) -> Generator[Any, int, Any]:
    """The steps of one exchange with the server, ended by OperationalError where it is silent for too long."""
    from psycopg import OperationalError

    began = counted()
    limit = min(began + SILENT, max(_ENDS.get(), began + 1.0))  # the last attempt of a call has a moment, too
    try:
        asked = next(steps)
        while True:
            ready = yield asked
            if not ready and counted() > limit:
                connection.pgconn.finish()
                raise OperationalError(f"it did not answer for {counted() - began:.0f} s")
            asked = steps.send(ready)
    except StopIteration as end:
        return end.value
