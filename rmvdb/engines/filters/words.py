"""Pieces of an expression in words that every engine reads."""

from __future__ import annotations

from collections.abc import Iterable

from rmvdb.canonical import INT64_BOUNDS
from rmvdb.engines.filters.tree import Literal
from rmvdb.errors import FilterError
from rmvdb.types import Id

_ESCAPES = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r"}


def literal(value: Literal) -> str:
    """A value as Milvus reads it back, whatever quotes, backslashes or line breaks it holds; FilterError for what has no form."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        low, high = INT64_BOUNDS
        if not low < value < high:
            raise FilterError(f"{value} cannot be written in a filter; Milvus serves whole numbers between {low} and {high}")
        return str(value)
    if isinstance(value, float):
        if value - value != 0.0:
            raise FilterError(f"{value} cannot be written in a filter; use a finite number")
        return repr(value)
    # Line breaks end a string for every engine; all other characters but the quote and the backslash stand for themselves.
    return '"' + "".join(_ESCAPES.get(character, character) for character in value) + '"'


def ids_in(field: str, ids: Iterable[Id]) -> str:
    """The expression that holds for these ids; there must be at least one, because Milvus Lite 2.5 cannot read an empty list."""
    return f"{field} in [{', '.join(map(literal, ids))}]"


def between(field: str, after: Id | None, upto: Id | None) -> str:
    """The expression `after < field <= upto`; None leaves a side open, "" where both are."""
    low = "" if after is None else f"{field} > {literal(after)}"
    high = "" if upto is None else f"{field} <= {literal(upto)}"
    return both(low, high)


def both(one: str, other: str) -> str:
    """The expression that holds where both do; an empty one always holds."""
    return f"({one}) and ({other})" if one and other else one or other
