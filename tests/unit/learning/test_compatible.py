"""A new model trained towards an old one can be searched for among its vectors, the same each time."""

from __future__ import annotations

import copy
import math
import multiprocessing
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from rmvdb.errors import Mismatch, ModelError, RmvdbError, UnknownName, UsageError
from rmvdb.learning import compatible, geometry
from rmvdb.learning.compatible import Loss, Model, Settings
from rmvdb.learning.losses import hbct, lorentz
from rmvdb.planning import quality
from rmvdb.types import Metric

INPUTS, DIM, CLASSES, KNOWN = 12, 8, 6, 3
QUICK = Settings(epochs=12, batch=64, lr=0.05)
TOWARDS = [loss for loss in Loss if loss is not Loss.PLAIN]
HYPERBOLIC = (Loss.HBCT, Loss.HBCT_NO_ENTAIL)


def items(n=400, seed=0, classes=CLASSES):
    """Vectors around a centre for each class, with labels."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes, n)
    centres = np.random.default_rng(99).normal(size=(CLASSES, INPUTS))
    x = 1.5 * centres[labels] + rng.normal(size=(n, INPUTS))
    return TensorDataset(torch.from_numpy(x).float(), torch.from_numpy(labels))


def model(seed, *, width=24, classes=CLASSES, zeta=None, dim=DIM):
    """Return a small network; hyperbolic if it has a ζ."""
    torch.manual_seed(seed)
    layers = [nn.Linear(INPUTS, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, dim)]
    if zeta:
        return Model(module=nn.Sequential(*layers, lorentz.Lift(zeta=zeta)), classifier=hbct.Classifier(dim, classes))
    return Model(module=nn.Sequential(*layers), classifier=nn.Linear(dim, classes, bias=False))


@pytest.fixture(scope="module")
def olds():
    """Old models that know the first classes only: in Euclidean space and in hyperbolic space."""
    few = items(classes=KNOWN)
    return {zeta: compatible.train(model(1, width=12, classes=KNOWN, zeta=zeta), few, settings=QUICK) for zeta in (None, 1.0)}


def trained(loss, olds, settings=QUICK, **changes):
    old = olds[1.0 if loss in HYPERBOLIC else None]
    new = model(2, zeta=1.2 if loss in HYPERBOLIC else None)
    return compatible.train(new, items(), loss=loss, old=replace(old, **changes), settings=settings), old


def cross(new, old):
    """Return the mAP of new queries among the old model's vectors of records that neither model was trained on."""
    held_out = items(seed=5)
    (q, labels), (g, _) = (compatible.embed(each.module, held_out) for each in (new, old))
    if q.shape[1] > DIM:
        q = lorentz.as_query(q)
    distance = geometry.distances(q.numpy(), g.numpy(), metric=Metric.IP if q.shape[1] > DIM else Metric.COSINE)
    return quality.mean(quality.average_precision(distance, (labels[:, None] == labels[None, :]).numpy()))


def weights(model):
    return torch.cat([each.detach().flatten() for part in (model.module, model.classifier) for each in part.parameters()])


@pytest.mark.parametrize("loss", TOWARDS)
def test_every_loss_makes_the_new_model_searchable_among_the_old_ones_vectors(loss, olds):
    new, old = trained(loss, olds)
    zetas = (1.2, 1.0) if loss in HYPERBOLIC else (None, None)
    plain = compatible.train(model(2, zeta=zetas[0]), items(), settings=QUICK)
    # Without its cone hbct reaches less: that is what its ablation shows.
    assert cross(new, old) > cross(plain, old) + (0.1 if loss is Loss.HBCT_NO_ENTAIL else 0.2)
    vectors, labels = compatible.embed(new.module, items(seed=5))
    assert (new.classifier(vectors).argmax(1) == labels).float().mean() > 0.8


@pytest.mark.parametrize("loss", [Loss.BCT, Loss.ADVBCT])
def test_if_the_old_classifier_is_lost_class_means_stand_in(loss, olds):
    new, old = trained(loss, olds, classifier=None)
    assert cross(new, old) > cross(trained(Loss.PLAIN, olds)[0], old) + 0.2
    assert not torch.equal(weights(new), weights(trained(loss, olds)[0]))


@pytest.mark.parametrize("loss", list(Loss))
def test_the_same_seed_gives_the_same_weights_and_leaves_the_callers_random_numbers_alone(loss, olds):
    short = replace(QUICK, epochs=2)
    expected = weights(trained(loss, olds, short)[0])
    torch.manual_seed(5)
    number = torch.rand(1)
    new = model(2, zeta=1.2 if loss in HYPERBOLIC else None)
    torch.manual_seed(5)
    compatible.train(new, items(), loss=loss, old=olds[1.0 if loss in HYPERBOLIC else None], settings=short)
    assert torch.rand(1) == number
    assert torch.equal(weights(new), expected)
    assert not torch.equal(weights(trained(loss, olds, replace(short, seed=1))[0]), expected)


