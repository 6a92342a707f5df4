"""The numbers of a row equal a slow search's, and the recommended candidate is worth most."""

import functools
import json
from dataclasses import replace

import numpy as np
import pytest

from rmvdb.errors import PlanRefused, UsageError
from rmvdb.learning import geometry
from rmvdb.learning.method import Fitted, Method, Pairs
from rmvdb.planning import quality
from rmvdb.planning.candidates import Choice, candidates
from rmvdb.planning.choose import CANDIDATES, chosen, preferred
from rmvdb.planning.comparison import Comparison, rows_of
from rmvdb.planning.curve import TS, Course
from rmvdb.planning.objective import Objective
from rmvdb.planning.part import Queries
from rmvdb.planning.prediction import predict
from rmvdb.planning.trial import Candidate, Measured, Trial
from rmvdb.types import Metric
from tests.support.two_spaces import COSINE, QUICK, pairs, strangers

#: The methods that can be compared for two models whose spaces differ.
TRAINED = tuple(method for method in CANDIDATES if method is not Method.IDENTITY)


def kin(n=300):
    """Return a new model that was trained to be comparable with the old one, whose vectors are noisier."""
    sample = pairs(n, noise=0.0)
    noise = np.random.default_rng(7).normal(size=sample.old.shape)
    return replace(sample, old=(sample.old + 4 * noise).astype(np.float32), new=sample.old)


def trial(sample=None, orders=("one", "two"), **options):
    sample = pairs(300) if sample is None else sample
    rng = np.random.default_rng(3)
    return Trial(
        sample, confidences={name: rng.random(len(sample)) for name in orders}, **{"settings": QUICK, **COSINE, **options}
    )


def predicted(made, method, order=None):
    return predict(made, made.candidate(method, order))


def every(made, methods, **options):
    """All of these methods in all orders, without rescoring."""
    return candidates(made, Choice(methods=tuple(methods), every=True, **options))


def compared(made, methods):
    told = [predict(made, each) for each in every(made, methods)]
    return Comparison(rows=rows_of(made, told), recommended=told[0], relevance=made.relevance, objective=made.objective)


def best_of(made, methods, **options):
    """Return the choice of `auto` among these methods, in the first order."""
    found = candidates(made, Choice(methods=tuple(methods), orders=made.orders[:1]))
    return chosen(found, functools.partial(predict, made), objective=made.objective, seed=made.seed, **options)


@pytest.fixture(scope="module")
def found():
    made = trial()
    return made, compared(made, [Method.NAIVE, Method.RQT, Method.RM])


def slow(d_old, d_new, relevant, order, t):
    """AP, CMC@1, CMC@5 and recall@10 of each query by sorting one list after the other."""
    moved = set(order[: round(t * len(order))].tolist())
    told = []
    for query in range(len(d_old)):
        others = [record for record in range(len(order)) if record != query]
        ranked = sorted(others, key=lambda record: (d_new if record in moved else d_old)[query, record])
        hits = [bool(relevant[query, record]) for record in ranked]
        precision = [sum(hits[: at + 1]) / (at + 1) for at in range(len(hits)) if hits[at]]
        told.append((np.mean(precision), hits[0], any(hits[:5]), sum(hits[:10]) / sum(hits)))
    return np.array(told, dtype=float).T  # (4, Q)


def test_the_numbers_of_a_row_equal_a_slow_searchs(found):
    made, table = found
    row = next(row for row in table.rows if (row.name, row.order) == ("rqt", "two"))
    fitted, judge = made.fitted(Method.RQT)[1], made._parts_by_order["two"].judge
    calibrations = made.measure(fitted, "two").calibrations
    part = judge.pairs
    d_old = geometry.distances(fitted.reverse.apply(part.new), part.old, metric=Metric.COSINE)
    d_new = geometry.distances(part.new, part.new, metric=Metric.COSINE)
    d_old, d_new = (scale.apply(d) if scale else d for scale, d in zip(calibrations, (d_old, d_new), strict=True))
    relevant = part.labels[:, None] == part.labels[None, :]
    order = np.argsort(judge.confidence)
    told = np.array([slow(d_old, d_new, relevant, order, t) for t in row.curve.ts])  # (T, 4, Q)
    for at, name in enumerate(("map", "cmc", "cmc5", "recall")):
        np.testing.assert_allclose(getattr(row.curve, name), told[:, at].mean(axis=1), atol=1e-9)
    areas = [sum((told[at, 0, q] + told[at + 1, 0, q]) / 20 for at in range(10)) for q in range(len(part))]
    assert row.curve.auc_map == pytest.approx(np.mean(areas))
    assert row.auc_map == pytest.approx(quality.bootstrap(np.array(areas)))
    assert row.auc_map[0] < row.curve.auc_map < row.auc_map[1]
    own = geometry.distances(part.old, part.old, metric=Metric.COSINE)
    new = geometry.distances(part.new, part.new, metric=Metric.COSINE)
    old, last = (slow(own, new, relevant, order, t) for t in (0, 1))
    expected = (np.mean(areas) - old[0].mean()) / (last[0].mean() - old[0].mean())
    assert row.curve.gain == pytest.approx(expected)
    flips = [np.mean((old[1] == 1) & (now[1] == 0)) for now in told]
    np.testing.assert_allclose(row.negative_flips, flips)


