"""One transaction a call, again while the database is away; what it changed is handed on before it is committed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from sqlalchemy import func, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.orm import Session
from tenacity import RetryCallState, Retrying, stop_after_delay, wait_random_exponential

from rmvdb import errors
from rmvdb.addresses import without_password
from rmvdb.registry import kept
from rmvdb.registry.clock import now
from rmvdb.registry.engine import Away, make_engine, parsed_url
from rmvdb.registry.kept import Contents

P = ParamSpec("P")
R = TypeVar("R")
D = TypeVar("D", bound="Database")
#: In PostgreSQL, whoever hands on the contents holds this advisory lock, so that the last one to do so has seen all others.
KEEPING = 0x726D766463


def transaction(method: Callable[Concatenate[D, Session, P], R]) -> Callable[Concatenate[D, P], R]:
    """Run the method in one transaction, again with back-off while the database is away, its errors translated."""

    @functools.wraps(method)
    def run(self: D, /, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            for attempt in self._attempts():
                with attempt, kept.WatchedSession(self.engine, expire_on_commit=False) as session, session.begin():
                    result = method(self, session, *args, **kwargs)
                    self._keep(session)
                    return result
        except (Away, PoolTimeout) as away:  # or all connections were in use all the while
            raise errors.RegistryUnavailable(
                f"The registry at {self.shown_url} did not answer for {self.patience:g} s ({away}); "
                "start it or mend registry.url, then run the same command again"
            ) from away.__cause__
        raise AssertionError("tenacity ends in a result or an exception")

    return run


def _worth_another_try(attempt: RetryCallState) -> bool:
    failure = attempt.outcome.exception() if attempt.outcome else None
    # Two that register the same name at once both find it free; the second one finds the first one's row when it looks again.
    return isinstance(failure, Away) or (isinstance(failure, IntegrityError) and attempt.attempt_number < 3)


class Database:
    """One database. `patience`: seconds for which a call keeps trying while the database is away.

    `keep` is given the contents within every transaction that changed them, before it is committed: what it keeps is never
    behind the registry, and what it raises undoes the change.
    """

    def __init__(self, url: str, *, patience: float = 20.0, keep: Callable[[Contents], None] | None = None) -> None:
        self.url = parsed_url(url)
        self.patience = patience
        self._keeper = keep
        self.engine = make_engine(self.url.render_as_string(hide_password=False))

    @property
    def shown_url(self) -> str:
        """The URL without its password."""
        return without_password(self.url.render_as_string(hide_password=False))

    def close(self) -> None:
        """Give the connections back."""
        self.engine.dispose()

    def _attempts(self) -> Retrying:
        return Retrying(
            retry=_worth_another_try,
            wait=wait_random_exponential(multiplier=0.05, max=2),
            stop=stop_after_delay(self.patience),
            reraise=True,
        )

    def _keep(self, s: kept.WatchedSession) -> None:
        if self._keeper is None:
            return
        s.flush()
        if s.changed:
            if s.get_bind().dialect.name == "postgresql":  # in SQLite the transaction, which began IMMEDIATE, is the lock
                s.execute(select(func.pg_advisory_xact_lock(KEEPING)))
            kept.count_change(s)
            self._keeper(kept.contents(s))

    @transaction
    def now(self, s: Session, /) -> float:
        """The database's clock."""
        return now(s)
