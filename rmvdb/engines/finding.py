"""Whether searches find a collection's records: by their own vectors, with a filter and without."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from rmvdb.canonical.vectors import unrankable
from rmvdb.engines import index_rules
from rmvdb.engines.filters import ids_in, literal, read
from rmvdb.engines.filters.parse import LONGEST
from rmvdb.errors import FilterError
from rmvdb.protocols import VectorStore
from rmvdb.types import Hit, Id, Metric, Moment, Record, Schema, Vectors

#: Records searched by their own vectors at once.
TOGETHER = 20
#: Ids in one filter. Milvus 2.3.5 found the record of a filter of one id, and 1 to 7 records of a filter of twenty. So only a
#: filter of many ids shows that some are missed.
_IDS = 1_000
#: Hits of a search without a filter.
_HITS = 10
#: The most by which two computations of a distance differ, as a share of the vector's squared length.
_ROUNDING = 1e-4


class NotFound(NamedTuple):
    """The records that searches miss, and how, in words."""

    #: The index is sure to find them, if they are in it.
    hidden: dict[Id, str]
    #: The search found farther ones instead. An approximate index may pass over some. HNSW passed over 6 of 998 records that
    #: differ in length and are compared by IP, though asked for 1,000 hits, in a collection with many replaced rows.
    passed_over: dict[Id, str]


def not_found(
    store: VectorStore,
    schema: Schema,
    records: Sequence[Record],
    *,
    among: Sequence[Id] = (),
    search: Mapping[str, object] | None = None,
    after: Moment = 0,
) -> NotFound:
    """Search for records by their own vectors, and return those that the collection's index does not find.

    A search without a filter asks as applications do, by the parameters `search`. What it misses is asked for again, and every
    filter at once, with as much as the index can read. `records` have their vectors and are at most TOGETHER. `among`: the ids of
    these and more records of the collection. A search with a filter by key must find them, whatever its vector. `after`: the
    moment that the other searches show every write before; after 0 they are strong.
    """
    own_vectors = {each.id: each.vector for each in records if each.vector is not None and np.any(each.vector)}
    asked = _Asked(store, schema, after)
    if own_vectors and asked.reach.filters:
        asked.by_key(list(among) or list(own_vectors), next(iter(own_vectors.values())))
        if records[0].id in own_vectors:
            asked.by_field(records[0])
    if own_vectors and asked.reach.nearest:
        asked.by_vector(own_vectors, search or {})
    return asked.missed


class _Asked:
    """The searches of one call of `not_found`, and what they missed."""

    def __init__(self, store: VectorStore, schema: Schema, after: Moment) -> None:
        self._store, self._schema, self._after = store, schema, after
        self.reach = index_rules.reach(store.index(schema.collection))
        self.missed = NotFound({}, {})

    def by_key(self, ids: Sequence[Id], vector: Vectors) -> None:
        """Search with a filter by key, which matches all these ids and no other record."""
        longest = max((len(literal(id)) for id in ids), default=1) + 2
        most = max(min(_IDS, self.reach.most, LONGEST // 2 // longest), 1)
        for part in (ids[start : start + most] for start in range(0, len(ids), most)):
            # Not at Strong, because applications search so. It may miss a recent write, and the caller repeats it.
            [hits] = self._store.search(
                self._schema.collection,
                vector[None],
                limit=len(part),
                filter=ids_in(self._schema.id_field, part),
                search=self.reach.search,
            )
            there = {hit.id for hit in hits}
            left = [id for id in part if id not in there]
            for id in self._rankable(self._store.get(self._schema.collection, left, fields=(), vector=True) if left else ()):
                self._hide(id, "a search with a filter by its key does not find it")

    def by_field(self, record: Record) -> None:
        """Search with a filter by one of the record's fields."""
        if record.vector is None or not (filter := _by_field(self._schema, record)):
            return
        how = f"a search with the filter {filter!r}"
        [hits] = self._near(record.vector[None], filter=filter, strong=not self._after)
        if len(hits) < _HITS:
            matching = next(self._store.scan(self._schema.collection, filter=filter, fields=(), vector=True, page=_HITS), [])
            if len(hits) < (most := len(self._rankable(matching))):
                [hits] = self._near(record.vector[None], filter=filter, strong=True)  # the others may be fresh writes
                if len(hits) < most:
                    self._hide(record.id, f"{how} finds {len(hits)} of {most} records")
        if self.reach.nearest and not self._finds(record.id, record.vector, hits):
            self._miss(record.id, hits, how)

    def by_vector(self, vectors: Mapping[Id, Vectors], search: Mapping[str, object]) -> None:
        """Search without a filter, as applications do. What that misses is asked for with as much as the index can read."""
        left, near = list(vectors), dict[Id, list[Hit]]()
        for params in (search, self.reach.search):
            asked = np.stack([vectors[id] for id in left])  # (n, dim)
            near = dict(zip(left, self._near(asked, search=params, strong=not self._after), strict=True))
            left = [id for id in left if not self._finds(id, vectors[id], near[id])]
            if not left:
                return
        for id in left:
            self._miss(id, near[id], "a search by its own vector")

    def _rankable(self, records: Sequence[Record]) -> list[Id]:
        """Return the ids of the records that a search can find: it finds no vector that the metric cannot rank."""
        vectors = {each.id: each.vector for each in records if each.vector is not None}
        odd = unrankable(np.stack(list(vectors.values())), self._schema.metric) if vectors else {}
        return [id for at, id in enumerate(vectors) if at not in odd]

    def _near(
        self, vectors: Vectors, *, strong: bool, filter: str = "", search: Mapping[str, object] | None = None
    ) -> list[list[Hit]]:
        return self._store.search(
            self._schema.collection,
            vectors,
            limit=_HITS,
            filter=filter,
            search=self.reach.search if search is None else search,
            strong=strong,
            after=None if strong else self._after,
        )

    def _finds(self, id: Id, vector: Vectors, hits: Sequence[Hit]) -> bool:
        """Return whether a record is among its hits, or so many are as near."""
        own, slack = _own_distance(self._schema.metric, vector)
        return any(hit.id == id for hit in hits) or (len(hits) == _HITS and hits[-1].distance <= own + slack)

    def _miss(self, id: Id, hits: Sequence[Hit], how: str) -> None:
        if self.reach.exact or len(hits) < _HITS:  # it did not find farther ones instead
            self._hide(id, f"{how} does not find it")
        elif id not in self.missed.hidden:
            self.missed.passed_over.setdefault(id, f"{how} does not find it")

    def _hide(self, id: Id, how: str) -> None:
        self.missed.hidden.setdefault(id, how)


def _by_field(schema: Schema, record: Record) -> str:
    """Return a filter by one of the record's numbers or short texts; empty if it has none that a filter can name."""
    for name, value in record.fields.items():
        number = type(value) is int and abs(value) < 2**53
        text = isinstance(value, str) and value.isascii() and value.isalnum() and len(value) < 100
        if name.isidentifier() and (number or text):
            filter = f"{name} == {literal(value)}"
            with contextlib.suppress(FilterError):  # for instance, the name is a keyword, or the field is JSON
                read(filter, schema)
                return filter
    return ""


def _own_distance(metric: Metric, vector: Vectors) -> tuple[float, float]:
    """Return the distance of a vector from itself, and how much an engine's may differ."""
    square = float(np.dot(vector.astype(np.float64), vector.astype(np.float64)))
    return (-square if metric.stored is Metric.IP else 0.0), _ROUNDING * (1.0 if metric is Metric.COSINE else square)