def test_the_models_alone_are_level_and_frame_the_curves(found):
    _, table = found
    rows = {(row.name, row.order): row for row in table.rows}
    naive = rows["naive", "one"]
    for name, at in (("old", 0), ("new", -1)):
        level = rows[name, None]
        assert set(level.curve.map) == {naive.curve.map[at]}
        assert level.verdict is level.merit is None
    assert (rows["old", None].curve.gain, rows["new", None].curve.gain) == pytest.approx((0, 1))
    rm = rows["rm", "one"]
    assert rows["ideal", None].curve.map[0] == rm.curve.map[-1] == rows["rm", "two"].curve.map[-1]
    assert naive.start == naive.end == (0, 0)


def test_every_method_has_a_row_for_every_order(found):
    _, table = found
    assert [(row.name, row.order) for row in table.rows] == [
        *((name, None) for name in ("old", "new", "ideal")),
        *((name, order) for name in ("naive", "rqt", "rm") for order in ("one", "two")),
    ]


def test_the_best_order_of_each_method_is_marked(found):
    for name in ("naive", "rqt", "rm"):
        rows = [row for row in found[1].rows if row.name == name]
        assert [row.best for row in rows] == [row.merit == max(each.merit for each in rows) for row in rows]


def test_equal_methods_are_trained_and_shown_once():
    said = []
    made = trial(pairs(300, labels=False), progress=lambda step, done, total: said.append(step))
    table = compared(made, [Method.NAIVE, Method.RQT, Method.CL_S, Method.CL_M, Method.MCL, Method.RM])
    assert {row.name for row in table.rows if row.verdict} == {"naive", "rqt", "cl-s", "mcl"}
    assert {step for step in said if "training" in step} == {"training rqt", "training cl-s", "training mcl"}
    assert table.relevance == "neighbours"


def test_a_comparison_is_plain_json(found):
    text = json.dumps(found[1].to_json(), allow_nan=False)
    assert json.loads(text)["recommended"]["method"] == found[1].recommended.method
    assert json.loads(text)["evaluated"] == found[0].evaluated


# --- the recommendation -----------------------------------------------------------------------------------------------


def tried(method, merit, *, queries=None, rescore=0, switch=None, order="one"):
    """Return a candidate of this merit on the part to choose by. `queries`: its value for each query."""
    values = np.full(200, merit) if queries is None else queries
    course = Course(ts=TS, values=np.repeat(values[None], len(TS), axis=0))
    reverse = None if method is Method.NAIVE else object()
    measured = Measured(fitted=Fitted(reverse=reverse), calibrations=(None, None), tuning=(course,), show=lambda: None)
    early = measured if switch else None
    return Candidate(method=method, asked=method, order=order, measured=measured, rescore=rescore, switch=switch, early=early)


def first(*found):
    return next(preferred(found, objective=Objective.MAP, seed=0))


def noisy(seed, mean, *, near=None, by=0.0):
    rng = np.random.default_rng(seed)
    return mean + 0.1 * rng.normal(size=200) if near is None else near - by + 0.02 * rng.normal(size=200)


def test_the_candidate_worth_most_is_preferred_and_the_next_is_named():
    rm, rqt = tried(Method.RM, 0.9, queries=noisy(0, 0.9)), tried(Method.RQT, 0.5, queries=noisy(1, 0.5))
    best, why = first(tried(Method.NAIVE, 0.4, queries=noisy(2, 0.4)), rqt, rm)
    assert best is rm
    assert "rm is worth most on the queries to choose by (AUC of mAP less its fall: 9" in why
    assert "against 49.3 of rqt)" in why
    assert "noise" not in why


