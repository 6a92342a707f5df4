"""Searches and reads of one gallery: each leg of the plan is asked, and the answers become one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from rmvdb import errors
from rmvdb.learning.hyperbolic import as_queries, measured
from rmvdb.protocols import VectorStore
from rmvdb.registry.registry import Registry
from rmvdb.serving.current_plan import CurrentPlan
from rmvdb.serving.loaded_models import LoadedModels
from rmvdb.serving.merge import merge_each
from rmvdb.serving.own_writes import OwnWrites
from rmvdb.serving.rescorer import Begun, Rescorer
from rmvdb.timing import uptime
from rmvdb.types import Hit, Id, Leg, Metric, Moment, Record, ServingPlan, Vectors

R = TypeVar("R")
#: Makes the query vectors of each leg, by collection.
Encode = Callable[[ServingPlan], dict[str, Vectors]]

#: How often rmvdb repeats a search that took longer than allowed before it fails.
ATTEMPTS = 5
#: With more hits than this, an answer without the fields that rescoring reads may come although one with them does not.
MANY_HITS = 500
#: Searches of legs that run at the same time.
LEGS = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class _Found:
    """The answers of a plan's legs to a search."""

    plan: ServingPlan
    #: The query vectors of each leg, by collection.
    queries: Mapping[str, Vectors]
    #: The hits, by leg and query.
    hits: list[list[list[Hit]]]
    #: The rescoring that follows, None if there is none.
    rescoring: Begun | None


