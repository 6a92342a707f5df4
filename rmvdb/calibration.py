"""Maps the distances of one leg to a scale that all legs share: minus the log-odds that a record at that distance is relevant."""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rmvdb.errors import ArtifactError, PlanRefused

FORMAT = 1
#: Bins hold about this many relevant pairs, at most; more would add steps, not knowledge.
MOST_BINS = 24
#: The least slope, in log-odds over the whole range of fitted distances: isotonic regression alone makes ties.
LEAST_RISE = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """A strictly increasing, piecewise linear map; straight on beyond both ends.

    It works in float64, so that two float32 distances never become equal unless they differ by less than a billionth of
    the fitted range.
    """

    #: Distances, ascending.
    x: tuple[float, ...]
    #: Minus the log-odds of relevance there, ascending; smaller is closer.
    y: tuple[float, ...]

    def __post_init__(self) -> None:
        knots = np.array([self.x, self.y], dtype=np.float64) if len(self.x) == len(self.y) else np.empty((2, 0))
        if knots.shape[1] < 2 or not np.isfinite(knots).all() or not (np.diff(knots) > 0).all():
            raise ArtifactError("A calibration needs two or more knots that rise strictly in both columns; plan again")

    def apply(self, distances: npt.NDArray[np.floating]) -> npt.NDArray[np.float64]:
        """Calibrated distances, of the same shape and in the same order."""
        d, x, y = np.asarray(distances, dtype=np.float64), np.array(self.x), np.array(self.y)
        slope = np.diff(y) / np.diff(x)
        part = np.clip(np.searchsorted(x, d, side="right") - 1, 0, len(slope) - 1)
        mapped = y[part] + slope[part] * (d - x[part])
        # Rounding must not lift the end of one piece over the beginning of the next.
        result: npt.NDArray[np.float64] = np.where(part < len(slope) - 1, np.minimum(mapped, y[part + 1]), mapped)
        return result

    def to_bytes(self) -> bytes:
        """As JSON; the same calibration always gives the same bytes."""
        return json.dumps({"format": FORMAT, "x": self.x, "y": self.y}, sort_keys=True).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Calibration:
        """Read what `to_bytes` wrote; raises ArtifactError for anything else."""
        try:
            stored = json.loads(data)
            if stored["format"] != FORMAT:
                raise ValueError("another format")
            return cls(x=tuple(map(float, stored["x"])), y=tuple(map(float, stored["y"])))
        except (ValueError, KeyError, TypeError) as exc:
            raise ArtifactError(
                f"The file is not a calibration that this version reads ({exc}); restore it or plan again"
            ) from exc


def fit(distances: npt.NDArray[np.floating], relevant: npt.NDArray[np.bool_]) -> Calibration:
    """Fit on held-out (query, record) pairs of one leg: finite distances (n,), whether each record is relevant (n,).

    Raises PlanRefused where no pair, or every pair, is relevant, or where all distances are equal.
    """
    d = np.asarray(distances, dtype=np.float64)
    hits = int(relevant.sum())
    if hits == 0 or hits == len(d) or d.min() == d.max():
        raise PlanRefused("The sample is too small to calibrate distances: it needs relevant and irrelevant pairs that differ")
    order = np.argsort(d, kind="stable")
    x, positives, totals = _bins(d[order], relevant[order], max(2, min(MOST_BINS, hits // 20)))
    positives, totals, x = _pooled(positives, totals, x)
    # Half a pair of each kind keeps the log-odds finite.
    y = np.log((totals - positives + 0.5) / (positives + 0.5))
    return _strict(x, y, low=float(d.min()), high=float(d.max()))


def _bins(
    d: npt.NDArray[np.float64], relevant: npt.NDArray[np.bool_], count: int
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Sorted pairs in bins of about as many relevant ones each: mean distance, relevant and all pairs of each bin."""
    seen = relevant.cumsum()
    bin_of = np.minimum((np.maximum(seen - 1, 0) * count) // seen[-1], count - 1)
    totals = np.bincount(bin_of, minlength=count).astype(np.float64)
    positives = np.bincount(bin_of, weights=relevant.astype(np.float64), minlength=count).astype(np.float64)
    x = np.bincount(bin_of, weights=d * relevant, minlength=count) / positives
    return x, positives, totals


def _pooled(
    positives: npt.NDArray[np.float64], totals: npt.NDArray[np.float64], x: npt.NDArray[np.float64]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Adjacent bins merged until the share of relevant pairs falls with distance (pool adjacent violators)."""
    pools: list[tuple[float, float, float]] = []
    for found, total, place in zip(positives, totals, x, strict=True):
        pool = (float(found), float(total), float(place))
        while pools and pools[-1][0] / pools[-1][1] <= pool[0] / pool[1]:
            f, t, p = pools.pop()
            pool = (f + pool[0], t + pool[1], (f * p + pool[0] * pool[2]) / (f + pool[0]))
        pools.append(pool)
    columns = np.array(pools, dtype=np.float64).T
    return columns[0], columns[1], columns[2]


def _strict(x: npt.NDArray[np.float64], y: npt.NDArray[np.float64], *, low: float, high: float) -> Calibration:
    """Knots that rise strictly, over at least [low, high]."""
    rise = LEAST_RISE / (high - low)
    keep = np.concatenate([[True], np.diff(x) > 1e-6 * (high - low)])
    x, y = x[keep], np.maximum.accumulate(y[keep])
    if len(x) == 1:
        x = np.array([x[0], x[0] + (high - low)])
        y = np.array([y[0], y[0]])
    y = y + rise * (x - x[0])
    return Calibration(x=tuple(x.tolist()), y=tuple(y.tolist()))
