"""The registry's time, by which leases, deadlines and graces end.

It goes on as the database's clock does, and never faster than the processes' own clocks. An administrator may set the one, or
another machine takes over; the others are never set. The registry's time may be slow, which only makes others wait; it must not
be fast. So a process compares the clocks at each call, and does not count what the database's clock is ahead by since the call
before. One row, the anchor, tells every process what the time was when the database's clock showed how much.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import BindParameter, Float, Select, bindparam, select, update
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.orm import Session
from sqlalchemy.sql.functions import GenericFunction

from rmvdb.registry.tables import ClockRow
from rmvdb.timing import counted

log = logging.getLogger(__name__)

#: Seconds after which the anchor is set anew. So much counts, too, for a process that has not compared the clocks before.
TICK = 0.5
#: Seconds that two readings of the clocks may differ by: SQLite's clock counts milliseconds.
NOISE = 0.01
#: Seconds from which on a jump is told, and counts as a gap in which a process may have stood still.
JUMP = 1.0


class database_clock(GenericFunction[float]):  # noqa: N801 (an SQL function is written in lower case)
    """Seconds since 1970 by the database's clock, to a fraction of a millisecond."""

    type = Float(53)
    inherit_cache = True


@compiles(database_clock, "sqlite")
def _sqlite_clock(*_: Any, **__: Any) -> str:
    return "((julianday('now') - 2440587.5) * 86400.0)"


@compiles(database_clock, "postgresql")
def _postgres_clock(*_: Any, **__: Any) -> str:
    return "extract(epoch from clock_timestamp())::float8"


@dataclass(frozen=True, slots=True)
class Moment:
    """What the registry's time was when a transaction began, what the database's clock showed, and what the process counted."""

    time: float
    shown: float
    at: float


#: Of the transaction that this thread is in.
_BEGAN: ContextVar[Moment] = ContextVar("began")


def clock() -> BindParameter[float]:
    """The registry's time when the statement is sent."""
    return bindparam(None, callable_=_time, type_=Float(53), unique=True)


def now(_: Session) -> float:
    """The registry's time."""
    return _time()


def day(_: Session) -> float:
    """Seconds since 1970 by the database's clock: for people. No wait may depend on it."""
    began = _BEGAN.get()
    return began.shown + counted() - began.at


def _time() -> float:
    began = _BEGAN.get()
    return began.time + counted() - began.at


@dataclass(frozen=True, slots=True)
class _Reading:
    """The row and the clocks at one moment. `asked` and `answered`: what the process had counted just before and after."""

    time: float
    anchored: float
    back: float
    starts: int
    shown: float
    asked: float
    answered: float

    @property
    def since(self) -> float:
        """Seconds since the anchor, by the database's clock; negative where that was set back."""
        return self.shown - self.anchored


class Timekeeper:
    """Compares the database's clock with this process's own; tests/model/clock.py looks at every order of its steps."""

    def __init__(self, *columns: Any) -> None:
        """`columns`: what each transaction learns at its beginning, in the same statement."""
        self._statement = _reading(*columns)
        #: The reading that the next one is compared with.
        self._last: _Reading | None = None
        #: How often the database's clock was found to be far ahead: it was set, or this process stood still.
        self.gaps = 0

    def begin(self, s: Session) -> Sequence[Any]:
        """Learn what time it is, at the beginning of a transaction; the values of the columns."""
        anchored = False
        while True:
            # Taken before the question: once another thread has replaced it, the anchor that is read is a newer one, too.
            last = self._last
            reading, found = _read(s, self._statement)
            ahead = _ahead(reading, last)
            # Where a commit takes longer than a tick, the anchor is old as soon as it is set: once a transaction is enough.
            fresh = reading.since >= 0 and (anchored or reading.since <= TICK)
            if last is not None and fresh and abs(ahead) <= NOISE:
                break
            self._anchor(s, last)
            anchored = True
        self._last = reading
        _BEGAN.set(Moment(reading.time + _passed(reading, last, ahead), reading.shown, reading.answered))
        return found

    def _anchor(self, s: Session, last: _Reading | None) -> None:
        s.execute(select(ClockRow.id).with_for_update())
        reading, _ = _read(s, _READING)  # another process may have done it meanwhile
        ahead = _ahead(reading, last)
        row = {"time": reading.time + _passed(reading, last, ahead), "shown": reading.shown}
        row |= {"starts": reading.starts + (last is None), "back": reading.back + max(-ahead, 0.0)}
        if abs(ahead) > JUMP:
            row |= {"jump": ahead, "jumped_at": reading.shown}
        s.execute(update(ClockRow).values(**row))
        s.commit()  # at once: others must not wait for what this transaction is for
        self._last = replace(reading, back=row["back"], starts=int(row["starts"]))
        if abs(ahead) > JUMP:
            self.gaps += ahead > 0
            log.warning("%s", jumped(ahead), extra={"action": "clock", "jump": ahead})


def jumped(jump: float) -> str:
    """That the database's clock jumped by so many seconds, and what follows."""
    if jump < 0:
        return f"The clock of the registry's database was set back by {-jump:,.0f} s; leases and graces go on regardless"
    return (
        f"The clock of the registry's database went {jump:,.0f} s ahead of a process's own: it was set forward, or that "
        "process's machine stood still; leases, deadlines and graces last as long as they should"
    )


def _reading(*columns: Any) -> Select[Any]:
    # Of the table, and made once: every transaction runs it, and as a question for rows it would cost half of a short one.
    row = ClockRow.__table__.c
    return select(row.time, row.shown, row.back, row.starts, database_clock(), *columns)


_READING = _reading()


def _read(s: Session, statement: Select[Any]) -> tuple[_Reading, Sequence[Any]]:
    asked = counted()
    time, anchored, back, starts, shown, *found = s.execute(statement).one()
    return _Reading(time, anchored, back, starts, shown, asked, counted()), found


def _ahead(reading: _Reading, last: _Reading | None) -> float:
    """Seconds by which the database's clock went ahead of this process's own since its last reading; negative for behind."""
    if last is None:
        return 0.0
    # What another process has found it to be set back by hides as much of what it was set forward by since.
    by_database = reading.shown - last.shown + (reading.back - last.back)
    ahead, behind = by_database - (reading.answered - last.asked), by_database - (reading.asked - last.answered)
    return ahead if ahead > NOISE else behind if behind < -NOISE else 0.0


def _passed(reading: _Reading, last: _Reading | None, ahead: float) -> float:
    """Seconds that count since the anchor."""
    passed = max(reading.since - max(ahead, 0.0), 0.0)
    # Who starts afresh cannot tell whether they passed, nor can another one tell what passed before and after that anchor.
    return passed if last is not None and last.starts == reading.starts else min(passed, TICK)
