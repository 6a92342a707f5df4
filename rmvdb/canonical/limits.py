"""The limits of an engine, where engines differ."""

from __future__ import annotations

from dataclasses import dataclass


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