@pytest.mark.parametrize("loss", TOWARDS)
def test_the_old_model_stays_what_it_was_even_if_it_comes_in_training_mode(loss, olds):
    old = copy.deepcopy(olds[1.0 if loss in HYPERBOLIC else None])
    for part in (old.module, old.classifier):
        part.train().requires_grad_(True)
    before = copy.deepcopy([part.state_dict() for part in (old.module, old.classifier)])
    new = model(2, zeta=1.2 if loss in HYPERBOLIC else None)
    compatible.train(new, items(), loss=loss, old=old, settings=replace(QUICK, epochs=2))
    for part, state in zip((old.module, old.classifier), before, strict=True):
        assert not any(each.requires_grad for each in part.parameters())
        for name, value in part.state_dict().items():
            assert torch.equal(value, state[name]), name


def test_without_entailment_hbct_is_its_contrast_alone(olds):
    one, full = (compatible.LOSSES[loss].make(olds[1.0], items(), QUICK) for loss in (Loss.HBCT_NO_ENTAIL, Loss.HBCT))
    new, old = (compatible.embed(model(seed, zeta=1.2).module, items(60))[0] for seed in (2, 3))
    contrast, entailment = hbct.contrast(new, old), hbct.entailment(new, old)
    assert entailment > 0
    assert one(new, old, None, None) == contrast
    assert full(new, old, None, None) == contrast + entailment
    assert Loss.HBCT_NO_ENTAIL.weights == Loss.HBCT.weights == (1.0, 0.3)


