"""VectorStore in memory over faiss. The tests use it as the reference for every engine; rmvdb itself does not.

Every search is exact, whatever the index. It does not simulate the misses of an approximate index.
"""

from __future__ import annotations

import bisect
import copy
import functools
import itertools
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from rmvdb.canonical.ids import checked_ids
from rmvdb.canonical.limits import EngineLimits
from rmvdb.canonical.records import record_of, without_vectors
from rmvdb.canonical.vectors import queries_of
from rmvdb.engines import filters
from rmvdb.errors import AlreadyExists, CollectionMissing, Mismatch
from rmvdb.protocols import Permit, always
from rmvdb.types import Hit, Id, Index, Metric, Moment, Record, Schema, Segments, Vectors

_Test: TypeAlias = Callable[[Mapping[str, Any]], bool]

#: The most hits, as in Milvus.
_MOST = 16_384
#: It has no limits: it holds every value that a schema allows.
_LIMITS = EngineLimits(engine="the store in this process")


class FaissStore:
    """Collections in memory, shared by the threads of this process. Every call sees every write that returned before it."""

    staleness = 0.0
    settles_at_once = True

    def __init__(self) -> None:
        self._collections: dict[str, _Collection] = {}
        self._lock = threading.RLock()

    def version(self) -> str:
        """Return the engine and its version, such as "faiss 1.15.1"."""
        return f"faiss {_faiss().__version__}"

    def moment(self) -> Moment:
        """Return 0: every call shows every write."""
        return 0

    def create(self, schema: Schema, index: Index, *, like: str | None = None) -> None:
        """Create the collection; do nothing if it exists, but AlreadyExists for another schema. The rest has no effect."""
        with self._lock:
            found = self._collections.setdefault(schema.collection, _Collection(schema))
        if _essence(found.schema) != _essence(schema):
            raise AlreadyExists(f"Collection {schema.collection!r} exists with another schema; drop it or take another name")

    def describe(self, collection: str) -> Schema:
        """Read the schema."""
        return self._collection(collection).schema

    def index(self, collection: str) -> Index:
        """Return FLAT: every search is exact."""
        self._collection(collection)
        return Index(type="FLAT")

    def exists(self, collection: str) -> bool:
        """Return whether a collection of that name exists."""
        return collection in self._collections

    def field_names(self, collection: str) -> list[str]:
        """Return the names of its fields."""
        schema = self._collection(collection).schema
        return [schema.id_field, schema.vector_field, *(field.name for field in schema.fields)]

    def collection_names(self) -> list[str]:
        """Return the names of all collections."""
        return list(self._collections)

    def drop(self, collection: str) -> None:
        """Remove the collection and its records; do nothing if it does not exist."""
        with self._lock:
            self._collections.pop(collection, None)

    def move_aliases(self, collection: str, target: str) -> list[str]:
        """Return nothing: this store does not have aliases."""
        return []

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
        """Return the nearest `limit` records of each query (n, dim), nearest first; `fields=None` gives all fields."""
        if not 0 < limit <= _MOST:
            raise Mismatch(
                f"limit is {limit} (offset and rescore included); a search gives between 1 and {_MOST} hits; ask for fewer"
            )
        return self._collection(collection).search(vectors, limit, filter, fields)

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
        """Return the records of these ids that exist and match, each once, in that order; `fields=None` gives all fields."""
        stored = self._collection(collection)
        return stored.get(ids, stored.test(filter), fields, vector=vector)

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
        """Yield every record in ascending id order, in pages, with `after < id <= upto`, except those removed meanwhile."""
        stored = self._collection(collection)
        test = stored.test(filter)
        ids = stored.ids(test, after, upto)
        found = (
            record
            for start in range(0, len(ids), page)
            for record in stored.get(ids[start : start + page], test, fields, vector=vector)
        )
        while records := list(itertools.islice(found, page)):
            yield records

    def fields_of(self, collection: str, records: Sequence[Record]) -> list[Record]:
        """Return these records without vectors, as the collection would keep them."""
        return without_vectors(self._collection(collection).schema, records, _LIMITS)

    def upsert(self, collection: str, records: Sequence[Record], *, as_read: bool = False, permit: Permit = always) -> None:
        """Write records (vectors required), replacing those of the same id; all or none."""
        held = self._collection(collection)
        held.upsert([record_of(held.schema, record, _LIMITS, as_read=as_read) for record in records], permit)

    def delete(self, collection: str, ids: Sequence[Id], *, permit: Permit = always) -> None:
        """Remove the records of these ids; unknown ids are not an error."""
        self._collection(collection).delete(ids, permit)

    def count(self, collection: str, *, filter: str | None = "") -> int:
        """Return how many records match."""
        stored = self._collection(collection)
        return len(stored.ids(stored.test(filter), None, None))

    def unservable(self, collection: str) -> Id | None:
        """Return None: other programs cannot write here."""
        self._collection(collection)
        return None

    def settle(
        self,
        collection: str,
        *,
        coming: int = 0,
        missed: bool = False,
        report: Callable[[int, int], None] = lambda *_: None,
    ) -> None:
        """Return at once: every search is exact."""
        self._collection(collection)

    def segments(self, collection: str) -> Segments:
        """Return that nothing waits."""
        self._collection(collection)
        return Segments()

    def _collection(self, name: str) -> _Collection:
        found = self._collections.get(name)
        if found is None:
            raise CollectionMissing(f"There is no collection {name!r} in this process")
        return found


