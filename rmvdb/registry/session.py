"""Each call is one transaction: repeated while the database is away, and its changes handed to the manifest before the commit."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from sqlalchemy import ColumnElement, Connection, Select, column, func, select, table
from sqlalchemy.exc import IntegrityError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.orm import Session
from tenacity import RetryCallState, Retrying

from rmvdb import errors, timing
from rmvdb.registry import forking, manifest_rows, waiting
from rmvdb.registry.clock import Timekeeper, database_clock, day, jumped, now
from rmvdb.registry.engine import Away, at_once, make_engine, parsed_url, safe_settings
from rmvdb.registry.manifest_rows import Contents
from rmvdb.registry.tables import REVISION, REVISION_TABLE, ClockRow
from rmvdb.text import without_password
from rmvdb.timing import seconds_since_boot

#: An application may have seeded the shared generator, and forked children share the state of any other.
_random = random.SystemRandom()
P = ParamSpec("P")
R = TypeVar("R")
D = TypeVar("D", bound="Database")
#: The advisory lock of PostgreSQL under which a transaction hands the contents on. The last one to do so has seen all others.
KEEPING = 0x726D766463
#: Seconds for which rmvdb reports that the database's clock was set.
LATELY = 3600.0
_ONLY_REVISION: Select[Any] = select(column("version_num")).select_from(table(REVISION_TABLE))
_REVISION = _ONLY_REVISION.scalar_subquery()


def transaction(method: Callable[Concatenate[D, Session, P], R]) -> Callable[Concatenate[D, P], R]:
    """Run the method in one transaction. Repeat it with back-off while the database is away. Translate its errors."""

    @functools.wraps(method)
    def run(self: D, /, *args: P.args, **kwargs: P.kwargs) -> R:
        def once() -> R:
            with manifest_rows.WatchedSession(self.engine, expire_on_commit=False) as session:
                self._begin(session)
                result = method(self, session, *args, **kwargs)
                self._keep(session)
                session.commit()
                return result

        return _repeated(self, once)

    return run


def one_statement(method: Callable[Concatenate[D, Connection, P], R]) -> Callable[Concatenate[D, P], R]:
    """Run the method, which sends a single statement that changes nothing of the manifest. Otherwise as `transaction`."""

    @functools.wraps(method)
    def run(self: D, /, *args: P.args, **kwargs: P.kwargs) -> R:
        def once() -> R:
            with at_once(self.engine) as connection:
                return method(self, connection, *args, **kwargs)

        return _repeated(self, once)

    return run


def _repeated(database: Database, once: Callable[[], R]) -> R:
    call = waiting.call(database.patience)
    if database.engine.dialect.name == "sqlite":
        once = forking.call()(once)
    try:
        with timing.under_way(f"the registry at {database.shown_url}", database.patience):
            return _attempts(call)(once)
    except (Away, PoolTimeout) as away:  # PoolTimeout: other threads used all connections of this process
        raise errors.RegistryUnavailable(
            f"The registry at {database.shown_url} did not answer for {max(call.ends - call.began, 0.0):.3g} s ({away}). "
            f"{getattr(away, 'remedy', Away.remedy)}"
        ) from away.__cause__


def _worth_another_try(attempt: RetryCallState) -> bool:
    failure = attempt.outcome.exception() if attempt.outcome else None
    # If two callers register one name at once, both find it free. The second finds the row of the first when it looks again.
    return isinstance(failure, Away) or (isinstance(failure, IntegrityError) and attempt.attempt_number < 3)


def _pause(attempt: RetryCallState) -> float:
    return _random.uniform(0.0, min(0.025 * 2 ** min(attempt.attempt_number, 8), 2.0))


def _attempts(call: waiting.Call) -> Retrying:
    return Retrying(
        retry=_worth_another_try,
        wait=_pause,
        stop=lambda _: seconds_since_boot() > call.ends,
        reraise=True,
    )


def outdated(shown_url: str, revision: str | None) -> str:
    """Say that the schema is not the one that this code needs, and what to do."""
    if revision is None:
        return f"The registry at {shown_url} has no tables yet; run: rmvdb db upgrade, or rmvdb registry rebuild if it was lost"
    if revision < REVISION:
        return f"The registry at {shown_url} is at revision {revision}, but this rmvdb needs {REVISION}; run: rmvdb db upgrade"
    return (
        f"The registry at {shown_url} is at revision {revision}, which this rmvdb does not know (it knows up to {REVISION}); "
        "install the newer release that upgraded it"
    )


class Database:
    """One database.

    `patience`: seconds for which a call tries again while the database is away. `keep` receives the contents within every
    transaction that changed them, before the commit. So its copy is never behind the registry, and an exception of `keep` undoes
    the change.
    """

    def __init__(self, url: str, *, patience: float = 20.0, keep: Callable[[Contents], None] | None = None) -> None:
        self.url = parsed_url(url)
        self.patience = patience
        self._keeper = keep
        #: The URL without its password.
        self.shown_url = without_password(self.url.render_as_string(hide_password=False))
        self.engine = make_engine(self.url.render_as_string(hide_password=False))
        self._time = Timekeeper(*self._columns())

    def close(self) -> None:
        """Close the connections."""
        self.engine.dispose()

    @property
    def gaps(self) -> int:
        """How often the database's clock was far ahead of this process's clock. Values that were read before may be old."""
        return self._time.gaps

    def let_go(self) -> None:
        """Close the idle connections to a server: it has room for some hundred, and applications call it seldom."""
        if self.engine.dialect.name != "sqlite":
            self.engine.pool.dispose()

    def _columns(self) -> list[ColumnElement[Any]]:
        """Return the columns that `_begin` reads. On PostgreSQL they also change the settings."""
        if self.engine.dialect.name != "postgresql":
            return [_REVISION]
        # Within the transaction: a pooler may give each transaction another connection.
        return [_REVISION, func.pg_is_in_recovery(), *(func.set_config(*each, True) for each in safe_settings().items())]

    def _begin(self, s: Session) -> None:
        """Begin a transaction that the protocol can rely on: with this code's schema, durable, and at a known time."""
        try:
            self._time.begin(s, self._expect)
        except errors.SchemaOutdated:
            s.rollback()
            if (revision := s.scalar(_ONLY_REVISION)) != REVISION:  # a newer schema may lack a column that was just read
                raise errors.SchemaOutdated(outdated(self.shown_url, revision)) from None
            raise

    def _expect(self, revision: str | None, *server: Any) -> None:
        """Raise an error unless the values of `_columns` are those that the protocol needs."""
        if revision != REVISION:
            raise errors.SchemaOutdated(outdated(self.shown_url, revision))
        if not server:  # SQLite
            return
        standby, commit, *_ = server
        if standby:
            raise Away("it is a standby, which only reads; registry.url must name the primary")
        if commit != "on":
            raise errors.RegistryError(
                f"The registry at {self.shown_url} may lose changes that it acknowledged: synchronous_commit is {commit!r} "
                "though rmvdb set it to on; use a PostgreSQL that keeps the setting"
            )

    def _keep(self, s: manifest_rows.WatchedSession) -> None:
        if self._keeper is None:
            return
        s.flush()
        if s.changed:
            if s.get_bind().dialect.name == "postgresql":  # in SQLite, BEGIN IMMEDIATE is the lock
                s.execute(select(func.pg_advisory_xact_lock(KEEPING)))
            manifest_rows.count_change(s)
            self._keeper(manifest_rows.contents(s))

    @transaction
    def concerns(self, s: Session, /) -> list[str]:
        """Return warnings for the administrator: a clock that was set lately, and settings that may lose acknowledged changes."""
        unsafe = self.engine.dialect.name == "postgresql" and s.scalar(select(func.current_setting("fsync"))) == "off"
        return [*(["fsync is off: a power cut may lose changes that it acknowledged"] if unsafe else []), *_jumps(s)]

    @transaction
    def jumps(self, s: Session, /) -> list[str]:
        """Return a sentence if the database's clock was set lately."""
        return _jumps(s)

    @transaction
    def now(self, s: Session, /) -> float:
        """Return the registry's time."""
        return now(s)

    @transaction
    def today(self, s: Session, /) -> float:
        """Return the seconds since 1970 by the database's clock, for people. No wait may depend on it."""
        return day(s)


def _jumps(s: Session) -> list[str]:
    jump, shown, at = s.execute(select(ClockRow.jump, ClockRow.jumped_at, database_clock())).one()
    return [jumped(jump)] if jump and abs(at - shown) < LATELY else []
