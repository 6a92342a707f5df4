"""Each loss for compatible training against a slow loop written from its formula."""

import math

import numpy as np
import pytest
import torch

from rmvdb.learning.losses import advbct, bct, hbct, hoc, l2, lorentz, ract
from rmvdb.learning.losses.classes import class_means
from tests.support.hyperbolic import distance, exterior, inner, length, lifted

CURVATURES = [0.5, 1.0, 2.0]


def batch(seed=0, n=12, d=5, classes=3):
    """New and old embeddings, not of unit length, and labels."""
    rng = np.random.default_rng(seed)
    new, old = (torch.from_numpy(rng.normal(size=(n, d)) * rng.uniform(0.5, 2, (n, 1))) for _ in range(2))
    return new, old, torch.from_numpy(rng.integers(0, classes, n))


def one_class():
    new, old, labels = batch(1)
    return new, old, torch.zeros_like(labels)


def all_alone():
    new, old, labels = batch(2)
    return new, old, torch.arange(len(labels))


def all_but_one_new():
    new, old, labels = batch(4)
    labels = torch.full_like(labels, 7)
    labels[3] = 1
    return new, old, labels


def identical():
    new, _, labels = batch(3)
    return new[:1].repeat(len(new), 1), new[:1].repeat(len(new), 1), labels


BATCHES = [pytest.param(*batch(seed), id=f"seed {seed}") for seed in range(4)]
BATCHES += [pytest.param(*make(), id=make.__name__) for make in (one_class, all_alone, all_but_one_new, identical)]


def unit(x):
    return x / math.sqrt(sum(each * each for each in x))


def arrays(*tensors):
    return [each.numpy() for each in tensors]


def cross_entropy(logits, label):
    return -math.log(math.exp(logits[label]) / sum(math.exp(each) for each in logits))


def check(function, new, expected):
    """The value, and that its gradient is finite."""
    new = new.detach().clone().requires_grad_()
    loss = function(new)
    assert loss.item() == pytest.approx(expected, rel=1e-9, abs=1e-12)
    (gradient,) = torch.autograd.grad(loss, new)
    assert torch.isfinite(gradient).all()


@pytest.mark.parametrize(("new", "old", "labels"), BATCHES)
def test_l2_is_the_mean_squared_distance(new, old, labels):
    a, b = arrays(new, old)
    expected = np.mean([sum((x - y) ** 2 for x, y in zip(a[i], b[i], strict=True)) for i in range(len(a))])
    check(lambda new: l2.loss(new, old), new, expected)


@pytest.mark.parametrize("known", [3, 2, 1])
@pytest.mark.parametrize(("new", "old", "labels"), BATCHES)
def test_bct_is_the_old_classifiers_cross_entropy_over_samples_of_old_classes(new, old, labels, known):
    weight = np.random.default_rng(9).normal(size=(known, new.shape[1]))
    f, y = arrays(new, labels)
    terms = [cross_entropy([float(w @ f[i]) for w in weight], y[i]) for i in range(len(y)) if y[i] < known]
    classifier = torch.from_numpy(weight)
    check(lambda new: bct.loss(new, labels, lambda x: x @ classifier.T), new, np.mean(terms) if terms else 0.0)


def test_bct_without_a_sample_of_an_old_class_is_0_and_teaches_nothing():
    new, _, labels = batch()
    new.requires_grad_()
    loss = bct.loss(new, labels + 2, torch.nn.Linear(new.shape[1], 2).double())
    loss.backward()
    assert loss.item() == 0
    assert new.grad.abs().max() == 0


def test_if_the_old_classifier_is_lost_class_means_stand_in_and_an_absent_class_is_never_chosen():
    new, old, _ = batch()
    labels = torch.tensor([0, 2] * 6)
    f, o, y = arrays(new, old, labels)
    means = {c: np.mean([o[i] for i in range(len(y)) if y[i] == c], axis=0) for c in (0, 2)}
    terms = [-math.log(math.exp(means[y[i]] @ f[i]) / sum(math.exp(m @ f[i]) for m in means.values())) for i in range(len(y))]
    check(lambda new: bct.loss(new, labels, bct.Prototypes(old, labels)), new, np.mean(terms))


def test_class_means_leave_other_classes_out():
    vectors = torch.tensor([[1.0, 0.0], [3.0, 2.0], [9.0, 9.0]])
    means, counts = class_means(vectors, torch.tensor([1, 1, 2]), classes=2)
    assert means.tolist() == [[0, 0], [2, 1]]
    assert counts.tolist() == [0, 2]


