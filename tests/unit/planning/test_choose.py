"""What stands in a row is what a slow search finds, and what is recommended is worth most."""

import json
from dataclasses import replace

import numpy as np
import pytest

from rmvdb.errors import UsageError
from rmvdb.learning import geometry
from rmvdb.learning.method import Method, Pairs
from rmvdb.planning import choose, quality
from rmvdb.planning.choose import CANDIDATES, chosen, compare, recommend, with_order
from rmvdb.planning.predict import Trial
from rmvdb.planning.simulate import Queries
from rmvdb.types import Metric
from tests.unit.planning.test_simulate import COSINE, QUICK, pairs, strangers

#: What can be compared of two models whose spaces differ.
TRAINED = tuple(method for method in CANDIDATES if method is not Method.IDENTITY)


def kin(n=300):
    """A new model that was trained to be comparable with the old one, whose vectors are noisier."""
    sample = pairs(n, noise=0.0)
    noise = np.random.default_rng(7).normal(size=sample.old.shape)
    return replace(sample, old=(sample.old + 4 * noise).astype(np.float32), new=sample.old)


def trial(sample=None, orders=("one", "two"), **options):
    sample = pairs(300) if sample is None else sample
    rng = np.random.default_rng(3)
    return Trial(
        sample, confidences={name: rng.random(len(sample)) for name in orders}, **{"settings": QUICK, **COSINE, **options}
    )


@pytest.fixture(scope="module")
def found():
    made = trial()
    return made, compare(made, [Method.NAIVE, Method.RQT, Method.RM])


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


def test_the_numbers_of_a_row_are_those_of_a_slow_search(found):
    made, table = found
    row = next(row for row in table.rows if (row.name, row.order) == ("rqt", "two"))
    fitted, judge = made.fitted(Method.RQT)[1], made._parts_by_order["two"].judge
    calibrations = made.measure("rqt", fitted, "two").calibrations
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


def test_methods_that_come_down_to_the_same_are_trained_and_told_once():
    said = []
    made = trial(pairs(300, labels=False), progress=lambda step, done, total: said.append(step))
    table = compare(made, [method for method in Method if method not in (Method.IDENTITY, Method.FCT)])
    assert {row.name for row in table.rows if row.verdict} == {"naive", "rqt", "cl-s", "mcl"}
    assert {step for step in said if "training" in step} == {"training rqt", "training cl-s", "training mcl"}
    assert table.relevance == "neighbours"


def test_a_comparison_is_plain_json(found):
    text = json.dumps(found[1].to_json(), allow_nan=False)
    assert json.loads(text)["recommended"]["method"] == found[1].recommended.method
    assert json.loads(text)["evaluated"] == found[0].evaluated


# --- the recommendation -----------------------------------------------------------------------------------------------


def told(method, merit, *, verdict="ok", better=0.0, order="one"):
    """A prediction whose measured queries are better than the naive ones by so much, on average."""
    naive = trial().predict(Method.NAIVE)
    noise = 0.01 * np.random.default_rng(0).normal(size=naive.measured.precision.shape[1])
    curve = replace(naive.measured, precision=naive.measured.precision + better + noise * bool(better))
    return replace(naive, method=method, merit=merit, verdict=verdict, measured=curve, order=order)


def test_what_is_worth_most_is_recommended_and_the_next_named():
    best = recommend([told(Method.NAIVE, 0.9), told(Method.RQT, 1.1, better=0.2), told(Method.RM, 1.3, better=0.4)], seed=0)
    assert best.method is Method.RM
    assert "rm is worth most" in best.choice
    assert "(AUC of mAP + CMC@1 130.0, less its falls; rqt 110.0)" in best.choice
    assert "noise" not in best.choice


def test_a_simpler_one_within_the_noise_is_named_and_not_taken():
    best = recommend([told(Method.NAIVE, 0.9), told(Method.RQT, 1.29, better=0.4), told(Method.RM, 1.3, better=0.4001)], seed=0)
    assert best.method is Method.RM
    assert "rqt, which is simpler, lies within the noise of the measured queries" not in best.choice  # surely better, by a hair
    best = recommend([told(Method.RQT, 1.29, better=0.4), told(Method.RM, 1.3, better=0.39)], seed=0)
    assert best.method is Method.RM
    assert "rqt, which is simpler, lies within the noise of the measured queries (-1.0 to -1.0)" in best.choice


