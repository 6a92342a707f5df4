"""The one door for ids, fields and vectors: each becomes canonical, or is refused with its record, field, value and remedy.

Every value from outside passes here once. After that, an id is an int or a str, a field has its declared type in plain Python,
and a vector can be ranked. Engines check differently: Milvus Lite 2.5 writes 128 into an INT8 as -128, and gives a record without
a value the value of its neighbour. Every engine stores NaN in a JSON as null. So rmvdb decides here, alike for all engines and
before it sends anything. `EngineLimits` holds the differences between engines.
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

#: rmvdb serves ids strictly between these: Milvus 2.3 cannot write the smallest INT64, and hides a record with the largest.
INT64_BOUNDS = (-(2**63), 2**63 - 1)
#: The whole numbers that a JSON keeps on every engine. Others become floats.
_JSON_BOUNDS = (-(2**63), 2**64 - 1)
#: The deepest nesting of one value. Every engine takes hundreds of levels, but Python's recursion ends there.
_DEEPEST = 100
_BITS = {"INT8": 8, "INT16": 16, "INT32": 32, "INT64": 64}
#: The squared lengths of vectors that every engine ranks. Below, COSINE divides by a number that is 0 in float32 (measured from
#: 1e-22 on). Above, a squared distance may be infinite, and no search finds the record.
_SHORTEST, _LONGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max) / 4

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 60


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineLimits:
    """The limits of an engine on values that the schema allows."""

    engine: str = "this engine"
    #: The types of a whole JSON field.
    json: tuple[type, ...] = (dict, list, str, bool, int, float, type(None))
    #: The most bytes of one JSON field, and of all undeclared fields of a record together. None if there is no limit.
    json_bytes: int | None = None
    #: The characters that an id must not contain.
    not_in_ids: str = ""


class _ProblemError(Exception):
    """The problem of a value and its remedy, as the end of a sentence that begins with the field."""


# --- ids --------------------------------------------------------------------------------------------------------------


def id_of(value: object) -> Id:
    """Return the id as an int or a str. Whole numbers and enums of numpy and torch become these.

    Raises:
        Mismatch: it is something else.
    """
    id = _id(value)
    if id is None:
        raise Mismatch(f"An id is a whole number or a text, not {_short.repr(value)}, a {type(value).__name__}; convert it")
    return id


def ids_of(values: object) -> list[Id]:
    """Return the ids of an argument: one id, or several in a list, a set, an array, a generator …"""
    plain = _plain(values)
    if isinstance(plain, str) or not isinstance(plain, Iterable) or isinstance(plain, (bytes, bytearray, memoryview)):
        return [id_of(plain)]
    if isinstance(plain, Mapping):
        raise Mismatch(f"Ids come one by one or in a list, not in a {type(values).__name__}; give its keys or its values")
    return [id_of(each) for each in plain]


def _id(value: object) -> Id | None:
    if type(value) is int or (type(value) is str and value.isascii()):
        return value  # nearly every one: a batch is checked some ten times on its way
    plain = _plain(value)
    if isinstance(plain, str):
        if not _is_unicode(plain):
            raise Mismatch(f"The id {_short.repr(plain)} cannot be stored as a text: it has a lone surrogate; correct it")
        return str.__str__(plain)
    return operator.index(plain) if isinstance(plain, SupportsIndex) and not isinstance(plain, bool) else None


def checked_id(value: object, schema: Schema) -> Id:
    """Return the id as the collection stores it.

    Raises:
        Mismatch: the collection cannot hold it, or no filter could name it.
    """
    id = _id(value)
    if id is None or isinstance(id, str) is not (schema.id_type is IdType.VARCHAR):
        raise Mismatch(f"Collection {schema.collection!r} has ids of type {schema.id_type.value}, not {_short.repr(value)}")
    low, high = INT64_BOUNDS
    if isinstance(id, int) and not low < id < high:
        raise Mismatch(f"The id {id} cannot be served: Milvus misreads or hides the ids {low} and {high}; take one between them")
    return id


def checked_ids(values: Iterable[object], schema: Schema, limits: EngineLimits | None = None) -> list[Id]:
    """Return the ids, each once.

    Raises:
        Mismatch: as `checked_id`.
        Unwritable: with `limits`, if the engine cannot write or delete an id.
    """
    ids = list(dict.fromkeys(checked_id(value, schema) for value in values))
    banned = set(limits.not_in_ids) if limits else set()
    if banned and (bad := next((id for id in ids if isinstance(id, str) and banned & set(id)), None)) is not None:
        raise Unwritable(
            f"{limits and limits.engine} cannot write or delete the id {bad!r}: quotes, line breaks and NUL break its SQL; "
            "use a Milvus server or rename the id"
        )
    return ids


def _check_length(id: Id, schema: Schema) -> None:
    """Raise Unwritable if an id is longer than its collection takes. Milvus Lite 2.5 does not check that."""
    if isinstance(id, str) and (size := len(id.encode())) > schema.id_max_length:
        raise Unwritable(
            f"The id {_short.repr(id)} has {size} bytes, and collection {schema.collection!r} takes {schema.id_max_length}; "
            "shorten it"
        )


# --- fields -----------------------------------------------------------------------------------------------------------


def record_of(schema: Schema, record: Record, limits: EngineLimits, *, as_read: bool = False) -> Record:
    """Return the record as the collection stores it, with its vector. `as_read`: a collection of this engine held it already."""
    [id] = checked_ids([record.id], schema, limits)
    if not as_read:
        _check_length(id, schema)
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
        _check_length(id, schema)
    return [Record(id=id, fields=fields_of(schema, id, record.fields, limits)) for id, record in zip(ids, records, strict=True)]


def fields_of(schema: Schema, id: Id, given: Mapping[str, Any], limits: EngineLimits) -> dict[str, Any]:
    """Return a record's fields as the collection stores them, with defaults.

    Raises:
        Unwritable: it cannot store a field. The message names id, field and value.
    """
    declared = {field.name: field for field in schema.fields}
    _check_names(schema, id, given, declared)
    stored = {name: _declared(schema, id, field, given, limits) for name, field in declared.items()}
    extra = {
        name: _converted(id, name, lambda value: _json(value, _DEEPEST), given[name]) for name in given if name not in declared
    }
    if extra and limits.json_bytes is not None and (size := _size(extra)) > limits.json_bytes:
        raise Unwritable(
            f"Record {id!r} cannot be written: its undeclared fields have {size:,} bytes as JSON, and {limits.engine} takes "
            f"{limits.json_bytes:,}; shorten {max(extra, key=lambda name: _size(extra[name]))!r}"
        )
    return stored | {str.__str__(name): value for name, value in extra.items()}


def fields_as_read(schema: Schema, id: Id, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields of a record that a collection with these fields holds already. Only missing values are filled in."""
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


