"""Evaluating a bound tree for a record: the filter of the store in this process, and the reference for every engine.

There are three answers, as in SQL. A comparison with a declared field that is null, or with an element that an ARRAY lacks, is
neither true nor false (None). In JSON and in undeclared fields, a missing or null value is just not equal: only `!=`, `not in`
and `not (…)` are true for it, as for a value of another kind. There true is not 1, and 1 is 1.0.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any as Value
from typing import TypeAlias

from rmvdb.engines.filters.bind import single
from rmvdb.engines.filters.parse import computed
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

#: A record's fields; the id is one of them.
Fields: TypeAlias = Mapping[str, Value]
_Test: TypeAlias = Callable[[Fields], bool | None]
_Number: TypeAlias = int | float

_SIGNS: dict[str, Callable[[Value, Value], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_MISSING = object()
_INDEX = re.compile(r"0|[1-9][0-9]*")


def holds(tree: Tree) -> Callable[[Fields], bool]:
    """Return a test: whether a bound tree is true for a record."""
    test = _test(tree)
    return lambda fields: test(fields) is True


def names(tree: Tree) -> set[str]:
    """Return the fields that a tree reads."""
    return {name.name for name in _names(tree)}


def _names(tree: Tree | Name | Length | Arithmetic | Literal) -> Iterator[Name]:
    match tree:
        case Name():
            yield tree
        case All(parts) | Any(parts):
            for each in parts:
                yield from _names(each)
        case Not(part):
            yield from _names(part)
        case Compare(left, _, right):
            yield from _names(left)
            yield from _names(right)
        case In(name) | Contains(name) | Like(name) | IsNull(name) | Length(name) | Arithmetic(name):
            yield name


def _test(tree: Tree) -> _Test:
    match tree:
        case All(parts):
            return functools.partial(_all, [_test(part) for part in parts])
        case Any(parts):
            return functools.partial(_any, [_test(part) for part in parts])
        case Not(part):
            return functools.partial(_not, _test(part))
        case Compare(left, sign, right):
            return _compare(left, sign, right)
        case In(name, values):
            return _in(name, values)
        case Contains(name, which, values):
            return _contains(name, which, values)
        case Like(name, pattern):
            return _like(name, pattern)
        case IsNull(name):
            read = _reader(name)
            return lambda fields: read(fields) in (None, _MISSING)


def _all(tests: Sequence[_Test], fields: Fields) -> bool | None:
    found = {test(fields) for test in tests}
    return False if False in found else None if None in found else True


def _any(tests: Sequence[_Test], fields: Fields) -> bool | None:
    found = {test(fields) for test in tests}
    return True if True in found else None if None in found else False


def _not(test: _Test, fields: Fields) -> bool | None:
    found = test(fields)
    return None if found is None else not found


def _compare(left: Name | Length | Arithmetic, sign: str, right: Literal | Name) -> _Test:
    read, compare = _operand(left), _SIGNS[sign]
    other = _reader(right) if isinstance(right, Name) else lambda _: right
    open_ = not isinstance(right, Name) and _is_open(left)

    def test(fields: Fields) -> bool | None:
        one, two = read(fields), other(fields)
        if open_:
            return compare(*_alike(one, two)) if _kind(one) is _kind(two) else sign == "!="
        return None if one is None or two is None else compare(one, two)

    return test


def _is_open(operand: Name | Length | Arithmetic) -> bool:
    name = operand if isinstance(operand, Name) else operand.name
    return name.type == OPEN


def _operand(operand: Name | Length | Arithmetic) -> Callable[[Fields], Value]:
    if isinstance(operand, Name):
        return _reader(operand)
    read = _reader(operand.name)
    if isinstance(operand, Length):
        return lambda fields: _length(read(fields))
    return lambda fields: _result(operand, read(fields))


def _length(value: Value) -> Value:
    return len(value) if isinstance(value, list | tuple) else value if value is None else _MISSING


def _result(operand: Arithmetic, value: Value) -> Value:
    """Return what is computed from a number. For another value: None for null, else `_MISSING`, which equals no number."""
    if _kind(value) is not float:
        return None if value is None else _MISSING
    found = computed(value, operand.sign, operand.value)
    try:
        return single(found) if operand.name.type == "FLOAT" else found
    except OverflowError:
        return found


def _in(name: Name, values: Sequence[Literal]) -> _Test:
    read, open_ = _reader(name), name.type == OPEN
    known = {(_kind(value), value) for value in values}
    numbers = [value for value in values if _kind(value) is float and not isinstance(value, str)]
    reals, as_reals = {value for value in numbers if isinstance(value, float)}, set(map(float, numbers))

    def test(fields: Fields) -> bool | None:
        value = read(fields)
        if value is None and not open_:
            return None if values else False
        if isinstance(value, float):
            return value in as_reals
        if isinstance(value, int) and not isinstance(value, bool):
            return (float, value) in known or float(value) in reals
        return isinstance(value, bool | str) and (type(value), value) in known

    return test


def _contains(name: Name, which: str, values: Sequence[Literal]) -> _Test:
    read, open_ = _reader(name), name.type == OPEN

    def test(fields: Fields) -> bool | None:
        elements = read(fields)
        if not isinstance(elements, list | tuple):
            return False if open_ else None
        found = (any(_equal(value, one) for one in elements) for value in values)
        return any(found) if which == "any" else all(found)

    return test


def _like(name: Name, pattern: str) -> _Test:
    read, expression, open_ = _reader(name), _expression(pattern), name.type == OPEN

    def test(fields: Fields) -> bool | None:
        value = read(fields)
        if value is None and not open_:
            return None
        return isinstance(value, str) and expression.fullmatch(value) is not None

    return test


def pieces(pattern: str) -> list[str]:
    r"""Split a pattern into pieces: "%", "_", and texts with a NUL in front, their escapes resolved."""
    found: list[str] = []
    for match in re.finditer(r"\\(.)|([%_])|(.)", pattern, re.DOTALL):
        if match[2]:
            found.append(match[2])
        elif found and found[-1][0] == "\0":
            found[-1] += match[1] or match[3]
        else:
            found.append("\0" + (match[1] or match[3]))
    return found


def _expression(pattern: str) -> re.Pattern[str]:
    wild = {"%": ".*", "_": "."}
    return re.compile("".join(wild.get(piece) or re.escape(piece[1:]) for piece in pieces(pattern)), re.DOTALL)


def _reader(name: Name) -> Callable[[Fields], Value]:
    """Return a reader of the record's value there: None for null, and in JSON `_MISSING` for a missing value."""
    if name.absent:
        return lambda fields: _MISSING
    if name.type == OPEN:
        return lambda fields: _step(fields.get(name.name, _MISSING), name.path)
    if name.path:
        at = int(name.path[0])
        return lambda fields: value[at] if (value := fields.get(name.name)) is not None and at < len(value) else None
    if name.type == "FLOAT":
        return lambda fields: None if (value := fields.get(name.name)) is None else _single(value)
    return lambda fields: fields.get(name.name)


def _single(value: float) -> float:
    try:
        return single(value)
    except OverflowError:
        return value


def _step(value: Value, path: Sequence[str | int]) -> Value:
    """Return the value at a place in JSON. As in a JSON pointer, an element's number and a key of the same digits are equal."""
    for part in map(str, path):
        if isinstance(value, Mapping):
            value = value.get(part, _MISSING)
        elif isinstance(value, list | tuple) and _INDEX.fullmatch(part) and int(part) < len(value):
            value = value[int(part)]
        else:
            return _MISSING
    return value


def _kind(value: Value) -> type:
    """Return the kind of values that a value can be compared with: true is not 1, but 1 is 1.0."""
    if isinstance(value, bool):
        return bool
    return float if isinstance(value, int | float) else type(value)


def _alike(one: Value, other: Value) -> tuple[Value, Value]:
    """Return two numbers as an engine compares them: both as floats if one of them is a float."""
    if isinstance(one, float) is isinstance(other, float) or isinstance(one, str):
        return one, other
    return float(one), float(other)


def _equal(one: Value, other: Value) -> bool:
    return _kind(one) is _kind(other) and _kind(one) in (bool, float, str) and operator.eq(*_alike(one, other))
