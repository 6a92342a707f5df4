"""One batch, and the pipeline over batches.

A batch moves in the order of `BatchState`. The order of its calls is the safety: at every crash point a record is in both
collections or in one of them, never in none, and running a batch again changes nothing.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from rmvdb import errors
from rmvdb.archive import Archive, ArchiveFile, EmbeddingCache
from rmvdb.embedders import embed_checked
from rmvdb.encoding import Encoder
from rmvdb.protocols import Source, VectorStore
from rmvdb.registry import Registry, key, pack_ids, unpack_ids
from rmvdb.tables import BatchRow, UpgradeRow
from rmvdb.types import BatchState, Id, Progress, Record, Vectors

log = logging.getLogger(__name__)

#: Seconds between two looks at the upgrade's row: pause, throttle, progress.
LOOK = 0.5

#: Why a record is set aside, by id.
Reasons = dict[Id, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One upgrade, as its batches see it."""

    upgrade: int
    gallery: str
    #: The collection that is emptied, and the one that is filled.
    old: str
    new: str
    #: The model version whose vectors go into `new`.
    version: str
    #: Seconds between copied and removed.
    grace: float
    #: Records were put into `old` by somebody who did not agree to removals yet.
    removal_allowed: bool = True
    #: For a roll back: the upgrade whose done intents override the archive, and the transforms (new → old) that stand in for
    #: an embedder that is gone.
    undoes: int | None = None
    stand_in: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """What is to be done with the ids of a copied batch; written down before it is done."""

    remove: list[Id]
    gone: list[Id]
    again: list[Id]


