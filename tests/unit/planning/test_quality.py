"""Quality in numbers, against scikit-learn and torchmetrics, and against cases worked by hand."""

import math
from itertools import permutations

import numpy as np
import pytest
import torch

from rmvdb.errors import UsageError
from rmvdb.learning import geometry
from rmvdb.planning import quality
from rmvdb.types import Metric

TS = [i / 10 for i in range(11)]


def rankings(seed=0, shape=(8, 40), *, values=None, share=0.15):
    """Distances, all different or of a few values, and what is relevant; the last query has nothing to find."""
    rng = np.random.default_rng(seed)
    distance = rng.random(shape) if values is None else rng.integers(0, values, shape) / 4
    relevant = rng.random(shape) < share
    relevant[:, 0] = True
    relevant[-1] = False
    return distance, relevant


def theirs(function, distance, relevant, **options):
    """Return a measure of torchmetrics query by query; it wants scores above 0, and gives 0 where there is nothing to find."""
    scores, target = torch.from_numpy(3 + distance.max() - distance), torch.from_numpy(relevant)
    found = [function(s, t, **options).item() if t.any() else math.nan for s, t in zip(scores, target, strict=True)]
    return np.array(found)


def over_all_orders(function, distance, relevant, **options):
    """Return the mean of a measure of torchmetrics over every order in which equal distances may stand."""
    total = np.zeros(len(distance))
    orders = list(permutations(range(distance.shape[1])))
    for order in orders:
        places = np.array([np.lexsort((order, row)).argsort() for row in distance])  # no two are equal
        total += theirs(function, places.astype(np.float64), relevant, **options)
    return total / len(orders)


@pytest.mark.parametrize("values", [None, 2, 5, 20], ids=["all different", "2 values", "5 values", "20 values"])
@pytest.mark.parametrize("seed", range(4))
def test_average_precision_is_scikit_learns_ties_included(seed, values):
    from sklearn.metrics import average_precision_score

    rng = np.random.default_rng(seed)
    distance = rng.random((7, 60)) if values is None else rng.integers(0, values, (7, 60)) / 4
    relevant = rng.random((7, 60)) < 0.2
    relevant[:, 0] = True
    expected = [average_precision_score(r, -d) for r, d in zip(relevant, distance, strict=True)]
    np.testing.assert_allclose(quality.average_precision(distance, relevant), expected)
    np.testing.assert_allclose(quality.average_precision(distance.astype(np.float32), relevant), expected, rtol=1e-6)


@pytest.mark.parametrize("seed", range(4))
def test_average_precision_is_torchmetrics_where_no_two_distances_are_equal(seed):
    from torchmetrics.functional import retrieval

    distance, relevant = rankings(seed)
    expected = theirs(retrieval.retrieval_average_precision, distance, relevant)
    np.testing.assert_allclose(quality.average_precision(distance, relevant), expected, rtol=1e-6)


@pytest.mark.parametrize("values", [2, 5])
def test_average_precision_of_ties_is_not_below_torchmetrics_with_the_relevant_last_of_them(values):
    from torchmetrics.functional import retrieval

    distance, relevant = rankings(values=values)
    least = theirs(retrieval.retrieval_average_precision, distance + 0.01 * relevant, relevant)[:-1]
    assert (quality.average_precision(distance, relevant)[:-1] >= least - 1e-6).all()


@pytest.mark.parametrize("k", [1, 5, 10, 40, 100])
@pytest.mark.parametrize("seed", range(4))
def test_cmc_and_recall_are_torchmetrics(seed, k):
    from torchmetrics.functional import retrieval

    distance, relevant = rankings(seed)
    hit, share = retrieval.retrieval_hit_rate, retrieval.retrieval_recall
    top = min(k, distance.shape[1])
    np.testing.assert_allclose(quality.cmc(distance, relevant, k=k), theirs(hit, distance, relevant, top_k=top))
    np.testing.assert_allclose(quality.recall(distance, relevant, k=k), theirs(share, distance, relevant, top_k=top), rtol=1e-6)


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_cmc_and_recall_of_ties_are_the_mean_over_all_their_orders(k):
    from torchmetrics.functional import retrieval

    distance, relevant = rankings(shape=(10, 5), values=2, share=0.3)
    hit, share = retrieval.retrieval_hit_rate, retrieval.retrieval_recall
    np.testing.assert_allclose(quality.cmc(distance, relevant, k=k), over_all_orders(hit, distance, relevant, top_k=k))
    np.testing.assert_allclose(
        quality.recall(distance, relevant, k=k), over_all_orders(share, distance, relevant, top_k=k), rtol=1e-6
    )