def test_after_a_tie_the_one_that_embeds_fewer_items_is_taken_and_said():
    values = noisy(0, 0.8)
    naive = tried(Method.NAIVE, 0.8, queries=values)
    near, far = (tried(Method.RM, 0.8, queries=noisy(1, 0, near=values, by=by)) for by in (0.0, 0.1))
    best, why = first(naive, near)
    assert best is near
    assert "naive is worth most" in why
    assert "rm is cheaper and is taken: a query embeds once, not twice, and the difference lies within the noise" in why
    assert first(naive, far)[0] is naive
    rescored = tried(Method.RM, 0.8, queries=values, rescore=20)
    assert first(rescored, near)[0] is near
    assert (
        "embeds twice, not 21 items" in first(rescored, tried(Method.NAIVE, 0.8, queries=noisy(3, 0, near=values, by=0.001)))[1]
    )
    assert first(rescored, far)[0] is rescored
    dearer = tried(Method.RM, 0.8, queries=values, switch=0.4)
    assert first(dearer, near)[0] is near


def test_all_are_offered_one_after_the_other():
    found = [tried(Method.NAIVE, 0.3, queries=noisy(0, 0.3)), tried(Method.RM, 0.9, queries=noisy(1, 0.9))]
    assert [each.method for each, _ in preferred(found, objective=Objective.MAP, seed=0)] == [Method.RM, Method.NAIVE]


def judged(verdicts):
    """Return a function that gives each method its verdict."""
    made = predicted(trial(), Method.NAIVE)
    return lambda candidate: replace(made, method=candidate.method, verdict=verdicts.get(candidate.method, "ok"))


def test_the_first_that_is_ok_is_chosen_then_one_with_a_warning_then_nothing_better():
    found = [
        tried(Method.NAIVE, 0.3, queries=noisy(0, 0.3)),
        tried(Method.RQT, 0.5, queries=noisy(1, 0.5)),
        tried(Method.RM, 0.9, queries=noisy(2, 0.9)),
    ]

    def best(**verdicts):
        told = judged({Method(name): verdict for name, verdict in verdicts.items()})
        return chosen(found, told, objective=Objective.MAP, seed=0)

    assert best().method is Method.RM
    assert best(rm="refuse").method is Method.RQT
    assert "The plan refuses rm" in best(rm="refuse").choice
    assert best(rm="warn").method is Method.RQT
    assert "There is a warning about rm" in best(rm="warn").choice
    assert best(rm="refuse", rqt="warn", naive="warn").method is Method.RQT
    assert best(rm="refuse", rqt="refuse", naive="refuse").verdict == "refuse"


def test_a_merit_that_is_not_a_number_is_worth_nothing():
    assert first(tried(Method.NAIVE, float("nan")), tried(Method.RQT, 0.1))[0].method is Method.RQT


def test_strangers_are_not_served_by_a_map_alone():
    made = trial(strangers(), orders=("one",))
    best = best_of(made, TRAINED)
    assert best.extractions == 2
    assert best.verdict != "refuse"


def test_a_comparable_model_is_recognised_without_a_declaration():
    made = trial(kin(), orders=("one",))
    found = predicted(made, Method.IDENTITY)
    assert found.verdict == "ok"
    assert found.curve.map[0] > found.map_old
    assert best_of(made, [Method.NAIVE, Method.IDENTITY]).method is Method.IDENTITY


def test_a_model_declared_comparable_is_taken_at_its_word_unless_measured_to_be_worse():
    taken = trial(kin(), orders=("one",))
    best = best_of(taken, [Method.NAIVE, Method.IDENTITY, Method.PROCRUSTES], declared=True)
    assert (best.method, best.verdict, best.evaluated) == (Method.IDENTITY, "ok", taken.evaluated)
    assert "declared to be compatible with the old one, so nothing is trained" in best.choice
    refuted = best_of(trial(strangers(), orders=("one",)), [Method.NAIVE, Method.IDENTITY], declared=True)
    assert refuted.method is Method.NAIVE
    assert refuted.choice.startswith(
        "the new model is declared to be compatible, but would start below the old one. naive is worth"
    )


