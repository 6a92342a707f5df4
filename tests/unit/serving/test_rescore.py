"""Rescoring without an engine: which hits are candidates, how they rank then, and what is kept."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from rmvdb.learning.calibration import Calibration
from rmvdb.serving import rescore_figures
from rmvdb.serving.merge import reranked
from rmvdb.serving.rescore import candidates, true_distances
from rmvdb.serving.rescore_figures import RescoreFigures
from rmvdb.serving.vector_cache import VectorCache
from rmvdb.types import Hit, Metric
from tests.support.merging import merge
from tests.support.waiting import Clock


def hits(leg: str, *found: tuple[int, float]) -> list[Hit]:
    return [Hit(id=id, distance=far, leg=leg, raw=far) for id, far in found]


def test_candidates_are_the_best_hits_that_the_newest_leg_did_not_find() -> None:
    new, old = hits("new", (1, 0.1), (2, 0.4)), hits("old", (2, 0.2), (3, 0.3), (4, 0.5), (5, 0.6))
    merged = merge([new, old], [None, None], limit=10)

    assert [hit.id for hit in candidates(merged, {1, 2}, most=2)] == [3, 4]
    assert [hit.id for hit in candidates(merged, {1, 2}, most=10)] == [3, 4, 5]


def test_a_better_distance_changes_the_rank_and_keeps_leg_and_fields() -> None:
    merged = merge([hits("new", (1, 0.3)), hits("old", (2, 0.1), (3, 0.2))], [None, None], limit=10)
    ranked = reranked(merged, {2: 0.9, 3: 0.05}, None, collections=["new", "old"])

    assert [(hit.id, hit.distance, hit.raw, hit.leg) for hit in ranked] == [
        (3, 0.05, 0.05, "old"),
        (1, 0.3, 0.3, "new"),
        (2, 0.9, 0.9, "old"),
    ]


def test_a_better_distance_is_put_on_the_common_scale() -> None:
    scale = Calibration(x=(0.0, 1.0), y=(-1.0, 1.0)).apply
    merged = merge([hits("new", (1, 0.5)), hits("old", (2, 3.0), (3, 4.0))], [scale, None], limit=10)
    ranked = reranked(merged, {2: 0.75}, scale, collections=["new", "old"])

    assert [(hit.id, hit.distance, hit.raw) for hit in ranked] == [(1, 0.0, 0.5), (2, 0.5, 0.75), (3, 4.0, 4.0)]


def test_equal_distances_rank_by_leg_then_by_raw_distance_then_by_id() -> None:
    merged = merge([hits("new", (9, 0.5)), hits("old", (8, 0.1), (7, 0.2), (6, 0.3))], [None, None], limit=10)
    ranked = reranked(merged, {8: 0.5, 7: 0.5}, None, collections=["new", "old"])

    assert [hit.id for hit in ranked] == [6, 9, 7, 8]


def test_without_a_better_distance_the_order_stays() -> None:
    legs = [hits("new", (1, 0.5), (2, 0.7)), hits("old", (2, 0.1), (3, 0.5), (4, float("nan")))]
    merged = merge(legs, [None, None], limit=10)

    assert [hit.id for hit in reranked(merged, {}, None, collections=["new", "old"])] == [hit.id for hit in merged]


@pytest.mark.parametrize(
    ("metric", "far"), [(Metric.COSINE, 1 - 2**-0.5), (Metric.IP, -2.0), (Metric.L2, 4.0)], ids=lambda each: str(each)
)
def test_true_distances_follow_the_metric(metric: Metric, far: float) -> None:
    query, vector = np.array([2.0, 0.0], np.float32), np.array([1.0, 1.0], np.float32)
    found = true_distances(query, {7: vector}, Metric(metric)) if metric is not Metric.L2 else None
    if found is None:
        found = true_distances(query, {7: np.array([2.0, 2.0], np.float32)}, metric)
    assert found == {7: pytest.approx(far, abs=1e-6)}
    assert true_distances(query, {}, metric) == {}


# --- the cache ------------------------------------------------------------------------------------------------------------


def test_the_vector_of_another_item_collection_or_record_is_not_found() -> None:
    cache = VectorCache(10_000)
    cache.put({("new", 1, b"a"): np.ones(4, np.float32)})

    assert list(cache.get([("new", 1, b"a")])) == [("new", 1, b"a")]
    assert cache.get([("new", 1, b"b"), ("newer", 1, b"a"), ("new", 2, b"a"), ("new", "1", b"a")]) == {}


def test_the_oldest_use_makes_room() -> None:
    cache = VectorCache(3 * 416)
    for id in (1, 2, 3):
        cache.put({("new", id, b""): np.ones(4, np.float32)})
    cache.get([("new", 1, b"")])
    cache.put({("new", 4, b""): np.ones(4, np.float32)})

    assert [id for _, id, _ in cache.get([("new", id, b"") for id in (1, 2, 3, 4)])] == [1, 3, 4]
    assert cache.bytes == 3 * 416


def test_a_vector_larger_than_the_cache_is_not_kept() -> None:
    cache = VectorCache(100)
    cache.put({("new", 1, b""): np.ones(4, np.float32)})

    assert (len(cache), cache.bytes) == (0, 0)


def test_a_kept_vector_does_not_hold_its_whole_batch() -> None:
    cache, batch = VectorCache(10_000), np.ones((100, 4), np.float32)
    cache.put({("new", 1, b""): batch[0]})

    assert cache.get([("new", 1, b"")])["new", 1, b""].base is None


def test_many_threads_may_use_one_cache() -> None:
    cache = VectorCache(20 * 416)

    def use(seed: int) -> None:
        for id in np.random.default_rng(seed).integers(0, 50, 500).tolist():
            cache.put({("new", id, b""): np.full(4, id, np.float32)})
            assert all(vector[0] == key[1] for key, vector in cache.get([("new", id, b"")]).items())

    threads = [threading.Thread(target=use, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert cache.bytes == len(cache) * 416 == 20 * 416


# --- figures --------------------------------------------------------------------------------------------------------------


def test_figures_tell_of_the_last_half_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(rescore_figures, "time", clock)
    figures = RescoreFigures()
    assert figures.latest() is None
    for embedded in (20, 10, 0):
        figures.embedded(embedded)
        figures.cached(20 - embedded)
        figures.searched(queries=2, seconds=0.01 * embedded)
    assert figures.latest() == {"searches": 3, "queries": 6, "embedded": 30, "cached": 30, "p50_ms": 100.0}
    clock.sleep(31)
    assert figures.latest() is None
