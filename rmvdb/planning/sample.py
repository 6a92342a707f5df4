"""Samples of a gallery: records with their vectors in the old spaces and the new one."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from rmvdb import errors
from rmvdb.items.check import KNOWN_GOOD, TOLERANCE, confirm_rows, embed_checked
from rmvdb.items.digest import item_digest
from rmvdb.items.sources import given
from rmvdb.learning.method import AsQueries, Pairs
from rmvdb.planning.excerpts import excerpt
from rmvdb.planning.part import Queries
from rmvdb.protocols import Source, VectorStore
from rmvdb.serving.loaded_models import LoadedModels
from rmvdb.storage.embedding_cache import EmbeddingCache
from rmvdb.text import counted
from rmvdb.types import Id, Item, Leg, Query, Record, ReportProgress, Vectors

#: Records read and embedded at once while sampling, between two looks at the time.
CHUNK = 500
#: How many records are embedded as queries.
AS_QUERIES = 750
#: The records of a sample from which on more are embedded as queries.
LARGE = 20_000
#: How many records are embedded, however long it takes.
ENOUGH = 300
#: With fewer records that have side information, h cannot learn to use it.
LEAST_SIDED = 60


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """Records with their vectors in the old spaces and the new one."""

    records: list[Record]
    #: The number of the old leg that holds each record, and whether an earlier training has seen it, (n,).
    leg: npt.NDArray[np.intp]
    seen: npt.NDArray[np.bool_]
    #: The records as queries, (n, d), for each old leg with an embedder of its own, by number. A leg's own records have their
    #: stored vectors.
    own_queries: dict[int, Vectors]
    #: (n, d_new)
    new: Vectors
    #: Records left out because they could not be embedded, and because they have no label.
    skipped: int
    unlabelled: int
    per_second: float | None
    #: Queries that are searched for in place of the records.
    queries: Queries | None = None
    #: The records as queries of the newest old leg and of the new model. None: a record's vector is its query.
    as_queries: AsQueries | None = None
    #: The same of the legs behind that have embedders of their own, (n, d), by number.
    as_queries_behind: dict[int, Vectors] = field(default_factory=dict)
    #: Logged queries, in the space of the newest old leg and by the new model.
    logged: Pairs | None = None

    def rows(self, leg: int) -> npt.NDArray[np.intp]:
        """Return the rows of the records in this leg, (m,)."""
        return np.flatnonzero(self.leg == leg)

    def held(self, leg: int) -> list[Record]:
        """Return the records in this leg."""
        return [self.records[row] for row in self.rows(leg)]


class Sampler:
    """Draws samples, and keeps the embeddings that it had to make."""

    def __init__(
        self, *, store: VectorStore, loaded_models: LoadedModels, source: Source | None, cache: Callable[[str], EmbeddingCache]
    ) -> None:
        """Take the services. `cache` gives the kept embeddings of a model version."""
        self._store, self._loaded_models, self._source, self._cache = store, loaded_models, source, functools.cache(cache)

    def _ids(self, collection: str, most: int, seed: int, without: Set[Id], look: Callable[[], None] = lambda: None) -> list[Id]:
        """Draw a uniform sample of ids in one streaming pass, sorted. The same collection and seed give the same sample."""
        rng = np.random.default_rng(seed)
        kept: list[tuple[float, Id]] = []
        for page in self._store.scan(collection):
            look()
            drawn = zip(rng.random(len(page)).tolist(), (record.id for record in page), strict=True)
            kept += [(place, id) for place, id in drawn if id not in without]
            if len(kept) > 4 * most:
                kept = sorted(kept, key=lambda each: each[0])[:most]
        chosen = sorted(kept, key=lambda each: each[0])[:most]
        return sorted((id for _, id in chosen), key=lambda id: (str(type(id)), id))

    def records(self, collection: str, most: int, seed: int, without: Set[Id] = frozenset()) -> list[Record]:
        """Draw a uniform sample of a collection, with vectors, sorted by id."""
        ids = self._ids(collection, most, seed, without)
        return self._get(collection, ids)

    def drawn(self, collection: str, most: int, seed: int, look: Callable[[], None]) -> Iterator[Record]:
        """Yield the records of such a sample. The collection is only read once the first one is asked for."""
        yield from self._get(collection, self._ids(collection, most, seed, frozenset(), look))

    def _get(self, collection: str, ids: Sequence[Id]) -> list[Record]:
        chunks = (ids[start : start + CHUNK] for start in range(0, len(ids), CHUNK))
        return [record for chunk in chunks for record in self._store.get(collection, chunk, vector=True)]

    def sample(
        self,
        to_version: str,
        legs: Sequence[Leg],
        sizes: Sequence[int],
        seen: Set[Id],
        report: ReportProgress,
        *,
        seed: int,
        queries: Sequence[Query] = (),
        logged: Sequence[Item] = (),
        labels: str | None = None,
        side: str | None = None,
        texts: bool = False,
        seconds: float | None = None,
    ) -> Sample:
        """Sample `sizes` records of each leg's collection, add the answers to `queries`, and embed them.

        Collections behind the newest leave out the records in `seen`. `logged`: queries without answers. `texts`: searches are
        texts. Left out are logged queries that cannot be embedded and, with `labels`, records without that field. After `seconds`
        the sample is what was embedded by then, if those are enough to choose by.

        Before it embeds anything, it raises UsageError for an answer that is not an id here and for malformed `side`
        information, UnknownName for labels that no record has. Later it raises PlanRefused if no record could be embedded, and
        the errors of embedding.
        """
        held = self._drawn(legs, sizes, seen, seed, queries)
        drawn = sum(map(len, held))
        held = _labelled(held, labels) if labels else held
        # A client's write leaves a record in two collections. It counts for the newest one.
        home = {record.id: (at, record) for at, records in reversed(list(enumerate(held))) for record in records}
        records: Sequence[Record] = [record for _, record in home.values()]
        if side:
            side_of(records, side)
        first = {id for query in queries for id in query.answers}
        records = _shuffled(records, first, seed)
        until = None if seconds is None else time.monotonic() + seconds
        new, records = self._embed_all(to_version, records, functools.partial(report, "embedding the sample"), until=until)
        asked = {at: self._asked(leg, held[at], records, report) for at, leg in enumerate(legs) if not at or _own(leg, legs[0])}
        usable = [id for id in home if all(id in found for found in (new, *asked.values()))]
        if not usable:
            raise errors.PlanRefused(
                f"Collection {legs[0].collection!r} has no record that could be embedded; add records, or, if the gallery "
                f"is empty, make it anew with the new model: rmvdb gallery remove, then rmvdb gallery add --model {to_version}"
            )
        as_queries, behind = self._as_queries(
            to_version, {at: legs[at] for at in asked}, [home[id][1] for id in usable], report, texts=texts, seed=seed
        )
        return Sample(
            records=[home[id][1] for id in usable],
            leg=np.array([home[id][0] for id in usable]),
            seen=np.array([id in seen for id in usable]),
            own_queries={at: np.stack([found[id] for id in usable]) for at, found in asked.items()},
            new=np.stack([new[id] for id in usable]),
            skipped=len(records) - len(usable),
            unlabelled=drawn - sum(map(len, held)),
            per_second=self._cache(to_version).per_second,
            queries=self._queries(to_version, legs, queries, usable, sorted(asked), report) if queries else None,
            logged=self._logged(to_version, legs[0], logged, report) if logged else None,
            as_queries=as_queries,
            as_queries_behind=behind,
        )

    def _as_queries(
        self,
        to_version: str,
        legs: Mapping[int, Leg],
        records: Sequence[Record],
        report: ReportProgress,
        *,
        texts: bool,
        seed: int,
    ) -> tuple[AsQueries | None, dict[int, Vectors]]:
        """Embed some records as queries, if a model embeds queries its own way or if the records are long texts.

        `legs` have embedders of their own, by number. A long text is asked by an excerpt, every other item as it is. Return the
        queries of the newest old leg and of the new model, and those of the legs behind, by number.
        """
        models = self._loaded_models
        own = any(models.chain(each).has_own_queries for each in (legs[0].embedder, to_version))
        if self._source is None or not (own or texts):
            return None, {}
        rng = np.random.default_rng(seed)
        # Of a larger sample the parts that measure are a smaller share.
        most = max(AS_QUERIES, AS_QUERIES * len(records) // LARGE)
        drawn = [records[row] for row in rng.permutation(len(records))[:most]]
        items = given(self._source, drawn)[0]
        asked = {record.id: excerpt(items[record.id], rng) for record in drawn if record.id in items}
        cut = {id for id, query in asked.items() if query is not items[id]}
        if not (own or cut):
            return None, {}
        queries = [asked.get(record.id) for record in records]
        try:
            new = self._embedded_queries(to_version, (), queries, report)
            old = {at: self._embedded_queries(leg.embedder, leg.transforms, queries, report) for at, leg in legs.items()}
        except errors.ModelError:  # its queries are of another kind than its records, such as texts that search pictures
            return None, {}
        whole = np.array([record.id not in cut for record in records])
        return AsQueries(old=old.pop(0), new=new, excerpts=bool(cut), whole=whole), old

    def _embedded_queries(
        self, version: str, transforms: Sequence[str], queries: Sequence[Item | None], report: ReportProgress
    ) -> Vectors:
        """Return these queries by a version and then by transforms, (n, d), NaN without a vector."""
        what = f"embedding records as queries by {version}"
        report(what, 0, 1)
        rows = [row for row, query in enumerate(queries) if query is not None]
        made, bad = embed_checked(
            self._loaded_models.query_embedder(version),
            [queries[row] for row in rows],
            self._loaded_models.chain(version).dim,
            confirm=True,
        )
        good = np.setdiff1d(np.arange(len(rows)), list(bad))
        mapped = self._loaded_models.apply(transforms, made[good])
        vectors = np.full((len(queries), mapped.shape[1]), np.nan, dtype=np.float32)
        vectors[np.array(rows)[good]] = mapped
        report(what, 1, 1)
        return vectors

    def _drawn(
        self, legs: Sequence[Leg], sizes: Sequence[int], seen: Set[Id], seed: int, queries: Sequence[Query]
    ) -> list[list[Record]]:
        held = [
            self.records(leg.collection, size, seed, without=seen if at else frozenset())
            for at, (leg, size) in enumerate(zip(legs, sizes, strict=True))
        ]
        if not queries:
            return held
        answers = _answers(queries, held)
        return [records + self._get(leg.collection, answers) for leg, records in zip(legs, held, strict=True)]

    def _logged(self, to_version: str, newest: Leg, items: Sequence[Item], report: ReportProgress) -> Pairs | None:
        found: dict[str, Vectors] = {}
        for version in dict.fromkeys((newest.embedder, to_version)):
            parts = []
            for start in range(0, len(items), CHUNK):
                report(f"embedding the query log by {version}", start, len(items))
                some = items[start : start + CHUNK]
                parts.append(self._embedded_log(version, some))
            report(f"embedding the query log by {version}", len(items), len(items))
            found[version] = np.concatenate(parts)  # (q, d), NaN if an item has no vector
        good = np.all([np.isfinite(vectors).all(axis=1) for vectors in found.values()], axis=0)  # (q,)
        if not good.any():
            return None
        old = self._loaded_models.apply(newest.transforms, found[newest.embedder][good])
        return Pairs(old=old, new=found[to_version][good])

    def _embedded_log(self, version: str, items: Sequence[Item]) -> Vectors:
        """Return logged queries by a version, (n, d), NaN if an item has no vector: its file may be gone, or lie elsewhere.

        Raises:
            ModelError: the model is not the registered one, or gives rows in another order.
        """
        embedder, dim = self._loaded_models.query_embedder(version), self._loaded_models.chain(version).dim
        try:
            vectors, failed = embed_checked(embedder, items, dim)
        except errors.ModelError:
            self._loaded_models.check(version)
            return np.full((len(items), dim), np.nan, np.float32)
        confirm_rows(embedder, items, vectors, [at for at in range(len(items)) if at not in failed][:1], TOLERANCE)
        return vectors

    def _queries(
        self,
        to_version: str,
        legs: Sequence[Leg],
        queries: Sequence[Query],
        ids: Sequence[Id],
        own: Sequence[int],
        report: ReportProgress,
    ) -> Queries:
        """Embed the queries by the new model, and for each leg in `own` in that leg's space."""
        items, row = [query.item for query in queries], {id: at for at, id in enumerate(ids)}
        relevance = np.zeros((len(queries), len(ids)), dtype=np.bool_)
        for at, query in enumerate(queries):
            relevance[at, [row[id] for id in query.answers if id in row]] = True

        def embedded(version: str) -> Vectors:
            parts = []
            for start in range(0, len(items), CHUNK):
                report(f"embedding the queries by {version}", start, len(items))
                parts.append(self._loaded_models.embed_queries(version, items[start : start + CHUNK]))
            report(f"embedding the queries by {version}", len(items), len(items))
            return np.concatenate(parts)

        asked = {at: self._loaded_models.apply(legs[at].transforms, embedded(legs[at].embedder)) for at in own}
        return Queries(
            old=asked[0],
            new=embedded(to_version),
            relevance=relevance,
            leave_out=np.zeros_like(relevance),
            behind=tuple(asked.get(at) for at in range(1, len(legs))),
        )

    def _asked(self, leg: Leg, held: Sequence[Record], records: Sequence[Record], report: ReportProgress) -> dict[Id, Vectors]:
        """Return each record as a query of this leg: its stored vector if the leg holds it, else a new one."""
        own = {record.id: record.vector for record in held if record.vector is not None}
        others = [record for record in records if record.id not in own]
        raw, _ = self._embed_all(leg.embedder, others, functools.partial(report, f"embedding the sample by {leg.embedder}"))
        if raw:
            own |= zip(raw, self._loaded_models.apply(leg.transforms, np.stack(list(raw.values()))), strict=True)
        return own

    def _embed_all(
        self, version: str, records: Sequence[Record], report: Callable[[int, int], None], *, until: float | None = None
    ) -> tuple[dict[Id, Vectors], Sequence[Record]]:
        """Return raw vectors of a version by id, and the records that were tried: all, or as many as time allowed."""
        found: dict[Id, Vectors] = {}
        known_good = functools.partial(_known_good, records, found.keys())
        for start in range(0, len(records), CHUNK):
            if until is not None and time.monotonic() > until and len(found) >= ENOUGH:
                report(start, start)
                return found, records[:start]
            report(start, len(records))
            found |= self._embedded(version, records[start : start + CHUNK], known_good)
        report(len(records), len(records))
        return found, records

    def _embedded(self, version: str, records: Sequence[Record], known_good: Callable[[], Sequence[Record]]) -> dict[Id, Vectors]:
        """Return raw vectors by id: kept ones, and new ones, which are kept for the backfill.

        `known_good` gives other records, which tell bad records from a broken source or model.
        """
        if self._source is None:
            raise errors.SourceError("The gallery has no source to re-embed from; give it one: rmvdb gallery source NAME SPEC")
        started = time.monotonic()
        source, items = self._source, given(self._source, records, known_good=known_good)[0]
        there = [record for record in records if record.id in items]
        if not there and not given(source, known_good())[0]:
            raise errors.SourceError(
                f"The source has no item for any of {counted(len(records), 'record')}, such as {records[0].id!r}; "
                "fix the source, then plan again"
            )
        cache, told = self._cache(version), {record.id: item_digest(items[record.id]) for record in there}
        known = cache.get(list(told), vectors_of(there), list(told.values()))
        fresh = [record for record in there if record.id not in known]
        if not fresh:
            return known
        loading = (time.monotonic() - started) * len(fresh) / len(records)
        started = time.monotonic()
        vectors, bad = embed_checked(
            self._loaded_models.embedder(version),
            [items[record.id] for record in fresh],
            self._loaded_models.chain(version).dim,
            known_good=lambda: [items[id] for id in known][:KNOWN_GOOD] or list(given(source, known_good())[0].values()),
            confirm=True,
        )
        good = [at for at in range(len(fresh)) if at not in bad]
        made, ids = [fresh[at] for at in good], [fresh[at].id for at in good]
        seconds = loading + time.monotonic() - started
        cache.put(ids, vectors_of(made), [told[id] for id in ids], vectors[good], seconds=seconds)
        return known | dict(zip(ids, vectors[good], strict=True))