def test_after_a_tie_the_one_that_embeds_each_query_once_is_taken_and_said():
    rng = np.random.default_rng(0)
    naive = replace(told(Method.NAIVE, 1.31), chosen_by=1.31 + 0.1 * rng.normal(size=200))
    near, far = (replace(told(Method.RM, 1.3), chosen_by=naive.chosen_by - by + 0.01 * rng.normal(size=200)) for by in (0.0, 0.1))
    taken = recommend([naive, near], seed=0)
    assert taken.method is Method.RM
    assert "naive is worth most" in taken.choice
    assert "rm is taken: it embeds each query once, not twice, and lies within the noise" in taken.choice
    assert recommend([naive, far], seed=0).method is Method.NAIVE
    assert recommend([naive, replace(near, verdict="refuse")], seed=0).method is Method.NAIVE
    dearer = replace(told(Method.RM, 1.32), chosen_by=naive.chosen_by, switch=0.4)
    assert recommend([dearer, near], seed=0).switch is None


def test_what_would_start_lower_is_not_recommended_and_said():
    best = recommend([told(Method.NAIVE, 0.9), told(Method.RM, 1.3, verdict="refuse")], seed=0)
    assert best.method is Method.NAIVE
    assert "rm would start below the present quality" in best.choice
    assert recommend([told(Method.RQT, 0.9, verdict="refuse")], seed=0).verdict == "refuse"


def test_what_a_simulation_recommends_is_what_a_plan_chooses_in_its_best_order(found):
    made, table = found
    best = table.recommended
    assert best.method is chosen(made, TRAINED).method
    assert best.merit == max(row.merit for row in table.rows if row.name == best.method)


def test_an_order_that_is_worth_more_is_taken_and_a_method_that_is_no_candidate_named():
    first = replace(told(Method.RQT, 1.0), choice="rqt is worth most")
    others = [first, told(Method.RQT, 1.2, order="two"), told(Method.NAIVE, 1.1), told(Method.FCT, 1.4, order="two")]
    best = with_order(first, others)
    assert (best.method, best.order) == (Method.RQT, "two")
    assert (
        "rqt is worth most; rqt is worth more in the order two (120.0; one 100.0); fct is worth more still (140.0)" in best.choice
    )
    assert best.choice.endswith(": --method fct --order two")
    assert with_order(first, others[:1]) == first


def test_a_merit_that_is_not_a_number_is_worth_nothing():
    assert recommend([told(Method.NAIVE, float("nan")), told(Method.RQT, 0.1)], seed=0).method is Method.RQT


def test_strangers_are_served_naively():
    made = trial(strangers(), orders=("one",))
    best = chosen(made, TRAINED)
    assert best.method is Method.NAIVE
    assert best.verdict != "refuse"
    assert chosen(made, TRAINED[1:]).method is not Method.NAIVE


def test_a_comparable_model_is_found_out_without_being_told():
    made = trial(kin(), orders=("one",))
    found = made.predict(Method.IDENTITY)
    assert found.verdict == "ok"
    assert found.curve.map[0] > found.map_old
    assert "identity" in chosen(made, CANDIDATES).choice
    table = compare(made, [Method.NAIVE, Method.IDENTITY])
    assert table.recommended.method is Method.IDENTITY


def test_a_model_declared_comparable_is_taken_at_its_word_unless_measured_to_be_worse():
    taken = trial(kin(), orders=("one",))
    best = chosen(taken, CANDIDATES, declared=True)
    assert (best.method, best.verdict, best.evaluated) == (Method.IDENTITY, "ok", taken.evaluated)
    assert "declared to be compatible with the old one, so nothing is trained" in best.choice
    assert taken._fits.keys() == {Method.IDENTITY}

    refuted = chosen(trial(strangers(), orders=("one",)), CANDIDATES, declared=True)
    assert refuted.method is Method.NAIVE
    assert refuted.choice.startswith(
        "the new model is declared to be compatible, but would start below the old one; naive is worth"
    )


def test_of_strangers_nobody_says_that_they_are_not_comparable():
    made = trial(strangers(), orders=("one",))
    assert made.predict(Method.IDENTITY).verdict == "refuse"
    assert "identity" not in chosen(made, CANDIDATES).choice


def test_too_few_to_choose_by_is_the_last_candidate():
    best = chosen(trial(pairs(120), orders=("one",)), TRAINED)
    assert best.asked is Method.RM
    assert "too few" in best.choice


