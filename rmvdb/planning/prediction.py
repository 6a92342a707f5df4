"""The effect of an upgrade by one candidate, measured on records that nothing was fitted or chosen on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from rmvdb.learning.method import Fitted, Method
from rmvdb.planning import quality
from rmvdb.planning.curve import Calibrations, Course, Curve, Summary, summary
from rmvdb.planning.objective import Objective
from rmvdb.planning.part import Part
from rmvdb.planning.trial import Candidate, Measured, Trial
from rmvdb.planning.verdict import TOLERATED_FALL, verdict_of

#: So many records are looked for by their own items.
SELF_FOUND = 300
#: The moments at which they are looked for.
MOMENTS = (0.0, 0.5, 1.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Beside:
    """A second measure beside the one to choose by: its values over t, and that of the old model alone. Shares of 1."""

    old: float
    ts: list[float]
    values: list[float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """The effect of an upgrade, measured on records that neither training nor calibration saw. Shares of 1."""

    #: The method that was fitted and measured. It may differ from the `asked` one.
    method: Method
    asked: Method
    verdict: Literal["ok", "warn", "refuse"]
    #: One sentence for people. If a way out is needed, it names one.
    reason: str
    #: Sentences about other things that fall. They stop nothing.
    warnings: list[str]
    #: Decides relevance: `answers` of the queries, `labels`, or `neighbours` by the new model.
    relevance: str
    #: The metric that it is chosen and judged by.
    objective: Objective
    #: Whether the sample has labels.
    labelled: bool
    calibrated: bool
    #: Numbers of pairs trained on, calibrated on and measured on.
    trained: int
    held_out: int
    evaluated: int
    #: The objective by each model alone.
    old: float
    new: float
    map_old: float
    map_new: float
    cmc_old: float
    cmc_new: float
    #: The objective over t, the share of the way from the old to the new model that its area covers, and its largest fall.
    course: list[float]
    gain: float
    fall: float
    curve: Summary
    #: The same if both models embed each query.
    naive: Summary
    naive_course: list[float]
    naive_gain: float
    #: 95 % bootstrap intervals over queries of the objective: M_0 − M_old and M_1 − M_new.
    start: tuple[float, float]
    end: tuple[float, float]
    #: The share of queries that are right by the old model and wrong at t = 0.
    negative_flips: float
    #: recall@10 of the new model's own neighbours, if labels or answers decide relevance.
    neighbours: Beside | None
    #: The share of records that their own item finds first.
    self_found: Beside
    #: `Candidate.merit`, by which it is chosen.
    merit: float
    #: The backfill order that it was measured with.
    order: str
    #: How many candidates of the old collections each search rescores.
    rescore: int
    #: How many models embed a query until cut-over.
    extractions: int
    seed: int
    fitted: Fitted = field(repr=False)
    #: The rows of the pairs that it was trained on.
    seen: npt.NDArray[np.intp] = field(repr=False)
    calibrations: Calibrations = field(repr=False)
    measured: Curve = field(repr=False)
    #: Why it is this candidate, if that was left to rmvdb.
    choice: str = ""
    #: The settings that the part to choose by chose, such as the weight of a blend.
    tuned: Mapping[str, Any] = field(default_factory=dict)
    #: Number of logged queries that ψ was trained on, beside the pairs.
    logged: int = 0
    #: Whether other logged queries chose and measured, in place of records.
    by_log: bool = False
    #: From this t on ψ alone serves. Until then both models embed the queries, by `early`. None without a schedule.
    switch: float | None = None
    early: Fitted | None = field(default=None, repr=False)
    early_calibrations: Calibrations = field(default=(), repr=False)

    def to_json(self) -> dict[str, Any]:
        """Return everything but the fitted parts as JSON values, NaN as None."""
        plain = {one.name: getattr(self, one.name) for one in fields(self) if one.name not in _FITTED}
        nested = {name: asdict(plain[name]) for name in ("curve", "naive", "neighbours", "self_found") if plain[name]}
        cleaned: dict[str, Any] = finite({**plain, **nested, "tuned": dict(self.tuned)})
        return cleaned


_FITTED = ("fitted", "seen", "calibrations", "early", "early_calibrations", "measured")


def predict(trial: Trial, candidate: Candidate) -> Prediction:
    """Measure a candidate on the third part of the trial, and judge it.

    The prediction holds exactly the transforms that were measured. Nothing is fitted again afterwards.
    """
    found, naive = candidate.measured, trial.naive(candidate.order).curve
    curve, objective = found.curve, trial.objective
    course, base = curve.course(objective), naive.course(objective)
    start, end = course.values[0] - base.values[0], course.values[-1] - base.values[-1]
    neighbours = _neighbours(trial, candidate)
    self_found, lost = _self_found(trial, candidate)
    verdict, reason = verdict_of(
        candidate,
        curve,
        naive,
        neighbours if trial.relevance == "labels" else None,
        objective=objective,
        labelled=trial.labelled,
        before="the present quality" if trial.serves_several else "the old model",
        seed=trial.seed,
    )
    old, new = base.means[0], base.means[-1]
    return Prediction(
        method=candidate.method,
        asked=candidate.asked,
        verdict=verdict,
        reason=reason,
        warnings=[*lost, *_without_rescoring(trial, candidate, new - old)],
        relevance=trial.relevance,
        objective=objective,
        labelled=trial.labelled,
        calibrated=any(found.calibrations),
        trained=len(trial.train.pairs),
        logged=len(trial.logged or ()),
        held_out=trial.held_out,
        evaluated=trial.evaluated,
        old=old,
        new=new,
        map_old=naive.map[0],
        map_new=naive.map[-1],
        cmc_old=naive.cmc[0],
        cmc_new=naive.cmc[-1],
        course=course.means,
        gain=gain_of(course, old, new),
        fall=quality.largest_fall(course.means),
        curve=summary(curve, old=naive.map[0], new=naive.map[-1]),
        naive=summary(naive, old=naive.map[0], new=naive.map[-1]),
        naive_course=base.means,
        naive_gain=gain_of(base, old, new),
        start=quality.bootstrap(start, seed=trial.seed),
        end=quality.bootstrap(end, seed=trial.seed),
        negative_flips=quality.negative_flips(naive.top1[0], curve.top1[0]),
        neighbours=None
        if neighbours is None
        else Beside(old=quality.mean(neighbours[1].values[0]), ts=list(neighbours[0].ts), values=neighbours[0].means),
        self_found=self_found,
        merit=candidate.merit,
        order=candidate.order,
        rescore=candidate.rescore,
        extractions=candidate.extractions,
        seed=trial.seed,
        fitted=found.fitted,
        seen=trial.seen,
        calibrations=found.calibrations,
        measured=curve,
        tuned=candidate.settings,
        by_log=trial.by_log,
        switch=candidate.switch,
        early=None if candidate.early is None else candidate.early.fitted,
        early_calibrations=() if candidate.early is None else candidate.early.calibrations,
    )


def gain_of(course: Course, old: float, new: float) -> float:
    """Return the share of the way from the old to the new model that the area covers, NaN if the new model is no better."""
    if new <= old:  # there is nothing to gain
        return math.nan
    return quality.gain(quality.area(course.ts, course.means), old=old, new=new)


def _course(part: Part, candidate: Candidate, objective: Objective, ts: tuple[float, ...]) -> Course:
    """Return one metric of a candidate on a part, by its schedule if it has one."""

    def by(found: Measured) -> Course:
        return part.course(objective, found.fitted, found.calibrations, ts=ts, rescore=candidate.rescore)

    if candidate.early is None or candidate.switch is None:
        return by(candidate.measured)
    return by(candidate.early).until(candidate.switch, by(candidate.measured))


def _neighbours(trial: Trial, candidate: Candidate) -> tuple[Course, Course] | None:
    """Return recall@10 of the new model's own neighbours, by the candidate and by `naive`; None if those decide relevance."""
    if trial.relevance == "neighbours":
        return None
    part = trial.judge(candidate.order).by_records()
    naive = trial.naive(candidate.order)
    ts = candidate.measured.curve.ts
    return _course(part, candidate, Objective.RECALL, ts), part.course(Objective.RECALL, naive.fitted, naive.calibrations, ts=ts)


