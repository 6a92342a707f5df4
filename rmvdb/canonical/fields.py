"""Fields: each has its declared type in plain Python."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from rmvdb.canonical.json_values import check_json, json_of, json_size
from rmvdb.canonical.limits import EngineLimits
from rmvdb.canonical.values import SHORT, ProblemError, is_unicode, plain_of
from rmvdb.errors import Unwritable
from rmvdb.types import Field, Id, Schema

_BITS = {"INT8": 8, "INT16": 16, "INT32": 32, "INT64": 64}


def fields_of(schema: Schema, id: Id, given: Mapping[str, Any], limits: EngineLimits) -> dict[str, Any]:
    """Return a record's fields as the collection stores them, with defaults.

    Raises:
        Unwritable: it cannot store a field. The message names id, field and value.
    """
    declared = {field.name: field for field in schema.fields}
    _check_names(schema, id, given, declared)
    stored = {name: _declared(schema, id, field, given, limits) for name, field in declared.items()}
    extra = {name: _converted(id, name, json_of, given[name]) for name in given if name not in declared}
    if extra and limits.json_bytes is not None and (size := json_size(extra)) > limits.json_bytes:
        raise Unwritable(
            f"Record {id!r} cannot be written: its undeclared fields have {size:,} bytes as JSON, and {limits.engine} takes "
            f"{limits.json_bytes:,}; shorten {max(extra, key=lambda name: json_size(extra[name]))!r}"
        )
    return stored | {str.__str__(name): value for name, value in extra.items()}


def fields_as_read(schema: Schema, id: Id, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields of a record that a collection with these fields holds already. Only missing values are filled in."""
    absent = {field.name: _absent(schema, id, field, given) for field in schema.fields if given.get(field.name) is None}
    return {**given, **absent} if absent else given


def _check_names(schema: Schema, id: Id, given: Mapping[str, Any], declared: Mapping[str, Field]) -> None:
    for name in given:
        if not isinstance(name, str) or not is_unicode(name):
            raise Unwritable(f"Record {id!r} has a field by the name {SHORT.repr(name)}; a name is a text: correct it")
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
            check_json(converted, limits)
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
    except ProblemError as exc:
        raise Unwritable(f"Record {id!r} cannot be written: its field {name!r} {exc}") from None


def _boolean(value: Any, field: Field) -> bool:
    plain = plain_of(value)
    if not isinstance(plain, bool):
        raise ProblemError(f"is {SHORT.repr(value)}, and takes True or False; convert it")
    return plain


def _integer(value: Any, field: Field) -> int:
    plain = plain_of(value)
    if isinstance(plain, bool) or not isinstance(plain, int):
        raise ProblemError(f"is {SHORT.repr(value)}, and takes whole numbers ({field.type}); convert it")
    most = 2 ** (_BITS[field.type] - 1)
    if not -most <= plain < most:
        raise ProblemError(f"is {SHORT.repr(plain)}, and {field.type} goes from {-most} to {most - 1}; correct it")
    return int(plain)


def _real(value: Any, field: Field) -> float:
    """Return a float in the precision of its type. Infinity and NaN are valid."""
    plain = plain_of(value)
    if isinstance(plain, bool) or not isinstance(plain, int | float):
        raise ProblemError(f"is {SHORT.repr(value)}, and takes numbers ({field.type}); convert it")
    try:
        number = float(plain)
    except OverflowError:
        number = math.inf
    with np.errstate(over="ignore"):
        rounded = float(np.float32(number)) if field.type == "FLOAT" else number
    if math.isinf(rounded) and not (isinstance(plain, float) and math.isinf(plain)):
        raise ProblemError(f"is {SHORT.repr(plain)}, which is too large for {field.type}; correct it")
    return rounded


def _text(value: Any, field: Field) -> str:
    plain = plain_of(value)
    if not isinstance(plain, str) or not is_unicode(plain):
        problem = "has a lone surrogate, which no text may have" if isinstance(plain, str) else "takes a text"
        raise ProblemError(f"is {SHORT.repr(value)}, and {problem}; convert it")
    longest = field.params.get("max_length")
    if longest is not None and (size := len(plain.encode())) > int(longest):
        raise ProblemError(f"is {SHORT.repr(plain)}, {size} bytes long, and takes {longest}; shorten it")
    return str.__str__(plain)


def _array(value: Any, field: Field) -> list[Any]:
    plain = plain_of(value)
    if not isinstance(plain, list | tuple):
        raise ProblemError(f"is {SHORT.repr(value)}, and takes a list; convert it")
    most = field.params.get("max_capacity")
    if most is not None and len(plain) > int(most):
        raise ProblemError(f"has {len(plain)} elements, and takes {most}; shorten it")
    element = replace(field, type=str(field.params.get("element_type", "")))
    convert = _OF_TYPE.get(element.type, _as_it_is)
    try:
        return [convert(each, element) for each in plain]
    except ProblemError as exc:
        raise ProblemError(f"has an element that {exc}") from None


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
    "JSON": lambda value, _: json_of(value),
}
