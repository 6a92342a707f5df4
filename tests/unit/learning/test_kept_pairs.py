"""A map that keeps pairs is bounded in pairs and memory, and is a transform like any other."""

import json
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load, save

from rmvdb.errors import ArtifactError, Mismatch
from rmvdb.learning import closed_forms
from rmvdb.learning.closed_forms import variants
from rmvdb.learning.kept_pairs import CHUNK, KeptPairs
from rmvdb.learning.method import Method, Pairs
from rmvdb.learning.transforms import Transform
from rmvdb.types import Metric

COSINE = {"old_metric": Metric.COSINE, "new_metric": Metric.COSINE}


def vectors(n, dim, seed=0):
    return np.random.default_rng(seed).normal(size=(n, dim)).astype(np.float32)


def made(n=60, d_in=6, d_out=4, seed=0):
    return variants(Method.NEIGHBOURS, Pairs(old=vectors(n, d_out, 1), new=vectors(n, d_in, 2)), seed=seed, **COSINE)


def test_more_pairs_than_it_may_keep_are_drawn_by_the_seed(monkeypatch):
    monkeypatch.setattr(closed_forms, "MOST_KEPT", 30)
    arrays = [load(made(seed=seed)[0][1].to_bytes()) for seed in (0, 0, 1)]
    assert [len(each["new"]) for each in arrays] == [30, 30, 30]
    assert [len(each["old"]) for each in arrays] == [30, 30, 30]
    assert (arrays[0]["new"] == arrays[1]["new"]).all()
    assert (arrays[0]["new"] != arrays[2]["new"]).any()
    np.testing.assert_array_equal(arrays[0]["rotation"], arrays[2]["rotation"])  # which is of all pairs
    kept = {tuple(row) for row in (vectors(60, 4, 1) / np.linalg.norm(vectors(60, 4, 1), axis=1, keepdims=True)).round(4)}
    assert len(kept) == 60


def test_its_file_holds_its_pairs_and_little_more():
    n, d_in, d_out = 2000, 32, 16
    size = len(made(n, d_in, d_out)[0][1].to_bytes())
    assert size == pytest.approx(4 * n * (d_in + d_out), rel=0.02)


def test_variants_share_their_arrays():
    first, *others = (transform._map.kept for _, transform in made())
    assert all(each is first for each in others)


def test_many_queries_take_no_more_memory_beside_the_result_than_a_few():
    transform = made(20_000, 8, 4)[0][1]
    queries = vectors(4 * CHUNK, 8, 5)
    peaks = []
    for count in (CHUNK, 4 * CHUNK):
        tracemalloc.start()
        transform.apply(queries[:count])
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.2 * peaks[0]


def test_queries_go_the_same_way_alone_and_together():
    transform = made()[0][1]
    queries = vectors(2 * CHUNK + 3, 6, 5)
    alone = np.concatenate([transform.apply(each[None]) for each in queries])
    np.testing.assert_allclose(transform.apply(queries), alone, atol=1e-5)
    assert transform.apply(queries[:0]).shape == (0, 4)


def test_fewer_pairs_than_ten_are_all_neighbours():
    assert np.isfinite(made(n=8)[0][1].apply(vectors(5, 6, 3))).all()


def test_nothing_can_be_changed_and_many_threads_may_apply_it():
    transform = made()[0][1]
    with pytest.raises(ValueError, match="read-only"):
        transform._map.kept.new[0] = 0
    queries = [vectors(3, 6, seed) for seed in range(32)]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(transform.apply, queries))
    assert all((a == transform.apply(q)).all() for a, q in zip(together, queries, strict=True))


def test_vectors_of_another_dimension_are_refused():
    with pytest.raises(Mismatch, match=r"\(n, 6\)"):
        made()[0][1].apply(vectors(2, 5))


def test_it_takes_no_side_information_and_no_start():
    transform = made()[0][1]
    assert transform.config.side == 0
    assert transform.linear is None


def test_a_damaged_file_is_refused():
    data = made()[0][1].to_bytes()
    size = int.from_bytes(data[:8], "little")
    metadata = {"config": json.loads(data[8 : 8 + size])["__metadata__"]["config"]}
    arrays = load(data)
    for bad in (
        data[:-40],
        save({name: each for name, each in arrays.items() if name != "old"}, metadata=metadata),
        save({**arrays, "old": arrays["old"][:-1]}, metadata=metadata),
        save({**arrays, "more": arrays["old"]}, metadata=metadata),
    ):
        with pytest.raises(ArtifactError, match="not a transform"):
            Transform.from_bytes(bad)


def test_arrays_that_do_not_fit_are_refused():
    whole = made()[0][1]._map
    with pytest.raises(Mismatch, match="has the shape"):
        KeptPairs(whole.config, replace(whole.kept, shift=np.zeros(3, np.float32)))
