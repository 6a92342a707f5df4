"""Ids, fields and vectors as they are kept, or a refusal that names the record, the field, the value and the way out.

Whatever comes from outside passes here once. Behind it an id is an int or a str, a field has its declared type in plain Python,
and a vector can be ranked. Engines differ in what they check: Milvus Lite 2.5 writes 128 into an INT8 as -128 and gives a record
without a value its neighbour's, and each of them keeps NaN in a JSON as null. So the answer is given here, alike for all of
them, before anything is sent. What only some engines can hold is in `Limits`.
"""

from __future__ import annotations

import json
import math
import operator
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt

from rmvdb.errors import Mismatch, Unwritable, UsageError
from rmvdb.types import Field, Id, IdType, Metric, Record, Schema, Vectors

#: Ids strictly between these are served: Milvus 2.3 cannot write the smallest INT64 down, and hides a record of the largest.
INT64_BOUNDS = (-(2**63), 2**63 - 1)
#: Whole numbers that a JSON keeps on every engine; beyond them it becomes a float.
_JSON_BOUNDS = (-(2**63), 2**64 - 1)
#: Levels of lists and objects in one value. Every engine takes hundreds, Python's own recursion ends there.
_DEEPEST = 100
_BITS = {"INT8": 8, "INT16": 16, "INT32": 32, "INT64": 64}
#: Squared lengths of vectors that every engine ranks. Below, COSINE divides by what float32 cannot tell from 0 (measured from
#: 1e-22 on); above, a squared distance may be infinite, and the record is found by no search.
_SHORTEST, _LONGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max) / 4

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 60


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What an engine cannot hold, though the schema allows it."""

    engine: str = "this engine"
    #: Types that a JSON field can be as a whole.
    json: tuple[type, ...] = (dict, list, str, bool, int, float, type(None))
    #: Bytes of one JSON field, and of all undeclared fields of a record together; None where there is no bound.
    json_bytes: int | None = None
    #: Characters that an id may not contain.
    not_in_ids: str = ""


class _ProblemError(Exception):
    """What is wrong with a value and the way out, to follow the name of its field."""


# --- ids --------------------------------------------------------------------------------------------------------------


def id_of(value: object) -> Id:
    """The id as an int or a str: numpy's and torch's whole numbers and enums become these. Mismatch for anything else."""
    found = _id(value)
    if found is None:
        raise Mismatch(f"An id is a whole number or a text, not {_short.repr(value)}, a {type(value).__name__}; convert it")
    return found


def ids_of(values: object) -> list[Id]:
    """The ids that a caller gave: one, or several in a list, a set, an array, a generator …"""
    found = _plain(values)
    if isinstance(found, str) or not isinstance(found, Iterable) or isinstance(found, (bytes, bytearray, memoryview)):
        return [id_of(found)]
    if isinstance(found, Mapping):
        raise Mismatch(f"Ids come one by one or in a list, not in a {type(values).__name__}; give its keys or its values")
    return [id_of(each) for each in found]


def _id(value: object) -> Id | None:
    found = _plain(value)
    if isinstance(found, str):
        if not _is_unicode(found):
            raise Mismatch(f"The id {_short.repr(found)} is no text that can be stored: it has a lone surrogate; correct it")
        return str.__str__(found)
    return operator.index(found) if isinstance(found, SupportsIndex) and not isinstance(found, bool) else None


def checked_id(value: object, schema: Schema) -> Id:
    """The id as the collection keeps it; Mismatch for one that it cannot hold or that no filter could name."""
    id = _id(value)
    if id is None or isinstance(id, str) is not (schema.id_type is IdType.VARCHAR):
        raise Mismatch(f"Collection {schema.collection!r} has ids of type {schema.id_type.value}; {_short.repr(value)} is none")
    low, high = INT64_BOUNDS
    if isinstance(id, int) and not low < id < high:
        raise Mismatch(f"The id {id} cannot be served: Milvus misreads or hides the ids {low} and {high}; take one between them")
    return id


def checked_ids(values: Iterable[object], schema: Schema, limits: Limits | None = None) -> list[Id]:
    """The ids, each once; with `limits` only if the engine can write and delete them, else Unwritable."""
    found = list(dict.fromkeys(checked_id(value, schema) for value in values))
    banned = set(limits.not_in_ids) if limits else set()
    if banned and (bad := next((id for id in found if isinstance(id, str) and banned & set(id)), None)) is not None:
        raise Unwritable(
            f"{limits and limits.engine} cannot write or delete the id {bad!r}: quotes, line breaks and NUL break its SQL; "
            "use a Milvus server or rename the id"
        )
    return found


def _check_length(id: Id, schema: Schema) -> None:
    """Unwritable for an id that is longer than its collection takes; Milvus Lite 2.5 would not count."""
    if isinstance(id, str) and (size := len(id.encode())) > schema.id_max_length:
        raise Unwritable(
            f"The id {_short.repr(id)} has {size} bytes, and collection {schema.collection!r} takes {schema.id_max_length}; "
            "shorten it"
        )


# --- fields -----------------------------------------------------------------------------------------------------------


def record_of(schema: Schema, record: Record, limits: Limits, *, as_read: bool = False) -> Record:
    """The record as the collection keeps it, its vector included; `as_read`: as a collection of this engine held it already."""
    [id] = checked_ids([record.id], schema, limits)
    if not as_read:
        _check_length(id, schema)
    vector = vector_of(schema, record, as_read=as_read)
    fields = fields_as_read(schema, id, record.fields) if as_read else fields_of(schema, id, record.fields, limits)
    if id is record.id and vector is record.vector and fields is record.fields:
        return record  # as most that are copied: a batch is in memory once
    return Record(id=id, vector=vector, fields=fields)


def without_vectors(schema: Schema, records: Sequence[Record], limits: Limits) -> list[Record]:
    """These records, vectors left out, as the collection would keep them; Mismatch or Unwritable for the first that it cannot."""
    ids = [checked_ids([record.id], schema, limits)[0] for record in records]
    for id in ids:
        _check_length(id, schema)
    return [Record(id=id, fields=fields_of(schema, id, record.fields, limits)) for id, record in zip(ids, records, strict=True)]


def fields_of(schema: Schema, id: Id, given: Mapping[str, Any], limits: Limits) -> dict[str, Any]:
    """The fields of a record as they are kept, defaults filled in; Unwritable, with id, field and value, for what cannot be."""
    declared = {field.name: field for field in schema.fields}
    _check_names(schema, id, given, declared)
    kept = {name: _declared(schema, id, field, given, limits) for name, field in declared.items()}
    extra = {name: _tried(id, name, lambda value: _json(value, _DEEPEST), given[name]) for name in given if name not in declared}
    if extra and limits.json_bytes is not None and (size := _size(extra)) > limits.json_bytes:
        raise Unwritable(
            f"Record {id!r} cannot be written: its undeclared fields have {size:,} bytes as JSON, and {limits.engine} takes "
            f"{limits.json_bytes:,}; shorten {max(extra, key=lambda name: _size(extra[name]))!r}"
        )
    return kept | {str.__str__(name): value for name, value in extra.items()}


def fields_as_read(schema: Schema, id: Id, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields of a record that a collection of these fields holds already: believed, but for a value that is not there."""
    absent = {field.name: _absent(schema, id, field, given) for field in schema.fields if given.get(field.name) is None}
    return {**given, **absent} if absent else given


