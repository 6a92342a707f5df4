"""The registry's time, by which leases, deadlines and graces end.

It follows the database's clock, and is never faster than the clocks of the processes. An administrator may set the database's
clock, or another machine with another clock takes over. The clocks of the processes are never set. The registry's time may be
slow, which only makes others wait. It must not be fast. So at each call a process compares the clocks, and does not count the
seconds by which the database's clock went ahead since the last call. One row, the anchor, holds the registry's time and what the
database's clock showed at that moment.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import BindParameter, ColumnElement, Float, Select, Update, bindparam, select, update
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.orm import Session
from sqlalchemy.sql.functions import GenericFunction

from rmvdb.registry.tables import ClockRow
from rmvdb.timing import seconds_since_boot

log = logging.getLogger(__name__)

#: Seconds of a day.
DAY = 86_400.0
#: Seconds after which the anchor is set again. A process that has not compared the clocks before counts at most that.
TICK = 0.5
#: Seconds after which a client that does nothing else sets the anchor: a process that starts does not count them.
OLD = 25.0
#: Seconds by which two readings of the clocks may differ: SQLite's clock counts milliseconds.
NOISE = 0.01
#: Seconds from which on rmvdb reports a jump, and counts it as a gap in which this process may have stood still.
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
class _Began:
    """The registry's time when a transaction began, what the database's clock showed then, and what the process had counted."""

    time: float
    shown: float
    at: float


#: The beginning of this thread's transaction.
_BEGAN: ContextVar[_Began] = ContextVar("began")


def clock() -> BindParameter[float]:
    """Return a parameter that is the registry's time when the statement is sent."""
    return bindparam(None, callable_=_time, type_=Float(53), unique=True)


def now(_: Session) -> float:
    """Return the registry's time."""
    return _time()


def day(_: Session) -> float:
    """Return the seconds since 1970 by the database's clock, for people. No wait may depend on it."""
    began = _BEGAN.get()
    return began.shown + seconds_since_boot() - began.at


def _time() -> float:
    return _counted_on(_BEGAN.get())


def _counted_on(began: _Began) -> float:
    return began.time + seconds_since_boot() - began.at


@dataclass(frozen=True, slots=True)
class _Reading:
    """The anchor and the clocks at one moment. The process's clock showed `asked` just before it and `answered` just after."""

    time: float
    anchored: float
    back: float
    starts: int
    shown: float
    asked: float
    answered: float

    @property
    def since(self) -> float:
        """Seconds since the anchor, by the database's clock. Negative if that was set back."""
        return self.shown - self.anchored


