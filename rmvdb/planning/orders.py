"""Which records are backfilled first: ascending confidence of the old model (the paper's appendix A), sorted on disk."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import heapq
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rmvdb.errors import ArtifactError, ConfigError, DiskFull, PlanRefused, UnknownName
from rmvdb.items.check import scored
from rmvdb.learning import geometry, hyperbolic
from rmvdb.protocols import Classifier, Order, VectorStore
from rmvdb.registry.codec import key
from rmvdb.types import Id, Metric, Record, Vectors

__all__ = [
    "ORDERS",
    "ByTraffic",
    "Centroid",
    "ClassificationScore",
    "Cluster",
    "Order",
    "Random",
    "Uncertainty",
    "make_order",
    "ordered",
]

#: The names of the orders by confidence; where none is asked for, the first that can be given. `traffic` wraps one of them.
ORDERS = ("classification-score", "centroid", "uncertainty", "cluster", "random")
#: Records that are sorted in memory at once; a billion records make a thousand such runs.
RUN = 1_000_000
#: Runs merged at once, well below the files that a process may hold open.
MOST_OPEN = 256
#: What is found by searches has a confidence of minus this, or of so many times as much as its place: lower than any other.
PLACE = 1e30
#: Seconds for which a folder that nobody has locked may be one that was just made.
YOUNG = 60.0
#: k-means learns from this many vectors at most.
MOST_LEARNED = 50_000


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassificationScore:
    """The final score of the old model's own classifier: its highest class probability; the paper's default."""

    classifier: Classifier

    def confidence(self, records: Sequence[Record]) -> npt.NDArray[np.float32]:
        """Highest probability per record, (n,)."""
        return np.asarray(scored(self.classifier, _vectors(records)).max(axis=1), dtype=np.float32)


@dataclass(frozen=True, kw_only=True, slots=True)
class Centroid:
    """How near a record is to the mean of its class; a record without a known class is the least sure of all."""

    label_field: str
    #: Mean vector (d,) of each class, by label.
    means: Mapping[Any, Vectors]
    metric: Metric = Metric.COSINE

    @classmethod
    def learned(cls, records: Iterable[Record], *, label_field: str, metric: Metric = Metric.COSINE) -> Centroid:
        """Means from one pass over records with vectors and that field; memory is bounded by the number of classes."""
        sums: dict[Any, tuple[npt.NDArray[np.float64], int]] = {}
        for record in records:
            label = record.fields.get(label_field)
            if label is not None and record.vector is not None:
                total, count = sums.get(label, (np.zeros(1), 0))
                sums[label] = (total + geometry.comparable(record.vector[None], metric)[0], count + 1)
        if not sums:
            raise PlanRefused(f"No record has the field {label_field!r}; name another one, or choose the order cluster")
        means = {label: (total / count).astype(np.float32) for label, (total, count) in sums.items()}
        return cls(label_field=label_field, means=means, metric=metric)

    def confidence(self, records: Sequence[Record]) -> npt.NDArray[np.float32]:
        """Nearness to the own class's mean, (n,)."""
        found = np.full(len(records), -np.inf, dtype=np.float32)
        labels = [record.fields.get(self.label_field) for record in records]
        known = [row for row, label in enumerate(labels) if label in self.means]
        if known:
            vectors = geometry.comparable(_vectors([records[row] for row in known]), self.metric)  # (k, d)
            means = np.stack([self.means[labels[row]] for row in known])  # (k, d)
            found[known] = _nearness(vectors, means, self.metric)
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """How near a record is to the nearest of the gallery's cluster centres; needs neither classifier nor labels."""

    #: (k, d)
    centroids: Vectors
    metric: Metric = Metric.COSINE

    @classmethod
    def learned(cls, records: Iterable[Record], *, metric: Metric = Metric.COSINE, seed: int = 0) -> Cluster:
        """√n k-means centres of n records with vectors, of which at most MOST_LEARNED are kept, drawn evenly."""
        vectors = geometry.comparable(_vectors(_reservoir(records, seed)), metric)
        if not len(vectors):
            raise PlanRefused("No record to learn clusters from; add records, or choose the order random")
        import faiss  # here, so that other orders do not wait for it

        kmeans = faiss.Kmeans(
            vectors.shape[1], max(1, round(len(vectors) ** 0.5)), niter=20, seed=seed, min_points_per_centroid=1
        )
        kmeans.train(vectors)
        return cls(centroids=np.array(kmeans.centroids, dtype=np.float32), metric=metric)

    def confidence(self, records: Sequence[Record]) -> npt.NDArray[np.float32]:
        """Nearness to the nearest centre, (n,)."""
        kind = Metric.COSINE if self.metric in (Metric.COSINE, Metric.IP) else Metric.L2
        vectors = geometry.comparable(_vectors(records), self.metric)  # (n, d)
        result: npt.NDArray[np.float32] = -geometry.distances(vectors, self.centroids, metric=kind).min(axis=1)
        return result


