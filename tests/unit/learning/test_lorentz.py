"""Hyperbolic space against the formulas as printed, in float64, near the origin and far out."""

import math

import numpy as np
import pytest
import torch

from rmvdb.learning import geometry
from rmvdb.learning.losses import lorentz
from rmvdb.types import Metric
from tests.support.hyperbolic import distance, exterior, length, lifted

CURVATURES = [0.5, 1.0, 2.0]


def points(seed=0, n=8, d=4, k=1.0, scale=1.0):
    """Points (n, d + 1) with norms of z from a fifth of `scale` to it."""
    rng = np.random.default_rng(seed)
    z = rng.normal(size=(n, d))
    z *= scale * np.linspace(0.2, 1, n)[:, None] / np.linalg.norm(z, axis=1, keepdims=True)
    return lorentz.exp0(torch.from_numpy(z), curvature=k)


@pytest.mark.parametrize("k", CURVATURES)
@pytest.mark.parametrize("norm", [0.0, 1e-14, 1e-8, 1e-3, 1.0, 30.0])
def test_a_vector_is_lifted_as_printed_and_onto_the_hyperboloid_near_the_origin_and_far_out(norm, k):
    z = torch.tensor([[0.6, -0.8, 0.0]], dtype=torch.float64).mul(norm).requires_grad_()
    h = lorentz.exp0(z, curvature=k)
    np.testing.assert_allclose(h.detach().numpy()[0], lifted(z.tolist()[0], k), rtol=1e-12)
    assert lorentz.holds(h.detach(), curvature=k)
    h.sum().backward()
    assert torch.isfinite(z.grad).all()


def test_a_point_of_another_curvature_is_recognised():
    assert lorentz.holds(points(k=2.0).float(), curvature=2.0)
    assert not lorentz.holds(points(k=2.0), curvature=1.0)
    assert not lorentz.holds(-points(k=1.0), curvature=1.0)
    assert not lorentz.holds(torch.randn(5, 4), curvature=1.0)


