"""Milvus' boolean expressions: read into a tree, bound to a schema, written for an engine, evaluated here.

rmvdb sends a filter only if it understands all of it, and writes it again from the tree. Some engines cut off a filter where they
stop understanding it, together with the parts joined to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from rmvdb.canonical.ids import INT64_BOUNDS
from rmvdb.engines.filters.bind import bind
from rmvdb.engines.filters.evaluate import holds, names
from rmvdb.engines.filters.parse import parse, shown
from rmvdb.engines.filters.tree import EVERY, Tree
from rmvdb.engines.filters.words import between, both, ids_in, literal
from rmvdb.engines.filters.write import LITE_2, LITE_3, MILVUS, MILVUS_2_3, Dialect, Written, write
from rmvdb.errors import UsageError
from rmvdb.types import Schema

__all__ = ["EVERY", "INT64_BOUNDS", "LITE_2", "LITE_3", "MILVUS", "MILVUS_2_3", "Dialect", "Tree", "Written", "between", "both"]
__all__ += ["EngineFilter", "for_engine", "given", "holds", "ids_in", "literal", "names", "parse", "read", "shown", "write"]


class EngineFilter(NamedTuple):
    """A filter as it is sent to an engine."""

    #: The filter in the engine's words, "" for every record.
    text: str
    #: Whether a record with these fields, including its id, matches; set if the engine also gives records that do not.
    test: Callable[[Mapping[str, Any]], bool] | None = None
    #: The fields that the test reads.
    fields: frozenset[str] = frozenset()


def given(filter: object) -> str:
    """Return the text of a filter, "" for None. Raises UsageError for anything else."""
    if filter is None:
        return ""
    if not isinstance(filter, str):
        raise UsageError(f"filter takes a text such as 'price < 10', not {type(filter).__name__} {filter!r:.60}")
    return filter if filter.strip() else ""


def read(filter: object, schema: Schema) -> Tree:
    """Return the tree of a filter, bound to a schema; `EVERY` without a filter. Raises FilterError, UsageError."""
    text = given(filter)
    return bind(parse(text), schema, text) if text else EVERY


def for_engine(filter: object, schema: Schema, dialect: Dialect) -> EngineFilter:
    """Return a filter in the words of an engine. Raises FilterError, UsageError."""
    tree = read(filter, schema)
    written = write(tree, dialect, schema)
    return EngineFilter(written.text) if written.exact else EngineFilter(written.text, holds(tree), frozenset(names(tree)))
