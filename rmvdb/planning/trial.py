"""Fit, calibrate and measure candidates on three disjoint parts of one sample."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from rmvdb.errors import PlanRefused
from rmvdb.learning.method import METHODS, Fitted, Method, Pairs, TrainingSettings
from rmvdb.planning import quality
from rmvdb.planning.curve import TS, Calibrations, Course, Curve
from rmvdb.planning.fits import Fits
from rmvdb.planning.held_out import LEAST_QUERIES, HeldOutParts, Scales, first_same, merit, parts_by_order
from rmvdb.planning.objective import DEFAULT, Objective
from rmvdb.planning.part import OlderCollection, Part, Queries
from rmvdb.planning.quality import Bools, Floats
from rmvdb.text import counted
from rmvdb.types import Metric, ReportProgress

LEAST_PAIRS = 60
#: With fewer different logged queries, records choose and measure.
LEAST_LOGGED = 200
#: So many of them choose at most, and as many measure. The others are trained on.
MOST_LOGGED = 1000


@dataclass(frozen=True, kw_only=True, eq=False)
class Measured:
    """The quality over t of one fitted and calibrated candidate."""

    fitted: Fitted
    calibrations: Calibrations
    #: The metric to choose by, on the part kept for that. Empty if that is too small.
    tuning: tuple[Course, ...]
    #: Measures every metric on the part that nothing was fitted or chosen on.
    show: Callable[[], Curve] = field(repr=False)

    @functools.cached_property
    def curve(self) -> Curve:
        """Every metric, on the part that nothing was fitted or chosen on."""
        return self.show()

    @property
    def merit(self) -> float:
        """Return the area of the metric to choose by less its fall. `curve` has no influence on it."""
        return merit(self.tuning)

    @property
    def chosen_by(self) -> Floats:
        """Return the areas of each query to choose by, (Q,)."""
        return np.concatenate([each.areas for each in self.tuning]) if self.tuning else np.empty(0)

    def starts_below(self, other: Measured) -> bool:
        """Return whether its mean at t = 0 is lower than the other's, on the part to choose by."""
        return sum(each.means[0] for each in self.tuning) < sum(each.means[0] for each in other.tuning)

    def crossed_by(self, later: Measured) -> float | None:
        """Return the t between start and end from which on `later` pays most by `merit`, or None if it never does."""
        if not (self.tuning and later.tuning):
            return None
        best = max(TS[1:-1], key=lambda at: self.until(at, later).merit)
        return best if self.until(best, later).merit > self.merit else None

    def until(self, at: float, later: Measured) -> Measured:
        """Return the quality of a schedule: this one below `at`, and `later` from there on."""
        pairs = zip(self.tuning, later.tuning, strict=True)
        tuning = tuple(one.until(at, other) for one, other in pairs)
        return replace(later, tuning=tuning, show=lambda: self.curve.until(at, later.curve))


@dataclass(frozen=True, kw_only=True, eq=False)
class Candidate:
    """Everything that decides a curve, and the curve as far as candidates are chosen by it."""

    #: The method that was fitted, and the method that was asked for: without a ρ that helps, `rm` becomes `mcl`.
    method: Method
    asked: Method
    #: The backfill order.
    order: str
    measured: Measured
    #: How many candidates of the old collections each search rescores.
    rescore: int = 0
    #: From this t on ψ alone serves, until then `early`. None without a schedule.
    switch: float | None = None
    early: Measured | None = None
    #: The settings that the second part chose.
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def merit(self) -> float:
        """Return `Measured.merit`, or minus infinity for NaN."""
        value = self.measured.merit
        return -math.inf if math.isnan(value) else value

    @property
    def extractions(self) -> int:
        """Return how many models embed a query until cut-over."""
        both = self.measured.fitted.blend is not None or METHODS[self.method].embeds_twice or self.switch is not None
        return 2 if both else 1

    @property
    def cost(self) -> tuple[int, int]:
        """Return the items that a query embeds until cut-over, and the searches that it makes."""
        return self.extractions + self.rescore, 1 if self.measured.fitted.lift else 2

    @property
    def name(self) -> str:
        """Return it in words."""
        words = str(self.method) if self.switch is None else f"{self.method} from t = {self.switch:g} on"
        return f"{words}, rescoring {self.rescore}" if self.rescore else words


