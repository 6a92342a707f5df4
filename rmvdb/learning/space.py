"""A vector space for transforms: its metric, its scale, and the length of vectors that are compared in it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from rmvdb.learning import hyperbolic
from rmvdb.learning.transforms import Norm
from rmvdb.types import Metric, Vectors

#: The length of vectors that are compared with a gallery's.
REACHED = {Metric.COSINE: Norm.FIXED, Metric.IP: Norm.FIXED, Metric.L2: Norm.FREE, Metric.LORENTZ: Norm.LIFTED}


@dataclass(frozen=True, kw_only=True, slots=True)
class Space:
    """A vector space: how it is compared, and the typical norm in it (LORENTZ: 1/√K)."""

    metric: Metric
    scale: float = field(default=1.0)

    @classmethod
    def of(cls, vectors: Vectors, metric: Metric) -> Space:
        """Measure the space on a sample (n, d)."""
        if metric is Metric.LORENTZ:
            return cls(metric=metric, scale=hyperbolic.radius(vectors))
        norm = float(np.linalg.norm(vectors, axis=1).mean())
        return cls(metric=metric, scale=1.0 if metric is Metric.COSINE or norm == 0 else norm)
