"""The order by nearness to the gallery's clusters; needs neither classifier nor labels."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rmvdb.errors import PlanRefused
from rmvdb.learning import geometry
from rmvdb.planning.orders.table import Known
from rmvdb.planning.orders.vectors import stacked
from rmvdb.types import Metric, Record, Vectors

#: k-means learns from this many vectors at most.
MOST_LEARNED = 50_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """How near a record is to the nearest of the gallery's cluster centres."""

    #: (k, d)
    centroids: Vectors
    metric: Metric = Metric.COSINE

    @classmethod
    def learned(cls, records: Iterable[Record], *, metric: Metric = Metric.COSINE, seed: int = 0) -> Cluster:
        """Fit √n k-means centres to n records with vectors. Of more than MOST_LEARNED it takes an even sample."""
        vectors = geometry.comparable(stacked(_reservoir(records, seed)), metric)
        if not len(vectors):
            raise PlanRefused("No record to learn clusters from; add records, or choose the order random")
        with warnings.catch_warnings(action="ignore"):
            import faiss  # here, so that other orders do not wait for it

        kmeans = faiss.Kmeans(
            vectors.shape[1], max(1, round(len(vectors) ** 0.5)), niter=20, seed=seed, min_points_per_centroid=1
        )
        kmeans.train(vectors)
        return cls(centroids=np.array(kmeans.centroids, dtype=np.float32), metric=metric)

    def confidence(self, records: Sequence[Record]) -> npt.NDArray[np.float32]:
        """Return each record's nearness to its nearest centre, (n,)."""
        kind = Metric.COSINE if self.metric in (Metric.COSINE, Metric.IP) else Metric.L2
        vectors = geometry.comparable(stacked(records), self.metric)  # (n, d)
        result: npt.NDArray[np.float32] = -geometry.distances(vectors, self.centroids, metric=kind).min(axis=1)
        return result


def make(records: Iterable[Record], known: Known) -> Cluster:
    """Learn the centres from these records."""
    return Cluster.learned(records, metric=known.metric, seed=known.seed)


def _reservoir(records: Iterable[Record], seed: int) -> list[Record]:
    rng = np.random.default_rng(seed)
    kept: list[Record] = []
    for seen, record in enumerate(records):
        if len(kept) < MOST_LEARNED:
            kept.append(record)
        elif (place := int(rng.integers(0, seen + 1))) < MOST_LEARNED:
            kept[place] = record
    return kept
