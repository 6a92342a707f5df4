"""What application code calls: one gallery, searched and written as if no upgrade were on."""

from __future__ import annotations

import logging
import os
import socket
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import Any, ClassVar, Literal, TypeVar, overload

import numpy as np

from rmvdb import canonical, errors
from rmvdb.engines.filters import given
from rmvdb.items.digest import item_digest
from rmvdb.learning.hyperbolic import as_queries, measured
from rmvdb.protocols import Permit, VectorStore
from rmvdb.registry.codec import schema_from_json
from rmvdb.registry.mark import Owner
from rmvdb.registry.registry import Registry
from rmvdb.serving import sketch
from rmvdb.serving.announced_writes import Writes
from rmvdb.serving.current_plan import CurrentPlan
from rmvdb.serving.latency import Latency
from rmvdb.serving.loaded_models import LoadedModels
from rmvdb.serving.merge import merge
from rmvdb.serving.traffic import TrafficCounter
from rmvdb.timing import uptime
from rmvdb.types import Hit, Id, Item, Leg, Metric, Record, ServingPlan, Vectors

log = logging.getLogger(__name__)

R = TypeVar("R")
#: Which of these records are meant after all, by the plan that is in force.
ConfirmIds = Callable[[ServingPlan, Sequence[Id]], Iterable[Id]]

#: How often a search that took longer than allowed is repeated before it fails.
ATTEMPTS = 5
#: Records written under one announcement.
WRITE_BATCH = 500


class _Ended:
    """The records by which the engine ended, in the collections that a write goes to; the others go on."""

    def __init__(self) -> None:
        self._first: errors.EngineKilled | None = None
        self._later: errors.EngineKilled | None = None
        self._calls = 0
        self._ids: set[Id] = set()

    def others(self, records: Sequence[Record]) -> list[Record]:
        """Those of these records that are still to be written."""
        return [record for record in records if record.id not in self._ids]

    @contextmanager
    def noted(self) -> Iterator[None]:
        """One call of the store."""
        self._calls += 1
        try:
            yield
        except errors.EngineKilled as exc:
            if not exc.ids:
                raise
            self._ids.update(exc.ids)
            self._first, self._later = (exc, None) if self._calls == 1 else (self._first, self._later or exc)

    def tell(self) -> None:
        """EngineKilled, if there was one; its ids are those that no collection has."""
        if self._first:
            raise self._first
        if self._later:
            raise errors.EngineKilled(f"In part: {self._later}") from self._later