@pytest.mark.parametrize("hardest", [10, 2])
@pytest.mark.parametrize("tau", [1.0, 0.05])
@pytest.mark.parametrize(("new", "old", "labels"), BATCHES)
def test_ract_is_its_formula(new, old, labels, tau, hardest):
    f, o, y = arrays(new, old, labels)
    f, o = [unit(x) for x in f], [unit(x) for x in o]
    terms = []
    for i in range(len(y)):
        others = [k for k in range(len(y)) if y[k] != y[i]]
        kinds = [sorted((float(f[i] @ space[k]) for k in others), reverse=True)[:hardest] for space in (o, f)]
        own = math.exp(f[i] @ o[i] / tau)
        terms.append(-math.log(own / (own + sum(math.exp(s / tau) for kind in kinds for s in kind))))
    check(lambda new: ract.loss(new, old, labels, temperature=tau, hardest=hardest), new, np.mean(terms))


@pytest.mark.parametrize("mu", [10.0, 2.0])
@pytest.mark.parametrize(("new", "old", "labels"), BATCHES)
def test_hoc_is_equation_4_with_the_indicator_inside_the_exponential(new, old, labels, mu):
    f, o, y = arrays(new, old, labels)
    f, o = [unit(x) for x in f], [unit(x) for x in o]
    n = range(len(y))
    terms = [-mu * (o[i] @ f[i]) + math.log(sum(math.exp(mu * (o[i] @ f[j]) * (y[i] != y[j])) for j in n)) for i in n]
    check(lambda new: hoc.loss(new, old, labels, mu=mu), new, np.mean(terms))


def balls(old, labels, known):
    """Old centres and largest radii by class; None for a class with fewer than two records."""
    found = {}
    for c in range(known):
        members = [unit(old[i]) for i in range(len(labels)) if labels[i] == c]
        centre = sum(members) / len(members) if members else None
        found[c] = (centre, max(np.linalg.norm(x - centre) for x in members)) if len(members) > 1 else None
    return found


@pytest.mark.parametrize("threshold_below", [True, False], ids=["r_max < T", "r_max > T"])
@pytest.mark.parametrize("known", [3, 2])
@pytest.mark.parametrize(("new", "old", "labels"), BATCHES)
def test_the_boundary_is_its_formula(new, old, labels, known, threshold_below):
    if threshold_below:  # close to one another, so that no radius reaches T = 1
        old = old * 0.1 + 1
    f, o, y = arrays(new, old, labels)
    within = advbct.Boundary(old, labels, classes=known).double()
    w = within.weight.detach().numpy()
    excess = []
    for i in range(len(y)):
        ball = balls(o, y, known)[y[i]] if y[i] < known else None
        if ball:
            centre, largest = ball
            share = 1 / (1 + math.exp(-w[y[i]])) * abs(largest - 1)
            radius = largest + share if largest < 1 else largest - share
            excess.append(max(np.linalg.norm(unit(f[i]) - centre) - radius, 0))
    violators = [each for each in excess if each > 0]
    check(lambda new: within(new, labels), new, np.mean(violators) if violators else 0.0)


def test_a_radius_moves_from_the_largest_towards_the_threshold_only():
    _, old, labels = batch(n=60)
    near = advbct.Boundary(old * 0.1 + 1, labels, classes=3)
    far = advbct.Boundary(old, labels, classes=3)
    assert (near.largest < 1).all()
    assert (near.radii() > near.largest).all()
    assert (near.radii() < 1).all()
    far.largest += 1
    assert (far.radii() < far.largest).all()
    assert (far.radii() > 1).all()


def discriminate(x, parts):
    """Linear, BatchNorm over the batch, ReLU, Linear."""
    first, norm, _, last = parts
    weights = [each.detach().numpy() for each in (first.weight, first.bias, norm.weight, norm.bias, last.weight, last.bias)]
    hidden = x @ weights[0].T + weights[1]
    hidden = (hidden - hidden.mean(0)) / np.sqrt(hidden.var(0) + norm.eps) * weights[2] + weights[3]
    return np.maximum(hidden, 0) @ weights[4].T + weights[5]


@pytest.mark.parametrize(("new", "old", "labels"), BATCHES)
def test_adversarial_is_how_well_the_discriminator_tells_new_from_old(new, old, labels):
    torch.manual_seed(0)
    discriminator = advbct.Discriminator(new.shape[1]).double()
    assert [part.out_features for part in discriminator if isinstance(part, torch.nn.Linear)] == [100, 2]
    f, o = arrays(new, old)
    expected = np.mean([cross_entropy(row, 0) for row in discriminate(f, discriminator)])
    expected += np.mean([cross_entropy(row, 1) for row in discriminate(o, discriminator)])
    check(lambda new: advbct.adversarial(new, old, discriminator, alpha=0.5), new, expected)


