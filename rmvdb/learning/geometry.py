"""Exact distances between vectors, and coordinates whose L2 distances rank the same way."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rmvdb.learning import hyperbolic
from rmvdb.types import Metric, Vectors


def distances(queries: Vectors, gallery: Vectors, *, metric: Metric) -> npt.NDArray[np.float32]:
    """Compute exact distances (Q, G), smaller is closer: 1 − cos, −⟨q, g⟩, squared L2 or d_L on the hyperboloid."""
    metric = Metric(metric)
    if metric is Metric.LORENTZ:
        return hyperbolic.distances(queries, gallery)
    if metric is Metric.COSINE:
        queries, gallery = _unit(queries), _unit(gallery)
    dots: npt.NDArray[np.float32] = queries @ gallery.T  # (Q, G)
    if metric is Metric.COSINE:
        return 1 - dots
    if metric is Metric.IP:
        return -dots
    squares = np.square(queries).sum(1)[:, None] + np.square(gallery).sum(1)[None, :]
    result: npt.NDArray[np.float32] = np.maximum(squares - 2 * dots, 0)
    return result


def comparable(vectors: Vectors, metric: Metric) -> Vectors:
    """Return coordinates (n, d) whose L2 distances rank as the metric does.

    They have length 1 for COSINE, and for IP, where no better use of the length is known. L2 keeps them. LORENTZ takes the
    tangent space at the origin, (n, d − 1).
    """
    metric = Metric(metric)
    if metric is Metric.LORENTZ:
        return hyperbolic.flat(vectors)
    return vectors if metric is Metric.L2 or not len(vectors) else _unit(vectors)


def _unit(vectors: Vectors) -> Vectors:
    result: Vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    return result
