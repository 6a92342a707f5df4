"""Records as rows, rows as records, results as hits, and how many of them one call carries."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from rmvdb.canonical.json_values import json_source
from rmvdb.errors import Mismatch
from rmvdb.types import Hit, Id, Metric, Record, Schema

#: Whether a record with these fields matches.
Test: TypeAlias = Callable[[Mapping[str, Any]], bool]

#: The most rows of one query and hits of one search: Milvus' quotaAndLimits.limits.maxQueryResultWindow and topK.
WINDOW = 16_384
#: Bytes of one request or answer. Milvus 2.3 takes 64 MiB; Lite 2.5 sends 14 MB in half a second, 28 MB in 14.
MESSAGE = 8 * 2**20
#: The most rows or ids of one call.
IDS = 5_000


def row_of(schema: Schema, record: Record) -> dict[str, Any]:
    """Return a canonical record as the row to write."""
    sources = {
        field.name: json_source(record.fields[field.name])
        for field in schema.fields
        if field.type == "JSON" and not (field.params.get("nullable") and record.fields[field.name] is None)
    }
    return {**record.fields, **sources, schema.id_field: record.id, schema.vector_field: record.vector}


def record_of(schema: Schema, fields: Sequence[str] | None, row: Mapping[str, Any]) -> Record:
    """Return a row of an answer as a record."""
    vector = row.get(schema.vector_field)
    # Its own array: a part of the answer's would keep the vectors of all rows in memory.
    array = None if vector is None else np.array(vector, dtype=np.float32)
    return Record(id=row[schema.id_field], vector=array, fields=_fields(schema, fields, row))


def hits_of(schema: Schema, fields: Sequence[str] | None, answer: Any, test: Test | None = None) -> list[Hit]:
    """Return the hits that pass the test, with each id once, its nearest hit."""
    hits: dict[Id, Hit] = {}
    # pymilvus makes a row when it is asked for, which takes as long as all the rest.
    reads = test is not None or fields is None or len(fields) > 0
    rows = (hit["entity"] for hit in answer) if reads else ({} for _ in answer.ids)
    for id, score, row in zip(answer.ids, answer.distances, rows, strict=True):
        if id not in hits and (test is None or test({**row, schema.id_field: id})):
            distance = _distance(schema.metric, score)
            entity = _fields(schema, fields, row)
            hits[id] = Hit(id=id, distance=distance, fields=entity, leg=schema.collection, raw=distance)
    return list(hits.values())


def _distance(metric: Metric, score: float) -> float:
    """Return a distance, smaller is closer. Milvus gives the cosine, the inner product or the squared Euclidean distance."""
    if metric is Metric.COSINE:
        return 1.0 - score
    return -score if metric is Metric.IP else score


def output_of(schema: Schema, fields: Sequence[str] | None) -> list[str]:
    """Name declared fields one by one and undeclared ones as a whole: only that works on every engine and empty collection."""
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
    """Return a plain value; an ARRAY arrives as a message's own sequence."""
    return value if value is None or isinstance(value, str | int | float | dict | list) else list(value)


def parts(rows: list[dict[str, Any]], schema: Schema) -> Iterator[list[dict[str, Any]]]:
    """Split rows into requests that stay under gRPC's limit."""
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
    """Return about how many bytes a row takes on the wire."""
    fields = sum(len(repr(value)) for name, value in row.items() if name != schema.vector_field)
    return fields + 4 * schema.dim * (schema.vector_field in row)
