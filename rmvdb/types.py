"""The values that all rooms share: frozen, keyword-only, numpy at the borders."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

#: A record's id: INT64 or VARCHAR, one kind per gallery.
Id: TypeAlias = int | str
#: The input that a record or a query is made from: a path, bytes, a PIL image, an array, a text.
Item: TypeAlias = Any
#: float32, shape (n, dim) unless a docstring says otherwise.
Vectors: TypeAlias = npt.NDArray[np.float32]
#: A moment by an engine's own clock, which orders the writes of all its collections. 0 is one that it did not tell.
Moment: TypeAlias = int
#: Takes the name of the work, how much of it is done, and how much there is.
ReportProgress: TypeAlias = Callable[[str, int, int], None]


#: The prefix of the name of a mark (`rmvdb.registry.mark`), a collection that belongs to no gallery.
MARK_PREFIX = "rmvdb_owner_of_"


class Metric(StrEnum):
    """How vectors of one space are compared."""

    COSINE = "COSINE"
    IP = "IP"
    L2 = "L2"
    #: The distance on the hyperboloid of points (time, space). `learning.hyperbolic` asks engines, which do not know it.
    LORENTZ = "LORENTZ"

    @property
    def stored(self) -> Metric:
        """The metric of the collection in the engine."""
        return Metric.IP if self is Metric.LORENTZ else self


class IdType(StrEnum):
    """The type of a gallery's ids."""

    INT64 = "INT64"
    VARCHAR = "VARCHAR"


class Phase(StrEnum):
    """Where an upgrade stands. Pause and throttle are attributes, not phases."""

    PLANNED = "planned"
    SERVING_BOTH = "serving both"
    CUT_OVER = "cut over"
    #: rmvdb drops the old collection and the archive. There is no way back any more.
    CLEANING_UP = "cleaning up"
    ENDED = "ended"


class BatchState(StrEnum):
    """Where a batch stands. It only moves down this list."""

    #: No worker has begun it, and nothing was written.
    PENDING = "pending"
    #: A worker reads, loads and embeds it, or should continue it.
    CLAIMED = "claimed"
    #: A worker writes it. A client's write of one of its ids waits.
    WRITING = "writing"
    #: Every id is in both collections. The batch waits for one grace.
    COPIED = "copied"
    #: The worker has decided and recorded which ids leave the old collection. A rerun removes the same ids.
    REMOVING = "removing"
    #: Every id is in the new collection and out of the old one.
    RETIRED = "retired"


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """One gallery entry."""

    id: Id
    #: Shape (dim,), or None if the caller did not ask for it.
    vector: Vectors | None = None
    #: Scalar and dynamic fields by name, without the id and the vector.
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Hit:
    """One result of a search."""

    id: Id
    #: Smaller is closer with every metric: 1 − cos, −⟨q, g⟩, squared L2 or d_L. After a merge, the calibrated distance.
    distance: float
    fields: Mapping[str, Any] = field(default_factory=dict)
    #: The collection that gave it.
    leg: str = ""
    #: The distance before calibration.
    raw: float = float("nan")


