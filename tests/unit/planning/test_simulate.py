"""A plan promises the quality that was measured on records that nothing was tuned on."""

import json
from dataclasses import replace

import numpy as np
import pytest

from rmvdb.errors import PlanRefused
from rmvdb.learning import calibration, geometry
from rmvdb.learning.method import Fitted, Method, Pairs
from rmvdb.planning import prediction as predictions
from rmvdb.planning import quality
from rmvdb.planning import split as splits
from rmvdb.planning.curve import TS, UNCALIBRATED, Curve, curve
from rmvdb.planning.objective import Objective
from rmvdb.planning.part import OlderCollection, Part
from rmvdb.planning.prediction import Prediction
from rmvdb.planning.split import split
from rmvdb.planning.trial import Candidate, Measured, Trial
from rmvdb.planning.verdict import verdict_of
from rmvdb.types import Metric
from tests.support.two_spaces import COSINE, QUICK, pairs, strangers


def predict(sample: Pairs, *, method: Method, confidence=None, **options) -> Prediction:
    confidences = None if confidence is None else {"given": confidence}
    return predicted(Trial(sample, confidences=confidences, **options), method)


def predicted(trial: Trial, method: Method) -> Prediction:
    return predictions.predict(trial, trial.candidate(method))


def plain(sample, **options):
    queries = sample.old, sample.old, sample.new, sample.new
    relevant, order = sample.labels[:, None] == sample.labels[None, :], np.arange(len(sample))
    return curve(*queries, relevant, order, **{**COSINE, "leave_out": np.eye(len(sample), dtype=bool), **options})


def test_a_curve_begins_with_the_old_model_and_ends_with_the_new_one():
    sample = pairs(80)
    measured = plain(sample)
    relevant = sample.labels[:, None] == sample.labels[None, :]
    for vectors, row in ((sample.old, 0), (sample.new, -1)):
        distance = geometry.distances(vectors, vectors, metric=Metric.COSINE).astype(np.float64)
        np.fill_diagonal(distance, np.inf)
        np.testing.assert_allclose(measured.precision[row], quality.average_precision(distance, relevant))
        np.testing.assert_array_equal(measured.top1[row], quality.cmc(distance, relevant, k=1))


def test_half_way_the_first_half_of_the_order_is_searched_in_the_new_space():
    sample = pairs(40)
    order = np.random.default_rng(1).permutation(40)
    relevant = sample.labels[:, None] == sample.labels[None, :]
    measured = curve(sample.old, sample.old, sample.new, sample.new, relevant, order, ts=[0.5], **COSINE)
    merged = geometry.distances(sample.old, sample.old, metric=Metric.COSINE).astype(np.float64)
    merged[:, order[:20]] = geometry.distances(sample.new, sample.new, metric=Metric.COSINE)[:, order[:20]]
    np.testing.assert_allclose(measured.precision[0], quality.average_precision(merged, relevant))


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
    monkeypatch.setattr(splits, "MOST_HELD_OUT", 50)
    train, check, judge = split(pairs(600), seed=0)
    assert (len(train), len(check), len(judge)) == (500, 50, 50)


