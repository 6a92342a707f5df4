"""Ids: an int or a str that the collection can hold."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import SupportsIndex

from rmvdb.canonical.limits import EngineLimits
from rmvdb.canonical.values import SHORT, is_unicode, plain_of
from rmvdb.errors import Mismatch, Unwritable
from rmvdb.types import Id, IdType, Schema

#: rmvdb serves ids strictly between these: Milvus 2.3 cannot write the smallest INT64, and hides a record with the largest.
INT64_BOUNDS = (-(2**63), 2**63 - 1)


def id_of(value: object) -> Id:
    """Return the id as an int or a str. Whole numbers and enums of numpy and torch become these.

    Raises:
        Mismatch: it is something else.
    """
    id = _id(value)
    if id is None:
        raise Mismatch(f"An id is a whole number or a text, not {SHORT.repr(value)}, a {type(value).__name__}; convert it")
    return id


def ids_of(values: object) -> list[Id]:
    """Return the ids of an argument: one id, or several in a list, a set, an array, a generator …"""
    plain = plain_of(values)
    if isinstance(plain, str) or not isinstance(plain, Iterable) or isinstance(plain, (bytes, bytearray, memoryview)):
        return [id_of(plain)]
    if isinstance(plain, Mapping):
        raise Mismatch(f"Ids come one by one or in a list, not in a {type(values).__name__}; give its keys or its values")
    return [id_of(each) for each in plain]


def _id(value: object) -> Id | None:
    if type(value) is int or (type(value) is str and value.isascii()):
        return value  # nearly every one: a batch is checked some ten times on its way
    plain = plain_of(value)
    if isinstance(plain, str):
        if not is_unicode(plain):
            raise Mismatch(f"The id {SHORT.repr(plain)} cannot be stored as a text: it has a lone surrogate; correct it")
        return str.__str__(plain)
    return operator.index(plain) if isinstance(plain, SupportsIndex) and not isinstance(plain, bool) else None


def checked_id(value: object, schema: Schema) -> Id:
    """Return the id as the collection stores it.

    Raises:
        Mismatch: the collection cannot hold it, or no filter could name it.
    """
    id = _id(value)
    if id is None or isinstance(id, str) is not (schema.id_type is IdType.VARCHAR):
        raise Mismatch(f"Collection {schema.collection!r} has ids of type {schema.id_type.value}, not {SHORT.repr(value)}")
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


def check_length(id: Id, schema: Schema) -> None:
    """Raise Unwritable if an id is longer than its collection takes. Milvus Lite 2.5 does not check that."""
    if isinstance(id, str) and (size := len(id.encode())) > schema.id_max_length:
        raise Unwritable(
            f"The id {SHORT.repr(id)} has {size} bytes, and collection {schema.collection!r} takes {schema.id_max_length}; "
            "shorten it"
        )