def test_of_strangers_nothing_says_that_they_are_not_comparable():
    made = trial(strangers(), orders=("one",))
    assert predicted(made, Method.IDENTITY).verdict == "refuse"
    assert "identity" not in best_of(made, [Method.NAIVE, Method.IDENTITY]).choice


@pytest.mark.parametrize("declared", [False, True])
@pytest.mark.parametrize("records", [120, 300])
def test_of_strangers_nothing_that_is_refused_is_recommended_while_there_is_another_and_nothing_else_fails(declared, records):
    made = trial(strangers(records), orders=("one",))
    alone = best_of(made, [Method.IDENTITY], declared=declared)
    assert (alone.method, alone.verdict) == (Method.IDENTITY, "refuse")
    several = best_of(made, [Method.NAIVE, Method.IDENTITY, Method.RM], declared=declared)
    assert several.verdict != "refuse"
    assert best_of(made, [Method.NAIVE], declared=True).method is Method.NAIVE


def test_no_measured_record_has_a_say_in_what_is_chosen():
    sample = pairs(300)
    judge = trial(sample, orders=("one",))._parts_by_order["one"].judge
    measured = np.flatnonzero((sample.new[:, None] == judge.pairs.new[None]).all(2).any(1))
    changed = replace(sample, new=sample.new.copy())
    changed.new[measured] = changed.new[measured][::-1]
    trials = [trial(each, orders=("one",)) for each in (sample, changed)]
    for method in TRAINED:
        one, two = (predicted(each, method) for each in trials)
        assert (one.method, one.merit) == (two.method, two.merit)
        assert one.curve != two.curve


# --- every part of a candidate is chosen by the sample ----------------------------------------------------------------


def test_the_best_is_measured_in_every_order_on_schedules_and_rescored():
    made = trial(pairs(600, labels=False))
    found = candidates(made, Choice(methods=(Method.NAIVE, Method.PROCRUSTES, Method.CENTRED), rescore=(0, 5, 20)))
    assert {each.order for each in found} == {"one", "two"}
    assert {each.rescore for each in found} == {0, 5, 20}
    assert {each.method for each in found} == {Method.NAIVE, Method.PROCRUSTES, Method.CENTRED}


def test_every_record_rescored_is_the_new_model_from_the_first_minute():
    made = trial(pairs(400, labels=False), orders=("one",))
    whole = predict(made, made.rescored(made.candidate(Method.NAIVE), 400))
    assert whole.course == [1.0] * len(TS) == [whole.new] * len(TS)
    some = predict(made, made.rescored(made.candidate(Method.NAIVE), 20))
    assert some.old < some.course[0] < 1


def test_a_blend_is_measured_as_one_query_of_both_models():
    made = trial(pairs(400), orders=("one",))
    fitted = made.fitted(Method.BLEND)[1]
    assert 0 < fitted.blend < 1
    judge = made.judge("one")
    asked = judge.query_set
    units = [each / np.linalg.norm(each, axis=1, keepdims=True) for each in (asked.old, fitted.reverse.apply(asked.new))]
    query = fitted.blend * units[0] + (1 - fitted.blend) * units[1]
    gallery = judge.pairs.old / np.linalg.norm(judge.pairs.old, axis=1, keepdims=True)
    summed = -(fitted.blend * units[0] @ gallery.T + (1 - fitted.blend) * units[1] @ gallery.T)
    own = geometry.distances(query, judge.pairs.old, metric=Metric.COSINE)
    for distance in (summed, own):
        distance[asked.leave_out] = np.inf
    np.testing.assert_array_equal(np.argsort(summed)[:, :10], np.argsort(own)[:, :10])
    curve = judge.curve(fitted)
    np.testing.assert_allclose(curve.precision[0], quality.average_precision(own, asked.relevance))


