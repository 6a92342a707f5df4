"""Whether a candidate keeps the promise that quality never falls."""

from __future__ import annotations

from typing import Literal

import numpy as np

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
    naive: Curve,
    neighbours: tuple[Course, Course] | None,
    *,
    objective: Objective,
    labelled: bool,
    before: str,
    seed: int,
) -> Verdict:
    """Judge by promise 7 of the design: M_0 ≥ M_old, M_t rises, M_1 ≥ M_new, each within the noise of the sample.

    `naive`, the same with both models' own queries, begins with the old model and ends with the new one. `neighbours`: recall@10
    of the new model's own neighbours by the candidate and by `naive`, if labels decide the rest. Labels may be wrong: a transform
    that learned from them is refused if it loses by the neighbours. A fall that stays above the old model is named and is no
    warning.
    """
    method, without = candidate.method, _without(candidate, labelled=labelled)
    course, base = measured.course(objective), naive.course(objective)
    start, end = course.values[0] - base.values[0], course.values[-1] - base.values[-1]
    (low, high), (_, end_high) = (quality.bootstrap(values, seed=seed) for values in (start, end))
    since = f"until t = {candidate.switch:g} both models embed each query: " if candidate.switch else ""
    other = "the method naive without --rescore" if candidate.rescore else "the method naive"  # it starts where the old model is
    span = f"{objective} at the start {_points(low)} to {_points(high)} points against {before}"
    if high < 0:
        return "refuse", f"{since}{method} would start below {before} ({span}){without}; {other} would not"
    if lost := _lost(candidate, neighbours, seed):
        return "refuse", lost
    if _ends_below(course.values[-1] - base.values[0], seed) and _ends_below(base.values[-1] - base.values[0], seed):
        worse = f"{_points(quality.mean(base.values[-1] - base.values[0]))} points of {objective}"
        return "warn", f"the new model itself is worse than {before} ({worse}), and no method or order changes that{without}"
    if end_high < 0:
        lost = f"{_points(quality.mean(end))} points of {objective}"
        return "warn", f"{since}{method} would end below the new model ({lost}); the method {method.headless} would not"
    if low < 0:
        return "warn", f"{since}{method} may start below {before} ({span}){without}; {other} would not"
    falls = _fallen(measured, naive, objective, seed)
    if below := [words for words, is_below in falls if is_below]:
        return (
            "warn",
            f"{since}{method} would fall by {' and '.join(below)} on its way, below {before}{without}; another order, or the "
            f"method {_other(method)}, may not",
        )
    rises = f"falls by {' and '.join(words for words, _ in falls)} on its way, but not below that" if falls else "rises"
    return "ok", f"{since}{method} starts no lower than {before}, {rises}, and ends no lower than the new model{without}"


def _ends_below(difference: Floats, seed: int) -> bool:
    return quality.bootstrap(difference, seed=seed)[1] < 0


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


def _fallen(measured: Curve, naive: Curve, objective: Objective, seed: int) -> list[tuple[str, bool]]:
    """Name the falls of the curve that are more than chance, in points, and whether each leads surely below the old model."""
    falls = []
    for name in dict.fromkeys((objective, Objective.CMC)):
        course, old = measured.course(name), naive.course(name).values[0]
        fall = quality.largest_fall(course.means)
        if fall > max(TOLERATED_FALL, quality.fall_by_chance(course.values, seed=seed)):
            lowest = course.values[_lowest_after_a_fall(course.means)]
            falls.append((f"{100 * fall:.1f} points of {name}", quality.bootstrap(lowest - old, seed=seed)[1] < 0))
    return falls


def _lowest_after_a_fall(means: list[float]) -> int:
    """Return the moment at which a curve lies furthest below its own earlier height."""
    heights = np.maximum.accumulate(means)
    return int(np.argmax(heights - np.array(means)))


def _other(method: Method) -> Method:
    return Method.RM if method is Method.NAIVE else Method.NAIVE


def _points(share: float) -> str:
    return f"{100 * share:+.1f}"