@dataclass(frozen=True, kw_only=True, slots=True)
class Uncertainty:
    """How far a point of a hyperbolic gallery is from the origin, where what the model is not sure of lies (HBCT's Eq. 10)."""

    def confidence(self, records: Sequence[Record]) -> npt.NDArray[np.float32]:
        """1 − uncertainty, (n,)."""
        return hyperbolic.certainty(_vectors(records))


@dataclass(frozen=True, kw_only=True, slots=True)
class Random:
    """No preference; the same id always has the same place."""

    seed: int = 0

    def confidence(self, records: Sequence[Record]) -> npt.NDArray[np.float32]:
        """A number between 0 and 1 made from the id, (n,)."""
        digests = (hashlib.blake2b(repr((self.seed, record.id)).encode(), digest_size=3).digest() for record in records)
        return np.fromiter((int.from_bytes(digest) / 2**24 for digest in digests), dtype=np.float32, count=len(records))


@dataclass(frozen=True, kw_only=True, slots=True)
class ByTraffic:
    """What searches find goes first, more often found is earlier; then the others, in another order.

    What queries find again and again is what the better space can rank better, and what nobody finds helps nobody.
    """

    #: By `registry.key`: 1 for the record that is found least, of equals the same.
    places: Mapping[str, int]
    others: Order

    @classmethod
    def learned(cls, found: Mapping[str, float], others: Order) -> ByTraffic:
        """From how much the finds of each record weigh; of nothing it is the other order."""
        place = {weight: at for at, weight in enumerate(sorted(set(found.values())), start=1)}
        return cls(places={record: place[weight] for record, weight in found.items()}, others=others)

    def confidence(self, records: Sequence[Record]) -> npt.NDArray[np.float32]:
        """−1e30 and less for what was found, (n,), above that the others' own: even what those know nothing of goes later."""
        own = np.nan_to_num(self.others.confidence(records), nan=-np.inf)
        places = np.array([self.places.get(key(record.id), 0) for record in records], dtype=np.float32)  # (n,)
        return np.where(places > 0, -places * PLACE, np.clip(own, -PLACE / 2, PLACE / 2)).astype(np.float32)


def make_order(
    name: str,
    records: Iterable[Record],
    *,
    classifier: Classifier | None = None,
    label_field: str | None = None,
    metric: Metric = Metric.COSINE,
    seed: int = 0,
) -> Order:
    """The order of that name; `centroid` and `cluster` learn from `records` (old vectors, fields) in one pass.

    Raises UnknownName for another name, ConfigError where the classifier or the field that it needs is not given.
    """
    if name not in ORDERS:
        raise UnknownName("order", name, ORDERS)
    if name == "classification-score":
        if classifier is None:
            raise ConfigError(
                "The order classification-score needs the old model's classifier; give one, or choose the order cluster"
            )
        return ClassificationScore(classifier=classifier)
    if name == "centroid":
        if label_field is None:
            raise ConfigError("The order centroid needs the field of a record's class; name one, or choose the order cluster")
        return Centroid.learned(records, label_field=label_field, metric=metric)
    if name == "uncertainty":
        if metric is not Metric.LORENTZ:
            raise ConfigError(f"The order uncertainty is of hyperbolic galleries, and this is one of {metric}; choose cluster")
        return Uncertainty()
    return Cluster.learned(records, metric=metric, seed=seed) if name == "cluster" else Random(seed=seed)


