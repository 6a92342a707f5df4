"""A database whose clock a test sets, as its administrator might."""

from __future__ import annotations

import time

from sqlalchemy import event, text

from rmvdb.registry.registry import Registry
from tests.support.postgres import clock_set, settable_clock


class DatabaseClock:
    """The clock of one registry's database, as every connection made from now on sees it: `set` puts it forward, or back."""

    def __init__(self, *registries: Registry) -> None:
        self._ahead = 0.0
        self._engine = registries[0].engine
        self._postgres = self._engine.dialect.name == "postgresql"
        if self._postgres:
            self._run(*settable_clock(str(self._engine.url.database)))
        for registry in registries:
            if not self._postgres:
                event.listen(registry.engine, "connect", lambda connection, _: self._replace_julianday(connection))
            registry.engine.dispose()

    def set(self, seconds: float) -> None:
        """Set the clock forward by so many seconds from now."""
        self._ahead += seconds
        if self._postgres:
            self._run(clock_set(self._ahead))

    def _replace_julianday(self, connection: object) -> None:
        shown = lambda _: (time.time() + self._ahead) / 86400.0 + 2440587.5  # noqa: E731 (SQLite asks for a callable)
        connection.create_function("julianday", 1, shown)  # type: ignore[attr-defined]

    def _run(self, *statements: str) -> None:
        with self._engine.begin() as connection:
            for statement in statements:
                connection.execute(text(statement))