def _without_rescoring(trial: Trial, candidate: Candidate, gain: float) -> list[str]:
    """Return a warning if searches that find no time to rescore would start low or fall on the way, beyond the noise."""
    if not candidate.rescore:
        return []
    alone = replace(candidate, rescore=0)
    course = _course(trial.judge(candidate.order), alone, trial.objective, candidate.measured.curve.ts)
    naive = trial.naive(candidate.order).curve.course(trial.objective)
    searches = "searches that have no time to rescore (search.rescore_ms) would"
    begin = course.values[0] - naive.values[0]
    if quality.bootstrap(begin, seed=trial.seed)[1] < 0:
        return [f"{searches} start {100 * quality.mean(-begin):.1f} points of {trial.objective} below the model in service"]
    fall = quality.largest_fall(course.means)
    if fall <= max(TOLERATED_FALL, quality.fall_by_chance(course.values, seed=trial.seed)):
        return []
    return [
        f"{searches} fall by {100 * fall:.1f} points of {trial.objective} on their way, of {100 * gain:+.1f} between the models"
    ]


def _self_found(trial: Trial, candidate: Candidate) -> tuple[Beside, list[str]]:
    """Return how many records their own item finds first, and a warning if fewer than before, beyond the noise."""
    part, naive = trial.judge(candidate.order).of_themselves(SELF_FOUND), trial.naive(candidate.order)
    first = _course(part, candidate, Objective.CMC, MOMENTS).values  # (T, Q)
    before = part.course(Objective.CMC, naive.fitted, naive.calibrations, ts=(0.0,)).values[0]
    found = Beside(old=quality.mean(before), ts=list(MOMENTS), values=[quality.mean(row) for row in first])
    worst = int(np.argmin(found.values))
    if quality.bootstrap(first[worst] - before, seed=trial.seed)[1] >= 0:
        return found, []
    return found, [
        f"at t = {MOMENTS[worst]:g} a record's own item finds it first in {100 * found.values[worst]:.0f} % of searches "
        f"({100 * found.old:.0f} % today)"
    ]


def finite(value: Any) -> Any:
    """Replace NaN and infinities, which JSON cannot hold, by None."""
    if isinstance(value, dict):
        return {key: finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
