"""Vectors of records, for several orders."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rmvdb.types import Record, Vectors


def stacked(records: Sequence[Record]) -> Vectors:
    """Return the vectors of records, (n, d)."""
    if not records:
        return np.empty((0, 0), np.float32)
    return np.stack([np.asarray(record.vector, dtype=np.float32) for record in records])
