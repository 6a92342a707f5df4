"""No preference."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rmvdb.planning.orders.table import Known
from rmvdb.types import Record


@dataclass(frozen=True, kw_only=True, slots=True)
class Random:
    """No preference. The same id always has the same place."""

    seed: int = 0

    def confidence(self, records: Sequence[Record]) -> npt.NDArray[np.float32]:
        """Return a number between 0 and 1 made from each id, (n,)."""
        digests = (hashlib.blake2b(repr((self.seed, record.id)).encode(), digest_size=3).digest() for record in records)
        return np.fromiter((int.from_bytes(digest) / 2**24 for digest in digests), dtype=np.float32, count=len(records))


def make(records: Iterable[Record], known: Known) -> Random:
    """Make the order; it learns nothing from records."""
    return Random(seed=known.seed)