class Trial:
    """One sample in three parts: fitted on the first, chosen and calibrated on the second, measured on the third.

    Everything is fitted and measured once. Methods that come down to the same ψ share it.
    """

    def __init__(
        self,
        pairs: Pairs,
        *,
        old_metric: Metric,
        new_metric: Metric,
        settings: TrainingSettings,
        confidences: Mapping[str, npt.NDArray[np.floating]] | None = None,
        seed: int = 0,
        seen: Bools | None = None,
        behind: Sequence[OlderCollection] = (),
        held_out: int | None = None,
        queries: Queries | None = None,
        logged: Pairs | None = None,
        calibrate: bool = True,
        objective: Objective | None = None,
        seconds: float | None = None,
        gallery: int | None = None,
        progress: ReportProgress = lambda *_: None,
    ) -> None:
        """Split the sample.

        `confidences`: backfill orders by name, (n,) each, lowest first. Without them the order is random. A query's old vector
        is its stored one. `seen` (n,): records that an earlier training has seen, whose ψ or ρ is served now. They look better
        than others would, so they are only trained on. `behind`: the collections behind the newest old one. The old vector of a
        record there is its query in the newest, and `held_out` bounds how many records of the newest are kept to calibrate,
        and to measure on. `queries` are searched for in place of the measured records. The `logged` ones are trained on beside
        the records, but for those that are searched for here. Without `calibrate` distances are merged as they are, unless
        their metrics differ. `objective` is the metric to choose by; None takes that of `objective.DEFAULT`. `seconds`: all
        training together takes about so long at most. `gallery`: how many records the sample stands for.

        Raises PlanRefused if the pairs are too few, UsageError if the queries are.
        """
        confidences = confidences or {"random": np.random.default_rng(seed).random(len(pairs))}
        self.orders, self.settings, self.seed, self.progress = tuple(confidences), settings, seed, progress
        self._calibrate = calibrate
        sample = Part(
            pairs=pairs,
            confidence=np.zeros(len(pairs)),
            old_metric=old_metric,
            new_metric=new_metric,
            behind=tuple(behind),
            queries=queries,
            gallery=gallery or len(pairs),
        )
        _check_size(sample)
        rows = sample.split(seed=seed, most=held_out, seen=np.zeros(len(pairs), dtype=bool) if seen is None else seen)
        #: The rows of the pairs to train on.
        self.seen = rows[0]
        self.train = replace(sample, queries=None).take(self.seen)
        self._parts_by_order = parts_by_order(sample, rows, confidences, seed)
        first = self._parts_by_order[self.orders[0]]
        _check_relevance(first)
        self.logged = None if logged is None else first.unasked(logged)
        self._has_answers = queries is not None
        #: Whether logged queries choose and measure, in place of records.
        self.by_log = queries is None and pairs.labels is None and self._hold_log_out()
        self.objective = objective or DEFAULT[self.relevance]
        self.fits = Fits(
            self.train,
            self.logged,
            worth=self._worth,
            keeps_quality=self._keeps_quality,
            settings=settings,
            seconds=seconds,
            progress=progress,
        )
        #: The methods that there was no time for.
        self.untried: list[Method] = []
        self._measured: dict[tuple[object, ...], Measured] = {}
        self._scales: dict[tuple[object, ...], Scales] = {}

    def _hold_log_out(self) -> bool:
        """Take a fifth of the logged queries to choose by and a fifth to measure by, if they are enough for both.

        A query that was logged several times is one query: all of them go to the same part, and one of them measures.
        """
        if self.logged is None or any(each.own_queries is not None for each in self.train.behind):
            return False
        same = first_same(self.logged.new, self.logged.new, self.train.new_metric)
        _, firsts, number = np.unique(same, return_index=True, return_inverse=True)
        if len(firsts) < LEAST_LOGGED:
            return False
        order, fifth = np.random.default_rng(self.seed).permutation(len(firsts)), min(len(firsts) // 5, MOST_LOGGED)
        check, judge = (self.logged.take(firsts[order[start : start + fifth]]) for start in (0, fifth))
        self._parts_by_order = {name: parts.with_log(check, judge) for name, parts in self._parts_by_order.items()}
        self.logged = self.logged.take(np.flatnonzero(np.isin(number, order[2 * fifth :])))
        return True

    @property
    def relevance(self) -> str:
        """Return what decides relevance: a query's own `answers`, `labels`, or `neighbours` by the new model."""
        if self._has_answers:
            return "answers"
        return "labels" if self.labelled else "neighbours"

    @property
    def is_late(self) -> bool:
        """Return whether the time for fitting is over."""
        return self.fits.is_late

    @property
    def labelled(self) -> bool:
        """Return whether the sample has labels."""
        return self.train.pairs.labels is not None

    @property
    def serves_several(self) -> bool:
        """Return whether the gallery lies in several collections now."""
        return bool(self.train.behind)

    @property
    def held_out(self) -> int:
        """Return the number of records to tune and calibrate on."""
        return len(self._parts_by_order[self.orders[0]].check.pairs)

    @property
    def evaluated(self) -> int:
        """Return the number of queries to measure on, without those that have nothing to find or nothing to miss."""
        return self._parts_by_order[self.orders[0]].judge.query_set.answerable

    def parts(self, order: str) -> HeldOutParts:
        """Return the parts in one backfill order."""
        return self._parts_by_order[order]

    def judge(self, order: str) -> Part:
        """Return the part that nothing was fitted or chosen on, in one backfill order."""
        return self._parts_by_order[order].judge

    def fitted(self, method: Method) -> tuple[Method, Fitted]:
        """Fit a method. Leave ρ out unless the part to choose by shows that ρ keeps the new model's quality."""
        return self.fits.fitted(method)

    def distinguishes(self, count: int) -> bool:
        """Return whether each measured part is large enough to stand for so many rescored records of the gallery."""
        parts = self._parts_by_order[self.orders[0]]
        return all(part.stands_for(count) for part in (*(parts.choosers or parts.halves), parts.judge))

    def measure(self, fitted: Fitted, order: str, *, rescore: int = 0) -> Measured:
        """Calibrate and measure the transforms of a method."""
        key = (*_parts_of(fitted), order, rescore)
        if key not in self._measured:
            parts, scales = self._parts_by_order[order], self._scales_of(fitted, order)
            self._measured[key] = Measured(
                fitted=fitted,
                calibrations=scales.served,
                tuning=parts.courses(fitted, self.objective, scales, rescore=rescore),
                show=lambda: parts.judge.curve(fitted, scales.served, rescore=rescore),
            )
        return self._measured[key]

    def _scales_of(self, fitted: Fitted, order: str) -> Scales:
        key = (*_parts_of(fitted), order)
        if key not in self._scales:
            parts = self._parts_by_order[order]
            self._scales[key] = parts.calibrated(fitted, self.objective, calibrate=self._calibrate)
        return self._scales[key]

    def naive(self, order: str) -> Measured:
        """Measure both embedders for each query, the baseline of all comparisons."""
        return self.measure(Fitted(), order)

    def candidate(self, method: Method, order: str | None = None) -> Candidate:
        """Fit and measure a method, in this order or in the first one."""
        order = order or self.orders[0]
        chosen, fitted = self.fits.fitted(method)
        measured = self.measure(fitted, order)
        return Candidate(
            method=chosen, asked=method, order=order, measured=measured, settings=self.fits.settings_of.get(chosen, {})
        )

    def in_order(self, candidate: Candidate, order: str) -> Candidate:
        """Return the candidate in another backfill order, without a schedule."""
        measured = self.measure(candidate.measured.fitted, order, rescore=candidate.rescore)
        return replace(candidate, order=order, measured=measured, switch=None, early=None)

    def rescored(self, candidate: Candidate, rescore: int) -> Candidate:
        """Return the candidate with so many records rescored in each search, without a schedule."""
        measured = self.measure(candidate.measured.fitted, candidate.order, rescore=rescore)
        return replace(candidate, rescore=rescore, measured=measured, switch=None, early=None)

    def scheduled(self, candidate: Candidate, blends: Sequence[Candidate] = ()) -> Candidate | None:
        """Return the same method on a schedule: both models embed each query first, ψ alone serves from the best t on.

        Both serve by `naive`, or by one of these blends. None if a schedule never pays.
        """
        fitted, order, rescore = candidate.measured.fitted, candidate.order, candidate.rescore
        if fitted.reverse is None or fitted.blend is not None:
            return None
        first = self.measure(Fitted(head=fitted.head), order, rescore=rescore)
        firsts = [first] if candidate.measured.starts_below(first) else []
        firsts += [self.measure(each.measured.fitted, order, rescore=rescore) for each in blends if fitted.head is None]
        ways = [(each, at) for each in firsts if (at := each.crossed_by(candidate.measured)) is not None]
        if not ways:
            return None
        early, at = max(ways, key=lambda way: way[0].until(way[1], candidate.measured).merit)
        return replace(candidate, measured=early.until(at, candidate.measured), switch=at, early=early)

    def _worth(self, fitted: Fitted) -> float:
        """Return the merit of these transforms in the first order, NaN as minus infinity."""
        value = self.measure(fitted, self.orders[0]).merit
        return -math.inf if math.isnan(value) else value

    def _keeps_quality(self, fitted: Fitted) -> bool:
        """Return whether the interval of what ρ adds to the new model's quality, on the part to choose by, is not below 0.

        The interval decides, not the mean: if ρ changes next to nothing, the mean alone would let it pass half of the time.
        """
        parts = self._parts_by_order[self.orders[0]]
        added = [
            part.course(self.objective, fitted, ts=(1.0,)).values[0] - part.course(self.objective, Fitted(), ts=(1.0,)).values[0]
            for part in parts.choosers or (parts.check,)
        ]
        return quality.bootstrap(np.concatenate(added), seed=self.settings.seed)[0] >= 0


def _check_size(sample: Part) -> None:
    """Raise PlanRefused if the sample is too small for three parts."""
    if (known := int(sample.own.sum())) < LEAST_PAIRS:
        way_out = f"sample {LEAST_PAIRS} or more, or use" if sample.gallery >= LEAST_PAIRS else "use"
        few = counted(known, "pair is", "pairs are")
        raise PlanRefused(f"{few} too few to train and to measure on; {way_out} the method naive")


def _check_relevance(parts: HeldOutParts) -> None:
    """Raise PlanRefused if too few queries measure, or none of a half of the part to choose by has something to find."""
    judge, labels = parts.judge, parts.judge.pairs.labels
    known = judge.query_set.answerable
    size = sum(len(part.pairs) for part in (parts.train, parts.check, judge))
    least = min(LEAST_QUERIES, size // 10)  # a fifth of a small sample is few
    if known >= max(least, 1) and all(half.query_set.relevance.any() for half in parts.halves):
        return
    if judge.queries is not None and len(parts.check.pairs) < LEAST_QUERIES:
        raise PlanRefused(
            "Nearly all records of the sample are answers to the queries, so too few are left to train and to choose on; raise "
            "--sample or --minutes, or give fewer queries"
        )
    if labels is None:
        few = counted(known, "record of the sample is", "records of the sample are")
        raise PlanRefused(f"{few} too few to measure by; raise --sample, or add records that no earlier plan was trained on")
    names, counts = np.unique(labels, return_counts=True)
    if 2 * counts.max(initial=0) > len(labels):
        raise PlanRefused(f"Hardly any record has another label than {str(names[counts.argmax()])!r}; leave --labels out")
    raise PlanRefused("Too few records of the sample share a label to measure anything; leave --labels out")


def _parts_of(fitted: Fitted) -> tuple[object, ...]:
    """Return the key of these transforms: the very objects, and the weight."""
    return (*map(id, (fitted.head, fitted.reverse, fitted.lift)), fitted.blend)


def unmeasured(pairs: Pairs, *, old_metric: Metric, new_metric: Metric, behind: Sequence[OlderCollection]) -> Calibrations:
    """Return calibrations for `naive` if there is too little to measure on: none, unless the metrics differ.

    Raises PlanRefused if there is too little even for that.
    """
    part = Part(pairs=pairs, confidence=np.zeros(len(pairs)), old_metric=old_metric, new_metric=new_metric, behind=tuple(behind))
    return part.matched(Fitted()) if part.mixed(Fitted()) else part.uncalibrated