def _check_names(schema: Schema, id: Id, given: Mapping[str, Any], declared: Mapping[str, Field]) -> None:
    for name in given:
        if not isinstance(name, str) or not _is_unicode(name):
            raise Unwritable(f"Record {id!r} has a field by the name {_short.repr(name)}; a name is a text: correct it")
        if name in (schema.id_field, schema.vector_field, "$meta"):
            what = {schema.id_field: "key", schema.vector_field: "vector"}.get(name, "own undeclared fields")
            raise Unwritable(
                f"Record {id!r} has a field {name!r}, by which name collection {schema.collection!r} has its {what}; leave it out"
            )
        if name not in declared and not schema.dynamic:
            raise Unwritable(f"Collection {schema.collection!r} has no field {name!r}, which record {id!r} has; leave it out")


def _declared(schema: Schema, id: Id, field: Field, given: Mapping[str, Any], limits: Limits) -> Any:
    value = given.get(field.name)
    if value is None:
        value = _absent(schema, id, field, given)
    if value is None and field.params.get("nullable"):
        return None

    def kept(value: Any) -> Any:
        found = _OF_TYPE.get(field.type, _as_it_is)(value, field)
        if field.type == "JSON":
            _check_json(found, limits)
        return found

    return _tried(id, field.name, kept, value)


def _absent(schema: Schema, id: Id, field: Field, given: Mapping[str, Any]) -> Any:
    """What stands for a value that was not given: the default, null where the field takes it, else there must be one.

    Engines would fill in the default themselves; Milvus Lite 2.5 takes the values of the records behind it instead.
    """
    if (default := field.params.get("default_value")) is not None:
        return default
    if field.params.get("nullable") or (field.type == "JSON" and field.name in given):
        return None
    problem = "is None, which it has no null for" if field.name in given else "is missing"
    raise Unwritable(
        f"Record {id!r} cannot be written: its field {field.name!r} {problem}; collection {schema.collection!r} needs "
        f"{'an' if field.type[0] in 'AI' else 'a'} {field.type} in every record"
    )


