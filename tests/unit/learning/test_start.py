"""A ψ that starts at a closed form is never worse than its start on pairs that were held out, and ends in time."""

import json
import math
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from rmvdb import metrics
from rmvdb.errors import Mismatch
from rmvdb.learning import losses, stopping
from rmvdb.learning.closed_forms import variants
from rmvdb.learning.method import METHODS, Method, Pairs, TrainingSettings
from rmvdb.learning.network import Network
from rmvdb.learning.training import fit
from rmvdb.learning.transforms import Config, Norm, Transform
from rmvdb.types import Metric

COSINE = {"old_metric": Metric.COSINE, "new_metric": Metric.COSINE}
QUICK = TrainingSettings(epochs=2, least_steps=40, batch=128)
TRAINED = [method for method in Method if METHODS[method].loss]


def sample(n=300, seed=0, *, labels=True, noise=2.0):
    """Return a bent new space, and an old one that sees less of the same classes."""
    rng = np.random.default_rng(seed)
    wide, end, view = (np.random.default_rng(s).normal(size=shape) for s, shape in ((9, (12, 32)), (8, (32, 10)), (7, (12, 8))))
    y = rng.integers(0, 6, n)
    latent = 1.5 * np.random.default_rng(6).normal(size=(6, 12))[y] + rng.normal(size=(n, 12))
    old = latent @ view + noise * rng.normal(size=(n, 8))
    new = np.tanh(latent @ wide / 2) @ end
    return Pairs(old=old.astype(np.float32), new=new.astype(np.float32), labels=y if labels else None)


def unit(vectors):
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def start_of(pairs, method=Method.CENTRED, metrics=COSINE):
    return variants(method, pairs, **metrics)[0][1]


def overlap(reverse, old, new, metric=Metric.COSINE, count=10):
    """Return the share of each record's ten nearest others by the new model that are among those that ψ finds."""
    shares = []
    for vectors, gallery in ((reverse, old), (new, new)):
        distance = metrics.distances(vectors, gallery, metric=metric).astype(np.float64)
        np.fill_diagonal(distance, np.inf)
        shares.append(np.argsort(distance, axis=1)[:, :count])
    return np.mean([len(set(a) & set(b)) / count for a, b in zip(*shares, strict=True)])


def class_precision(queries, gallery, y, *, own):
    distance = metrics.distances(queries, gallery, metric=Metric.COSINE).astype(np.float64)
    relevant = y[:, None] == y[None, :]
    if not own:
        np.fill_diagonal(distance, np.inf)
        np.fill_diagonal(relevant, False)
    return metrics.mean(metrics.average_precision(distance, relevant))


@pytest.mark.parametrize("start", [Method.PROCRUSTES, Method.RIDGE, Method.CENTRED])
@pytest.mark.parametrize("method", TRAINED)
def test_on_held_out_pairs_it_is_never_worse_than_its_start(method, start):
    for labels in (False, True):
        pairs = sample(labels=labels)
        kept, held = stopping.split(pairs, 0)
        first = start_of(kept, start)
        fitted = fit(pairs, method=method, settings=QUICK, start=first if labels else start, **COSINE)
        if not labels and not fitted.reverse.config.skip:  # nothing was better: then it is of all pairs
            assert fitted.reverse.to_bytes() == start_of(pairs, start).to_bytes()
            continue
        final = fitted.final(held.new)
        reverse = fitted.reverse.apply(final)
        if labels and method.contrasts:
            before = class_precision(first.apply(held.new), held.old, held.labels, own=True)
            after = class_precision(reverse, held.old, held.labels, own=True)
            if method.has_head:
                before += class_precision(held.new, held.new, held.labels, own=False)
                after += class_precision(final, final, held.labels, own=False)
        else:
            before, after = overlap(first.apply(held.new), held.old, held.new), overlap(reverse, held.old, held.new)
            if method.has_head:
                before, after = before + 1, after + overlap(final, final, held.new)
        assert after >= before - 1e-6


@pytest.mark.parametrize("metric", [Metric.COSINE, Metric.IP, Metric.L2])
def test_if_a_linear_map_is_not_enough_training_goes_on_from_it(metric):
    kinds = {"old_metric": metric, "new_metric": metric}
    pairs, others = sample(1500, labels=False, noise=0.1), sample(400, 1, labels=False, noise=0.1)
    if metric is Metric.IP:  # else its longest records are near everything
        pairs, others = (Pairs(old=5 * unit(each.old), new=5 * unit(each.new)) for each in (pairs, others))
    first = start_of(pairs, Method.RIDGE, kinds)
    fitted = fit(pairs, method=Method.RQT, settings=replace(QUICK, least_steps=400), start=first, **kinds)
    assert fitted.reverse.config.skip
    found = [overlap(each.apply(others.new), others.old, others.new, metric) for each in (first, fitted.reverse)]
    assert found[1] > found[0] + 0.01


