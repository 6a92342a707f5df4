"""Blends: one query vector for an old leg, made of the old model's vector and of the new model's by ψ."""

from __future__ import annotations

import numpy as np

from rmvdb.errors import UsageError
from rmvdb.types import Metric, Vectors


def blended(own: Vectors, other: Vectors, weight_of_other: float, metric: Metric) -> Vectors:
    """Return (1 − w) own + w other, (n, d), for two query vectors (n, d) of one space. COSINE takes both at unit length first.

    One search with it ranks exactly as the weighted sum of both queries' scores ranks, since scores of COSINE and IP are linear
    in the query: (1 − w)⟨a, g⟩ + w⟨b, g⟩ = ⟨(1 − w) a + w b, g⟩. For L2, (1 − w)‖a − g‖² + w‖b − g‖² is the squared distance
    to the weighted mean plus w (1 − w)‖a − b‖², which is one constant for each query.

    Raises:
        UsageError: the metric is LORENTZ. A weighted sum of points does not lie on the hyperboloid.
    """
    if metric is Metric.LORENTZ:
        raise UsageError("Queries of LORENTZ cannot be blended: their weighted sum leaves the hyperboloid; use ψ alone")
    if metric is Metric.COSINE:
        own, other = _unit(own), _unit(other)
    mixed: Vectors = ((1 - weight_of_other) * own + weight_of_other * other).astype(np.float32)
    return mixed


def _unit(vectors: Vectors) -> Vectors:
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)  # (n, 1)
    unit: Vectors = vectors / np.maximum(lengths, 1e-12)
    return unit