class Client:
    """Search, read and write one gallery; make one with `rmvdb.connect`. Safe to share between threads.

    A query is embedded once (twice with method `naive`), its legs are searched at the same time, their hits merged by calibrated
    distance. During an upgrade every answer is what the whole gallery gives: nothing missed, nothing found twice.
    """

    #: What a write changes outside this process, in order. Tests kill it before and after each of these calls.
    CALLS: ClassVar = {
        "upsert": ("registry.open_intents", "store.upsert new", "store.upsert old", "registry.close_intents"),
        "delete": ("registry.open_intents", "store.delete new", "store.delete old", "registry.close_intents"),
    }

    def __init__(
        self,
        gallery: str,
        *,
        registry: Registry,
        store: VectorStore,
        loaded_models: LoadedModels,
        engine_timeout: float = 10.0,
        consistency: Literal["Bounded", "Strong"] = "Bounded",
        traffic: int = 5000,
        item_field: str = "",
        closing: Callable[[], None] = lambda: None,
    ) -> None:
        """`item_field`: the field that holds a record's item, if one does. `consistency`: of searches that don't name theirs.
        `traffic`: of how many records at most it counts how often they are
        found. `closing` is called at the end of `close`, to give back what was opened for this client alone."""
        self.gallery = gallery
        self.name = f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"
        self._registry, self._store, self._loaded_models = registry, store, loaded_models
        self._consistency, self._item_field = consistency, item_field
        self._engine_timeout, self._closing = engine_timeout, closing
        self._wrote = float("-inf")
        self._writes = Writes(gallery, registry=registry, name=self.name, engine_timeout=engine_timeout)
        self._pool = ThreadPoolExecutor(max_workers=32, thread_name_prefix="rmvdb-leg")
        collections = registry.collections(registry.gallery(gallery).id)
        self._search_params = {row.name: row.search for row in collections}
        #: Of one of its collections: its ids are those of all.
        self._schema = schema_from_json(collections[0].schema)
        _expect_owned(gallery, registry, store)
        self._latency, self._traffic = Latency(), TrafficCounter(traffic)
        self._current_plan = CurrentPlan(
            gallery,
            registry=registry,
            prepare=loaded_models.prepare,
            name=self.name,
            latency=self._latency,
            traffic=self._traffic,
        )

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave: the next change of epoch need not wait for this client."""
        if self._current_plan.forked:
            return  # connections and threads are the other process's
        self._current_plan.close()
        self._pool.shutdown()
        self._closing()

    @property
    def plan(self) -> ServingPlan:
        """The serving plan in force."""
        return self._current_plan.current()

    # --- search -------------------------------------------------------------------------------------------------------

    @overload
    def search(
        self,
        item: list[Item],
        *,
        vector: Any = ...,
        model: str | None = ...,
        limit: int = ...,
        offset: int = ...,
        filter: str | None = ...,
        output_fields: Sequence[str] = ...,
        consistency: Literal["", "Bounded", "Strong"] = ...,
    ) -> list[list[Hit]]: ...
    @overload
    def search(
        self,
        item: Item = ...,
        *,
        vector: Any = ...,
        model: str | None = ...,
        limit: int = ...,
        offset: int = ...,
        filter: str | None = ...,
        output_fields: Sequence[str] = ...,
        consistency: Literal["", "Bounded", "Strong"] = ...,
    ) -> list[Hit]: ...

    def search(
        self,
        item: Item = None,
        *,
        vector: Any = None,
        model: str | None = None,
        limit: int = 10,
        offset: int = 0,
        filter: str | None = "",
        output_fields: Sequence[str] = (),
        consistency: Literal["", "Bounded", "Strong"] = "",
    ) -> list[Hit] | list[list[Hit]]:
        """The nearest records of an item (a list of items gives a list of answers), nearest first.

        `vector` with `model` searches with a ready vector (dim,) or several (n, dim) instead. `output_fields=["*"]` gives every
        field. `consistency="Strong"` sees every write that returned before; with "Bounded" writes of other clients show within
        the plan's staleness, this client's own at once; without either it is as the client's own. Raises UsageError for arguments
        that don't fit, EngineError, StalePlan.

        `filter` is a Milvus expression; raises FilterError if it cannot be understood. `offset` leaves out that many hits.
        Records of equal distance have no order, so that pages can skip or repeat one: ask for a longer list and cut it.
        """
        limit, offset = canonical.whole("limit", limit, least=1), canonical.whole("offset", offset, least=0)
        encode, several = self._question(item, vector, model)
        fields = canonical.names_of(output_fields)
        if (asked := consistency or self._consistency) not in ("Bounded", "Strong"):
            raise errors.UsageError(f'consistency is "Bounded" or "Strong", not {asked!r}')
        strong = asked == "Strong"
        with self._latency.measured():
            answers = self._search(encode, limit=limit, offset=offset, filter=filter, fields=fields, strong=strong)
        return answers if several else answers[0]

    def _question(self, item: Item, vector: Any, model: str | None) -> tuple[Callable[[ServingPlan], dict[str, Vectors]], bool]:
        if (item is None) == (vector is None):
            raise errors.UsageError("search takes an item, a list of items, or vector= with model=; give one of them")
        if vector is None:
            items = item if isinstance(item, list) else [item]
            embedded: dict[str, Vectors] = {}  # survives a repetition: an item is embedded once
            return lambda plan: self._loaded_models.queries(plan, items, embedded), isinstance(item, list)
        if model is None:
            raise errors.UsageError('A raw vector names the model that made it: search(vector=…, model="v2")')
        try:
            with np.errstate(over="ignore"):  # what is too large becomes infinity, and is refused
                vectors = np.asarray(vector, dtype=np.float32)
        except (TypeError, ValueError) as exc:
            raise errors.Mismatch(f"vector= takes numbers, (dim,) or (n, dim): {exc}") from exc
        rows = np.atleast_2d(vectors)
        return lambda plan: self._loaded_models.vectors(plan, rows, model), vectors.ndim == 2

    def _search(self, encode: Callable[[ServingPlan], dict[str, Vectors]], **options: Any) -> list[list[Hit]]:
        encoded: dict[int, dict[str, Vectors]] = {}  # by epoch: a repetition has its query ready

        def ask(plan: ServingPlan) -> list[list[Hit]]:
            if plan.epoch not in encoded:
                encoded[plan.epoch] = encode(plan)
            return self._merged(plan, encoded[plan.epoch], **options)

        return self._timely(ask)

    def _timely(self, ask: Callable[[ServingPlan], R]) -> R:
        """The answer to a question, asked again where so much time passed that it may have missed a record on its move."""
        for _ in range(ATTEMPTS):
            started, gaps = uptime(), self._registry.gaps  # before the plan's age is looked at
            plan = self._current_plan.current()
            try:
                answer = ask(plan)
            except errors.CollectionMissing:  # dropped by a clean-up, where it took so long that another plan is in force
                if self._current_plan.refresh().epoch == plan.epoch:
                    raise
                continue
            timely = uptime() - started <= plan.longest_search and self._registry.gaps == gaps
            if timely or self._alone_since(plan):
                return answer
        raise errors.EngineError(
            f"A search of {self.gallery!r} took longer than {plan.longest_search:g} s {ATTEMPTS} times; "
            "look at the engine's load, or raise search.longest_search, then repeat rmvdb upgrade, or restart its worker"
        )

    def _alone_since(self, plan: ServingPlan) -> bool:
        """Whether that plan's only collection has been the only one all the while, so that nothing left it."""
        return len(plan.legs) == 1 and self._current_plan.refresh().epoch == plan.epoch

    def _merged(
        self,
        plan: ServingPlan,
        queries: Mapping[str, Vectors],
        *,
        limit: int,
        offset: int,
        filter: str | None,
        fields: Any,
        strong: bool,
    ) -> list[list[Hit]]:
        strong = strong or uptime() - self._wrote < plan.staleness + self._engine_timeout

        def leg(each: Leg) -> list[list[Hit]]:
            asked, hyperbolic = queries[each.collection], each.metric is Metric.LORENTZ
            found = self._store.search(
                each.collection,
                as_queries(asked) if hyperbolic else asked,
                limit=limit + offset,
                filter=filter,
                fields=fields,
                search=self._params(each.collection),
                strong=strong,
            )
            return measured(found, asked) if hyperbolic else found

        try:
            others = [self._pool.submit(leg, each) for each in plan.legs[1:]]
        except RuntimeError:
            self._current_plan.current()  # says so where this client was closed meanwhile
            raise
        found = [leg(plan.legs[0]), *(other.result() for other in others)]
        self._traffic.count(hits for lists in found for hits in lists)
        scales = [calibration.apply if (calibration := self._loaded_models.calibration(each)) else None for each in plan.legs]
        return [merge(lists, scales, limit=limit, offset=offset) for lists in zip(*found, strict=True)]

    def _params(self, collection: str) -> Mapping[str, object]:
        if collection not in self._search_params:
            self._search_params[collection] = self._registry.collection(collection).search
        return self._search_params[collection]

    # --- read ---------------------------------------------------------------------------------------------------------

    def get(self, ids: Id | Iterable[Id], *, output_fields: Sequence[str] = ("*",)) -> list[Record]:
        """The records of these ids that exist, each once, in the order asked, as every write before left them."""
        asked, fields = self._ids(ids), canonical.names_of(output_fields)

        def ask(plan: ServingPlan) -> dict[Id, Record]:
            # Oldest first, one after the other: a record that moves meanwhile is in the next one before it leaves this one.
            legs = [self._store.get(leg.collection, asked, fields=fields) for leg in reversed(plan.legs)]
            return {record.id: record for some in legs for record in some}

        found = self._timely(ask)
        return [found[id] for id in asked if id in found]

    def _ids(self, ids: Id | Iterable[Id]) -> list[Id]:
        """The ids that a caller means, each once; Mismatch for what is none of this gallery's."""
        return canonical.checked_ids(canonical.ids_of(ids), self._schema)

    def query(
        self, filter: str | None = "", *, limit: int = 100, offset: int = 0, output_fields: Sequence[str] = ("*",)
    ) -> list[Record]:
        """Records that match a filter, in ascending id order."""
        limit, offset = canonical.whole("limit", limit, least=0), canonical.whole("offset", offset, least=0)
        fields = canonical.names_of(output_fields)
        found: list[Record] = []
        for page in self._pages(filter, fields, page=min(limit + offset, 1000) or 1):
            found += page
            if len(found) >= limit + offset:
                break
        return found[offset : offset + limit]

    def count(self, filter: str | None = "") -> int:
        """How many records match, each counted once in however many collections it is."""

        def ask(plan: ServingPlan) -> int | None:
            return self._store.count(plan.legs[0].collection, filter=filter) if len(plan.legs) == 1 else None

        alone = self._timely(ask)
        return sum(len(page) for page in self._pages(filter, (), page=5000)) if alone is None else alone

    def _pages(self, filter: str | None, fields: Sequence[str] | None, *, page: int) -> Iterator[list[Record]]:
        after: Id | None = None

        def ask(plan: ServingPlan) -> list[list[Record]]:
            legs = reversed(plan.legs)  # oldest first again
            return [
                next(self._store.scan(leg.collection, filter=filter, fields=fields, after=after, page=page), []) for leg in legs
            ]

        while True:
            pages = self._timely(ask)
            # Only as far as every collection has answered.
            ends: list[Any] = [each[-1].id for each in pages if len(each) >= page]
            before, after = after, min(ends) if ends else None
            if before is not None and after is not None and not before < after:
                raise errors.EngineError(
                    f"A page after the id {before!r} of {self.gallery!r} ended at {after!r}; look at the engine's log"
                )
            found = {each.id: each for some in pages for each in some if after is None or each.id <= after}
            yield sorted(found.values(), key=lambda record: record.id)
            if after is None:
                return

    # --- write --------------------------------------------------------------------------------------------------------

    def upsert(self, records: Mapping[str, Any] | Iterable[Mapping[str, Any]]) -> int:
        """Write a record `{"id": …, "item": …, field: value, …}`, or several, in place of those with the same ids; how many.

        The item is embedded here. If the gallery's source is a field (`--source field:text`), that field is the item, and
        "item" may be left out. After it returned every search of this client shows the records and nothing they replaced.
        """
        asked = list(_each(records, self._item_field))
        # Ids and fields of all of them before anything of any is written.
        kept = self._store.fields_of(self._current_plan.current().legs[0].collection, [record for record, _ in asked])
        distinct = list({record.id: (record, item) for record, (_, item) in zip(kept, asked, strict=True)}.values())
        for start in range(0, len(distinct), WRITE_BATCH):
            some = distinct[start : start + WRITE_BATCH]
            self._upsert([record for record, _ in some], [item for _, item in some])
        return len(distinct)

    def _upsert(self, records: Sequence[Record], items: Sequence[Item]) -> None:
        ids = [record.id for record in records]
        embedded: dict[str, Vectors] = {}
        told = {id: item_digest(item) for id, item in zip(ids, items, strict=True)}  # before it is read: it may change
        for leg in self._current_plan.current().write_targets:  # the slow part, before anybody has to wait for this write
            _check_vectors(ids, self._loaded_models.stored(leg, items, embedded), leg)

        def rows(leg: Leg) -> list[Record]:
            vectors = self._loaded_models.stored(leg, items, embedded)
            return [replace(record, vector=vector) for record, vector in zip(records, vectors, strict=True)]

        sketches: dict[Id, bytes] = {}
        with self._writing("upsert", ids, sketches=sketches) as (plan, in_time):
            ended = _Ended()
            for mirror in plan.mirrors:  # first: what a killed client wrote shows nowhere yet
                with ended.noted():
                    self._store.upsert(mirror.collection, ended.others(rows(mirror)), permit=in_time)
            newest, *older = plan.legs
            with ended.noted():
                self._store.upsert(newest.collection, ended.others(rows(newest)), permit=in_time)
            written = ended.others(rows(newest))
            sketches |= {row.id: sketch.of(row.vector, item=told[row.id]) for row in written if row.vector is not None}
            # Where an older collection still has the record it must not show what was replaced. Only workers remove from there.
            for leg in older:
                stale = {record.id for record in self._store.get(leg.collection, ids, fields=())}
                if stale:
                    with ended.noted():
                        self._store.upsert(
                            leg.collection, [row for row in ended.others(rows(leg)) if row.id in stale], permit=in_time
                        )
            ended.tell()

    def delete(self, ids: Id | Iterable[Id] | None = None, *, filter: str | None = "") -> int:
        """Remove records by id, or all that match a filter; how many ids were asked for or matched."""
        filter = given(filter)
        if (ids is None) == (not filter):
            raise errors.UsageError("delete takes ids, or filter=…; give one of them")
        if ids is not None:
            return len(self._delete(self._ids(ids)))

        def matching(plan: ServingPlan, some: Sequence[Id]) -> Iterable[Id]:
            found = (self._store.get(leg.collection, some, filter=filter, fields=()) for leg in reversed(plan.legs))
            return {record.id: None for each in found for record in each}

        pages = self._pages(filter, (), page=WRITE_BATCH)
        return sum(len(self._delete([record.id for record in page], matching)) for page in pages)

    def delete_those(self, ids: Sequence[Id], still: Callable[[Sequence[Id]], Iterable[Id]]) -> list[Id]:
        """Remove those of these records that `still` names, asked once nobody else is at them; their ids."""
        return self._delete(self._ids(ids), lambda _, some: still(some))

    def _delete(self, ids: Sequence[Id], still: ConfirmIds | None = None) -> list[Id]:
        parts = (ids[start : start + WRITE_BATCH] for start in range(0, len(ids), WRITE_BATCH))
        return [id for part in parts for id in self._delete_part(part, still)]

    def _delete_part(self, ids: Sequence[Id], still: ConfirmIds | None) -> list[Id]:
        going = list(ids)

        def only(plan: ServingPlan) -> list[Id]:  # others may have written them since they were listed, and are done now
            going[:] = still(plan, ids) if still else ids
            return going

        with self._writing("delete", ids, only=only if still else None) as (plan, in_time):
            for leg in plan.write_targets:
                self._store.delete(leg.collection, going, permit=in_time)
        return going

    @contextmanager
    def _writing(
        self,
        kind: str,
        ids: Sequence[Id],
        *,
        only: Callable[[ServingPlan], Sequence[Id]] | None = None,
        sketches: Mapping[Id, bytes] = MappingProxyType({}),
    ) -> Iterator[tuple[ServingPlan, Permit]]:
        self._current_plan.current()
        with self._writes.announced(kind, ids, only=only, sketches=sketches) as (plan, in_time):
            if plan.epoch < self._current_plan.current().epoch:
                raise self._current_plan.gone_back(plan.epoch)
            if plan.epoch > self._current_plan.current().epoch:
                # Else this client would search by the plan before, which may not know where this is written.
                self._current_plan.refresh()
            yield plan, in_time
            self._wrote = uptime()