def test_if_nothing_is_better_the_result_is_the_start_itself():
    new = np.random.default_rng(0).normal(size=(200, 8)).astype(np.float32)
    turn = np.linalg.qr(np.random.default_rng(1).normal(size=(8, 8)))[0]
    pairs = Pairs(old=(new @ turn).astype(np.float32), new=new)
    first = start_of(pairs, Method.PROCRUSTES)
    assert fit(pairs, method=Method.MCL, settings=QUICK, start=first, **COSINE).reverse is first
    again = fit(pairs, method=Method.MCL, settings=QUICK, start=Method.PROCRUSTES, **COSINE).reverse
    assert again.to_bytes() == first.to_bytes()  # of all pairs, those held out too


@pytest.mark.parametrize("labels", [False, True])
def test_if_nothing_is_better_there_is_no_head_that_would_pass_for_a_trained_one(labels):
    new = np.random.default_rng(0).normal(size=(200, 8)).astype(np.float32)
    y = np.arange(200) if labels else None  # each record of its own class: nothing can be learned from them
    found = fit(Pairs(old=new, new=new, labels=y), method=Method.RM, settings=QUICK, start=Method.PROCRUSTES, **COSINE)
    assert found.head is None
    assert not found.reverse.config.skip


def test_a_start_by_its_method_has_not_seen_the_pairs_that_are_held_out():
    pairs = sample(300, labels=False, noise=0.1)
    kept, _ = stopping.split(pairs, 0)
    found, expected = (
        fit(pairs, method=Method.RQT, settings=replace(QUICK, least_steps=200), start=start, **COSINE).reverse
        for start in (Method.RIDGE, start_of(kept, Method.RIDGE))
    )
    assert found.config.skip
    assert found.to_bytes() == expected.to_bytes()


def test_labels_are_not_punished_for_leading_away_from_the_new_models_neighbours():
    pairs, others = sample(600), sample(400, 1)
    first = start_of(pairs)
    fitted = fit(pairs, method=Method.RM, settings=replace(QUICK, least_steps=200), start=first, **COSINE)
    found = fitted.reverse.apply(fitted.final(others.new))
    before = class_precision(first.apply(others.new), others.old, others.labels, own=False)
    assert class_precision(found, others.old, others.labels, own=False) > before + 0.1
    final = fitted.final(others.new)
    new = class_precision(others.new, others.new, others.labels, own=False)
    assert class_precision(final, final, others.labels, own=False) > new


def test_the_same_pairs_give_the_same_files_from_a_start():
    pairs = sample()
    runs = [fit(pairs, method=Method.RM, settings=QUICK, start=start_of(pairs), **COSINE) for _ in range(2)]
    assert runs[0].reverse.to_bytes() == runs[1].reverse.to_bytes()
    assert runs[0].head.to_bytes() == runs[1].head.to_bytes()


def test_logged_queries_are_trained_on_beside_the_records_from_a_start():
    pairs, some = sample(labels=False), sample(100, 3, labels=False)
    settings = replace(QUICK, pull=1.0)
    found = [
        fit(pairs, method=Method.RQT, settings=settings, start=start_of(pairs), logged=log, **COSINE) for log in (None, some)
    ]
    assert found[0].reverse.to_bytes() != found[1].reverse.to_bytes()


# --- time -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [Method.RQT, Method.RM, Method.FCT])
@pytest.mark.parametrize("starts", [False, True])
def test_training_ends_when_its_time_is_over(method, starts):
    pairs, seen = sample(), []
    start = start_of(pairs) if starts else None
    began = time.monotonic()
    fitted = fit(
        pairs,
        method=method,
        settings=replace(QUICK, least_steps=10**7, hidden=16),
        start=start,
        seconds=0.3,
        progress=lambda done, total: seen.append((done, total)),
        **COSINE,
    )
    assert time.monotonic() - began < 10
    assert seen[-1][0] == seen[-1][1] > 2 * len(seen)
    assert np.isfinite(fitted.lift.apply(pairs.old) if method.lifts else fitted.reverse.apply(pairs.new)).all()


