"""Each loss against a slow loop written from its formula."""

import math

import numpy as np
import pytest
import torch

from rmvdb.learning import losses
from rmvdb.types import Metric


def batch(seed=0, n=12, classes=3):
    """Reverse vectors, old vectors, new vectors and labels; not of unit length."""
    rng = np.random.default_rng(seed)
    rev, old, new = (rng.normal(size=(n, dim)) for dim in (4, 4, 6))
    return rev, old, new, rng.integers(0, classes, n)


def cosine(a, b):
    return 1 - float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def hardest(ks, distance, *, farthest):
    ranked = sorted(ks, key=distance, reverse=farthest)
    return ranked[: math.ceil(len(ranked) / 2)]


def sums(i, q, g, labels, tau, mining, *, self_pair):
    """P and N of anchor i: the sums of exp(−dist/τ)."""
    positives = [k for k in range(len(labels)) if labels[k] == labels[i] and (self_pair or k != i)]
    negatives = [k for k in range(len(labels)) if labels[k] != labels[i]]
    if mining:
        positives = hardest(positives, lambda k: cosine(q[i], g[k]), farthest=True)
        negatives = hardest(negatives, lambda k: cosine(q[i], g[k]), farthest=False)
    return [sum(math.exp(-cosine(q[i], g[k]) / tau) for k in ks) for ks in (positives, negatives)]


def slow(name, rev, old, new, labels, tau, mining):
    first, second = [], []
    for i in range(len(labels)):
        p_old, n_old = sums(i, rev, old, labels, tau, mining, self_pair=True)
        p_new, n_new = sums(i, new, new, labels, tau, mining, self_pair=False)
        both = n_old + n_new
        first.append(-math.log(p_old / (p_old + (both if name == "mcl" else n_old))))
        if p_new:
            second.append(-math.log(p_new / (p_new + (both if name == "mcl" else n_new))))
    return np.mean(first) + (0 if name == "cl-s" else np.mean(second) if second else 0)


def matrices(rev, old, new, labels):
    rev, old, new, y = (torch.from_numpy(np.asarray(each)) for each in (rev, old, new, labels))
    d_old = losses.distances(rev, old, metric=Metric.COSINE)
    return d_old, losses.distances(new, new, metric=Metric.COSINE), y[:, None] == y[None, :]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("tau", [1.0, 0.1])
@pytest.mark.parametrize("mining", [True, False])
@pytest.mark.parametrize("name", ["cl-s", "cl-m", "mcl"])
def test_the_contrastive_losses_are_equations_10_14_and_11(name, mining, tau, seed):
    rev, old, new, labels = batch(seed)
    d_old, d_new, same = matrices(rev, old, new, labels)
    options = {"temperature": tau, "mining": mining}
    functions = {
        "cl-s": lambda: losses.cl_s(d_old, same, **options),
        "cl-m": lambda: losses.cl_m(d_old, d_new, same, **options),
        "mcl": lambda: losses.mcl(d_old, d_new, same, **options),
    }
    assert functions[name]().item() == pytest.approx(slow(name, rev, old, new, labels, tau, mining), rel=1e-6)


def test_rqt_is_equation_9():
    rev, old, *_ = batch()
    expected = np.mean([cosine(a, b) for a, b in zip(rev, old, strict=True)])
    pairs = losses.paired(torch.from_numpy(rev), torch.from_numpy(old), metric=Metric.COSINE)
    assert losses.rqt(pairs).item() == pytest.approx(expected)


@pytest.mark.parametrize("metric", [Metric.COSINE, Metric.IP, Metric.L2])
def test_paired_distances_are_the_diagonal_of_all_distances(metric):
    rev, old, *_ = (torch.from_numpy(np.asarray(each)) for each in batch())
    everything = losses.distances(rev, old, metric=metric, scale=2.0)
    torch.testing.assert_close(losses.paired(rev, old, metric=metric, scale=2.0), everything.diagonal())


def test_the_three_distances_are_one_on_the_unit_sphere():
    rev, old, *_ = (torch.nn.functional.normalize(torch.from_numpy(np.asarray(each, dtype=float)), dim=-1) for each in batch())
    cos, ip, l2 = (losses.distances(rev, old, metric=metric) for metric in (Metric.COSINE, Metric.IP, Metric.L2))
    torch.testing.assert_close(cos, ip)
    torch.testing.assert_close(cos, l2)


def test_l2_distance_is_half_the_squared_distance_in_units_of_the_scale():
    a, b = torch.tensor([[0.0, 6.0]]), torch.tensor([[8.0, 0.0]])
    assert losses.distances(a, b, metric=Metric.L2, scale=2.0).item() == pytest.approx((36 + 64) / 2 / 4)


def test_an_anchor_without_a_positive_or_a_negative_leaves_loss_and_gradient_finite():
    for labels in ([0, 1, 2, 3], [0, 0, 0, 0], [0, 0, 1, 2]):
        new = torch.randn(4, 3, requires_grad=True)
        d_old, d_new = (losses.distances(new, new.detach().flip(0), metric=Metric.COSINE) for _ in range(2))
        y = torch.tensor(labels)
        loss = losses.mcl(d_old, d_new, y[:, None] == y[None, :], temperature=0.1)
        loss.backward()
        assert torch.isfinite(loss)
        assert torch.isfinite(new.grad).all()


def test_the_halves_are_the_farthest_positives_and_the_nearest_negatives():
    d = torch.tensor([[0.1, 0.5, 0.9, 0.3, 0.2]])
    allowed = torch.tensor([[True, True, True, True, False]])
    assert losses.hardest_half(d, allowed, farthest=True).tolist() == [[False, True, True, False, False]]
    assert losses.hardest_half(d, allowed, farthest=False).tolist() == [[True, False, False, True, False]]


@pytest.mark.parametrize("device", ["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
def test_the_halves_of_distances_stay_where_the_distances_are(device):
    d = torch.rand(9, 9)
    allowed = torch.rand(9, 9) < 0.7
    found = losses.hardest_half(d.to(device), allowed.to(device), farthest=True)
    assert found.device.type == device
    assert torch.equal(found.cpu(), losses.hardest_half(d, allowed, farthest=True))


def test_distances_far_apart_do_not_overflow():
    d = torch.tensor([[0.0, 1e6], [1e6, 0.0]])
    same = torch.eye(2, dtype=torch.bool)
    assert torch.isfinite(losses.mcl(d, d, same, temperature=0.1))