class Backfill:
    """The two halves of a batch: `copy` fills the new collection, `retire` empties the old one after a grace."""

    def __init__(
        self,
        *,
        registry: Registry,
        store: VectorStore,
        encoder: Encoder,
        source: Source | None,
        archive: Archive,
        cache: EmbeddingCache | None = None,
    ) -> None:
        self._registry, self._store, self._encoder = registry, store, encoder
        self._source, self._archive, self._cache = source, archive, cache
        self._one_at_a_time = threading.Lock()

    def copy(self, task: Task, batch: BatchRow, in_time: Callable[[], None]) -> None:
        """Claimed → copied: read, load, embed, archive, then *writing*, look at the intents, upsert into the new collection.

        `in_time` is called before every write and raises LeaseLost where the claim may end before the write does.
        """
        ids = unpack_ids(batch.ids)
        old = self._store.get(task.old, ids, vector=True)
        records, reasons = self._embed(task, batch, old)
        archived = self._archive.write(task.gallery, str(task.upgrade), f"{batch.id}-{batch.token}", records=old)
        left_behind = self._left_behind(batch, {record.id for record in old})
        in_time()
        self._registry.advance(batch, BatchState.WRITING, archive=asdict(archived))
        # Both sides announce, then look: a client that writes from here on sees *writing* and waits.
        announced = self._registry.intents(task.upgrade, ids)
        in_time()
        self._store.delete(task.new, [id for id in left_behind if key(id) not in announced])
        self._store.upsert(task.new, [record for record in records if key(record.id) not in announced])
        self._registry.quarantine(task.upgrade, {id: why for id, why in reasons.items() if key(id) not in announced})
        # What a client was writing was not copied; whatever becomes of that write, the old record must not leave uncopied.
        self._registry.advance(batch, BatchState.COPIED, again=pack_ids(id for id in ids if key(id) in announced))

    def retire(self, task: Task, batch: BatchRow, in_time: Callable[[], None]) -> None:
        """Copied → retired, one grace later: compare with what was read, write down what leaves, then remove it."""
        if not task.removal_allowed:
            raise errors.NeedsConsent(
                f"Collection {task.old!r} was not made by rmvdb; to let records leave it, run the upgrade again with --execute "
                "(rmvdb rollback puts them back)"
            )
        if batch.state == BatchState.REMOVING:
            decision = Decision(remove=unpack_ids(batch.remove), gone=unpack_ids(batch.gone), again=unpack_ids(batch.again))
        else:
            decision = self._decide(task, batch)
            packed = {name: pack_ids(getattr(decision, name)) for name in Decision.__slots__}
            self._registry.advance(batch, BatchState.REMOVING, **packed)
        announced = self._registry.intents(task.upgrade, decision.gone) if decision.gone else {}
        in_time()
        self._store.delete(task.new, [id for id in decision.gone if key(id) not in announced])
        self._store.delete(task.old, decision.remove)
        self._registry.retire(batch, moved=len(decision.remove), again=decision.again)

    # --- copy ---------------------------------------------------------------------------------------------------------

    def _embed(self, task: Task, batch: BatchRow, old: Sequence[Record]) -> tuple[list[Record], Reasons]:
        """The records with their new vectors, and why some have none."""
        ready = self._from_archive(task, batch, old) if batch.origin else {}
        rest = [record for record in old if record.id not in ready]
        embedded, reasons = self._from_items(task, rest)
        ready |= embedded
        records = [Record(id=each.id, vector=ready[each.id], fields=each.fields) for each in old if each.id in ready]
        return records, reasons

    def _from_archive(self, task: Task, batch: BatchRow, old: Sequence[Record]) -> dict[Id, Vectors]:
        """A roll back's vectors: those the records had, but for records that were written since."""
        written = self._registry.intents(task.undoes, [record.id for record in old]) if task.undoes else {}
        wanted = {record.id for record in old if key(record.id) not in written}
        kept = self._archive.read(ArchiveFile(**(batch.origin or {})))
        return {record.id: record.vector for record in kept if record.id in wanted and record.vector is not None}

    def _from_items(self, task: Task, old: Sequence[Record]) -> tuple[dict[Id, Vectors], Reasons]:
        if not old:
            return {}, {}
        chain = self._encoder.chain(task.version)
        try:
            embedder = self._encoder.embedder(chain.embedder)
        except errors.ModelError:
            if not task.stand_in:
                raise
            vectors = np.stack([record.vector for record in old if record.vector is not None])
            return dict(zip([record.id for record in old], self._encoder.apply(task.stand_in, vectors), strict=True)), {}
        raw = self._cached(old)
        fresh = [record for record in old if record.id not in raw]
        items, reasons = self._items(fresh)
        if items:
            with self._one_at_a_time:  # the embedder is the bottleneck; it is given whole batches, one after the other
                vectors, bad = embed_checked(embedder, list(items.values()), chain.dim)
            ids = list(items)
            reasons |= {ids[at]: why for at, why in bad.items()}
            raw |= {id: vectors[at] for at, id in enumerate(ids) if at not in bad}
        made = self._encoder.own(task.version, np.stack(list(raw.values()))) if raw else np.empty((0, 0), np.float32)
        return dict(zip(raw, made, strict=True)), reasons

    def _cached(self, old: Sequence[Record]) -> dict[Id, Vectors]:
        if self._cache is None:
            return {}
        vectors = np.stack([record.vector for record in old if record.vector is not None])
        return dict(self._cache.get([record.id for record in old], vectors))

    def _items(self, records: Sequence[Record]) -> tuple[dict[Id, Any], Reasons]:
        if not records:
            return {}, {}
        if self._source is None:
            raise errors.SourceError(
                "The gallery has no source of items to re-embed; give it one: rmvdb gallery source NAME SPEC"
            )
        items: Mapping[Id, Any] = self._source.load(records)
        missing = [record.id for record in records if record.id not in items]
        if len(missing) == len(records) > 1:
            raise errors.SourceError(
                f"The source has an item of none of {len(records)} records, such as {missing[0]!r}; "
                "mend the source (rmvdb gallery show says which), then run the same command again"
            )
        # In the order of the records, so that a batch embeds the same way each time.
        found = {record.id: items[record.id] for record in records if record.id in items}
        return found, dict.fromkeys(missing, "the source has no item of this id")

    def _left_behind(self, batch: BatchRow, present: set[Id]) -> list[Id]:
        """Ids that an earlier try of this batch read and perhaps copied, and that have left the old collection since."""
        if batch.archive is None:
            return []
        return [id for id in self._archive.ids(ArchiveFile(**batch.archive)) if id not in present]

    # --- retire -------------------------------------------------------------------------------------------------------

    def _decide(self, task: Task, batch: BatchRow) -> Decision:
        ids = unpack_ids(batch.ids)
        was = {record.id: record for record in self._archive.read(ArchiveFile(**(batch.archive or {})))}
        now = {record.id: record for record in self._store.get(task.old, ids, vector=True)}
        announced = self._registry.intents(task.upgrade, ids)
        settled = self._registry.now() - task.grace
        uncopied = set(unpack_ids(batch.again))
        aside = {row.record for row in self._registry.quarantined(task.upgrade)}
        decision = Decision(remove=[], gone=[], again=[])
        for id in ids:
            intent = announced.get(key(id))
            if intent is not None:
                # An open write may still change it. A done one put the truth into the new collection, but a search that looked
                # there before must still find it in the old one: the grace counts from the write.
                bucket = "remove" if intent.done and (intent.done_at or 0.0) <= settled else "again"
            elif id in uncopied:
                bucket = "again"  # the write that it was left to was never made
            else:
                bucket = "" if key(id) in aside else _fate(was.get(id), now.get(id))
            if bucket:
                getattr(decision, bucket).append(id)
        return decision


