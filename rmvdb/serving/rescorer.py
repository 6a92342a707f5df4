"""Rescoring: the best records that are not re-embedded yet get their true distance in the new space during the search."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import TypeVar

from rmvdb.items.digest import item_digest
from rmvdb.items.field import FieldSource
from rmvdb.items.sources import fields_read, given
from rmvdb.protocols import Source
from rmvdb.serving.loaded_models import LoadedModels
from rmvdb.serving.merge import reranked
from rmvdb.serving.rescore import candidates, true_distances
from rmvdb.serving.rescore_figures import RescoreFigures
from rmvdb.serving.shared_vectors import Embedded, SharedVectors
from rmvdb.serving.vector_cache import Key, VectorCache
from rmvdb.types import Hit, Id, Item, Leg, Record, Schema, ServingPlan, Vectors

log = logging.getLogger(__name__)
T = TypeVar("T")

#: Seconds of one search for rescoring, and the bytes of the vectors that a client keeps.
BUDGET, CACHE = 0.1, 64_000_000
#: Threads that load items, and threads that embed. As many calls again may wait. A search that finds no place is not rescored.
WIDTH = 4
#: Seconds without rescoring after the source or the model failed as a whole: most searches would only repeat that.
PAUSE = 5.0
#: Seconds until a record that could not be embedded is tried again: its embedder may have been away.
AGAIN = 60.0
#: The log's phrase for these records.
ALL, SOME = "All records that are not re-embedded yet", "Some records that are not re-embedded yet"


@dataclass(frozen=True, kw_only=True, slots=True)
class Begun:
    """One search that is going to be rescored."""

    source: Source
    #: How many candidates each query has.
    most: int
    #: The fields of a hit that the source reads; None for all.
    reads: tuple[str, ...] | None

    def fields(self, asked: Sequence[str] | None) -> Sequence[str] | None:
        """Return the fields to ask the legs for, so that the items come with the hits."""
        return None if asked is None or self.reads is None else (*asked, *(each for each in self.reads if each not in asked))

    def adds(self, asked: Sequence[str] | None) -> bool:
        """Return whether the legs are asked for more fields than the caller asked for."""
        return self.fields(asked) != asked

    def shown(self, hit: Hit, asked: Sequence[str] | None) -> Hit:
        """Return the hit with the fields that its caller asked for, and no more."""
        if asked is None:
            return hit
        extra = hit.fields.keys() - set(asked) if self.reads is None else set(self.reads) - set(asked)
        return replace(hit, fields={name: each for name, each in hit.fields.items() if name not in extra})


@dataclass(frozen=True, kw_only=True, slots=True)
class _Candidate:
    item: Item
    key: Key
    #: The old collection that gave it.
    held_by: str


class Rescorer:
    """Ranks the best candidates of a search's older legs by their true distance. Safe to share between threads.

    A search embeds its queries first, because the legs are searched with their vectors. All candidates of all its queries then go
    through one further call of the embedder, each record once. Loading and embedding run in threads of their own: a search waits
    `budget` seconds for them, and takes what is ready. A late vector is kept for the next search.

    Rescoring changes ranks, never which records are found. Without item, model or time a hit keeps its calibrated distance. A
    record may move meanwhile: it has been found, and its true distance is the same in either collection.

    Each search loads the items itself, from the field of the hit itself or from the source, and looks for kept vectors by the
    digest of these items. So a kept vector is never used for a record that was written since; see `VectorCache`. The source must
    give the items that the records hold, as it must for the backfill.
    """

    def __init__(
        self,
        *,
        loaded_models: LoadedModels,
        source: Callable[[], Source | None],
        schema: Schema,
        budget: float = BUDGET,
        cache: int = CACHE,
        shared: SharedVectors | None = None,
    ) -> None:
        """`source` returns the gallery's source, None if it has none. `schema`: that of its collections. `cache`: bytes.
        `shared` takes the new vectors, for the backfill."""
        self._loaded_models, self._load_source, self._schema = loaded_models, source, schema
        self._budget, self._shared = budget, shared
        self._cache = VectorCache(cache)
        self._loaders, self._embedders = _Lane("rmvdb-items", WIDTH), _Lane("rmvdb-rescore", WIDTH)
        self._sharing = _Lane("rmvdb-share", 1)
        self._lock = threading.Lock()
        #: The epoch for which the source was loaded last, when, and the source.
        self._loaded: tuple[int, float, Future[Source | None]] | None = None
        #: The candidates that could not be embedded, and until when they are not tried again.
        self._failed: dict[Key, float] = {}
        self._said: set[tuple[int, str]] = set()
        self._rests_until = 0.0
        #: The figures that `rmvdb status` shows of this client.
        self.figures = RescoreFigures()

    def close(self) -> None:
        """Begin nothing more, and share the remaining vectors. Running calls continue."""
        self._loaders.close()
        self._embedders.close()
        self._sharing.close()
        if self._shared is not None:
            self._shared.close()

    def prepare(self, plan: ServingPlan, most: int | None) -> float:
        """Wait until the source is loaded, for `budget` seconds at most. Return how many of them are left for this search.

        This comes before the legs are searched: the wait must not make their answers late.
        """
        since = time.monotonic()
        if self._candidates(plan, most) and (loading := self._loading(plan.epoch)) is not None:
            wait([loading], timeout=self._budget)
        return self._budget - (time.monotonic() - since)

    def begin(self, plan: ServingPlan, most: int | None) -> Begun | None:
        """Return the rescoring of a search, None if there is none. `most` takes the place of the plan's number of candidates."""
        wanted = self._candidates(plan, most)
        if not wanted or (source := self._source(plan.epoch)) is None:
            return None
        reads = fields_read(source)
        if reads is not None and not self._schema.dynamic and set(reads) - {each.name for each in self._schema.fields}:
            return None  # the engine would refuse to return that field
        return Begun(source=source, most=wanted, reads=reads)

    def _candidates(self, plan: ServingPlan, most: int | None) -> int:
        """Return how many candidates a query has, 0 if searches are not rescored now."""
        resting = time.monotonic() < self._rests_until
        return 0 if resting or not self._budget or len(plan.legs) < 2 else plan.rescore if most is None else most

    def ranked(
        self,
        begun: Begun,
        plan: ServingPlan,
        queries: Mapping[str, Vectors],
        newest: Sequence[Sequence[Hit]],
        merged: Sequence[list[Hit]],
        *,
        left: float,
    ) -> list[list[Hit]]:
        """Return the merged hits of each query in their new order.

        `queries`: the query vectors of each leg, (n, dim of the leg), by collection. `newest`: the newest leg's own hits.
        `left`: the seconds that `prepare` left.
        """
        since = time.monotonic()
        wanted = [candidates(hits, {hit.id for hit in own}, most=begun.most) for hits, own in zip(merged, newest, strict=True)]
        try:
            ranked = self._by_true_distance(begun, plan, queries, wanted, newest, merged, since + left)
        except Exception as exc:  # noqa: BLE001 (no search fails because of its rescoring)
            self._say(plan.epoch, ALL, _reason(exc))
            ranked = list(merged)
        self.figures.searched(queries=len(merged), seconds=time.monotonic() - since)
        return ranked

    def _by_true_distance(
        self,
        begun: Begun,
        plan: ServingPlan,
        queries: Mapping[str, Vectors],
        wanted: Sequence[Sequence[Hit]],
        newest: Sequence[Sequence[Hit]],
        merged: Sequence[list[Hit]],
        deadline: float,
    ) -> list[list[Hit]]:
        leg, collections = plan.legs[0], [each.collection for each in plan.legs]
        found = {hit.id: hit for hits in reversed(wanted) for hit in hits}
        vectors = self._vectors(begun.source, plan, list(found.values()), deadline) if found else {}
        scale = self._loaded_models.scales(plan.legs, queries)[0] if leg.calibration else None
        ranked = []
        each_query = zip(queries[leg.collection], merged, wanted, newest, strict=True)
        for at, (query, hits, some, own) in enumerate(each_query):
            known = {hit.id: vectors[hit.id] for hit in some if hit.id in vectors}
            true = true_distances(query, known, leg.metric) | _known_truly(hits, own, leg.collection)
            counts = [len(true) if number == at else 0 for number in range(len(merged))]
            calibrate = None if scale is None else functools.partial(scale, counts=counts)
            ranked.append(reranked(hits, true, calibrate, collections=collections))
        return ranked

    def _vectors(self, source: Source, plan: ServingPlan, hits: Sequence[Hit], deadline: float) -> dict[Id, Vectors]:
        """Return the vectors of these records in the newest leg's space, as far as they are ready in time."""
        leg = plan.legs[0]
        load = self._guarded(plan.epoch, lambda: _loaded_items(source, leg, hits))
        # The field of a hit is there already. Everything else may take a while.
        loaded = load() if isinstance(source, FieldSource) else self._loaders.run(load, deadline)
        some = {each.key: each for each in loaded or ()}
        known = self._cache.get(some)
        self.figures.cached(len(known))
        now = time.monotonic()
        if missing := [each for key, each in some.items() if key not in known and self._failed.get(key, now) <= now]:
            embed = self._guarded(plan.epoch, lambda: self._embed(plan, missing))
            made = self._embedders.run(embed, deadline)
            known |= made or {}
        return {key[1]: vector for key, vector in known.items()}

    def _embed(self, plan: ServingPlan, missing: Sequence[_Candidate]) -> dict[Key, Vectors]:
        """Embed candidates for the newest leg and keep their vectors."""
        leg = plan.legs[0]
        made = self._loaded_models.made(leg, [each.item for each in missing])
        vectors = {each.key: made.vectors[at] for at, each in enumerate(missing) if at not in made.failed}
        self._cache.put(vectors)
        now = time.monotonic()
        failed = {key: until for key, until in self._failed.items() if until > now}
        self._failed = failed | {missing[at].key: now + AGAIN for at in made.failed}
        for at, reason in made.failed.items():
            self._say(plan.epoch, SOME, f"record {missing[at].key[1]!r} cannot be embedded: {reason}")
        self.figures.embedded(len(missing))
        made_now = {
            each.key[1]: Embedded(embedder=made.embedder, collection=each.held_by, digest=each.key[2], raw=made.raw[at])
            for at, each in enumerate(missing)
            if at not in made.failed
        }
        if self._shared is not None and self._shared.take(made_now):
            self._sharing.begin(self._shared.share)  # in a thread of its own: this search waits for its vectors
        return vectors

    def _loading(self, epoch: int) -> Future[Source | None] | None:
        """Return the loading of the source, begun once in each epoch: another one may be registered before the next upgrade."""
        now = time.monotonic()
        with self._lock:
            if self._loaded is None or self._loaded[0] != epoch or _failed_before(self._loaded[2], self._loaded[1], now - PAUSE):
                future = self._loaders.begin(self._load_source)
                if future is None:
                    return None
                self._loaded = epoch, now, future
            return self._loaded[2]

    def _source(self, epoch: int) -> Source | None:
        """Return the source, None if there is none or it is not loaded yet."""
        loading = self._loading(epoch)
        if loading is None or not loading.done() or loading.cancelled():
            return None
        if (exc := loading.exception()) is not None:
            self._say(epoch, ALL, _reason(exc))
            return None
        return loading.result()

    def _guarded(self, epoch: int, work: Callable[[], T]) -> Callable[[], T | None]:
        """Return the work, which gives None if it fails. Then no search is rescored for a while."""

        def guarded() -> T | None:
            try:
                return work()
            except (Exception, SystemExit) as exc:  # noqa: BLE001 (foreign code may raise anything)
                self._rests_until = time.monotonic() + PAUSE
                self._say(epoch, ALL, _reason(exc))
                return None

        return guarded

    def _say(self, epoch: int, what: str, reason: str) -> None:
        """Warn once in each epoch about each kind of trouble."""
        with self._lock:
            if (epoch, what) in self._said:
                return
            self._said.add((epoch, what))
        log.warning("%s keep their calibrated distance in searches: %s", what, reason, extra={"action": "rescore"})


