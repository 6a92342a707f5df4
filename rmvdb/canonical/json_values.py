"""Values of JSON: in JSON's own types, as every engine returns them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from rmvdb.canonical.limits import EngineLimits
from rmvdb.canonical.values import SHORT, ProblemError, is_unicode, plain_of

#: The whole numbers that a JSON keeps on every engine. Others become floats.
_JSON_BOUNDS = (-(2**63), 2**64 - 1)
#: The deepest nesting of one value. Every engine takes hundreds of levels, but Python's recursion ends there.
_DEEPEST = 100


def json_of(value: Any, levels: int = _DEEPEST) -> Any:
    """Return the value in JSON's own types, as every engine returns it."""
    if levels < 0:
        raise ProblemError(f"is nested deeper than {_DEEPEST} levels; flatten it")
    value = plain_of(value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int | float | str):
        return _json_scalar(value)
    if isinstance(value, Mapping):
        if bad := [key for key in value if not isinstance(key, str) or not is_unicode(key)]:
            raise ProblemError(f"has the key {SHORT.repr(bad[0])}, and JSON has texts as keys; convert it")
        return {str.__str__(key): json_of(each, levels - 1) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [json_of(each, levels - 1) for each in value]
    raise ProblemError(
        f"holds {SHORT.repr(value)}, and JSON has no {type(value).__name__}; give numbers, texts, lists or dictionaries of them"
    )


def _json_scalar(value: float | str) -> Any:
    if isinstance(value, str):
        if not is_unicode(value):
            raise ProblemError(f"holds {SHORT.repr(value)}, which has a lone surrogate; correct it")
        return str.__str__(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ProblemError(f"holds {float(value)}, which JSON cannot express; leave it out, or give None")
        return float(value)
    low, high = _JSON_BOUNDS
    if not low <= value <= high:
        raise ProblemError(f"holds {SHORT.repr(value)}, which has more than 64 bits; give it as a text")
    return int(value)


def check_json(value: Any, limits: EngineLimits) -> None:
    if not isinstance(value, limits.json):
        raise ProblemError(
            f"is {SHORT.repr(value)}, and {limits.engine} has no JSON field that is "
            f"{'null' if value is None else f'a {type(value).__name__}'}; wrap it in a dictionary"
        )
    if limits.json_bytes is not None and (size := json_size(value)) > limits.json_bytes:
        raise ProblemError(f"has {size:,} bytes as JSON, and {limits.engine} takes {limits.json_bytes:,}; shorten it")


def json_source(value: Any) -> str:
    """Return the JSON text of a value. pymilvus takes a string for such a text, so rmvdb sends every value as one."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def json_size(value: Any) -> int:
    return len(json_source(value).encode())
