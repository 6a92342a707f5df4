"""What application code calls: one gallery, searched and written as if no upgrade were on."""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, ClassVar, Literal, TypeVar, overload

import numpy as np

from rmvdb import errors, sketch
from rmvdb.encoding import Encoder
from rmvdb.hyperbolic import as_queries, measured
from rmvdb.latency import Latency
from rmvdb.merge import merge
from rmvdb.plans import Plans
from rmvdb.protocols import Permit, VectorStore
from rmvdb.registry import Registry
from rmvdb.traffic import Traffic
from rmvdb.types import Hit, Id, Item, Leg, Metric, Record, ServingPlan, Vectors
from rmvdb.uptime import uptime
from rmvdb.writing import Writes

R = TypeVar("R")
#: Which of these records are meant after all, by the plan that is in force.
Still = Callable[[ServingPlan, Sequence[Id]], Iterable[Id]]

#: How often a search that took longer than allowed is repeated before it fails.
ATTEMPTS = 5
#: Records written under one announcement.
WRITE_BATCH = 500


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
        encoder: Encoder,
        longest_call: float = 10.0,
        consistency: Literal["Bounded", "Strong"] = "Bounded",
        traffic: int = 5000,
        closing: Callable[[], None] = lambda: None,
    ) -> None:
        """`consistency`: of searches that don't name theirs. `traffic`: of how many records at most it counts how often they are
        found. `closing` is called at the end of `close`, to give back what was opened for this client alone."""
        self.gallery = gallery
        self.name = f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"
        self._registry, self._store, self._encoder = registry, store, encoder
        self._consistency = consistency
        self._longest_call, self._closing = longest_call, closing
        self._wrote = float("-inf")
        self._writes = Writes(gallery, registry=registry, name=self.name, longest_call=longest_call)
        self._pool = ThreadPoolExecutor(max_workers=32, thread_name_prefix="rmvdb-leg")
        self._search_params = {row.name: row.search for row in registry.collections(registry.gallery(gallery).id)}
        self._latency, self._traffic = Latency(), Traffic(traffic)
        self._plans = Plans(
            gallery,
            registry=registry,
            prepare=encoder.prepare,
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
        if self._plans.forked:
            return  # connections and threads are the other process's
        self._plans.close()
        self._pool.shutdown()
        self._closing()

    @property
    def plan(self) -> ServingPlan:
        """The serving plan in force."""
        return self._plans.current()

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
        filter: str = ...,
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
        filter: str = ...,
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
        filter: str = "",
        output_fields: Sequence[str] = (),
        consistency: Literal["", "Bounded", "Strong"] = "",
    ) -> list[Hit] | list[list[Hit]]:
        """The nearest records of an item (a list of items gives a list of answers), nearest first.

        `vector` with `model` searches with a ready vector (dim,) or several (n, dim) instead. `output_fields=["*"]` gives every
        field. `consistency="Strong"` sees every write that returned before; with "Bounded" writes of other clients show within
        the plan's staleness, this client's own at once; without either it is as the client's own. Raises UsageError for arguments
        that don't fit, EngineError, StalePlan.
        """
        if limit < 1 or offset < 0:
            raise errors.UsageError(f"limit must be at least 1 and offset at least 0, not {limit} and {offset}")
        encode, several = self._question(item, vector, model)
        fields = None if "*" in output_fields else tuple(output_fields)
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
            return lambda plan: self._encoder.queries(plan, items, embedded), isinstance(item, list)
        if model is None:
            raise errors.UsageError('A raw vector names the model that made it: search(vector=…, model="v2")')
        try:
            vectors = np.asarray(vector, dtype=np.float32)
        except (TypeError, ValueError) as exc:
            raise errors.Mismatch(f"vector= takes numbers, (dim,) or (n, dim): {exc}") from exc
        rows = np.atleast_2d(vectors)
        return lambda plan: self._encoder.vectors(plan, rows, model), vectors.ndim == 2

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
            started = uptime()  # before the plan's age is looked at
            plan = self._plans.current()
            try:
                answer = ask(plan)
            except errors.CollectionMissing:  # dropped by a clean-up, where it took so long that another plan is in force
                if self._plans.refresh().epoch == plan.epoch:
                    raise
                continue
            if uptime() - started <= plan.longest_search or self._alone_since(plan):
                return answer
        raise errors.EngineError(
            f"A search of {self.gallery!r} took longer than {plan.longest_search:g} s {ATTEMPTS} times; "
            "look at the engine's load, or raise search.longest_search, then repeat rmvdb upgrade, or restart its worker"
        )

    def _alone_since(self, plan: ServingPlan) -> bool:
        """Whether that plan's only collection has been the only one all the while, so that nothing left it."""
        return len(plan.legs) == 1 and self._plans.refresh().epoch == plan.epoch

    def _merged(
        self,
        plan: ServingPlan,
        queries: Mapping[str, Vectors],
        *,
        limit: int,
        offset: int,
        filter: str,
        fields: Any,
        strong: bool,
    ) -> list[list[Hit]]:
        strong = strong or uptime() - self._wrote < plan.staleness + self._longest_call

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
            self._plans.current()  # says so where this client was closed meanwhile
            raise
        found = [leg(plan.legs[0]), *(other.result() for other in others)]
        self._traffic.count(hits for lists in found for hits in lists)
        scales = [calibration.apply if (calibration := self._encoder.calibration(each)) else None for each in plan.legs]
        return [merge(lists, scales, limit=limit, offset=offset) for lists in zip(*found, strict=True)]

    def _params(self, collection: str) -> Mapping[str, object]:
        if collection not in self._search_params:
            self._search_params[collection] = self._registry.collection(collection).search
        return self._search_params[collection]

    # --- read ---------------------------------------------------------------------------------------------------------

    def get(self, ids: Id | Iterable[Id], *, output_fields: Sequence[str] = ("*",)) -> list[Record]:
        """The records of these ids that exist, each once, in the order asked, as every write before left them."""
        asked = _several(ids)
        fields = None if "*" in output_fields else tuple(output_fields)

        def ask(plan: ServingPlan) -> dict[Id, Record]:
            # Oldest first, one after the other: a record that moves meanwhile is in the next one before it leaves this one.
            legs = [self._store.get(leg.collection, asked, fields=fields) for leg in reversed(plan.legs)]
            return {record.id: record for some in legs for record in some}

        found = self._timely(ask)
        return [found[id] for id in dict.fromkeys(asked) if id in found]

    def query(
        self, filter: str = "", *, limit: int = 100, offset: int = 0, output_fields: Sequence[str] = ("*",)
    ) -> list[Record]:
        """Records that match a filter, in ascending id order."""
        if limit < 0 or offset < 0:
            raise errors.UsageError(f"limit and offset must be at least 0, not {limit} and {offset}")
        fields = None if "*" in output_fields else tuple(output_fields)
        found: list[Record] = []
        for page in self._pages(filter, fields, page=min(limit + offset, 1000) or 1):
            found += page
            if len(found) >= limit + offset:
                break
        return found[offset : offset + limit]

    def count(self, filter: str = "") -> int:
        """How many records match, each counted once in however many collections it is."""

        def ask(plan: ServingPlan) -> int | None:
            return self._store.count(plan.legs[0].collection, filter=filter) if len(plan.legs) == 1 else None

        alone = self._timely(ask)
        return sum(len(page) for page in self._pages(filter, (), page=5000)) if alone is None else alone

    def _pages(self, filter: str, fields: Sequence[str] | None, *, page: int) -> Iterator[list[Record]]:
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
            after = min(ends) if ends else None
            found = {each.id: each for some in pages for each in some if after is None or each.id <= after}
            yield sorted(found.values(), key=lambda record: record.id)
            if after is None:
                return

    # --- write --------------------------------------------------------------------------------------------------------

    def upsert(self, records: Iterable[Mapping[str, Any]]) -> int:
        """Write records `{"id": …, "item": …, field: value, …}`, replacing those of the same id; how many were written.

        The item is embedded here. After it returned every search of this client shows the records and nothing they replaced.
        """
        records = list(records)
        for record in records:
            if "id" not in record or "item" not in record:
                raise errors.UsageError(
                    f"A record to write needs an id and an item; this one has: {', '.join(map(str, record)) or 'nothing'}"
                )
        distinct = list({record["id"]: record for record in records}.values())
        for start in range(0, len(distinct), WRITE_BATCH):
            self._upsert(distinct[start : start + WRITE_BATCH])
        return len(distinct)

    def _upsert(self, records: Sequence[Mapping[str, Any]]) -> None:
        ids, items = [record["id"] for record in records], [record["item"] for record in records]
        embedded: dict[str, Vectors] = {}
        for leg in self._plans.current().written:  # the slow part, before anybody has to wait for this write
            self._encoder.stored(leg, items, embedded)

        def rows(leg: Leg) -> list[Record]:
            vectors = self._encoder.stored(leg, items, embedded)
            return [
                Record(id=record["id"], vector=vector, fields={k: v for k, v in record.items() if k not in ("id", "item")})
                for record, vector in zip(records, vectors, strict=True)
            ]

        sketches: dict[Id, bytes] = {}
        with self._writing("upsert", ids, sketches=sketches) as (plan, in_time):
            for mirror in plan.mirrors:  # first: what a killed client wrote shows nowhere yet
                self._store.upsert(mirror.collection, rows(mirror), permit=in_time)
            newest, *older = plan.legs
            written = rows(newest)
            self._store.upsert(newest.collection, written, permit=in_time)
            sketches |= {row.id: sketch.of(row.vector) for row in written if row.vector is not None}
            # Where an older collection still has the record it must not show what was replaced. Only workers remove from there.
            for leg in older:
                stale = {record.id for record in self._store.get(leg.collection, ids, fields=())}
                if stale:
                    self._store.upsert(leg.collection, [row for row in rows(leg) if row.id in stale], permit=in_time)

    def delete(self, ids: Id | Iterable[Id] | None = None, *, filter: str = "") -> int:
        """Remove records by id, or all that match a filter; how many ids were asked for or matched."""
        if (ids is None) == (not filter.strip()):
            raise errors.UsageError("delete takes ids, or filter=…; give one of them")
        if ids is not None:
            return len(self._delete(_several(ids)))

        def matching(plan: ServingPlan, some: Sequence[Id]) -> Iterable[Id]:
            found = (self._store.get(leg.collection, some, filter=filter, fields=()) for leg in reversed(plan.legs))
            return {record.id: None for each in found for record in each}

        pages = self._pages(filter, (), page=WRITE_BATCH)
        return sum(len(self._delete([record.id for record in page], matching)) for page in pages)

    def delete_those(self, ids: Sequence[Id], still: Callable[[Sequence[Id]], Iterable[Id]]) -> list[Id]:
        """Remove those of these records that `still` names, asked once nobody else is at them; their ids."""
        return self._delete(ids, lambda _, some: still(some))

    def _delete(self, ids: Sequence[Id], still: Still | None = None) -> list[Id]:
        parts = (ids[start : start + WRITE_BATCH] for start in range(0, len(ids), WRITE_BATCH))
        return [id for part in parts for id in self._delete_part(part, still)]

    def _delete_part(self, ids: Sequence[Id], still: Still | None) -> list[Id]:
        going = list(ids)

        def only(plan: ServingPlan) -> list[Id]:  # others may have written them since they were listed, and are done now
            going[:] = still(plan, ids) if still else ids
            return going

        with self._writing("delete", ids, only=only if still else None) as (plan, in_time):
            for leg in plan.written:
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
        self._plans.current()
        with self._writes.announced(kind, ids, only=only, sketches=sketches) as (plan, in_time):
            if plan.epoch > self._plans.current().epoch:
                self._plans.refresh()  # or this client would search by the plan before, which may not know where this is written
            yield plan, in_time
            self._wrote = uptime()


def _several(ids: Id | Iterable[Id]) -> list[Id]:
    return [ids] if isinstance(ids, int | str | np.integer) else list(ids)
