"""Upserts and deletes."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rmvdb.canonical.ids import checked_ids
from rmvdb.canonical.records import record_of as canonical_record
from rmvdb.canonical.records import without_vectors
from rmvdb.engines.filters import ids_in
from rmvdb.engines.milvus.connection import Engine
from rmvdb.engines.milvus.describing import schema_of
from rmvdb.engines.milvus.driver import ONCE, foreign_errors, unwritable
from rmvdb.engines.milvus.failures import text_of
from rmvdb.engines.milvus.querying import query
from rmvdb.engines.milvus.rows import IDS, output_of, parts, record_of, row_of
from rmvdb.engines.milvus.session import STRONG, Session
from rmvdb.errors import AnswerTooLarge, CollectionMissing, EngineError, EngineKilled, EngineUnavailable, Refused, Unwritable
from rmvdb.protocols import Permit, always
from rmvdb.text import counted
from rmvdb.types import Id, IdType, Record, Schema

if TYPE_CHECKING:
    from rmvdb.engines.milvus.driver import MilvusClient

#: Rows after which Lite 3 must flush: a search of 100,000 unflushed rows took twice as long.
_FLUSH_AFTER = 10_000
#: Lite 2.5 orders calls by the milliseconds of the clock: the second call within one millisecond does not see the first's rows.
_TICK = 0.0011
#: How often the engine may end at the write of one record.
_TRIES = 2


def fields_of(session: Session, collection: str, records: Sequence[Record]) -> list[Record]:
    """Return these records without vectors, as the collection would keep them.

    Raises:
        Mismatch, Unwritable: The collection cannot keep a record.
    """
    return without_vectors(schema_of(session, collection), records, session.engine().limits)


def upsert(
    session: Session, collection: str, records: Sequence[Record], *, as_read: bool = False, permit: Permit = always
) -> None:
    """Write records (vectors required), replacing those of the same id; return when all are written."""
    schema, limits = schema_of(session, collection), session.engine().limits
    checked = (canonical_record(schema, record, limits, as_read=as_read) for record in records)
    # The engine would store a key twice that is in a call twice. The last record of a key counts.
    rows = {record.id: row_of(schema, record) for record in checked}
    if rows:
        _let_pymilvus_know(session, schema)
    refused = _Refused()
    for part in parts(list(rows.values()), schema):
        with session.gate(alone=True):
            _replace(session, schema, part, permit, refused)
    _written(session, collection, len(rows))
    refused.tell(session, schema, len(rows))


class _Refused:
    """The records at which the engine ends, each by itself."""

    def __init__(self) -> None:
        self._ids: list[Id] = []
        self._cause: EngineKilled | None = None

    def add(self, id: Id, cause: EngineKilled) -> None:
        self._ids.append(id)
        self._cause = cause

    def tell(self, session: Session, schema: Schema, sent: int) -> None:
        """Raise EngineKilled with their ids, if there are any."""
        if self._ids:
            named = ", ".join(map(repr, self._ids[:5])) + (" …" if len(self._ids) > 5 else "")
            count, what = sent - len(self._ids), counted(len(self._ids), "record")
            others = f"; the other {counted(count, 'record')} of this call are written" if count else ""
            raise EngineKilled(
                f"{' '.join(session.engine())} ended {_TRIES} times at the write of {what} of {schema.collection!r} ({named}), "
                f"and did not write {'it' if len(self._ids) == 1 else 'them'}{others}; look at the fields of the named ones",
                ids=self._ids,
            ) from self._cause


def _replace(session: Session, schema: Schema, rows: list[dict[str, Any]], permit: Permit, refused: _Refused) -> None:
    """Write these rows. If the engine ends under the call, send the halves instead of the same call.

    Lite 2.5 deletes, then inserts. The rows that a failed call has deleted are put back before anything else is tried.
    """
    engine = session.engine()
    before = _rows_before(session, schema, [row[schema.id_field] for row in rows]) if engine.lite2 else []
    write = functools.partial(_write, collection=schema.collection, rows=rows, engine=engine)
    for number in range(1, _TRIES + 1):
        try:
            return session.run(schema.collection, write, permit=permit, cuts=1)
        except EngineKilled as exc:
            _put_back(session, schema, before, permit)
            if len(rows) > 1:
                break
            if number == _TRIES:
                return None if _is_there(session, schema, rows[0]) else refused.add(rows[0][schema.id_field], exc)
        except (EngineUnavailable, Refused):
            raise
        except EngineError:
            _put_back(session, schema, before, permit)
            raise
    for half in (rows[: len(rows) // 2], rows[len(rows) // 2 :]):
        _replace(session, schema, half, permit, refused)
    return None


def _rows_before(session: Session, schema: Schema, ids: list[Id]) -> list[dict[str, Any]]:
    """Read the rows of these ids that the collection has, as `upsert` writes them; they may be larger than what replaces them."""
    output = [*output_of(schema, None), schema.vector_field]
    expression = ids_in(schema.id_field, ids)
    call = functools.partial(query, schema=schema, expression=expression, output=output, level=STRONG)
    try:
        rows = session.run(schema.collection, call, quoted=expression)
    except AnswerTooLarge:
        if len(ids) == 1:
            raise
        half = len(ids) // 2
        return [*_rows_before(session, schema, ids[:half]), *_rows_before(session, schema, ids[half:])]
    return [row_of(schema, record_of(schema, None, row)) for row in rows]


def _is_there(session: Session, schema: Schema, row: dict[str, Any]) -> bool:
    """Return whether the collection has this very row: the engine may have written it before it ended."""
    return any(
        there.keys() == row.keys() and all(np.array_equal(there[name], value) for name, value in row.items())
        for there in _rows_before(session, schema, [row[schema.id_field]])
    )


def _put_back(session: Session, schema: Schema, before: list[dict[str, Any]], permit: Permit) -> None:
    """Write the rows that a failed call has deleted; rows that it has written stay."""
    if not before:
        return
    there = {row[schema.id_field] for row in _rows_before(session, schema, [row[schema.id_field] for row in before])}
    if lost := [row for row in before if row[schema.id_field] not in there]:
        write = functools.partial(_write, collection=schema.collection, rows=lost, engine=session.engine())
        session.run(schema.collection, write, permit=permit)


def delete(session: Session, collection: str, ids: Sequence[Id], *, permit: Permit = always) -> None:
    """Remove the records of these ids; unknown ids are not an error."""
    schema = schema_of(session, collection)
    wanted = checked_ids(ids, schema, session.engine().limits)
    for start in range(0, len(wanted), IDS):
        expression = ids_in(schema.id_field, wanted[start : start + IDS])
        remove = functools.partial(_remove, collection=collection, expression=expression, engine=session.engine())
        session.run(collection, remove, quoted=expression, permit=permit)
    if session.engine().lite3:
        _written(session, collection, len(wanted))


def _let_pymilvus_know(session: Session, schema: Schema) -> None:
    """Let pymilvus read the schema now. It does so once in a process; in an upsert that would be a second call on one permit."""

    def look(client: MilvusClient) -> None:
        client.get(schema.collection, ["0"] if schema.id_type is IdType.VARCHAR else [0], output_fields=[schema.id_field], **ONCE)

    known = session.place(), schema.collection
    if known not in session.introduced:
        try:
            session.run(schema.collection, look)
        except (EngineUnavailable, CollectionMissing):
            raise
        except EngineError:
            pass  # a collection that is not loaded can be written all the same
        session.introduced.add(known)


def _written(session: Session, collection: str, rows: int) -> None:
    session.unflushed[collection] = session.unflushed.get(collection, 0) + rows
    if session.engine().lite3 and session.unflushed[collection] >= _FLUSH_AFTER:
        session.unflushed[collection] = 0
        session.run(collection, lambda client: client.flush(collection, **ONCE))


@contextlib.contextmanager
def _before_the_next(engine: Engine) -> Iterator[None]:
    """Make sure that the next call sees this one, on Lite 2.5, too: a search finds its rows, and a deletion removes them."""
    try:
        yield
    finally:  # the engine may have done it although no answer came
        if engine.lite2:
            time.sleep(_TICK)


def _write(client: MilvusClient, *, collection: str, rows: list[dict[str, Any]], engine: Engine) -> None:
    # In an upsert Lite 3 keeps the old record's undeclared fields. Its insert replaces the whole record.
    try:
        with _before_the_next(engine):
            done = (client.insert if engine.lite3 else client.upsert)(collection, rows, **ONCE)
    except foreign_errors() as exc:
        if any(isinstance(each, unwritable()) for each in (exc, exc.__context__)):  # pymilvus wraps its own
            raise Unwritable(f"Collection {collection!r} cannot hold these records: {text_of(exc)}; correct them") from exc
        raise
    # Lite 2.5 stops at a row that it has no memory for, and says that all is well.
    if (written := done.get("insert_count" if engine.lite3 else "upsert_count", len(rows))) < len(rows):
        raise EngineError(
            f"{' '.join(engine)} wrote {written} of {counted(len(rows), 'record')} of {collection!r}; look at its memory and "
            "disk, then run the same command again"
        )


def _remove(client: MilvusClient, *, collection: str, expression: str, engine: Engine) -> None:
    with _before_the_next(engine):
        client.delete(collection, filter=expression, **ONCE)
