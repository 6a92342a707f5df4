"""What a plan promises is what was measured on records that nothing was tuned on."""

import json
from dataclasses import replace

import numpy as np
import pytest

from rmvdb import calibration, metrics, simulate
from rmvdb.errors import PlanRefused
from rmvdb.simulate import UNCALIBRATED, curve, predict, split
from rmvdb.training import Method, Pairs, Settings
from rmvdb.types import Metric

QUICK = Settings(epochs=1, least_steps=120, batch=128, lr=3e-3)
COSINE = {"old_metric": Metric.COSINE, "new_metric": Metric.COSINE}


def pairs(n=600, classes=6, seed=0, *, labels=True, noise=4.0):
    """A new space that separates the classes, and an old one that is a poorer view of it."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, classes, n)
    centres, view = np.random.default_rng(99).normal(size=(classes, 12)), np.random.default_rng(98).normal(size=(12, 8))
    new = centres[y] + 0.7 * rng.normal(size=(n, 12))
    old = new @ view + noise * rng.normal(size=(n, 8))
    return Pairs(old=old.astype(np.float32), new=new.astype(np.float32), labels=y if labels else None)


def strangers(n=400):
    """Two spaces that have nothing to do with each other: no ψ can help."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, 4, n)
    spaces = [rng.normal(size=(n, 40)).astype(np.float32) for _ in range(2)]
    spaces[0][np.arange(n), y] += 4
    return Pairs(old=spaces[0], new=spaces[1], labels=y)


def plain(sample, **options):
    queries = sample.old, sample.old, sample.new, sample.new
    relevant, order = sample.labels[:, None] == sample.labels[None, :], np.arange(len(sample))
    return curve(*queries, relevant, order, **{**COSINE, "leave_out": np.eye(len(sample), dtype=bool), **options})


def test_a_curve_begins_with_the_old_model_and_ends_with_the_new_one():
    sample = pairs(80)
    measured = plain(sample)
    relevant = sample.labels[:, None] == sample.labels[None, :]
    for vectors, row in ((sample.old, 0), (sample.new, -1)):
        distance = metrics.distances(vectors, vectors, metric=Metric.COSINE).astype(np.float64)
        np.fill_diagonal(distance, np.inf)
        np.testing.assert_allclose(measured.precision[row], metrics.average_precision(distance, relevant))
        np.testing.assert_array_equal(measured.top1[row], metrics.cmc(distance, relevant, k=1))


def test_half_way_the_first_half_of_the_order_is_searched_in_the_new_space():
    sample = pairs(40)
    order = np.random.default_rng(1).permutation(40)
    relevant = sample.labels[:, None] == sample.labels[None, :]
    measured = curve(sample.old, sample.old, sample.new, sample.new, relevant, order, ts=[0.5], **COSINE)
    merged = metrics.distances(sample.old, sample.old, metric=Metric.COSINE).astype(np.float64)
    merged[:, order[:20]] = metrics.distances(sample.new, sample.new, metric=Metric.COSINE)[:, order[:20]]
    np.testing.assert_allclose(measured.precision[0], metrics.average_precision(merged, relevant))


def test_calibration_changes_the_middle_of_a_curve_and_never_its_ends():
    sample = pairs(100)
    steep = calibration.Calibration(x=(0.0, 2.0), y=(-3.0, 9.0))
    raw, calibrated = plain(sample), plain(sample, calibrations=(steep, None))
    np.testing.assert_array_equal(raw.precision[[0, -1]], calibrated.precision[[0, -1]])
    assert (raw.precision[5] != calibrated.precision[5]).any()


@pytest.mark.parametrize("labels", ["none", "few classes", "identities"])
def test_the_three_parts_are_disjoint_and_together_everything(labels):
    sample = pairs(500, classes=6 if labels != "identities" else 100, labels=labels != "none")
    parts = split(sample, seed=1)
    assert sorted(np.concatenate(parts).tolist()) == list(range(500))
    assert 250 < len(parts[0]) < 350
    assert all(60 < len(part) < 140 for part in parts[1:])
    if labels == "few classes":
        assert all(set(sample.labels[part]) == set(sample.labels) for part in parts)
    if labels == "identities":
        assert not set(sample.labels[parts[0]]) & set(sample.labels[parts[2]])


def test_a_large_sample_is_mostly_trained_on(monkeypatch):
    monkeypatch.setattr(simulate, "MOST_HELD_OUT", 50)
    train, check, judge = split(pairs(600), seed=0)
    assert (len(train), len(check), len(judge)) == (500, 50, 50)


@pytest.fixture(scope="module")
def labelled():
    return predict(pairs(), method=Method.RM, settings=QUICK, **COSINE)


def test_rank_merge_with_labels_keeps_every_promise_on_an_easy_upgrade(labelled):
    assert (labelled.verdict, labelled.method) == ("ok", Method.RM)
    assert labelled.start[0] >= 0
    assert labelled.end[1] >= 0
    assert labelled.curve.largest_fall < 0.005
    assert labelled.curve.auc_map > labelled.naive.auc_map
    assert labelled.trained + labelled.held_out + labelled.evaluated == 600


