"""Exact distances between vectors, and coordinates whose L2 distances rank the same way."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rmvdb.errors import Mismatch
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


def blended(own: Vectors, mapped: Vectors, *, weight: float, metric: Metric) -> Vectors:
    """Return one query vector of two, (n, d): `weight` of the old model's own and the rest of what ψ maps.

    Its ranking is that of the summed scores, Σ w_i s(q_i, g), exactly: COSINE and IP are linear in the query once both vectors
    have unit length (COSINE), and the squared L2 distance to the weighted mean differs from the weighted sum of the squared
    distances by a number that depends on the query alone.

    Raises:
        Mismatch: the metric is LORENTZ, whose points have no weighted sum.
    """
    metric = Metric(metric)
    if metric is Metric.LORENTZ:
        raise Mismatch("Points of LORENTZ cannot be blended; choose another method")
    if metric is Metric.COSINE:
        own, mapped = _unit(own), _unit(mapped)
    result: Vectors = weight * own + (1 - weight) * mapped
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
