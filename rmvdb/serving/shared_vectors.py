"""Shares the vectors that searches made: workers find them in the cache, and move their records first."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rmvdb.protocols import VectorStore
from rmvdb.registry.registry import Registry
from rmvdb.registry.waiting import within
from rmvdb.storage.embedding_cache import EmbeddingCache
from rmvdb.types import Id, Vectors

log = logging.getLogger(__name__)

#: Seconds between two times that a client shares its vectors, and the fewest if many records wait. Each time is a dozen
#: statements to the registry.
EVERY, APART = 10.0, 3.0
#: The most records that wait.
WAITING = 5_000
#: Seconds for which the registry may answer, and for which a client that is closed waits.
LONGEST = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Embedded:
    """A record that a search embedded."""

    #: The version whose embedder made the vector, and the old collection that holds the record.
    embedder: str
    collection: str
    #: `item_digest` of its item.
    digest: bytes
    #: The embedder's vector (dim,), before any head.
    raw: Vectors


class SharedVectors:
    """Keeps the vectors that a client's searches made, and writes them to the cache every few seconds. Safe to share between
    threads.

    The vector of a record is kept with the digest of the item that it was made from and with the record's old vector, which is
    read now. If the record was written between the two, no backfill finds it, since the new item has another digest.
    """

    def __init__(
        self, gallery: str, *, registry: Registry, store: VectorStore, cache: Callable[[str], EmbeddingCache], most: int
    ) -> None:
        """`cache` returns the kept embeddings of a version. It takes no more vectors once its files have `most` bytes."""
        self._gallery, self._registry, self._store = gallery, registry, store
        self._cache, self._most = cache, most
        self._waiting: dict[Id, Embedded] = {}
        self._lock, self._one_at_a_time = threading.Lock(), threading.Lock()
        self._last = float("-inf")
        self._warned = False

    def take(self, embedded: Mapping[Id, Embedded]) -> bool:
        """Take the vectors of a search. Return whether it is time to share. If not, they wait for the next search."""
        with self._lock:
            room = WAITING - len(self._waiting)
            self._waiting |= dict(list(embedded.items())[: max(0, room)])
            pause = APART if len(self._waiting) >= WAITING // 2 else EVERY
            if not self._waiting or time.monotonic() < self._last + pause:
                return False
            self._last = time.monotonic()
            return True

    def share(self) -> None:
        """Share the waiting vectors. Searches do not depend on it, so it raises no error."""
        with self._one_at_a_time:
            with self._lock:
                shared, self._waiting = self._waiting, {}
            try:
                with within(LONGEST):
                    self._share(shared)
            except Exception as exc:  # noqa: BLE001 (the client may be closed meanwhile)
                if not self._warned:
                    log.info(
                        "The vectors that searches made could not be kept for the backfill: %s", exc, extra={"action": "share"}
                    )
                self._warned = True

    def close(self) -> None:
        """Share the remaining vectors. Wait LONGEST seconds at most, and keep no process from its end: the engine may be away."""
        last = threading.Thread(target=self.share, name="rmvdb-share-last", daemon=True)
        last.start()
        last.join(LONGEST)

    def _share(self, shared: Mapping[Id, Embedded]) -> None:
        for embedder, collection in {(each.embedder, each.collection) for each in shared.values()}:
            mine = {id: each for id, each in shared.items() if (each.embedder, each.collection) == (embedder, collection)}
            cache = self._cache(embedder)
            if cache.size >= self._most:
                continue
            old = self._store.get(collection, list(mine), fields=(), vector=True)
            there = [(each.id, each.vector, mine[each.id]) for each in old if each.vector is not None]
            if there:
                ids, vectors, made = zip(*there, strict=True)
                cache.put(ids, vectors, [each.digest for each in made], [each.raw for each in made])
        if shared:
            self._registry.ask_for(self._gallery, list(shared))  # after the vectors: a worker may look for them at once
