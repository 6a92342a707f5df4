"""The seams: what a room asks of the services it is given. A protocol stands here only where two real implementations exist."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from rmvdb.types import Hit, Id, Index, Item, Record, Schema, Segments, Vectors

#: Asked before every attempt of a write leaves for the engine; what it raises ends the call (a lease or a deadline that is over).
Permit: TypeAlias = Callable[[], None]


def always() -> None:
    """The permit of a write that may leave at any time."""


class VectorStore(Protocol):
    """Named collections of records in one engine.

    Every write is idempotent: repeated, it changes nothing more. Distances are smaller-is-closer at this seam whatever the
    engine says. `strong` shows every write that returned before the call; without it a call may lag by `staleness` seconds.
    Raises EngineUnavailable when the engine cannot be reached (after retries with back-off), CollectionMissing for a
    collection that is not there, FilterError for a filter it cannot understand, EngineError for any other refusal.
    """

    @property
    def staleness(self) -> float:
        """Seconds within which the engine shows every write to every search."""
        ...

    def version(self) -> str:
        """The engine and its version, such as "milvus 2.3.5"; raises EngineUnavailable if it does not answer."""
        ...

    def create(self, schema: Schema, index: Index) -> None:
        """Make the collection with its index, loaded; does nothing where it exists with that schema, else AlreadyExists."""
        ...

    def describe(self, collection: str) -> Schema:
        """Read the schema; raises CannotAdopt, naming the feature and the way out, for what rmvdb cannot serve."""
        ...

    def index(self, collection: str) -> Index:
        """The index on the vectors as it was built, as far as the engine tells; it has no search parameters."""
        ...

    def exists(self, collection: str) -> bool:
        """Whether there is a collection of that name."""
        ...

    def field_names(self, collection: str) -> list[str]:
        """The names of its fields as they are now, also of a collection that is only half made."""
        ...

    def collection_names(self) -> list[str]:
        """Every collection that there is."""
        ...

    def drop(self, collection: str) -> None:
        """Remove the collection and its records; does nothing where there is none."""
        ...

    def move_aliases(self, collection: str, target: str) -> list[str]:
        """Let every other name of the collection stand for the target; tells them, none where the engine has no aliases."""
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
    ) -> list[list[Hit]]:
        """The nearest `limit` distinct records of each query (n, dim), nearest first; `fields=None` gives all of them."""
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
    ) -> list[Record]:
        """The records of these ids that exist and match, each once, in the order asked; `fields=None` gives all of them."""
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
    ) -> Iterator[list[Record]]:
        """Every record in ascending id order, each once, in pages, with `after < id <= upto`; strong; bounded by the page."""
        ...

    def fields_of(self, collection: str, records: Sequence[Record]) -> list[Record]:
        """These records, vectors left out, as the collection would keep them; Mismatch or Unwritable for the first that it
        cannot."""
        ...

    def upsert(self, collection: str, records: Sequence[Record], *, as_read: bool = False, permit: Permit = always) -> None:
        """Write records (vectors required), replacing those of the same id at one stroke: no search finds neither version.

        Mismatch or Unwritable, with nothing written, for a record that the collection cannot keep as it is. `as_read`: the fields
        were read from a collection of this engine that has the same ones, and are believed; so is the length of a vector.
        """
        ...

    def delete(self, collection: str, ids: Sequence[Id], *, permit: Permit = always) -> None:
        """Remove the records of these ids; ids that are not there are no error."""
        ...

    def count(self, collection: str, *, filter: str | None = "") -> int:
        """How many distinct ids match, at strong consistency."""
        ...

    @property
    def settles_at_once(self) -> bool:
        """Whether every search finds what was written without `settle`."""
        ...

    def settle(
        self,
        collection: str,
        *,
        coming: int = 0,
        missed: bool = False,
        report: Callable[[int, int], None] = lambda *_: None,
    ) -> None:
        """Wait until searches, filtered ones too, find all that was written before, and will once so many more records are
        `coming`; `missed`: a search has missed some; `report` hears rows done, of all."""
        ...

    def segments(self, collection: str) -> Segments:
        """How far the engine is with what was written."""
        ...


class Embedder(Protocol):
    """Turns items into vectors."""

    def embed(self, items: Sequence[Item]) -> Vectors:
        """Vectors of shape (n, dim) for n items, in order; deterministic; raises for items it cannot read."""
        ...


class Classifier(Protocol):
    """The classification head that a model was trained with; it reads that model's own vectors."""

    def scores(self, vectors: Vectors) -> npt.NDArray[np.float32]:
        """Class probabilities (n, classes) of vectors (n, dim)."""
        ...


class Source(Protocol):
    """Gives the item of a record."""

    def load(self, records: Sequence[Record]) -> Mapping[Id, Item]:
        """Items by id; ids it does not know are left out; raises SourceError when it cannot answer at all."""
        ...


class Order(Protocol):
    """Which records are backfilled first."""

    def confidence(self, records: Sequence[Record]) -> npt.NDArray[np.float32]:
        """One value per record (n,), from its old vector and fields; the lowest go first."""
        ...
