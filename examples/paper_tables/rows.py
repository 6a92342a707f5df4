"""Measures a method over the whole backfill: exact searches at t = 0, 0.1 … 1, and the numbers of the paper's tables."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import torch

from examples.paper_tables.data import Pictures
from rmvdb import metrics
from rmvdb.errors import PlanRefused
from rmvdb.learning import calibration
from rmvdb.learning.training import Fitted
from rmvdb.planning import curve as simulated
from rmvdb.planning.curve import UNCALIBRATED, Calibrations, Curve
from rmvdb.planning.quality import Bools
from rmvdb.types import Metric, Vectors

#: Queries that are searched for at once: memory is bounded by the gallery.
AT_ONCE = 500


@dataclass(frozen=True, kw_only=True)
class Legs:
    """The queries and the gallery as each of the two legs sees them: (Q, d_old), (G, d_old), (Q, d_new), (G, d_new)."""

    old_q: Vectors
    old_g: Vectors
    new_q: Vectors
    new_g: Vectors
    old_metric: Metric = Metric.COSINE
    new_metric: Metric = Metric.COSINE

    def take(self, queries: np.ndarray, gallery: np.ndarray) -> Legs:
        """These queries in a gallery of these records."""
        asked, found = (self.old_q[queries], self.new_q[queries]), (self.old_g[gallery], self.new_g[gallery])
        return replace(self, old_q=asked[0], old_g=found[0], new_q=asked[1], new_g=found[1])

    def served(self, fitted: Fitted, side: Vectors | None = None) -> Legs:
        """The same once ρ stands on the new model and new queries search the old gallery by ψ, or the gallery is lifted by h.

        `side` (G, d_side) is what else is known of the gallery, for an h that was trained with it.
        """
        final = fitted.final(self.new_q)
        served = replace(self, new_q=final, new_g=fitted.final(self.new_g))
        if fitted.lift is not None:
            lifted = fitted.lifted(self.old_g, side)
            return replace(served, old_q=final, old_g=lifted, old_metric=self.new_metric)
        return served if fitted.reverse is None else replace(served, old_q=fitted.reverse.apply(final))


@dataclass(frozen=True, kw_only=True)
class Ground:
    """The records that each query should and must not find, both (Q, G), and the order (G,) in which they are re-embedded."""

    relevance: Bools
    leave_out: Bools
    order: np.ndarray

    @classmethod
    def of(cls, gallery: Pictures, queries: Pictures | None, confidence: np.ndarray) -> Ground:
        """Records of the query's class; not itself, nor its identity seen by its own camera. Least confidence goes first."""
        asked = gallery if queries is None else queries
        relevance = asked.labels[:, None] == gallery.labels[None, :]
        leave_out = np.eye(len(asked), len(gallery), dtype=np.bool_) & (queries is None)
        if asked.cameras is not None and gallery.cameras is not None:
            leave_out |= metrics.same_camera(asked.labels, asked.cameras, gallery.labels, gallery.cameras)
        return cls(relevance=relevance & ~leave_out, leave_out=leave_out, order=np.argsort(confidence, kind="stable"))

    def take(self, queries: np.ndarray, gallery: np.ndarray) -> Ground:
        """These queries in a gallery of these records."""
        place = np.full(self.relevance.shape[1], -1)
        place[gallery] = np.arange(len(gallery))
        order = place[self.order]
        cut = np.ix_(queries, gallery)
        return Ground(relevance=self.relevance[cut], leave_out=self.leave_out[cut], order=order[order >= 0])


@dataclass(frozen=True, kw_only=True)
class Row:
    """A method's line: means over the seeds, shares of 1."""

    method: str
    auc_map: float
    auc_cmc: float
    gain: float
    #: The share of queries that are right by the old model and wrong at t = 0, 0.1 … 1, and the largest of each training.
    flips: float
    flips_curve: list[float]
    #: mAP and CMC@1 at t = 0, 0.1 … 1, and how far mAP lies below its own earlier height at most.
    curve: list[float]
    curve_cmc: list[float]
    fall: float
    #: How many trainings of ψ and ρ it is the mean of, and their standard deviation.
    seeds: int
    spread: dict[str, float]
    #: In what share of them the distances were calibrated, and Eq. 9 stood beside the contrast.
    calibrated: float = 0.0
    regression: float = 0.0