def test_the_lift_divides_by_the_root_of_d_and_clips_at_zeta():
    z = torch.tensor([[3.0, 0.0, 0.0, 4.0], [0.3, 0.0, 0.0, 0.4], [0.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    h = lorentz.Lift(zeta=1.2, curvature=2.0)(z)
    expected = [lifted([0.72, 0, 0, 0.96], 2.0), lifted([0.15, 0, 0, 0.2], 2.0), [1 / math.sqrt(2), 0, 0, 0, 0]]
    np.testing.assert_allclose(h.numpy(), expected, rtol=1e-12)


@pytest.mark.parametrize("k", CURVATURES)
def test_distances_are_equation_3(k):
    x, y = points(1, k=k), points(2, k=k, scale=3.0)
    expected = [[distance(a, b, k) for b in y.tolist()] for a in x.tolist()]
    np.testing.assert_allclose(lorentz.distances(x, y, curvature=k).numpy(), expected, rtol=1e-9)
    np.testing.assert_allclose(lorentz.distance(x, y, curvature=k).numpy(), np.diagonal(expected), rtol=1e-9)


@pytest.mark.parametrize("k", CURVATURES)
def test_the_distance_to_the_origin_is_the_norm_of_the_vector(k):
    z = torch.tensor([[1e-6, 0.0], [0.3, 0.4], [9.0, 12.0]], dtype=torch.float64)
    origin = lorentz.exp0(torch.zeros_like(z), curvature=k)
    found = lorentz.distance(origin, lorentz.exp0(z, curvature=k), curvature=k)
    np.testing.assert_allclose(found.numpy(), [1e-6, 0.5, 15.0], rtol=1e-6)


def test_pairs_that_nearly_touch_keep_their_distance_in_float32_where_the_printed_formula_loses_it():
    z = torch.nn.functional.normalize(torch.from_numpy(np.random.default_rng(0).normal(size=(50, 4))))
    x, y = lorentz.exp0(z), lorentz.exp0(z + 1e-4)
    exact = lorentz.distance(x, y)
    ours = lorentz.distance(x.float(), y.float())
    printed = torch.arccosh((-lorentz.inner(x.float(), y.float())).clamp_min(1))
    torch.testing.assert_close(ours.double(), exact, rtol=0.05, atol=0)
    assert (printed - exact).abs().max() > 0.1 * exact.max()


def test_a_point_is_at_distance_0_from_itself_without_a_gradient_that_is_not_finite():
    for dtype in (torch.float32, torch.float64):
        h = points(n=4).to(dtype).requires_grad_()
        everything = lorentz.distances(h, h.detach())
        assert lorentz.distance(h, h.detach()).tolist() == [0.0] * 4
        assert everything.diagonal().max() < 2e-3
        (everything.sum() + lorentz.distance(h, h.detach()).sum()).backward()
        assert torch.isfinite(h.grad).all()


def test_far_points_do_not_overflow():
    far = lorentz.exp0(torch.tensor([[40.0, 0.0], [-40.0, 0.0]], dtype=torch.float32))
    assert lorentz.distance(far[:1], far[1:]).item() == pytest.approx(80, rel=1e-5)


@pytest.mark.parametrize("k", CURVATURES)
def test_uncertainty_is_the_first_line_of_equation_10_and_falls_with_the_norm(k):
    norms = [0.0, 0.1, 0.5, 1.0, 3.0]
    z = torch.tensor([[norm, 0.0] for norm in norms], dtype=torch.float64)
    found = lorentz.uncertainty(lorentz.exp0(z, curvature=k), curvature=k).tolist()
    assert found == pytest.approx([1 - math.tanh(math.sqrt(k) * norm) for norm in norms], rel=1e-9)
    assert found == sorted(found, reverse=True)
    assert found[0] == pytest.approx(1)


def test_uncertainty_stays_above_0_far_out():
    h = lorentz.exp0(torch.tensor([[20.0, 0.0]], dtype=torch.float32))
    assert lorentz.uncertainty(h).item() == pytest.approx(2 * math.exp(-40), rel=1e-4)


@pytest.mark.parametrize("k", CURVATURES)
def test_the_aperture_is_equation_11_and_a_right_angle_near_the_origin(k):
    h = points(k=k, scale=2.0)
    expected = [math.asin(min(1.0, 2 * 0.1 / (math.sqrt(k) * length(each)))) for each in h.tolist()]
    np.testing.assert_allclose(lorentz.aperture(h, epsilon=0.1, curvature=k).numpy(), expected, rtol=1e-12)
    near = lorentz.exp0(torch.tensor([[0.0, 0.0], [0.1, 0.0]], dtype=torch.float64), curvature=k)
    assert lorentz.aperture(near, epsilon=0.1, curvature=k).tolist() == pytest.approx([math.pi / 2] * 2)


@pytest.mark.parametrize("k", CURVATURES)
def test_the_exterior_angle_is_the_printed_arccos(k):
    apex, point = points(1, n=30, k=k), points(2, n=30, k=k, scale=2.0)
    expected = [exterior(a, b, k) for a, b in zip(apex.tolist(), point.tolist(), strict=True)]
    np.testing.assert_allclose(lorentz.exterior_angle(apex, point, curvature=k).numpy(), expected, rtol=1e-7)


@pytest.mark.parametrize("k", CURVATURES)
def test_further_out_on_the_same_ray_the_angle_is_0_and_towards_the_origin_it_is_pi(k):
    z = torch.tensor([[0.3, -0.4]], dtype=torch.float64)
    apex, further, nearer = (lorentz.exp0(z * factor, curvature=k) for factor in (1, 2, 0.5))
    assert lorentz.exterior_angle(apex, further, curvature=k).item() == pytest.approx(0, abs=1e-7)
    assert lorentz.exterior_angle(apex, nearer, curvature=k).item() == pytest.approx(math.pi, abs=1e-7)
    assert lorentz.exterior_angle(apex, apex, curvature=k).item() == 0


def test_angles_have_finite_gradients_at_their_ends():
    z = torch.tensor([[0.3, -0.4]] * 4 + [[0.0, 0.0]], dtype=torch.float64)
    points = (z * torch.tensor([[1.0], [2.0], [0.5], [-1.0], [1.0]])).requires_grad_()
    lorentz.exterior_angle(lorentz.exp0(z), lorentz.exp0(points)).sum().backward()
    assert torch.isfinite(points.grad).all()


@pytest.mark.parametrize(
    "function",
    [
        lambda z, o: lorentz.exp0(z, curvature=0.7),
        lambda z, o: lorentz.Lift(zeta=0.5, curvature=0.7)(z),
        lambda z, o: lorentz.distance(lorentz.exp0(z), o),
        lambda z, o: lorentz.distances(lorentz.exp0(z), o),
        lambda z, o: lorentz.exterior_angle(o, lorentz.exp0(z)),
        lambda z, o: lorentz.uncertainty(lorentz.exp0(z)),
        lambda z, o: lorentz.aperture(lorentz.exp0(z)),
    ],
    ids=["exp0", "lift", "distance", "distances", "angle", "uncertainty", "aperture"],
)
def test_gradients_equal_finite_differences(function):
    z = torch.from_numpy(np.random.default_rng(3).normal(size=(5, 4))).requires_grad_()
    torch.autograd.gradcheck(lambda z: function(z, points(4, n=5)), z)


@pytest.mark.parametrize("k", CURVATURES)
def test_an_inner_product_index_ranks_by_hyperbolic_distance(k):
    queries, gallery = points(1, n=10, k=k), points(2, n=200, k=k, scale=2.0)
    by_index = geometry.distances(lorentz.as_query(queries).numpy(), gallery.numpy(), metric=Metric.IP)
    by_distance = lorentz.distances(queries, gallery, curvature=k).numpy()
    np.testing.assert_array_equal(np.argsort(by_index, axis=1), np.argsort(by_distance, axis=1))