def test_the_gradient_is_reversed_for_the_model_and_not_for_the_discriminator():
    new, old, _ = batch()
    new.requires_grad_()
    torch.manual_seed(0)
    discriminator = advbct.Discriminator(new.shape[1]).double()
    guesses = torch.cat([discriminator(new), discriminator(old)])
    told = 2 * torch.nn.functional.cross_entropy(guesses, torch.arange(2).repeat_interleave(len(new)))
    straight = torch.autograd.grad(told, [new, discriminator[0].weight])
    loss = advbct.adversarial(new, old, discriminator, alpha=0.25)
    found = torch.autograd.grad(loss, [new, discriminator[0].weight])
    torch.testing.assert_close(found[0], -0.25 * straight[0])
    torch.testing.assert_close(found[1], straight[1])
    assert straight[0].abs().max() > 0


def test_the_reversal_grows_from_0_to_1():
    assert advbct.strength(0) == 0
    assert advbct.strength(0.1) == pytest.approx(2 / (1 + math.exp(-1)) - 1)
    assert advbct.strength(1) == pytest.approx(1, abs=1e-4)


def test_advbct_is_the_boundary_and_what_is_left_of_the_adversary():
    new, old, labels = batch()
    new.requires_grad_()
    torch.manual_seed(0)
    loss = advbct.AdvBCT(old, labels, classes=3).double()
    alpha = advbct.strength(0.2)
    expected = loss.boundary(new, labels) + 0.25 * advbct.adversarial(new, old, loss.discriminator, alpha=alpha)
    found = loss(new, old, labels, advbct.Moment(done=0.2, left=0.25))
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found, new), torch.autograd.grad(expected, new))
    assert {name for name, _ in loss.named_parameters()} >= {"boundary.weight", "discriminator.0.weight"}


def on_hyperboloid(x, k, norm=1.2):
    """Points whose z has at most that norm."""
    return lorentz.exp0(norm * x / x.norm(dim=1, keepdim=True).clamp_min(norm), curvature=k)


@pytest.mark.parametrize("k", CURVATURES)
@pytest.mark.parametrize(("new", "old", "labels"), BATCHES)
def test_hbct_is_equations_11_and_12(new, old, labels, k):
    tau, beta, epsilon = 0.5, 0.01, 0.1
    if torch.equal(new, old):  # the apex itself has no angle
        old = old + torch.eye(5)[0]
    h_o = on_hyperboloid(old, k, norm=1.0)
    points_n, points_o = on_hyperboloid(new, k).tolist(), h_o.tolist()
    entail, contrast = [], []
    for n, o in zip(points_n, points_o, strict=True):
        aperture = math.asin(min(1.0, 2 * epsilon / (math.sqrt(k) * length(o))))
        entail.append(max(0.0, exterior(o, n, k) - aperture))
        q = 1 - length(o) / o[0]
        everything = sum(math.exp(-distance(n, other, k) / tau) for other in points_o)
        contrast.append(-math.exp(-q * distance(n, o, k) / tau) / q + (beta * everything) ** q / q)
    entailment, contrast = np.mean(entail), np.mean(contrast)
    check(lambda new: hbct.entailment(on_hyperboloid(new, k), h_o, epsilon=epsilon, curvature=k), new, entailment)
    check(lambda new: hbct.contrast(on_hyperboloid(new, k), h_o, temperature=tau, beta=beta, curvature=k), new, contrast)
    check(lambda new: hbct.loss(on_hyperboloid(new, k), h_o, temperature=tau, curvature=k), new, entailment + contrast)


def test_if_the_old_embedding_is_certain_the_contrast_is_infonce():
    new, old, _ = batch()
    h_n, h_o = (lorentz.exp0(12 * x / x.norm(dim=1, keepdim=True)) for x in (new, old))
    d = lorentz.distances(h_n, h_o) / 0.5
    expected = (d.diagonal() + math.log(0.01) + (-d).logsumexp(1)).mean()
    assert hbct.contrast(h_n, h_o, temperature=0.5).item() == pytest.approx(expected.item(), rel=1e-3)


def test_hbct_of_a_model_that_is_its_old_one_is_finite_with_nothing_outside_a_cone():
    for dtype in (torch.float32, torch.float64):
        z = batch()[0].to(dtype).requires_grad_()
        h = lorentz.Lift()(z)
        assert hbct.entailment(h, h.detach()).item() == 0
        hbct.loss(h, h.detach()).backward()
        assert torch.isfinite(z.grad).all()


def test_an_uncertain_old_embedding_has_the_wider_cone_and_pulls_less_on_what_is_far_away():
    new = torch.tensor([[-1.0, 0.6]], dtype=torch.float64).requires_grad_()
    certain, uncertain = (lorentz.exp0(torch.tensor([[norm, 0.0]], dtype=torch.float64)) for norm in (1.0, 0.3))
    assert lorentz.aperture(uncertain) > lorentz.aperture(certain)
    pulls = [torch.autograd.grad(hbct.contrast(lorentz.exp0(new), old, beta=1e-9), new)[0].norm() for old in (certain, uncertain)]
    assert pulls[1] < pulls[0]