def measured(legs: Legs, ground: Ground, calibrations: Calibrations = UNCALIBRATED) -> Curve:
    """The quality over t."""
    parts = np.array_split(np.arange(len(legs.new_q)), max(1, -(-len(legs.new_q) // AT_ONCE)))

    def some(rows: np.ndarray) -> Curve:
        return simulated.curve(
            legs.old_q[rows],
            legs.old_g,
            legs.new_q[rows],
            legs.new_g,
            ground.relevance[rows],
            ground.order,
            calibrations,
            old_metric=legs.old_metric,
            new_metric=legs.new_metric,
            leave_out=ground.leave_out[rows],
        )

    with ThreadPoolExecutor(max_workers=torch.get_num_threads()) as pool:
        return _side_by_side(list(pool.map(some, parts)))


def tuned(legs: Legs, ground: Ground, *, calibrate: bool = True, labels: bool = True) -> tuple[float, Calibrations]:
    """Return the worth of the curves of both halves of these records, and calibrations of both legs.

    Calibrated only where those that were fitted on one half raise the curve of the other; by relevance only with labels.
    """
    rows = np.arange(len(legs.old_g))
    halves = [(legs.take(half, half), ground.take(half, half)) for half in (rows[::2], rows[1::2])]
    found = [(sum(_merit(measured(*half)) for half in halves), UNCALIBRATED)]
    for fit in (matched, fitted)[: (1 + labels) * calibrate]:
        with contextlib.suppress(PlanRefused):  # too few pairs to calibrate on
            worth = sum(_merit(measured(*one, fit(*two))) for one, two in (halves, halves[::-1]))
            found.append((worth, fit(legs, ground)))
    return max(found, key=lambda each: each[0])


def matched(legs: Legs, ground: Ground) -> Calibrations:
    """Of the old leg, to the distances that the new one has over these records."""
    counted = ~ground.leave_out
    old = metrics.distances(legs.old_q, legs.old_g, metric=legs.old_metric)
    new = metrics.distances(legs.new_q, legs.new_g, metric=legs.new_metric)
    return calibration.match(old[counted], new[counted]), None


def fitted(legs: Legs, ground: Ground) -> Calibrations:
    """Calibrations of both legs, to the odds of relevance among these records."""
    pairs = ((legs.old_q, legs.old_g, legs.old_metric), (legs.new_q, legs.new_g, legs.new_metric))
    counted = ~ground.leave_out
    found = [metrics.distances(q, g, metric=metric)[counted] for q, g, metric in pairs]
    return tuple(calibration.fit(distances, ground.relevance[counted]) for distances in found)


def row(method: str, curves: Sequence[Curve], base: Curve, *, calibrated: float = 0.0, regression: float = 0.0) -> Row:
    """A method's line from its curves, one a seed; `base` goes from the old model alone to the new one alone."""
    found = [simulated.summary(curve, old=base.map[0], new=base.map[-1]) for curve in curves]
    values = {name: [getattr(each, name) for each in found] for name in ("auc_map", "auc_cmc", "gain")}
    flips = [[metrics.negative_flips(base.top1[0], now) for now in curve.top1] for curve in curves]
    means = {name: float(np.mean(each)) for name, each in values.items()}
    return Row(
        method=method,
        **means,
        flips=float(np.mean(np.max(flips, axis=1))),
        flips_curve=np.mean(flips, axis=0).tolist(),
        curve=np.mean([each.map for each in found], axis=0).tolist(),
        curve_cmc=np.mean([each.cmc for each in found], axis=0).tolist(),
        fall=float(np.mean([each.largest_fall for each in found])),
        seeds=len(curves),
        spread={name: float(np.std(each, ddof=1)) if len(each) > 1 else 0.0 for name, each in values.items()},
        calibrated=calibrated,
        regression=regression,
    )


def quality(queries: Vectors, gallery: Vectors, ground: Ground, metric: Metric) -> tuple[float, float]:
    """CMC@1 and mAP of one search."""
    distance = metrics.distances(queries, gallery, metric=metric)
    distance[ground.leave_out] = np.inf
    first, precision = metrics.cmc(distance, ground.relevance, k=1), metrics.average_precision(distance, ground.relevance)
    return metrics.mean(first), metrics.mean(precision)


def _merit(curve: Curve) -> float:
    """The areas of mAP and CMC@1, less what they fall on the way."""
    return sum(metrics.area(curve.ts, values) - metrics.largest_fall(values) for values in (curve.map, curve.cmc))


def _side_by_side(parts: Sequence[Curve]) -> Curve:
    """One curve of all queries."""
    names = ("precision", "top1", "top5", "recall", "ndcg")
    return Curve(ts=parts[0].ts, **{name: np.concatenate([getattr(part, name) for part in parts], axis=1) for name in names})
