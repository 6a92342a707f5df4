"""h lifts what a gallery holds into the new space (FCT)."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from rmvdb.errors import Mismatch, PlanRefused
from rmvdb.learning import geometry
from rmvdb.learning.losses import fct
from rmvdb.learning.network import Network
from rmvdb.learning.training import Fitted, Method, Pairs, TrainingSettings, fit
from rmvdb.learning.transforms import Config, Norm, Transform
from rmvdb.planning.part import Part
from rmvdb.types import Metric

QUICK = TrainingSettings(least_steps=150, hidden=64)


def pairs(n=400, seed=0, *, length=1.0):
    """Return a new space, an old one that sees a part of it, and side information that sees the rest; labels by the new one."""
    rng = np.random.default_rng(seed)
    classes = np.random.default_rng(99).normal(size=(8, 12))
    y = rng.integers(0, 8, n)
    new = classes[y] + 0.3 * rng.normal(size=(n, 12))
    old, side = new[:, :6] + 0.3 * rng.normal(size=(n, 6)), new[:, 6:] + 0.1 * rng.normal(size=(n, 6))
    return Pairs(
        old=(length * old).astype(np.float32), new=(length * new).astype(np.float32), labels=y, side=side.astype(np.float32)
    )


def part(some, metric):
    return Part(pairs=some, confidence=np.arange(len(some), dtype=float), old_metric=metric, new_metric=metric)


@pytest.mark.parametrize("metric", [Metric.COSINE, Metric.IP, Metric.L2])
def test_new_queries_find_more_in_a_lifted_gallery_than_old_ones_did_in_the_old(metric):
    length = 1.0 if metric is Metric.COSINE else 20.0
    held_out = part(pairs(seed=1, length=length), metric)
    train = pairs(length=length)
    fitted = fit(train, method=Method.FCT, old_metric=metric, new_metric=metric, settings=QUICK)
    without = fit(replace(train, side=None), method=Method.FCT, old_metric=metric, new_metric=metric, settings=QUICK)
    assert fitted.head is None
    assert fitted.reverse is None
    old = held_out.curve(Fitted()).map
    alone = replace(held_out, pairs=replace(held_out.pairs, side=None)).curve(without).map
    assert held_out.curve(fitted).map[0] > alone[0] > old[0]
    assert held_out.curve(fitted).map[-1] == pytest.approx(old[-1])  # all is re-embedded: nothing lifted is left


def test_lifted_records_and_new_ones_are_compared_by_the_new_metric():
    some = part(pairs(length=20.0), Metric.L2)
    lifted = fit(some.pairs, method=Method.FCT, old_metric=Metric.L2, new_metric=Metric.COSINE, settings=QUICK)
    mixed = replace(some, new_metric=Metric.COSINE)
    assert mixed.mixed(Fitted())
    assert not mixed.mixed(lifted)
    newest = mixed.legs(lifted)[0]
    made = lifted.lifted(some.pairs.old, some.pairs.side)
    np.testing.assert_array_equal(newest.gallery, made)
    np.testing.assert_allclose(np.linalg.norm(made, axis=1), 1, rtol=1e-5)
    expected = geometry.distances(some.pairs.new, made, metric=Metric.COSINE)
    np.testing.assert_allclose(newest.distances(None), expected)


def test_a_lorentz_gallery_is_lifted_onto_its_hyperboloid():
    some = pairs()
    time = np.sqrt(1 + np.square(some.new).sum(1, keepdims=True))
    points = replace(some, new=np.concatenate([time, some.new], axis=1).astype(np.float32))
    fitted = fit(points, method=Method.FCT, old_metric=Metric.COSINE, new_metric=Metric.LORENTZ, settings=QUICK)
    made = fitted.lifted(some.old, some.side).astype(np.float64)
    np.testing.assert_allclose(np.square(made[:, 1:]).sum(1) - np.square(made[:, 0]), -1, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("metric", [Metric.COSINE, Metric.IP, Metric.L2])
def test_the_loss_is_half_of_the_squared_distance(metric):
    rng = np.random.default_rng(0)
    made, new = rng.normal(size=(9, 5)), rng.normal(size=(9, 5))
    if metric is Metric.COSINE:
        unit = [each / np.linalg.norm(each, axis=1, keepdims=True) for each in (made, new)]
    else:
        unit = [each / 2.0 for each in (made, new)]
    slow = np.mean([sum((a - b) ** 2 for a, b in zip(*rows, strict=True)) / 2 for rows in zip(*unit, strict=True)])
    found = fct.loss(torch.from_numpy(made), torch.from_numpy(new), metric=metric, scale=2.0)
    assert float(found) == pytest.approx(slow)


def test_a_network_of_the_papers_width_has_the_papers_layers():
    """Branches d → 2d → 2 d_new, then 2048 → 2048 → d_new; all but the last with BatchNorm and ReLU."""
    config = Config(d_in=128, d_out=64, side=32, blocks=3, hidden=2048, branches=True)
    shapes = [(each.in_features, each.out_features) for each in Network(config).modules() if isinstance(each, torch.nn.Linear)]
    assert shapes == [(128, 256), (256, 128), (32, 64), (64, 128), (256, 2048), (2048, 2048), (2048, 64)]
    kinds = [type(each).__name__ for each in Network(config).modules() if isinstance(each, (torch.nn.BatchNorm1d, torch.nn.ReLU))]
    assert kinds == ["BatchNorm1d", "ReLU"] * 6


def test_without_a_width_the_hidden_layers_are_four_times_the_new_dimension_wide():
    """Not the paper's 2048: 512 for the 128 dimensions of its tables."""
    some = pairs(40)
    made = fit(
        replace(some, new=some.new[:, :5]),
        method=Method.FCT,
        old_metric=Metric.COSINE,
        new_metric=Metric.COSINE,
        settings=TrainingSettings(least_steps=1),
    ).lift
    assert made.config == replace(made.config, d_in=6, side=6, d_out=5, blocks=3, hidden=20, branches=True, residual=False)


@pytest.mark.parametrize("side", [0, 3])
def test_the_applied_and_the_stored_map_are_the_trained_network(side):
    torch.manual_seed(0)
    network = Network(Config(d_in=6, d_out=5, side=side, blocks=3, hidden=16, branches=True, output=Norm.FREE))
    for tensor in network.state_dict().values():
        if tensor.is_floating_point():
            tensor.copy_(torch.rand_like(tensor) + 0.1)
    network.eval()
    x = np.random.default_rng(0).normal(size=(7, 6 + side)).astype(np.float32)
    with torch.inference_mode():
        expected = network(torch.from_numpy(x)).numpy()
    made = Transform(network)
    np.testing.assert_allclose(made.apply(x), expected, rtol=1e-4)
    np.testing.assert_array_equal(Transform.from_bytes(made.to_bytes()).apply(x), made.apply(x))
    with pytest.raises(Mismatch, match="vectors of shape"):
        made.apply(x[:, 1:])


def test_side_information_goes_row_by_row_and_is_finite():
    some = pairs(20)
    with pytest.raises(Mismatch, match="row by row"):
        Pairs(old=some.old, new=some.new, side=some.side[1:])
    some.side[3, 0] = np.nan
    with pytest.raises(PlanRefused, match="side information"):
        fit(some, method=Method.FCT, old_metric=Metric.COSINE, new_metric=Metric.COSINE, settings=QUICK)