def ordered(
    store: VectorStore,
    collection: str,
    order: Order,
    *,
    batch: int,
    folder: Path,
    leave_out: Callable[[Sequence[Id]], set[Id]],
    fields: Sequence[str] = (),
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[list[Id]]:
    """Lists of at most `batch` ids, in ascending confidence, of all records but those that `leave_out` names.

    One streaming pass; memory is bounded by RUN ids, the rest is in `folder` until the iterator ends or is closed. `fields`
    are those that the order reads. Raises DiskFull where the folder has no space, ArtifactError where a file in it was altered.
    """
    try:
        with _room(folder) as place:
            found = _confident(store, collection, order, leave_out, fields, progress)
            ids = (id for _, id in _sorted(found, place))
            while chunk := list(islice(ids, batch)):
                yield chunk
    except OSError as exc:
        if exc.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFull(
                f"No space left in {folder} to sort the records of {collection}; free some, then run it again"
            ) from exc
        raise ArtifactError(
            f"The records of {collection} cannot be sorted in {folder} ({exc.strerror}); mend that, then run it again"
        ) from exc


@contextmanager
def _room(folder: Path) -> Iterator[Path]:
    """A folder in this one, for as long as it is needed; those of processes that were killed are removed."""
    for left in folder.glob("order-*"):
        with suppress(OSError), _opened(left) as handle:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # which its process has, from a moment after it is made
            if time.time() - left.stat().st_mtime > YOUNG:
                shutil.rmtree(left)
    with tempfile.TemporaryDirectory(prefix="order-", dir=folder) as place, _opened(Path(place)) as handle:
        with suppress(OSError):  # where there are no locks, nobody else can have one, and nothing is removed
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield Path(place)


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    handle = os.open(folder, os.O_RDONLY)
    try:
        yield handle
    finally:
        os.close(handle)


#: Confidence and id.
_Row = tuple[float, Id]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Run:
    """A file of sorted rows, a line of JSON each."""

    path: Path
    sha256: str


def _confident(
    store: VectorStore,
    collection: str,
    order: Order,
    leave_out: Callable[[Sequence[Id]], set[Id]],
    fields: Sequence[str],
    progress: Callable[[int, int], None] | None,
) -> Iterator[_Row]:
    total, done = store.count(collection) if progress else 0, 0
    for page in store.scan(collection, vector=True, fields=fields):
        out = leave_out([record.id for record in page])
        left = [record for record in page if record.id not in out]
        if left:
            # NaN sorts nowhere; a record that the order knows nothing of goes first.
            confidence = np.nan_to_num(order.confidence(left), nan=-np.inf, posinf=np.inf, neginf=-np.inf)
            yield from zip(confidence.tolist(), (record.id for record in left), strict=True)
        done += len(page)
        if progress:
            progress(done, max(total, done))


def _sorted(rows: Iterator[_Row], folder: Path) -> Iterator[_Row]:
    """External merge sort: runs sorted in memory, written out, merged; equal confidences by id."""
    runs: list[_Run] = []
    while run := sorted(islice(rows, RUN)):
        if len(run) < RUN and not runs:
            return iter(run)  # all of it fits
        runs.append(_written(iter(run), folder / f"{len(runs)}.jsonl"))
    level = 0
    while len(runs) > MOST_OPEN:
        level += 1
        groups = [runs[start : start + MOST_OPEN] for start in range(0, len(runs), MOST_OPEN)]
        runs = [_joined(group, folder / f"{level}-{number}.jsonl") for number, group in enumerate(groups)]
    return heapq.merge(*map(_read, runs))


def _joined(runs: list[_Run], path: Path) -> _Run:
    joined = _written(heapq.merge(*map(_read, runs)), path)
    for run in runs:
        run.path.unlink()
    return joined


def _written(rows: Iterator[_Row], path: Path) -> _Run:
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for row in rows:
            line = json.dumps(row).encode() + b"\n"
            digest.update(line)
            file.write(line)
    return _Run(path=path, sha256=digest.hexdigest())


def _read(run: _Run) -> Iterator[_Row]:
    with run.path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != run.sha256:
            raise ArtifactError(f"{run.path} is not as it was written; look at its disk, then run the command again")
        file.seek(0)
        for line in file:
            confidence, id = json.loads(line)
            yield confidence, id


def _reservoir(records: Iterable[Record], seed: int) -> list[Record]:
    rng = np.random.default_rng(seed)
    kept: list[Record] = []
    for seen, record in enumerate(records):
        if len(kept) < MOST_LEARNED:
            kept.append(record)
        elif (place := int(rng.integers(0, seen + 1))) < MOST_LEARNED:
            kept[place] = record
    return kept


def _vectors(records: Sequence[Record]) -> Vectors:
    return (
        np.stack([np.asarray(record.vector, dtype=np.float32) for record in records]) if records else np.empty((0, 0), np.float32)
    )


def _nearness(a: Vectors, b: Vectors, metric: Metric) -> npt.NDArray[np.float32]:
    """Row by row, (n, d) and (n, d) to (n,): the cosine, or minus the squared L2 distance."""
    if metric in (Metric.L2, Metric.LORENTZ):
        return np.asarray(-np.square(a - b).sum(axis=1), dtype=np.float32)
    return np.asarray((a * geometry.comparable(b, metric)).sum(axis=1), dtype=np.float32)
