"""The hyperboloid in numpy against the formulas as printed, in Python's own floats."""

import math

import numpy as np
import pytest
import torch

from rmvdb import metrics
from rmvdb.errors import ConfigError
from rmvdb.learning import hyperbolic
from rmvdb.learning.losses import lorentz, rank_merge
from rmvdb.learning.space import Space
from rmvdb.learning.training import Method, Pairs, TrainingSettings, fit
from rmvdb.learning.transforms import Transform
from rmvdb.planning.orders.table import Known, make_order
from rmvdb.types import Hit, Metric, Record

CURVATURES = [0.5, 1.0, 2.0]


def points(n=30, d=5, *, curvature=1.0, spread=1.0, seed=0):
    space = spread * np.random.default_rng(seed).normal(size=(n, d))
    return np.concatenate([np.sqrt(1 / curvature + (space**2).sum(1, keepdims=True)), space], axis=1).astype(np.float32)


def distance(x, y, k):
    """Eq. 3 of one pair."""
    inner = sum(float(a) * float(b) for a, b in zip(x[1:], y[1:], strict=True)) - float(x[0]) * float(y[0])
    return math.acosh(max(1.0, -k * inner)) / math.sqrt(k)


@pytest.mark.parametrize("curvature", CURVATURES)
def test_the_metric_is_the_distance_of_every_pair(curvature):
    queries, gallery = points(4, curvature=curvature, seed=1), points(curvature=curvature)
    found = metrics.distances(queries, gallery, metric=Metric.LORENTZ)
    expected = [[distance(q, g, curvature) for g in gallery] for q in queries]
    np.testing.assert_allclose(found, expected, atol=1e-3, rtol=1e-4)


def test_hits_of_an_inner_product_are_given_their_distance():
    queries, gallery = points(3, curvature=0.5, seed=1), points(curvature=0.5)
    products = hyperbolic.as_queries(queries) @ gallery.T
    hits = [[Hit(id=at, distance=-float(product), leg="here") for at, product in enumerate(row)] for row in products]
    measured = hyperbolic.measured(hits, queries)
    np.testing.assert_allclose(
        [[hit.distance for hit in row] for row in measured], hyperbolic.distances(queries, gallery), rtol=1e-5
    )
    assert {hit.leg for row in measured for hit in row} == {"here"}


def test_a_query_without_curvature_is_still_answered():
    [hits] = hyperbolic.measured([[Hit(id=1, distance=-0.5), Hit(id=2, distance=0.5)]], np.zeros((1, 4), np.float32))
    assert all(math.isfinite(hit.distance) for hit in hits)


@pytest.mark.parametrize("curvature", CURVATURES)
def test_points_hold_and_others_do_not(curvature):
    some = points(curvature=curvature, spread=3.0)
    assert hyperbolic.hold(some).all()
    assert hyperbolic.radius(some) == pytest.approx(1 / math.sqrt(curvature), rel=1e-3)
    off = some.copy()
    off[3, 1] += 1.0
    off[4] = -off[4]
    assert np.flatnonzero(~hyperbolic.hold(off)).tolist() == [3, 4]
    assert not hyperbolic.hold(np.random.default_rng(0).normal(size=(20, 6)).astype(np.float32)).any()


@pytest.mark.parametrize("curvature", CURVATURES)
def test_flat_coordinates_are_what_was_lifted(curvature):
    z = torch.from_numpy(np.random.default_rng(0).normal(size=(20, 5)))
    lifted = lorentz.exp0(z, curvature=curvature).float().numpy()
    np.testing.assert_allclose(hyperbolic.flat(lifted), z.numpy(), rtol=1e-3, atol=1e-4)
    expected = 1 - lorentz.uncertainty(torch.from_numpy(lifted), curvature=curvature).numpy()
    np.testing.assert_allclose(hyperbolic.certainty(lifted), expected, atol=1e-5)


