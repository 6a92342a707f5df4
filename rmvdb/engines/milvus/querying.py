"""One query, and how many rows a collection has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rmvdb.engines.milvus.driver import ONCE, foreign_errors
from rmvdb.engines.milvus.failures import SEGCORE, code_of, is_too_large
from rmvdb.errors import AnswerTooLarge
from rmvdb.types import Schema

if TYPE_CHECKING:
    from rmvdb.engines.milvus.driver import MilvusClient


def query(
    client: MilvusClient,
    *,
    schema: Schema,
    expression: str,
    output: list[str],
    level: Mapping[str, Any],
    limit: int | None = None,
) -> list[dict[str, Any]]:
    """Return the rows that match, with these fields; `count(*)` may not have a limit.

    Raises:
        AnswerTooLarge: The engine does not give so much at once.
    """
    options: dict[str, Any] = {"limit": limit} if limit else {}
    try:
        found = client.query(
            schema.collection, filter=expression, output_fields=output, strict_float32=True, **level, **options, **ONCE
        )
    except foreign_errors() as exc:
        # Lite 2.5 cannot give vectors of a collection that has an index and no rows ("Growing segment loss raw data").
        if schema.vector_field in output and code_of(exc) == SEGCORE and _is_empty(client, schema.collection):
            return []
        if is_too_large(exc, expression):
            raise AnswerTooLarge(
                f"The records of {schema.collection!r} are too large to be read in one answer; ask for fewer, or for fewer fields"
            ) from exc
        raise
    return list(found)


def _is_empty(client: MilvusClient, collection: str) -> bool:
    return not rows_of(client, collection)


def rows_of(client: MilvusClient, collection: str) -> int:
    """Count the rows of now; a replaced or deleted row does not count."""
    counted = client.query(collection, filter="", output_fields=["count(*)"], consistency_level="Strong", **ONCE)
    return int(counted[0]["count(*)"])