def test_cmc_of_one_relevant_record_is_scikit_learns_top_k_accuracy():
    from sklearn.metrics import top_k_accuracy_score

    rng = np.random.default_rng(0)
    distance, right = rng.random((50, 9)), rng.integers(0, 9, 50)
    relevant = right[:, None] == np.arange(9)
    for k in (1, 3):
        expected = top_k_accuracy_score(right, -distance, k=k, labels=np.arange(9))
        assert quality.mean(quality.cmc(distance, relevant, k=k)) == pytest.approx(expected)


def test_the_order_of_columns_changes_nothing():
    distance, relevant = rankings(values=3)
    shuffled = np.random.default_rng(0).permutation(distance.shape[1])
    for measure in (lambda d, r: quality.cmc(d, r, k=4), lambda d, r: quality.recall(d, r, k=4), quality.average_precision):
        np.testing.assert_allclose(measure(distance[:, shuffled], relevant[:, shuffled]), measure(distance, relevant))


def test_recall_by_hand():
    distance = np.array([[0.1, 0.2, 0.3, 0.4], [0.1, 0.2, np.inf, 0.4], [0.5, 0.5, 0.5, 0.5]])
    relevant = np.array([[1, 0, 1, 1], [0, 1, 1, 1], [1, 0, 0, 0]], dtype=bool)
    np.testing.assert_allclose(quality.recall(distance, relevant, k=2), [1 / 3, 1 / 2, 1 / 2])
    np.testing.assert_allclose(quality.cmc(distance, relevant, k=2), [1, 1, 1 / 2])


def test_a_record_without_a_distance_is_never_a_result():
    distance, relevant = np.array([[np.nan, np.inf, 0.5]]), np.array([[True, True, True]])
    for k in (1, 2, 3):
        assert quality.cmc(distance, relevant, k=k) == [1]
        assert quality.recall(distance, relevant, k=k) == [1]
    assert np.isnan(quality.cmc(distance[:, :2], relevant[:, :2], k=1)).all()


def test_no_places_are_refused():
    with pytest.raises(UsageError, match="k must be 1 or more, not 0"):
        quality.cmc(np.zeros((1, 2)), np.ones((1, 2), dtype=bool), k=0)


def test_results_of_the_own_identity_from_the_own_camera_are_ignored_as_in_market_1501():
    query_ids, query_cameras = np.array([7, 7, 8]), np.array([1, 2, 1])
    gallery_ids, gallery_cameras = np.array([7, 7, 8, 8, 0]), np.array([1, 3, 1, 1, 1])
    ignored = quality.same_camera(query_ids, query_cameras, gallery_ids, gallery_cameras)
    assert ignored.tolist() == [[True, False, False, False, False], [False] * 5, [False, False, True, True, False]]

    # The nearest picture of 7 is of the query's own camera: without it a distractor comes first, and 8 has nothing to find.
    distance = np.where(ignored, np.inf, np.array([[0.1, 0.3, 0.9, 0.9, 0.2]] * 3))
    relevant = query_ids[:, None] == gallery_ids[None, :]
    np.testing.assert_allclose(quality.cmc(distance, relevant, k=1), [0, 1, np.nan])
    np.testing.assert_allclose(quality.average_precision(distance, relevant), [1 / 2, (1 + 2 / 3) / 2, np.nan])


def test_average_precision_by_hand():
    distance = np.array([[0.1, 0.2, 0.3, 0.4], [0.1, 0.2, 0.3, 0.4]])
    relevant = np.array([[True, False, True, False], [False, False, False, True]])
    np.testing.assert_allclose(quality.average_precision(distance, relevant), [(1 / 1 + 2 / 3) / 2, 1 / 4])


def test_more_queries_than_are_ranked_at_a_time_change_nothing(monkeypatch):
    rng = np.random.default_rng(0)
    distance, relevant = rng.random((10, 20)), rng.random((10, 20)) < 0.3
    measures = [quality.average_precision, lambda d, r: quality.cmc(d, r, k=3), lambda d, r: quality.recall(d, r, k=3)]
    whole = [measure(distance, relevant) for measure in measures]
    monkeypatch.setattr(quality, "CHUNK", 3)
    for measure, expected in zip(measures, whole, strict=True):
        np.testing.assert_array_equal(measure(distance, relevant), expected)


