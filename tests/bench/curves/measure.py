"""The quality of a ranking, and the numbers of a curve over t."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rmvdb import metrics


def quality(ranked: Sequence[Sequence[int]], relevant: np.ndarray, metric: str) -> float:
    """Return the mean over queries of `precision@10`, `nDCG@10` or `mAP`.

    `ranked`: for each query the rows of the records found, nearest first. Queries without an answer count for nothing.
    """
    values = [_one(list(rows), wanted, metric) for rows, wanted in zip(ranked, relevant, strict=True) if wanted.any()]
    return float(np.mean(values))


def _one(rows: list[int], wanted: np.ndarray, metric: str) -> float:
    hits = wanted[rows]
    if metric == "precision@10":
        return float(hits[:10].sum() / 10)
    if metric == "nDCG@10":
        discounts = 1 / np.log2(np.arange(2, 12))
        return float((hits[:10] * discounts[: len(hits[:10])]).sum() / discounts[: min(10, int(wanted.sum()))].sum())
    precision = hits.cumsum() / np.arange(1, len(hits) + 1)
    return float((precision * hits).sum() / wanted.sum())


def area(points: Sequence[tuple[float, float]]) -> float:
    """Return the area under (t, quality), t from 0 to 1."""
    return metrics.area([t for t, _ in points], [value for _, value in points])


def largest_fall(points: Sequence[tuple[float, float]]) -> float:
    """Return by how much the curve falls below what it has reached before."""
    values = np.array([value for _, value in points])
    return float((np.maximum.accumulate(values) - values).max())
