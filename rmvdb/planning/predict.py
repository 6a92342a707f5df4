"""Predict what an upgrade does: train, calibrate and measure on three disjoint parts of one sample."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from rmvdb.errors import PlanRefused, UsageError
from rmvdb.learning import geometry
from rmvdb.learning.method import Fitted, Method, Pairs, TrainingSettings
from rmvdb.planning import quality
from rmvdb.planning.quality import Bools, Floats
from rmvdb.planning.simulate import TS, Calibrations, Curve, Fuse, OlderCollection, Part, Queries, Summary, summary
from rmvdb.serving.traffic import TRAFFIC
from rmvdb.text import counted
from rmvdb.types import Metric, ReportProgress

LEAST_PAIRS = 60
#: Fewer queries can't be measured on.
LEAST_QUERIES = 10
#: Fewer records, or queries, than these to choose by say more of chance than of methods.
LEAST_TO_CHOOSE = 40
#: Two queries whose vectors are no farther apart, by their cosine, are one: what batch an item is embedded in makes a difference.
SAME = 1e-5
#: A fall of less than half a point is not worth a warning.
TOLERATED_FALL = 0.005


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """What an upgrade would do, measured on records that neither training nor calibration saw; shares of 1."""

    #: The method that was fitted and measured; not always the one that was asked for.
    method: Method
    asked: Method
    verdict: Literal["ok", "warn", "refuse"]
    #: One sentence for people, which names the way out where there is need of one.
    reason: str
    #: Whether relevance is the labels' (else the new model's own nearest neighbours).
    labelled: bool
    calibrated: bool
    #: How many pairs were trained on, calibrated on, measured on.
    trained: int
    held_out: int
    evaluated: int
    map_old: float
    map_new: float
    cmc_old: float
    cmc_new: float
    curve: Summary
    #: The same with both embedders for each query.
    naive: Summary
    #: 95 % bootstrap intervals over queries of mAP: M_0 − M_old and M_1 − M_new.
    start: tuple[float, float]
    end: tuple[float, float]
    #: The share of queries that are right by the old model and wrong at t = 0.
    negative_flips: float
    #: What it is chosen by: `Measured.merit`.
    merit: float
    #: The name of the backfill order that it was measured with.
    order: str
    seed: int
    fitted: Fitted = field(repr=False)
    #: The rows of the pairs that it was fitted on.
    seen: npt.NDArray[np.intp] = field(repr=False)
    calibrations: Calibrations = field(repr=False)
    measured: Curve = field(repr=False)
    #: The areas of mAP and CMC@1 of each query that it is chosen by, (Q,).
    chosen_by: Floats = field(repr=False, default_factory=lambda: np.empty(0))
    #: Why it is this method, where that was left to rmvdb, and these settings, where they were tuned.
    choice: str = ""
    #: Settings of the training other than the trial's.
    tuned: dict[str, Any] = field(default_factory=dict)
    #: How many logged queries ψ was trained on beside the pairs.
    logged: int = 0
    #: The t from which on the new model alone embeds the queries; until then each model does for its own, calibrated by `early`.
    #: None where nothing changes on the way.
    switch: float | None = None
    early: Calibrations = field(default=(), repr=False)

    def to_json(self) -> dict[str, Any]:
        """All but the fitted parts, as JSON values; NaN as None."""
        names = [
            one.name
            for one in fields(self)
            if one.name not in ("fitted", "seen", "calibrations", "early", "measured", "chosen_by")
        ]
        parts = {name: getattr(self, name) for name in names}
        curves = {name: asdict(parts.pop(name)) for name in ("curve", "naive")}
        cleaned: dict[str, Any] = finite({**parts, **curves})
        return cleaned


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What was fitted and calibrated, over t."""

    fitted: Fitted
    calibrations: Calibrations
    #: On the part kept for tuning; empty where that is too small.
    tuning: tuple[Curve, ...]
    #: On the part that nothing was fitted or tuned on.
    curve: Curve

    @property
    def merit(self) -> float:
        """The areas of mAP and CMC@1, less what they fall on the way, on the part kept for tuning: `curve` has no say in it."""
        return _merit(self.tuning) if self.tuning else -math.inf

    def crossed_by(self, later: Measured) -> float | None:
        """The t between start and end from which on the `later` one pays most, by `merit`; None where it never does."""
        if not (self.tuning and later.tuning):
            return None
        best = max(TS[1:-1], key=lambda at: self.until(at, later).merit)
        return best if self.until(best, later).merit > self.merit else None

    def until(self, at: float, later: Measured) -> Measured:
        """This one below `at`, the `later` one from there on."""
        pairs = zip(self.tuning, later.tuning, strict=True)
        tuning = tuple(one.until(at, other) for one, other in pairs)
        return replace(later, tuning=tuning, curve=self.curve.until(at, later.curve))