@pytest.mark.parametrize("k", CURVATURES)
def test_a_logit_is_the_signed_distance_to_its_hyperplane_times_the_length_of_its_normal(k):
    torch.manual_seed(0)
    classifier = hbct.Classifier(3, 4, curvature=k).double()
    z = np.random.default_rng(0).normal(size=(6, 3))
    logits = classifier(lorentz.exp0(torch.from_numpy(z), curvature=k))
    for i, c in np.ndindex(6, 4):
        h, w, a = lifted(z[i], k), classifier.normal[c].tolist(), classifier.shift[c].item()
        size = math.sqrt(sum(x * x for x in w))
        # The normal of Eq. 9's hyperplane: w at the origin, moved by a along itself; its Lorentz length stays that of w.
        normal = [math.sinh(math.sqrt(k) * a) * size, *(math.cosh(math.sqrt(k) * a) * x for x in w)]
        assert inner(normal, normal) == pytest.approx(size**2)
        foot = [x - inner(normal, h) / size**2 * v for x, v in zip(h, normal, strict=True)]
        shrink = math.sqrt(-1 / k / inner(foot, foot))
        nearest = [shrink * x for x in foot]
        assert inner(nearest, normal) == pytest.approx(0, abs=1e-9)
        signed = math.copysign(distance(h, nearest, k), inner(normal, h))
        assert logits[i, c].item() == pytest.approx(size * signed, rel=1e-6, abs=1e-7)


def test_the_classifier_learns_hyperbolic_classes():
    torch.manual_seed(0)
    labels = torch.arange(3).repeat(20)
    h = lorentz.exp0(torch.eye(3)[labels] * 0.8 + 0.1 * torch.randn(60, 3))
    classifier = hbct.Classifier(3, 3)
    optimizer = torch.optim.SGD(classifier.parameters(), lr=0.5)
    for _ in range(100):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(classifier(h), labels).backward()
        optimizer.step()
    assert (classifier(h).argmax(1) == labels).all()


def boundary(new, old, labels):
    """L_b with the radii at their largest: what is inside is among the old embeddings."""
    balls = advbct.Boundary(old, labels, classes=3).double().requires_grad_(False)
    balls.weight.fill_(-30)
    return balls(new, labels)


LOSSES = {
    "l2": lambda new, old, labels: l2.loss(new, old),
    "bct": lambda new, old, labels: bct.loss(new, labels, bct.Prototypes(old, labels)),
    "ract": ract.loss,
    "hoc": hoc.loss,
    "boundary": boundary,
}


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_equal_finite_differences(name):
    new, old, labels = batch(n=8)
    torch.autograd.gradcheck(lambda new: LOSSES[name](new, old, labels), new.requires_grad_())


@pytest.mark.parametrize("name", ["entailment", "contrast", "loss"])
def test_hyperbolic_gradients_equal_finite_differences(name):
    new, old, _ = batch(n=6)
    torch.autograd.gradcheck(
        lambda z: getattr(hbct, name)(lorentz.exp0(z), lorentz.exp0(old * 0.5)), (new * 0.5).requires_grad_()
    )


@pytest.mark.parametrize("name", LOSSES)
def test_going_down_a_loss_brings_new_embeddings_to_the_old_ones_of_their_class(name):
    new, old, labels = batch(n=24, d=6)
    old = torch.eye(6, dtype=torch.float64)[labels] * 2 + 0.3 * old
    found = descend(new, lambda new: LOSSES[name](new, old, labels))
    assert right(new, old, labels) < 0.7
    assert right(found, old, labels) == 1


@pytest.mark.parametrize("name", ["entailment", "contrast"])
def test_going_down_a_hyperbolic_loss_brings_new_embeddings_to_their_old_ones(name):
    new, old, labels = batch(n=24, d=6)
    old = torch.eye(6, dtype=torch.float64)[labels] + 0.1 * old
    h_o = lorentz.exp0(old)
    found = descend(new, lambda new: getattr(hbct, name)(lorentz.exp0(new), h_o))
    assert right(new, old, labels) < 0.7
    assert right(found, old, labels) == 1
    if name == "contrast":  # the cone alone lets them lie further out
        assert lorentz.distance(lorentz.exp0(found), h_o).max() < 0.1


def descend(new, loss, steps=300):
    found = new.detach().clone().requires_grad_()
    optimizer = torch.optim.Adam([found], lr=0.05)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(found).backward()
        optimizer.step()
    return found.detach()


def right(new, old, labels):
    """Return the share of new embeddings whose nearest old one of another record is of their class."""
    cosine = torch.nn.functional.normalize(new) @ torch.nn.functional.normalize(old).T
    return (labels[cosine.fill_diagonal_(-2).argmax(1)] == labels).double().mean().item()
