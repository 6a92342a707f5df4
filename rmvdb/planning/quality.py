"""Retrieval quality: mAP, CMC@k, recall@k, areas over t, Gain, P_com, P_up, negative flips and bootstrap intervals.

Matrices are (Q, G): queries in rows, gallery in columns. A record that must not be a result of a query, such as the query
itself, has an infinite distance. Per-query values are NaN for queries that have nothing relevant to find. Means leave them out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rmvdb.errors import UsageError

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Labels = npt.NDArray[np.generic]
#: Queries are ranked this many at a time, so that memory is bounded by the gallery.
CHUNK = 512
#: The places of so many relevant records are counted, not sorted for.
FEW = 16
#: Values drawn at once for a bootstrap.
DRAWN = 1 << 18


def average_precision(distance: npt.NDArray[np.floating], relevant: Bools) -> Floats:
    """Return average precision over the full ranking, (Q, G) to (Q,).

    Equal distances share the precision after the last of them, as in scikit-learn.
    """
    parts = [_average_precision(distance[i : i + CHUNK], relevant[i : i + CHUNK]) for i in range(0, len(distance), CHUNK)]
    return np.concatenate(parts) if parts else np.empty(0)


def _average_precision(distance: npt.NDArray[np.floating], relevant: Bools) -> Floats:
    distance = np.where(np.isnan(distance), np.inf, distance)
    if (relevant & np.isfinite(distance)).sum(1).max(initial=0) <= FEW:
        return _counted_precision(distance, relevant)
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


def _counted_precision(distance: npt.NDArray[np.floating], relevant: Bools) -> Floats:
    """Return the same for few relevant records, whose places are counted. That takes a fraction of the time of sorting."""
    relevant = relevant & np.isfinite(distance)
    own = np.where(relevant, distance, np.inf)
    most = int(relevant.sum(1).max(initial=0))
    nearest = np.sort(np.partition(own, min(most, own.shape[1] - 1), axis=1)[:, :most], axis=1)  # (q, most)
    summed = np.zeros(len(distance))
    for column in nearest.T[:, :, None]:  # (q, 1)
        known = np.isfinite(column[:, 0])
        places = (distance <= column).sum(1)
        summed += np.where(known, (nearest <= column).sum(1) / np.maximum(places, 1), 0)
    total = relevant.sum(1)
    return np.where(total > 0, summed / np.maximum(total, 1), np.nan)


def cmc(distance: npt.NDArray[np.floating], relevant: Bools, *, k: int) -> Floats:
    """Return whether a relevant record is among the first k, 1.0 or 0.0, (Q, G) to (Q,).

    Equal distances have no order. If they straddle place k, the value is a probability over all their orders.
    """
    return _of_first(k, distance, relevant, _any)


def recall(distance: npt.NDArray[np.floating], relevant: Bools, *, k: int) -> Floats:
    """Return the share of relevant records among the first k, (Q, G) to (Q,): the mean over all orders of equal distances."""
    return _of_first(k, distance, relevant, _share)


def ndcg(distance: npt.NDArray[np.floating], relevant: Bools, *, k: int) -> Floats:
    """Return nDCG@k of binary relevance, (Q, G) to (Q,): Σ rel_i / log2(i + 1) over the first k, as a share of the best possible.

    Equal distances share the mean of their relevance, which is the mean over all their orders (McSherry and Najork, ECIR 2008).
    """
    if not distance.size:
        return np.full(len(distance), np.nan)
    parts = [_ndcg(distance[i : i + CHUNK], relevant[i : i + CHUNK], k) for i in range(0, len(distance), CHUNK)]
    return np.concatenate(parts)


def _ndcg(distance: npt.NDArray[np.floating], relevant: Bools, k: int) -> Floats:
    distance = np.where(np.isnan(distance), np.inf, distance)
    relevant = relevant & np.isfinite(distance)
    k = min(k, distance.shape[1])
    first = np.argpartition(distance, k - 1, axis=1)[:, :k]
    first = np.take_along_axis(first, np.argsort(np.take_along_axis(distance, first, 1), axis=1, kind="stable"), 1)
    d, rel = np.take_along_axis(distance, first, 1), np.take_along_axis(relevant, first, 1)  # (q, k)
    alike = d[:, :, None] == d[:, None, :]  # (q, k, k)
    shared = (alike * rel[:, None, :]).sum(2) / alike.sum(2)
    edge = d[:, -1:]
    level = distance == edge  # the records at the distance of place k, beyond it, too
    last = ((level & relevant).sum(1) / level.sum(1))[:, None]
    gains = np.where(d == edge, last, shared)  # (q, k)
    discount = 1 / np.log2(np.arange(2, k + 2))
    best = np.concatenate([[0.0], discount.cumsum()])[np.minimum(relevant.sum(1), k)]
    return np.where(best > 0, (gains * discount).sum(1) / np.where(best > 0, best, 1), np.nan)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Cut:
    """Rankings cut after k places, (q,) each. The records at the distance of place k may straddle the cut."""

    #: Relevant records in all, nearer than that distance, and at it.
    relevant: npt.NDArray[np.intp]
    nearer: npt.NDArray[np.intp]
    level: npt.NDArray[np.intp]
    #: Records at that distance, and the places before the cut that remain for them.
    crowd: npt.NDArray[np.intp]
    places: npt.NDArray[np.intp]


def _of_first(k: int, distance: npt.NDArray[np.floating], relevant: Bools, value: Callable[[_Cut], Floats]) -> Floats:
    if k < 1:
        raise UsageError(f"k must be 1 or more, not {k}")
    if not distance.size:
        return np.full(len(distance), np.nan)
    cuts = [_cut(distance[i : i + CHUNK], relevant[i : i + CHUNK], k) for i in range(0, len(distance), CHUNK)]
    return np.concatenate([np.where(cut.relevant > 0, value(cut), np.nan) for cut in cuts])


def _cut(distance: npt.NDArray[np.floating], relevant: Bools, k: int) -> _Cut:
    distance = np.where(np.isnan(distance), np.inf, distance)
    relevant = relevant & np.isfinite(distance)
    k = min(k, distance.shape[1])
    edge = np.partition(distance, k - 1, axis=1)[:, k - 1, None]  # (q, 1)
    nearer, level = distance < edge, distance == edge  # (q, G)
    return _Cut(
        relevant=relevant.sum(1),
        nearer=(relevant & nearer).sum(1),
        level=(relevant & level).sum(1),
        crowd=level.sum(1),
        places=k - nearer.sum(1),
    )


def _any(cut: _Cut) -> Floats:
    missed = np.where(cut.nearer > 0, 0.0, 1.0)
    for taken in range(int(cut.places.max())):  # drawn one by one from the crowd, none put back
        left = np.maximum(cut.crowd - taken, 1)
        missed *= np.where(taken < cut.places, np.maximum(left - cut.level, 0) / left, 1)
    return 1 - missed


def _share(cut: _Cut) -> Floats:
    return (cut.nearer + cut.level * cut.places / cut.crowd) / np.maximum(cut.relevant, 1)


def same_camera(query_ids: Labels, query_cameras: Labels, gallery_ids: Labels, gallery_cameras: Labels) -> Bools:
    """Apply Market-1501's rule, (Q,) and (G,) to (Q, G): no result has the query's own identity and its own camera.

    Give True entries an infinite distance. Leave the set's junk pictures (identity −1) out of the gallery.
    """
    found: Bools = (query_ids[:, None] == gallery_ids[None, :]) & (query_cameras[:, None] == gallery_cameras[None, :])
    return found


def mean(values: Floats) -> float:
    """Return the mean over queries that have something to find, or NaN if none has."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else float("nan")


