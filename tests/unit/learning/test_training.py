"""ψ and ρ learn what they are asked to, the same each time."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from rmvdb import metrics
from rmvdb.errors import Mismatch, PlanRefused
from rmvdb.learning.training import Fitted, Method, Pairs, TrainingSettings, fit
from rmvdb.types import Metric

QUICK = TrainingSettings(epochs=1, least_steps=120, batch=128, lr=3e-3)


def pairs(n=400, classes=8, seed=0, *, labels=True, length=1.0):
    """Return a new space that separates the classes, and an old one that is a poorer view of it."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, classes, n)
    centres, view = np.random.default_rng(99).normal(size=(classes, 12)), np.random.default_rng(98).normal(size=(12, 8))
    new = centres[y] + 0.5 * rng.normal(size=(n, 12))
    old = new @ view + 4 * rng.normal(size=(n, 8))
    scale = length / np.linalg.norm(new, axis=1).mean()
    return Pairs(old=(old * scale).astype(np.float32), new=(new * scale).astype(np.float32), labels=y if labels else None)


def quality(queries, gallery, y, metric):
    distance = metrics.distances(queries, gallery, metric=metric).astype(np.float64)
    np.fill_diagonal(distance, np.inf)
    return metrics.mean(metrics.average_precision(distance, y[:, None] == y[None, :]))


@pytest.mark.parametrize("metric", [Metric.COSINE, Metric.IP, Metric.L2])
@pytest.mark.parametrize(
    "method", [method for method in Method if method not in (Method.NAIVE, Method.IDENTITY, Method.FCT, Method.BLEND)]
)
def test_every_method_beats_the_old_model_on_records_it_never_saw(method, metric):
    length = 1.0 if metric is Metric.COSINE else 20.0
    held_out = pairs(seed=1, length=length)
    fitted = fit(pairs(length=length), method=method, old_metric=metric, new_metric=metric, settings=QUICK)
    reverse = fitted.reverse.apply(fitted.final(held_out.new))
    # Regression shrinks towards the mean, which a squared distance pays for.
    least = 0.85 if (method, metric) == (Method.RQT, Metric.L2) else 1
    old = quality(held_out.old, held_out.old, held_out.labels, metric)
    assert quality(reverse, held_out.old, held_out.labels, metric) > least * old
    assert (fitted.head is not None) == method.has_head


@pytest.mark.parametrize("metric", list(Metric))
def test_identity_leaves_vectors_as_they_are_and_needs_one_space(metric):
    some = np.random.default_rng(0).normal(size=(20, 6)).astype(np.float32)
    same = Pairs(old=some, new=some + 1)
    fitted = fit(same, method=Method.IDENTITY, old_metric=metric, new_metric=metric, settings=QUICK)
    assert fitted.head is None
    np.testing.assert_array_equal(fitted.reverse.apply(same.new), same.new)
    with pytest.raises(PlanRefused, match="cannot be compared with 5 of"):
        fit(Pairs(old=some[:, :5], new=some), method=Method.IDENTITY, old_metric=metric, new_metric=metric, settings=QUICK)
    other = Metric.L2 if metric is Metric.COSINE else Metric.COSINE
    with pytest.raises(PlanRefused, match="choose another method"):
        fit(same, method=Method.IDENTITY, old_metric=metric, new_metric=other, settings=QUICK)


def test_a_mixed_upgrade_from_l2_to_cosine_trains_too():
    held_out = pairs(seed=1, length=20.0)
    fitted = fit(pairs(length=20.0), method=Method.RM, old_metric=Metric.L2, new_metric=Metric.COSINE, settings=QUICK)
    reverse = fitted.reverse.apply(fitted.final(held_out.new))
    old = quality(held_out.old, held_out.old, held_out.labels, Metric.L2)
    assert quality(reverse, held_out.old, held_out.labels, Metric.L2) > old


def test_without_labels_clusters_of_the_new_space_stand_in():
    held_out = pairs(seed=1)
    fitted = fit(pairs(labels=False), method=Method.MCL, old_metric=Metric.COSINE, new_metric=Metric.COSINE, settings=QUICK)
    reverse = fitted.reverse.apply(held_out.new)
    old = quality(held_out.old, held_out.old, held_out.labels, Metric.COSINE)
    assert quality(reverse, held_out.old, held_out.labels, Metric.COSINE) > old


@pytest.mark.parametrize("labels", [True, False])
def test_the_same_pairs_and_settings_give_the_same_files_and_leave_the_callers_random_numbers_alone(labels):
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    runs = [
        fit(pairs(labels=labels), method=Method.RM, old_metric=Metric.COSINE, new_metric=Metric.COSINE, settings=QUICK)
        for _ in range(2)
    ]
    assert torch.rand(1) == expected
    assert runs[0].head.to_bytes() == runs[1].head.to_bytes()
    assert runs[0].reverse.to_bytes() == runs[1].reverse.to_bytes()


def test_another_seed_gives_another_transform():
    one, two = (
        fit(pairs(), method=Method.RQT, old_metric=Metric.COSINE, new_metric=Metric.COSINE, settings=replace(QUICK, seed=seed))
        for seed in (0, 1)
    )
    assert one.reverse.to_bytes() != two.reverse.to_bytes()


def test_naive_trains_nothing():
    assert fit(pairs(), method=Method.NAIVE, old_metric=Metric.IP, new_metric=Metric.L2, settings=QUICK) == Fitted()


