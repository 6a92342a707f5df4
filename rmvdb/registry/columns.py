"""The types of columns that SQLAlchemy does not have."""

from __future__ import annotations

from typing import Any

from sqlalchemy import JSON, BigInteger, Integer, Text, TypeDecorator
from sqlalchemy.engine import Dialect

from rmvdb.registry.upgrade_plan import UpgradePlan
from rmvdb.text import storable

#: SQLite numbers rows by itself only if the key is a plain INTEGER.
Serial = BigInteger().with_variant(Integer(), "sqlite")


class Words(TypeDecorator[str]):
    """A text of user code, an engine or a command. Characters that databases refuse (NUL, half a surrogate pair) are replaced."""

    impl, cache_ok = Text, True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        """Return the text to store, 2,000 characters at most."""
        return value and storable(value[:2000])


class PlanJson(TypeDecorator[UpgradePlan]):
    """An upgrade's plan, stored as JSON."""

    impl, cache_ok = JSON, True

    def process_bind_param(self, value: UpgradePlan | None, dialect: Dialect) -> dict[str, Any] | None:
        """Return the stored form."""
        return None if value is None else value.to_json()

    def process_result_value(self, value: dict[str, Any] | None, dialect: Dialect) -> UpgradePlan | None:
        """Parse the stored form."""
        return None if value is None else UpgradePlan.from_json(value)