def test_the_loss_grows_with_the_distance_and_is_the_cosine_of_the_hyperboloid():
    a, b = (torch.from_numpy(points(6, curvature=0.25, seed=seed)).double() for seed in (1, 2))
    found = rank_merge.distances(a, b, metric=Metric.LORENTZ, scale=2.0)
    d = lorentz.distances(a, b, curvature=0.25)
    torch.testing.assert_close(found, torch.cosh(d / 2) - 1, rtol=1e-4, atol=1e-5)
    paired = rank_merge.paired(a, b, metric=Metric.LORENTZ, scale=2.0)
    torch.testing.assert_close(paired, found.diagonal(), rtol=1e-4, atol=1e-5)


def lifted_pairs(seed):
    """Two models that see what makes a class, the old one less of it, at curvature 0.5 and 1."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 12, 300)
    centres, view = np.random.default_rng(99).normal(size=(12, 10)), np.random.default_rng(98).normal(size=(10, 6))
    new = centres[y] + 0.4 * rng.normal(size=(300, 10))
    old = new @ view + 4 * rng.normal(size=(300, 6))
    lifts = lorentz.Lift(zeta=1.0, curvature=0.5), lorentz.Lift(zeta=1.2, curvature=1.0)
    made = [lift(torch.from_numpy(z)).float().numpy() for lift, z in zip(lifts, (old, new), strict=True)]
    return Pairs(old=made[0], new=made[1], labels=y)


@pytest.mark.parametrize("method", [Method.RQT, Method.CL_S, Method.CL_M, Method.MCL, Method.RM])
def test_a_trained_transform_leads_onto_the_old_hyperboloid(method):
    train, held_out = lifted_pairs(0), lifted_pairs(1)
    settings = TrainingSettings(epochs=15, least_steps=150, batch=128, hidden=32)
    fitted = fit(train, method=method, old_metric=Metric.LORENTZ, new_metric=Metric.LORENTZ, settings=settings)
    final = fitted.final(held_out.new)
    reverse = Transform.from_bytes(fitted.reverse.to_bytes()).apply(final)
    for vectors, curvature in ((final, 1.0), (reverse, 0.5)):
        assert hyperbolic.hold(vectors).all()
        assert hyperbolic.radius(vectors) == pytest.approx(1 / math.sqrt(curvature), rel=1e-2)

    def quality(queries):
        found = hyperbolic.distances(queries, held_out.old).astype(np.float64)
        np.fill_diagonal(found, np.inf)
        return metrics.mean(metrics.average_precision(found, held_out.labels[:, None] == held_out.labels[None, :]))

    assert quality(reverse) > quality(held_out.old)


def test_space_is_measured_by_its_curvature():
    assert Space.of(points(curvature=0.25), Metric.LORENTZ).scale == pytest.approx(2.0, rel=1e-3)


def test_records_near_the_origin_are_backfilled_first():
    some = [Record(id=at, vector=each) for at, each in enumerate(points(spread=1.0))]
    confidence = make_order("uncertainty", some, Known(metric=Metric.LORENTZ)).confidence(some)
    expected = [math.tanh(math.asinh(float(np.linalg.norm(each.vector[1:])))) for each in some]
    np.testing.assert_allclose(confidence, expected, rtol=1e-4)
    with pytest.raises(ConfigError, match="choose cluster"):
        make_order("uncertainty", some, Known(metric=Metric.COSINE))


@pytest.mark.parametrize("name", ["cluster", "centroid"])
def test_other_orders_go_by_distance_on_the_hyperboloid(name):
    some = [Record(id=at, vector=each, fields={"kind": at % 3}) for at, each in enumerate(points(60))]
    confidence = make_order(name, some, Known(metric=Metric.LORENTZ, label_field="kind")).confidence(some)
    assert confidence.shape == (60,)
    assert (confidence <= 0).all()
    assert np.isfinite(confidence).all()
