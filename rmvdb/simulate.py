"""The quality curve of an upgrade before it is made: trained, calibrated and measured on three disjoint parts of one sample."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from rmvdb import calibration, metrics, training
from rmvdb.calibration import Calibration
from rmvdb.errors import PlanRefused
from rmvdb.metrics import Bools, Floats
from rmvdb.training import Fitted, Method, Pairs, Report, Settings
from rmvdb.types import Metric, Vectors

#: t = 0, 0.1 … 1: the paper's grid.
TS = tuple(i / 10 for i in range(11))
#: Where nobody knows what is relevant, it is this many nearest neighbours by the new model.
NEIGHBOURS = 10
#: More records make a narrower interval, but cost their square.
MOST_HELD_OUT = 3000
#: Below this many records a class, held-out records are those of held-out classes.
SMALL_CLASS = 20
LEAST_PAIRS = 60
#: A fall of less than half a point is not worth a warning.
TOLERATED_FALL = 0.005

#: Of the old legs, newest first, then of the new one; None leaves distances as they are.
Calibrations = tuple[Calibration | None, ...]
UNCALIBRATED: Calibrations = (None, None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """Quality over t, per query."""

    ts: tuple[float, ...]
    #: Average precision, (T, Q).
    precision: Floats
    #: Whether the first result is relevant, (T, Q).
    top1: Floats

    @property
    def map(self) -> list[float]:
        """mAP at each t, (T,)."""
        return [metrics.mean(row) for row in self.precision]

    @property
    def cmc(self) -> list[float]:
        """CMC@1 at each t, (T,)."""
        return [metrics.mean(row) for row in self.top1]


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """A curve in numbers; shares of 1."""

    ts: list[float]
    map: list[float]
    cmc: list[float]
    auc_map: float
    auc_cmc: float
    #: (AUC − old) / (new − old) of mAP; NaN where the models are equally good.
    gain: float
    #: How far mAP lies below its own earlier height at most.
    largest_fall: float
    largest_fall_cmc: float


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
    seed: int
    fitted: Fitted = field(repr=False)
    #: The rows of the pairs that it was fitted on.
    seen: npt.NDArray[np.intp] = field(repr=False)
    calibrations: Calibrations = field(repr=False)

    def to_json(self) -> dict[str, Any]:
        """All but the fitted parts, as JSON values; NaN as None."""
        names = [one.name for one in fields(self) if one.name not in ("fitted", "seen", "calibrations")]
        parts = {name: getattr(self, name) for name in names}
        curves = {name: asdict(parts.pop(name)) for name in ("curve", "naive")}
        cleaned: dict[str, Any] = _finite({**parts, **curves})
        return cleaned


def curve(
    old_q: Vectors,
    old_g: Vectors,
    new_q: Vectors,
    new_g: Vectors,
    relevance: Bools,
    order: npt.NDArray[np.intp],
    calibrations: Calibrations = UNCALIBRATED,
    *,
    old_metric: Metric,
    new_metric: Metric,
    leave_out: Bools | None = None,
    ts: Sequence[float] = TS,
) -> Curve:
    """Search Q queries in a gallery of G records of which the first round(t·G) of `order` are re-embedded, exactly, for each t.

    `old_q` (Q, d_old) are the queries in the old space, `new_q` (Q, d_new) in the new one; `old_g` and `new_g` the gallery.
    `relevance` and `leave_out` are (Q, G), the latter for what must not be a result, such as the query itself.
    """
    d_old = _distances(old_q, old_g, old_metric, calibrations[0])  # (Q, G)
    d_new = _distances(new_q, new_g, new_metric, calibrations[1])  # (Q, G)
    return _moved(d_old, d_new, relevance, order, leave_out, ts)


def _moved(
    d_old: Floats, d_new: Floats, relevance: Bools, order: npt.NDArray[np.intp], leave_out: Bools | None, ts: Sequence[float]
) -> Curve:
    """The curve from the distances (Q, G) of each record where it is and where it will be."""
    if leave_out is not None:
        d_old[leave_out], d_new[leave_out] = np.inf, np.inf
    place = np.empty(len(order), dtype=np.intp)
    place[order] = np.arange(len(order))
    precision, top1 = [], []
    for t in ts:
        merged = np.where(place[None, :] < round(t * len(order)), d_new, d_old)  # (Q, G)
        precision.append(metrics.average_precision(merged, relevance))
        top1.append(metrics.cmc(merged, relevance, k=1))
    return Curve(ts=tuple(ts), precision=np.array(precision), top1=np.array(top1))


def _distances(queries: Vectors, gallery: Vectors, metric: Metric, calibrate: Calibration | None) -> Floats:
    distances = metrics.distances(queries, gallery, metric=metric).astype(np.float64)
    return distances if calibrate is None else calibrate.apply(distances)


@dataclass(frozen=True, kw_only=True, slots=True)
class Behind:
    """An old collection behind the newest one. ψ is trained on the newest alone; all are calibrated and measured on."""

    metric: Metric
    #: Which of the n pairs it holds, (n,), and their vectors there, (n, d); the other rows are not looked at.
    held: Bools
    vectors: Vectors
    #: From the queries of the newest old collection to those of this one.
    lead: Callable[[Vectors], Vectors]
    #: The queries of all pairs, (n, d), where an embedder of its own makes them and none leads here.
    asked: Vectors | None = None

    def take(self, rows: npt.NDArray[np.intp]) -> Behind:
        """What it is of these pairs."""
        asked = None if self.asked is None else self.asked[rows]
        return replace(self, held=self.held[rows], vectors=self.vectors[rows], asked=asked)


def predict(
    pairs: Pairs,
    *,
    method: Method,
    confidence: npt.NDArray[np.floating] | None = None,
    old_metric: Metric,
    new_metric: Metric,
    settings: Settings,
    seed: int = 0,
    seen: Bools | None = None,
    behind: Sequence[Behind] = (),
    held_out: int | None = None,
    progress: Report | None = None,
) -> Prediction:
    """Fit on one part of the pairs, calibrate on a second, measure on a third.

    `confidence` (n,) orders the backfill, lowest first; without it the order is random. A query's old vector is its stored
    one. `seen` (n,) by an earlier training, whose ψ or ρ is served now: such records look better than others would, so they are
    only trained on. `behind`: the collections behind the newest old one, where there are any; the old vector of a record they
    hold is its query there, and `held_out` bounds how many records of the newest are kept to calibrate, and to measure on.
    What is returned is exactly what was measured: nothing is refitted afterwards. Raises PlanRefused where the pairs are too few.
    """
    keys = np.random.default_rng(seed).random(len(pairs)) if confidence is None else np.asarray(confidence, dtype=np.float64)
    sample = _Part(pairs=pairs, confidence=keys, old_metric=old_metric, new_metric=new_metric, behind=tuple(behind))
    if (known := int(sample.own.sum())) < LEAST_PAIRS:
        raise PlanRefused(f"{known} pairs are too few to train and to measure on; give a sample of {LEAST_PAIRS} or more")
    rows = sample.split(seed=seed, most=held_out, seen=np.zeros(len(pairs), dtype=bool) if seen is None else seen)
    train, check, judge = map(sample.take, rows)
    if not (check.relevance().any() and judge.relevance().any()):
        raise PlanRefused("Hardly two records of the sample share a label, so nothing can be measured; leave the labels out")
    chosen, fitted = _fitted(train, check, method, settings, progress)
    calibrations = _calibrations(check, fitted)
    measured, naive = judge.curve(fitted, calibrations), judge.curve(Fitted(), _calibrations(check, Fitted()))
    old, new = naive.map[0], naive.map[-1]
    start, end = measured.precision[0] - naive.precision[0], measured.precision[-1] - naive.precision[-1]  # (Q,), (Q,)
    before = "what is served now" if behind else "the old model"
    verdict, reason = _verdict(chosen, measured, start, end, asked=method, before=before, seed=seed)
    return Prediction(
        method=chosen,
        asked=method,
        verdict=verdict,
        reason=reason,
        labelled=pairs.labels is not None,
        calibrated=any(calibrations),
        trained=len(train.pairs),
        held_out=len(check.pairs),
        evaluated=len(judge.pairs),
        map_old=old,
        map_new=new,
        cmc_old=naive.cmc[0],
        cmc_new=naive.cmc[-1],
        curve=summary(measured, old=old, new=new),
        naive=summary(naive, old=old, new=new),
        start=metrics.bootstrap(start, seed=seed),
        end=metrics.bootstrap(end, seed=seed),
        negative_flips=metrics.negative_flips(naive.top1[0], measured.top1[0]),
        seed=seed,
        fitted=fitted,
        seen=rows[0],
        calibrations=calibrations,
    )


#: Rows to train on, to calibrate on and to measure on.
Split = tuple[npt.NDArray[np.intp], npt.NDArray[np.intp], npt.NDArray[np.intp]]


def split(pairs: Pairs, *, seed: int, most: int | None = None, seen: Bools | None = None) -> Split:
    """About 60 % of the rows to train on, 20 %, or `most`, each to calibrate and to measure on: disjoint, and together all.

    Rows that an earlier training has `seen` (n,) are trained on.
    """
    if seen is not None and seen.any():
        fresh = np.flatnonzero(~seen)
        share = min(5, max(2, round(2 * len(pairs) / max(len(fresh), 1))))  # tenths of what is fresh
        check, judge = (fresh[rows] for rows in _held_out(pairs.take(fresh), share, seed=seed, most=most))
    else:
        check, judge = _held_out(pairs, 2, seed=seed, most=most)
    return np.setdiff1d(np.arange(len(pairs)), np.concatenate([check, judge])), check, judge


def _held_out(pairs: Pairs, share: int, *, seed: int, most: int | None) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """So many tenths of the rows, or `most`, to calibrate and to measure on, each."""
    most = MOST_HELD_OUT if most is None else most
    rng = np.random.default_rng(seed)
    rows, turn = rng.permutation(len(pairs)), np.arange(len(pairs))
    if pairs.labels is not None:
        codes = np.unique(pairs.labels, return_inverse=True)[1].reshape(-1)
        codes = rng.permutation(codes.max() + 1)[codes]
        rows = rows[np.argsort(codes[rows], kind="stable")]
        # Small classes stay whole: torn apart, they would leave a held-out record nothing to find.
        turn = codes[rows] if len(pairs) < SMALL_CLASS * (codes.max() + 1) else turn
    check, judge = (rows[np.isin(turn % 10, tenths[:share])] for tenths in ((3, 8, 6, 1, 9), (0, 5, 2, 7, 4)))
    return rng.permutation(check)[:most], rng.permutation(judge)[:most]


def summary(measured: Curve, *, old: float, new: float) -> Summary:
    """The numbers of a curve, against the mAP of the old and of the new model."""
    maps, cmcs = measured.map, measured.cmc
    auc = metrics.area(measured.ts, maps)
    return Summary(
        ts=list(measured.ts),
        map=maps,
        cmc=cmcs,
        auc_map=auc,
        auc_cmc=metrics.area(measured.ts, cmcs),
        gain=metrics.gain(auc, old=old, new=new),
        largest_fall=metrics.largest_fall(maps),
        largest_fall_cmc=metrics.largest_fall(cmcs),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Part:
    """A part of the sample, in which every record is a query and the others are its gallery."""

    pairs: Pairs
    #: (n,), the lowest is re-embedded first.
    confidence: Floats
    old_metric: Metric
    new_metric: Metric
    behind: tuple[Behind, ...] = ()

    def take(self, rows: npt.NDArray[np.intp]) -> _Part:
        behind = tuple(each.take(rows) for each in self.behind)
        return replace(self, pairs=self.pairs.take(rows), confidence=self.confidence[rows], behind=behind)

    @property
    def own(self) -> Bools:
        """Which records the newest old collection holds, (n,)."""
        own = np.ones(len(self.pairs), dtype=np.bool_)
        for each in self.behind:
            own &= ~each.held
        return own

    @property
    def uncalibrated(self) -> Calibrations:
        return (None,) * (2 + len(self.behind))

    def split(self, *, seed: int, most: int | None, seen: Bools) -> Split:
        """Rows of the three parts; what the newest old collection does not hold is never trained on."""
        own, others = np.flatnonzero(self.own), np.flatnonzero(~self.own & ~seen)
        others = np.random.default_rng(seed).permutation(others)
        train, check, judge = (own[rows] for rows in split(self.pairs.take(own), seed=seed, most=most, seen=seen[own]))
        return train, np.concatenate([check, others[::2]]), np.concatenate([judge, others[1::2]])

    def order(self) -> npt.NDArray[np.intp]:
        """As the records are backfilled: the oldest collection first, ascending confidence within each."""
        depth = np.zeros(len(self.pairs), dtype=np.intp)
        for at, each in enumerate(self.behind, start=1):
            depth[each.held] = at
        return np.lexsort((self.confidence, -depth))

    def relevance(self) -> Bools:
        """(n, n): records of the query's class, else the nearest by the new model; never the query itself."""
        self_pair = np.eye(len(self.pairs), dtype=bool)
        if self.pairs.labels is not None:
            labels = self.pairs.labels
            return np.asarray(labels[:, None] == labels[None, :], dtype=np.bool_) & ~self_pair
        distances = metrics.distances(self.pairs.new, self.pairs.new, metric=self.new_metric)
        nearest = np.argsort(np.where(self_pair, np.inf, distances), axis=1, kind="stable")
        relevant = np.zeros_like(self_pair)
        np.put_along_axis(relevant, nearest[:, : max(1, min(NEIGHBOURS, len(self.pairs) // 20))], True, axis=1)
        return relevant

    def legs(self, fitted: Fitted) -> list[_Leg]:
        """The old legs, newest first, then the new one; every record is a query of each."""
        final = fitted.final(self.pairs.new)
        first = self.pairs.old if fitted.reverse is None else fitted.reverse.apply(final)
        newest = _Leg(held=self.own, queries=first, gallery=self.pairs.old[self.own], metric=self.old_metric)
        older = [
            _Leg(
                held=each.held,
                queries=each.lead(first) if each.asked is None else each.asked,
                gallery=each.vectors[each.held],
                metric=each.metric,
            )
            for each in self.behind
        ]
        everything = np.ones(len(self.pairs), dtype=bool)
        return [newest, *older, _Leg(held=everything, queries=final, gallery=final, metric=self.new_metric)]

    def curve(self, fitted: Fitted, calibrations: Calibrations | None = None) -> Curve:
        *old, new = zip(self.legs(fitted), calibrations or self.uncalibrated, strict=True)
        d_new = new[0].distances(new[1])  # (n, n)
        d_old = np.empty_like(d_new)
        for leg, calibrate in old:
            d_old[:, leg.held] = leg.distances(calibrate)
        return _moved(d_old, d_new, self.relevance(), self.order(), np.eye(len(self.pairs), dtype=bool), TS)

    def calibrations(self, fitted: Fitted) -> Calibrations:
        relevant, others = self.relevance(), ~np.eye(len(self.pairs), dtype=bool)
        return tuple(leg.calibration(relevant[:, leg.held], others[:, leg.held]) for leg in self.legs(fitted))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Leg:
    """One leg over a part of n records, of which it holds m."""

    #: (n,), (n, d), (m, d)
    held: Bools
    queries: Vectors
    gallery: Vectors
    metric: Metric

    def distances(self, calibrate: Calibration | None) -> Floats:
        """Of every query to every record that it holds, (n, m)."""
        return _distances(self.queries, self.gallery, self.metric, calibrate)

    def calibration(self, relevant: Bools, counted: Bools) -> Calibration | None:
        """Its own, from those (query, record) pairs that count, both (n, m); none where it holds nothing any more."""
        if not self.held.any():
            return None
        distances = metrics.distances(self.queries, self.gallery, metric=self.metric)
        return calibration.fit(distances[counted], relevant[counted])


def _fitted(train: _Part, check: _Part, method: Method, settings: Settings, progress: Report | None) -> tuple[Method, Fitted]:
    """What is fitted in the end: without ρ where the part kept for tuning doesn't show that ρ keeps the new model's quality."""

    def fit(method: Method) -> Fitted:
        return training.fit(
            train.pairs,
            method=method,
            old_metric=train.old_metric,
            new_metric=train.new_metric,
            settings=settings,
            progress=progress,
        )

    # Without labels the new model's own neighbours are what counts, and no ρ can come nearer to them than none.
    if method.has_head and train.pairs.labels is not None:
        fitted = fit(method)
        change = check.curve(fitted).precision[-1] - check.curve(Fitted()).precision[-1]  # (Q,)
        # By the interval: where ρ changes next to nothing the mean alone would pass it as often as not.
        if metrics.bootstrap(change, seed=settings.seed)[0] >= 0:
            return method, fitted
    return method.headless, fit(method.headless)


def _calibrations(check: _Part, fitted: Fitted) -> Calibrations:
    """Calibrations where they are worth it: fitted on one half, they must raise the curve on the other."""
    if len({check.old_metric, check.new_metric, *(each.metric for each in check.behind)}) > 1:
        return check.calibrations(fitted)  # such distances can't be compared at all
    rows = np.arange(len(check.pairs))
    halves = check.take(rows[::2]), check.take(rows[1::2])
    try:
        raw = [half.curve(fitted) for half in halves]
        calibrated = [half.curve(fitted, other.calibrations(fitted)) for half, other in zip(halves, halves[::-1], strict=True)]
        better = _merit(calibrated) > _merit(raw)
        return check.calibrations(fitted) if better else check.uncalibrated
    except PlanRefused:  # too few pairs to calibrate on
        return check.uncalibrated


def _merit(curves: Sequence[Curve]) -> float:
    """The areas of mAP and CMC@1, less what they fall on the way: a curve that only rises is worth more than its area."""
    maps, cmcs = (np.mean([getattr(one, name) for one in curves], axis=0).tolist() for name in ("map", "cmc"))
    return sum(metrics.area(TS, values) - metrics.largest_fall(values) for values in (maps, cmcs))


def _verdict(
    method: Method, measured: Curve, start: Floats, end: Floats, *, asked: Method, before: str, seed: int
) -> tuple[Literal["ok", "warn", "refuse"], str]:
    """Promise 7 of the design: M_0 ≥ M_old, M_t rises, M_1 ≥ M_new, each within the noise of the sample."""
    without = "" if method is asked else f" ({method} instead of {asked}: no ρ was shown to keep the new model's quality)"
    (low, high), (_, end_high), fall = (metrics.bootstrap(v, seed=seed) for v in (start, end, _fallen(measured)))
    span = f"mAP at the start {_points(low)} to {_points(high)} points against {before}"
    if high < 0:
        return "refuse", f"{method} would start below {before} ({span}){without}; the method naive would not"
    if end_high < 0:
        lost = f"{_points(metrics.mean(end))} points of mAP"
        return "warn", f"{method} would end below the new model ({lost}); the method {method.headless} would not"
    if low < 0:
        return "warn", f"{method} may start below {before} ({span}){without}; the method naive would not"
    if fall[1] < 0 and metrics.largest_fall(measured.map) > TOLERATED_FALL:
        lost = _points(-metrics.largest_fall(measured.map))
        return (
            "warn",
            f"{method} would fall by {lost} points on its way{without}; another order, or the method {_other(method)}, may not",
        )
    return "ok", f"{method} starts no lower than {before}, rises, and ends no lower than the new model{without}"


def _fallen(measured: Curve) -> Floats:
    """The change per query between the two moments between which the curve falls most, (Q,)."""
    maps = np.array(measured.map)
    later = int((np.maximum.accumulate(maps) - maps).argmax())
    change: Floats = measured.precision[later] - measured.precision[int(maps[: later + 1].argmax())]
    return change


def _other(method: Method) -> Method:
    return Method.RM if method is Method.NAIVE else Method.NAIVE


def _points(share: float) -> str:
    return f"{100 * share:+.1f}"


def _finite(value: Any) -> Any:
    """NaN and infinities, which JSON has no word for, as None."""
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