@dataclass(frozen=True, kw_only=True, slots=True)
class Query:
    """A query of a sample."""

    item: Item
    #: The records that it should find. Empty if they are unknown.
    answers: tuple[Id, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Field:
    """One scalar field of a collection, in the engine's own terms."""

    name: str
    #: Milvus' name of the type: INT64, VARCHAR, FLOAT, BOOL, JSON, ARRAY …
    type: str
    #: max_length, element_type, nullable, is_partition_key …; JSON values only.
    params: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Schema:
    """The schema of a collection."""

    collection: str
    dim: int
    metric: Metric
    id_type: IdType
    id_field: str = "id"
    #: Only for VARCHAR ids.
    id_max_length: int = 512
    vector_field: str = "vector"
    #: Scalar fields, without the id and the vector.
    fields: tuple[Field, ...] = ()
    #: Whether records may carry fields that the schema does not name.
    dynamic: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Index:
    """An index and its search parameters, in Milvus' terms. `index_rules` checks both before rmvdb creates anything."""

    type: str = "AUTOINDEX"
    params: Mapping[str, Any] = field(default_factory=dict)
    search: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Segments:
    """How far an engine has indexed a collection's rows. All zero if it needs no time for that."""

    #: Rows that are flushed.
    rows: int = 0
    #: Flushed rows that wait for their index.
    waiting: int = 0
    #: Flushed rows in segments that are too small for an index and too large for a search of row by row.
    partly: int = 0
    #: Rows that are not flushed. Replaced rows of flushed segments hide as many of them.
    fresh: int = 0
    #: Rows without an index that searches read row by row.
    exact: int = 0

    @property
    def searchable(self) -> bool:
        """Whether searches find every row. If many rows wait, a search with a filter misses some."""
        return self.waiting <= self.exact

    @property
    def settled(self) -> bool:
        """Whether the fresh rows are few enough for searches to find each. Of many, a search with a filter misses some."""
        return self.fresh <= self.exact


@dataclass(frozen=True, kw_only=True, slots=True)
class Blend:
    """The part of a query vector that the old model makes, beside the part of the new one."""

    #: The model version whose embedder makes this part.
    embedder: str
    #: SHA-256 of the transforms after it, in order.
    transforms: tuple[str, ...] = ()
    #: The weight of this part, from 0 to 1. The other part has the rest.
    weight: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Leg:
    """One search of a merged search."""

    collection: str
    #: The model version whose vectors the collection holds.
    model: str
    metric: Metric
    #: The model version whose embedder makes the query (its head is among the transforms).
    embedder: str
    #: SHA-256 of the transforms applied to the embedder's output, in order: ρ, then ψ …
    transforms: tuple[str, ...] = ()
    #: SHA-256 of the calibration of its distances. None leaves them as they are.
    calibration: str | None = None
    #: The model version whose vectors are written there, if the query's chain gives other vectors (a roll back). None: the old
    #: part of a blend makes them, else the query's chain.
    write_with: str | None = None
    #: False for a mirror: it gets every write, and no search.
    searched: bool = True
    #: The part of the query vector that another model makes. None: `embedder` and `transforms` make all of it.
    blend: Blend | None = None
    #: How many of the best hits of the legs behind it a search embeds by this leg's model, and ranks by their true distance. It
    #: counts on the newest leg only.
    rescore: int = 0

    def transforms_after(self, other: Leg) -> tuple[str, ...] | None:
        """Return the transforms from the queries of `other` to those of this leg, None if this leg's chain has another start.

        Of blends, the part of `embedder` counts.
        """
        passed = len(other.transforms)
        if self.embedder != other.embedder or self.transforms[:passed] != other.transforms:
            return None
        return self.transforms[passed:]


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingPlan:
    """The legs in force, newest first. Writes go to the first one's collection."""

    gallery: str
    epoch: int
    legs: tuple[Leg, ...]
    #: Collections that get every write and no search, for an instant roll back.
    mirrors: tuple[Leg, ...] = ()
    #: Seconds for which a client may use a plan without asking again.
    max_age: float
    #: Seconds after which a search is repeated instead of trusted.
    longest_search: float
    #: Seconds within which the engine shows every write to every search.
    staleness: float
    #: The grace of the plan before, by which clients may still search.
    grace_before: float = 0.0

    @property
    def grace(self) -> float:
        """The one waiting time, in seconds."""
        return max(self.own_grace, self.grace_before)

    @property
    def own_grace(self) -> float:
        """The grace for its own clients, in seconds."""
        return self.max_age + self.longest_search + self.staleness

    @property
    def rescore(self) -> int:
        """How many of the best hits of the older legs a search ranks by their true distance in the newest leg's space."""
        return self.legs[0].rescore if len(self.legs) > 1 else 0

    @property
    def write_targets(self) -> tuple[Leg, ...]:
        """The legs that a write may change, in the order of the writes: mirrors, then legs."""
        return (*self.mirrors, *self.legs)

    @property
    def embedders(self) -> tuple[str, ...]:
        """The model versions that embed a query, each once."""
        blends = (leg.blend.embedder for leg in self.legs if leg.blend)
        return tuple(dict.fromkeys((*(leg.embedder for leg in self.legs), *blends)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """The progress of an upgrade."""

    #: Records in the new collection, of `total`.
    done: int
    total: int
    #: Records that a worker is copying, or was copying when it died.
    begun: int = 0
    quarantined: int = 0
    #: Records a second over the last minute. None if no record moved.
    rate: float | None = None

    @property
    def t(self) -> float:
        """The share that is re-embedded, from 0 to 1."""
        return self.done / self.total if self.total else 1.0

    @property
    def left(self) -> int:
        """How many records are not copied yet."""
        return self.total - self.quarantined - self.done

    @property
    def eta(self) -> float | None:
        """Seconds until the last record is copied. None below 1 %, or without a rate."""
        if self.t < 0.01 or not self.rate:
            return None
        return (self.total - self.done) / self.rate
