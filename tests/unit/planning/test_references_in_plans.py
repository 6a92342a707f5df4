"""Legs whose queries differ in how near their nearest are: a plan compares each query with records that it knows in both."""

from dataclasses import replace

import numpy as np

from rmvdb.learning import geometry
from rmvdb.learning.method import Fitted, Method, Pairs
from rmvdb.learning.references import References
from rmvdb.planning.candidates import Choice, candidates, sure_to_start
from rmvdb.planning.trial import Trial
from rmvdb.types import Metric
from tests.support.two_spaces import COSINE, QUICK, spaces


def uneven(n=600, labels=None):
    """Two models, each of which packs other clusters tightly."""
    (_, old), (_, new) = spaces(queries=0, records=n, seed=3)
    return Pairs(old=old, new=new, labels=labels)


def trial(sample, **options):
    return Trial(sample, confidences={"one": np.random.default_rng(3).random(len(sample))}, settings=QUICK, **COSINE, **options)


def test_references_are_taken_where_one_map_for_all_queries_is_worth_less():
    made = trial(uneven())
    parts, fitted = made._parts_by_order["one"], Fitted()
    told = made.naive("one")
    assert isinstance(told.calibrations[0], References)
    assert told.calibrations[-1] is None

    def on_judged(calibrations):
        return parts.judge.course(made.objective, fitted, calibrations).means

    own, together = on_judged(told.calibrations), on_judged(parts.check.matched(fitted))
    assert np.mean(own) > np.mean(together) + 0.01, (own, together)


def test_no_record_that_is_measured_is_a_reference():
    sample = uneven()
    made = trial(sample)
    judged = {each.tobytes() for each in made._parts_by_order["one"].judge.pairs.old}
    (kept, _) = made.candidate(Method.NAIVE).measured.calibrations
    assert not judged & {each.tobytes() for each in kept.old}
    assert len(kept.old) == len(sample) - len(judged)


def test_a_part_ranks_by_the_scale_that_each_query_finds():
    made = trial(uneven())
    judge = made._parts_by_order["one"].judge
    kept, _ = calibrations = made.naive("one").calibrations
    asked = judge.query_set
    far = geometry.distances(asked.old, judge.pairs.old, metric=Metric.COSINE).astype(np.float64)
    each = kept.calibrations(asked.old, asked.new)
    d_old, d_new = judge.distances(Fitted(), calibrations)
    np.testing.assert_array_equal(d_old, np.stack([one.apply(row) for one, row in zip(each, far, strict=True)]))
    np.testing.assert_array_equal(d_new, geometry.distances(asked.new, judge.pairs.new, metric=Metric.COSINE))


def test_legs_of_unlike_metrics_get_one_map_for_all_queries():
    sample = uneven()
    made = Trial(replace(sample, new=2 * sample.new), settings=QUICK, old_metric=Metric.COSINE, new_metric=Metric.L2)
    assert not any(isinstance(each, References) for each in made.naive("random").calibrations)


def test_without_known_queries_a_blend_serves_only_if_its_best_hits_are_rescored():
    made = candidates(trial(uneven()), Choice(methods=(Method.NAIVE, Method.BLEND), rescore=(0, 20)))
    left = sure_to_start(made)
    assert {(each.method, bool(each.rescore)) for each in made} > {(each.method, bool(each.rescore)) for each in left}
    assert {each.method for each in left if not each.rescore} == {Method.NAIVE}
    assert Method.BLEND in {each.method for each in left if each.rescore}
    only = candidates(trial(uneven()), Choice(methods=(Method.BLEND,)))
    assert sure_to_start(only) == only


def test_without_known_queries_no_map_serves_alone():
    made = candidates(trial(uneven()), Choice(methods=(Method.NAIVE, Method.PROCRUSTES)))
    assert {each.method for each in sure_to_start(made)} == {Method.NAIVE}
    only = candidates(trial(uneven()), Choice(methods=(Method.PROCRUSTES,)))
    assert sure_to_start(only) == only  # it was asked for
