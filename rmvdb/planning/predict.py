"""Predict the quality of an upgrade: train, calibrate and measure on three disjoint parts of one sample."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from rmvdb.errors import PlanRefused
from rmvdb.learning.method import Fitted, Method, Pairs, TrainingSettings
from rmvdb.planning import quality
from rmvdb.planning.held_out import merit, parts_by_order
from rmvdb.planning.quality import Bools, Floats
from rmvdb.planning.simulate import TS, Calibrations, Curve, OlderCollection, Part, Queries, Summary, summary
from rmvdb.planning.verdict import ends, verdict_of
from rmvdb.text import counted
from rmvdb.types import Metric, ReportProgress

LEAST_PAIRS = 60


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """The effect of an upgrade, measured on records that neither training nor calibration saw. Shares of 1."""

    #: The method that was fitted and measured. It may differ from the `asked` one.
    method: Method
    asked: Method
    verdict: Literal["ok", "warn", "refuse"]
    #: One sentence for people. If a way out is needed, it names one.
    reason: str
    #: What decides relevance: `answers` of the queries, `labels`, or `neighbours` by the new model.
    relevance: str
    #: Whether the sample has labels.
    labelled: bool
    calibrated: bool
    #: Numbers of pairs trained on, calibrated on and measured on.
    trained: int
    held_out: int
    evaluated: int
    map_old: float
    map_new: float
    cmc_old: float
    cmc_new: float
    curve: Summary
    #: The same if both models embed each query.
    naive: Summary
    #: 95 % bootstrap intervals over queries of mAP: M_0 − M_old and M_1 − M_new.
    start: tuple[float, float]
    end: tuple[float, float]
    #: The share of queries that are right by the old model and wrong at t = 0.
    negative_flips: float
    #: `Measured.merit`, by which it is chosen.
    merit: float
    #: The backfill order that it was measured with.
    order: str
    seed: int
    fitted: Fitted = field(repr=False)
    #: The rows of the pairs that it was trained on.
    seen: npt.NDArray[np.intp] = field(repr=False)
    calibrations: Calibrations = field(repr=False)
    measured: Curve = field(repr=False)
    #: The areas of mAP and CMC@1 of each query that it is chosen by, (Q,).
    chosen_by: Floats = field(repr=False, default_factory=lambda: np.empty(0))
    #: Why it is this method, if that was left to rmvdb.
    choice: str = ""
    #: Settings of the training that differ from the trial's.
    tuned: dict[str, Any] = field(default_factory=dict)
    #: Number of logged queries that ψ was trained on, beside the pairs.
    logged: int = 0
    #: From this t on the new model alone embeds the queries. Until then each model embeds them for its own leg, calibrated by
    #: `early`. None without a schedule.
    switch: float | None = None
    early: Calibrations = field(default=(), repr=False)

    def to_json(self) -> dict[str, Any]:
        """Return everything but the fitted parts as JSON values, NaN as None."""
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
    """The quality over t of one fitted and calibrated method."""

    fitted: Fitted
    calibrations: Calibrations
    #: On the part kept for tuning. Empty if that is too small.
    tuning: tuple[Curve, ...]
    #: On the part that nothing was fitted or tuned on.
    curve: Curve

    @property
    def merit(self) -> float:
        """Return the areas of mAP and CMC@1 less their falls, on the part kept for tuning. `curve` has no influence on it."""
        return merit(self.tuning) if self.tuning else -math.inf

    def crossed_by(self, later: Measured) -> float | None:
        """Return the t between start and end from which on `later` pays most by `merit`, or None if it never does."""
        if not (self.tuning and later.tuning):
            return None
        best = max(TS[1:-1], key=lambda at: self.until(at, later).merit)
        return best if self.until(best, later).merit > self.merit else None

    def until(self, at: float, later: Measured) -> Measured:
        """Return this one below `at`, and `later` from there on."""
        pairs = zip(self.tuning, later.tuning, strict=True)
        tuning = tuple(one.until(at, other) for one, other in pairs)
        return replace(later, tuning=tuning, curve=self.curve.until(at, later.curve))


class Trial:
    """One sample in three parts: trained on the first, tuned and calibrated on the second, measured on the third.

    Everything is trained and measured once. Methods that come down to the same ψ share it.
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

        `confidences`: backfill orders by name, (n,) each, lowest first. Without them the order is random. A query's old vector
        is its stored one. `seen` (n,): records that an earlier training has seen, whose ψ or ρ is served now. They look better
        than others would, so they are only trained on. `behind`: the collections behind the newest old one. The old vector of a
        record there is its query in the newest, and `held_out` bounds how many records of the newest are kept to calibrate,
        and to measure on. `queries` are searched for in place of the measured records. The `logged` ones are trained on beside
        the records, but for those that are searched for here. Without `calibrate` distances are merged as they are, unless
        their metrics differ.

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
        )
        if (known := int(sample.own.sum())) < LEAST_PAIRS:
            raise PlanRefused(
                f"{counted(known, 'pair is', 'pairs are')} too few to train and to measure on; "
                f"sample {LEAST_PAIRS} or more, or use the method naive"
            )
        rows = sample.split(seed=seed, most=held_out, seen=np.zeros(len(pairs), dtype=bool) if seen is None else seen)
        #: The rows of the pairs to train on.
        self.seen = rows[0]
        self.train = replace(sample, queries=None).take(self.seen)
        self._parts_by_order = parts_by_order(sample, rows[1:], confidences, seed)
        first = self._parts_by_order[self.orders[0]]
        if not (first.check.query_set.relevance.any() and first.judge.query_set.relevance.any()):
            raise PlanRefused("Hardly two records of the sample share a label, so nothing can be measured; leave the labels out")
        self.logged = None if logged is None else first.unasked(logged)
        self._fits: dict[Method, Fitted] = {}
        self._tuned: dict[Method, dict[str, Any]] = {}
        self._fitted: dict[Method, tuple[Method, Fitted]] = {}
        self._measured: dict[tuple[str, str], Measured] = {}

    @property
    def relevance(self) -> str:
        """Return what decides relevance: a query's own `answers`, `labels`, or `neighbours` by the new model."""
        judge = self._parts_by_order[self.orders[0]].judge
        return "answers" if judge.queries else "labels" if judge.pairs.labels is not None else "neighbours"

    @property
    def held_out(self) -> int:
        """Return the number of records to tune and calibrate on."""
        return len(self._parts_by_order[self.orders[0]].check.pairs)

    @property
    def evaluated(self) -> int:
        """Return the number of queries to measure on."""
        return len(self._parts_by_order[self.orders[0]].judge.query_set)

    def fitted(self, method: Method) -> tuple[Method, Fitted]:
        """Fit a method. Leave ρ out unless the part kept for tuning shows that ρ keeps the new model's quality."""
        if method not in self._fitted:
            self._fitted[method] = self._chosen(method)
        return self._fitted[method]

    def _chosen(self, method: Method) -> tuple[Method, Fitted]:
        # Without labels the new model's own neighbours decide relevance, and any ρ can only lead away from them.
        if method.has_head and self.train.pairs.labels is not None:
            fitted, check = self._fit(method), self._parts_by_order[self.orders[0]].check
            end, without = (check.curve(each, ts=(1.0,)).precision[0] for each in (fitted, Fitted()))  # (Q,), (Q,)
            # By the interval: if ρ changes next to nothing, the mean alone would pass it half of the time.
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
        """Return the better, on the part kept for tuning, of the contrast alone and the contrast with Eq. 9 beside it.

        With few records in each class, or weak models, classes say too little about where a record lies. With many they say more.
        """
        pulled = self._trained(method, replace(self.settings, pull=1.0))
        stage = self._parts_by_order[self.orders[0]]
        tuned = [stage.tuned(each, calibrate=self._calibrate)[1] for each in (alone, pulled)]
        worth = [merit(curves) if curves else -math.inf for curves in tuned]
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

    def measure(self, name: str, fitted: Fitted, order: str) -> Measured:
        """Calibrate and measure a fitted method. A name stands for the same method in every call."""
        if (name, order) not in self._measured:
            stage = self._parts_by_order[order]
            calibrations, tuning = stage.tuned(fitted, calibrate=self._calibrate)
            curve = stage.judge.curve(fitted, calibrations)
            self._measured[name, order] = Measured(fitted=fitted, calibrations=calibrations, tuning=tuple(tuning), curve=curve)
        return self._measured[name, order]

    def naive(self, order: str) -> Measured:
        """Measure both embedders for each query, the baseline of all comparisons."""
        return self.measure(Method.NAIVE, Fitted(), order)

    def predict(self, method: Method, order: str | None = None) -> Prediction:
        """Predict an upgrade by this method, in this order or in the first one.

        The prediction holds exactly the fit that was measured. Nothing is refitted afterwards.
        """
        order = order or self.orders[0]
        chosen, fitted = self.fitted(method)
        return self._build_prediction(method, chosen, self.measure(chosen, fitted, order), order)

    def scheduled(self, told: Prediction) -> Prediction | None:
        """Return the same method on a schedule: both models embed each query first, ψ serves from the best t on.

        None if that never pays.
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
        before = "the present quality" if self.train.behind else "the old model"
        why = "no ρ was shown to keep the new model's quality" if self.train.pairs.labels is not None else "ρ needs labels"
        without = "" if chosen is method else f" ({chosen} instead of {method}: {why})"
        verdict, reason = verdict_of(chosen, found.curve, start, end, without=without, before=before, seed=self.seed)
        if switch:
            reason = f"until t = {switch:g} each model embeds the queries for its own collection: {reason}"
        return Prediction(
            method=chosen,
            asked=method,
            verdict=verdict,
            reason=reason,
            relevance=self.relevance,
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


def unmeasured(pairs: Pairs, *, old_metric: Metric, new_metric: Metric, behind: Sequence[OlderCollection]) -> Calibrations:
    """Return calibrations for `naive` if there is too little to measure on: none, unless the metrics differ.

    Raises PlanRefused if there is too little even for that.
    """
    part = Part(pairs=pairs, confidence=np.zeros(len(pairs)), old_metric=old_metric, new_metric=new_metric, behind=tuple(behind))
    return part.matched(Fitted()) if part.mixed(Fitted()) else part.uncalibrated


def finite(value: Any) -> Any:
    """Replace NaN and infinities, which JSON cannot hold, by None."""
    if isinstance(value, dict):
        return {key: finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
