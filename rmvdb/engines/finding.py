"""Whether searches find a collection's records: by their own vectors, with a filter and without."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from rmvdb.engines import index_rules
from rmvdb.engines.filters import ids_in, literal, read
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

    #: Searches miss them that would find them in any index of this type.
    hidden: dict[Id, str]
    #: Searches for the nearest found farther ones instead. An approximate index may pass over some: HNSW did so with 0.6 % of
    #: 20,000 records that differ in length and are compared by IP, and searches with a filter by key found each of them.
    passed_over: dict[Id, str]


def not_found(
    store: VectorStore, schema: Schema, records: Sequence[Record], *, among: Sequence[Id] = (), after: Moment = 0
) -> NotFound:
    """Return the records that a search misses which looks at as much as the index can, whatever the gallery's own searches do.

    `records` have their vectors and are at most TOGETHER. `among`: the ids of these and more records of the collection. A search
    with a filter by key must find them, whatever its vector. `after`: the moment that the other searches show every write before;
    after 0 they are strong.
    """
    missed = NotFound({}, {})
    own_vectors = {each.id: each.vector for each in records if each.vector is not None and np.any(each.vector)}
    if not own_vectors:
        return missed
    name, ids = schema.collection, list(own_vectors)
    vectors = np.stack(list(own_vectors.values()))  # (n, dim)
    reach = index_rules.reach(store.index(name))
    search = functools.partial(store.search, name, search=reach.search)
    if reach.filters:
        wanted, most = list(among) or ids, min(_IDS, reach.most)
        for part in (wanted[start : start + most] for start in range(0, len(wanted), most)):
            # Not at Strong, because applications search so. It may miss a recent write, and the caller repeats it.
            [hits] = search(vectors[:1], limit=len(part), filter=ids_in(schema.id_field, part))
            there = {hit.id for hit in hits}
            missed.hidden.update({id: "a search with a filter by its key does not find it" for id in part if id not in there})
    if reach.nearest:
        if records[0].id in own_vectors:
            _search_by_field(store, schema, records[0], search, after, missed)
        near = search(vectors, limit=_HITS, strong=not after, after=after)
        for id, vector, hits in zip(ids, vectors, near, strict=True):
            _judge(schema, id, vector, hits, missed, "a search by its own vector")
    return missed


def _search_by_field(
    store: VectorStore, schema: Schema, record: Record, search: Callable[..., list[list[Hit]]], after: Moment, missed: NotFound
) -> None:
    """Search for a record with a filter by one of its fields, and note whether the search misses it."""
    if record.vector is None or not (filter := _by_field(schema, record)):
        return
    name, how = schema.collection, f"a search with the filter {filter!r}"
    ask = functools.partial(search, record.vector[None], limit=_HITS, filter=filter)
    [hits] = ask(strong=not after, after=after)
    if len(hits) < _HITS and (matching := min(_HITS, store.count(name, filter=filter))) > len(hits):
        [hits] = ask(strong=True)  # the others may be fresh writes
        if len(hits) < matching:
            missed.hidden.setdefault(record.id, f"{how} finds {len(hits)} of {matching} records")
    _judge(schema, record.id, record.vector, hits, missed, how)


def _judge(schema: Schema, id: Id, vector: Vectors, hits: Sequence[Hit], missed: NotFound, how: str) -> None:
    own, slack = _own_distance(schema.metric, vector)
    as_near = len(hits) == _HITS and hits[-1].distance <= own + slack
    if not as_near and id not in missed.hidden and all(hit.id != id for hit in hits):
        missed.passed_over.setdefault(id, f"{how} does not find it")


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