def _shuffled(records: Sequence[Record], first: Set[Id], seed: int) -> list[Record]:
    """Return these records in random order, every second one of `first` while there are any.

    So those in `first` come early, and any part of the others is a fair sample.
    """
    places = np.random.default_rng(seed).permutation(len(records)).tolist()
    drawn = [records[place] for place in places]
    parts = ([record for record in drawn if (record.id in first) is wanted] for wanted in (True, False))
    return [record for both in itertools.zip_longest(*parts) for record in both if record is not None]


def _known_good(records: Sequence[Record], found: Set[Id]) -> Sequence[Record]:
    """Pick some records from all over that have a vector, or any records if none has one yet."""
    known = [record for record in records if record.id in found] or records
    return known[:: max(1, len(known) // KNOWN_GOOD)][:KNOWN_GOOD]


def _own(leg: Leg, newest: Leg) -> bool:
    """Return whether this leg needs an embedder of its own, because no transform leads to it from the newest leg."""
    return leg.transforms_after(newest) is None


def _labelled(held: Sequence[Sequence[Record]], field: str) -> list[list[Record]]:
    """Leave out records without the field, or with an empty text in it. Raises UnknownName if there are records and none has it.

    A Milvus server before 2.5 has no null, so that an empty text stands for it.
    """
    known = [[record for record in records if record.fields.get(field) not in (None, "")] for records in held]
    if any(held) and not any(known):
        fields = {name for records in held for record in records for name, value in record.fields.items() if value is not None}
        raise errors.UnknownName("field of the records", field, fields, hint="they have no field; leave --labels out")
    return known


def _answers(queries: Sequence[Query], held: Sequence[Sequence[Record]]) -> list[Id]:
    """Return the answers that the sample does not hold yet."""
    known = {record.id for records in held for record in records}
    kind = type(next(iter(known), 0))
    for query in queries:
        if wrong := [id for id in query.answers if type(id) is not kind]:
            raise errors.UsageError(
                f"Answer {wrong[0]!r} to query {str(query.item)!r:.60} is not an id of this gallery; "
                f"its ids are {kind.__name__}, so write them so"
            )
    return list(dict.fromkeys(id for query in queries for id in query.answers if id not in known))


def vectors_of(records: Sequence[Record]) -> list[Vectors]:
    return [record.vector for record in records if record.vector is not None]


def side_of(records: Sequence[Record], field: str) -> Vectors:
    """Return the side information of records, (n, d_side), from a field with a list of numbers.

    A record without the field has zeros, as in `LoadedModels.lift`. Raises UsageError if a record has something else, or too few
    records have any.
    """
    found = {record.id: value for record in records if (value := record.fields.get(field)) is not None}
    width = max((len(value) for value in found.values() if isinstance(value, list)), default=0)
    for id, value in found.items():
        if not width or not _numbers(value, width):
            raise errors.UsageError(
                f"Field {field!r} of record {id!r} is {value!r:.60}, and side information is a list of numbers, as long in every "
                "record that has it; name another --side, or leave it out"
            )
    if len(found) < LEAST_SIDED:
        few = counted(len(found), "record of the sample has", "records of the sample have")
        raise errors.UsageError(f"{few} something in field {field!r}, which is too few to learn from; leave --side out")
    return np.array([found.get(record.id, [0.0] * width) for record in records], dtype=np.float32)


def _numbers(value: Any, width: int) -> bool:
    return isinstance(value, list) and len(value) == width and all(isinstance(part, int | float) for part in value)