class Timekeeper:
    """Compares the database's clock with the clock of this process. tests/model/clock.py checks every order of its steps."""

    def __init__(self, *others: Any) -> None:
        """`others`: what each transaction reads in its first statement, too."""
        self._statement = _reading(*others)
        #: The reading to compare the next one with.
        self._last: _Reading | None = None
        #: The last reading, and the time that it gave: one tuple, because another thread may replace them.
        self._given: tuple[_Reading, _Began] | None = None
        #: How often the database's clock was far ahead, because it was set or this process stood still.
        self.gaps = 0

    def begin(self, s: Session, expect: Callable[..., None] = lambda *_: None) -> None:
        """Read the time at the beginning of a transaction. `expect` gets the values of the others, before anything is changed."""
        anchored = False
        while True:
            # Taken before the query: if another thread replaces it meanwhile, the query reads a newer anchor, too.
            last = self._last
            reading, values = _read(s, self._statement)
            expect(*values)
            ahead = _ahead(reading, last)
            # Once a transaction is enough: if a commit takes longer than a tick, an anchor is old as soon as it is set.
            fresh = reading.since >= 0 and (anchored or reading.since <= TICK)
            if last is not None and fresh and abs(ahead) <= NOISE:
                break
            self._anchor(s, last)
            anchored = True
        _BEGAN.set(self._count_from(reading, _passed(reading, last, ahead)))

    def counting(self) -> float | None:
        """Return the time as this process has counted it since its last reading. None before the first."""
        return None if self._given is None else _counted_on(self._given[1])

    def confirm(self, values: Sequence[Any], *, asked: float) -> bool:
        """Compare the clocks by the values of `columns`, which a statement read that was sent at `asked`.

        Return whether `counting` gave the registry's time. If not, `begin` sets the anchor anew.
        """
        last, reading = self._last, _read_from(values, asked)
        if last is None or last.starts != reading.starts or reading.since < 0:
            return False
        if abs(ahead := _ahead(reading, last)) > NOISE:
            return False
        self._count_from(reading, _passed(reading, last, ahead))
        return True

    def moved_on(self) -> Update | None:
        """Return a statement that sets the anchor by what this process has counted since its last reading.

        None if the anchor is not old. The statement changes nothing if another process has set the anchor meanwhile, or if the
        database's clock does not show what it should.
        """
        if self._given is None or self._given[0].since < OLD:
            return None
        (last, began), row, now = self._given, ClockRow.__table__.c, seconds_since_boot()
        read = (row.time == last.time, row.shown == last.anchored, row.back == last.back, row.starts == last.starts)
        least, most = last.shown + now - last.answered - NOISE, last.shown + now - last.asked + TICK
        as_counted = database_clock().between(least, most)
        return update(ClockRow).where(*read, as_counted).values(time=_counted_on(began), shown=database_clock())

    def _count_from(self, reading: _Reading, passed: float) -> _Began:
        began = _Began(reading.time + passed, reading.shown, reading.answered)
        self._last, self._given = reading, (reading, began)
        return began

    def _anchor(self, s: Session, last: _Reading | None) -> None:
        s.execute(select(ClockRow.id).with_for_update())
        reading, _ = _read(s, _READING)  # another process may have set the anchor meanwhile
        ahead = _ahead(reading, last)
        row = {"time": reading.time + _passed(reading, last, ahead), "shown": reading.shown}
        row |= {"starts": reading.starts + (last is None), "back": reading.back + max(-ahead, 0.0)}
        if abs(ahead) > JUMP:
            row |= {"jump": ahead, "jumped_at": reading.shown}
        s.execute(update(ClockRow).values(**row))
        s.commit()  # at once: others must not wait for the rest of this transaction
        self._last = replace(reading, back=row["back"], starts=int(row["starts"]))
        if abs(ahead) > JUMP:
            self.gaps += ahead > 0
            log.warning("%s", jumped(ahead), extra={"action": "clock", "jump": ahead})


def jumped(jump: float) -> str:
    """Say that the database's clock jumped by so many seconds, and what this means."""
    if jump < 0:
        return f"The clock of the registry's database was set back by {-jump:,.0f} s; leases and graces continue regardless"
    return (
        f"The clock of the registry's database went {jump:,.0f} s ahead of a process's own clock: it was set forward, or "
        "that process's machine stood still; leases, deadlines and graces last as long as they should"
    )


#: On the table's columns, and made once: every transaction reads them. As an ORM query it would take half of a short one.
_ANCHORED = [ClockRow.__table__.c[name] for name in ("time", "shown", "back", "starts")]


def columns() -> list[ColumnElement[Any]]:
    """Return a reading, for a statement on another table."""
    return [*(select(each).scalar_subquery() for each in _ANCHORED), database_clock()]


def _reading(*others: Any) -> Select[Any]:
    return select(*_ANCHORED, database_clock(), *others)


_READING = _reading()


def _read(s: Session, statement: Select[Any]) -> tuple[_Reading, Sequence[Any]]:
    asked = seconds_since_boot()
    time, anchored, back, starts, shown, *values = s.execute(statement).one()
    return _Reading(time, anchored, back, starts, shown, asked, seconds_since_boot()), values


def _read_from(values: Sequence[Any], asked: float) -> _Reading:
    time, anchored, back, starts, shown = values
    return _Reading(time, anchored, back, starts, shown, asked, seconds_since_boot())


def _ahead(reading: _Reading, last: _Reading | None) -> float:
    """Return the seconds by which the database's clock went ahead of this process's since the last reading; may be negative."""
    if last is None:
        return 0.0
    # Another process may have seen it set back. Without that sum, a later step forward of the same size would be hidden.
    by_database = reading.shown - last.shown + (reading.back - last.back)
    ahead, behind = by_database - (reading.answered - last.asked), by_database - (reading.asked - last.answered)
    return ahead if ahead > NOISE else behind if behind < -NOISE else 0.0


def _passed(reading: _Reading, last: _Reading | None, ahead: float) -> float:
    """Return the seconds that count since the anchor."""
    passed = max(reading.since - max(ahead, 0.0), 0.0)
    # A process that starts cannot tell whether they passed. Other processes cannot tell what passed around its anchor.
    return passed if last is not None and last.starts == reading.starts else min(passed, TICK)
