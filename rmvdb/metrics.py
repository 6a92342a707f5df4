"""Retrieval quality: mAP, CMC@k, areas over t, Gain, negative flips and bootstrap intervals.

Matrices are (Q, G): queries in rows, gallery in columns. A record that must not be a result of a query, such as the query
itself, has an infinite distance. Per-query values are NaN for queries that have nothing relevant to find; means leave them out.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from rmvdb.types import Metric, Vectors

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
#: Queries are ranked this many at a time, so that memory is bounded by the gallery.
CHUNK = 512


def distances(queries: Vectors, gallery: Vectors, *, metric: Metric) -> npt.NDArray[np.float32]:
    """Exact distances (Q, G), smaller is closer: 1 − cos, −⟨q, g⟩ or squared L2."""
    if metric is Metric.COSINE:
        queries, gallery = _unit(queries), _unit(gallery)
    dots: npt.NDArray[np.float32] = queries @ gallery.T  # (Q, G)
    if metric is Metric.COSINE:
        return 1 - dots
    if metric is Metric.IP:
        return -dots
    squares = np.square(queries).sum(1)[:, None] + np.square(gallery).sum(1)[None, :]
    result: npt.NDArray[np.float32] = np.maximum(squares - 2 * dots, 0)
    return result


def average_precision(distance: npt.NDArray[np.floating], relevant: Bools) -> Floats:
    """Average precision over the full ranking, (Q, G) to (Q,); equal distances share the precision after the last of them."""
    parts = [_average_precision(distance[i : i + CHUNK], relevant[i : i + CHUNK]) for i in range(0, len(distance), CHUNK)]
    return np.concatenate(parts) if parts else np.empty(0)


def _average_precision(distance: npt.NDArray[np.floating], relevant: Bools) -> Floats:
    distance = np.where(np.isnan(distance), np.inf, distance)
    order = np.argsort(distance, axis=1, kind="stable")  # (q, G)
    d = np.take_along_axis(distance, order, 1)
    found = np.take_along_axis(relevant & np.isfinite(distance), order, 1)
    places = np.arange(1, d.shape[1] + 1)
    precision = found.cumsum(1) / places  # (q, G)
    ends = np.ones_like(found)
    ends[:, :-1] = d[:, :-1] != d[:, 1:]
    # For each place, the last place of its run of equal distances.
    last = np.minimum.accumulate(np.where(ends, places - 1, d.shape[1])[:, ::-1], axis=1)[:, ::-1]
    total = found.sum(1)
    summed = (np.take_along_axis(precision, last, 1) * found).sum(1)
    return np.where(total > 0, summed / np.maximum(total, 1), np.nan)


def cmc(distance: npt.NDArray[np.floating], relevant: Bools, *, k: int) -> Floats:
    """Whether a relevant record is among the first k, 1.0 or 0.0, (Q, G) to (Q,); equal distances rank by column."""
    relevant = relevant & np.isfinite(distance)
    parts = []
    for i in range(0, len(distance), CHUNK):
        order = np.argsort(distance[i : i + CHUNK], axis=1, kind="stable")[:, :k]
        parts.append(np.take_along_axis(relevant[i : i + CHUNK], order, 1).any(1))
    hit = np.concatenate(parts) if parts else np.empty(0, dtype=bool)
    return np.where(relevant.any(1), hit.astype(np.float64), np.nan)


def mean(values: Floats) -> float:
    """The mean over the queries that have something to find; NaN where none has."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else float("nan")


def area(ts: Sequence[float], values: Sequence[float]) -> float:
    """The area under a curve over t by the trapezoid rule: AUC_mAP or AUC_CMC."""
    x, y = np.asarray(ts, dtype=np.float64), np.asarray(values, dtype=np.float64)
    return float((np.diff(x) * (y[1:] + y[:-1]) / 2).sum())


def gain(auc: float, *, old: float, new: float) -> float:
    """(AUC − old) / (new − old): 0 is the old model, 1 the new one from the first minute; NaN where the two are equal."""
    return (auc - old) / (new - old) if new != old else float("nan")


def largest_fall(values: Sequence[float]) -> float:
    """How far a curve lies below its own earlier height at most; 0 where it never falls (Eq. 8)."""
    curve = np.asarray(values, dtype=np.float64)
    return float((np.maximum.accumulate(curve) - curve).max()) if len(curve) else 0.0


def negative_flips(before: Floats, after: Floats) -> float:
    """The share of queries that were right at the earlier moment and are wrong at the later; (Q,) of 1.0 and 0.0 each."""
    known = ~(np.isnan(before) | np.isnan(after))
    return float(((before > 0.5) & (after < 0.5))[known].mean()) if known.any() else float("nan")


def bootstrap(values: Floats, *, rounds: int = 2000, level: float = 0.95, seed: int = 0) -> tuple[float, float]:
    """The percentile interval of the mean of per-query values (Q,), queries drawn with replacement."""
    known = values[~np.isnan(values)]
    if not len(known):
        return float("nan"), float("nan")
    rng = np.random.default_rng(seed)
    means = [known[rng.integers(0, len(known), len(known))].mean() for _ in range(rounds)]
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def _unit(vectors: Vectors) -> Vectors:
    result: Vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    return result
