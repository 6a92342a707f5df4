"""Arguments of a search: names of fields and whole numbers."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import SupportsIndex

from rmvdb.canonical.values import SHORT, plain_of
from rmvdb.errors import UsageError


def names_of(fields: object) -> tuple[str, ...] | None:
    """Return the names in `output_fields`, None for all fields ("*"). A text is one name.

    Raises:
        UsageError: it is something else.
    """
    names = (fields,) if isinstance(fields, str) else fields
    if not isinstance(names, Iterable) or isinstance(names, Mapping | bytes | bytearray):
        raise UsageError(f'output_fields is a list of names, or ["*"] for all, not {SHORT.repr(fields)}')
    checked = tuple(names)
    if bad := [name for name in checked if not isinstance(name, str)]:
        raise UsageError(f"output_fields has {SHORT.repr(bad[0])}, and the name of a field is a text")
    return None if "*" in checked else checked


def whole(name: str, value: object, *, least: int) -> int:
    """Return a whole number of at least `least`.

    Raises:
        UsageError: it is something else. The message has the argument's name.
    """
    plain = plain_of(value)
    if not isinstance(plain, (int, SupportsIndex)) or isinstance(plain, bool):  # an int first: the other question is slow
        raise UsageError(f"{name} is a whole number, not {SHORT.repr(value)}")
    if (number := operator.index(plain)) < least:
        raise UsageError(f"{name} must be at least {least}, not {number}")
    return number
