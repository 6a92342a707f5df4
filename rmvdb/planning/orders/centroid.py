"""The order by nearness to the mean of a record's class."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rmvdb.errors import PlanRefused
from rmvdb.learning import geometry
from rmvdb.planning.orders.table import Known
from rmvdb.planning.orders.vectors import stacked
from rmvdb.types import Metric, Record, Vectors


@dataclass(frozen=True, kw_only=True, slots=True)
class Centroid:
    """How near a record is to the mean of its class. A record without a known class goes first."""

    label_field: str
    #: Mean vector (d,) of each class, by label.
    means: Mapping[Any, Vectors]
    metric: Metric = Metric.COSINE

    @classmethod
    def learned(cls, records: Iterable[Record], *, label_field: str, metric: Metric = Metric.COSINE) -> Centroid:
        """Take the means in one pass over records with vectors and that field. The number of classes bounds the memory."""
        sums: dict[Any, tuple[npt.NDArray[np.float64], int]] = {}
        for record in records:
            label = _class_of(record, label_field)
            if label is not None and record.vector is not None:
                total, count = sums.get(label, (np.zeros(1), 0))
                sums[label] = (total + geometry.comparable(record.vector[None], metric)[0], count + 1)
        if not sums:
            raise PlanRefused(f"No record has the field {label_field!r}; name another one, or choose the order cluster")
        means = {label: (total / count).astype(np.float32) for label, (total, count) in sums.items()}
        return cls(label_field=label_field, means=means, metric=metric)

    def confidence(self, records: Sequence[Record]) -> npt.NDArray[np.float32]:
        """Return each record's nearness to the mean of its own class, (n,)."""
        nearness = np.full(len(records), -np.inf, dtype=np.float32)
        labels = [_class_of(record, self.label_field) for record in records]
        known = [row for row, label in enumerate(labels) if label in self.means]
        if known:
            vectors = geometry.comparable(stacked([records[row] for row in known]), self.metric)  # (k, d)
            means = np.stack([self.means[labels[row]] for row in known])  # (k, d)
            nearness[known] = _nearness(vectors, means, self.metric)
        return nearness


def make(records: Iterable[Record], known: Known) -> Centroid:
    """Learn the means from these records."""
    assert known.label_field is not None  # noqa: S101 (the table looked)
    return Centroid.learned(records, label_field=known.label_field, metric=known.metric)


def _class_of(record: Record, label_field: str) -> Hashable | None:
    """Return the class of a record, None if it has none or an empty text. A list or another JSON value counts as its text."""
    label = record.fields.get(label_field)
    if label == "":
        return None
    return label if isinstance(label, Hashable) else str(label)


def _nearness(a: Vectors, b: Vectors, metric: Metric) -> npt.NDArray[np.float32]:
    """Compare row by row, (n, d) and (n, d) to (n,), by the cosine or minus the squared L2 distance."""
    if metric in (Metric.L2, Metric.LORENTZ):
        return np.asarray(-np.square(a - b).sum(axis=1), dtype=np.float32)
    return np.asarray((a * geometry.comparable(b, metric)).sum(axis=1), dtype=np.float32)