def _declared(schema: Schema, id: Id, field: Field, given: Mapping[str, Any], limits: EngineLimits) -> Any:
    value = given.get(field.name)
    if value is None:
        value = _absent(schema, id, field, given)
    if value is None and field.params.get("nullable"):
        return None

    def convert(value: Any) -> Any:
        converted = _OF_TYPE.get(field.type, _as_it_is)(value, field)
        if field.type == "JSON":
            _check_json(converted, limits)
        return converted

    return _converted(id, field.name, convert, value)


def _absent(schema: Schema, id: Id, field: Field, given: Mapping[str, Any]) -> Any:
    """Return the value for a missing one: the default, or null if the field takes it.

    Engines would fill in the default themselves, but Milvus Lite 2.5 takes the values of the records after it instead.

    Raises:
        Unwritable: the field has neither.
    """
    if (default := field.params.get("default_value")) is not None:
        return default
    if field.params.get("nullable") or (field.type == "JSON" and field.name in given):
        return None
    problem = "is None, and takes no null" if field.name in given else "is missing"
    raise Unwritable(
        f"Record {id!r} cannot be written: its field {field.name!r} {problem}; collection {schema.collection!r} needs "
        f"{'an' if field.type[0] in 'AI' else 'a'} {field.type} in every record"
    )


def _converted(id: Id, name: str, convert: Callable[[Any], Any], value: Any) -> Any:
    try:
        return convert(value)
    except _ProblemError as exc:
        raise Unwritable(f"Record {id!r} cannot be written: its field {name!r} {exc}") from None


def _boolean(value: Any, field: Field) -> bool:
    plain = _plain(value)
    if not isinstance(plain, bool):
        raise _ProblemError(f"is {_short.repr(value)}, and takes True or False; convert it")
    return plain


def _integer(value: Any, field: Field) -> int:
    plain = _plain(value)
    if isinstance(plain, bool) or not isinstance(plain, int):
        raise _ProblemError(f"is {_short.repr(value)}, and takes whole numbers ({field.type}); convert it")
    most = 2 ** (_BITS[field.type] - 1)
    if not -most <= plain < most:
        raise _ProblemError(f"is {_short.repr(plain)}, and {field.type} goes from {-most} to {most - 1}; correct it")
    return int(plain)


def _real(value: Any, field: Field) -> float:
    """Return a float in the precision of its type. Infinity and NaN are valid."""
    plain = _plain(value)
    if isinstance(plain, bool) or not isinstance(plain, int | float):
        raise _ProblemError(f"is {_short.repr(value)}, and takes numbers ({field.type}); convert it")
    try:
        number = float(plain)
    except OverflowError:
        number = math.inf
    with np.errstate(over="ignore"):
        rounded = float(np.float32(number)) if field.type == "FLOAT" else number
    if math.isinf(rounded) and not (isinstance(plain, float) and math.isinf(plain)):
        raise _ProblemError(f"is {_short.repr(plain)}, which is too large for {field.type}; correct it")
    return rounded


def _text(value: Any, field: Field) -> str:
    plain = _plain(value)
    if not isinstance(plain, str) or not _is_unicode(plain):
        problem = "has a lone surrogate, which no text may have" if isinstance(plain, str) else "takes a text"
        raise _ProblemError(f"is {_short.repr(value)}, and {problem}; convert it")
    longest = field.params.get("max_length")
    if longest is not None and (size := len(plain.encode())) > int(longest):
        raise _ProblemError(f"is {_short.repr(plain)}, {size} bytes long, and takes {longest}; shorten it")
    return str.__str__(plain)