def _fate(was: Record | None, now: Record | None) -> str:
    """What becomes of a record that nobody announced a write of: the name of a list in Decision, or nothing."""
    if was is None:
        return "" if now is None else "again"
    if now is None:
        return "gone"
    return "remove" if same(was, now) else "again"


def same(one: Record, other: Record) -> bool:
    """Whether two readings of a record agree, bit by bit."""
    return dict(one.fields) == dict(other.fields) and np.array_equal(_vector(one), _vector(other), equal_nan=True)


def _vector(record: Record) -> Vectors:
    return record.vector if record.vector is not None else np.empty(0, np.float32)


class Worker:
    """Claims batches of one upgrade after the other and drives them through `Backfill`; any number of them may run anywhere.

    `lease`: seconds that a claim lives without a heartbeat; `longest_call`: seconds that one call may take; `width`: batches in
    hand at once; `rate`: records a second that it stays below.
    """

    def __init__(
        self, *, registry: Registry, lease: float, longest_call: float, width: int, rate: float | None = None, note: str = ""
    ) -> None:
        self.name = f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:6]}"
        self._registry = registry
        self._lease, self._longest_call, self._width, self._rate = lease, longest_call, width, rate
        #: What `status` says of this worker besides that it lives, such as the window it keeps to.
        self.note = note
        self._alive_until = float("-inf")
        #: How often a lease ran out before its heartbeat came.
        self._lapses = 0
        self._next_copy = float("-inf")

    def run(
        self,
        task: Task,
        backfill: Backfill,
        *,
        until: float = 1.0,
        stop: threading.Event | None = None,
        progress: Callable[[Progress], None] = lambda _: None,
    ) -> Progress:
        """Work until every batch is retired, or the share `until` is copied and nothing is in hand, or `stop` is set.

        An error of one batch ends the run after the others in hand have ended; what it had claimed is free again.
        """
        stop = stop or threading.Event()
        ended = threading.Event()
        heart = threading.Thread(target=self._beat, args=(task.upgrade, ended), name="rmvdb-heartbeat", daemon=True)
        self._renew(task.upgrade)
        heart.start()
        try:
            with ThreadPoolExecutor(max_workers=self._width, thread_name_prefix="rmvdb-batch") as pool:
                return self._drive(task, backfill, pool, until=until, stop=stop, progress=progress)
        finally:
            ended.set()
            heart.join()
            self._registry.retire_worker(self.name)

    def _drive(
        self,
        task: Task,
        backfill: Backfill,
        pool: ThreadPoolExecutor,
        *,
        until: float,
        stop: threading.Event,
        progress: Callable[[Progress], None],
    ) -> Progress:
        at_work: dict[Future[None], int] = {}  # and how many records each is copying
        looked = float("-inf")
        while True:
            if time.monotonic() - looked >= LOOK or until < 1.0:
                now, row = self._registry.progress(task.upgrade), self._registry.upgrade(task.upgrade)
                looked = time.monotonic()
                progress(now)
            # To the end means to the end: a batch may come back when all seem copied.
            copy = until >= 1.0 or now.done + sum(at_work.values()) < until * now.total
            claimed = None
            if not stop.is_set() and len(at_work) < self._width:
                claimed = self._claim(task, row, copy=copy)
            if claimed is not None:
                doing = pool.submit(self._work, task, backfill, claimed, self._in_time(self._lapses))
                at_work[doing] = claimed.count if claimed.state == BatchState.CLAIMED else 0
            elif not at_work and (stop.is_set() or not self._unfinished(task, copy=copy)):
                now = self._registry.progress(task.upgrade)
                progress(now)
                return now
            self._reap(at_work, patience=0.0 if claimed is not None else 0.05)
            if claimed is None and not at_work:
                stop.wait(0.05)

    @staticmethod
    def _reap(at_work: dict[Future[None], int], *, patience: float) -> None:
        """Take out what has ended; its error, if it had one, is raised here."""
        done = wait(at_work, timeout=patience, return_when=FIRST_COMPLETED).done if at_work else set()
        for each in done:
            del at_work[each]
            each.result()

    def _work(self, task: Task, backfill: Backfill, batch: BatchRow, in_time: Callable[[], None]) -> None:
        try:
            if batch.state == BatchState.CLAIMED:
                backfill.copy(task, batch, in_time)
            else:
                backfill.retire(task, batch, in_time)
        except errors.LeaseLost as exc:
            log.warning("%s", exc, extra={"action": "lease-lost", "batch": batch.id})
            # Otherwise this worker's own heartbeat would hold for ever what it no longer works on.
            self._registry.hand_back(batch)

    def _unfinished(self, task: Task, *, copy: bool) -> bool:
        """Whether there is, or will be, something for this worker to do; a pause is no end."""
        ended = {BatchState.RETIRED} if copy else {BatchState.RETIRED, BatchState.PENDING}
        return bool(self._registry.counts(task.upgrade).keys() - ended)

    def _claim(self, task: Task, row: UpgradeRow, *, copy: bool) -> BatchRow | None:
        rate = min(filter(None, (row.rate, self._rate)), default=None)
        may_copy = copy and not row.paused and time.monotonic() >= self._next_copy
        claimed = self._registry.claim(
            task.upgrade, self.name, lease=self._lease, longest_call=self._longest_call, grace=task.grace, copy=may_copy
        )
        if claimed is not None and rate and claimed.state == BatchState.CLAIMED:
            self._next_copy = time.monotonic() + claimed.count / rate
        return claimed

    def _in_time(self, lapses: int) -> Callable[[], None]:
        """A check that a claim made now is still this worker's for as long as the longest call."""

        def check() -> None:
            # No call leaves later than its lease allows: whoever takes over waits for the lease and the longest call. A heartbeat
            # that comes too late does not bring a claim back.
            if lapses != self._lapses or time.monotonic() + self._longest_call > self._alive_until:
                raise errors.LeaseLost(
                    "This worker was suspended or cut off for longer than its lease; its batch is left to others"
                )

        return check

    def _renew(self, upgrade: int) -> None:
        asked = time.monotonic()
        if asked > self._alive_until:
            self._lapses += 1
        self._registry.renew(self.name, upgrade, lease=self._lease, note=self.note)
        self._alive_until = asked + self._lease

    def _beat(self, upgrade: int, ended: threading.Event) -> None:
        while not ended.wait(self._lease / 6):
            try:
                self._renew(upgrade)
            except errors.RegistryError as exc:
                log.warning("No heartbeat: %s", exc, extra={"action": "heartbeat"})
