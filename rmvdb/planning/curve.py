"""The quality curve of an upgrade: every metric, or the one to choose by, for each query at every t."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from rmvdb.learning import geometry
from rmvdb.learning.calibration import Calibration
from rmvdb.learning.references import LegScale
from rmvdb.planning import quality
from rmvdb.planning.objective import Objective
from rmvdb.planning.quality import Bools, Floats
from rmvdb.types import Metric, Vectors

#: t = 0, 0.1 … 1: the paper's grid.
TS = tuple(i / 10 for i in range(11))
#: If there are no labels and no answers, this many nearest neighbours by the new model are relevant. Recall counts as many hits.
NEIGHBOURS = 10
#: One for each old leg, newest first, then one for the new leg. None leaves distances as they are.
Calibrations = tuple[LegScale | None, ...]
#: The row of a query in a gallery that does not hold it.
NOT_THERE = -1
UNCALIBRATED: tuple[None, None] = (None, None)


#: Each metric of distances and relevance, (Q, G) to (Q,).
METRICS: Mapping[Objective, Callable[[Floats, Bools], Floats]] = {
    Objective.MAP: quality.average_precision,
    Objective.CMC: lambda distance, relevant: quality.cmc(distance, relevant, k=1),
    Objective.NDCG: lambda distance, relevant: quality.ndcg(distance, relevant, k=NEIGHBOURS),
    Objective.RECALL: lambda distance, relevant: quality.recall(distance, relevant, k=NEIGHBOURS),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Course:
    """One metric over t, for each query."""

    ts: tuple[float, ...]
    #: (T, Q)
    values: Floats

    @property
    def means(self) -> list[float]:
        """Return the mean over queries at each t, (T,)."""
        return [quality.mean(row) for row in self.values]

    @property
    def areas(self) -> Floats:
        """Return the area under each query's own values, (Q,)."""
        return quality.areas(self.ts, self.values)

    def until(self, at: float, later: Course) -> Course:
        """Return the course of a schedule: this one below t = `at`, and `later` from there on."""
        return Course(ts=self.ts, values=_until(self.ts, at, self.values, later.values))


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """Every metric over t, for each query."""

    ts: tuple[float, ...]
    #: Average precision, (T, Q).
    precision: Floats
    #: Whether the first result is relevant, and whether one of the first five is, (T, Q).
    top1: Floats
    top5: Floats
    #: The share of relevant records among the first ten, and nDCG@10, (T, Q).
    recall: Floats
    ndcg: Floats

    @property
    def map(self) -> list[float]:
        """Return mAP at each t, (T,)."""
        return [quality.mean(row) for row in self.precision]

    @property
    def cmc(self) -> list[float]:
        """Return CMC@1 at each t, (T,)."""
        return [quality.mean(row) for row in self.top1]

    def course(self, objective: Objective) -> Course:
        """Return one metric of it."""
        names = {Objective.MAP: "precision", Objective.CMC: "top1", Objective.NDCG: "ndcg", Objective.RECALL: "recall"}
        return Course(ts=self.ts, values=getattr(self, names[objective]))

    def held(self, at: int) -> Curve:
        """Return a level curve with the quality at moment number `at`, such as one model alone."""
        parts = {name: np.repeat(part[at][None], len(self.ts), axis=0) for name, part in self._parts()}
        return Curve(ts=self.ts, **parts)

    def until(self, at: float, later: Curve) -> Curve:
        """Return the curve of a schedule: this one below t = `at`, and `later` from there on."""
        return Curve(ts=self.ts, **{name: _until(self.ts, at, part, getattr(later, name)) for name, part in self._parts()})

    def _parts(self) -> Iterator[tuple[str, Floats]]:
        return ((each.name, getattr(self, each.name)) for each in fields(self) if each.name != "ts")


def _until(ts: Sequence[float], at: float, before: Floats, later: Floats) -> Floats:
    first = np.array(ts)[:, None] < at  # (T, 1)
    result: Floats = np.where(first, before, later)
    return result


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """A curve in numbers. Shares of 1."""

    ts: list[float]
    map: list[float]
    cmc: list[float]
    cmc5: list[float]
    recall: list[float]
    ndcg: list[float]
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
    calibrations: Sequence[Calibration | None] = UNCALIBRATED,
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
    d_old = calibrated_distances(old_q, old_g, old_metric, calibrations[0])  # (Q, G)
    d_new = calibrated_distances(new_q, new_g, new_metric, calibrations[1])  # (Q, G)
    return curve_of(d_old, d_new, relevance, order, leave_out, ts)


