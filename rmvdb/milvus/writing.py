"""Upserts and deletes."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rmvdb.errors import CollectionMissing, EngineError, EngineUnavailable, Unwritable
from rmvdb.filters import checked_id, ids_in
from rmvdb.milvus.connection import Engine
from rmvdb.milvus.describing import schema_of
from rmvdb.milvus.driver import ONCE, foreign_errors, unwritable
from rmvdb.milvus.failures import text_of
from rmvdb.milvus.rows import IDS, parts, row_of
from rmvdb.milvus.session import Session
from rmvdb.protocols import Permit, always
from rmvdb.types import Id, IdType, Record, Schema

if TYPE_CHECKING:
    from rmvdb.milvus.driver import MilvusClient

#: Rows after which Lite 3 is told to flush: searching 100,000 unflushed ones took it twice as long.
_FLUSH_AFTER = 10_000
#: Lite 2.5 orders calls by the milliseconds of the clock: of two within the same one, the second does not see the first's rows.
_TICK = 0.0011


def upsert(session: Session, collection: str, records: Sequence[Record], *, permit: Permit = always) -> None:
    """Write records (vectors required), replacing those of the same id; returns when all are written."""
    schema = schema_of(session, collection)
    # A key that stands twice in one call would be stored twice: the last one counts.
    rows = {row[schema.id_field]: row for row in (row_of(schema, record) for record in records)}
    _check_ids(session, rows)
    if rows:
        _let_pymilvus_know(session, schema)
    for part in parts(list(rows.values()), schema):
        write = functools.partial(_write, collection=collection, rows=part, engine=session.engine())
        with session.gate(alone=True):
            session.run(collection, write, permit=permit)
    _written(session, collection, len(rows))


def delete(session: Session, collection: str, ids: Sequence[Id], *, permit: Permit = always) -> None:
    """Remove the records of these ids; ids that are not there are no error."""
    schema = schema_of(session, collection)
    wanted = list(dict.fromkeys(checked_id(id, schema) for id in ids))
    _check_ids(session, wanted)
    for start in range(0, len(wanted), IDS):
        expression = ids_in(schema.id_field, wanted[start : start + IDS])
        remove = functools.partial(_remove, collection=collection, expression=expression, engine=session.engine())
        session.run(collection, remove, permit=permit)
    _written(session, collection, len(wanted))


def _check_ids(session: Session, ids: Any) -> None:
    """Lite 2.5 deletes, and so upserts, with SQL that it writes itself: a quote in an id would be read as SQL."""
    if session.engine().lite2 and (bad := next((id for id in ids if isinstance(id, str) and set(id) & set("'\0\n\r")), None)):
        raise EngineError(
            f"Milvus Lite 2.5 cannot write or delete the id {bad!r}: quotes, line breaks and NUL break its SQL; "
            "use a Milvus server or rename the id"
        )


def _let_pymilvus_know(session: Session, schema: Schema) -> None:
    """pymilvus asks for the schema of a collection once in a process; in an upsert that would be a second call by one permit."""

    def look(client: MilvusClient) -> None:
        client.get(schema.collection, ["0"] if schema.id_type is IdType.VARCHAR else [0], output_fields=[schema.id_field], **ONCE)

    known = session.place(), schema.collection
    if known not in session.introduced:
        try:
            session.run(schema.collection, look)
        except (EngineUnavailable, CollectionMissing):
            raise
        except EngineError:
            pass  # one that is not loaded can be written all the same
        session.introduced.add(known)


def _written(session: Session, collection: str, rows: int) -> None:
    if not rows or not session.engine().lite3:
        return
    session.unflushed[collection] = session.unflushed.get(collection, 0) + rows
    if session.unflushed[collection] >= _FLUSH_AFTER:
        session.unflushed[collection] = 0
        session.run(collection, lambda client: client.flush(collection, **ONCE))


@contextlib.contextmanager
def _before_the_next(engine: Engine) -> Iterator[None]:
    """A call that the next one sees: a search finds its rows, and a deletion removes them, on Lite 2.5, too."""
    try:
        yield
    finally:  # it may have been made although no answer came
        if engine.lite2:
            time.sleep(_TICK)


def _write(client: MilvusClient, *, collection: str, rows: list[dict[str, Any]], engine: Engine) -> None:
    # Lite 3 keeps the undeclared fields of the old record in an upsert; its insert replaces a record of that id whole.
    try:
        with _before_the_next(engine):
            (client.insert if engine.lite3 else client.upsert)(collection, rows, **ONCE)
    except foreign_errors() as exc:
        if any(isinstance(each, unwritable()) for each in (exc, exc.__context__)):  # pymilvus wraps its own
            raise Unwritable(f"Collection {collection!r} cannot hold these records: {text_of(exc)}; mend them") from exc
        raise


def _remove(client: MilvusClient, *, collection: str, expression: str, engine: Engine) -> None:
    with _before_the_next(engine):
        client.delete(collection, filter=expression, **ONCE)
