"""One batch.

A batch moves in the order of `BatchState`. The order of its calls is the safety: at every crash point a record is in both
collections or in one of them, never in none, and running a batch again changes nothing.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from rmvdb import errors
from rmvdb.backfill.fate import Decision, Evidence, Fate, record_fate, too_many
from rmvdb.canonical import unrankable
from rmvdb.engines.finding import TOGETHER, not_found
from rmvdb.items.check import KNOWN_GOOD, embed_checked
from rmvdb.items.digest import item_digest
from rmvdb.items.sources import given
from rmvdb.protocols import Permit, Source, VectorStore
from rmvdb.registry.codec import key, pack_ids, schema_from_json, unpack_ids
from rmvdb.registry.mark import Owner
from rmvdb.registry.registry import Registry
from rmvdb.registry.tables import BatchRow, IntentRow
from rmvdb.serving.loaded_models import LoadedModels
from rmvdb.storage.archive import Archive, ArchiveFile, Reading, same_fields
from rmvdb.storage.embedding_cache import EmbeddingCache
from rmvdb.text import counted
from rmvdb.types import BatchState, Id, Metric, Record, Vectors

#: Seconds after which searches that miss a record are tried again, each time.
_PATIENCE = (0.2, 2.0, 10.0)
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
    fallback_transforms: tuple[str, ...] = ()
    #: The collection with the vectors by which embeddings were kept while planning, where `old` holds others.
    cache_vectors_from: str | None = None
    #: The share of a batch, and of the work list, that may be gone from `old` without a reason; 1 where all of it was agreed to.
    missing: float = 0.01

    @property
    def in_place(self) -> bool:
        """Whether the records stay in their collection, and only their vectors are replaced."""
        return self.old == self.new


@dataclass(frozen=True, kw_only=True, slots=True)
class _Seen:
    """What a look at a copied batch's records has shown: the ids that the batch read, those that its last copy made a vector of,
    those that are in an old collection now, and those that are there as they were read."""

    read: set[Id]
    made: set[Id]
    in_old: set[Id]
    same: set[Id]


def grace(registry: Registry, task: Task) -> float:
    """Seconds between copied and removed. The plan in force may ask for more than the one that the task was made under."""
    return max(task.grace, registry.plan(task.gallery).grace)


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
        "store.upsert mark",
        "archive.leave",
        "store.delete new",
        "store.delete old",
        "registry.retire",
    )

    def __init__(
        self,
        *,
        registry: Registry,
        store: VectorStore,
        loaded_models: LoadedModels,
        source: Source | None,
        archive: Archive,
        cache: EmbeddingCache | None = None,
    ) -> None:
        self._registry, self._store, self._loaded_models = registry, store, loaded_models
        self._source, self._archive, self._cache = source, archive, cache
        self._owner = Owner(registry, store)
        self._one_at_a_time = threading.Lock()

    def copy(self, task: Task, batch: BatchRow, in_time: Permit) -> None:
        """Claimed → copied: read, load, embed, archive, then *writing*, look at the intents, upsert into the new collection.

        `in_time` is asked before every attempt of a write and raises LeaseLost where the claim may end before the write does.
        """
        self._owner.settle_now_and_then(task.gallery)
        ids = unpack_ids(batch.ids)
        held = self._read(task, ids)
        old = [record for records in held.values() for record in records]
        present = {record.id for record in old}
        if batch.restore:
            old += self._lost_since(task, batch, present)
        left = self._left(task, batch, [record.id for record in old])
        made, reasons = self._embed(task, batch, [record for record in old if record.id not in left])
        kept = self._read_earlier(task, batch, present)
        for collection, records in held.items():
            kept[collection] = [*records, *kept.get(collection, [])]
        archived = {
            collection: self._keep(task, batch, collection, records, made[task.new[0]]) for collection, records in kept.items()
        }
        self._registry.advance(batch, BatchState.WRITING, archive=archived, left=pack_ids(left))
        # Both sides announce, then look: a client that writes from here on sees *writing* and waits.
        announced = self._registry.intents(task.upgrade, ids)
        for collection, records in made.items():
            unannounced = [each for each in records if key(each.id) not in announced]
            try:
                self._store.upsert(collection, unannounced, as_read=True, permit=in_time)
            except errors.EngineKilled as exc:
                if not exc.ids:
                    raise
                reasons |= dict.fromkeys(exc.ids, str(exc))
        # What a client was writing was not copied; whatever becomes of that write, the old record must not leave uncopied.
        uncopied = [id for id in ids if key(id) in announced]
        self._registry.copied(batch, requeue=uncopied, aside={id: why for id, why in reasons.items() if key(id) not in announced})

    @property
    def settles_at_once(self) -> bool:
        """Whether searches find what was copied without `settle`."""
        return self._store.settles_at_once

    def settle(self, task: Task, report: Callable[[str, int, int], None] = lambda *_: None, *, missed: bool = False) -> float:
        """Let searches find all that is copied; the registry's time before which that was. `report` hears of which collection
        how many rows are indexed, and of how many; `missed`: a search has missed some."""
        began, now = self._registry.now(), self._registry.progress(task.upgrade)
        for collection in task.new:
            heard = functools.partial(report, collection)
            self._store.settle(collection, coming=now.total - now.done, missed=missed, report=heard)
        return began

    def retire(self, task: Task, batch: BatchRow, in_time: Permit) -> None:
        """Copied → retired, one grace later: compare with what was read, write down what leaves, then remove it."""
        if not task.removal_allowed:
            raise errors.NeedsConsent(
                f"Collection {task.old[-1]!r} was not made by rmvdb; to let records leave it, run the upgrade again with "
                "--execute (rmvdb rollback puts them back)"
            )
        self._owner.settle_now_and_then(task.gallery)
        self._expect_found(task, batch)
        if batch.state == BatchState.REMOVING:
            decided = Decision(
                remove=unpack_ids(batch.remove), remove_from_new=unpack_ids(batch.gone), requeue=unpack_ids(batch.again)
            )
            decision = self._decide_again(task, batch, decided)
        else:
            decision = self._decide(task, batch, self._lost(task, batch))
        packed = {
            "remove": pack_ids(decision.remove),
            "gone": pack_ids(decision.remove_from_new),
            "again": pack_ids(decision.requeue),
        }
        # Each try gets a number of its own; before anything is removed the mark tells of a registry that has gone back.
        self._owner.note(task.gallery, self._registry.advance(batch, BatchState.REMOVING, left=batch.left, **packed))
        if not task.in_place:
            # A registry that goes back to before this line must not take what leaves now for another program's deletions.
            self._archive.leave(*self._place(task), str(_root(batch)), f"{batch.id}-{batch.token}", ids=decision.remove)
        announced = self._registry.intents(task.upgrade, decision.remove_from_new) if decision.remove_from_new else {}
        self._delete(task.new, [id for id in decision.remove_from_new if key(id) not in announced], in_time)
        if not task.in_place:
            self._delete(task.old, decision.remove, in_time)
        # A write that is only announced may never be made, and what was copied would stay.
        requeue = decision.requeue + [id for id in decision.remove_from_new if key(id) in announced]
        self._registry.retire(batch, moved=len(decision.remove), requeue=requeue)

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

    def _lost_since(self, task: Task, batch: BatchRow, present: set[Id]) -> list[Record]:
        """The records of a batch that were moved once and are nowhere any more, as the archive has them."""
        kept = self._read_earlier(task, batch, present)
        there = self._in_new(task, [record.id for records in kept.values() for record in records])
        return [record for records in kept.values() for record in records if record.id not in there]

    def _keep(
        self, task: Task, batch: BatchRow, collection: str, records: Sequence[Record], made: Sequence[Record]
    ) -> dict[str, Any]:
        name = *self._place(task), collection, f"{batch.id}-{batch.token}"
        return asdict(self._archive.write(*name, records=records, made=made))

    @staticmethod
    def _place(task: Task) -> tuple[str, str]:
        """The folders of this upgrade in the archive."""
        return task.gallery, str(task.upgrade)

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
        made = self._from_archive(task, batch, old)
        ready = {record.id for records in made.values() for record in records}
        rest = [record for record in old if record.id not in ready]
        embedded, reasons = self._from_items(task, rest, batch.origin)
        made[task.new[0]] = made.get(task.new[0], []) + _with_vectors(rest, embedded)
        return made, reasons

    def _from_archive(self, task: Task, batch: BatchRow, old: Sequence[Record]) -> dict[str, list[Record]]:
        """For a roll back: the records as they were where they were, but for those that were, or may have been, written since."""
        written = self._written(task, [record.id for record in old])
        wanted = {record.id: record for record in old if key(record.id) not in written}
        return {
            collection: [each.put_back_for(wanted[each.record.id]) for each in readings if each.record.id in wanted]
            for collection, readings in self._readings(batch.origin).items()
        }

    def _from_items(
        self, task: Task, old: Sequence[Record], origin: Mapping[str, Any] | None
    ) -> tuple[dict[Id, Vectors], Reasons]:
        if not old:
            return {}, {}
        chain = self._loaded_models.chain(task.version)
        try:
            embedder = self._loaded_models.embedder(chain.embedder)
        except errors.ModelError:
            if not task.fallback_transforms:
                raise
            self._expect_whole(origin)
            vectors = np.stack([record.vector for record in old if record.vector is not None])
            return dict(
                zip([record.id for record in old], self._loaded_models.apply(task.fallback_transforms, vectors), strict=True)
            ), {}
        metric = Metric(self._registry.version(task.version).metric)
        items, reasons = self._items(task, old)
        raw = self._cached(task, [record for record in old if record.id in items], items)
        known_good = functools.cache(
            functools.partial(self._known_good, task, tuple(record for record in old if record.id in raw))
        )
        items = {id: item for id, item in items.items() if id not in raw}
        if items:
            with self._one_at_a_time:  # the embedder is the bottleneck; it is given whole batches, one after the other
                vectors, bad = embed_checked(
                    embedder, list(items.values()), chain.dim, metric=metric, known_good=known_good, confirm=True
                )
            ids = list(items)
            reasons |= {ids[at]: why for at, why in bad.items()}
            raw |= {id: vectors[at] for at, id in enumerate(ids) if at not in bad}
        made = self._loaded_models.apply_head(task.version, np.stack(list(raw.values()))) if raw else np.empty((0, 0), np.float32)
        odd = unrankable(made, metric)
        of = dict(zip(raw, made, strict=True))
        reasons |= {id: f"its vector {odd[at]}" for at, id in enumerate(of) if at in odd}
        return {id: vector for id, vector in of.items() if id not in reasons}, reasons

    def _expect_whole(self, files: Mapping[str, Any] | None) -> None:
        """ArtifactError where a file with a roll back's vectors is missing or altered: ψ's may not take their place for good."""
        for file in (files or {}).values():
            self._archive.ids(ArchiveFile(**file))

    def _cached(self, task: Task, old: Sequence[Record], items: Mapping[Id, Any]) -> dict[Id, Vectors]:
        if self._cache is None or not (known := self._cache.knows(record.id for record in old)):
            return {}
        if task.cache_vectors_from:
            old = self._store.get(task.cache_vectors_from, list(known), fields=(), vector=True)
        old = [record for record in old if record.id in known]
        ids = [record.id for record in old]
        return self._cache.get(ids, [_vector(record) for record in old], [item_digest(items[id]) for id in ids])

    def _known_good(self, task: Task, known: Sequence[Record]) -> list[Any]:
        """Items of records that could be embedded before, or none: they tell bad records from a broken model."""
        records = known[:KNOWN_GOOD] or self._embedded_before(task)
        return list(given(self._source, records)[0].values()) if self._source and records else []

    def _embedded_before(self, task: Task) -> list[Record]:
        """Records that could be embedded before, or none: they tell bad records from a broken source."""
        return [*next(self._store.scan(task.new[0], fields=None, page=KNOWN_GOOD), []), *self._sampled(task)]

    def _sampled(self, task: Task) -> list[Record]:
        """Some records that were embedded for the plan: nothing need be in the new collection yet."""
        ids = self._cache.some(KNOWN_GOOD) if self._cache else []
        return [record for records in self._read(task, ids).values() for record in records]

    def _items(self, task: Task, records: Sequence[Record]) -> tuple[dict[Id, Any], Reasons]:
        if not records:
            return {}, {}
        if self._source is None:
            raise errors.SourceError(
                "The gallery has no source of items to re-embed; give it one: rmvdb gallery source NAME SPEC"
            )
        items, failed = given(self._source, records, known_good=functools.partial(self._embedded_before, task))
        missing = [record.id for record in records if record.id not in items and record.id not in failed]
        if len(missing) == len(records) > 1 and not self._known_good(task, ()):
            raise errors.SourceError(
                f"The source has an item of none of {counted(len(records), 'record')}, such as {missing[0]!r}; "
                "mend the source (rmvdb gallery show says which), then run the same command again"
            )
        return items, failed | dict.fromkeys(missing, "the source has no item of this id")

    def _read_earlier(self, task: Task, batch: BatchRow, present: set[Id]) -> dict[str, list[Record]]:
        """What an earlier try read and perhaps copied, and what has left the old collections since: `retire` finds it gone.

        The registry may have forgotten that try: then its file is in the archive all the same.
        """
        missing = set(unpack_ids(batch.ids)) - present
        earlier: dict[str, list[Record]] = {}
        if not missing:
            return earlier
        for collection, records in self._kept(batch.archive).items():
            earlier[collection] = [record for record in records if record.id in missing]
            missing -= {record.id for record in earlier[collection]}
        for collection in task.old if missing and not task.in_place else ():
            for file in self._archive.files(*self._place(task), collection, begins=f"{batch.id}-"):
                found = [each.record for each in self._archive.found(file) if each.record.id in missing]
                missing -= {record.id for record in found}
                earlier[collection] = earlier.get(collection, []) + found
        return earlier

    # --- retire: what new is asked first ---------------------------------------------------------------------------------

    def _expect_found(self, task: Task, batch: BatchRow) -> None:
        """EngineError unless searches with a filter find all that new holds of the batch, and others a sample: else it stays in
        old."""
        ids = unpack_ids(batch.ids)
        for patience in (*_PATIENCE, None):
            for collection in task.new:
                missed = self._missed(collection, ids)
                if missed and patience is None:
                    id, how = next(iter(missed.items()))
                    raise errors.EngineError(
                        f"Collection {collection!r} holds record {id!r}, and {how}; the batch stays in "
                        f"{' and '.join(task.old)} until that is mended: look at the index of {collection!r}, then run the same "
                        "command again"
                    )
                if missed and patience is not None:
                    time.sleep(patience)
                    self.settle(task, missed=patience == _PATIENCE[-1])
                    break
            else:
                return

    def _missed(self, collection: str, ids: Sequence[Id]) -> dict[Id, str]:
        """What searches miss of these records; of an approximate index one without a filter may be."""
        row = self._registry.collection(collection)
        held = [record.id for record in self._store.get(collection, ids, fields=())]
        sample = self._store.get(collection, held[:: max(1, len(held) // TOGETHER)][:TOGETHER], fields=(), vector=True)
        missed = not_found(self._store, schema_from_json(row.schema), sample, among=held, search=row.search)
        return {} if len(missed) == 1 and "filter" not in next(iter(missed.values())) else missed

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
        seen = self._look(task, batch)
        announced = self._registry.intents(task.upgrade, ids)
        # Asked last of all: nothing leaves old before new has been asked for it, but for what is left as it is there.
        new = set(seen.in_old) if task.in_place else self._in_new(task, ids) | set(unpack_ids(batch.left))
        left = self._left_before(task, batch, seen)
        settled = self._registry.now() - grace(self._registry, task)
        uncopied = {*unpack_ids(batch.again), *lost}
        fates: dict[Fate, list[Id]] = {each: [] for each in Fate}
        for id in ids:
            evidence = Evidence(
                written=_written(announced.get(key(id)), settled), uncopied=id in uncopied, read=id in seen.read,
                in_old=id in seen.in_old, same=id in seen.same, in_new=id in new, left=id in left,
            )  # fmt: skip
            fates[record_fate(evidence)].append(id)
        self._forget_lost(task, {id: announced[key(id)] for id in fates[Fate.REQUEUE] if id not in new and key(id) in announced})
        decision = Decision(remove=fates[Fate.REMOVE], remove_from_new=fates[Fate.REMOVE_FROM_NEW], requeue=fates[Fate.REQUEUE])
        return decision if task.in_place else self._doubt(task, batch, len(seen.read), decision)

    def _look(self, task: Task, batch: BatchRow) -> _Seen:
        """Compare what the batch read with what is there now; neither stays in memory while others are asked."""
        was = self._was(batch)
        now = {record.id: record for records in self._read(task, unpack_ids(batch.ids)).values() for record in records}
        both = was.keys() & now.keys()
        agree = {id for id in both if (was[id].is_copied_to(now[id]) if task.in_place else same(was[id].record, now[id]))}
        return _Seen(read=set(was), made={id for id in was if was[id].made is not None}, in_old=set(now), same=agree)

    def _was(self, batch: BatchRow) -> dict[Id, Reading]:
        return {each.record.id: each for readings in self._readings(batch.archive).values() for each in readings}

    def _in_new(self, task: Task, ids: Sequence[Id]) -> set[Id]:
        """Those of these records that the new collection holds now, at Strong."""
        return {record.id for collection in task.new for record in self._store.get(collection, ids, fields=())}

    def _left_before(self, task: Task, batch: BatchRow, seen: _Seen) -> set[Id]:
        """The records that this batch, or one that it led to, has taken out of the old collections; or any that it came from,
        where this one's last copy did not find them there."""
        gone = seen.read - seen.in_old
        if not gone or task.in_place:
            return set()
        if batch.restore:  # what was lost was in no old collection when it was put back
            return gone
        noted = self._archive.left(*self._place(task), str(_root(batch)))
        return {id for id in gone if id in noted and (noted[id] >= batch.id or id not in seen.made)}

    def _forget_lost(self, task: Task, lost: Mapping[Id, IntentRow]) -> None:
        """The engine has gone back and lost these writes: from here on their records are copied as all others are."""
        if done := {id: intent.id for id, intent in lost.items() if intent.done}:
            self._registry.forget_done(task.upgrade, list(done), upto=max(done.values()))

    def _doubt(self, task: Task, batch: BatchRow, read: int, decision: Decision) -> Decision:
        """Take single records that are gone for deleted; of many, RecordsMissing, unless the batch was retired as a whole."""
        gone = decision.remove_from_new
        if not too_many(len(gone), read, task.missing):
            return decision
        if len(gone) == read:
            was = self._was(batch)
            stored = {each.id: each for name in task.new for each in self._store.get(name, gone, vector=True)}
            if all(id in stored and was[id].is_copied_to(stored[id]) for id in gone):
                return replace(decision, remove=[*decision.remove, *gone], remove_from_new=[])
        raise errors.RecordsMissing(
            f"{len(gone)} of the {counted(read, 'record')} of a batch are gone from {' and '.join(task.old)} since it was "
            f"copied, such as {gone[0]!r}, and rmvdb did not remove them; nothing was taken out of {task.new[0]}. If another "
            "program deleted them: run the same command again with --accept-missing. If the registry is an older copy: "
            "rmvdb registry rebuild"
        )

    def _decide_again(self, task: Task, batch: BatchRow, decided: Decision) -> Decision:
        """Whoever had decided died, perhaps long ago: what is still there, and is not what was read, is moved again."""
        if task.in_place:
            return decided  # nothing leaves
        held = self._read(task, decided.remove)
        announced = self._registry.intents(task.upgrade, [record.id for records in held.values() for record in records])
        new = self._in_new(task, decided.remove) | set(unpack_ids(batch.left))
        was = {
            each.record.id: (collection, each.record)
            for collection, readings in self._readings(batch.archive).items()
            for each in readings
        }

        def is_other(collection: str, record: Record) -> bool:
            intent = announced.get(key(record.id))
            if record.id not in new and not (intent and intent.kind == "delete"):
                return True
            if intent:
                return False
            place, reading = was.get(record.id, (task.old[-1], None))
            # An older copy than was read leaves as was decided; a newer one is what clients are shown now.
            newer = task.old.index(collection) < task.old.index(place)
            return newer or reading is None or (collection == place and not same(reading, record))

        changed = {record.id for collection, records in held.items() for record in records if is_other(collection, record)}
        self._forget_lost(task, {id: announced[key(id)] for id in changed if id not in new and key(id) in announced})
        left = [id for id in decided.remove if id not in changed]
        return replace(decided, remove=left, requeue=[*decided.requeue, *(id for id in decided.remove if id in changed)])


def _with_vectors(records: Sequence[Record], vectors: Mapping[Id, Vectors]) -> list[Record]:
    return [Record(id=each.id, vector=vectors[each.id], fields=each.fields) for each in records if each.id in vectors]


def _written(intent: IntentRow | None, settled: float) -> str:
    """How `Evidence` calls a write. A done one put the truth into the new collection, but a search that looked there before must
    still find it in the old one: the grace counts from the write."""
    if intent is None:
        return ""
    return intent.kind if intent.done and (intent.done_at or 0.0) <= settled else "open"


def _root(batch: BatchRow) -> int:
    """The batch from which this one came again, by however many others."""
    return batch.root or batch.id


def same(one: Record, other: Record) -> bool:
    """Whether two readings of a record agree, bit by bit."""
    return same_fields(one.fields, other.fields) and np.array_equal(_vector(one), _vector(other), equal_nan=True)


def _vector(record: Record) -> Vectors:
    return record.vector if record.vector is not None else np.empty(0, np.float32)