def area(ts: Sequence[float], values: Sequence[float]) -> float:
    """Return the area under a curve over t by the trapezoid rule: AUC_mAP or AUC_CMC."""
    return float(areas(ts, np.asarray(values, dtype=np.float64)[:, None])[0])


def areas(ts: Sequence[float], values: Floats) -> Floats:
    """Return the area under each query's own curve, (T, Q) to (Q,)."""
    steps = np.diff(np.asarray(ts, dtype=np.float64))  # (T − 1,)
    found: Floats = (steps[:, None] * (values[1:] + values[:-1]) / 2).sum(axis=0)
    return found


def gain(auc: float, *, old: float, new: float) -> float:
    """Return (AUC − old) / (new − old): 0 is the old model, 1 the new one from the first minute. NaN if the two are equal."""
    return (auc - old) / (new - old) if new != old else float("nan")


def p_com(cross: float, *, old: float, alone: float) -> float:
    """Return HBCT's Eq. 14: the share of the way from the old model to the new one trained alone that needs no re-embedding.

    `cross` is the quality of new queries in the old gallery. `old` and `alone` are that of each model in its own gallery. NaN if
    those two are equal.
    """
    return gain(cross, old=old, new=alone)


def p_up(new: float, *, alone: float) -> float:
    """Return HBCT's Eq. 15: what compatible training adds to the new model in its own gallery, as a share of `alone`.

    Below 0 it costs quality. The paper prints it with the old gallery, but its tables are of the new one. NaN if `alone` is 0.
    """
    return (new - alone) / alone if alone else float("nan")


def largest_fall(values: Sequence[float]) -> float:
    """Return how far a curve lies below its own earlier height at most, 0 if it never falls (Eq. 8)."""
    curve = np.asarray(values, dtype=np.float64)
    return float((np.maximum.accumulate(curve) - curve).max()) if len(curve) else 0.0


def fall_by_chance(values: Floats, *, rounds: int = 2000, level: float = 0.95, seed: int = 0) -> float:
    """Return how far the mean curve of per-query values (T, Q) may fall by the chance of which queries were drawn.

    Queries are drawn with replacement, and each draw adds something to the curve. The result is a quantile of the largest fall of
    that, over all moments at once, because the deepest of many dips is deeper than a single one.
    """
    known = values[:, ~np.isnan(values).any(axis=0)]
    count = known.shape[1]
    if not count:
        return float("nan")
    rng = np.random.default_rng(seed)
    at_once = max(1, DRAWN // count)
    sizes = [min(at_once, rounds - start) for start in range(0, rounds, at_once)]
    drawn = (rng.multinomial(count, np.full(count, 1 / count), size=size) for size in sizes)
    added = np.concatenate([weights @ known.T / count for weights in drawn]) - known.mean(axis=1)  # (rounds, T)
    return float(np.quantile((np.maximum.accumulate(added, axis=1) - added).max(axis=1), level))


def negative_flips(before: Floats, after: Floats) -> float:
    """Return the share of queries that were right at the earlier moment and are wrong at the later. Both are CMC@1, (Q,)."""
    return mean(before * (1 - after))


def bootstrap(values: Floats, *, rounds: int = 2000, level: float = 0.95, seed: int = 0) -> tuple[float, float]:
    """Return the percentile interval of the mean of per-query values (Q,), with queries drawn with replacement."""
    known = values[~np.isnan(values)]
    if not len(known):
        return float("nan"), float("nan")
    rng = np.random.default_rng(seed)
    at_once = max(1, DRAWN // len(known))
    sizes = [min(at_once, rounds - start) for start in range(0, rounds, at_once)]
    means = np.concatenate([known[rng.integers(0, len(known), (size, len(known)))].mean(axis=1) for size in sizes])
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
