"""One search with a blended query ranks as the weighted sum of both queries' scores."""

from __future__ import annotations

import numpy as np
import pytest

from rmvdb.errors import UsageError
from rmvdb.learning.geometry import distances
from rmvdb.serving.blend import blended
from rmvdb.types import Metric


@pytest.mark.parametrize("weight", [0.0, 0.3, 0.7, 1.0])
@pytest.mark.parametrize("metric", [Metric.COSINE, Metric.IP, Metric.L2])
def test_a_blended_query_ranks_as_the_weighted_sum_of_both_distances(metric: Metric, weight: float) -> None:
    rng = np.random.default_rng(3)
    # Of very different lengths, which COSINE must ignore and the other two must not.
    own = rng.normal(size=(8, 6)).astype(np.float32)
    other = 20 * rng.normal(size=(8, 6)).astype(np.float32)
    gallery = (rng.normal(size=(200, 6)) * rng.uniform(0.2, 5, size=(200, 1))).astype(np.float32)
    found = distances(blended(own, other, weight, metric), gallery, metric=metric)
    summed = (1 - weight) * distances(own, gallery, metric=metric) + weight * distances(other, gallery, metric=metric)
    for row, expected in zip(found.argsort(axis=1), summed, strict=True):
        along = expected[row]
        assert (np.diff(along) >= -1e-5 * np.abs(along).max()).all()


def test_only_the_constant_of_each_query_lies_between_the_distances_of_l2() -> None:
    rng = np.random.default_rng(4)
    own, other, gallery = (rng.normal(size=(n, 5)).astype(np.float32) for n in (3, 3, 50))
    found = distances(blended(own, other, 0.25, Metric.L2), gallery, metric=Metric.L2)
    summed = 0.75 * distances(own, gallery, metric=Metric.L2) + 0.25 * distances(other, gallery, metric=Metric.L2)
    constant = 0.25 * 0.75 * np.square(own - other).sum(axis=1)  # (3,)
    np.testing.assert_allclose(summed - found, np.tile(constant[:, None], 50), rtol=1e-3, atol=1e-4)


def test_points_of_a_hyperboloid_are_not_blended() -> None:
    points = np.array([[1.0, 0.0]], dtype=np.float32)
    with pytest.raises(UsageError, match="Queries of LORENTZ cannot be blended"):
        blended(points, points, 0.5, Metric.LORENTZ)