class _Collection:
    """Rows without gaps: the last row moves into the place of a removed one."""

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        self._lock = threading.RLock()
        self._ids: list[Id] = []
        self._rows: dict[Id, int] = {}
        self._fields: list[dict[str, Any]] = []
        self._vectors = np.empty((0, schema.dim), np.float32)
        #: The vectors that are searched: unit vectors for COSINE, else the vectors themselves.
        self._keys = self._vectors

    def upsert(self, records: Sequence[Record], permit: Permit) -> None:
        permit()
        with self._lock:
            for record in records:
                row = self._row_for(record.id)
                self._fields[row] = copy.deepcopy(dict(record.fields))
                self._vectors[row] = record.vector
                if self._keys is not self._vectors:
                    self._keys[row] = _unit(self._vectors[row : row + 1])[0]

    def delete(self, ids: Sequence[Id], permit: Permit) -> None:
        checked = checked_ids(ids, self.schema)
        permit()
        with self._lock:
            for id in checked:
                row = self._rows.pop(id, None)
                if row is not None:
                    self._close_gap(row)

    def get(self, ids: Sequence[Id], test: _Test, fields: Sequence[str] | None, *, vector: bool) -> list[Record]:
        self._check_fields(fields)
        with self._lock:
            known = [(id, self._rows[id]) for id in checked_ids(ids, self.schema) if id in self._rows]
            return [
                Record(id=id, vector=self._vectors[row].copy() if vector else None, fields=self._shown(row, fields))
                for id, row in known
                if test(self._tested(row))
            ]

    def ids(self, test: _Test, after: Id | None, upto: Id | None) -> list[Id]:
        with self._lock:
            found = sorted(self._ids)
            start = 0 if after is None else bisect.bisect_right(found, after)
            stop = len(found) if upto is None else bisect.bisect_right(found, upto)
            return [id for id in found[start:stop] if test(self._tested(self._rows[id]))]

    def test(self, filter: str | None) -> _Test:
        """Return a test: whether a record with these fields, including its id, matches."""
        return filters.holds(filters.read(filter, self.schema))

    def search(self, vectors: Vectors, limit: int, filter: str | None, fields: Sequence[str] | None) -> list[list[Hit]]:
        test = self.test(filter) if filters.given(filter) else None
        queries = queries_of(self.schema, vectors)  # (q, dim)
        self._check_fields(fields)
        with self._lock:
            rows = self._matching(test)  # (n,)
            if not len(rows) or not len(queries):
                return [[] for _ in queries]
            keys = self._keys[: len(self._ids)] if test is None else self._keys[rows]
            distances, nearest = _nearest(queries, keys, min(limit, len(rows)), self.schema.metric)
            return [
                [self._hit(rows[at], float(distance), fields) for distance, at in zip(line, places, strict=True)]
                for line, places in zip(distances, nearest, strict=True)
            ]

    def _matching(self, test: _Test | None) -> np.ndarray[Any, Any]:
        count = len(self._ids)
        return np.arange(count) if test is None else np.array([row for row in range(count) if test(self._tested(row))], np.int64)

    def _hit(self, row: int, distance: float, fields: Sequence[str] | None) -> Hit:
        shown = self._shown(row, fields)
        return Hit(id=self._ids[row], distance=distance, fields=shown, leg=self.schema.collection, raw=distance)

    def _row_for(self, id: Id) -> int:
        if id not in self._rows:
            self._rows[id] = len(self._ids)
            self._ids.append(id)
            self._fields.append({})
            if len(self._ids) > len(self._vectors):
                self._grow()
        return self._rows[id]

    def _grow(self) -> None:
        separate = self.schema.metric is Metric.COSINE
        room = np.zeros((max(64, len(self._vectors)), self.schema.dim), np.float32)
        keys = np.concatenate([self._keys, room]) if separate else None
        self._vectors = np.concatenate([self._vectors, room])
        self._keys = self._vectors if keys is None else keys

    def _close_gap(self, row: int) -> None:
        last = len(self._ids) - 1
        if row != last:
            self._ids[row], self._fields[row] = self._ids[last], self._fields[last]
            self._vectors[row] = self._vectors[last]
            self._keys[row] = self._keys[last]
            self._rows[self._ids[row]] = row
        del self._ids[last], self._fields[last]

    def _tested(self, row: int) -> dict[str, Any]:
        return {**self._fields[row], self.schema.id_field: self._ids[row]}

    def _shown(self, row: int, fields: Sequence[str] | None) -> dict[str, Any]:
        stored = self._fields[row]
        return {name: copy.deepcopy(stored[name]) for name in (stored if fields is None else fields) if name in stored}

    def _check_fields(self, fields: Sequence[str] | None) -> None:
        known = {field.name for field in self.schema.fields} | {self.schema.id_field, self.schema.vector_field}
        unknown = [name for name in fields or () if name not in known]
        if unknown and not self.schema.dynamic:
            raise Mismatch(f"Collection {self.schema.collection!r} has no field {unknown[0]!r}; ask for one that it has")


def _essence(schema: Schema) -> tuple[Any, ...]:
    fields = {(field.name, field.type) for field in schema.fields}
    names = (schema.id_field, schema.vector_field)
    return (schema.dim, schema.metric, schema.id_type, *names, fields, schema.dynamic)


def _nearest(queries: Vectors, keys: Vectors, limit: int, metric: Metric) -> tuple[Any, Any]:
    """Return distances, smaller is closer, and rows, each (q, limit), nearest first."""
    faiss = _faiss()
    if metric is Metric.L2:
        return faiss.knn(queries, keys, limit, metric=faiss.METRIC_L2)  # type: ignore[no-any-return]
    searched = _unit(queries) if metric is Metric.COSINE else queries
    products, rows = faiss.knn(searched, keys, limit, metric=faiss.METRIC_INNER_PRODUCT)
    return (1.0 - products if metric is Metric.COSINE else -products), rows


def _unit(vectors: Vectors) -> Vectors:
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    return (vectors / np.where(norms == 0.0, 1.0, norms)).astype(np.float32)


@functools.cache
def _faiss() -> Any:
    with warnings.catch_warnings(action="ignore"):
        import faiss

    return faiss
