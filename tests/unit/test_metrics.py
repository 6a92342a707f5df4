"""Quality in numbers, against scikit-learn and against cases worked by hand."""

import math

import numpy as np
import pytest
from sklearn.metrics import average_precision_score

from rmvdb import metrics
from rmvdb.types import Metric

TS = [i / 10 for i in range(11)]


@pytest.mark.parametrize("values", [None, 2, 5, 20], ids=["all different", "2 values", "5 values", "20 values"])
@pytest.mark.parametrize("seed", range(4))
def test_average_precision_is_scikit_learns_ties_included(seed, values):
    rng = np.random.default_rng(seed)
    distance = rng.random((7, 60)) if values is None else rng.integers(0, values, (7, 60)) / 4
    relevant = rng.random((7, 60)) < 0.2
    relevant[:, 0] = True
    expected = [average_precision_score(r, -d) for r, d in zip(relevant, distance, strict=True)]
    np.testing.assert_allclose(metrics.average_precision(distance, relevant), expected)
    np.testing.assert_allclose(metrics.average_precision(distance.astype(np.float32), relevant), expected, rtol=1e-6)


def test_average_precision_by_hand():
    distance = np.array([[0.1, 0.2, 0.3, 0.4], [0.1, 0.2, 0.3, 0.4]])
    relevant = np.array([[True, False, True, False], [False, False, False, True]])
    np.testing.assert_allclose(metrics.average_precision(distance, relevant), [(1 / 1 + 2 / 3) / 2, 1 / 4])


def test_more_queries_than_are_ranked_at_a_time_change_nothing(monkeypatch):
    rng = np.random.default_rng(0)
    distance, relevant = rng.random((10, 20)), rng.random((10, 20)) < 0.3
    whole = metrics.average_precision(distance, relevant), metrics.cmc(distance, relevant, k=3)
    monkeypatch.setattr(metrics, "CHUNK", 3)
    np.testing.assert_array_equal(metrics.average_precision(distance, relevant), whole[0])
    np.testing.assert_array_equal(metrics.cmc(distance, relevant, k=3), whole[1])


def test_a_query_is_never_its_own_result():
    distance = np.array([[0.0, 0.5, 0.7], [0.5, 0.0, 0.1], [0.7, 0.1, 0.0]])
    relevant = np.array([[1, 0, 1], [0, 1, 0], [1, 0, 1]], dtype=bool)
    np.fill_diagonal(distance, np.inf)
    np.testing.assert_allclose(metrics.average_precision(distance, relevant), [1 / 2, np.nan, 1 / 2])
    np.testing.assert_allclose(metrics.cmc(distance, relevant, k=1), [0, np.nan, 0])
    np.testing.assert_allclose(metrics.cmc(distance, relevant, k=2), [1, np.nan, 1])


def test_cmc_by_hand():
    distance = np.array([[0.1, 0.2, 0.3], [0.1, 0.2, 0.3], [0.1, 0.2, 0.3]])
    relevant = np.array([[1, 0, 0], [0, 0, 1], [0, 0, 0]], dtype=bool)
    assert [metrics.mean(metrics.cmc(distance, relevant, k=k)) for k in (1, 2, 3)] == [0.5, 0.5, 1.0]


@pytest.mark.parametrize("metric", list(Metric))
def test_distances_are_smaller_for_what_is_closer(metric):
    queries, gallery = np.array([[1.0, 0.0]], np.float32), np.array([[2.0, 0.0], [0.0, 2.0], [-1.0, 0.0]], np.float32)
    expected = {Metric.COSINE: [0, 1, 2], Metric.IP: [-2, 0, 1], Metric.L2: [1, 5, 4]}[metric]
    np.testing.assert_allclose(metrics.distances(queries, gallery, metric=metric), [expected], atol=1e-6)


def test_the_area_is_the_trapezoids():
    assert metrics.area([0, 0.5, 1], [0, 1, 1]) == pytest.approx(0.25 + 0.5)
    assert metrics.area(TS, [0.3] * 11) == pytest.approx(0.3)


def test_gain_is_0_for_the_old_model_and_1_for_the_new_one():
    assert metrics.gain(0.2, old=0.2, new=0.4) == 0
    assert metrics.gain(0.4, old=0.2, new=0.4) == 1
    assert metrics.gain(41.4, old=21.6, new=47.4) == pytest.approx(0.77, abs=0.005)  # METHODS: printed as 78 %
    assert math.isnan(metrics.gain(0.4, old=0.2, new=0.2))


def test_the_largest_fall_counts_from_the_highest_point_before():
    assert metrics.largest_fall([0.1, 0.5, 0.4, 0.45, 0.3, 0.9]) == pytest.approx(0.2)
    assert metrics.largest_fall([0.1, 0.2, 0.2]) == 0
    assert metrics.largest_fall([]) == 0


def test_negative_flips_are_right_before_and_wrong_after():
    before, after = np.array([1.0, 1.0, 0.0, 0.0, np.nan]), np.array([1.0, 0.0, 1.0, 0.0, 1.0])
    assert metrics.negative_flips(before, after) == 0.25
    assert math.isnan(metrics.negative_flips(np.array([np.nan]), np.array([1.0])))


def test_nine_of_ten_intervals_or_more_hold_the_true_mean():
    held = 0
    for seed in range(60):
        low, high = metrics.bootstrap(np.random.default_rng(seed).normal(0.3, 1, 100), rounds=300, seed=seed)
        held += low <= 0.3 <= high
    assert held >= 54


def test_an_interval_is_the_same_each_time_and_of_nothing_is_nothing():
    values = np.random.default_rng(0).random(30)
    assert metrics.bootstrap(values, seed=1) == metrics.bootstrap(values, seed=1)
    assert metrics.bootstrap(np.zeros(5)) == (0.0, 0.0)
    assert all(math.isnan(end) for end in metrics.bootstrap(np.array([np.nan])))
    assert math.isnan(metrics.mean(np.array([np.nan])))


def test_no_queries_have_no_values():
    nothing = np.empty((0, 4))
    assert metrics.average_precision(nothing, nothing.astype(bool)).shape == (0,)
    assert metrics.cmc(nothing, nothing.astype(bool), k=1).shape == (0,)
