"""What is chosen, refused and said if a model is worse, a fall decides, or a compatible model is not shown to be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rmvdb.learning.method import Fitted, Method
from rmvdb.planning.choose import chosen, preferred
from rmvdb.planning.curve import TS, Course
from rmvdb.planning.objective import Objective
from rmvdb.planning.prediction import Prediction, predict
from rmvdb.planning.split import split
from rmvdb.planning.trial import Candidate, Measured, Trial
from tests.support.two_spaces import COSINE, QUICK, pairs


def tried(method: Method, means: list[float], *, seed: int = 0, twice: bool = False) -> Candidate:
    """Return a candidate whose mean course this is. Its queries differ by chance."""
    noise = 0.02 * np.random.default_rng(seed).normal(size=200)
    course = Course(ts=TS, values=np.array(means)[:, None] + (noise - noise.mean())[None])
    fitted = Fitted(reverse=None if twice else object(), blend=0.5 if twice else None)  # type: ignore[arg-type]
    measured = Measured(fitted=fitted, calibrations=(None, None), tuning=(course,), show=lambda: None)  # type: ignore[arg-type, return-value]
    return Candidate(method=method, asked=method, order="one", measured=measured)


def test_a_cheaper_candidate_whose_curve_falls_is_not_within_the_noise_of_one_that_rises() -> None:
    rising = [0.55 + 0.01 * at for at in range(len(TS))]
    falling = rising[::-1]
    blend, centred = tried(Method.BLEND, rising, twice=True), tried(Method.CENTRED, falling)
    level = tried(Method.CENTRED, [float(np.mean(rising))] * len(TS))

    assert next(preferred([blend, centred], objective=Objective.MAP, seed=0))[0] is blend
    assert next(preferred([blend, level], objective=Objective.MAP, seed=0))[0] is level


def verdicts(**given: str) -> Any:
    made = predict(trial := Trial(pairs(300), settings=QUICK, **COSINE), trial.candidate(Method.NAIVE, "random"))  # type: ignore[arg-type]

    def told(candidate: Candidate) -> Prediction:
        return replace(made, method=candidate.method, verdict=given.get(candidate.method, "ok"))  # type: ignore[arg-type]

    return told


@pytest.mark.parametrize(
    ("given", "method", "says"),
    [
        ({}, Method.IDENTITY, "declared to be compatible with the old one, so nothing is trained"),
        ({"identity": "warn"}, Method.IDENTITY, "so nothing is trained"),
        ({"identity": "refuse"}, Method.NAIVE, "declared to be compatible, but would start below the old one"),
    ],
)
def test_the_best_way_of_a_declared_model_is_taken_unless_it_is_measured_to_be_worse(
    given: dict[str, str], method: Method, says: str
) -> None:
    worst, best = (tried(Method.IDENTITY, [level] * len(TS)) for level in (0.3, 0.4))
    found = [tried(Method.NAIVE, [0.5] * len(TS), twice=True), worst, best]
    looked: list[Candidate] = []

    def told_of(candidate: Candidate) -> Prediction:
        looked.append(candidate)
        return verdicts(**given)(candidate)  # type: ignore[no-any-return]

    told = chosen(found, told_of, objective=Objective.MAP, declared=True, seed=0)

    assert looked[0] is best
    assert told.method is method
    assert says in told.choice


def test_a_new_model_that_is_worse_is_named_and_gains_nothing() -> None:
    sample = pairs(600)
    worse = replace(sample, old=sample.new, new=sample.old)
    made = Trial(worse, settings=QUICK, **COSINE)  # type: ignore[arg-type]
    told = predict(made, made.candidate(Method.NAIVE, "random"))

    assert told.verdict == "warn"
    assert "the new model itself is worse than" in told.reason
    assert "no method or order changes that" in told.reason
    assert np.isnan(told.gain)


def test_only_small_classes_are_held_out_whole() -> None:
    sample = pairs(2000)
    labels = np.concatenate([np.zeros(1400, np.int64), 1 + np.arange(600) % 120])
    for seed in range(6):
        train, check, judge = split(replace(sample, labels=labels), seed=seed)
        assert 1000 < len(train) < 1400
        for held in (check, judge):
            assert 0.1 < (labels[held] == 0).sum() / 1400 < 0.3  # the large class is in every part
        small = [set(labels[held][labels[held] > 0].tolist()) for held in (train, check, judge)]
        assert len(set.union(*small)) == sum(map(len, small))
