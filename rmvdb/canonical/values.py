"""A value in Python's own types, and in an error message."""

from __future__ import annotations

import reprlib
from typing import Any

#: Shortens a value for a message.
SHORT = reprlib.Repr()
SHORT.maxstring = SHORT.maxother = 60


class ProblemError(Exception):
    """The problem of a value and its remedy, as the end of a sentence that begins with the field."""


def is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def plain_of(value: Any) -> Any:
    """Return values of numpy and torch as Python's own: a number if there is no dimension, else lists."""
    if type(value) in (int, str, float, bool, dict, list):
        return value
    as_list: Any = getattr(value, "tolist", None)
    if as_list is None or not hasattr(value, "dtype"):
        return value
    # numpy makes a date a number if its unit is nanoseconds, and a date if not.
    return value if getattr(value.dtype, "kind", "") in ("m", "M") else as_list()