def curve_of(
    d_old: Floats,
    d_new: Floats,
    relevance: Bools,
    order: npt.NDArray[np.intp],
    leave_out: Bools | None,
    ts: Sequence[float] = TS,
    *,
    rescore: int = 0,
) -> Curve:
    """Return the curve from the distances (Q, G) of each record in its old collection and in the new one.

    `rescore`: so many of the nearest records of the old collections take their distance in the new one, as a search does it.
    """
    measured = [
        (
            quality.average_precision(each, relevance),
            *(quality.cmc(each, relevance, k=k) for k in (1, 5)),
            quality.recall(each, relevance, k=NEIGHBOURS),
            quality.ndcg(each, relevance, k=NEIGHBOURS),
        )
        for each in merged(d_old, d_new, order, leave_out, ts, rescore=rescore)
    ]
    precision, top1, top5, recall, ndcg = (np.array(part) for part in zip(*measured, strict=True))
    return Curve(ts=tuple(ts), precision=precision, top1=top1, top5=top5, recall=recall, ndcg=ndcg)


def course_of(
    objective: Objective,
    d_old: Floats,
    d_new: Floats,
    relevance: Bools,
    order: npt.NDArray[np.intp],
    leave_out: Bools | None,
    ts: Sequence[float] = TS,
    *,
    rescore: int = 0,
) -> Course:
    """Return one metric of `curve_of`, which takes a fraction of the time."""
    parts = merged(d_old, d_new, order, leave_out, ts, rescore=rescore)
    return Course(ts=tuple(ts), values=np.array([METRICS[objective](each, relevance) for each in parts]))


def merged(
    d_old: Floats,
    d_new: Floats,
    order: npt.NDArray[np.intp],
    leave_out: Bools | None,
    ts: Sequence[float],
    *,
    rescore: int = 0,
) -> Iterator[Floats]:
    """Yield the distances by which the records rank at each t, (Q, G)."""
    if leave_out is not None:
        d_old, d_new = np.where(leave_out, np.inf, d_old), np.where(leave_out, np.inf, d_new)
    place = np.empty(len(order), dtype=np.intp)
    place[order] = np.arange(len(order))
    for t in ts:
        moved = place < round(t * len(order))  # (G,)
        found = np.where(moved, d_new, d_old)  # (Q, G)
        if rescore and not moved.all():
            left = np.flatnonzero(~moved)
            nearest = np.argpartition(d_old[:, left], min(rescore, len(left)) - 1, axis=1)[:, :rescore]
            columns = left[nearest]  # (Q, K)
            np.put_along_axis(found, columns, np.take_along_axis(d_new, columns, 1), 1)
        yield found


def neighbours(queries: Vectors, gallery: Vectors, *, metric: Metric, itself: npt.NDArray[np.intp] | None = None) -> Bools:
    """Return relevance without labels, (Q, G): each query's nearest records by the new model, but not its row `itself`."""
    distances = geometry.distances(queries, gallery, metric=metric)
    if itself is not None:
        known = np.flatnonzero(itself != NOT_THERE)
        distances[known, itself[known]] = np.inf
    most = max(1, min(NEIGHBOURS, len(gallery) // 20))
    alike = np.zeros_like(distances, dtype=np.bool_)
    np.put_along_axis(alike, np.argsort(distances, axis=1, kind="stable")[:, :most], True, axis=1)
    return alike


def calibrated_distances(queries: Vectors, gallery: Vectors, metric: Metric, calibrate: Calibration | None) -> Floats:
    """Return the distances of queries (Q, d) to a gallery (G, d) on the common scale, (Q, G)."""
    distances = geometry.distances(queries, gallery, metric=metric).astype(np.float64)
    return distances if calibrate is None else calibrate.apply(distances)


def summary(measured: Curve, *, old: float, new: float) -> Summary:
    """Return the numbers of a curve, against the mAP of the old and of the new model."""
    maps, cmcs = measured.map, measured.cmc
    rows = (measured.top5, measured.recall, measured.ndcg)
    cmc5, recall, ndcg = ([quality.mean(row) for row in each] for each in rows)
    auc = quality.area(measured.ts, maps)
    return Summary(
        ts=list(measured.ts),
        map=maps,
        cmc=cmcs,
        cmc5=cmc5,
        recall=recall,
        ndcg=ndcg,
        auc_map=auc,
        auc_cmc=quality.area(measured.ts, cmcs),
        gain=quality.gain(auc, old=old, new=new),
        largest_fall=quality.largest_fall(maps),
        largest_fall_cmc=quality.largest_fall(cmcs),
    )