def _array(value: Any, field: Field) -> list[Any]:
    plain = _plain(value)
    if not isinstance(plain, list | tuple):
        raise _ProblemError(f"is {_short.repr(value)}, and takes a list; convert it")
    most = field.params.get("max_capacity")
    if most is not None and len(plain) > int(most):
        raise _ProblemError(f"has {len(plain)} elements, and takes {most}; shorten it")
    element = replace(field, type=str(field.params.get("element_type", "")))
    convert = _OF_TYPE.get(element.type, _as_it_is)
    try:
        return [convert(each, element) for each in plain]
    except _ProblemError as exc:
        raise _ProblemError(f"has an element that {exc}") from None


def _as_it_is(value: Any, field: Field) -> Any:
    return value


#: Converts the value of a declared field, by type. The engine checks other types.
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
    """Return the value in JSON's own types, as every engine returns it."""
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
            raise _ProblemError(f"holds {_short.repr(value)}, which has a lone surrogate; correct it")
        return str.__str__(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise _ProblemError(f"holds {float(value)}, which JSON cannot express; leave it out, or give None")
        return float(value)
    low, high = _JSON_BOUNDS
    if not low <= value <= high:
        raise _ProblemError(f"holds {_short.repr(value)}, which has more than 64 bits; give it as a text")
    return int(value)


def _check_json(value: Any, limits: EngineLimits) -> None:
    if not isinstance(value, limits.json):
        raise _ProblemError(
            f"is {_short.repr(value)}, and {limits.engine} has no JSON field that is "
            f"{'null' if value is None else f'a {type(value).__name__}'}; wrap it in a dictionary"
        )
    if limits.json_bytes is not None and (size := _size(value)) > limits.json_bytes:
        raise _ProblemError(f"has {size:,} bytes as JSON, and {limits.engine} takes {limits.json_bytes:,}; shorten it")


def json_source(value: Any) -> str:
    """Return the JSON text of a value. pymilvus takes a string for such a text, so rmvdb sends every value as one."""
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
    """Return values of numpy and torch as Python's own: a number if there is no dimension, else lists."""
    if type(value) in (int, str, float, bool, dict, list):
        return value
    as_list: Any = getattr(value, "tolist", None)
    if as_list is None or not hasattr(value, "dtype"):
        return value
    # numpy makes a date a number if its unit is nanoseconds, and a date if not.
    return value if getattr(value.dtype, "kind", "") in ("m", "M") else as_list()


# --- vectors ----------------------------------------------------------------------------------------------------------


def vector_of(schema: Schema, record: Record, *, as_read: bool) -> Vectors:
    """Return the record's vector (dim,), float32. A vector that was read from a collection may be unrankable there, too.

    Raises:
        Mismatch: the collection cannot hold it, or its metric cannot rank it.
    """
    with np.errstate(over="ignore"):  # too large a value becomes infinity
        vector = np.asarray([] if record.vector is None else record.vector, dtype=np.float32)
    name, dim = schema.collection, schema.dim
    if vector.shape != (dim,) or not np.isfinite(vector).all():
        problem = f"shape {vector.shape}" if vector.shape != (dim,) else "values that are not finite"
        raise Mismatch(f"Record {record.id!r} has a vector with {problem}; {name!r} takes {dim} finite numbers")
    if not as_read and (why := unrankable(vector[None], schema.metric)):
        raise Mismatch(f"Record {record.id!r} has a vector that {why[0]}; correct what made it")
    return vector


def queries_of(schema: Schema, vectors: Vectors) -> Vectors:
    """Return query vectors (n, dim), float32.

    Raises:
        Mismatch: they have another dimension, or the metric cannot rank by them.
    """
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
    """Return, by row of `vectors` (n, dim), why the metric cannot rank it."""
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
    """Return the names in `output_fields`, None for all fields ("*"). A text is one name.

    Raises:
        UsageError: it is something else.
    """
    names = (fields,) if isinstance(fields, str) else fields
    if not isinstance(names, Iterable) or isinstance(names, Mapping):
        raise UsageError(f'output_fields is a list of names, or ["*"] for all, not {_short.repr(fields)}')
    checked = tuple(names)
    if bad := [name for name in checked if not isinstance(name, str)]:
        raise UsageError(f"output_fields has {_short.repr(bad[0])}, and the name of a field is a text")
    return None if "*" in checked else checked


def whole(name: str, value: object, *, least: int) -> int:
    """Return a whole number of at least `least`.

    Raises:
        UsageError: it is something else. The message has the argument's name.
    """
    plain = _plain(value)
    if not isinstance(plain, (int, SupportsIndex)) or isinstance(plain, bool):  # an int first: the other question is slow
        raise UsageError(f"{name} is a whole number, not {_short.repr(value)}")
    if (number := operator.index(plain)) < least:
        raise UsageError(f"{name} must be at least {least}, not {number}")
    return number
