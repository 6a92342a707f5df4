"""Pieces of an expression that every engine reads."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable

from rmvdb.canonical.ids import INT64_BOUNDS
from rmvdb.engines.filters.tree import Literal
from rmvdb.errors import FilterError
from rmvdb.types import Id

#: Line breaks.
BREAKS = frozenset("\n\r")
_ESCAPES = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r"}


def literal(value: Literal) -> str:
    """Write a value so that Milvus reads it back, with any quotes, backslashes or line breaks.

    Raises:
        FilterError: Milvus cannot read the number.
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        low, high = INT64_BOUNDS
        if not low < value < high:
            raise FilterError(f"{value} cannot be written in a filter; Milvus serves whole numbers between {low} and {high}")
        return str(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise FilterError(f"{value} cannot be written in a filter; use a finite number")
        return repr(value)
    # A line break ends a string for every engine. All other characters except quote and backslash stand for themselves.
    return '"' + "".join(_ESCAPES.get(character, character) for character in value) + '"'


def ids_in(field: str, ids: Iterable[Id]) -> str:
    """Return the expression that is true for these ids: one or more, because Milvus Lite 2.5 cannot read an empty list."""
    return f"{field} in [{', '.join(map(literal, ids))}]"


def around(field: str, id: str) -> str:
    """Return an expression that is true for an id with a line break, which Milvus Lite 2.5 cannot read, and for few others.

    These begin as the id does, up to its first break and with it.
    """
    at = next(at for at, character in enumerate(id) if character in BREAKS)
    below, beyond = id[:at] + chr(ord(id[at]) - 1) + chr(sys.maxunicode), id[:at] + chr(ord(id[at]) + 1)
    return f"({field} > {literal(below)} and {field} < {literal(beyond)})"


def between(field: str, after: Id | None, upto: Id | None) -> str:
    """Return the expression `after < field <= upto`. None leaves a side open; two open sides give ""."""
    low = "" if after is None else f"{field} > {literal(after)}"
    high = "" if upto is None else f"{field} <= {literal(upto)}"
    return both(low, high)


def both(one: str, other: str) -> str:
    """Return the expression that is true if both are; an empty one always is."""
    return f"({one}) and ({other})" if one and other else one or other
