"""What others put in the place of ψ is what they mean by it."""

import numpy as np
import pytest
from sklearn.linear_model import Ridge

from rmvdb.learning import bridges, geometry
from rmvdb.learning.method import Pairs
from rmvdb.types import Metric

COSINE = {"old_metric": Metric.COSINE, "new_metric": Metric.COSINE}
L2 = {"old_metric": Metric.L2, "new_metric": Metric.L2}


def rotation(dim, seed=0):
    return np.linalg.qr(np.random.default_rng(seed).normal(size=(dim, dim)))[0]


def unit(vectors):
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def vectors(n, dim, seed):
    return np.random.default_rng(seed).normal(size=(n, dim)).astype(np.float32)


def test_a_rotation_is_recovered_exactly_and_holds_for_other_vectors():
    turn = rotation(12)
    new, other = vectors(60, 12, 1), vectors(20, 12, 2)
    found = bridges.procrustes(Pairs(old=(3 * new @ turn).astype(np.float32), new=new), **COSINE)
    np.testing.assert_allclose(found.apply(other), unit(other @ turn), atol=1e-5)


def test_for_l2_a_rotation_and_a_shift_are_recovered():
    turn, shift = rotation(8, 3), np.arange(8) - 3.0
    new, other = vectors(60, 8, 4), vectors(20, 8, 5)
    pairs = Pairs(old=(2 * new @ turn + shift).astype(np.float32), new=new)
    scale = float(np.linalg.norm(pairs.old, axis=1).mean() / np.linalg.norm(new, axis=1).mean())
    centred = bridges.procrustes(pairs, **L2).apply(other) - pairs.old.mean(axis=0)
    np.testing.assert_allclose(centred, scale * (other - new.mean(axis=0)) @ turn, atol=1e-4)


@pytest.mark.parametrize(("d_new", "d_old"), [(16, 6), (6, 16)])
def test_between_two_dimensions_it_is_semi_orthogonal_and_no_other_such_map_has_a_larger_trace(d_new, d_old):
    new, old = unit(vectors(200, d_new, 6)), unit(vectors(200, d_old, 7))
    found = bridges.procrustes(Pairs(old=old, new=new), **COSINE)
    weight = found._network.body[0].weight.numpy().T.astype(np.float64)  # (d_new, d_old)
    small = weight.T @ weight if d_new > d_old else weight @ weight.T
    np.testing.assert_allclose(small, np.eye(len(small)), atol=1e-5)
    cross = new.T.astype(np.float64) @ old
    for seed in range(50):
        other = rotation(max(d_new, d_old), seed)[:d_new, :d_old]
        assert np.trace(other.T @ cross) <= np.trace(weight.T @ cross) + 1e-9


@pytest.mark.parametrize("alpha", [0.01, 1.0, 30.0])
def test_ridge_is_scikit_learns(alpha):
    new, old, other = vectors(90, 10, 8), vectors(90, 7, 9), vectors(30, 10, 10)
    found = bridges.ridge(Pairs(old=old, new=new), **COSINE, alpha=alpha).apply(other)
    expected = Ridge(alpha=alpha).fit(unit(new), unit(old)).predict(unit(other))
    np.testing.assert_allclose(found, unit(expected), atol=1e-5)


def test_ridge_for_l2_keeps_lengths():
    new, other = vectors(300, 6, 11), vectors(30, 6, 12)
    old = (5 * new @ vectors(6, 4, 13) + 20).astype(np.float32)
    found = bridges.ridge(Pairs(old=old, new=new), **L2, alpha=1e-6).apply(other)
    np.testing.assert_allclose(found, 5 * other @ vectors(6, 4, 13) + 20, rtol=1e-3)
    scales = [np.linalg.norm(each, axis=1).mean() for each in (new, old)]
    expected = Ridge(alpha=2.0).fit(new / scales[0], old / scales[1]).predict(other / scales[0]) * scales[1]
    np.testing.assert_allclose(bridges.ridge(Pairs(old=old, new=new), **L2, alpha=2.0).apply(other), expected, rtol=1e-3)


def test_for_inner_products_every_query_has_the_length_of_the_old_records():
    new, old = vectors(80, 6, 14), vectors(80, 4, 15) * 7
    kinds = {"old_metric": Metric.IP, "new_metric": Metric.IP}
    for fit in (bridges.procrustes, bridges.ridge):
        found = fit(Pairs(old=old, new=new), **kinds).apply(new)
        np.testing.assert_allclose(np.linalg.norm(found, axis=1), np.linalg.norm(old, axis=1).mean(), rtol=1e-5)


def test_a_bridge_is_a_transform_like_any_other(tmp_path):
    from rmvdb.learning.transforms import Transform

    found = bridges.ridge(Pairs(old=vectors(40, 4, 1), new=vectors(40, 6, 2)), **COSINE)
    again = Transform.from_bytes(found.to_bytes())
    np.testing.assert_array_equal(again.apply(vectors(5, 6, 3)), found.apply(vectors(5, 6, 3)))
    assert geometry.distances(found.apply(vectors(5, 6, 3)), vectors(9, 4, 4), metric=Metric.COSINE).shape == (5, 9)