class Trial:
    """One sample in three parts: fitted on the first, tuned and calibrated on the second, measured on the third.

    Whatever is asked of it is trained and measured once: methods that come down to the same ψ share it.
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
        progress: ReportProgress = lambda *_: None,
    ) -> None:
        """Split the sample.

        Each of `confidences` (n,) is a backfill order by its name, lowest first; without them the order is random. That of the
        order `traffic` counts among records that no query finds. A query's old vector is its stored one. `seen` (n,) by an
        earlier training, whose ψ or ρ is served now: such records look better than others would, so they are only trained on.
        `behind`: the collections behind the newest old one, where there are any; the old vector of a record they hold is its
        query there, and `held_out` bounds how many records of the newest are kept to calibrate, and to measure on. `queries` are
        searched for in place of the measured records themselves, and the `logged` ones are trained on beside the records, but for
        those that are searched for here. Without `calibrate` distances are merged as they are, unless their metrics differ.
        Raises PlanRefused where the pairs are too few, UsageError where the queries are.
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
        )
        if (known := int(sample.own.sum())) < LEAST_PAIRS:
            raise PlanRefused(
                f"{counted(known, 'pair is', 'pairs are')} too few to train and to measure on; "
                f"sample {LEAST_PAIRS} or more, or use the method naive"
            )
        rows = sample.split(seed=seed, most=held_out, seen=np.zeros(len(pairs), dtype=bool) if seen is None else seen)
        #: The rows that are fitted on.
        self.seen = rows[0]
        self.train = replace(sample, queries=None).take(self.seen)
        self._parts_by_order = _parts_by_order(sample, rows[1:], confidences, seed)
        first = self._parts_by_order[self.orders[0]]
        if not (first.check.query_set.relevance.any() and first.judge.query_set.relevance.any()):
            raise PlanRefused("Hardly two records of the sample share a label, so nothing can be measured; leave the labels out")
        self.logged = None if logged is None else first.unasked(logged)
        self._fits: dict[Method, Fitted] = {}
        self._tuned: dict[Method, dict[str, Any]] = {}
        self._fitted: dict[Method, tuple[Method, Fitted]] = {}
        self._measured: dict[tuple[str, str], Measured] = {}

    def with_settings(self, settings: TrainingSettings) -> Trial:
        """The same sample in the same three parts, trained with other settings."""
        other = copy.copy(self)
        other.settings, other._fits, other._tuned, other._fitted, other._measured = settings, {}, {}, {}, {}
        return other

    @property
    def relevance(self) -> str:
        """What a measured query should find: `answers` of its own, records of the same `labels`, or `neighbours`."""
        judge = self._parts_by_order[self.orders[0]].judge
        return "answers" if judge.queries else "labels" if judge.pairs.labels is not None else "neighbours"

    @property
    def held_out(self) -> int:
        """How many records are tuned and calibrated on."""
        return len(self._parts_by_order[self.orders[0]].check.pairs)

    @property
    def evaluated(self) -> int:
        """How many queries are measured on."""
        return len(self._parts_by_order[self.orders[0]].judge.query_set)

    def fitted(self, method: Method) -> tuple[Method, Fitted]:
        """What is fitted in the end: no ρ where the part kept for tuning doesn't show that it keeps the new model's quality."""
        if method not in self._fitted:
            self._fitted[method] = self._chosen(method)
        return self._fitted[method]

    def _chosen(self, method: Method) -> tuple[Method, Fitted]:
        # Without labels the new model's own neighbours are what counts, and no ρ can come nearer to them than none.
        if method.has_head and self.train.pairs.labels is not None:
            fitted, check = self._fit(method), self._parts_by_order[self.orders[0]].check
            end, without = (check.curve(each, ts=(1.0,)).precision[0] for each in (fitted, Fitted()))  # (Q,), (Q,)
            # By the interval: where ρ changes next to nothing the mean alone would pass it as often as not.
            if quality.bootstrap(end - without, seed=self.settings.seed)[0] >= 0:
                return method, fitted
        return method.headless, self._fit(method.headless)

    def _fit(self, method: Method) -> Fitted:
        if method not in self._fits:
            fitted = self._trained(method, self.settings)
            if method.contrasts and self.settings.pull is None and self.train.pairs.labels is not None:
                fitted = self._pulled(method, fitted)
            self._fits[method] = fitted
        return self._fits[method]

    def _pulled(self, method: Method, alone: Fitted) -> Fitted:
        """The better, on the part kept for tuning, of the contrast alone and with Eq. 9 beside it.

        With few records of a class, or weak models, classes say too little of where a record lies; with many they say it better.
        """
        pulled = self._trained(method, replace(self.settings, pull=1.0))
        stage = self._parts_by_order[self.orders[0]]
        tuned = [stage.tuned(each, None, calibrate=self._calibrate)[1] for each in (alone, pulled)]
        worth = [_merit(curves) if curves else -math.inf for curves in tuned]
        if worth[1] <= worth[0]:
            return alone
        self._tuned[method] = {"pull": 1.0}
        return pulled

    def _trained(self, method: Method, settings: TrainingSettings) -> Fitted:
        if not method.has_transforms:
            return Fitted()
        from rmvdb.learning import training  # here, so that commands that train nothing do not wait for torch

        return training.fit(
            self.train.pairs,
            method=method,
            old_metric=self.train.old_metric,
            new_metric=self.train.new_metric,
            settings=settings,
            logged=self.logged,
            progress=functools.partial(self.progress, f"training {method}{' beside a regression' if settings.pull else ''}"),
        )

    def measure(self, name: str, fitted: Fitted, order: str, *, fuse: Fuse | None = None) -> Measured:
        """Tune and measure what was fitted; a name stands for the same in every call."""
        if (name, order) not in self._measured:
            stage = self._parts_by_order[order]
            calibrations, tuning = stage.tuned(fitted, fuse, calibrate=self._calibrate)
            curve = stage.judge.curve(fitted, calibrations, fuse=fuse)
            self._measured[name, order] = Measured(fitted=fitted, calibrations=calibrations, tuning=tuple(tuning), curve=curve)
        return self._measured[name, order]

    def naive(self, order: str) -> Measured:
        """Both embedders for each query: what everything is compared with."""
        return self.measure(Method.NAIVE, Fitted(), order)

    def predict(self, method: Method, order: str | None = None) -> Prediction:
        """What an upgrade by this method would do, in this or in the first order.

        What is returned is exactly what was measured: nothing is refitted afterwards.
        """
        order = order or self.orders[0]
        chosen, fitted = self.fitted(method)
        return self._build_prediction(method, chosen, self.measure(chosen, fitted, order), order)

    def scheduled(self, told: Prediction) -> Prediction | None:
        """The same method where both embedders serve each query first, and ψ from the moment on at which that pays most.

        None where it never does.
        """
        if told.fitted.reverse is None:
            return None
        both = Fitted(head=told.fitted.head)
        early = self.measure(f"{told.method} by both", both, told.order) if both.head else self.naive(told.order)
        later = self.measure(told.method, told.fitted, told.order)
        at = early.crossed_by(later)
        if at is None:
            return None
        found = self._build_prediction(told.asked, told.method, early.until(at, later), told.order, switch=at)
        return replace(found, switch=at, early=early.calibrations)

    def _build_prediction(
        self, method: Method, chosen: Method, found: Measured, order: str, *, switch: float | None = None
    ) -> Prediction:
        fitted, naive = found.fitted, self.naive(order).curve
        old, new = naive.map[0], naive.map[-1]
        start, end = ends(found.curve, naive)
        before = "what is served now" if self.train.behind else "the old model"
        why = "no ρ was shown to keep the new model's quality" if self.train.pairs.labels is not None else "ρ needs labels"
        without = "" if chosen is method else f" ({chosen} instead of {method}: {why})"
        verdict, reason = _verdict(chosen, found.curve, start, end, without=without, before=before, seed=self.seed)
        if switch:
            reason = f"until t = {switch:g} each model embeds the queries for its own collection: {reason}"
        return Prediction(
            method=chosen,
            asked=method,
            verdict=verdict,
            reason=reason,
            labelled=self.train.pairs.labels is not None,
            calibrated=any(found.calibrations),
            trained=len(self.train.pairs),
            logged=len(self.logged or ()),
            held_out=self.held_out,
            evaluated=self.evaluated,
            map_old=old,
            map_new=new,
            cmc_old=naive.cmc[0],
            cmc_new=naive.cmc[-1],
            curve=summary(found.curve, old=old, new=new),
            naive=summary(naive, old=old, new=new),
            start=quality.bootstrap(start, seed=self.seed),
            end=quality.bootstrap(end, seed=self.seed),
            negative_flips=quality.negative_flips(naive.top1[0], found.curve.top1[0]),
            merit=found.merit,
            order=order,
            seed=self.seed,
            fitted=fitted,
            seen=self.seen,
            calibrations=found.calibrations,
            measured=found.curve,
            chosen_by=np.concatenate([each.merit for each in found.tuning]) if found.tuning else np.empty(0),
            tuned=self._tuned.get(chosen, {}),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOutParts:
    """The parts that are not trained on, in one backfill order."""

    check: Part
    halves: tuple[Part, Part]
    judge: Part
    #: The measured records with other queries, to choose by; empty where there are none.
    choosers: tuple[Part, ...] = ()

    @classmethod
    def of(cls, check: Part, judge: Part, asked: Sequence[Queries]) -> HeldOutParts:
        """Where queries are `asked`, the last ones are measured, and those before them choose."""
        rows = np.arange(len(check.pairs))
        halves = check.take(rows[::2]), check.take(rows[1::2])
        if not asked:
            return cls(check=check, halves=halves, judge=judge)
        *choosers, measured = (replace(judge, queries=each) for each in asked)
        return cls(check=check, halves=halves, judge=measured, choosers=tuple(choosers))

    def unasked(self, logged: Pairs) -> Pairs | None:
        """Those of these queries that are neither tuned, chosen nor measured by: their new vectors differ from all of those."""
        metric = self.judge.new_metric
        asked = [part.query_set.new for part in (self.check, self.judge, *self.choosers)]
        here, new = geometry.comparable(np.concatenate(asked), metric), geometry.comparable(logged.new, metric)  # (q, d), (n, d)
        some = (new[start : start + quality.CHUNK] for start in range(0, len(new), quality.CHUNK))
        nearest = [geometry.distances(each, here, metric=Metric.COSINE).min(axis=1) for each in some]
        fresh = np.flatnonzero(np.concatenate([*nearest, np.empty(0)]) > SAME)
        return logged.take(fresh) if len(fresh) else None

    def by_traffic(self) -> HeldOutParts:
        """The same, ordered by what queries find, as the searches before an upgrade are counted.

        No query that is measured, or chosen by, has a say in the order that it is asked in: its own candidates would be
        re-embedded first, and what is counted in truth are other searches than those to come. So others of the same kind make
        the order: of what is tuned on, one half for the other, and all of it for what is measured.
        """
        one, two = self.halves
        halves = one.by_traffic(two.query_set), two.by_traffic(one.query_set)
        if not self.choosers:
            return replace(self, halves=halves, judge=self.judge.by_traffic(self.check.query_set))
        (chooser,) = self.choosers
        rows = np.arange(len(chooser.query_set))
        first, second = chooser.query_set.take(rows[::2]), chooser.query_set.take(rows[1::2])
        choosers = (replace(chooser.by_traffic(other), queries=own) for own, other in ((first, second), (second, first)))
        return replace(self, halves=halves, judge=self.judge.by_traffic(chooser.query_set), choosers=tuple(choosers))

    def tuned(self, fitted: Fitted, fuse: Fuse | None, *, calibrate: bool) -> tuple[Calibrations, list[Curve]]:
        """Calibrations where they are worth it, and the curves then, none where there are too few pairs for one.

        Fitted on one half, they must raise the curve on the other; distances of several metrics can't be compared without. By the
        odds of relevance only with labels: the new model's neighbours would confirm themselves. What is lifted lies in one
        collection with what is embedded, and is served as one leg, so there is nothing to calibrate.
        """
        if fuse is None and fitted.lift is None and (calibrate or self.check.mixed(fitted)):
            calibrations, curves = self._calibrated(fitted)
        else:
            calibrations, curves = self.check.uncalibrated, self._raw(fitted, fuse)
        return calibrations, [each.curve(fitted, calibrations, fuse=fuse) for each in self.choosers] or curves

    def _calibrated(self, fitted: Fitted) -> tuple[Calibrations, list[Curve]]:
        found = [] if self.check.mixed(fitted) else [(self.check.uncalibrated, self._raw(fitted, None))]
        for fit in (Part.matched, Part.calibrations)[: 1 if self.check.pairs.labels is None else 2]:
            with contextlib.suppress(PlanRefused):  # too few pairs to calibrate on
                others = zip(self.halves, self.halves[::-1], strict=True)
                curves = [half.curve(fitted, fit(other, fitted)) for half, other in others]
                found.append((fit(self.check, fitted), curves))
        return max(found, key=lambda each: _merit(each[1])) if found else (self.check.matched(fitted), [])

    def _raw(self, fitted: Fitted, fuse: Fuse | None) -> list[Curve]:
        return [half.curve(fitted, fuse=fuse) for half in self.halves]


def _parts_by_order(
    sample: Part,
    rows: Sequence[npt.NDArray[np.intp]],
    confidences: Mapping[str, npt.NDArray[np.floating]],
    seed: int,
) -> dict[str, HeldOutParts]:
    """Of each backfill order, where `rows` are those to tune on and those to measure on."""
    check, judge = (replace(sample, queries=None).take(each) for each in rows)
    asked = [] if sample.queries is None else _asked(sample.queries.among(rows[1]), seed)
    made = {
        name: HeldOutParts.of(_in_order(check, keys[rows[0]]), _in_order(judge, keys[rows[1]]), asked)
        for name, keys in confidences.items()
    }
    return made | {name: stage.by_traffic() for name, stage in made.items() if name == TRAFFIC}


def _in_order(part: Part, confidence: npt.NDArray[np.floating]) -> Part:
    return replace(part, confidence=np.asarray(confidence, dtype=np.float64))


def _asked(queries: Queries, seed: int) -> list[Queries]:
    """Those that have something to find: one half to choose by, drawn at random, and the other to measure on; all to measure on
    where they are so few that records choose better.
    """
    known = np.random.default_rng(seed).permutation(np.flatnonzero(queries.relevance.any(axis=1)))
    if len(known) < LEAST_QUERIES:
        few = counted(len(known), "query with an answer in the sample is", "queries with an answer in the sample are")
        raise UsageError(f"{few} too few to measure by; give {LEAST_QUERIES} or more, or leave --queries out")
    if len(known) < 2 * LEAST_TO_CHOOSE:
        return [queries.take(known)]
    return [queries.take(known[::2]), queries.take(known[1::2])]


def unmeasured(pairs: Pairs, *, old_metric: Metric, new_metric: Metric, behind: Sequence[OlderCollection]) -> Calibrations:
    """How distances are merged, by every embedder, where there is too little to measure on: as they are, unless their metrics
    differ. Raises PlanRefused where there is too little even for that."""
    part = Part(pairs=pairs, confidence=np.zeros(len(pairs)), old_metric=old_metric, new_metric=new_metric, behind=tuple(behind))
    return part.matched(Fitted()) if part.mixed(Fitted()) else part.uncalibrated


def ends(measured: Curve, naive: Curve) -> tuple[Floats, Floats]:
    """Average precision at the start less that of the old model, and at the end less that of the new one, (Q,) each."""
    return measured.precision[0] - naive.precision[0], measured.precision[-1] - naive.precision[-1]


def _merit(curves: Sequence[Curve]) -> float:
    """The areas of mAP and CMC@1, less what they fall on the way: a curve that only rises is worth more than its area."""
    return sum(quality.area(TS, values) - quality.largest_fall(values) for values in (_mean(curves, "map"), _mean(curves, "cmc")))


def _mean(curves: Sequence[Curve], name: str) -> list[float]:
    means: list[float] = np.mean([getattr(one, name) for one in curves], axis=0).tolist()
    return means


def _verdict(
    method: Method, measured: Curve, start: Floats, end: Floats, *, without: str, before: str, seed: int
) -> tuple[Literal["ok", "warn", "refuse"], str]:
    """Promise 7 of the design: M_0 ≥ M_old, M_t rises, M_1 ≥ M_new, each within the noise of the sample."""
    (low, high), (_, end_high) = (quality.bootstrap(v, seed=seed) for v in (start, end))
    span = f"mAP at the start {_points(low)} to {_points(high)} points against {before}"
    if high < 0:
        return "refuse", f"{method} would start below {before} ({span}){without}; the method naive would not"
    if end_high < 0:
        lost = f"{_points(quality.mean(end))} points of mAP"
        return "warn", f"{method} would end below the new model ({lost}); the method {method.headless} would not"
    if low < 0:
        return "warn", f"{method} may start below {before} ({span}){without}; the method naive would not"
    if lost := _fallen(measured, seed):
        return (
            "warn",
            f"{method} would fall by {lost} on its way{without}; another order, or the method {_other(method)}, may not",
        )
    return "ok", f"{method} starts no lower than {before}, rises, and ends no lower than the new model{without}"


def _fallen(measured: Curve, seed: int) -> str:
    """By how many points of what the curve falls on its way, where that is more than chance and worth a warning."""
    curves = (("mAP", measured.map, measured.precision), ("CMC@1", measured.cmc, measured.top1))
    falls = ((name, quality.largest_fall(means), values) for name, means, values in curves)
    large = [(name, fall, values) for name, fall, values in falls if fall > TOLERATED_FALL]
    sure = [(name, fall) for name, fall, values in large if fall > quality.fall_by_chance(values, seed=seed)]
    return " and ".join(f"{100 * fall:.1f} points of {name}" for name, fall in sure)


def _other(method: Method) -> Method:
    return Method.RM if method is Method.NAIVE else Method.NAIVE


def _points(share: float) -> str:
    return f"{100 * share:+.1f}"


def finite(value: Any) -> Any:
    """NaN and infinities, which JSON has no word for, as None."""
    if isinstance(value, dict):
        return {key: finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
