"""Calibrations: maps of a leg's distances to one common scale, the newest leg's own or minus the log-odds of relevance."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rmvdb.errors import ArtifactError, PlanRefused

FORMAT = 1
#: More bins would add steps without more information.
MOST_BINS = 24
#: The fewest relevant pairs in a bin, and the fewest pairs to match.
LEAST_HITS = 10
#: The least slope, in log-odds over the whole range of fitted distances: isotonic regression alone makes ties.
LEAST_RISE = 0.5
#: The nearest share of pairs at which two distributions are matched, and the least slope, as a part of the mean one.
NEAREST, LEAST_SLOPE = 1e-4, 1e-4


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """A strictly increasing, piecewise linear map, which continues straight beyond both ends.

    It works in float64: two float32 distances become equal only if they differ by less than a billionth of the fitted range.
    """

    #: Distances, ascending.
    x: tuple[float, ...]
    #: The same distances on the common scale, ascending; smaller is closer.
    y: tuple[float, ...]
    #: The values of each piece for `apply`, (4, pieces): where it begins in both columns, its slope, and where it ends in `y`.
    _pieces: npt.NDArray[np.float64] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        knots = np.array([self.x, self.y], dtype=np.float64) if len(self.x) == len(self.y) else np.empty((2, 0))
        if knots.shape[1] < 2 or not np.isfinite(knots).all() or not (np.diff(knots) > 0).all():
            raise ArtifactError("A calibration needs two or more knots that rise strictly in both columns; plan again")
        x, y = knots
        ends = np.append(y[1:-1], np.inf)  # the last piece is open
        object.__setattr__(self, "_pieces", np.stack([x[:-1], y[:-1], np.diff(y) / np.diff(x), ends]))

    @classmethod
    def through(cls, x: npt.NDArray[np.float64], y: npt.NDArray[np.float64]) -> Calibration:
        """Return the map through these knots (k,), which may be equal but never fall. It leaves alone what is all equal."""
        low, high = float(x[0]), float(x[-1])
        if low == high or y[0] == y[-1]:
            return cls(x=(0.0, 1.0), y=(0.0, 1.0))
        return _strict(x, y, low=low, high=high, rise=LEAST_SLOPE * float(y[-1] - y[0]))

    def apply(self, distances: npt.NDArray[np.floating]) -> npt.NDArray[np.float64]:
        """Return calibrated distances, of the same shape and in the same order."""
        d = np.asarray(distances, dtype=np.float64)
        x, y, slope, end = self._pieces
        part = x[1:].searchsorted(d, side="right")
        # Rounding must not lift the end of one piece over the beginning of the next.
        result: npt.NDArray[np.float64] = np.minimum(y[part] + slope[part] * (d - x[part]), end[part])
        return result

    def to_bytes(self) -> bytes:
        """Write JSON. The same calibration always gives the same bytes."""
        return json.dumps({"format": FORMAT, "x": self.x, "y": self.y}, sort_keys=True).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Calibration:
        """Read what `to_bytes` wrote. Raise ArtifactError for anything else."""
        try:
            stored = json.loads(data)
            if stored["format"] != FORMAT:
                raise ValueError("another format")
            return cls(x=tuple(map(float, stored["x"])), y=tuple(map(float, stored["y"])))
        except (ValueError, KeyError, TypeError) as exc:
            raise ArtifactError(
                f"The file is not a calibration that this version reads ({exc}); restore it or plan again"
            ) from exc


def match(distances: npt.NDArray[np.floating], others: npt.NDArray[np.floating], *, zero: bool = False) -> Calibration:
    """Fit distances (n,) of one leg to the distribution of `others` (n,), the same (query, record) pairs in another leg.

    At every threshold, as many pairs are then nearer in one leg as in the other. Labels are not needed. `zero`: a distance of 0
    stays 0, so that no record of one leg comes before the very item of the query in the other.

    Raises: PlanRefused if there are fewer than LEAST_HITS pairs, or all distances of a leg are equal.
    """
    d, other = (np.asarray(each, dtype=np.float64) for each in (distances, others))
    if len(d) < LEAST_HITS or d.min() == d.max() or other.min() == other.max():
        raise PlanRefused("The sample is too small to calibrate distances: it needs pairs of several distances")
    # The same number of quantiles in each power of ten, because the nearest pairs matter most.
    shares = np.geomspace(min(0.5, max(NEAREST, LEAST_HITS / len(d))), 1.0, MOST_BINS)
    rise = LEAST_SLOPE * float(np.ptp(other))
    x, y = np.quantile(d, shares), np.quantile(other, shares)
    if zero and x[0] > 0 and y[0] > 0:
        x, y = np.concatenate([[0.0], x]), np.concatenate([[0.0], y])
        return _strict(x, y, low=0.0, high=float(d.max()), rise=rise)
    return _strict(x, y, low=float(d.min()), high=float(d.max()), rise=rise)


def fit(distances: npt.NDArray[np.floating], relevant: npt.NDArray[np.bool_]) -> Calibration:
    """Fit on held-out (query, record) pairs of one leg: finite distances (n,), and whether each record is relevant (n,).

    Raises: PlanRefused if no pair or every pair is relevant, or all distances are equal.
    """
    d = np.asarray(distances, dtype=np.float64)
    hits = int(relevant.sum())
    if hits == 0 or hits == len(d) or d.min() == d.max():
        raise PlanRefused("The sample is too small to calibrate distances: it needs relevant and irrelevant pairs that differ")
    order = np.argsort(d, kind="stable")
    count = max(1, min(MOST_BINS, hits // LEAST_HITS))
    pools = _pooled(_bins(d[order], relevant[order], count))
    # Half a pair of each kind keeps the log-odds finite.
    x = np.array([pool.distance / pool.total for pool in pools])
    y = np.array([math.log((pool.total - pool.found + 0.5) / (pool.found + 0.5)) for pool in pools])
    return _strict(x, y, low=float(d.min()), high=float(d.max()), rise=LEAST_RISE)


class _Pool(NamedTuple):
    """Sums over neighbouring pairs: how many are relevant, how many there are, and their distances."""

    found: float
    total: float
    distance: float


def _bins(d: npt.NDArray[np.float64], relevant: npt.NDArray[np.bool_], count: int) -> list[_Pool]:
    """Put sorted pairs into bins with about the same number of relevant ones."""
    seen = relevant.cumsum()
    bin_of = (np.maximum(seen - 1, 0) * count) // seen[-1]
    sums = [np.bincount(bin_of, weights=weights, minlength=count) for weights in (relevant.astype(np.float64), None, d)]
    return [_Pool(*map(float, column)) for column in zip(*sums, strict=True)]


def _pooled(bins: list[_Pool]) -> list[_Pool]:
    """Join neighbouring bins until the share of relevant pairs falls with distance (pool adjacent violators)."""
    pools: list[_Pool] = []
    for pool in bins:
        while pools and pools[-1].found * pool.total <= pool.found * pools[-1].total:
            pool = _Pool(*(a + b for a, b in zip(pools.pop(), pool, strict=True)))
        pools.append(pool)
    return pools


def _strict(x: npt.NDArray[np.float64], y: npt.NDArray[np.float64], *, low: float, high: float, rise: float) -> Calibration:
    """Return knots that rise strictly, by at least `rise` over [low, high]."""
    rise /= high - low
    keep = np.concatenate([[True], np.diff(x) > 1e-6 * (high - low)])
    x, y = x[keep], np.maximum.accumulate(y[keep])
    if len(x) == 1:
        x = np.array([x[0], x[0] + (high - low)])
        y = np.array([y[0], y[0]])
    y = y + rise * (x - x[0])
    return Calibration(x=tuple(x.tolist()), y=tuple(y.tolist()))