def _known_truly(merged: Sequence[Hit], newest: Sequence[Hit], collection: str) -> dict[Id, float]:
    """Return the true distances of the records that another leg seemed to have nearer: they are in both collections."""
    own = {hit.id: hit.distance for hit in newest}
    return {hit.id: own[hit.id] for hit in merged if hit.leg != collection and hit.id in own}


def _loaded_items(source: Source, leg: Leg, hits: Sequence[Hit]) -> list[_Candidate]:
    """Load the items of these hits. Leave out a hit without an item, and an item without a digest."""
    items = given(source, [Record(id=hit.id, fields=hit.fields) for hit in hits])[0]
    digests = {id: item_digest(item) for id, item in items.items()}
    return [
        _Candidate(item=items[hit.id], key=(leg.collection, hit.id, digest), held_by=hit.leg)
        for hit in hits
        if (digest := digests.get(hit.id)) is not None
    ]


def _reason(exc: BaseException) -> str:
    return f"{type(exc).__name__}: {exc}"


def _failed_before(loading: Future[Source | None], began: float, before: float) -> bool:
    return began < before and loading.done() and (loading.cancelled() or loading.exception() is not None)


class _Lane:
    """Threads for one kind of call, with room for as many calls that wait."""

    def __init__(self, name: str, width: int) -> None:
        self._pool = ThreadPoolExecutor(max_workers=width, thread_name_prefix=name)
        self._room = threading.BoundedSemaphore(2 * width)

    def run(self, work: Callable[[], T], deadline: float) -> T | None:
        """Return what the work gives, None if there is no room or it is not ready in time. Then it goes on by itself."""
        future = self.begin(work)
        if future is None or not wait([future], timeout=max(0.0, deadline - time.monotonic())).done or future.cancelled():
            return None
        return future.result()

    def begin(self, work: Callable[[], T]) -> Future[T] | None:
        """Begin the work in a thread. Return None if there is no room, or this lane is closed."""
        if not self._room.acquire(blocking=False):
            return None

        def bounded() -> T:
            try:
                return work()
            finally:
                self._room.release()

        try:
            return self._pool.submit(bounded)
        except RuntimeError:  # closed
            self._room.release()
            return None

    def close(self) -> None:
        """Begin nothing more. Threads at work end by themselves."""
        self._pool.shutdown(wait=False, cancel_futures=True)
