"""The protocols of the services that rooms receive. Each has at least two real implementations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from rmvdb.types import Hit, Id, Index, Item, Moment, Record, Schema, Segments, Vectors

#: Called before each attempt to send a write to the engine. An exception ends the write: its lease or deadline is over.
Permit: TypeAlias = Callable[[], None]


def always() -> None:
    """Permit a write at any time."""


class VectorStore(Protocol):
    """Named collections of records in one engine.

    Every write is idempotent: a repeated call changes nothing. Smaller distances are closer, whatever the engine returns. A
    `strong` call shows every write that returned before it. A call `after` a moment shows every write that returned before that
    moment, in every collection, and may lack later ones. Other calls may lag by `staleness` seconds.

    Raises:
        EngineUnavailable: the engine cannot be reached, after retries with back-off.
        CollectionMissing: there is no such collection.
        FilterError: rmvdb cannot understand the filter.
        EngineError: the engine refuses a call for another reason.
    """

    @property
    def staleness(self) -> float:
        """Seconds within which the engine shows every write to every search."""
        ...

    def version(self) -> str:
        """Return the engine and its version, such as "milvus 2.3.5"."""
        ...

    def moment(self) -> Moment:
        """Return this moment. Return 0 if the engine cannot tell it, or gives no answer at once: a call after 0 is strong."""
        ...

    def create(self, schema: Schema, index: Index, *, like: str | None = None) -> None:
        """Create the collection with its index, and load it. Does nothing if it exists with that schema.

        `like`: a collection whose layout it gets: shards, partitions, replicas, properties, indexes on fields, consistency level.

        Raises:
            AlreadyExists: it exists with another schema.
        """
        ...

    def describe(self, collection: str) -> Schema:
        """Read the schema.

        Raises:
            CannotAdopt: rmvdb cannot serve the collection. The message names the feature and the remedy.
        """
        ...

    def index(self, collection: str) -> Index:
        """Return the index on the vectors, as far as the engine reports it, without search parameters."""
        ...

    def exists(self, collection: str) -> bool:
        """Return whether there is a collection of that name."""
        ...

    def field_names(self, collection: str) -> list[str]:
        """Return the names of its fields, even if the collection is only half made."""
        ...

    def collection_names(self) -> list[str]:
        """Return the names of all collections."""
        ...

    def drop(self, collection: str) -> None:
        """Remove the collection and its records. Does nothing if there is none."""
        ...

    def move_aliases(self, collection: str, target: str) -> list[str]:
        """Move every alias of the collection to the target. Return them, none if the engine has no aliases."""
        ...

    def search(
        self,
        collection: str,
        vectors: Vectors,
        *,
        limit: int,
        filter: str | None = "",
        fields: Sequence[str] | None = (),
        search: Mapping[str, object] | None = None,
        strong: bool = False,
        after: Moment | None = None,
    ) -> list[list[Hit]]:
        """Return the nearest `limit` distinct records of each query (n, dim), nearest first. `fields=None` returns all fields."""
        ...

    def get(
        self,
        collection: str,
        ids: Sequence[Id],
        *,
        filter: str | None = "",
        fields: Sequence[str] | None = None,
        vector: bool = False,
        strong: bool = True,
        after: Moment | None = None,
    ) -> list[Record]:
        """Return the records of these ids that exist and match, each once, in that order. `fields=None` returns all fields.

        `after` counts if the call is not `strong`.
        """
        ...

    def scan(
        self,
        collection: str,
        *,
        filter: str | None = "",
        fields: Sequence[str] | None = (),
        vector: bool = False,
        after: Id | None = None,
        upto: Id | None = None,
        page: int = 1000,
        ahead: bool = False,
    ) -> Iterator[list[Record]]:
        """Yield pages of every record with `after < id <= upto`, each once, by ascending id. Memory holds a few pages.

        It shows every write that returned before the first page was asked for, and leaves out what is removed while it runs. With
        `ahead` it may read later pages before they are asked for, which is faster, and may show what was removed since.
        """
        ...

    def fields_of(self, collection: str, records: Sequence[Record]) -> list[Record]:
        """Return these records as the collection would store them, without vectors.

        Raises:
            Mismatch, Unwritable: the collection cannot store one of them.
        """
        ...

    def upsert(self, collection: str, records: Sequence[Record], *, as_read: bool = False, permit: Permit = always) -> None:
        """Write records with vectors. Each replaces the record of its id atomically: every search finds one of the two versions.

        `as_read`: the fields were read from a collection of this engine with the same fields, so neither they nor the lengths of
        the vectors are checked.

        Raises:
            Mismatch, Unwritable: the collection cannot store a record as it is. Nothing was written.
        """
        ...

    def delete(self, collection: str, ids: Sequence[Id], *, permit: Permit = always) -> None:
        """Remove the records of these ids. Ignore ids that do not exist."""
        ...

    def count(self, collection: str, *, filter: str | None = "") -> int:
        """Return how many distinct ids match, at strong consistency."""
        ...

    def unservable(self, collection: str) -> Id | None:
        """Return an id that another program wrote and that rmvdb could not read again or delete. None if there is none."""
        ...

    @property
    def settles_at_once(self) -> bool:
        """Whether every search finds all writes without `settle`."""
        ...

    def settle(
        self,
        collection: str,
        *,
        coming: int = 0,
        missed: bool = False,
        report: Callable[[int, int], None] = lambda *_: None,
    ) -> None:
        """Wait until all searches, filtered ones too, find every earlier write.

        `coming`: the number of records still to come, which searches must find, too. `missed`: a search has missed some.
        `report` takes the rows done, and all rows.
        """
        ...

    def segments(self, collection: str) -> Segments:
        """Return how far the engine has flushed and indexed the rows."""
        ...


class Embedder(Protocol):
    """Turns items into vectors.

    An embedder that embeds queries in another way than records has a method `embed_queries(items)` beside `embed(items)`, of the
    same form and into the same space. Searches, judged queries and logged queries use it. Stored records never do. An embedder
    without it embeds queries as records.
    """

    def embed(self, items: Sequence[Item]) -> Vectors:
        """Return vectors (n, dim) for n items, in order, and the same each time. Raise an error for items it cannot read."""
        ...


class Classifier(Protocol):
    """The classification head that a model was trained with. It reads that model's own vectors."""

    def scores(self, vectors: Vectors) -> npt.NDArray[np.float32]:
        """Return class probabilities (n, classes) of vectors (n, dim)."""
        ...


class Source(Protocol):
    """Gives the item of a record."""

    def load(self, records: Sequence[Record]) -> Mapping[Id, Item]:
        """Return items by id, without ids that it does not know.

        Raises:
            SourceError: it cannot answer at all.
        """
        ...


class Order(Protocol):
    """Which records are backfilled first."""

    def confidence(self, records: Sequence[Record]) -> npt.NDArray[np.float32]:
        """Return one value per record (n,), from its old vector and fields. Records of the lowest values go first."""
        ...
