"""Binding a tree to a schema: each name gets its type, each literal is as its field keeps it, and a misfit is refused."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import NoReturn

from rmvdb.canonical.ids import INT64_BOUNDS
from rmvdb.engines.filters.parse import refuse
from rmvdb.engines.filters.tree import (
    OPEN,
    All,
    Any,
    Arithmetic,
    Compare,
    Contains,
    In,
    IsNull,
    Length,
    Like,
    Literal,
    Name,
    Not,
    Tree,
)
from rmvdb.errors import offer
from rmvdb.types import Field, Schema

WHOLE = {"INT8", "INT16", "INT32", "INT64"}
REAL = {"FLOAT", "DOUBLE"}
_KINDS = {"BOOL": "true or false", "VARCHAR": "texts"} | dict.fromkeys(WHOLE, "whole numbers") | dict.fromkeys(REAL, "numbers")


def bind(tree: Tree, schema: Schema, text: str) -> Tree:
    """Return the tree with its types. Raises FilterError, with the position, for an unknown name or a value that does not fit."""
    return _Binder(schema, text).tree(tree)


class _Binder:
    def __init__(self, schema: Schema, text: str) -> None:
        self._schema, self._text = schema, text
        self._fields = {field.name: field for field in schema.fields}
        self._fields[schema.id_field] = Field(name=schema.id_field, type=schema.id_type.value)

    def tree(self, tree: Tree) -> Tree:
        match tree:
            case All(parts):
                return All(tuple(map(self.tree, parts)))
            case Any(parts):
                return Any(tuple(map(self.tree, parts)))
            case Not(part):
                return Not(self.tree(part))
            case Compare(left, sign, right):
                return self._compare(left, sign, right)
            case In(name, values):
                found = self._scalar(name)
                return In(found, tuple(self._fitting(found, value) for value in values))
            case Contains(name, which, values):
                return self._contains(self._list(name), which, values)
            case Like(name, pattern):
                return Like(self._text_like(self._scalar(name)), pattern)
            case IsNull(name, asked):
                return IsNull(self._nullable(self._name(name), asked), asked)

    def _compare(self, left: Name | Length | Arithmetic, sign: str, right: Literal | Name) -> Compare:
        if isinstance(right, Name):
            return self._two_fields(left, sign, self._scalar(right))
        if isinstance(left, Length):
            name = self._list(left.name)
            if not isinstance(right, int) or isinstance(right, bool):
                self._fail(name, f"a length is a whole number, not {right!r}")
            return Compare(Length(name), sign, self._whole(name, right))
        if isinstance(left, Arithmetic):
            name = self._number(self._scalar(left.name), left.sign)
            value = self._fitting(name, left.value)
            if left.sign in "/%" and value == 0:  # a FLOAT does not tell so small a number from it
                self._fail(name, "nothing can be divided by zero")
            assert not isinstance(value, str)  # noqa: S101 - a number stays one
            return Compare(Arithmetic(name, left.sign, value), sign, self._fitting(name, right, number=True))
        name = self._scalar(left)
        return Compare(name, sign, self._fitting(name, right))

    def _two_fields(self, left: Name | Length | Arithmetic, sign: str, right: Name) -> Compare:
        if not isinstance(left, Name):
            self._fail(right, "expected a literal; compare two fields as they are, or one with a literal")
        one = self._scalar(left)
        for name in (right, one):
            if name.meta and name.name.lower() == "null":
                self._fail(name, f"{name} cannot be compared; write `is null` or `is not null` behind a field")
            if name.type == OPEN or name.path:
                self._fail(name, f"{name} cannot be compared with another field, because the schema does not say what it is")
        kinds = [(_KINDS[name.type] if name.type not in WHOLE | REAL else "numbers") for name in (one, right)]
        if kinds[0] != kinds[1]:
            self._fail(one, f"{one} has {kinds[0]}, {right} has {kinds[1]}; compare fields of one kind")
        return Compare(one, sign, right)

    def _contains(self, name: Name, which: str, values: tuple[Literal, ...]) -> Contains:
        element = replace(name, type=name.element if name.type == "ARRAY" else OPEN)
        return Contains(name, which, tuple(self._fitting(element, value) for value in values))

    # --- names --------------------------------------------------------------------------------------------------------

    def _name(self, name: Name) -> Name:
        field = None if name.meta else self._fields.get(name.name)
        if field is None:
            return self._undeclared(name)
        nullable = bool(field.params.get("nullable"))
        if field.type == OPEN:
            return replace(name, type=OPEN)
        if field.type == "ARRAY":
            element = str(field.params.get("element_type", ""))
            if not name.path:
                return replace(name, type="ARRAY", element=element, nullable=nullable)
            if len(name.path) > 1 or not isinstance(name.path[0], int):
                self._fail(name, f"{name.name} is an ARRAY; name one element by its number, as in {name.name}[0]")
            return replace(name, type=element, nullable=True)
        if name.path:
            self._fail(name, f"{name.name} is {field.type} and does not have parts; only JSON and ARRAY do")
        return replace(name, type=field.type, nullable=nullable)

    def _undeclared(self, name: Name) -> Name:
        schema = self._schema
        if name.name == schema.vector_field and not name.meta:
            self._fail(name, f"{name.name} holds the vectors, which no filter reads; name another field")
        if name.name == "id" and not (name.meta or name.path):  # as a dynamic field, which no record has, `not in` finds all
            way_out = f"write {schema.id_field}" + (', or $meta["id"] for a dynamic field' if schema.dynamic else "")
            self._fail(name, f"the ids of collection {schema.collection!r} are in its field {schema.id_field!r}; {way_out}")
        if not schema.dynamic:
            known = offer(name.name, self._fields)
            self._fail(name, f"collection {schema.collection!r} has no field {name.name!r}; {known}")
        return replace(name, type=OPEN, meta=True, absent=name.name in self._fields)

    def _scalar(self, name: Name) -> Name:
        found = self._name(name)
        if found.type == "ARRAY":
            self._fail(name, f"{name} is an ARRAY; use array_contains({name}, …), array_length({name}) or {name}[0]")
        if found.type == OPEN and not found.meta and not found.path:
            self._fail(name, f'{name} is JSON; name a place in it, as in {name}["key"]')
        if found.type != OPEN and found.type not in _KINDS:
            self._fail(name, f"{name} is {found.type}, which filters cannot read")
        return found

    def _list(self, name: Name) -> Name:
        found = self._name(name)
        if found.type not in ("ARRAY", OPEN):
            self._fail(name, f"{name} is {found.type} and does not hold a list; only ARRAY and JSON do")
        return found

    def _text_like(self, name: Name) -> Name:
        if name.type not in ("VARCHAR", OPEN):
            self._fail(name, f"{name} has {_KINDS[name.type]}, and 'like' reads texts")
        return name

    def _number(self, name: Name, sign: str) -> Name:
        if name.type in ("VARCHAR", "BOOL") or (sign == "%" and name.type in REAL):
            self._fail(name, f"{sign!r} cannot be applied to {name}, which has {_KINDS[name.type]}")
        return name

    def _nullable(self, name: Name, word: str) -> Name:
        if word == "exists" and (name.type != OPEN or not (name.meta or name.path)):
            way_out = f"{name} is null" if name.type != OPEN else f'exists {name}["key"]'
            self._fail(name, f"'exists' takes a place in JSON, or a field that is not declared; write {way_out}")
        return name

    # --- literals -----------------------------------------------------------------------------------------------------

    def _fitting(self, name: Name, value: Literal, *, number: bool = False) -> Literal:
        """Return the literal as the field keeps it."""
        kind = _KINDS.get(name.type, "")
        if name.type == OPEN:
            return self._open(name, value, number=number)
        if name.type in REAL and isinstance(value, int | float) and not isinstance(value, bool):
            return self._real(name, value)
        if name.type in WHOLE and isinstance(value, int) and not isinstance(value, bool):
            return self._whole(name, value)
        if (name.type == "BOOL" and isinstance(value, bool)) or (name.type == "VARCHAR" and isinstance(value, str)):
            return value
        return self._fail(name, f"{name} has {kind}, not {_written(value)}; compare it with {kind}")

    def _open(self, name: Name, value: Literal, *, number: bool) -> Literal:
        if number and (isinstance(value, str | bool)):
            self._fail(name, f"the result computed from {name} is a number, not {_written(value)}")
        return self._whole(name, value) if isinstance(value, int) and not isinstance(value, bool) else value

    def _whole(self, name: Name, value: int) -> int:
        low, high = INT64_BOUNDS
        if not low < value < high:
            self._fail(name, f"{value} is compared with {name}; Milvus reads whole numbers between {low} and {high}")
        return value

    def _real(self, name: Name, value: float) -> float:
        try:
            return float(value) if name.type == "DOUBLE" else single(float(value))
        except OverflowError:
            self._fail(name, f"{value} is compared with {name}, which is {name.type} and cannot hold it")

    def _fail(self, name: Name, reason: str) -> NoReturn:
        refuse(self._text, name.position, reason)


def single(value: float) -> float:
    """Return the nearest number that a FLOAT holds. Raises OverflowError if the value is too large."""
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def _written(value: Literal) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)