@pytest.mark.parametrize("share", [0.01, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("labels", ["none", "few classes", "identities"])
def test_records_that_an_earlier_training_saw_are_trained_on_and_never_measured_on(labels, share):
    sample = pairs(1000, classes=6 if labels != "identities" else 200, labels=labels != "none")
    seen = np.random.default_rng(6).random(1000) < share
    train, check, judge = split(sample, seed=1, seen=seen)
    assert sorted(np.concatenate([train, check, judge]).tolist()) == list(range(1000))
    assert seen[train].sum() == seen.sum()
    assert min(len(check), len(judge)) > 0.3 * min(400, (~seen).sum())
    assert max(len(check), len(judge)) < 300
    if labels == "identities" and share < 0.5:
        assert len(np.unique(sample.labels[judge])) < 150  # whole classes, as far as they are fresh


def test_a_prediction_names_the_rows_that_it_was_trained_on():
    sample = pairs()
    seen = np.arange(600) % 2 == 0
    prediction = predict(sample, method=Method.RQT, settings=QUICK, seen=seen, **COSINE)
    assert set(np.flatnonzero(seen)) <= set(prediction.seen)
    assert len(prediction.seen) == prediction.trained == 600 - prediction.held_out - prediction.evaluated


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


def test_the_returned_transforms_are_the_measured_ones(labelled):
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


@pytest.mark.parametrize(
    ("lost", "verdict", "saying"),
    [
        (0, "ok", "rises"),
        (3, "ok", "rises"),
        (30, "warn", "rqt would fall by 15.0 points of CMC@1 on its way, below the old model"),
    ],
)
def test_a_dip_of_cmc_beyond_the_noise_is_warned_of_though_map_rises(lost, verdict, saying):
    rising, top1 = np.linspace(0.5, 0.8, 11)[:, None] * np.ones(200), np.ones((11, 200))
    top1[4:6, :lost] = 0
    dipping = Curve(ts=TS, precision=rising, top1=top1, top5=top1, recall=rising, ndcg=rising)
    measured = Measured(fitted=Fitted(), calibrations=(None, None), tuning=(), show=lambda: dipping)
    candidate = Candidate(method=Method.RQT, asked=Method.RQT, order="random", measured=measured)
    options = {"objective": Objective.MAP, "labelled": True, "before": "the old model", "seed": 0}
    naive = Curve(ts=TS, precision=rising, top1=np.ones((11, 200)), top5=top1, recall=rising, ndcg=rising)
    found = verdict_of(candidate, dipping, naive, None, **options)
    assert (found[0], saying in found[1]) == (verdict, True)


def test_without_labels_no_head_is_trained_and_relevance_is_the_new_models():
    prediction = predict(pairs(labels=False), method=Method.RM, settings=QUICK, **COSINE)
    assert (prediction.asked, prediction.method, prediction.fitted.head) == (Method.RM, Method.MCL, None)
    assert not prediction.labelled
    assert prediction.map_new == prediction.cmc_new == 1
    assert "instead of rm" in prediction.reason


def test_a_head_that_lowers_the_new_models_quality_is_left_out():
    trial = Trial(pairs(), settings=QUICK, **COSINE)
    learnt = trial.train.pairs
    wrong = np.random.default_rng(0).permutation(learnt.labels)  # what ρ learns; what it is checked on is right
    trial.fits._train = replace(trial.train, pairs=replace(learnt, labels=wrong))
    told = predicted(trial, Method.RM)
    assert (told.asked, told.method, told.fitted.head) == (Method.RM, Method.MCL, None)
    assert "no ρ was shown to keep the new model's quality" in told.reason


def test_distances_of_two_metrics_are_always_calibrated():
    sample = pairs()
    for calibrate in (True, False):
        told = predict(
            sample, method=Method.RM, settings=QUICK, old_metric=Metric.L2, new_metric=Metric.COSINE, calibrate=calibrate
        )
        assert told.calibrated
        assert told.calibrations[0]


def test_legs_of_very_different_scale_are_calibrated_because_it_helps():
    sample = pairs()
    far = Pairs(old=sample.old * 30, new=sample.new, labels=sample.labels)
    prediction = predict(far, method=Method.NAIVE, settings=QUICK, old_metric=Metric.L2, new_metric=Metric.L2)
    assert prediction.calibrated
    assert prediction.curve.largest_fall < 0.02
    asis = predict(far, method=Method.NAIVE, settings=QUICK, old_metric=Metric.L2, new_metric=Metric.L2, calibrate=False)
    assert (asis.calibrated, asis.calibrations) == (False, UNCALIBRATED)


def test_legs_that_are_one_space_are_left_as_they_are_because_calibration_does_not_help():
    sample = pairs()
    twins = Pairs(old=sample.new, new=sample.new, labels=sample.labels)
    told = predict(twins, method=Method.NAIVE, settings=QUICK, **COSINE)
    assert (told.calibrated, told.calibrations) == (False, UNCALIBRATED)


def test_without_labels_distances_are_never_calibrated_by_the_new_models_neighbours():
    sample = pairs(labels=False)
    far = replace(sample, old=sample.old * 30)
    told = predict(far, method=Method.NAIVE, settings=QUICK, old_metric=Metric.L2, new_metric=Metric.L2)
    assert told.calibrations[-1] is None  # by their distribution only the old leg's would be


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
    with pytest.raises(PlanRefused, match="59 pairs are too few to train and to measure on; use the method naive"):
        predict(pairs(59), method=Method.RM, settings=QUICK, **COSINE)
    alone = replace(pairs(200), labels=np.arange(200))
    with pytest.raises(PlanRefused, match="leave --labels out"):
        predict(alone, method=Method.RM, settings=QUICK, **COSINE)


def test_the_least_number_of_pairs_is_enough():
    for labels in (True, False):
        sample = pairs(60, labels=labels)
        prediction = predict(sample, method=Method.RM, settings=QUICK, **COSINE)
        judged = sample.take(split(sample, seed=0)[2]).labels
        alone = (np.unique(judged, return_counts=True)[1] == 1).sum() if labels else 0  # they have nothing to find
        assert prediction.trained + prediction.held_out + prediction.evaluated == 60 - alone
        assert min(prediction.held_out, prediction.evaluated) > 5
        assert np.isfinite([*prediction.curve.map, *prediction.curve.cmc, *prediction.start, *prediction.end]).all()


# --- collections behind the newest old one ----------------------------------------------------------------------------

TO_V1 = np.random.default_rng(97).normal(size=(8, 5)).astype(np.float32)


def lead(v2):
    """From v2's space to v1's: the ψ of an upgrade that was not finished."""
    return v2 @ TO_V1


def behind(sample, share=0.4, **changed):
    """Of these records of v2, a part that is still where v1 put it."""
    held = np.random.default_rng(3).random(len(sample)) < share
    v1 = (lead(sample.old) + 3 * np.random.default_rng(4).normal(size=(len(sample), 5))).astype(np.float32)
    return OlderCollection(**{"metric": Metric.COSINE, "held": held, "vectors": v1, "lead": lead} | changed)


def test_collections_behind_are_measured_on_and_never_trained_on():
    sample = pairs()
    each = behind(sample)
    changed = Pairs(old=sample.old.copy(), new=sample.new.copy(), labels=sample.labels)
    changed.old[each.held], changed.new[each.held] = 7, changed.new[each.held][::-1]
    one, two = (predict(part, method=Method.MCL, settings=QUICK, behind=[each], **COSINE) for part in (sample, changed))
    assert one.fitted.reverse.to_bytes() == two.fitted.reverse.to_bytes()
    assert one.curve != two.curve
    assert one.trained + one.held_out + one.evaluated == 600
    assert one.trained < 400


def test_a_composed_leg_is_calibrated_by_itself_on_records_that_it_holds():
    sample = pairs()
    each = behind(sample, metric=Metric.L2)  # other metrics can only be merged calibrated
    prediction = predict(sample, method=Method.RQT, settings=QUICK, behind=[each], **COSINE)
    newest, composed, new = prediction.calibrations
    check = Part(
        pairs=sample, confidence=np.zeros(600), old_metric=Metric.COSINE, new_metric=Metric.COSINE, behind=(each,)
    ).split(seed=0, most=None, seen=np.zeros(600, dtype=bool))[1]
    held = check[each.held[check]]
    queries = lead(prediction.fitted.reverse.apply(sample.new[check]))
    counted = check[:, None] != held[None, :]
    relevant = sample.labels[check][:, None] == sample.labels[held][None, :]
    distances = geometry.distances(queries, each.vectors[held], metric=Metric.L2)
    assert composed == calibration.fit(distances[counted], relevant[counted])
    assert len({newest, composed, new}) == 3


def test_the_whole_gallery_as_it_is_served_now_is_what_a_start_is_compared_with():
    sample = pairs(800)
    far = replace(sample, new=np.random.default_rng(0).normal(size=sample.new.shape).astype(np.float32))
    prediction = predict(far, method=Method.RQT, settings=QUICK, behind=[behind(sample)], **COSINE)
    assert (prediction.verdict, prediction.start[1] < 0) == ("refuse", True)
    assert "would start below the present quality" in prediction.reason
    alone = predict(sample, method=Method.NAIVE, settings=QUICK, **COSINE)
    mixed = predict(sample, method=Method.NAIVE, settings=QUICK, behind=[behind(sample, vectors=np.ones((800, 5)))], **COSINE)
    assert mixed.map_old < alone.map_old  # what is behind counts


def test_the_naive_method_leaves_every_old_leg_as_it_is():
    sample = pairs()
    own = behind(sample)
    for each in (own, replace(own, own_queries=own.vectors)):
        prediction = predict(sample, method=Method.NAIVE, settings=QUICK, behind=[each], **COSINE)
        assert prediction.start == prediction.end == (0.0, 0.0)
        assert prediction.curve == prediction.naive


def test_a_leg_with_an_embedder_of_its_own_is_asked_with_that():
    sample = pairs()
    own, mapped = behind(sample, own_queries=behind(sample).vectors), behind(sample)
    one, two = (predict(sample, method=Method.RQT, settings=QUICK, behind=[each], **COSINE) for each in (own, mapped))
    assert one.fitted.reverse.to_bytes() == two.fitted.reverse.to_bytes()
    assert one.curve.map[0] != two.curve.map[0]


def test_the_oldest_collection_is_backfilled_first():
    sample, confidence = pairs(300), np.random.default_rng(5).random(300)
    each = behind(sample)
    part = Part(pairs=sample, confidence=confidence, old_metric=Metric.COSINE, new_metric=Metric.COSINE, behind=(each,))
    order, count = part.order, int(each.held.sum())
    assert each.held[order[:count]].all()
    assert (np.diff(confidence[order[:count]]) >= 0).all()
    assert (np.diff(confidence[order[count:]]) >= 0).all()


def test_an_empty_collection_changes_nothing():
    sample = pairs()
    empty = behind(sample, share=0.0, metric=Metric.L2)
    prediction = predict(sample, method=Method.RQT, settings=QUICK, behind=[empty], **COSINE)
    assert [each is None for each in prediction.calibrations] == [False, True, False]
    assert prediction.map_old == predict(sample, method=Method.NAIVE, settings=QUICK, **COSINE).map_old


def test_too_few_records_of_the_newest_collection_are_too_few():
    sample = pairs(200)
    with pytest.raises(PlanRefused, match="60 or more"):
        predict(sample, method=Method.RQT, settings=QUICK, behind=[behind(sample, share=0.8)], **COSINE)


def test_a_fall_that_stays_above_the_old_model_is_named_and_no_warning():
    high, low = np.full(200, 0.8), np.full(200, 0.6)
    rows = np.array([high, *[low] * 5, *[high] * 5])
    falling = Curve(ts=TS, precision=rows, top1=rows, top5=rows, recall=rows, ndcg=rows)
    options = {"objective": Objective.MAP, "labelled": True, "before": "the old model", "seed": 0}
    measured = Measured(fitted=Fitted(), calibrations=(None, None), tuning=(), show=lambda: falling)
    candidate = Candidate(method=Method.RQT, asked=Method.RQT, order="random", measured=measured)
    for old, verdict, words in ((0.5, "ok", "falls by 20.0 points of mAP"), (0.7, "warn", "on its way, below the old model")):
        base = np.linspace(old, 0.8, 11)[:, None] * np.ones(200)
        naive = Curve(ts=TS, precision=base, top1=base, top5=base, recall=base, ndcg=base)
        found = verdict_of(candidate, falling, naive, None, **options)
        assert (found[0], words in found[1]) == (verdict, True)
