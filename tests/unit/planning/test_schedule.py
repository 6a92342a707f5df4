"""Two embedders first, one from the moment on at which that costs nothing any more."""

from dataclasses import replace

import numpy as np
import pytest

from rmvdb.learning.method import Fitted
from rmvdb.planning.curve import TS, Curve
from rmvdb.planning.objective import Objective
from rmvdb.planning.trial import Measured


def measured(*maps):
    """One query whose quality goes like this over t."""
    rows = np.array(maps)[:, None]
    curve = Curve(ts=tuple(TS), precision=rows, top1=rows, top5=rows, recall=rows, ndcg=rows)
    return Measured(fitted=Fitted(), calibrations=(None, None), tuning=(curve.course(Objective.MAP),), show=lambda: curve)


BOTH = measured(0.40, 0.41, 0.42, 0.43, 0.45, 0.50, 0.55, 0.60, 0.65, 0.75, 0.90)
CROSSING = measured(0.30, 0.32, 0.35, 0.38, 0.46, 0.53, 0.60, 0.65, 0.70, 0.80, 0.90)
BELOW = measured(0.30, 0.32, 0.35, 0.38, 0.40, 0.45, 0.50, 0.55, 0.60, 0.70, 0.90)


def test_one_encoder_serves_from_the_moment_on_at_which_it_is_better():
    assert BOTH.crossed_by(CROSSING) == 0.4
    assert BOTH.crossed_by(BELOW) is None


def test_a_step_down_is_not_taken_for_what_comes_later():
    dip = measured(0.30, 0.32, 0.35, 0.48, 0.20, 0.20, 0.60, 0.65, 0.70, 0.80, 0.90)
    assert BOTH.crossed_by(dip) == 0.6


def test_the_schedule_has_the_quality_of_the_one_and_then_of_the_other():
    scheduled = BOTH.until(0.4, CROSSING)
    assert scheduled.curve.map == [*BOTH.curve.map[:4], *CROSSING.curve.map[4:]]
    assert scheduled.curve.cmc == [*BOTH.curve.cmc[:4], *CROSSING.curve.cmc[4:]]
    assert scheduled.merit > max(BOTH.merit, CROSSING.merit)
    assert scheduled.fitted is CROSSING.fitted


def test_nothing_is_chosen_by_a_part_that_is_too_small():
    small = replace(CROSSING, tuning=())
    assert small.merit == -np.inf
    assert BOTH.crossed_by(small) is None
    assert small.crossed_by(BOTH) is None


@pytest.mark.parametrize("seed", range(20))
def test_no_other_moment_would_be_worth_more(seed):
    both, one = (np.random.default_rng(seed).random((2, len(TS)))).cumsum(axis=1) / len(TS)

    def worth(values):
        fall = max(values[early] - values[late] for late in range(len(TS)) for early in range(late + 1))
        return sum(values) - (values[0] + values[-1]) / 2 - len(TS[1:]) * fall

    def at(moment):
        return worth([(both if t < moment else one)[step] for step, t in enumerate(TS)])

    best = max(TS[1:-1], key=at)
    assert measured(*both).crossed_by(measured(*one)) == (best if at(best) > worth(both) else None)