def test_a_query_is_never_its_own_result():
    distance = np.array([[0.0, 0.5, 0.7], [0.5, 0.0, 0.1], [0.7, 0.1, 0.0]])
    relevant = np.array([[1, 0, 1], [0, 1, 0], [1, 0, 1]], dtype=bool)
    np.fill_diagonal(distance, np.inf)
    np.testing.assert_allclose(quality.average_precision(distance, relevant), [1 / 2, np.nan, 1 / 2])
    np.testing.assert_allclose(quality.cmc(distance, relevant, k=1), [0, np.nan, 0])
    np.testing.assert_allclose(quality.cmc(distance, relevant, k=2), [1, np.nan, 1])


def test_cmc_by_hand():
    distance = np.array([[0.1, 0.2, 0.3], [0.1, 0.2, 0.3], [0.1, 0.2, 0.3]])
    relevant = np.array([[1, 0, 0], [0, 0, 1], [0, 0, 0]], dtype=bool)
    assert [quality.mean(quality.cmc(distance, relevant, k=k)) for k in (1, 2, 3)] == [0.5, 0.5, 1.0]


@pytest.mark.parametrize("metric", [Metric.COSINE, Metric.IP, Metric.L2])
def test_distances_are_smaller_for_what_is_closer(metric):
    queries, gallery = np.array([[1.0, 0.0]], np.float32), np.array([[2.0, 0.0], [0.0, 2.0], [-1.0, 0.0]], np.float32)
    expected = {Metric.COSINE: [0, 1, 2], Metric.IP: [-2, 0, 1], Metric.L2: [1, 5, 4]}[metric]
    np.testing.assert_allclose(geometry.distances(queries, gallery, metric=metric), [expected], atol=1e-6)


def test_the_area_is_the_trapezoids():
    assert quality.area([0, 0.5, 1], [0, 1, 1]) == pytest.approx(0.25 + 0.5)
    assert quality.area(TS, [0.3] * 11) == pytest.approx(0.3)


def test_gain_is_0_for_the_old_model_and_1_for_the_new_one():
    assert quality.gain(0.2, old=0.2, new=0.4) == 0
    assert quality.gain(0.4, old=0.2, new=0.4) == 1
    assert quality.gain(41.4, old=21.6, new=47.4) == pytest.approx(0.77, abs=0.005)  # the paper prints 78 %
    assert math.isnan(quality.gain(0.4, old=0.2, new=0.2))


def test_p_com_and_p_up_equal_hbcts_table_1():
    # CMC@1 on CIFAR-100, Ext-data: old 0.572, new alone 0.716; self and cross of l2 and BCT. Printed from more digits.
    for self_, cross, p_up, p_com in [(0.680, 0.645, -0.049, 0.510), (0.706, 0.701, -0.014, 0.900)]:
        assert quality.p_up(self_, alone=0.716) == pytest.approx(p_up, abs=0.002)
        assert quality.p_com(cross, old=0.572, alone=0.716) == pytest.approx(p_com, abs=0.005)


def test_p_com_is_0_for_the_old_quality_and_1_for_the_new_one_and_p_up_a_share_of_the_new_ones():
    assert quality.p_com(0.2, old=0.2, alone=0.4) == 0
    assert quality.p_com(0.4, old=0.2, alone=0.4) == 1
    assert quality.p_com(0.1, old=0.2, alone=0.4) == pytest.approx(-0.5)
    assert quality.p_up(0.5, alone=0.4) == pytest.approx(0.25)
    assert math.isnan(quality.p_com(0.3, old=0.4, alone=0.4))
    assert math.isnan(quality.p_up(0.3, alone=0.0))


def test_the_largest_fall_counts_from_the_highest_point_before():
    assert quality.largest_fall([0.1, 0.5, 0.4, 0.45, 0.3, 0.9]) == pytest.approx(0.2)
    assert quality.largest_fall([0.1, 0.2, 0.2]) == 0
    assert quality.largest_fall([]) == 0


def test_negative_flips_are_right_before_and_wrong_after():
    before, after = np.array([1.0, 1.0, 0.0, 0.0, np.nan]), np.array([1.0, 0.0, 1.0, 0.0, 1.0])
    assert quality.negative_flips(before, after) == 0.25
    assert math.isnan(quality.negative_flips(np.array([np.nan]), np.array([1.0])))
    # A tie for the first place counts by its probability: right with 1/2 before, wrong with 3/4 after.
    assert quality.negative_flips(np.array([0.5]), np.array([0.25])) == 0.375


