"""Merge ranked lists into one, by calibrated distance. No I/O, no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from rmvdb.types import Hit, Id

#: Maps distances (n,) to distances (n,) on the common scale, in the same order.
Calibrate: TypeAlias = Callable[[npt.NDArray[np.float64]], npt.NDArray[np.float64]]
#: The constant of reciprocal rank fusion, as in its paper.
RRF_K = 60
#: Calibrated distance, leg, distance before calibration, id. Smaller keys rank first, and no two are equal.
_Key: TypeAlias = tuple[float, int, float, Id]


def merge(legs: Sequence[Sequence[Hit]], calibrations: Sequence[Calibrate | None], *, limit: int, offset: int = 0) -> list[Hit]:
    """Return the nearest hits of all legs, each record once, without the first `offset`.

    Legs are newest first, with offset + limit hits each. A hit gets its calibrated distance, and keeps the other as `raw`. If two
    legs have a record, it gets the smaller calibrated distance with its raw distance and leg, and the fields of the newer leg,
    whose collection is written to. Equal distances rank by leg, then by raw distance, then by id.
    """
    best: dict[Id, tuple[_Key, Hit]] = {}
    first: dict[Id, Hit] = {}
    for number, (hits, calibrate) in enumerate(zip(legs, calibrations, strict=True)):
        for hit, distance in zip(hits, _calibrated(hits, calibrate), strict=True):
            first.setdefault(hit.id, hit)
            key = (distance, number, _rankable(hit.distance), hit.id)
            if hit.id not in best or key < best[hit.id][0]:
                best[hit.id] = (key, hit)
    ranked = sorted(best.values(), key=lambda each: each[0])[offset : offset + limit]
    return [replace(hit, distance=key[0], raw=hit.distance, fields=first[hit.id].fields) for key, hit in ranked]


def reciprocal_ranks(distances: npt.NDArray[np.float64], legs: npt.NDArray[np.intp]) -> npt.NDArray[np.float64]:
    """Fuse ranks, as a baseline: −Σ 1 / (k + rank) over the legs of a record, (Q, G) to (Q, G), smaller is closer.

    Each record is in one leg, whose number is in `legs` (G,), so the sum has one term: its rank from 1 among the records of that
    leg by `distances` (Q, G). Equal scores rank by leg, smaller numbers first, as in `merge`. Infinity stays infinity.
    Cormack, Clarke and Büttcher, SIGIR 2009, k = 60.
    """
    fused = np.full(distances.shape, np.inf)
    for number in np.unique(legs).tolist():
        columns = np.flatnonzero(legs == number)
        ranks = np.argsort(np.argsort(distances[:, columns], axis=1, kind="stable"), axis=1, kind="stable") + 1
        # Two ranks differ by far more than this, up to a million records.
        fused[:, columns] = 1e-15 * number - 1 / (RRF_K + ranks)
    return np.where(np.isfinite(distances), fused, np.inf)


def _calibrated(hits: Sequence[Hit], calibrate: Calibrate | None) -> list[float]:
    raw = np.array([hit.distance for hit in hits], dtype=np.float64)  # (n,)
    distances = raw if calibrate is None or not len(raw) else calibrate(raw)
    return [_rankable(distance) for distance in distances.tolist()]


def _rankable(distance: float) -> float:
    # NaN compares with nothing, so the list would have no order.
    return math.inf if math.isnan(distance) else distance
