"""Merge ranked lists into one, by calibrated distance, and rank again by better distances. No I/O, no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from operator import itemgetter
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from rmvdb.types import Hit, Id

#: Maps distances (n,) to distances (n,) on the common scale, in the same order.
Calibrate: TypeAlias = Callable[[npt.NDArray[np.float64]], npt.NDArray[np.float64]]
#: Calibrated distance, leg, distance before calibration, id: smaller ranks first, and no two are equal.
_Key: TypeAlias = tuple[float, int, float, Id]


def merge_each(
    legs: Sequence[Sequence[Sequence[Hit]]], calibrations: Sequence[Calibrate | None], *, limit: int, offset: int = 0
) -> list[list[Hit]]:
    """Return for each query the nearest hits of all legs, each record once, without the first `offset`.

    `legs` has the hits by leg and query. Legs are newest first, with offset + limit hits of each query. A hit gets its calibrated
    distance, and keeps the other as `raw`. If two legs have a record, it gets the smaller calibrated distance with its raw
    distance and leg, and the fields of the newer leg, whose collection is written to. Equal distances rank by leg, then by raw
    distance, then by id.
    """
    distances = [_each_calibrated(lists, calibrate) for lists, calibrate in zip(legs, calibrations, strict=True)]
    queries = zip(zip(*legs, strict=True), zip(*distances, strict=True), strict=True)
    return [_merged(hits, far, limit=limit, offset=offset) for hits, far in queries]


def _merged(legs: Sequence[Sequence[Hit]], distances: Sequence[Sequence[float]], *, limit: int, offset: int) -> list[Hit]:
    #: By id: the smallest key, its hit, and the hit of the newest leg that has the record.
    best: dict[Id, tuple[_Key, Hit, Hit]] = {}
    for number, (hits, calibrated) in enumerate(zip(legs, distances, strict=True)):
        for hit, distance in zip(hits, calibrated, strict=True):
            raw, id = hit.distance, hit.id
            key = (distance, number, math.inf if math.isnan(raw) else raw, id)
            if (known := best.get(id)) is None:
                best[id] = key, hit, hit
            elif key < known[0]:
                best[id] = key, hit, known[2]
    ranked = sorted(best.values(), key=itemgetter(0))[offset : offset + limit]
    # Not `replace`, which takes twice as long.
    return [Hit(id=key[3], distance=key[0], fields=new.fields, leg=hit.leg, raw=hit.distance) for key, hit, new in ranked]


def reranked(
    merged: Sequence[Hit], raw: Mapping[Id, float], calibrate: Calibrate | None, *, collections: Sequence[str]
) -> list[Hit]:
    """Rank merged hits again, some by another raw distance, by id, which `calibrate` puts on the common scale.

    Equal distances rank as in `merge_each`: by leg, in the order of `collections`, then by raw distance, then by id.
    """
    better = [replace(hit, distance=raw[hit.id], raw=raw[hit.id]) for hit in merged if hit.id in raw]
    scaled = {hit.id: replace(hit, distance=far) for hit, far in zip(better, _calibrated(better, calibrate), strict=True)}
    place = {name: number for number, name in enumerate(collections)}

    def key(hit: Hit) -> _Key:
        return hit.distance, place[hit.leg], _rankable(hit.raw), hit.id

    return sorted((scaled.get(hit.id, hit) for hit in merged), key=key)


def _calibrated(hits: Sequence[Hit], calibrate: Calibrate | None) -> list[float]:
    distances = [hit.distance for hit in hits]
    if calibrate is not None and distances:
        distances = calibrate(np.array(distances, dtype=np.float64)).tolist()
    return [math.inf if math.isnan(each) else each for each in distances]


def _each_calibrated(lists: Sequence[Sequence[Hit]], calibrate: Calibrate | None) -> list[list[float]]:
    """Return the calibrated distances of each list of hits, by one call for all."""
    together = iter(_calibrated([hit for hits in lists for hit in hits], calibrate))
    return [list(islice(together, len(hits))) for hits in lists]


def _rankable(distance: float) -> float:
    # NaN compares with nothing, so the list would have no order.
    return math.inf if math.isnan(distance) else distance
