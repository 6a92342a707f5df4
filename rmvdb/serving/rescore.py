"""The computing part of rescoring: which hits the new model embeds, and how far their records really are."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from rmvdb.learning.geometry import distances
from rmvdb.types import Hit, Id, Metric, Vectors


def candidates(merged: Sequence[Hit], newest: Collection[Id], *, most: int) -> list[Hit]:
    """Return the first `most` hits of a merged list whose records the newest leg did not find.

    `newest`: the ids of its hits. Their records have their true distance already.
    """
    return [hit for hit in merged if hit.id not in newest][:most]


def true_distances(query: Vectors, vectors: Mapping[Id, Vectors], metric: Metric) -> dict[Id, float]:
    """Return how far each vector (dim,) is from the query (dim,), as the engine measures it in a collection of that metric."""
    if not vectors:
        return {}
    far = distances(query[None], np.stack(list(vectors.values())), metric=metric)[0]  # (n,)
    return dict(zip(vectors, far.tolist(), strict=True))
