"""The quality curve of an upgrade, predicted by exact searches over a sample at every t."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from rmvdb.learning import calibration, geometry
from rmvdb.learning.calibration import Calibration
from rmvdb.learning.method import Fitted, Pairs
from rmvdb.planning import quality
from rmvdb.planning.quality import Bools, Floats
from rmvdb.types import Metric, Vectors

#: t = 0, 0.1 … 1: the paper's grid.
TS = tuple(i / 10 for i in range(11))
#: If there are no labels and no answers, this many nearest neighbours by the new model are relevant. Recall counts as many hits.
NEIGHBOURS = 10
#: More records make a narrower interval, but the cost grows with their square.
MOST_HELD_OUT = 3000
#: Below this many records in each class, whole classes are held out.
SMALL_CLASS = 20

#: One for each old leg, newest first, then one for the new leg. None leaves distances as they are.
Calibrations = tuple[Calibration | None, ...]
UNCALIBRATED: Calibrations = (None, None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """Quality over t, for each query."""

    ts: tuple[float, ...]
    #: Average precision, (T, Q).
    precision: Floats
    #: Whether the first result is relevant, and whether one of the first five is, (T, Q).
    top1: Floats
    top5: Floats
    #: The share of relevant records among the first ten, (T, Q).
    recall: Floats

    @property
    def map(self) -> list[float]:
        """Return mAP at each t, (T,)."""
        return [quality.mean(row) for row in self.precision]

    @property
    def cmc(self) -> list[float]:
        """Return CMC@1 at each t, (T,)."""
        return [quality.mean(row) for row in self.top1]

    @property
    def merit(self) -> Floats:
        """Return the area under average precision plus the area under CMC@1, (Q,)."""
        return quality.areas(self.ts, self.precision) + quality.areas(self.ts, self.top1)

    def held(self, at: int) -> Curve:
        """Return a level curve with the quality at moment number `at`, such as one model alone."""
        parts = (getattr(self, name) for name in ("precision", "top1", "top5", "recall"))
        precision, top1, top5, recall = (np.repeat(part[at][None], len(self.ts), axis=0) for part in parts)
        return Curve(ts=self.ts, precision=precision, top1=top1, top5=top5, recall=recall)

    def until(self, at: float, later: Curve) -> Curve:
        """Return this curve below t = `at` and `later` from there on: the quality of a schedule."""
        first = np.array(self.ts)[:, None] < at  # (T, 1)
        names = ("precision", "top1", "top5", "recall")
        parts = {name: np.where(first, getattr(self, name), getattr(later, name)) for name in names}
        return Curve(ts=self.ts, **parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """A curve in numbers. Shares of 1."""

    ts: list[float]
    map: list[float]
    cmc: list[float]
    cmc5: list[float]
    recall: list[float]
    auc_map: float
    auc_cmc: float
    #: (AUC − old) / (new − old) of mAP. NaN if the models are equally good.
    gain: float
    #: How far mAP lies below its own earlier height at most.
    largest_fall: float
    largest_fall_cmc: float


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

    `old_q` (Q, d_old) are the queries in the old space, `new_q` (Q, d_new) in the new one. `old_g` and `new_g` are the gallery.
    `relevance` and `leave_out` are (Q, G). Records in `leave_out`, such as the query itself, must not be a result.
    """
    d_old = _distances(old_q, old_g, old_metric, calibrations[0])  # (Q, G)
    d_new = _distances(new_q, new_g, new_metric, calibrations[1])  # (Q, G)
    return _moved(d_old, d_new, relevance, order, leave_out, ts)


def _moved(
    d_old: Floats,
    d_new: Floats,
    relevance: Bools,
    order: npt.NDArray[np.intp],
    leave_out: Bools | None,
    ts: Sequence[float],
) -> Curve:
    """Return the curve from the distances (Q, G) of each record in its old collection and in the new one."""
    if leave_out is not None:
        d_old[leave_out], d_new[leave_out] = np.inf, np.inf
    place = np.empty(len(order), dtype=np.intp)
    place[order] = np.arange(len(order))
    measured: list[tuple[Floats, ...]] = []
    for t in ts:
        moved = place < round(t * len(order))  # (G,)
        merged = np.where(moved, d_new, d_old)  # (Q, G)
        first, five = (quality.cmc(merged, relevance, k=k) for k in (1, 5))
        found = quality.recall(merged, relevance, k=NEIGHBOURS)
        measured.append((quality.average_precision(merged, relevance), first, five, found))
    precision, top1, top5, recall = (np.array(part) for part in zip(*measured, strict=True))
    return Curve(ts=tuple(ts), precision=precision, top1=top1, top5=top5, recall=recall)


