"""One batch.

A batch moves in the order of `BatchState`. The order of its calls is the safety: at every crash point a record is in both
collections or in one of them, never in none, and running a batch again changes nothing.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from rmvdb import errors
from rmvdb.archive import Archive, ArchiveFile, EmbeddingCache, Reading, item_digest, same_fields
from rmvdb.embedders import SURE, embed_checked
from rmvdb.encoding import Encoder
from rmvdb.plural import counted
from rmvdb.protocols import Permit, Source, VectorStore
from rmvdb.registry import Registry, key, pack_ids, unpack_ids
from rmvdb.tables import BatchRow
from rmvdb.types import BatchState, Id, Record, Vectors

#: Why a record is set aside, by id.
Reasons = dict[Id, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One upgrade, as its batches see it."""

    upgrade: int
    gallery: str
    #: The collections that are emptied, newest first.
    old: tuple[str, ...]
    #: The collection that is filled; for a roll back also those behind it, into which the archive puts records back.
    new: tuple[str, ...]
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
    #: The collection with the vectors by which embeddings were kept while planning, where `old` holds others.
    known_by: str | None = None

    @property
    def in_place(self) -> bool:
        """Whether the records stay in their collection, and only their vectors are replaced."""
        return self.old == self.new


def grace(registry: Registry, task: Task) -> float:
    """Seconds between copied and removed. The plan in force may ask for more than the one that the task was made under."""
    return max(task.grace, registry.plan(task.gallery).grace)


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """What is to be done with the ids of a copied batch; written down before it is done."""

    remove: list[Id]
    gone: list[Id]
    again: list[Id]


