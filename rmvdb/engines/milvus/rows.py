"""Records as rows, rows and results as records and hits, and how much of them one call carries."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from rmvdb.canonical import json_source
from rmvdb.errors import Mismatch
from rmvdb.types import Hit, Id, Metric, Record, Schema

#: Whether a record with these fields is meant.
Test: TypeAlias = Callable[[Mapping[str, Any]], bool]

#: The most rows of one query and hits of one search: Milvus' quotaAndLimits.limits.maxQueryResultWindow and topK.
WINDOW = 16_384
#: Bytes of one request or answer. Milvus 2.3 takes 64 MiB; Lite 2.5 sends 14 MB in half a second, 28 MB in 14.
MESSAGE = 8 * 2**20
#: The most rows or ids of one call.
IDS = 5_000


def row_of(schema: Schema, record: Record) -> dict[str, Any]:
    """A canonical record as it is written."""
    sources = {
        field.name: json_source(record.fields[field.name])
        for field in schema.fields
        if field.type == "JSON" and not (field.params.get("nullable") and record.fields[field.name] is None)
    }
    return {**record.fields, **sources, schema.id_field: record.id, schema.vector_field: record.vector}


def record_of(schema: Schema, fields: Sequence[str] | None, row: Mapping[str, Any]) -> Record:
    """A row that was read, as a record."""
    vector = row.get(schema.vector_field)
    array = None if vector is None else np.asarray(vector, dtype=np.float32)
    return Record(id=row[schema.id_field], vector=array, fields=_fields(schema, fields, row))


def hits_of(schema: Schema, fields: Sequence[str] | None, found: Any, test: Test | None = None) -> list[Hit]:
    """Hits with each id once, its nearest one; those that pass the test, if there is one."""
    hits: dict[Id, Hit] = {}
    for id, score, hit in zip(found.ids, found.distances, found, strict=True):
        if id not in hits and (test is None or test({**hit["entity"], schema.id_field: id})):
            distance = _distance(schema.metric, score)
            entity = _fields(schema, fields, hit["entity"])
            hits[id] = Hit(id=id, distance=distance, fields=entity, leg=schema.collection, raw=distance)
    return list(hits.values())


def _distance(metric: Metric, score: float) -> float:
    """Smaller is closer: Milvus gives the cosine, the inner product or the squared Euclidean distance."""
    if metric is Metric.COSINE:
        return 1.0 - score
    return -score if metric is Metric.IP else score


def output_of(schema: Schema, fields: Sequence[str] | None) -> list[str]:
    """Declared fields by name and the undeclared ones as a whole: only that works on every engine, empty collections too."""
    declared = [field.name for field in schema.fields]
    if fields is None:
        return [schema.id_field, *declared, *(["$meta"] if schema.dynamic else [])]
    unknown = [name for name in fields if name not in declared and name not in (schema.id_field, schema.vector_field)]
    if unknown and not schema.dynamic:
        raise Mismatch(f"Collection {schema.collection!r} has no field {unknown[0]!r}; it has {', '.join(declared) or 'none'}")
    return [schema.id_field, *(name for name in declared if name in fields), *(["$meta"] if unknown else [])]


def _fields(schema: Schema, fields: Sequence[str] | None, row: Mapping[str, Any]) -> dict[str, Any]:
    keys = row.keys() if fields is None else fields
    hidden = (schema.id_field, schema.vector_field, "$meta")
    return {key: _plain(row[key]) for key in keys if key in row and key not in hidden}


def _plain(value: Any) -> Any:
    """An ARRAY arrives as a message's own sequence."""
    return value if value is None or isinstance(value, str | int | float | dict | list) else list(value)


def parts(rows: list[dict[str, Any]], schema: Schema) -> Iterator[list[dict[str, Any]]]:
    """Rows in requests that stay under gRPC's limit."""
    part: list[dict[str, Any]] = []
    size = 0
    for row in rows:
        weight = weight_of(schema, row)
        if part and (size + weight > MESSAGE or len(part) >= IDS):
            yield part
            part, size = [], 0
        part.append(row)
        size += weight
    if part:
        yield part


def weight_of(schema: Schema, row: Mapping[str, Any]) -> int:
    """About how many bytes a row is on the wire."""
    fields = sum(len(repr(value)) for name, value in row.items() if name != schema.vector_field)
    return fields + 4 * schema.dim * (schema.vector_field in row)
