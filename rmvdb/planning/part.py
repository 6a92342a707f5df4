"""A part of the sample as a gallery, searched exactly, and its queries: its own records, or others."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from rmvdb.learning import calibration, geometry, references
from rmvdb.learning.calibration import Calibration
from rmvdb.learning.method import AsQueries, Fitted, Pairs
from rmvdb.planning.curve import (
    NOT_THERE,
    TS,
    Calibrations,
    Course,
    Curve,
    calibrated_distances,
    course_of,
    curve_of,
    neighbours,
)
from rmvdb.planning.objective import Objective
from rmvdb.planning.quality import Bools, Floats
from rmvdb.planning.split import Split, split
from rmvdb.serving.blend import blended
from rmvdb.types import Metric, Vectors

#: Rescoring K of so many records or more is like rescoring K of all.
LIKE_ALL = 1000
#: If the records are the queries, so many of them are. More queries narrow the interval, and cost in proportion.
MOST_QUERIES = 500


@dataclass(frozen=True, kw_only=True, slots=True)
class OlderCollection:
    """An old collection behind the newest one. ψ is trained on the newest alone, but all are calibrated and measured on."""

    metric: Metric
    #: Which of the n pairs it holds, (n,), and their vectors there, (n, d). Nothing reads the other rows.
    held: Bools
    vectors: Vectors
    #: Maps queries of the newest old collection to queries of this one.
    lead: Callable[[Vectors], Vectors]
    #: The queries of all pairs, (n, d), if its own embedder makes them and `lead` does not: of the records' own items, and of
    #: what `Pairs.as_queries` asks.
    own_queries: Vectors | None = None
    as_queries: Vectors | None = None

    def take(self, rows: npt.NDArray[np.intp]) -> OlderCollection:
        """Return the collection with these pairs only."""
        own_queries, as_queries = (None if each is None else each[rows] for each in (self.own_queries, self.as_queries))
        return replace(self, held=self.held[rows], vectors=self.vectors[rows], own_queries=own_queries, as_queries=as_queries)


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

    @property
    def answerable(self) -> int:
        """Return how many queries have a record that they should find and one that they should not."""
        others = ~(self.relevance | self.leave_out)
        return int((self.relevance.any(axis=1) & others.any(axis=1)).sum())

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


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of the sample as a gallery, and the queries: its own records, or others."""

    pairs: Pairs
    #: (n,). The lowest is re-embedded first.
    confidence: Floats
    old_metric: Metric
    new_metric: Metric
    behind: tuple[OlderCollection, ...] = ()
    #: None: records are the queries, and the others are the gallery.
    queries: Queries | None = None
    #: So many records are queries at most.
    most_queries: int = MOST_QUERIES
    #: How many records it stands for. 0: its own.
    gallery: int = 0

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
        """Return the queries. By default they are records, which should find their class, else the new model's nearest."""
        return self._records(labelled=self.pairs.labels is not None) if self.queries is None else self.queries

    def by_records(self) -> Part:
        """Return this part with its records as queries, which should find the new model's nearest, even if labels or answers are
        known."""
        return replace(self, queries=self._records(labelled=False))

    def asked_by(self, log: Pairs) -> Part:
        """Return this part with logged queries in place of its records, which should find the new model's nearest."""
        relevance = neighbours(log.new, self.pairs.new, metric=self.new_metric)
        queries = Queries(
            old=log.old,
            new=log.new,
            relevance=relevance,
            leave_out=np.zeros_like(relevance),
            behind=(None,) * len(self.behind),
        )
        return replace(self, queries=queries)

    def of_themselves(self, most: int) -> Part:
        """Return this part with `most` of its records as queries, which should find themselves."""
        asked = self.pairs.as_queries
        asked = None if asked is None or asked.excerpts else asked
        rows = self._drawn(asked, most)
        itself = self._itself(rows)
        return replace(self, queries=self._queries(asked, rows, relevance=itself, leave_out=np.zeros_like(itself)))

    def _records(self, *, labelled: bool) -> Queries:
        """Return records as queries. An excerpt of a record's text may find that record. A record's own item must not."""
        asked = self.pairs.as_queries
        rows = self._drawn(asked, self.most_queries)
        whole = np.full(len(rows), asked is None or not asked.excerpts)  # (q,)
        if asked is not None and asked.whole is not None:
            whole |= asked.whole[rows]
        itself = self._itself(rows) & whole[:, None]
        if labelled and (labels := self.pairs.labels) is not None:
            alike: Bools = labels[rows, None] == labels[None, :]
        else:
            new = self.pairs.new if asked is None else asked.new
            alike = neighbours(new[rows], self.pairs.new, metric=self.new_metric, itself=np.where(whole, rows, NOT_THERE))
        return self._queries(asked, rows, relevance=alike & ~itself, leave_out=itself)

    def _queries(self, asked: AsQueries | None, rows: npt.NDArray[np.intp], *, relevance: Bools, leave_out: Bools) -> Queries:
        vectors = asked or self.pairs
        behind = [each.own_queries if asked is None else each.as_queries for each in self.behind]
        return Queries(
            old=vectors.old[rows],
            new=vectors.new[rows],
            relevance=relevance,
            leave_out=leave_out,
            behind=tuple(None if each is None else each[rows] for each in behind),
        )

    def _drawn(self, asked: AsQueries | None, most: int) -> npt.NDArray[np.intp]:
        rows = np.arange(len(self.pairs))
        if asked is not None:
            every = [asked.old, asked.new, *(each.as_queries for each in self.behind if each.as_queries is not None)]
            rows = rows[np.all([np.isfinite(vectors).all(axis=1) for vectors in every], axis=0)]
        return np.sort(np.random.default_rng(len(rows)).permutation(rows)[:most])

    def _itself(self, rows: npt.NDArray[np.intp]) -> Bools:
        itself: Bools = rows[:, None] == np.arange(len(self.pairs))[None, :]
        return itself

    def legs(self, fitted: Fitted) -> list[_Leg]:
        """Return the old legs, newest first, then the new one."""
        asked = self.query_set
        final = fitted.final(asked.new)
        mapped = None if fitted.reverse is None else fitted.reverse.apply(final)
        older = [
            _Leg(
                held=each.held,
                queries=self._asked(fitted, each.metric, own, mapped, each.lead),
                gallery=each.vectors[each.held],
                metric=each.metric,
            )
            for each, own in zip(self.behind, asked.behind, strict=True)
        ]
        everything = np.ones(len(self.pairs), dtype=bool)
        new = _Leg(held=everything, queries=final, gallery=fitted.final(self.pairs.new), metric=self.new_metric)
        return [self._newest(fitted, final, mapped), *older, new]

    def _newest(self, fitted: Fitted, final: Vectors, mapped: Vectors | None) -> _Leg:
        """Return the newest old leg. `final` (q, d_new) are the queries of the new one, `mapped` (q, d_old) ψ's."""
        old = self.pairs.old[self.own]
        if fitted.lift is not None:
            lifted = fitted.lifted(old, None if self.pairs.side is None else self.pairs.side[self.own])
            return _Leg(held=self.own, queries=final, gallery=lifted, metric=self.new_metric)
        queries = self._asked(fitted, self.old_metric, None, mapped, lambda vectors: vectors)
        return _Leg(held=self.own, queries=queries, gallery=old, metric=self.old_metric)

    def _asked(
        self,
        fitted: Fitted,
        metric: Metric,
        own: Vectors | None,
        mapped: Vectors | None,
        lead: Callable[[Vectors], Vectors],
    ) -> Vectors:
        """Return the queries of an old leg: its own embedder's, else ψ's, the newest old model's, or a blend of both."""
        if own is not None:
            return own
        if mapped is None:
            return lead(self.query_set.old)
        if fitted.blend is None:
            return lead(mapped)
        return blended(lead(mapped), lead(self.query_set.old), fitted.blend, metric)

    def curve(
        self, fitted: Fitted, calibrations: Calibrations | None = None, *, ts: Sequence[float] = TS, rescore: int = 0
    ) -> Curve:
        """Measure every metric over t of a fitted method, with its distances calibrated or not."""
        d_old, d_new = self.distances(fitted, calibrations)
        asked = self.query_set
        return curve_of(d_old, d_new, asked.relevance, self.order, asked.leave_out, ts, rescore=self._rescored(rescore))

    def course(
        self,
        objective: Objective,
        fitted: Fitted,
        calibrations: Calibrations | None = None,
        *,
        ts: Sequence[float] = TS,
        rescore: int = 0,
    ) -> Course:
        """Measure one metric over t, which takes a fraction of the time."""
        d_old, d_new = self.distances(fitted, calibrations)
        asked = self.query_set
        rescored = self._rescored(rescore)
        return course_of(objective, d_old, d_new, asked.relevance, self.order, asked.leave_out, ts, rescore=rescored)

    def _rescored(self, count: int) -> int:
        """Return how many records of this part stand for so many of the gallery: in a small part they would be half of it."""
        return min(count, max(1, round(count * self._share))) if count else 0

    def stands_for(self, count: int) -> bool:
        """Return whether one record of this part does not stand for more than twice so many of the gallery."""
        return 2 * count * self._share >= 1

    @property
    def _share(self) -> float:
        return len(self.pairs) / max(1, min(self.gallery or len(self.pairs), LIKE_ALL))

    def distances(self, fitted: Fitted, calibrations: Calibrations | None) -> tuple[Floats, Floats]:
        """Return the distances of each record in its old collection and in the new one, (q, n) each, on the common scale."""
        legs = self.legs(fitted)
        scales = references.scales(calibrations or self.uncalibrated, [leg.queries for leg in legs])
        *old, d_new = (leg.distances(scale) for leg, scale in zip(legs, scales, strict=True))
        d_old = np.empty_like(d_new)
        for leg, distances in zip(legs, old, strict=False):
            d_old[:, leg.held] = distances
        return d_old, d_new

    def references(self, fitted: Fitted, train: Part) -> Calibrations:
        """Keep records of this part, and of the one to train on, to compare each query with in both spaces.

        More records find more exactly how near a query's nearest are, so this part alone would be worth less. Raises PlanRefused
        if a leg holds too few of them.
        """
        some, others = self.legs(fitted), train.legs(fitted)

        def kept(one: _Leg, other: _Leg) -> references.References:
            old = np.concatenate([one.gallery, other.gallery])
            new = np.concatenate([some[-1].gallery[one.held], others[-1].gallery[other.held]])
            return references.kept(old, new, one.metric, self.new_metric)

        return (*(kept(*each) for each in zip(some[:-1], others[:-1], strict=True)), None)

    def matched(self, fitted: Fitted) -> Calibrations:
        """Fit one for each old leg to the distances of the new leg. Raises PlanRefused if there is too little to fit on."""
        *old, new = self.legs(fitted)
        counted, others = ~self.query_set.leave_out, new.distances(None)
        return (
            *(
                leg.matched(others[:, leg.held], counted[:, leg.held], zero=Metric.IP not in (leg.metric, new.metric))
                for leg in old
            ),
            None,
        )

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

    def distances(self, scale: references.Scale | None) -> Floats:
        """Return the distances of every query to every record that it holds, (q, m), on the common scale."""
        found = calibrated_distances(self.queries, self.gallery, self.metric, None)
        return found if scale is None else scale(found.ravel(), [found.shape[1]] * len(found)).reshape(found.shape)

    def matched(self, others: Floats, counted: Bools, *, zero: bool) -> Calibration | None:
        """Fit a calibration to the distances in another leg, both (q, m), over the pairs that count. None if it holds nothing.

        `zero`: 0 is the distance of a record to itself in both.
        """
        return calibration.match(self.distances(None)[counted], others[counted], zero=zero) if self.held.any() else None

    def calibration(self, relevant: Bools, counted: Bools) -> Calibration | None:
        """Fit a calibration to the odds of relevance, (q, m), over the pairs that count. None if it holds nothing."""
        if not self.held.any():
            return None
        distances = geometry.distances(self.queries, self.gallery, metric=self.metric)
        return calibration.fit(distances[counted], relevant[counted])
