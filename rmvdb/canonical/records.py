"""Records: id, vector and fields as the collection stores them."""

from __future__ import annotations

from collections.abc import Sequence

from rmvdb.canonical.fields import fields_as_read, fields_of
from rmvdb.canonical.ids import check_length, checked_ids
from rmvdb.canonical.limits import EngineLimits
from rmvdb.canonical.vectors import vector_of
from rmvdb.types import Record, Schema


def record_of(schema: Schema, record: Record, limits: EngineLimits, *, as_read: bool = False) -> Record:
    """Return the record as the collection stores it, with its vector. `as_read`: a collection of this engine held it already."""
    [id] = checked_ids([record.id], schema, limits)
    if not as_read:
        check_length(id, schema)
    vector = vector_of(schema, record, as_read=as_read)
    fields = fields_as_read(schema, id, record.fields) if as_read else fields_of(schema, id, record.fields, limits)
    if id is record.id and vector is record.vector and fields is record.fields:
        return record  # like most copied records, so that a batch is in memory once
    return Record(id=id, vector=vector, fields=fields)


def without_vectors(schema: Schema, records: Sequence[Record], limits: EngineLimits) -> list[Record]:
    """Return the records as the collection would store them, without vectors.

    Raises:
        Mismatch: the collection cannot hold an id.
        Unwritable: it cannot hold a field or an id of that length.
    """
    ids = [checked_ids([record.id], schema, limits)[0] for record in records]
    for id in ids:
        check_length(id, schema)
    return [Record(id=id, fields=fields_of(schema, id, record.fields, limits)) for id, record in zip(ids, records, strict=True)]