def test_labels_that_say_nothing_cannot_shape_what_is_served():
    """Labels that can be learned from one of twelve coordinates."""
    sample = pairs(900, classes=12)
    wrong = replace(sample, labels=np.argsort(np.argsort(sample.new[:, 0])) * 8 // len(sample))
    told = predicted(trial(wrong, orders=("one",)), Method.RM)
    assert told.verdict == "refuse" or told.fitted.head is None
    assert told.neighbours is not None
    assert best_of(trial(wrong, orders=("one",)), TRAINED).verdict == "ok"


def test_beside_the_metric_stands_whether_a_record_still_finds_itself():
    made = trial(replace(strangers(), labels=None), orders=("one",))
    naive, other = predicted(made, Method.NAIVE), predicted(made, Method.PROCRUSTES)
    assert naive.self_found.values == [1.0, 1.0, 1.0] == [naive.self_found.old] * 3
    assert naive.warnings == []
    assert other.self_found.values[0] < 0.5
    assert other.self_found.values[-1] == 1.0
    (warning,) = other.warnings
    assert "at t = 0 a record's own item finds it first in" in warning


@pytest.mark.parametrize("objective", list(Objective))
def test_it_is_chosen_and_judged_by_the_metric_that_was_named(objective):
    made = trial(pairs(400), orders=("one",), objective=objective)
    told = predicted(made, Method.NAIVE)
    assert told.objective is objective
    curve = {"mAP": told.curve.map, "CMC@1": told.curve.cmc, "nDCG@10": told.curve.ndcg, "recall@10": told.curve.recall}[
        objective
    ]
    assert told.course == curve


def test_without_a_name_the_metric_follows_from_what_is_known():
    assert trial(pairs(300)).objective is Objective.MAP
    assert trial(pairs(300, labels=False)).objective is Objective.MAP
    assert trial(pairs(400), queries=asked(pairs(400))).objective is Objective.NDCG


# --- queries with known answers ---------------------------------------------------------------------------------------


def asked(sample, count=80, seed=5):
    """Queries like the records of the first classes, which should find five records each."""
    rng = np.random.default_rng(seed)
    rows = rng.choice(len(sample), count, replace=False)
    relevance = np.zeros((count, len(sample)), dtype=bool)
    for query, row in enumerate(rows):
        alike = np.flatnonzero((sample.labels == sample.labels[row]) & (np.arange(len(sample)) % 3 == 0))
        relevance[query, rng.choice(alike, 5, replace=False)] = True
    near = [(each[rows] + 0.1 * rng.normal(size=each[rows].shape)).astype(np.float32) for each in (sample.old, sample.new)]
    return Queries(old=near[0], new=near[1], relevance=relevance, leave_out=np.zeros_like(relevance))


def test_queries_are_searched_for_in_place_of_the_records():
    sample = pairs(400)
    queries = asked(sample)
    made = trial(sample, orders=("one",), queries=queries)
    stage = made._parts_by_order["one"]
    answers = set(np.flatnonzero(queries.relevance.any(0)).tolist())
    assert made.relevance == "answers"
    (chooser,) = stage.choosers
    assert made.evaluated == len(chooser.query_set) == 40
    assert not answers & set(made.seen.tolist())
    measured, choosing = (set(map(bytes, part.query_set.new)) for part in (stage.judge, chooser))
    assert not measured & choosing
    naive = made.naive("one").curve
    distance = geometry.distances(stage.judge.query_set.old, stage.judge.pairs.old, metric=Metric.COSINE)
    np.testing.assert_allclose(naive.precision[0], quality.average_precision(distance, stage.judge.query_set.relevance))
    assert stage.judge.query_set.relevance.sum(1).tolist() == [5] * 40  # every answer is there
    told = predicted(made, Method.RM)
    assert told.evaluated == 40
    assert told.curve.map[-1] == pytest.approx(quality.mean(told.measured.precision[-1]))


def test_an_answer_that_was_trained_on_before_does_not_count():
    sample = pairs(400)
    queries = asked(sample)
    seen = np.zeros(400, dtype=bool)
    seen[np.flatnonzero(queries.relevance.any(0))[:10]] = True
    made = trial(sample, orders=("one",), queries=queries, seen=seen)
    assert set(np.flatnonzero(seen)) <= set(made.seen.tolist())
    assert (made._parts_by_order["one"].judge.query_set.relevance.sum(1) <= 5).all()


def test_few_queries_are_all_measured_and_records_choose():
    made = trial(pairs(400), orders=("one",), queries=asked(pairs(400), 79))
    stage = made._parts_by_order["one"]
    assert (stage.choosers, made.evaluated) == ((), 79)
    assert [each.values.shape[1] for each in made.naive("one").tuning] == [len(half.pairs) for half in stage.halves]


def test_too_few_queries_are_named():
    sample = pairs(400)
    with pytest.raises(UsageError, match="9 queries with an answer in the sample are too few"):
        trial(sample, queries=asked(sample).take(np.arange(9)))


# --- a log of queries -------------------------------------------------------------------------------------------------


def test_nothing_is_measured_on_a_query_that_was_trained_on():
    sample = pairs(400)
    queries = asked(sample)
    others = pairs(30, seed=9)
    nearly = queries.new * (1 + 1e-4)  # in another batch an item is embedded a little differently
    for searched, known in ((None, sample), (queries, Pairs(old=queries.old, new=nearly))):
        log = Pairs(old=np.concatenate([known.old, others.old]), new=np.concatenate([known.new, others.new]))
        made = trial(sample, orders=("one",), queries=searched, logged=log)
        stage = made._parts_by_order["one"]
        judged = np.concatenate([part.query_set.new for part in (stage.check, stage.judge, *stage.choosers)])
        assert geometry.distances(made.logged.new, judged, metric=Metric.COSINE).min() > 1e-5
        left = set(map(bytes, made.logged.new))
        assert set(map(bytes, others.new)) <= left
        assert len(made.logged) == 30 + (len(made.seen) if searched is None else 0)
        assert predicted(made, Method.RQT).to_json()["logged"] == len(made.logged)


def test_a_log_of_nothing_but_measured_queries_changes_nothing():
    sample = pairs(400)
    queries = asked(sample)
    log = Pairs(old=queries.old, new=queries.new)
    with_log, without = (trial(sample, orders=("one",), queries=queries, logged=each) for each in (log, None))
    assert with_log.logged is None
    assert predicted(with_log, Method.RQT).to_json() == predicted(without, Method.RQT).to_json()


def test_a_log_is_trained_on():
    sample, some = pairs(400), pairs(100, seed=9)
    one, two = (trial(sample, orders=("one",), logged=log) for log in (Pairs(old=some.old, new=some.new), None))
    for method in (Method.RQT, Method.RM):
        assert predicted(one, method).fitted.reverse.to_bytes() != predicted(two, method).fitted.reverse.to_bytes()
    assert predicted(two, Method.RQT).logged == 0


def test_the_candidates_are_methods_that_differ_in_what_they_need():
    forms = (Method.PROCRUSTES, Method.RIDGE, Method.CENTRED, Method.NEIGHBOURS)
    assert (Method.NAIVE, Method.IDENTITY, *forms, Method.BLEND, Method.RQT, Method.RM) == CANDIDATES


@pytest.mark.parametrize(("records", "tuned"), [(300, {"pull": 1.0}), (600, {})])
def test_with_labels_a_regression_beside_the_contrast_is_taken_where_it_is_worth_more(records, tuned):
    sample = pairs(records)
    ways = {pull: trial(sample, orders=("one",), settings=replace(QUICK, pull=pull)) for pull in (None, 0.0, 1.0)}
    told = {pull: predicted(each, Method.MCL) for pull, each in ways.items()}
    assert told[None].tuned == tuned
    assert told[None].merit == max(told[0.0].merit, told[1.0].merit)
    assert told[None].curve == told[tuned.get("pull", 0.0)].curve
    assert told[0.0].merit != told[1.0].merit


@pytest.mark.parametrize("metric", [Metric.COSINE, Metric.L2])
def test_lifted_records_are_measured_as_the_one_leg_that_serves_them(metric):
    """They are in one collection, whose distances do not show where a vector came from."""
    made = trial(pairs(600), orders=("one",), old_metric=metric, new_metric=metric)
    told = predicted(made, Method.FCT)
    assert told.calibrations == (None, None)
    assert not told.calibrated
    stage = made._parts_by_order["one"]
    assert told.curve.map == stage.judge.curve(told.fitted).map
    tuning = made.measure(told.fitted, "one").tuning
    assert [each.means for each in tuning] == [half.curve(told.fitted).map for half in stage.halves]


@pytest.mark.parametrize(
    ("gallery", "way_out"),
    [(4, "measure on; use the method naive"), (400, "measure on; sample 60 or more, or use the method naive")],
)
def test_a_sample_of_a_few_records_is_refused_with_a_way_out_that_exists(gallery, way_out):
    """A gallery of four records cannot give a sample of sixty."""
    with pytest.raises(PlanRefused, match=way_out):
        trial(pairs(4), gallery=gallery)