def test_nine_of_ten_intervals_or_more_hold_the_true_mean():
    held = 0
    for seed in range(60):
        low, high = quality.bootstrap(np.random.default_rng(seed).normal(0.3, 1, 100), rounds=300, seed=seed)
        held += low <= 0.3 <= high
    assert held >= 54


def test_an_interval_is_the_same_each_time_and_of_nothing_is_nothing():
    values = np.random.default_rng(0).random(30)
    assert quality.bootstrap(values, seed=1) == quality.bootstrap(values, seed=1)
    assert quality.bootstrap(np.zeros(5)) == (0.0, 0.0)
    assert all(math.isnan(end) for end in quality.bootstrap(np.array([np.nan])))
    assert math.isnan(quality.mean(np.array([np.nan])))


def test_no_queries_have_no_values():
    nothing = np.empty((0, 4))
    assert quality.average_precision(nothing, nothing.astype(bool)).shape == (0,)
    assert quality.cmc(nothing, nothing.astype(bool), k=1).shape == (0,)


def test_an_empty_gallery_has_nothing_to_find():
    nothing = np.empty((2, 0))
    assert np.isnan(quality.recall(nothing, nothing.astype(bool), k=1)).tolist() == [True, True]


def test_a_flat_curve_falls_by_chance_no_more_than_is_said_and_a_real_dip_falls_more():
    rng = np.random.default_rng(0)
    flat = (rng.random((200, 11, 100)) < 0.8).astype(float)  # (curves, T, Q)
    said = [quality.fall_by_chance(values, rounds=300) for values in flat]
    fallen = [quality.largest_fall(values.mean(axis=1)) for values in flat]
    assert (
        np.mean(np.array(fallen) > np.array(said)) < 0.1
    )  # one pair of moments alone, the deepest of them, is below 0 in three of ten
    dip = np.ones((11, 100))
    dip[5, :9] = 0
    assert quality.fall_by_chance(dip, rounds=300) < 0.09 == pytest.approx(quality.largest_fall(dip.mean(axis=1)))
    dip[:, 50:] = np.nan
    assert quality.fall_by_chance(dip, rounds=300) > 0
    assert math.isnan(quality.fall_by_chance(np.full((3, 4), np.nan)))


def test_a_metric_may_be_named_by_its_text() -> None:
    queries, gallery = np.eye(2, dtype=np.float32), 3 * np.ones((1, 2), np.float32)
    by_text = geometry.distances(queries, gallery, metric="COSINE")  # type: ignore[arg-type]
    assert np.array_equal(by_text, geometry.distances(queries, gallery, metric=Metric.COSINE))


@pytest.mark.parametrize("seed", range(5))
def test_few_relevant_records_are_counted_and_many_sorted_with_one_result(seed, monkeypatch):
    rng = np.random.default_rng(seed)
    distance = rng.integers(0, 30, (40, 90)).astype(float)  # many are equal
    distance[rng.random(distance.shape) < 0.1] = np.inf
    relevant = rng.random(distance.shape) < 0.08
    relevant[:3] = False
    counted = quality.average_precision(distance, relevant)
    monkeypatch.setattr(quality, "FEW", -1)
    np.testing.assert_allclose(counted, quality.average_precision(distance, relevant))


@pytest.mark.parametrize("seed", range(5))
def test_ndcg_is_the_mean_over_the_orders_of_equal_distances(seed):
    rng = np.random.default_rng(seed)
    distance, relevant = rng.integers(0, 12, (6, 30)).astype(float), rng.random((6, 30)) < 0.3
    found = quality.ndcg(distance, relevant, k=10)
    discounts = 1 / np.log2(np.arange(2, 12))
    for query in range(6):
        drawn = []
        for _ in range(4000):
            shuffled = rng.permutation(30)
            ranked = shuffled[np.argsort(distance[query, shuffled], kind="stable")][:10]
            drawn.append((relevant[query, ranked] * discounts).sum())
        best = discounts[: min(10, int(relevant[query].sum()))].sum()
        assert found[query] == pytest.approx(np.mean(drawn) / best, abs=0.015)
    assert np.isnan(quality.ndcg(distance, np.zeros_like(relevant), k=10)).all()