def test_what_is_returned_is_what_was_measured(labelled):
    sample = pairs()
    judge = sample.take(split(sample, seed=0)[2])
    confidence = np.random.default_rng(0).random(600)[split(sample, seed=0)[2]]
    final = labelled.fitted.final(judge.new)
    again = curve(
        labelled.fitted.reverse.apply(final), judge.old, final, final, judge.labels[:, None] == judge.labels[None, :],
        np.argsort(confidence), labelled.calibrations, leave_out=np.eye(len(judge), dtype=bool), **COSINE,
    )  # fmt: skip
    np.testing.assert_allclose(again.map, labelled.curve.map)
    np.testing.assert_allclose(again.cmc, labelled.curve.cmc)


def test_nothing_measured_is_seen_before():
    sample = pairs()
    judge = split(sample, seed=0)[2]
    changed = Pairs(old=sample.old.copy(), new=sample.new.copy(), labels=sample.labels)
    changed.old[judge], changed.new[judge] = changed.old[judge][::-1], changed.new[judge] * 0.5 + 1
    one, two = (predict(each, method=Method.MCL, settings=QUICK, **COSINE) for each in (sample, changed))
    assert one.fitted.reverse.to_bytes() == two.fitted.reverse.to_bytes()
    assert one.calibrations == two.calibrations
    assert one.curve != two.curve


def test_the_naive_method_starts_at_the_old_model_and_ends_at_the_new_one():
    prediction = predict(pairs(), method=Method.NAIVE, settings=QUICK, **COSINE)
    assert prediction.start == prediction.end == (0.0, 0.0)
    assert prediction.curve == prediction.naive
    assert (prediction.curve.map[0], prediction.curve.map[-1]) == (prediction.map_old, prediction.map_new)
    assert prediction.negative_flips == 0


def test_a_start_below_the_old_model_is_refused_and_the_way_out_named():
    prediction = predict(strangers(), method=Method.RQT, settings=QUICK, **COSINE)
    assert prediction.verdict == "refuse"
    assert prediction.start[1] < 0
    assert "method naive" in prediction.reason
    assert prediction.negative_flips > 0


def test_without_labels_no_head_is_trained_and_relevance_is_the_new_models():
    prediction = predict(pairs(labels=False), method=Method.RM, settings=QUICK, **COSINE)
    assert (prediction.asked, prediction.method, prediction.fitted.head) == (Method.RM, Method.MCL, None)
    assert not prediction.labelled
    assert prediction.map_new == prediction.cmc_new == 1
    assert "instead of rm" in prediction.reason


def test_a_head_that_lowers_the_new_models_quality_is_left_out():
    sample = pairs()
    shuffled = np.random.default_rng(0).permutation(sample.labels)
    train = split(sample, seed=0)[0]
    labels = sample.labels.copy()
    labels[train] = shuffled[train]  # what ρ learns is wrong, what it is checked on is right
    same_split = replace(sample, labels=labels)
    prediction = predict(same_split, method=Method.RM, settings=QUICK, **COSINE)
    assert prediction.end[1] >= 0 or prediction.verdict != "ok"


def test_distances_of_two_metrics_are_always_calibrated():
    sample = pairs()
    prediction = predict(sample, method=Method.RM, settings=QUICK, old_metric=Metric.L2, new_metric=Metric.COSINE)
    assert prediction.calibrated
    assert all(prediction.calibrations)


def test_legs_of_very_different_scale_are_calibrated_because_it_helps():
    sample = pairs()
    far = Pairs(old=sample.old * 30, new=sample.new, labels=sample.labels)
    prediction = predict(far, method=Method.NAIVE, settings=QUICK, old_metric=Metric.L2, new_metric=Metric.L2)
    assert prediction.calibrated
    assert prediction.curve.largest_fall < 0.02


def test_an_order_by_confidence_is_followed():
    sample = pairs()
    confidence = np.random.default_rng(5).random(len(sample))
    one, two = (predict(sample, method=Method.NAIVE, settings=QUICK, confidence=sign * confidence, **COSINE) for sign in (1, -1))
    assert one.curve.map[5] != two.curve.map[5]
    assert one.curve.map[0] == two.curve.map[0]


def test_a_prediction_is_plain_json_and_the_same_each_time(labelled):
    text = json.dumps(labelled.to_json(), allow_nan=False)
    assert json.loads(text)["curve"]["ts"] == [i / 10 for i in range(11)]
    assert "fitted" not in json.loads(text)
    again = predict(pairs(), method=Method.RM, settings=QUICK, **COSINE)
    assert json.dumps(again.to_json()) == text


def test_equal_models_have_no_gain_and_json_says_so():
    sample = pairs()
    twin = Pairs(old=sample.new, new=sample.new, labels=sample.labels)
    prediction = predict(twin, method=Method.NAIVE, settings=QUICK, **COSINE)
    assert prediction.to_json()["curve"]["gain"] is None
    assert prediction.verdict == "ok"


def test_too_few_pairs_and_labels_that_never_repeat_are_refused():
    with pytest.raises(PlanRefused, match="60 or more"):
        predict(pairs(59), method=Method.RM, settings=QUICK, **COSINE)
    alone = replace(pairs(200), labels=np.arange(200))
    with pytest.raises(PlanRefused, match="leave the labels out"):
        predict(alone, method=Method.RM, settings=QUICK, **COSINE)


def test_the_least_number_of_pairs_is_enough():
    for labels in (True, False):
        prediction = predict(pairs(60, labels=labels), method=Method.RM, settings=QUICK, **COSINE)
        assert prediction.verdict in ("ok", "warn", "refuse")
        assert prediction.calibrations == UNCALIBRATED or prediction.calibrated