class Backfill:
    """The two halves of a batch: `copy` fills the new collection, `retire` empties the old ones after a grace."""

    #: What a batch changes outside this process, in order. Tests kill it before and after each of these calls.
    CALLS = (
        "registry.claim",
        "archive.write",
        "registry.advance writing",
        "store.upsert new",
        "registry.copied",
        "registry.advance removing",
        "store.delete new",
        "store.delete old",
        "registry.retire",
    )

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

    def copy(self, task: Task, batch: BatchRow, in_time: Permit) -> None:
        """Claimed → copied: read, load, embed, archive, then *writing*, look at the intents, upsert into the new collection.

        `in_time` is asked before every attempt of a write and raises LeaseLost where the claim may end before the write does.
        """
        ids = unpack_ids(batch.ids)
        held = self._read(task, ids)
        old = [record for records in held.values() for record in records]
        left = self._left(task, batch, [record.id for record in old])
        made, reasons = self._embed(task, batch, [record for record in old if record.id not in left])
        kept = self._read_earlier(batch, {record.id for record in old})
        for collection, records in held.items():
            kept[collection] = [*records, *kept.get(collection, [])]
        archived = {
            collection: self._keep(task, batch, collection, records, made[task.new[0]]) for collection, records in kept.items()
        }
        self._registry.advance(batch, BatchState.WRITING, archive=archived, left=pack_ids(left))
        # Both sides announce, then look: a client that writes from here on sees *writing* and waits.
        announced = self._registry.intents(task.upgrade, ids)
        for collection, records in made.items():
            self._store.upsert(collection, [each for each in records if key(each.id) not in announced], permit=in_time)
        # What a client was writing was not copied; whatever becomes of that write, the old record must not leave uncopied.
        uncopied = [id for id in ids if key(id) in announced]
        self._registry.copied(batch, again=uncopied, aside={id: why for id, why in reasons.items() if key(id) not in announced})

    def retire(self, task: Task, batch: BatchRow, in_time: Permit) -> None:
        """Copied → retired, one grace later: compare with what was read, write down what leaves, then remove it."""
        if not task.removal_allowed:
            raise errors.NeedsConsent(
                f"Collection {task.old[-1]!r} was not made by rmvdb; to let records leave it, run the upgrade again with "
                "--execute (rmvdb rollback puts them back)"
            )
        if batch.state == BatchState.REMOVING:
            decided = Decision(remove=unpack_ids(batch.remove), gone=unpack_ids(batch.gone), again=unpack_ids(batch.again))
            decision = self._decide_again(task, batch, decided)
        else:
            decided, decision = None, self._decide(task, batch, self._lost(task, batch))
        if decision != decided:
            packed = {name: pack_ids(getattr(decision, name)) for name in Decision.__slots__}
            self._registry.advance(batch, BatchState.REMOVING, left=batch.left, **packed)
        announced = self._registry.intents(task.upgrade, decision.gone) if decision.gone else {}
        self._delete(task.new, [id for id in decision.gone if key(id) not in announced], in_time)
        if not task.in_place:
            self._delete(task.old, decision.remove, in_time)
        # A write that is only announced may never be made, and what was copied would stay.
        again = decision.again + [id for id in decision.gone if key(id) in announced]
        self._registry.retire(batch, moved=len(decision.remove), again=again)

    # --- collections --------------------------------------------------------------------------------------------------

    def _read(self, task: Task, ids: Sequence[Id]) -> dict[str, list[Record]]:
        """The records of these ids by old collection, each from the newest that holds it: what clients are shown."""
        held: dict[str, list[Record]] = {}
        for collection in task.old:
            if found := self._store.get(collection, ids, vector=True):
                held[collection] = found
                there = {record.id for record in found}
                ids = [id for id in ids if id not in there]
        return held

    def _delete(self, collections: Sequence[str], ids: Sequence[Id], in_time: Permit) -> None:
        for collection in collections:
            self._store.delete(collection, ids, permit=in_time)

    def _keep(
        self, task: Task, batch: BatchRow, collection: str, records: Sequence[Record], made: Sequence[Record]
    ) -> dict[str, Any]:
        name = task.gallery, str(task.upgrade), collection, f"{batch.id}-{batch.token}"
        return asdict(self._archive.write(*name, records=records, made=made))

    def _kept(self, files: Mapping[str, Any] | None) -> dict[str, list[Record]]:
        """What the archive has in these files, by the collection that it was read from; nothing of one that is damaged."""
        kept = self._readings(files).items()
        return {collection: [reading.record for reading in readings] for collection, readings in kept}

    def _readings(self, files: Mapping[str, Any] | None) -> dict[str, list[Reading]]:
        return {collection: self._archive.found(ArchiveFile(**file)) for collection, file in (files or {}).items()}

    # --- copy ---------------------------------------------------------------------------------------------------------

    def _left(self, task: Task, batch: BatchRow, ids: Sequence[Id]) -> set[Id]:
        """For a roll back: the records that are left as they are where they go back to, and only leave where they are.

        What never left is there still, unless another program deleted it; what did is there only by another program. Decided
        once: later tries find there what the first one wrote.
        """
        if task.undoes is None:
            return set()
        written = self._written(task, ids)
        unwritten = [id for id in ids if key(id) not in written]
        if batch.archive is not None:
            return set(unpack_ids(batch.left)).intersection(unwritten)
        if batch.origin == {}:
            return set(unwritten)
        return self._in_place(task, batch, unwritten)

    def _in_place(self, task: Task, batch: BatchRow, ids: Sequence[Id]) -> set[Id]:
        """Those of these records that are where a roll back puts them, or in a newer collection: an older copy of a record is not
        what clients were shown.
        """
        places = {name: at for at, name in enumerate(task.new)}
        home = {each.id: places[name] for name, kept in self._kept(batch.origin).items() for each in kept}
        # Of a file that is damaged nobody knows the ids: what is put back needlessly costs an embedding, and nothing is lost.
        unknown = min((places[name] for name in batch.origin or ()), default=len(task.new) - 1)
        found = {name: self._store.get(name, ids, fields=()) for name in places}
        return {each.id for name, records in found.items() for each in records if places[name] <= home.get(each.id, unknown)}

    def _written(self, task: Task, ids: Sequence[Id]) -> set[str]:
        """Keys of the records that were, or may have been, written since the upgrade began that a roll back undoes."""
        upgrades = (task.undoes, task.upgrade) if task.undoes else ()
        return {record for each in upgrades for record in self._registry.announced(each, ids)}

    def _embed(self, task: Task, batch: BatchRow, old: Sequence[Record]) -> tuple[dict[str, list[Record]], Reasons]:
        """The records with their new vectors, by the collection that they go to, and why some have none."""
        vectors = self._from_archive(task, batch, old)
        ready = {id for each in vectors.values() for id in each}
        embedded, reasons = self._from_items(task, [each for each in old if each.id not in ready], batch.origin)
        vectors[task.new[0]] = vectors.get(task.new[0], {}) | embedded
        return {collection: _with_vectors(old, each) for collection, each in vectors.items()}, reasons

    def _from_archive(self, task: Task, batch: BatchRow, old: Sequence[Record]) -> dict[str, dict[Id, Vectors]]:
        """A roll back's vectors: those the records had where they were, but for records that were, or may have been, written
        since."""
        ids = [record.id for record in old]
        written = self._written(task, ids)
        wanted = {id for id in ids if key(id) not in written}
        return {
            collection: {each.id: each.vector for each in kept if each.id in wanted and each.vector is not None}
            for collection, kept in self._kept(batch.origin).items()
        }

    def _from_items(
        self, task: Task, old: Sequence[Record], origin: Mapping[str, Any] | None
    ) -> tuple[dict[Id, Vectors], Reasons]:
        if not old:
            return {}, {}
        chain = self._encoder.chain(task.version)
        try:
            embedder = self._encoder.embedder(chain.embedder)
        except errors.ModelError:
            if not task.stand_in:
                raise
            self._expect_whole(origin)
            vectors = np.stack([record.vector for record in old if record.vector is not None])
            return dict(zip([record.id for record in old], self._encoder.apply(task.stand_in, vectors), strict=True)), {}
        items, reasons = self._items(old, functools.partial(self._sure, task, ()))
        raw = self._cached(task, [record for record in old if record.id in items], items)
        sure = functools.cache(functools.partial(self._sure, task, tuple(record for record in old if record.id in raw)))
        items = {id: item for id, item in items.items() if id not in raw}
        if items:
            with self._one_at_a_time:  # the embedder is the bottleneck; it is given whole batches, one after the other
                vectors, bad = embed_checked(embedder, list(items.values()), chain.dim, sure=sure)
            ids = list(items)
            reasons |= {ids[at]: why for at, why in bad.items()}
            raw |= {id: vectors[at] for at, id in enumerate(ids) if at not in bad}
        made = self._encoder.own(task.version, np.stack(list(raw.values()))) if raw else np.empty((0, 0), np.float32)
        return dict(zip(raw, made, strict=True)), reasons

    def _expect_whole(self, files: Mapping[str, Any] | None) -> None:
        """ArtifactError where a file with a roll back's vectors is missing or altered: ψ's may not take their place for good."""
        for file in (files or {}).values():
            self._archive.ids(ArchiveFile(**file))

    def _cached(self, task: Task, old: Sequence[Record], items: Mapping[Id, Any]) -> dict[Id, Vectors]:
        if self._cache is None or not (known := self._cache.knows(record.id for record in old)):
            return {}
        if task.known_by:
            old = self._store.get(task.known_by, list(known), fields=(), vector=True)
        old = [record for record in old if record.id in known]
        ids = [record.id for record in old]
        return self._cache.get(ids, [_vector(record) for record in old], [item_digest(items[id]) for id in ids])

    def _sure(self, task: Task, known: Sequence[Record]) -> list[Any]:
        """Items of records that could be embedded before, or none: they tell bad records from a broken source or model."""
        records = known[:SURE] or [*next(self._store.scan(task.new[0], fields=None, page=SURE), []), *self._sampled(task)]
        return list(self._source.load(records).values()) if self._source and records else []

    def _sampled(self, task: Task) -> list[Record]:
        """Some records that were embedded for the plan: nothing need be in the new collection yet."""
        ids = self._cache.some(SURE) if self._cache else []
        return [record for records in self._read(task, ids).values() for record in records]

    def _items(self, records: Sequence[Record], sure: Callable[[], Sequence[Any]]) -> tuple[dict[Id, Any], Reasons]:
        if not records:
            return {}, {}
        if self._source is None:
            raise errors.SourceError(
                "The gallery has no source of items to re-embed; give it one: rmvdb gallery source NAME SPEC"
            )
        items: Mapping[Id, Any] = self._source.load(records)
        missing = [record.id for record in records if record.id not in items]
        if len(missing) == len(records) > 1 and not sure():
            raise errors.SourceError(
                f"The source has an item of none of {counted(len(records), 'record')}, such as {missing[0]!r}; "
                "mend the source (rmvdb gallery show says which), then run the same command again"
            )
        # In the order of the records, so that a batch embeds the same way each time.
        found = {record.id: items[record.id] for record in records if record.id in items}
        return found, dict.fromkeys(missing, "the source has no item of this id")

    def _read_earlier(self, batch: BatchRow, present: set[Id]) -> dict[str, list[Record]]:
        """What an earlier try read and perhaps copied, and what has left the old collections since: `retire` finds it gone."""
        missing = set(unpack_ids(batch.ids)) - present
        earlier = self._kept(batch.archive if missing else None)
        return {collection: [record for record in records if record.id in missing] for collection, records in earlier.items()}

    # --- retire -------------------------------------------------------------------------------------------------------

    def _lost(self, task: Task, batch: BatchRow) -> set[Id]:
        """What was left where it goes back to, and is there no more: from now on it is put there as everything else."""
        left = unpack_ids(batch.left) if batch.origin != {} else []
        there = self._in_place(task, batch, left) if left else set()
        lost = set(left) - there
        if lost:
            batch.left = pack_ids([id for id in left if id in there])
        return lost

    def _decide(self, task: Task, batch: BatchRow, lost: Collection[Id]) -> Decision:
        ids = unpack_ids(batch.ids)
        was = {each.record.id: each for readings in self._readings(batch.archive).values() for each in readings}
        now = {record.id: record for records in self._read(task, ids).values() for record in records}
        announced = self._registry.intents(task.upgrade, ids)
        settled = self._registry.now() - grace(self._registry, task)
        uncopied = set(unpack_ids(batch.again))
        decision = Decision(remove=[], gone=[], again=[])
        for id in ids:
            intent = announced.get(key(id))
            if intent is not None:
                # An open write may still change it. A done one put the truth into the new collection, but a search that looked
                # there before must still find it in the old one: the grace counts from the write.
                bucket = "remove" if intent.done and (intent.done_at or 0.0) <= settled else "again"
            elif id in uncopied or id in lost:
                bucket = "again"  # the write that it was left to was never made
            else:
                bucket = _fate(was.get(id), now.get(id), in_place=task.in_place)
            if bucket:
                getattr(decision, bucket).append(id)
        return decision

    def _decide_again(self, task: Task, batch: BatchRow, decided: Decision) -> Decision:
        """Whoever had decided died, perhaps long ago: what is still there, and is not what was read, is moved again."""
        if task.in_place:
            return decided  # nothing leaves
        held = self._read(task, decided.remove)
        announced = self._registry.intents(task.upgrade, [record.id for records in held.values() for record in records])
        was = {
            each.record.id: (collection, each.record)
            for collection, readings in self._readings(batch.archive).items()
            for each in readings
        }

        def is_other(collection: str, record: Record) -> bool:
            if key(record.id) in announced:
                return False
            place, reading = was.get(record.id, (task.old[-1], None))
            # An older copy than was read leaves as was decided; a newer one is what clients are shown now.
            newer = task.old.index(collection) < task.old.index(place)
            return newer or reading is None or (collection == place and not same(reading, record))

        changed = {record.id for collection, records in held.items() for record in records if is_other(collection, record)}
        left = [id for id in decided.remove if id not in changed]
        return replace(decided, remove=left, again=[*decided.again, *(id for id in decided.remove if id in changed)])


def _with_vectors(records: Sequence[Record], vectors: Mapping[Id, Vectors]) -> list[Record]:
    return [Record(id=each.id, vector=vectors[each.id], fields=each.fields) for each in records if each.id in vectors]


def _fate(was: Reading | None, now: Record | None, *, in_place: bool) -> str:
    """What becomes of a record that nobody announced a write of: the name of a list in Decision, or nothing."""
    if was is None:
        return "" if now is None else "again"
    if now is None:
        return "gone"
    return "remove" if (was.is_copied_to(now) if in_place else same(was.record, now)) else "again"


def same(one: Record, other: Record) -> bool:
    """Whether two readings of a record agree, bit by bit."""
    return same_fields(one.fields, other.fields) and np.array_equal(_vector(one), _vector(other), equal_nan=True)


def _vector(record: Record) -> Vectors:
    return record.vector if record.vector is not None else np.empty(0, np.float32)
