"""A calibration that each query makes for itself, from its distances to the same records in two legs.

How near the nearest records of a query are differs from query to query, and differently in each model. One map for all queries
leaves that in: of two legs, a query then sees too much of one. Here a search compares its query with some kept records in both
spaces, and brings the old leg's distances to the new leg's by what it finds. Neither labels nor sample queries have a part in it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import safetensors.numpy
from safetensors import SafetensorError

from rmvdb.errors import ArtifactError, PlanRefused
from rmvdb.learning import geometry
from rmvdb.learning.calibration import Calibration
from rmvdb.types import Metric, Vectors

KIND = "references"
#: Records to compare a query with. More cost each search time, and each client memory.
LEAST, MOST = 20, 500
#: The nearest of them that counts, the share of them up to which distances are matched, and the knots between.
NEAREST, FARTHEST, KNOTS = 3, 0.6, 6

Floats: TypeAlias = npt.NDArray[np.float64]


class Scale(Protocol):
    """Maps distances of one leg to the common scale."""

    def __call__(self, distances: Floats, counts: Sequence[int]) -> Floats:
        """Map distances (n,): the first `counts[0]` of them are of the first query, and so on."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class References:
    """The vectors of the same records in an old leg and in the new one. Vectors of COSINE have length 1."""

    #: (n, d_old) and (n, d_new), float32.
    old: Vectors
    new: Vectors
    old_metric: Metric
    new_metric: Metric

    def __post_init__(self) -> None:
        if self.old.ndim != 2 or self.new.ndim != 2 or len(self.old) != len(self.new) or not len(self.old):
            raise ArtifactError(f"References have vectors of {self.old.shape} and {self.new.shape}; plan again")

    def calibrations(self, old: Vectors, new: Vectors) -> list[Calibration]:
        """Return a calibration for each query, from its vectors in the old space (Q, d_old) and in the new one (Q, d_new).

        As many references are then nearer than any distance in one leg as in the other. A distance of 0, that of a record to
        itself, stays 0.
        """
        count = len(self.old)
        ranks = np.geomspace(min(NEAREST, count / 4), FARTHEST * count, KNOTS).astype(int) - 1
        x, y = (
            np.sort(_distances(queries, kept, metric), axis=1)[:, ranks].astype(np.float64)  # (Q, KNOTS)
            for queries, kept, metric in ((old, self.old, self.old_metric), (new, self.new, self.new_metric))
        )
        if Metric.IP not in (self.old_metric, self.new_metric):
            zeros = np.zeros((len(x), 1))
            x, y = np.hstack([zeros, np.maximum(x, 0)]), np.hstack([zeros, np.maximum(y, 0)])
        return [Calibration.through(*knots) for knots in zip(x, y, strict=True)]

    def to_bytes(self) -> bytes:
        """Write safetensors. The same references always give the same bytes."""
        config = json.dumps({"kind": KIND, "metrics": [self.old_metric.value, self.new_metric.value]})
        return safetensors.numpy.save({"old": self.old, "new": self.new}, metadata={"config": config})

    @classmethod
    def from_bytes(cls, data: bytes) -> References:
        """Read what `to_bytes` wrote. Raise ArtifactError for anything else."""
        try:
            arrays = safetensors.numpy.load(data)
            end = 8 + int.from_bytes(data[:8], "little")  # where the header ends, in JSON
            old, new = json.loads(json.loads(data[8:end])["__metadata__"]["config"])["metrics"]
            return cls(old=arrays["old"], new=arrays["new"], old_metric=Metric(old), new_metric=Metric(new))
        except (SafetensorError, KeyError, TypeError, ValueError) as exc:
            raise ArtifactError(f"The file holds no references that this version reads ({exc}); plan again") from exc


def _distances(queries: Vectors, kept: Vectors, metric: Metric) -> npt.NDArray[np.float32]:
    """Return the distances (Q, n). If the metric is COSINE, the kept vectors have length 1 already."""
    if metric is not Metric.COSINE:
        return geometry.distances(queries, kept, metric=metric)
    return 1 + geometry.distances(geometry.comparable(queries, metric), kept, metric=Metric.IP)


#: Brings the distances of a leg to the common scale.
LegScale: TypeAlias = Calibration | References


def kept(old: Vectors, new: Vectors, old_metric: Metric, new_metric: Metric) -> References:
    """Keep the vectors of the first records, as many as a search has time for. Raise PlanRefused if they are too few."""
    if len(old) < LEAST:
        raise PlanRefused(f"{len(old)} records are too few to compare a query with; {LEAST} or more are needed")
    first = (
        geometry.comparable(vectors[:MOST], metric) if metric is Metric.COSINE else vectors[:MOST]
        for vectors, metric in ((old, old_metric), (new, new_metric))
    )
    # Copies: a view would keep the whole sample in memory.
    a, b = (np.array(vectors, dtype=np.float32, order="C") for vectors in first)
    return References(old=a, new=b, old_metric=old_metric, new_metric=new_metric)


def read(data: bytes) -> LegScale:
    """Read a calibration or references from their file. Raise ArtifactError for anything else."""
    return Calibration.from_bytes(data) if data[:1] == b"{" else References.from_bytes(data)


def scales(legs: Sequence[LegScale | None], queries: Sequence[Vectors]) -> list[Scale | None]:
    """Return how to bring the distances of each leg to the common scale, None where they stay as they are.

    `queries`: the query vectors of each leg, (Q, d). References lead to the distances of the one leg without them. If that leg
    is not searched any more, distances stay as they are.
    """
    base = [at for at, each in enumerate(legs) if not isinstance(each, References)]

    def scale(at: int, leg: LegScale | None) -> Scale | None:
        if isinstance(leg, Calibration):
            return lambda distances, counts: leg.apply(distances)
        if leg is None or len(base) != 1:
            return None
        return _each(leg.calibrations(queries[at], queries[base[0]]))

    return [scale(at, leg) for at, leg in enumerate(legs)]


def _each(calibrations: Sequence[Calibration]) -> Scale:
    """Return a scale that has a calibration for each query."""

    def scale(distances: Floats, counts: Sequence[int]) -> Floats:
        parts = np.split(distances, np.cumsum(counts)[:-1])
        return np.concatenate([one.apply(part) for one, part in zip(calibrations, parts, strict=True)])

    return scale
