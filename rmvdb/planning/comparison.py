"""Methods and orders side by side, in numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rmvdb.learning.method import Method
from rmvdb.planning import quality
from rmvdb.planning.curve import Curve, Summary, summary
from rmvdb.planning.objective import Objective
from rmvdb.planning.prediction import Beside, Prediction, finite, gain_of
from rmvdb.planning.trial import Trial


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One way to serve the gallery while it is re-embedded; shares of 1."""

    #: A method; `old`, `new` and `ideal` for one model alone, `ideal` with ρ.
    name: str
    #: The backfill order; None if it makes no difference.
    order: str | None
    curve: Summary
    #: The metric to choose by over t, its Gain and its largest fall.
    course: list[float]
    gain: float
    fall: float
    #: 95 % bootstrap intervals over queries: of both areas, of M_0 − M_old and of M_1 − M_new, in the metric to choose by.
    auc_map: tuple[float, float]
    auc_cmc: tuple[float, float]
    start: tuple[float, float]
    end: tuple[float, float]
    #: The share of queries that are right by the old model and wrong at each t.
    negative_flips: list[float]
    calibrated: bool = False
    #: The t until which both models embed the queries. None without a schedule.
    switch: float | None = None
    #: How many candidates each search rescores, and how many models embed a query.
    rescore: int = 0
    extractions: int = 1
    #: Whether its method is worth most with this order.
    best: bool = True
    #: The area of the metric to choose by less its fall, on records or queries that are not measured on.
    merit: float | None = None
    #: The share of records that their own item finds first; None for one model alone.
    self_found: Beside | None = None
    #: ok, warn or refuse, and why; None for one model alone.
    verdict: str | None = None
    reason: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """The rows of a comparison and the recommended candidate."""

    rows: list[Row]
    recommended: Prediction
    #: Decides relevance: `labels`, `answers` (of queries from a file), or `neighbours` by the new model.
    relevance: str
    objective: Objective
    #: Records of the sample that could not be embedded, and those without a label, which were left out of it.
    skipped: int = 0
    unlabelled: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return JSON values, with None for NaN."""
        told = self.recommended.to_json()
        names = ("method", "order", "switch", "rescore", "extractions", "verdict", "reason", "choice", "merit", "warnings")
        counts = {name: told[name] for name in ("trained", "logged", "by_log", "held_out", "evaluated", "seed")}
        rows: list[dict[str, Any]] = finite([asdict(row) for row in self.rows])
        return {
            "relevance": self.relevance,
            "objective": str(self.objective),
            **counts,
            "skipped": self.skipped,
            "unlabelled": self.unlabelled,
            "recommended": {name: told[name] for name in names},
            "rows": rows,
        }


def rows_of(trial: Trial, told: Sequence[Prediction]) -> list[Row]:
    """Return a row for each model alone and for each prediction. The best order of each method is marked."""
    best = {_kind(each): each for each in sorted(told, key=lambda each: each.merit)}
    ranked = sorted(told, key=lambda each: (list(Method).index(each.method), each.rescore, each.switch or 0.0))
    return [*_levels(trial, told), *(_of(trial, each, best=best[_kind(each)] is each) for each in ranked)]


def _kind(told: Prediction) -> tuple[object, ...]:
    return told.method, told.switch is None, told.rescore


def _of(trial: Trial, told: Prediction, *, best: bool) -> Row:
    return replace(
        _row(trial, str(told.method), told.measured, told.order),
        calibrated=told.calibrated,
        switch=told.switch,
        rescore=told.rescore,
        extractions=told.extractions,
        best=best,
        merit=told.merit,
        self_found=told.self_found,
        verdict=told.verdict,
        reason=told.reason,
    )


def _levels(trial: Trial, told: Sequence[Prediction]) -> Iterator[Row]:
    """Yield the rows of the old model, the new one, and ρ on it, each alone at every t."""
    order = trial.orders[0]
    naive = trial.naive(order).curve
    alone = {"old": naive.held(0), "new": naive.held(-1)}
    if heads := [each for each in told if each.fitted.head is not None]:
        alone["ideal"] = max(heads, key=lambda each: each.merit).measured.held(-1)
    for name, curve in alone.items():
        yield _row(trial, name, curve, order, level=True)


def _row(trial: Trial, name: str, curve: Curve, order: str, *, level: bool = False) -> Row:
    naive, seed = trial.naive(order).curve, trial.seed
    course, base = curve.course(trial.objective), naive.course(trial.objective)
    return Row(
        name=name,
        order=None if level else order,
        curve=summary(curve, old=naive.map[0], new=naive.map[-1]),
        course=course.means,
        gain=gain_of(course, base.means[0], base.means[-1]),
        fall=quality.largest_fall(course.means),
        auc_map=quality.bootstrap(quality.areas(curve.ts, curve.precision), seed=seed),
        auc_cmc=quality.bootstrap(quality.areas(curve.ts, curve.top1), seed=seed),
        start=quality.bootstrap(course.values[0] - base.values[0], seed=seed),
        end=quality.bootstrap(course.values[-1] - base.values[-1], seed=seed),
        negative_flips=[quality.negative_flips(naive.top1[0], now) for now in curve.top1],
    )
