"""Whether a candidate keeps the promise that quality never falls."""

from __future__ import annotations

from typing import Literal

from rmvdb.learning.method import Method
from rmvdb.planning import quality
from rmvdb.planning.curve import Course, Curve
from rmvdb.planning.objective import Objective
from rmvdb.planning.quality import Floats
from rmvdb.planning.trial import Candidate

#: A fall of less than half a point is not worth a warning.
TOLERATED_FALL = 0.005

Verdict = tuple[Literal["ok", "warn", "refuse"], str]


def verdict_of(
    candidate: Candidate,
    measured: Curve,
    ends: tuple[Floats, Floats],
    neighbours: tuple[Course, Course] | None,
    *,
    objective: Objective,
    labelled: bool,
    before: str,
    seed: int,
) -> Verdict:
    """Judge by promise 7 of the design: M_0 ≥ M_old, M_t rises, M_1 ≥ M_new, each within the noise of the sample.

    `ends`: the objective at the start less the old model's, and at the end less the new model's, (Q,) each. `neighbours`:
    recall@10 of the new model's own neighbours by the candidate and by `naive`, if labels decide the rest. Labels are a
    claim: what was learned from them is refused if it loses by the neighbours.
    """
    method, without = candidate.method, _without(candidate, labelled=labelled)
    (low, high), (_, end_high) = (quality.bootstrap(values, seed=seed) for values in ends)
    since = f"until t = {candidate.switch:g} both models embed each query: " if candidate.switch else ""
    span = f"{objective} at the start {_points(low)} to {_points(high)} points against {before}"
    if high < 0:
        return "refuse", f"{since}{method} would start below {before} ({span}){without}; the method naive would not"
    if lost := _lost(candidate, neighbours, seed):
        return "refuse", lost
    if end_high < 0:
        lost = f"{_points(quality.mean(ends[1]))} points of {objective}"
        return "warn", f"{since}{method} would end below the new model ({lost}); the method {method.headless} would not"
    if low < 0:
        return "warn", f"{since}{method} may start below {before} ({span}){without}; the method naive would not"
    if lost := _fallen(measured, objective, seed):
        return (
            "warn",
            f"{since}{method} would fall by {lost} on its way{without}; another order, or the method {_other(method)}, may not",
        )
    return "ok", f"{since}{method} starts no lower than {before}, rises, and ends no lower than the new model{without}"


def _without(candidate: Candidate, *, labelled: bool) -> str:
    if candidate.method is candidate.asked:
        return ""
    why = "no ρ was shown to keep the new model's quality" if labelled else "ρ needs labels"
    return f" ({candidate.method} instead of {candidate.asked}: {why})"


def _lost(candidate: Candidate, neighbours: tuple[Course, Course] | None, seed: int) -> str:
    """Say how much of the new model's own neighbourhoods is lost by a candidate that labels or a ρ have shaped."""
    if neighbours is None or not candidate.method.contrasts:
        return ""
    own, naive = neighbours
    for at, where in ((0, "start"), (-1, "end")):
        added = own.values[at] - naive.values[0]  # (Q,) against the old model alone
        if quality.bootstrap(added, seed=seed)[1] < 0:
            recalls = f"{100 * quality.mean(own.values[at]):.1f}, old {100 * quality.mean(naive.values[0]):.1f}"
            return (
                f"{candidate.method} gains by the labels, but would {where} further from the new model's own neighbours than the "
                f"old model is (recall@10 {recalls}): the labels say little about what searches want; leave --labels out, or "
                "give --queries with answers"
            )
    return ""


def _fallen(measured: Curve, objective: Objective, seed: int) -> str:
    """Name the falls of the curve, in points, that are more than chance and worth a warning."""
    courses = [(name, measured.course(name)) for name in dict.fromkeys((objective, Objective.CMC))]
    falls = [(name, quality.largest_fall(course.means), course.values) for name, course in courses]
    large = [(name, fall, values) for name, fall, values in falls if fall > TOLERATED_FALL]
    sure = [(name, fall) for name, fall, values in large if fall > quality.fall_by_chance(values, seed=seed)]
    return " and ".join(f"{100 * fall:.1f} points of {name}" for name, fall in sure)


def _other(method: Method) -> Method:
    return Method.RM if method is Method.NAIVE else Method.NAIVE


def _points(share: float) -> str:
    return f"{100 * share:+.1f}"