def neighbours(new: Vectors, *, metric: Metric) -> Bools:
    """Return relevance without labels, (n, n): each record's nearest others by the new model's vectors (n, d)."""
    distances = geometry.distances(new, new, metric=metric)
    np.fill_diagonal(distances, np.inf)
    nearest = np.argsort(distances, axis=1, kind="stable")
    alike = np.zeros_like(distances, dtype=np.bool_)
    np.put_along_axis(alike, nearest[:, : max(1, min(NEIGHBOURS, len(new) // 20))], True, axis=1)
    return alike


def _distances(queries: Vectors, gallery: Vectors, metric: Metric, calibrate: Calibration | None) -> Floats:
    distances = geometry.distances(queries, gallery, metric=metric).astype(np.float64)
    return distances if calibrate is None else calibrate.apply(distances)


@dataclass(frozen=True, kw_only=True, slots=True)
class OlderCollection:
    """An old collection behind the newest one. ψ is trained on the newest alone, but all are calibrated and measured on."""

    metric: Metric
    #: Which of the n pairs it holds, (n,), and their vectors there, (n, d). Nothing reads the other rows.
    held: Bools
    vectors: Vectors
    #: Maps queries of the newest old collection to queries of this one.
    lead: Callable[[Vectors], Vectors]
    #: The queries of all pairs, (n, d), if its own embedder makes them and `lead` does not.
    asked: Vectors | None = None

    def take(self, rows: npt.NDArray[np.intp]) -> OlderCollection:
        """Return the collection with these pairs only."""
        asked = None if self.asked is None else self.asked[rows]
        return replace(self, held=self.held[rows], vectors=self.vectors[rows], asked=asked)


@dataclass(frozen=True, kw_only=True, slots=True)
class Queries:
    """q queries with their vectors in every space, and the records, of n, that each should find."""

    #: (q, d_old) and (q, d_new), the latter before ρ.
    old: Vectors
    new: Vectors
    #: (q, n)
    relevance: Bools
    #: Records that must not be a result, (q, n), such as the query itself.
    leave_out: Bools
    #: One for each collection behind: (q, d) if it has its own embedder, else None.
    behind: tuple[Vectors | None, ...] = ()

    def __len__(self) -> int:
        return len(self.new)

    def take(self, rows: npt.NDArray[np.intp]) -> Queries:
        """Return these queries only."""
        return Queries(
            old=self.old[rows],
            new=self.new[rows],
            relevance=self.relevance[rows],
            leave_out=self.leave_out[rows],
            behind=tuple(None if each is None else each[rows] for each in self.behind),
        )

    def among(self, rows: npt.NDArray[np.intp]) -> Queries:
        """Return the same queries for a gallery of these records."""
        return replace(self, relevance=self.relevance[:, rows], leave_out=self.leave_out[:, rows])


#: Rows to train on, to calibrate on and to measure on.
Split = tuple[npt.NDArray[np.intp], npt.NDArray[np.intp], npt.NDArray[np.intp]]


def split(pairs: Pairs, *, seed: int, most: int | None = None, seen: Bools | None = None) -> Split:
    """Split the rows: about 60 % to train on, and 20 %, or `most`, each to calibrate and to measure on.

    The parts are disjoint, and together they are all rows. Rows that an earlier training has `seen` (n,) are trained on.
    """
    if seen is not None and seen.any():
        fresh = np.flatnonzero(~seen)
        share = min(5, max(2, round(2 * len(pairs) / max(len(fresh), 1))))  # tenths of the fresh rows
        check, judge = (fresh[rows] for rows in _held_out(pairs.take(fresh), share, seed=seed, most=most))
    else:
        check, judge = _held_out(pairs, 2, seed=seed, most=most)
    return np.setdiff1d(np.arange(len(pairs)), np.concatenate([check, judge])), check, judge


def _held_out(pairs: Pairs, share: int, *, seed: int, most: int | None) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Return `share` tenths of the rows, or `most`, to calibrate on, and as many to measure on."""
    most = MOST_HELD_OUT if most is None else most
    rng = np.random.default_rng(seed)
    rows, turn = rng.permutation(len(pairs)), np.arange(len(pairs))
    if pairs.labels is not None:
        codes = np.unique(pairs.labels, return_inverse=True)[1].reshape(-1)
        codes = rng.permutation(codes.max() + 1)[codes]
        rows = rows[np.argsort(codes[rows], kind="stable")]
        # Small classes stay whole. If they were split, a held-out record would have nothing to find.
        turn = codes[rows] if len(pairs) < SMALL_CLASS * (codes.max() + 1) else turn
    check, judge = (rows[np.isin(turn % 10, tenths[:share])] for tenths in ((3, 8, 6, 1, 9), (0, 5, 2, 7, 4)))
    return rng.permutation(check)[:most], rng.permutation(judge)[:most]


def summary(measured: Curve, *, old: float, new: float) -> Summary:
    """Return the numbers of a curve, against the mAP of the old and of the new model."""
    maps, cmcs = measured.map, measured.cmc
    cmc5, recall = ([quality.mean(row) for row in rows] for rows in (measured.top5, measured.recall))
    auc = quality.area(measured.ts, maps)
    return Summary(
        ts=list(measured.ts),
        map=maps,
        cmc=cmcs,
        cmc5=cmc5,
        recall=recall,
        auc_map=auc,
        auc_cmc=quality.area(measured.ts, cmcs),
        gain=quality.gain(auc, old=old, new=new),
        largest_fall=quality.largest_fall(maps),
        largest_fall_cmc=quality.largest_fall(cmcs),
    )


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of the sample as a gallery, and the queries: its own records, or others."""

    pairs: Pairs
    #: (n,). The lowest is re-embedded first.
    confidence: Floats
    old_metric: Metric
    new_metric: Metric
    behind: tuple[OlderCollection, ...] = ()
    #: None: every record is a query, and the others are the gallery.
    queries: Queries | None = None

    def take(self, rows: npt.NDArray[np.intp]) -> Part:
        """Return these records, with the same queries if there are any."""
        return replace(
            self,
            pairs=self.pairs.take(rows),
            confidence=self.confidence[rows],
            behind=tuple(each.take(rows) for each in self.behind),
            queries=self.queries and self.queries.among(rows),
        )

    @property
    def own(self) -> Bools:
        """Return which records the newest old collection holds, (n,)."""
        own = np.ones(len(self.pairs), dtype=np.bool_)
        for each in self.behind:
            own &= ~each.held
        return own

    def mixed(self, fitted: Fitted) -> bool:
        """Return whether the legs have different metrics, so that only calibrated distances can be merged."""
        newest = self.old_metric if fitted.lift is None else self.new_metric
        return len({newest, self.new_metric, *(each.metric for each in self.behind)}) > 1

    @property
    def uncalibrated(self) -> Calibrations:
        """Return no calibration for any leg."""
        return (None,) * (2 + len(self.behind))

    def split(self, *, seed: int, most: int | None, seen: Bools) -> Split:
        """Return the rows of the three parts. Only records of the newest old collection are trained on.

        The answers to the queries go to the last part, which is measured, unless an earlier training has `seen` them.
        """
        own, others = np.flatnonzero(self.own), np.flatnonzero(~self.own & ~seen)
        others = np.random.default_rng(seed).permutation(others)
        train, check, judge = (own[rows] for rows in split(self.pairs.take(own), seed=seed, most=most, seen=seen[own]))
        parts = train, np.concatenate([check, others[::2]]), np.concatenate([judge, others[1::2]])
        if self.queries is None:
            return parts
        answers = self.queries.relevance.any(axis=0) & ~seen
        train, check, judge = (rows[~answers[rows]] for rows in parts)
        return train, check, np.concatenate([judge, np.flatnonzero(answers)])

    @functools.cached_property
    def order(self) -> npt.NDArray[np.intp]:
        """Return the rows in the order of the backfill: the oldest collection first, ascending confidence within each."""
        return np.lexsort((self.confidence, -self.depth))

    @functools.cached_property
    def depth(self) -> npt.NDArray[np.intp]:
        """Return the number of the old leg that each record is in. 0 is the newest."""
        depth = np.zeros(len(self.pairs), dtype=np.intp)
        for at, each in enumerate(self.behind, start=1):
            depth[each.held] = at
        return depth

    @functools.cached_property
    def query_set(self) -> Queries:
        """Return the queries. By default every record is one, and should find its class, else the new model's nearest."""
        if self.queries is not None:
            return self.queries
        itself = np.eye(len(self.pairs), dtype=np.bool_)
        return Queries(
            old=self.pairs.old,
            new=self.pairs.new,
            relevance=self._alike() & ~itself,
            leave_out=itself,
            behind=tuple(each.asked for each in self.behind),
        )

    def _alike(self) -> Bools:
        """Return relevance, (n, n): records of the same class, else the nearest by the new model."""
        if self.pairs.labels is not None:
            labels = self.pairs.labels
            return np.asarray(labels[:, None] == labels[None, :], dtype=np.bool_)
        return neighbours(self.pairs.new, metric=self.new_metric)

    def legs(self, fitted: Fitted) -> list[_Leg]:
        """Return the old legs, newest first, then the new one."""
        asked = self.query_set
        final = fitted.final(asked.new)
        newest = self._newest(fitted, final)
        first = newest.queries
        older = [
            _Leg(
                held=each.held,
                queries=each.lead(first) if own is None else own,
                gallery=each.vectors[each.held],
                metric=each.metric,
            )
            for each, own in zip(self.behind, asked.behind, strict=True)
        ]
        everything = np.ones(len(self.pairs), dtype=bool)
        stored = final if self.queries is None else fitted.final(self.pairs.new)
        return [newest, *older, _Leg(held=everything, queries=final, gallery=stored, metric=self.new_metric)]

    def _newest(self, fitted: Fitted, final: Vectors) -> _Leg:
        """Return the newest old leg. `final` (q, d_new) are the queries of the new one."""
        old = self.pairs.old[self.own]
        if fitted.lift is not None:
            lifted = fitted.lifted(old, None if self.pairs.side is None else self.pairs.side[self.own])
            return _Leg(held=self.own, queries=final, gallery=lifted, metric=self.new_metric)
        queries = self.query_set.old if fitted.reverse is None else fitted.reverse.apply(final)
        return _Leg(held=self.own, queries=queries, gallery=old, metric=self.old_metric)

    def curve(self, fitted: Fitted, calibrations: Calibrations | None = None, *, ts: Sequence[float] = TS) -> Curve:
        """Measure the quality over t of a fitted method, with its distances calibrated or not."""
        *old, new = zip(self.legs(fitted), calibrations or self.uncalibrated, strict=True)
        d_new = new[0].distances(new[1])  # (q, n)
        d_old = np.empty_like(d_new)
        for leg, calibrate in old:
            d_old[:, leg.held] = leg.distances(calibrate)
        asked = self.query_set
        return _moved(d_old, d_new, asked.relevance, self.order, asked.leave_out, ts)

    def matched(self, fitted: Fitted) -> Calibrations:
        """Fit one for each old leg to the distances of the new leg. Raises PlanRefused if there is too little to fit on."""
        *old, new = self.legs(fitted)
        counted, others = ~self.query_set.leave_out, new.distances(None)
        return (*(leg.matched(others[:, leg.held], counted[:, leg.held]) for leg in old), None)

    def calibrations(self, fitted: Fitted) -> Calibrations:
        """Fit one for each leg to the odds of relevance. Raises PlanRefused if there is too little to fit on."""
        relevant, counted = self.query_set.relevance, ~self.query_set.leave_out
        return tuple(leg.calibration(relevant[:, leg.held], counted[:, leg.held]) for leg in self.legs(fitted))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Leg:
    """One leg over a part of n records. It holds m of them, for q queries."""

    #: (n,), (q, d), (m, d)
    held: Bools
    queries: Vectors
    gallery: Vectors
    metric: Metric

    def distances(self, calibrate: Calibration | None) -> Floats:
        """Return the distances of every query to every record that it holds, (q, m)."""
        return _distances(self.queries, self.gallery, self.metric, calibrate)

    def matched(self, others: Floats, counted: Bools) -> Calibration | None:
        """Fit a calibration to the distances in another leg, both (q, m), over the pairs that count. None if it holds nothing."""
        return calibration.match(self.distances(None)[counted], others[counted]) if self.held.any() else None

    def calibration(self, relevant: Bools, counted: Bools) -> Calibration | None:
        """Fit a calibration to the odds of relevance, (q, m), over the pairs that count. None if it holds nothing."""
        if not self.held.any():
            return None
        distances = geometry.distances(self.queries, self.gallery, metric=self.metric)
        return calibration.fit(distances[counted], relevant[counted])