def test_progress_counts_every_step_up_to_the_total():
    seen = []
    settings = replace(QUICK, least_steps=7)
    fit(
        pairs(),
        method=Method.RQT,
        old_metric=Metric.COSINE,
        new_metric=Metric.COSINE,
        settings=settings,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen == [(step, 8) for step in range(1, 9)]  # 400 pairs are 4 batches of 100: two epochs


def test_an_inner_product_galleries_reverse_queries_have_the_length_of_its_records():
    sample = pairs(length=30.0)
    fitted = fit(sample, method=Method.RM, old_metric=Metric.IP, new_metric=Metric.IP, settings=replace(QUICK, least_steps=5))
    lengths = np.linalg.norm(fitted.reverse.apply(fitted.final(sample.new)), axis=1)
    np.testing.assert_allclose(lengths, np.linalg.norm(sample.old, axis=1).mean(), rtol=1e-4)
    kept = np.linalg.norm(fitted.final(sample.new), axis=1)
    np.testing.assert_allclose(kept, np.linalg.norm(sample.new, axis=1), rtol=1e-4)


def test_the_papers_settings_are_those_it_prints():
    paper = TrainingSettings.paper()
    assert (paper.epochs, paper.lr, paper.temperature, paper.residual, paper.mining, paper.blocks) == (
        50,
        1e-4,
        1.0,
        False,
        True,
        2,
    )
    assert paper.least_steps == 0
    assert TrainingSettings.paper(blocks=5).blocks == 5


def test_pairs_that_do_not_go_row_by_row_are_refused():
    with pytest.raises(Mismatch, match="row by row"):
        Pairs(old=np.zeros((3, 2), np.float32), new=np.zeros((4, 2), np.float32))


def test_too_few_and_broken_pairs_are_refused_with_the_way_out():
    broken = pairs()
    broken.new[3, 2] = np.nan
    for bad, message in ((pairs(n=4), "larger sample"), (broken, "new model's embedder")):
        with pytest.raises(PlanRefused, match=message):
            fit(bad, method=Method.RM, old_metric=Metric.COSINE, new_metric=Metric.COSINE, settings=QUICK)


def test_labels_may_be_words_and_one_of_a_kind():
    sample = pairs(n=64)
    for labels in (np.array([f"class {y}" for y in sample.labels]), np.arange(64)):
        words = Pairs(old=sample.old, new=sample.new, labels=labels)
        fitted = fit(
            words, method=Method.RM, old_metric=Metric.COSINE, new_metric=Metric.COSINE, settings=replace(QUICK, least_steps=5)
        )
        assert np.isfinite(fitted.final(sample.new)).all()


# --- logged queries ---------------------------------------------------------------------------------------------------


def views(latent):
    """Return the vectors of a linear old model and of a bent new one."""
    rng = np.random.default_rng(97)
    old, wide, new = rng.normal(size=(12, 8)), rng.normal(size=(12, 32)), rng.normal(size=(32, 10))
    return (latent @ old).astype(np.float32), (np.tanh(latent @ wide / 2) @ new).astype(np.float32)


def latents(n, seed, *, queries=False):
    """Of records; or of queries, which say little, and that loudly."""
    rng = np.random.default_rng(seed)
    found = rng.normal(size=(n, 12))
    return 2.5 * found * (rng.random((n, 12)) < 0.3) + 0.3 * np.eye(12)[0] if queries else found


LEARNT = [(Method.RQT, False), (Method.MCL, False), (Method.MCL, True), (Method.RM, True)]


@pytest.mark.parametrize(("method", "labelled"), LEARNT)
def test_if_queries_are_unlike_records_a_log_of_them_makes_a_better_psi(method, labelled):
    records, gallery = latents(400, 0), latents(300, 3)
    logged, asked = latents(200, 1, queries=True), latents(100, 2, queries=True)
    y = (records @ np.random.default_rng(5).normal(size=(12, 8))).argmax(1) if labelled else None
    (old, new), (old_asked, new_asked), (held, _) = views(records), views(asked), views(gallery)
    relevant = np.zeros((100, 300), dtype=bool)
    nearest = np.argsort(metrics.distances(old_asked, held, metric=Metric.COSINE), axis=1)[:, :10]
    np.put_along_axis(relevant, nearest, True, axis=1)
    found = []
    for log in (None, Pairs(old=views(logged)[0], new=views(logged)[1])):
        sample = Pairs(old=old, new=new, labels=y)
        fitted = fit(sample, method=method, old_metric=Metric.COSINE, new_metric=Metric.COSINE, settings=QUICK, logged=log)
        reverse = fitted.reverse.apply(fitted.final(new_asked))
        distance = metrics.distances(reverse, held, metric=Metric.COSINE).astype(np.float64)
        found.append(metrics.mean(metrics.average_precision(distance, relevant)))
    assert found[1] > found[0] + (0.05 if labelled else 0.003)


def test_a_log_has_no_say_in_what_lifts_the_gallery():
    sample, some = pairs(100), pairs(50, seed=3)
    log = Pairs(old=some.old, new=some.new)
    settings = replace(QUICK, least_steps=3, hidden=16)
    one, two = (
        fit(sample, method=Method.FCT, old_metric=Metric.COSINE, new_metric=Metric.COSINE, settings=settings, logged=each)
        for each in (None, log)
    )
    assert one.lift.to_bytes() == two.lift.to_bytes()
