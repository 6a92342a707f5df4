"""The database's clock, by which every time in the registry is."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Float, select
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.orm import Session
from sqlalchemy.sql.functions import GenericFunction


class clock(GenericFunction[float]):  # noqa: N801 (an SQL function is written in lower case)
    """Seconds since 1970 by the database's clock, to a fraction of a millisecond."""

    type = Float(53)
    inherit_cache = True


@compiles(clock, "sqlite")
def _sqlite_clock(*_: Any, **__: Any) -> str:
    return "((julianday('now') - 2440587.5) * 86400.0)"


@compiles(clock, "postgresql")
def _postgres_clock(*_: Any, **__: Any) -> str:
    return "extract(epoch from clock_timestamp())::float8"


def now(s: Session) -> float:
    """What the clock shows at this statement."""
    return s.scalar(select(clock())) or 0.0