@pytest.mark.parametrize("declared", [False, True])
@pytest.mark.parametrize("records", [120, 300])
def test_of_strangers_nothing_that_is_refused_is_recommended_while_there_is_another_and_nothing_else_fails(declared, records):
    made = trial(strangers(records), orders=("one",))
    alone = compare(made, [Method.IDENTITY], declared=declared).recommended
    assert (alone.method, alone.verdict) == (Method.IDENTITY, "refuse")
    several = compare(made, [Method.NAIVE, Method.IDENTITY, Method.RM], declared=declared).recommended
    assert several.verdict != "refuse"
    assert compare(made, [Method.NAIVE], declared=True).recommended.method is Method.NAIVE


def test_what_cannot_be_served_is_measured_and_not_recommended():
    table = compare(trial(strangers(), orders=("one",)), [Method.NAIVE, Method.RQT], unable={Method.NAIVE})
    assert table.recommended.method is Method.RQT
    assert {"naive", "rqt"} <= {row.name for row in table.rows}


def test_no_measured_record_has_a_say_in_what_is_chosen():
    sample = pairs(300)
    judge = trial(sample, orders=("one",))._parts_by_order["one"].judge
    measured = np.flatnonzero((sample.new[:, None] == judge.pairs.new[None]).all(2).any(1))
    changed = replace(sample, new=sample.new.copy())
    changed.new[measured] = changed.new[measured][::-1]
    trials = [trial(each, orders=("one",)) for each in (sample, changed)]
    for method in TRAINED:
        one, two = (each.predict(method) for each in trials)
        assert (one.method, one.merit) == (two.method, two.merit)
        assert one.curve != two.curve


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
    told = made.predict(Method.RM)
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
    assert [each.precision.shape[1] for each in made.naive("one").tuning] == [len(half.pairs) for half in stage.halves]


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
        assert made.predict(Method.RQT).to_json()["logged"] == len(made.logged)


def test_a_log_of_nothing_but_measured_queries_changes_nothing():
    sample = pairs(400)
    queries = asked(sample)
    log = Pairs(old=queries.old, new=queries.new)
    with_log, without = (trial(sample, orders=("one",), queries=queries, logged=each) for each in (log, None))
    assert with_log.logged is None
    assert with_log.predict(Method.RQT).to_json() == without.predict(Method.RQT).to_json()


def test_a_log_is_trained_on():
    sample, some = pairs(400), pairs(100, seed=9)
    one, two = (trial(sample, orders=("one",), logged=log) for log in (Pairs(old=some.old, new=some.new), None))
    for method in (Method.RQT, Method.RM):
        assert one.predict(method).fitted.reverse.to_bytes() != two.predict(method).fitted.reverse.to_bytes()
    assert two.predict(Method.RQT).logged == 0


def test_the_candidates_are_methods_that_differ_in_what_they_need():
    assert CANDIDATES == (Method.NAIVE, Method.IDENTITY, Method.RQT, Method.RM)
    assert choose.LEAST_TO_CHOOSE <= 80


@pytest.mark.parametrize(("records", "tuned"), [(300, {"pull": 1.0}), (600, {})])
def test_with_labels_a_regression_beside_the_contrast_is_taken_where_it_is_worth_more(records, tuned):
    sample = pairs(records)
    ways = {pull: trial(sample, orders=("one",), settings=replace(QUICK, pull=pull)) for pull in (None, 0.0, 1.0)}
    told = {pull: each.predict(Method.MCL) for pull, each in ways.items()}
    assert told[None].tuned == tuned
    assert told[None].merit == max(told[0.0].merit, told[1.0].merit)
    assert told[None].curve == told[tuned.get("pull", 0.0)].curve
    assert told[0.0].merit != told[1.0].merit


@pytest.mark.parametrize("metric", [Metric.COSINE, Metric.L2])
def test_what_is_lifted_is_measured_as_the_one_leg_that_it_is_served_as(metric):
    """In one collection, whose distances nobody can tell apart by where a vector came from."""
    made = trial(pairs(600), orders=("one",), old_metric=metric, new_metric=metric)
    told = made.predict(Method.FCT)
    assert told.calibrations == (None, None)
    assert not told.calibrated
    stage = made._parts_by_order["one"]
    assert told.curve.map == stage.judge.curve(told.fitted).map
    tuning = made.measure(Method.FCT, told.fitted, "one").tuning
    assert [each.map for each in tuning] == [half.curve(told.fitted).map for half in stage.halves]