def test_no_time_at_all_leaves_the_start_or_something_better():
    pairs = sample(labels=False)
    held, first = stopping.split(pairs, 0)[1], start_of(pairs)
    found = fit(pairs, method=Method.MCL, settings=QUICK, start=first, seconds=0.0, **COSINE).reverse
    assert overlap(found.apply(held.new), held.old, held.new) >= overlap(first.apply(held.new), held.old, held.new)


def test_training_that_gets_no_better_ends_early():
    new = np.random.default_rng(0).normal(size=(200, 8)).astype(np.float32)
    pairs, seen = Pairs(old=new, new=new), []
    settings = replace(QUICK, least_steps=4000)
    fit(
        pairs,
        method=Method.RQT,
        settings=settings,
        start=start_of(pairs, Method.PROCRUSTES),
        progress=lambda done, total: seen.append((done, total)),
        **COSINE,
    )
    assert len(seen) == 1001  # ten checks of a hundred steps, and the word that it is over
    assert seen[-1] == (4000, 4000)


# --- what a start is, and what is none --------------------------------------------------------------------------------


def test_a_start_must_be_linear_and_of_these_dimensions():
    pairs = sample()
    trained = fit(pairs, method=Method.RQT, settings=QUICK, **COSINE).reverse
    for wrong in (start_of(pairs, Method.NEIGHBOURS), trained):
        with pytest.raises(Mismatch, match="give it one of procrustes, ridge or centred"):
            fit(pairs, method=Method.RM, settings=QUICK, start=wrong, **COSINE)
    with pytest.raises(Mismatch, match="ψ maps 10 to 8 dimensions, but its start 8 to 10"):
        fit(pairs, method=Method.RM, settings=QUICK, start=start_of(Pairs(old=pairs.new, new=pairs.old)), **COSINE)


@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_beside_a_linear_map_batch_norm_folds_away_and_the_file_gives_it_back(blocks):
    torch.manual_seed(0)
    network = Network(Config(d_in=5, d_out=3, hidden=7, blocks=blocks, skip=True, output=Norm.FREE, input_scale=2.0))
    for tensor in network.state_dict().values():
        if tensor.is_floating_point():
            tensor.copy_(torch.rand_like(tensor) + 0.1)
    x = np.random.default_rng(0).normal(size=(6, 5)).astype(np.float32)
    with torch.inference_mode():
        expected = network.eval()(torch.from_numpy(x)).numpy()
    transform = Transform(network)
    np.testing.assert_allclose(transform.apply(x), expected, atol=1e-5)
    again = Transform.from_bytes(transform.to_bytes())
    assert again.config == transform.config
    assert again.apply(x).tobytes() == transform.apply(x).tobytes()


def test_files_of_transforms_without_a_start_are_what_they_were():
    data = Transform(Network(Config(d_in=5, d_out=3))).to_bytes()
    config = json.loads(json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]["config"])
    assert sorted(config) == [
        "blocks", "branches", "d_in", "d_out", "format", "hidden", "input_scale", "output", "output_scale", "residual", "side",
    ]  # fmt: skip
    assert not Transform.from_bytes(data).config.skip


@pytest.mark.parametrize("paper", [True, False])
def test_without_a_start_training_is_what_it_was_byte_for_byte(paper):
    pairs = sample()
    settings = replace(
        TrainingSettings.paper() if paper else TrainingSettings(batch=128, residual=False), epochs=3, least_steps=0
    )
    found = fit(pairs, method=Method.RM, settings=settings, **COSINE)
    f_o, f_n, y = (torch.from_numpy(each) for each in (pairs.old, pairs.new, pairs.labels))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        reverse = Network(Config(d_in=10, d_out=8, hidden=20))
        head = Network(Config(d_in=10, d_out=10, hidden=20))
        modules = torch.nn.ModuleList([reverse, head]).train()
        optimizer = torch.optim.Adam(modules.parameters(), lr=settings.lr)
        steps = 3 * math.ceil(300 / 128)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
        rng = np.random.default_rng(0)
        for _ in range(3):
            for rows in np.array_split(rng.permutation(300), 3):
                final = head(f_n[rows])
                to_old = losses.distances(reverse(final), f_o[rows], metric=Metric.COSINE)
                to_new = losses.distances(final, final, metric=Metric.COSINE)
                same = y[rows][:, None] == y[rows][None, :]
                value = losses.mcl(to_old, to_new, same, temperature=1.0 if paper else 0.1, mining=True)
                optimizer.zero_grad()
                value.backward()
                optimizer.step()
                schedule.step()
    assert found.reverse.to_bytes() == Transform(reverse).to_bytes()
    assert found.head.to_bytes() == Transform(head).to_bytes()
