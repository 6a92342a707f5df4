"""The merged list of one query."""

from __future__ import annotations

from collections.abc import Sequence

from rmvdb.serving.merge import Calibrate, merge_each
from rmvdb.types import Hit


def merge(legs: Sequence[Sequence[Hit]], calibrations: Sequence[Calibrate | None], *, limit: int, offset: int = 0) -> list[Hit]:
    """Return the merged hits of one query, whose hits each leg has. No legs have none."""
    return merge_each([[hits] for hits in legs], calibrations, limit=limit, offset=offset)[0] if legs else []