def test_the_learning_rate_falls_to_nothing_along_a_cosine():
    new, seen = model(2), []
    settings = Settings(epochs=20, lr=0.05, momentum=0, weight_decay=0)
    compatible.train(new, items(), settings=settings, progress=lambda *_: seen.append(weights(new)))
    moved = [(after - before).norm().item() for before, after in pairwise(seen)]
    assert moved[-1] < 0.01 * moved[0]
    assert moved[len(moved) // 2] > 0.1 * moved[0]


def test_a_loss_gets_the_progress_of_its_training():
    found = [compatible._moment(step, 3, 2) for step in range(6)]
    assert [at.done for at in found] == [step / 6 for step in range(6)]
    assert [at.left for at in found] == [1, 1, 1, 0.5, 0.5, 0.5]


def test_the_model_is_the_one_that_was_given_ready_to_embed(olds):
    new = model(2)
    before = weights(new)
    found = compatible.train(new, items(), loss="l2", old=olds[None], settings=replace(QUICK, epochs=1))
    assert found is new
    assert not new.module.training
    assert not torch.equal(weights(new), before)


def test_parameters_of_a_loss_are_trained_too(olds):
    criterion = compatible._Criterion(model(2), items(), Loss.ADVBCT, olds[None], QUICK)
    names = {name.split(".", 1)[1] for name, _ in criterion.learnt.named_parameters()}
    assert {"boundary.weight", "discriminator.0.weight"} <= names
    assert not {id(each) for each in criterion.learnt.parameters()} & {id(each) for each in olds[None].module.parameters()}


def test_each_step_is_reported_with_its_loss(olds):
    told = []
    settings = Settings(epochs=3, batch=150, lr=0.05)
    compatible.train(model(2), items(400), settings=settings, progress=lambda *each: told.append(each))
    assert [(step, steps) for step, steps, _ in told] == [(step, 9) for step in range(1, 10)]
    assert all(math.isfinite(loss) for *_, loss in told)
    assert told[-1][2] < told[0][2]


def test_every_item_is_seen_once_an_epoch_in_batches_of_nearly_one_size():
    batches = list(compatible._batches(129, 2, Settings(epochs=3, batch=128)))
    assert [len(rows) for rows in batches] == [65, 64] * 3
    for epoch in range(3):
        assert sorted(batches[2 * epoch] + batches[2 * epoch + 1]) == list(range(129))
    assert batches[0] != batches[2]


def test_weights_are_of_the_classification_and_of_the_pull(olds):
    plain = weights(trained(Loss.PLAIN, olds)[0])
    assert torch.allclose(weights(trained(Loss.L2, olds, replace(QUICK, weights=(1.0, 0.0)))[0]), plain, atol=1e-5)
    pulled, old = trained(Loss.L2, olds, replace(QUICK, weights=(0.0, 1.0)))
    vectors, _ = compatible.embed(pulled.module, items(seed=5))
    towards, _ = compatible.embed(old.module, items(seed=5))
    assert (vectors - towards).norm(dim=1).mean() < 0.5 * towards.norm(dim=1).mean()


@pytest.mark.parametrize(
    ("loss", "papers"),
    [(Loss.BCT, (1, 1)), (Loss.RACT, (1, 1)), (Loss.HOC, (0.1, 0.9)), (Loss.ADVBCT, (1, 1)), (Loss.HBCT, (1, 0.3))],
)
def test_without_weights_each_loss_has_its_papers(loss, papers, olds):
    short = replace(QUICK, epochs=1)
    assert torch.equal(weights(trained(loss, olds, short)[0]), weights(trained(loss, olds, replace(short, weights=papers))[0]))


@pytest.mark.parametrize("loss", [Loss.RACT, Loss.HOC, Loss.HBCT])
def test_a_temperature_changes_the_losses_that_have_one(loss, olds):
    usual, other = (weights(trained(loss, olds, replace(QUICK, epochs=1, temperature=tau))[0]) for tau in (None, 0.9))
    assert not torch.allclose(usual, other)


def test_hocs_temperature_is_one_over_mu(olds):
    usual, same = (weights(trained(Loss.HOC, olds, replace(QUICK, epochs=1, temperature=tau))[0]) for tau in (None, 0.1))
    assert torch.allclose(usual, same, atol=1e-6)


@pytest.fixture
def no_forks():
    """Processes are spawned; in one in which other tests have used gRPC, a fork may wait for ever."""
    usual = multiprocessing.get_start_method()
    multiprocessing.set_start_method("spawn", force=True)
    yield
    multiprocessing.set_start_method(usual, force=True)


@pytest.mark.usefixtures("no_forks")
def test_items_may_be_loaded_by_processes_of_their_own(olds):
    short = replace(QUICK, epochs=1)
    here, there = (weights(trained(Loss.BCT, olds, replace(short, loaders=loaders))[0]) for loaders in (0, 1))
    assert torch.equal(here, there)


def test_a_dataset_may_make_batches_of_its_own_and_the_weights_stay_the_same(olds):
    class Whole(TensorDataset):
        def __getitems__(self, rows):
            return tuple(each[rows] for each in self.tensors)

        @staticmethod
        def collate_fn(batch):
            return batch

    new = compatible.train(model(2), Whole(*items().tensors), loss=Loss.HOC, old=olds[None], settings=QUICK)
    assert torch.equal(weights(new), weights(trained(Loss.HOC, olds)[0]))
    assert torch.equal(compatible.embed(new.module, Whole(*items().tensors))[1], items().tensors[1])


def test_each_refusal_names_what_is_wrong_and_the_way_out(olds):
    old = olds[None]

    def asked(new=None, data=None, **options) -> None:
        compatible.train(new or model(2), items() if data is None else data, settings=QUICK, **options)

    refusals: list[tuple[type[RmvdbError], str, dict]] = [
        (UnknownName, r"No loss is called 'btc'; did you mean 'bct'\?", {"loss": "btc", "old": old}),
        (UsageError, "The loss 'bct' pulls towards an old model; give one as old", {"loss": "bct"}),
        (UsageError, "The new model has no classifier; give it one", {"new": Model(module=nn.Linear(INPUTS, DIM))}),
        (UsageError, "There are 0 items to train on", {"data": TensorDataset(torch.empty(0, INPUTS), torch.empty(0).long())}),
        (
            Mismatch,
            "The new model's embeddings have 9 numbers, the old one's 8",
            {"new": model(2, dim=9), "loss": "l2", "old": old},
        ),
        (Mismatch, r"The labels of a batch go from 0 to 5, but the classifier has 4 classes", {"new": model(2, classes=4)}),
        (
            Mismatch,
            "The new model's embeddings are not points of the hyperboloid with K = 1.0; end it with",
            {"loss": "hbct", "old": old},
        ),
        (ModelError, r"The loss became \w+ in step \d+ of 84; give a smaller lr than 0.05", {"data": broken()}),
    ]
    for error, sentence, options in refusals:
        with pytest.raises(error, match=f"^{sentence}"):
            asked(**options)


def broken() -> Dataset:
    data = items()
    data.tensors[0][7] = math.nan
    return data


def test_an_old_model_of_another_curvature_is_refused(olds):
    new = model(2, zeta=1.2)
    with pytest.raises(Mismatch, match=r"The new model's embeddings are not points of the hyperboloid with K = 2\.0"):
        compatible.train(new, items(), loss="hbct", old=olds[1.0], settings=replace(QUICK, curvature=2.0))


@pytest.mark.parametrize(("name", "value"), [("epochs", 0), ("batch", -1), ("lr", 0.0), ("curvature", math.nan)])
def test_settings_below_what_makes_sense_are_refused(name, value):
    with pytest.raises(UsageError, match=f"{name} must be above 0, not {value}"):
        Settings(**{name: value})