def _each(records: Mapping[str, Any] | Iterable[Mapping[str, Any]], item_field: str) -> Iterator[tuple[Record, Item]]:
    """The records that a caller gave, as records without vectors, each with its item."""
    if not isinstance(records, Iterable):
        raise errors.UsageError(f"upsert takes a record or a list of records, each a dictionary, not a {type(records).__name__}")
    for record in [records] if isinstance(records, Mapping) else records:
        if not isinstance(record, Mapping) or "id" not in record:
            has = ", ".join(map(str, record)) if isinstance(record, Mapping) else f"a {type(record).__name__}"
            raise errors.UsageError(f"A record to write needs an id and an item; this one has: {has or 'nothing'}")
        fields = {name: value for name, value in record.items() if name not in ("id", "item")}
        yield Record(id=record["id"], fields=fields), _item(record, item_field)


def _item(record: Mapping[str, Any], field: str) -> Item:
    """The item of a record that a caller gave, which its field may be."""
    held = record.get(field) if field else None
    if "item" not in record:
        if held is None:
            needs = f"an item, or the field {field!r} that holds it" if field else "an item"
            raise errors.UsageError(f"A record to write needs an id and {needs}; this one has: {', '.join(map(str, record))}")
        return held
    if held is not None and not _same(held, record["item"]):
        raise errors.UsageError(
            f"Record {record['id']!r} has one item and another {field!r}, which holds the items of this gallery; leave item out"
        )
    return record["item"]


def _same(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except ValueError:  # arrays
        return np.array_equal(one, other)


def _check_vectors(ids: Sequence[Id], vectors: Vectors, leg: Leg) -> None:
    for at, why in canonical.unrankable(vectors, leg.metric).items():
        raise errors.Mismatch(f"Record {ids[at]!r} cannot be written: its vector for {leg.collection} {why}; correct its item")


def _expect_owned(gallery: str, registry: Registry, store: VectorStore) -> None:
    """NotOwner where another registry has taken the gallery, or this one has gone back; an engine that is away says so later."""
    try:
        Owner(registry, store).expect(gallery)
    except errors.EngineError as exc:
        log.info("Whose the collections of %s are could not be asked: %s", gallery, exc)