class Reader:
    """Searches and reads one gallery by the plan in force. Safe to share between threads.

    An answer that took so long that a record may have moved meanwhile is asked for again.
    """

    def __init__(
        self,
        gallery: str,
        *,
        registry: Registry,
        store: VectorStore,
        loaded_models: LoadedModels,
        current_plan: CurrentPlan,
        engine_timeout: float,
        search_params: dict[str, Mapping[str, object]],
        rescorer: Rescorer | None = None,
    ) -> None:
        """`search_params`: the parameters of a search, by collection. Others are read from the registry. Without `rescorer`, no
        search is rescored."""
        self._gallery, self._registry, self._store = gallery, registry, store
        self._loaded_models, self._current_plan = loaded_models, current_plan
        self._search_params = search_params
        self._rescorer = rescorer
        self.own_writes = OwnWrites(store, engine_timeout=engine_timeout)
        self._pool = ThreadPoolExecutor(max_workers=LEGS, thread_name_prefix="rmvdb-leg")

    def close(self) -> None:
        """End the threads that search."""
        self._pool.shutdown()
        if self._rescorer is not None:
            self._rescorer.close()

    def search(
        self,
        encode: Encode,
        *,
        limit: int,
        offset: int,
        filter: str | None,
        fields: Sequence[str] | None,
        strong: bool,
        rescore: int | None = None,
    ) -> list[list[Hit]]:
        """Return a list of hits for each query, nearest first. `rescore`: the number of candidates, None for that of the plan."""
        encoded: dict[int, dict[str, Vectors]] = {}  # by epoch: a repetition has its queries ready
        begun: Begun | None = None
        asked = 0

        left = self._rescorer.prepare(self._current_plan.current(), rescore) if self._rescorer else 0.0

        def ask(plan: ServingPlan) -> _Found:
            nonlocal begun, asked
            if plan.epoch not in encoded:
                encoded[plan.epoch] = encode(plan)
            begun = self._rescorer.begin(plan, rescore) if self._rescorer else None
            most = max(limit + offset, begun.most if begun else 0)
            asked = most * len(encoded[plan.epoch][plan.legs[0].collection])
            hits = self._asked(
                plan,
                encoded[plan.epoch],
                limit=most,
                filter=filter,
                fields=begun.fields(fields) if begun else fields,
                strong=strong,
            )
            return _Found(plan=plan, queries=encoded[plan.epoch], hits=hits, rescoring=begun)

        # Rescoring need not be timely: every record has been found by then, and a record that moves stays valid.
        try:
            found = self._timely(ask)
        except errors.EngineError:  # the fields that rescoring reads may make the answer too large
            if begun is None or not begun.adds(fields) or asked <= MANY_HITS:
                raise
            rescore = 0
            found = self._timely(ask)
        if found.rescoring is None:
            return self._merged(found, limit=limit, offset=offset)
        ranked = self._rescored(found, found.rescoring, left)
        return [[found.rescoring.shown(hit, fields) for hit in hits[offset : offset + limit]] for hits in ranked]

    def get(self, ids: Sequence[Id], fields: Sequence[str] | None) -> dict[Id, Record]:
        """Return the records of these ids that exist, by id."""

        def ask(plan: ServingPlan) -> dict[Id, Record]:
            # Oldest first, one after the other: a record that moves meanwhile is in the next leg before it leaves this one.
            legs = [self._store.get(leg.collection, ids, fields=fields) for leg in reversed(plan.legs)]
            return {record.id: record for some in legs for record in some}

        return self._timely(ask)

    def held(self, legs: Sequence[Leg], ids: Sequence[Id], *, after: Moment) -> list[set[Id]]:
        """Return, for each leg, the ids that its collection holds, as of that moment or later. All are asked at the same time."""

        def one(leg: Leg) -> set[Id]:
            return {record.id for record in self._store.get(leg.collection, ids, fields=(), strong=False, after=after)}

        if len(legs) < 2:
            return [one(leg) for leg in legs]
        return [each.result() for each in [self._begun(one, leg) for leg in legs]]

    def count(self, filter: str | None) -> int:
        """Return how many records match. A record in several collections counts once."""

        def ask(plan: ServingPlan) -> int | None:
            return self._store.count(plan.legs[0].collection, filter=filter) if len(plan.legs) == 1 else None

        single = self._timely(ask)
        return sum(len(page) for page in self.pages(filter, (), page=5000)) if single is None else single

    def pages(self, filter: str | None, fields: Sequence[str] | None, *, page: int) -> Iterator[list[Record]]:
        """Yield the records that match, each once, in ascending id order, in pages.

        Raises:
            EngineError: the engine gave a page that does not follow the one before.
        """
        after: Id | None = None

        def ask(plan: ServingPlan) -> list[list[Record]]:
            legs = reversed(plan.legs)  # oldest first, as in `get`
            return [
                next(self._store.scan(leg.collection, filter=filter, fields=fields, after=after, page=page), []) for leg in legs
            ]

        while True:
            pages = self._timely(ask)
            # A page ends at the smallest id up to which every collection has answered.
            ends: list[Any] = [each[-1].id for each in pages if len(each) >= page]
            before, after = after, min(ends) if ends else None
            if before is not None and after is not None and not before < after:
                raise errors.EngineError(
                    f"A page after the id {before!r} of {self._gallery!r} ended at {after!r}; look at the engine's log"
                )
            records = {each.id: each for some in pages for each in some if after is None or each.id <= after}
            yield sorted(records.values(), key=lambda record: record.id)
            if after is None:
                return

    def _timely(self, ask: Callable[[ServingPlan], R]) -> R:
        """Return the answer to a question. Ask again if it took so long that it may have missed a record that moved.

        Raises:
            EngineError: every attempt took too long.
        """
        for _ in range(ATTEMPTS):
            started, gaps = uptime(), self._registry.gaps  # before the plan's age is checked
            plan = self._current_plan.current()
            try:
                answer = ask(plan)
            except errors.CollectionMissing:  # a clean-up may have dropped it, if another plan is in force by now
                if self._current_plan.refresh().epoch == plan.epoch:
                    raise
                continue
            timely = uptime() - started <= plan.longest_search and self._registry.gaps == gaps
            if timely or self._single_since(plan):
                return answer
        raise errors.EngineError(
            f"{ATTEMPTS} tries of a search of {self._gallery!r} each took longer than {plan.longest_search:g} s; look at the "
            "engine's load, or raise search.longest_search and then run rmvdb upgrade again, or restart its worker"
        )

    def _single_since(self, plan: ServingPlan) -> bool:
        """Return whether that plan has one collection and may still be used, so that no record left it meanwhile."""
        return len(plan.legs) == 1 and self._current_plan.current().epoch == plan.epoch

    def _asked(
        self,
        plan: ServingPlan,
        queries: Mapping[str, Vectors],
        *,
        limit: int,
        filter: str | None,
        fields: Sequence[str] | None,
        strong: bool,
    ) -> list[list[list[Hit]]]:
        """Search every leg at the same time. Return the hits, by leg and query."""
        after = None if strong else self.own_writes.moment(plan.staleness)

        def leg(each: Leg) -> list[list[Hit]]:
            vectors, hyperbolic = queries[each.collection], each.metric is Metric.LORENTZ
            answers = self._store.search(
                each.collection,
                as_queries(vectors) if hyperbolic else vectors,
                limit=limit,
                filter=filter,
                fields=fields,
                search=self._params(each.collection),
                strong=strong,
                after=after,
            )
            return measured(answers, vectors) if hyperbolic else answers

        older = [self._begun(leg, each) for each in plan.legs[1:]]
        return [leg(plan.legs[0]), *(each.result() for each in older)]

    def _begun(self, ask: Callable[[Leg], R], leg: Leg) -> Future[R]:
        """Ask a leg in a thread. Raises UsageError if this client was closed meanwhile."""
        try:
            return self._pool.submit(ask, leg)
        except RuntimeError:
            self._current_plan.current()
            raise

    def _merged(self, found: _Found, *, limit: int, offset: int = 0) -> list[list[Hit]]:
        scales = self._loaded_models.scales(found.plan.legs, found.queries)
        calibrations = [
            None if scale is None else functools.partial(scale, counts=list(map(len, lists)))
            for scale, lists in zip(scales, found.hits, strict=True)
        ]
        return merge_each(found.hits, calibrations, limit=limit, offset=offset)

    def _rescored(self, found: _Found, begun: Begun, left: float) -> list[list[Hit]]:
        assert self._rescorer is not None  # noqa: S101 (it began this)
        everything = max((len(hits) for leg in found.hits for hits in leg), default=0) * len(found.hits)
        merged = self._merged(found, limit=everything)
        return self._rescorer.ranked(begun, found.plan, found.queries, found.hits[0], merged, left=left)

    def _params(self, collection: str) -> Mapping[str, object]:
        if collection not in self._search_params:
            self._search_params[collection] = self._registry.collection(collection).search
        return self._search_params[collection]
