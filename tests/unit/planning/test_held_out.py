"""The held-out parts can tell a good map from a bad one, and share no query."""

from dataclasses import replace

import numpy as np
import pytest

from rmvdb.errors import PlanRefused
from rmvdb.learning import geometry
from rmvdb.learning.method import Fitted, Method, Pairs
from rmvdb.planning.held_out import LEAST_QUERIES, SAME
from rmvdb.planning.part import Queries
from rmvdb.planning.split import split
from rmvdb.planning.trial import LEAST_LOGGED, Trial
from rmvdb.types import Metric
from tests.support.two_spaces import COSINE, QUICK, pairs


def trial(sample, **options):
    return Trial(sample, **{"settings": QUICK, **COSINE, **options})


# --- labels -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("records", "classes"), [(60, 6), (70, 4), (150, 8), (120, 2)])
def test_no_held_out_part_is_of_one_class(records, classes, seed):
    sample = pairs(records, classes=classes, seed=seed)
    _, *held_out = split(sample, seed=seed)
    assert [len(np.unique(sample.labels[part])) > 1 for part in held_out] == [True, True]
    stranger = replace(sample, old=np.random.default_rng(1).normal(size=sample.old.shape).astype(np.float32))
    assert trial(stranger).naive("random").curve.map[0] < 1  # some order of the records is wrong


@pytest.mark.parametrize("others", [0, 1])
def test_one_label_everywhere_is_refused(others):
    sample = replace(pairs(200), labels=np.array(["shoe"] * (200 - others) + ["hat"] * others))
    with pytest.raises(PlanRefused, match="Hardly any record has another label than 'shoe'; leave --labels out"):
        trial(sample)


@pytest.mark.parametrize("shared", [0, 40, 60])  # six can be measured by; sixteen, but half of the choosers by none
def test_labels_that_a_handful_of_records_share_are_refused(shared):
    number = np.arange(600)
    sample = replace(pairs(600), labels=np.where(number < shared, number // 2, number))
    with pytest.raises(PlanRefused, match="Too few records of the sample share a label to measure anything"):
        trial(sample)


def test_records_without_another_of_their_label_do_not_count_as_measured():
    number = np.arange(600)
    made = trial(replace(pairs(600), labels=np.where(number < 300, number // 2, number)))
    relevance = made.judge("random").query_set.relevance
    assert LEAST_QUERIES <= made.evaluated == relevance.any(axis=1).sum() < len(relevance)
    assert np.isfinite(made.naive("random").merit)


def test_records_that_an_earlier_plan_saw_leave_too_few_to_measure_by():
    with pytest.raises(PlanRefused, match="records of the sample are too few to measure by; raise --sample, or add records"):
        trial(pairs(200, labels=False), seen=np.arange(200) >= 10)


def test_a_sample_of_nothing_but_answers_is_refused_and_the_way_out_named():
    sample = pairs(100, labels=False)
    relevance = np.zeros((20, 100), dtype=bool)
    relevance[np.arange(100) % 20, np.arange(100)] = True
    queries = Queries(old=sample.old[:20], new=sample.new[:20], relevance=relevance, leave_out=np.zeros_like(relevance))
    with pytest.raises(PlanRefused, match=r"Nearly all records of the sample are answers.*raise --sample or --minutes"):
        trial(sample, queries=queries)


# --- a log of queries -------------------------------------------------------------------------------------------------


def log(distinct, times=3):
    """Queries that were each logged several times. An item's vector differs a little from batch to batch."""
    once = pairs(distinct, labels=False, seed=9)
    noise = 1 + 1e-4 * np.random.default_rng(0).normal(size=(times, 1, 1))
    return Pairs(old=np.tile(once.old, (times, 1)), new=(noise * once.new).reshape(-1, once.new.shape[1]).astype(np.float32))


def test_a_query_that_was_logged_several_times_is_in_one_part():
    made = trial(pairs(400, labels=False), logged=log(250))
    assert made.by_log
    parts = made.parts("random")
    check, judge, train = parts.check.query_set.new, parts.judge.query_set.new, made.logged.new
    assert (len(check), len(judge), len(train)) == (50, 50, 450)
    for one, other in ((check, judge), (check, train), (judge, train)):
        assert geometry.distances(one, other, metric=Metric.COSINE).min() > SAME
    for one in (check, judge):
        apart = geometry.distances(one, one, metric=Metric.COSINE)
        np.fill_diagonal(apart, np.inf)
        assert apart.min() > SAME


def test_a_few_queries_that_were_logged_often_are_few():
    made = trial(pairs(400, labels=False), logged=log(LEAST_LOGGED - 1))
    assert not made.by_log
    assert len(made.logged) == 3 * (LEAST_LOGGED - 1)


def test_each_half_of_the_part_to_choose_by_has_its_own_logged_queries():
    made = trial(pairs(400, labels=False), logged=log(250))
    parts = made.parts("random")
    one, two = (set(map(bytes, half.query_set.new)) for half in parts.halves)
    assert not one & two
    assert one | two == set(map(bytes, parts.check.query_set.new))
    for half in parts.halves:
        assert half.query_set.relevance.shape == (25, len(half.pairs))
        assert half.query_set.answerable == 25
    assert len(made.measure(Fitted(), "random").chosen_by) == 50
    assert np.isfinite(made.candidate(Method.NAIVE).measured.chosen_by).all()
