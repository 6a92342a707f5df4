"""The registry's rows in the manifest: as JSON values and back, and whether a transaction changed any."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from sqlalchemy import LargeBinary, Select, event, func, insert, inspect, select, update
from sqlalchemy.orm import ORMExecuteState, Session
from sqlalchemy.types import TypeEngine

from rmvdb.registry.columns import PlanJson
from rmvdb.registry.tables import MANIFEST_TABLES, TRANSIENT_COLUMNS, ChangesRow, Table
from rmvdb.registry.upgrade_plan import UpgradePlan

#: The manifest's rows as JSON values, by table.
Contents: TypeAlias = Mapping[str, Sequence[Mapping[str, Any]]]


class WatchedSession(Session):
    """A session that knows whether it changed a row of the manifest, by an object or by a statement."""

    changed = False


@event.listens_for(WatchedSession, "after_flush")
def _flushed(session: WatchedSession, _: object) -> None:
    rows = (*session.new, *session.deleted, *filter(_is_changed, session.dirty))
    session.changed |= any(isinstance(row, MANIFEST_TABLES) for row in rows)


def _is_changed(row: object) -> bool:
    """Return whether a column that the manifest holds was changed."""
    return any(column.history.has_changes() for column in inspect(row).attrs if column.key not in TRANSIENT_COLUMNS)


@event.listens_for(WatchedSession, "do_orm_execute")
def _executed(state: ORMExecuteState) -> None:
    mapper = state.bind_mapper
    if (
        not state.is_select
        and mapper is not None
        and mapper.class_ in MANIFEST_TABLES
        and isinstance(state.session, WatchedSession)
    ):
        state.session.changed = True


def count_change(s: Session) -> None:
    """Count one more change of the manifest's rows."""
    if not s.execute(update(ChangesRow).values(number=ChangesRow.number + 1)).rowcount:  # type: ignore[attr-defined]
        s.execute(insert(ChangesRow).values(number=1))


def contents(s: Session) -> Contents:
    """Return every row of the manifest, without the columns that are valid for seconds only."""
    return {table.__tablename__: [_to_json(row) for row in s.execute(_rows(table)).mappings()] for table in MANIFEST_TABLES}


def _rows(table: type[Table]) -> Select[Any]:
    # By the names in the database: a manifest stays readable if an attribute gets a better name.
    columns = [column for column in table.__table__.columns if column.name not in TRANSIENT_COLUMNS]
    return select(*columns).order_by(*table.__mapper__.primary_key)


def _to_json(row: Mapping[Any, Any]) -> dict[str, Any]:
    return {name: _value_to_json(value) for name, value in row.items()}


def _value_to_json(value: Any) -> Any:
    if isinstance(value, UpgradePlan):
        return value.to_json()
    return base64.b64encode(value).decode() if isinstance(value, bytes) else value


def _value_from_json(type_: TypeEngine[Any] | None, value: Any) -> Any:
    if isinstance(type_, PlanJson):
        return UpgradePlan.from_json(value)
    return base64.b64decode(value) if value is not None and isinstance(type_, LargeBinary) else value


def put_back(s: Session, table: type[Table], rows: Sequence[Mapping[str, Any]]) -> None:
    """Fill an empty table with rows that `contents` returned. Later rows get larger numbers."""
    types = {column.name: column.type for column in table.__table__.columns}
    keys = {column.name: column.key for column in table.__table__.columns}
    values = [{keys.get(name, name): _value_from_json(types.get(name), value) for name, value in row.items()} for row in rows]
    if values:
        s.execute(insert(table), values)
    if s.get_bind().dialect.name == "postgresql" and "id" in types:  # SQLite continues from the last row
        sequence = func.pg_get_serial_sequence(table.__tablename__, "id")
        s.execute(select(func.setval(sequence, select(func.max(table.__table__.c.id)).scalar_subquery())))