def _tried(id: Id, name: str, kept: Callable[[Any], Any], value: Any) -> Any:
    try:
        return kept(value)
    except _ProblemError as exc:
        raise Unwritable(f"Record {id!r} cannot be written: its field {name!r} {exc}") from None


def _boolean(value: Any, field: Field) -> bool:
    found = _plain(value)
    if not isinstance(found, bool):
        raise _ProblemError(f"is {_short.repr(value)}, and takes True or False; convert it")
    return found


def _integer(value: Any, field: Field) -> int:
    found = _plain(value)
    if isinstance(found, bool) or not isinstance(found, int):
        raise _ProblemError(f"is {_short.repr(value)}, and takes whole numbers ({field.type}); convert it")
    most = 2 ** (_BITS[field.type] - 1)
    if not -most <= found < most:
        raise _ProblemError(f"is {_short.repr(found)}, and {field.type} goes from {-most} to {most - 1}; correct it")
    return int(found)


def _real(value: Any, field: Field) -> float:
    """A float as its type keeps it; infinity and NaN are values of it, too."""
    found = _plain(value)
    if isinstance(found, bool) or not isinstance(found, int | float):
        raise _ProblemError(f"is {_short.repr(value)}, and takes numbers ({field.type}); convert it")
    try:
        number = float(found)
    except OverflowError:
        number = math.inf
    with np.errstate(over="ignore"):
        kept = float(np.float32(number)) if field.type == "FLOAT" else number
    if math.isinf(kept) and not (isinstance(found, float) and math.isinf(found)):
        raise _ProblemError(f"is {_short.repr(found)}, which is too large for {field.type}; correct it")
    return kept


def _text(value: Any, field: Field) -> str:
    found = _plain(value)
    if not isinstance(found, str) or not _is_unicode(found):
        problem = "has a lone surrogate, which is no text" if isinstance(found, str) else "takes a text"
        raise _ProblemError(f"is {_short.repr(value)}, and {problem}; convert it")
    longest = field.params.get("max_length")
    if longest is not None and (size := len(found.encode())) > int(longest):
        raise _ProblemError(f"is {_short.repr(found)}, {size} bytes long, and takes {longest}; shorten it")
    return str.__str__(found)


def _array(value: Any, field: Field) -> list[Any]:
    found = _plain(value)
    if not isinstance(found, list | tuple):
        raise _ProblemError(f"is {_short.repr(value)}, and takes a list; convert it")
    most = field.params.get("max_capacity")
    if most is not None and len(found) > int(most):
        raise _ProblemError(f"has {len(found)} elements, and takes {most}; shorten it")
    element = replace(field, type=str(field.params.get("element_type", "")))
    kept = _OF_TYPE.get(element.type, _as_it_is)
    try:
        return [kept(each, element) for each in found]
    except _ProblemError as exc:
        raise _ProblemError(f"has an element that {exc}") from None


def _as_it_is(value: Any, field: Field) -> Any:
    return value


#: The value of a declared field, by its type; other types are left to the engine.
_OF_TYPE: dict[str, Callable[[Any, Field], Any]] = {
    "BOOL": _boolean,
    **dict.fromkeys(_BITS, _integer),
    "FLOAT": _real,
    "DOUBLE": _real,
    "VARCHAR": _text,
    "ARRAY": _array,
    "JSON": lambda value, _: _json(value, _DEEPEST),
}


def _json(value: Any, levels: int) -> Any:
    """The value in JSON's own types, as every engine gives it back."""
    if levels < 0:
        raise _ProblemError(f"is nested deeper than {_DEEPEST} levels; flatten it")
    value = _plain(value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int | float | str):
        return _json_scalar(value)
    if isinstance(value, Mapping):
        if bad := [key for key in value if not isinstance(key, str) or not _is_unicode(key)]:
            raise _ProblemError(f"has the key {_short.repr(bad[0])}, and JSON has texts as keys; convert it")
        return {str.__str__(key): _json(each, levels - 1) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_json(each, levels - 1) for each in value]
    raise _ProblemError(
        f"holds {_short.repr(value)}, and JSON has no {type(value).__name__}; give numbers, texts, lists or dictionaries of them"
    )


def _json_scalar(value: float | str) -> Any:
    if isinstance(value, str):
        if not _is_unicode(value):
            raise _ProblemError(f"holds {_short.repr(value)}, which has a lone surrogate and is no text; correct it")
        return str.__str__(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise _ProblemError(f"holds {float(value)}, which JSON has no number for; leave it out, or give None")
        return float(value)
    low, high = _JSON_BOUNDS
    if not low <= value <= high:
        raise _ProblemError(f"holds {_short.repr(value)}, which has more than 64 bits; give it as a text")
    return int(value)


def _check_json(value: Any, limits: Limits) -> None:
    if not isinstance(value, limits.json):
        raise _ProblemError(
            f"is {_short.repr(value)}, and {limits.engine} has no JSON field that is "
            f"{'null' if value is None else f'a {type(value).__name__}'}; wrap it in a dictionary"
        )
    if limits.json_bytes is not None and (size := _size(value)) > limits.json_bytes:
        raise _ProblemError(f"has {size:,} bytes as JSON, and {limits.engine} takes {limits.json_bytes:,}; shorten it")


def json_source(value: Any) -> str:
    """A JSON value as it is sent: pymilvus takes a text for the source of one, so that it is given the source of each."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _size(value: Any) -> int:
    return len(json_source(value).encode())


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _plain(value: Any) -> Any:
    """What numpy and torch hold, as Python's own: a number of one that has no dimension, else lists."""
    if type(value) in (int, str, float, bool, dict, list):
        return value
    as_list: Any = getattr(value, "tolist", None)
    return as_list() if as_list is not None and hasattr(value, "dtype") else value


# --- vectors ----------------------------------------------------------------------------------------------------------


def vector_of(schema: Schema, record: Record, *, as_read: bool) -> Vectors:
    """The record's vector (dim,), float32; Mismatch for one that the collection cannot hold or its metric cannot rank.

    One that was read from a collection is held as it was there, whether it was ever found by a search or not.
    """
    with np.errstate(over="ignore"):  # what is too large becomes infinity
        vector = np.asarray([] if record.vector is None else record.vector, dtype=np.float32)
    name, dim = schema.collection, schema.dim
    if vector.shape != (dim,) or not np.isfinite(vector).all():
        problem = f"shape {vector.shape}" if vector.shape != (dim,) else "values that are not finite"
        raise Mismatch(f"Record {record.id!r} has a vector with {problem}; {name!r} takes {dim} finite numbers")
    if not as_read and (why := unrankable(vector[None], schema.metric)):
        raise Mismatch(f"Record {record.id!r} has a vector that {why[0]}; correct what made it")
    return vector


def queries_of(schema: Schema, vectors: Vectors) -> Vectors:
    """Query vectors (n, dim), float32; Mismatch for those of another dimension or that the metric cannot rank by."""
    with np.errstate(over="ignore"):
        queries = np.ascontiguousarray(vectors, dtype=np.float32)
    if queries.ndim != 2 or queries.shape[1] != schema.dim:
        name, dim = schema.collection, schema.dim
        raise Mismatch(f"Collection {name!r} has vectors of dimension {dim}; the queries have shape {queries.shape}")
    for at, why in unrankable(queries, schema.metric).items():
        which = "The query" if len(queries) == 1 else f"Query {at} of {len(queries)}"
        raise Mismatch(f"{which} has a vector that {why}; correct what made it")
    return queries


def unrankable(vectors: npt.NDArray[np.floating[Any]], metric: Metric) -> dict[int, str]:
    """By row of `vectors` (n, dim), why the metric cannot rank it by its distance."""
    with np.errstate(over="ignore", invalid="ignore"):
        squares = np.square(vectors.astype(np.float64)).sum(axis=1)  # (n,)
    shortest = _SHORTEST if metric is Metric.COSINE else 0.0
    odd = np.flatnonzero(~((squares >= shortest) & (squares <= _LONGEST)))
    return {int(at): _why_unrankable(float(squares[at]), metric) for at in odd}


def _why_unrankable(square: float, metric: Metric) -> str:
    if not math.isfinite(square):
        return "has values that are not finite"
    if square > _LONGEST:
        return f"has the length {math.sqrt(square):.1e}, whose square is too large for a distance"
    return f"has the length {math.sqrt(square):.1g}, and so no direction that {metric.value} could compare"


# --- arguments --------------------------------------------------------------------------------------------------------


def names_of(fields: object) -> tuple[str, ...] | None:
    """The fields that a caller asks for, None for all of them ("*"); a text is one name. UsageError for anything else."""
    names = (fields,) if isinstance(fields, str) else fields
    if not isinstance(names, Iterable) or isinstance(names, Mapping):
        raise UsageError(f'output_fields is a list of names, or ["*"] for all, not {_short.repr(fields)}')
    found = tuple(names)
    if bad := [name for name in found if not isinstance(name, str)]:
        raise UsageError(f"output_fields has {_short.repr(bad[0])}, and the name of a field is a text")
    return None if "*" in found else found


def whole(name: str, value: object, *, least: int) -> int:
    """A whole number of at least `least`; UsageError, by the name of the argument, for anything else."""
    found = _plain(value)
    if not isinstance(found, SupportsIndex) or isinstance(found, bool):
        raise UsageError(f"{name} is a whole number, not {_short.repr(value)}")
    if (number := operator.index(found)) < least:
        raise UsageError(f"{name} must be at least {least}, not {number}")
    return number
