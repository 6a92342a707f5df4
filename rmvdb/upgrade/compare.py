"""Is the new gallery the old one, re-embedded?

Expected ids = archive ∪ done upserts − done deletes; fields equal; a sample re-embedded within 1e-5 cosine. Of a record whose
writer was killed half-way nothing is expected. Bounded memory but for some tens of bytes a record: ids are compared as sets.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rmvdb import errors
from rmvdb.backfill.task import Task
from rmvdb.canonical import unrankable
from rmvdb.engines.finding import TOGETHER, not_found
from rmvdb.items.embedders import TOLERANCE, embed_checked, item_digest
from rmvdb.items.sources import given
from rmvdb.protocols import Source, VectorStore
from rmvdb.registry.codec import key, schema_from_json, unpack_ids
from rmvdb.registry.registry import Registry
from rmvdb.registry.tables import BatchRow, IntentRow
from rmvdb.serving import sketch
from rmvdb.serving.loaded_models import LoadedModels
from rmvdb.storage.archive import Archive, ArchiveFile, Reading, same_fields
from rmvdb.text import counted
from rmvdb.types import BatchState, Id, IdType, Item, Metric, Record, Schema

#: Problems that a report names; the rest it counts.
NAMED = 20
#: The states of what is under way, in their order: read one after the other, a batch that goes on meanwhile is in the next.
IN_HAND = (BatchState.CLAIMED, BatchState.WRITING, BatchState.COPIED, BatchState.REMOVING)
#: Records that are compared at once, whatever their batches hold.
AT_ONCE = 1_000
#: Seconds after which a record that a search has missed is asked for again.
_AGAIN_AFTER = 1.0


@dataclass(kw_only=True, slots=True)
class VerifyReport:
    """What was compared and what did not agree."""

    records: int = 0
    fields_compared: int = 0
    embedded_again: int = 0
    #: Records that searches were asked for, by their own vectors.
    searched: int = 0
    #: Records of the work list that had left the old collection before a batch read them, or after, without a client's deletion.
    missing: int = 0
    #: The first of them.
    gone: list[Id] = field(default_factory=list)
    problems: int = 0
    #: The first problems, a sentence each.
    examples: list[str] = field(default_factory=list)
    #: Files of the archive that tell nothing any more, a sentence each: of their records only the ids were compared.
    unread: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether everything agreed."""
        return not self.problems

    def complain(self, sentence: str) -> None:
        """Count a problem, and keep its sentence if there are few."""
        self.problems += 1
        if len(self.examples) < NAMED:
            self.examples.append(sentence)

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self) | {"ok": self.ok}


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyPosition:
    """How far a comparison has come in which everything agreed."""

    #: The last batch whose records were compared, and how many batches that makes.
    batch: int = 0
    batches: int = 0
    fields_compared: int = 0
    embedded_again: int = 0


class _Batch(NamedTuple):
    id: int
    #: What it read, by old collection; for a roll back, what that had been made from.
    archive: Mapping[str, Any]
    origin: Mapping[str, Any]
    #: Eight bytes of each id that it took out of the old collections, and of each that it found gone, and took out of the new.
    removed: npt.NDArray[np.uint64]
    gone: npt.NDArray[np.uint64]
    #: And of each that a roll back left where it was: another program may have changed it, and it must be there.
    left: npt.NDArray[np.uint64]


class Verify:
    """Compares the collection that an upgrade filled with what it was filled from."""

    def __init__(
        self,
        *,
        registry: Registry,
        store: VectorStore,
        loaded_models: LoadedModels,
        source: Source | None,
        archive: Archive,
        batch: int = AT_ONCE,
    ) -> None:
        self._registry, self._store, self._loaded_models = registry, store, loaded_models
        self._source, self._archive, self._batch = source, archive, batch

    def run(
        self,
        task: Task,
        *,
        sample: int = 200,
        progress: Callable[[int, int], None] = lambda *_: None,
        begun: VerifyPosition | None = None,
        keep: Callable[[VerifyPosition], None] = lambda _: None,
    ) -> VerifyReport:
        """Compare every id and field, and a sample of the vectors; never raises for a difference, the report says it.

        It goes on from where one that was interrupted had `begun`, and tells `keep` how far it is while nothing differs.
        """
        batches = list(self._retired(task))
        at = _valid(begun, batches)
        report = VerifyReport(fields_compared=at.fields_compared, embedded_again=at.embedded_again)
        total = self._registry.progress(task.upgrade).total
        newest = _newest(batches)
        differing: dict[Id, float] = {}
        for part in _parts(batches[at.batches :]):
            archived = [reading for batch in part for reading in self._moved(task, batch, newest, report)]
            differing |= self._compare(task, archived, report, sample=sample, of=total)
            report.fields_compared += len(archived)
            at = VerifyPosition(
                batch=part[-1].id,
                batches=at.batches + len(part),
                fields_compared=report.fields_compared,
                embedded_again=report.embedded_again,
            )
            if report.ok and not differing:
                keep(at)
            progress(report.fields_compared, total)

        def look() -> None:
            progress(report.fields_compared, total)

        self._compare_ids(task, batches, self._expected(task, batches, newest), report, look=look)
        self._compare_written(task, report, sample=sample, look=look)
        self._count_missing(task, report)
        for id, distance in self._unwritten(task, differing).items():
            lies = f"record {id!r} embedded again lies {distance:.1e} from the stored vector"
            report.complain(f"{lies}; if its item has changed, write it again")
        return report

    def unknown(self, task: Task) -> Iterator[list[Id]]:
        """What is in the new collection though no batch moved it there and no write of it is known, a page at a time.

        A client wrote it, and the registry has gone back to before that since; or another program did.
        """
        if task.undoes is not None:  # a roll back fills collections that were not empty
            return
        batches = list(self._retired(task))
        expected = self._expected(task, batches, _newest(batches))
        for collection in task.new:
            for page in self._store.scan(collection):
                strangers = self._strangers(task, batches, page, expected)
                written = self._registry.announced(task.upgrade, strangers)
                yield [id for id in strangers if key(id) not in written]

    def changed(self, task: Task) -> tuple[list[Id], list[Id]]:
        """What a client wrote and is there otherwise than its last known write left it; and what is not there at all.

        The registry has forgotten a later write, or the engine has lost that one, or a call that was held up came after it.
        """
        if not self._is_written(task):
            return [], []
        made = self._upserted(task)
        changed = self._other_than_written(task, {record: told for record, told in made.items() if told[1]}, lambda: None)
        batches = list(self._retired(task))
        expected = self._expected(task, batches, _newest(batches))
        for collection in task.new:
            for page in self._store.scan(collection):
                strangers = self._strangers(task, batches, page, expected)
                changed += self._though_deleted(task, collection, strangers, self._registry.announced(task.upgrade, strangers))
        return changed, self._absent(task, made)

    def _absent(self, task: Task, made: Mapping[str, tuple[int, bytes]]) -> list[Id]:
        found: list[Id] = []
        ids = self._ids(task, made)
        for start in range(0, len(ids), AT_ONCE):
            part = ids[start : start + AT_ONCE]
            there = {each.id for name in {*task.new, *task.old} for each in self._store.get(name, part, fields=())}
            now = self._registry.announced(task.upgrade, part)
            missing = [id for id in part if id not in there]
            found += [id for id in missing if (last := now.get(key(id))) is not None and last.id == made[key(id)][0]]
        return found

    def _expected(self, task: Task, batches: Sequence[_Batch], newest: Mapping[int, int]) -> npt.NDArray[np.uint64]:
        """Hashes of what batches moved, and clients wrote, into the new collection."""
        moved = (hash for batch in batches for hash in batch.removed.tolist() if newest.get(hash, batch.id) == batch.id)
        upserted, deleted = self._written(task) if self._is_written(task) else (hashes([]), hashes([]))
        return np.setdiff1d(np.union1d(np.unique(np.fromiter(moved, np.uint64)), upserted), deleted)

    def _retired(self, task: Task) -> Iterator[_Batch]:
        """What batches took out of the old collections, in the order in which they were listed."""
        for row in self._batches(task, BatchState.RETIRED):
            if row.archive and row.remove is not None:
                # What no batch had been about to remove is another program's, and not what was moved.
                left = set() if row.origin else set(unpack_ids(row.left))
                moved = [id for id in unpack_ids(row.remove) if id not in left]
                yield _Batch(
                    row.id,
                    row.archive,
                    row.origin or {},
                    hashes(moved),
                    hashes(unpack_ids(row.gone)),
                    hashes(unpack_ids(row.left)),
                )

    def _count_missing(self, task: Task, report: VerifyReport) -> None:
        """Count what left the old collections without a batch, an intent or a deletion through a client."""
        if task.in_place or task.undoes is not None:
            return
        for row in self._batches(task, BatchState.RETIRED):
            decided = {*unpack_ids(row.remove), *unpack_ids(row.again)}
            ids = [id for id in unpack_ids(row.ids) if id not in decided]
            written = self._registry.announced(task.upgrade, ids) if ids else {}
            there = (
                {record.id for name in (*task.new, *task.old) for record in self._store.get(name, ids, fields=())} if ids else ()
            )
            gone = [id for id in ids if key(id) not in written and id not in there]
            report.missing += len(gone)
            report.gone += gone[: NAMED - len(report.gone)]

    def _search(self, found: Mapping[str, Sequence[Record]], report: VerifyReport) -> None:
        """Ask as users do: by the records' own vectors, with filters by key and by a field, and without one."""
        for name, records in found.items():
            row = self._registry.collection(name)
            schema = schema_from_json(row.schema)
            for start in range(0, len(records), TOGETHER):
                asked = records[start : start + TOGETHER]
                for id, how in self._missed(schema, asked, row.search).items():
                    report.complain(f"record {id!r} is in {name}, and {how}; look at its index")
                report.searched += len(asked)

    def _missed(self, schema: Schema, records: Sequence[Record], search: Mapping[str, Any]) -> dict[Id, str]:
        """What searches miss, also once the engine has flushed and indexed what it holds."""
        missed = not_found(self._store, schema, records, search=search)
        for waited in (False, True):
            if not missed:
                break
            if waited:
                self._store.settle(schema.collection, missed=True)
            else:  # it may have been written or deleted since
                time.sleep(_AGAIN_AFTER)
            records = self._store.get(schema.collection, [each.id for each in records], vector=True)
            missed = not_found(self._store, schema, records, search=search)
        return missed

    def _batches(self, task: Task, state: BatchState) -> Iterator[BatchRow]:
        after = 0
        while page := self._registry.batches(task.upgrade, after=after, limit=50, state=state):
            yield from page
            after = page[-1].id

    def _under_way(self, task: Task, batches: Sequence[_Batch]) -> npt.NDArray[np.uint64]:
        """Hashes of what batches have in hand now, and of what those moved that were retired after `batches`."""
        ids = [hashes(unpack_ids(row.ids)) for state in IN_HAND for row in self._batches(task, state)]
        if self._registry.counts(task.upgrade).get(BatchState.RETIRED, (0, 0))[0] > len(batches):
            known = {batch.id for batch in batches}
            ids += [batch.removed for batch in self._retired(task) if batch.id not in known]
        return np.concatenate([hashes([]), *ids])

    def _moved(self, task: Task, batch: _Batch, newest: Mapping[int, int], report: VerifyReport) -> Iterator[Reading]:
        """The records that a batch took out, as they should be now: as they were read, or for a roll back as they had been.

        What a later batch did again is left out.
        """
        origin = self._origin(task, batch)
        as_it_was = set(batch.left.tolist())
        removed = (hash for hash in batch.removed.tolist() if hash not in as_it_was)
        left = {hash for hash in removed if newest.get(hash, batch.id) == batch.id}
        for file in batch.archive.values():
            read = self._archive.found(ArchiveFile(**file), left_out=report.unread.append)
            hashed = hashes([reading.record.id for reading in read]).tolist()
            for reading, hash in zip(read, hashed, strict=True):
                if hash in left:
                    was = origin.get(reading.record.id)
                    yield reading if was is None else Reading(record=was.put_back_for(reading.record), made=None)

    def _origin(self, task: Task, batch: _Batch) -> dict[Id, Reading]:
        """For a roll back: what each record had been made from, but for those that were written since."""
        if task.undoes is None:
            return {}
        found = {each.record.id: each for file in batch.origin.values() for each in self._archive.found(ArchiveFile(**file))}
        written = self._registry.announced(task.undoes, found)
        return {id: reading for id, reading in found.items() if key(id) not in written}

    def _compare(self, task: Task, archived: Sequence[Reading], report: VerifyReport, *, sample: int, of: int) -> dict[Id, float]:
        """Complains of what differs but for vectors: those come back, with their distance.

        Embedded again is a sample, and what was re-embedded in place and has not the very vector that its batch made: an engine
        that has gone back holds the one before.
        """
        ids = [reading.record.id for reading in archived]
        written = self._registry.announced(task.upgrade, ids)
        expected = {reading.record.id: reading for reading in archived if key(reading.record.id) not in written}
        found = self._stored(task, list(expected), vector=task.in_place)
        since = self._registry.announced(task.upgrade, expected.keys())
        other: set[Id] = set()
        for id, reading in expected.items():
            if key(id) in since:
                continue  # written while this was read
            if id not in found:
                report.complain(f"record {id!r} was moved and is not in {' or '.join(task.new)}")
            elif not same_fields(found[id].fields, reading.record.fields):
                report.complain(f"record {id!r} has other fields in {' or '.join(task.new)} than it had when it was moved")
            elif task.in_place and not reading.is_copied_to(found[id]):
                other.add(id)
        share = min(1.0, sample / of) if of else 1.0
        chosen = self._by_collection(task, [id for id in expected if id in found and _share(id) < share])
        self._search(chosen, report)
        every = [record for records in chosen.values() for record in records]
        every += [found[id] for id in other - {record.id for record in every}]
        return self._embed_again_in_parts(task, self._rankable(task, every, report), report)

    def _rankable(self, task: Task, records: Sequence[Record], report: VerifyReport) -> list[Record]:
        """Those that a search can find; complains of the others. A roll back puts back what was there, whatever it is."""
        vectors = [record.vector for record in records if record.vector is not None]
        if not vectors or task.undoes is not None:
            return list(records)
        odd = unrankable(np.stack(vectors), Metric(self._registry.version(task.version).metric))
        for at, why in odd.items():
            report.complain(f"record {records[at].id!r} has a vector that {why}, so that no search finds it; write it again")
        return [record for at, record in enumerate(records) if at not in odd]

    def _by_collection(self, task: Task, ids: Sequence[Id]) -> dict[str, list[Record]]:
        """These records with their vectors, each from the first collection that holds it."""
        found: dict[str, list[Record]] = {}
        for collection in task.new:
            found[collection] = self._store.get(collection, ids, vector=True)
            there = {record.id for record in found[collection]}
            ids = [id for id in ids if id not in there]
        return found

    def _embed_again_in_parts(self, task: Task, records: Sequence[Record], report: VerifyReport) -> dict[Id, float]:
        """As many items at once as a batch has; fewer where they do not fit into memory."""
        waiting = [list(records[at : at + self._batch]) for at in range(0, len(records), self._batch)]
        differing: dict[Id, float] = {}
        while waiting:
            part = waiting.pop()
            try:
                differing |= self._embed_again(task, part, report)
            except MemoryError as exc:
                if len(part) == 1:
                    raise errors.SourceError(
                        f"The item of record {part[0].id!r} does not fit into memory; give this process more of it, or make "
                        "backfill.batch smaller"
                    ) from exc
                self._batch = len(part) // 2
                waiting += [part[: len(part) // 2], part[len(part) // 2 :]]
        return differing

    def _stored(self, task: Task, ids: Sequence[Id], *, vector: bool) -> dict[Id, Record]:
        found: dict[Id, Record] = {}
        for collection in reversed(task.new):
            found |= {record.id: record for record in self._store.get(collection, ids, vector=vector)}
        return found

    def _embed_again(
        self, task: Task, records: Sequence[Record], report: VerifyReport, *, only: Callable[[Id, Item], bool] = lambda *_: True
    ) -> dict[Id, float]:
        # A roll back puts back what was there; there is nothing to embed.
        if not records or self._source is None or task.undoes is not None:
            return {}
        items = given(self._source, records)[0]
        there = [record for record in records if record.id in items and only(record.id, items[record.id])]
        if not there:
            return {}
        chain = self._loaded_models.chain(task.version)
        embedder = self._loaded_models.embedder(chain.embedder)
        raw, bad = embed_checked(embedder, [items[record.id] for record in there], chain.dim, confirm=True)
        there = [record for at, record in enumerate(there) if at not in bad]  # an item that broke since tells nothing
        if not there:
            return {}
        again = self._loaded_models.apply_head(task.version, raw[[at for at in range(len(raw)) if at not in bad]])
        report.embedded_again += len(there)
        distances = {record.id: _cosine_distance(record.vector, own) for record, own in zip(there, again, strict=True)}
        return {id: distance for id, distance in distances.items() if not distance <= TOLERANCE}

    def _unwritten(self, task: Task, differing: dict[Id, float]) -> dict[Id, float]:
        """Those that nobody writes within a grace: who changes an item writes its record a moment later."""
        end = time.monotonic() + task.grace
        while True:
            written = self._registry.announced(task.upgrade, differing.keys())
            differing = {id: distance for id, distance in differing.items() if key(id) not in written}
            if not differing or time.monotonic() > end:
                return differing
            time.sleep(0.1)

    def _compare_ids(
        self,
        task: Task,
        batches: Sequence[_Batch],
        expected: npt.NDArray[np.uint64],
        report: VerifyReport,
        *,
        look: Callable[[], None],
    ) -> None:
        stored = [np.empty(0, np.uint64)]
        for collection in task.new:
            for page in self._store.scan(collection):
                look()
                stored.append(hashes([record.id for record in page]))
                self._complain_of_strangers(task, collection, self._strangers(task, batches, page, expected), report)
        present = np.unique(np.concatenate(stored))
        report.records = len(present)
        # Read after the scan: what was deleted meanwhile, or may have been, is not missing.
        if missing := len(np.setdiff1d(np.setdiff1d(expected, present), self._written(task)[1])):
            what = counted(missing, "record that was moved or written is", "records that were moved or written are")
            report.complain(f"{what} not in {' or '.join(task.new)}")

    def _strangers(
        self, task: Task, batches: Sequence[_Batch], page: Sequence[Record], expected: npt.NDArray[np.uint64]
    ) -> list[Id]:
        """Those of these records that are not to be expected, however far the backfill is."""
        strangers = _not_in(expected, [record.id for record in page])
        return _not_in(self._under_way(task, batches), strangers) if strangers else []

    def _complain_of_strangers(self, task: Task, collection: str, strangers: Sequence[Id], report: VerifyReport) -> None:
        written = self._registry.announced(task.upgrade, strangers)
        if task.undoes is None:  # a roll back fills collections that were not empty
            for id in strangers:
                if key(id) not in written:
                    report.complain(f"record {id!r} is in {collection} though it was neither moved nor written there")
        for id in self._though_deleted(task, collection, strangers, written):
            report.complain(f"record {id!r} is in {collection} though it was deleted")

    def _though_deleted(self, task: Task, collection: str, strangers: Sequence[Id], written: Mapping[str, IntentRow]) -> list[Id]:
        """Those of these records that their last write deleted, and that are there all the same."""
        deleted = {id: written[key(id)].id for id in strangers if key(id) in written and _is_deletion(written[key(id)])}
        # Deleted after this page was read, or written again since, is no difference.
        back = [record.id for record in self._store.get(collection, list(deleted), fields=())]
        now = self._registry.announced(task.upgrade, back)
        return [id for id in back if (last := now.get(key(id))) is not None and last.id == deleted[id]]

    def _written(self, task: Task) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
        """Hashes of the ids that a returned upsert made sure of, and of those that a later delete took away, or may have."""
        there: dict[str, bool] = {}
        after = 0
        while page := self._registry.written(task.upgrade, after=after):
            # An upsert whose writer was killed may or may not have been made, which changes nothing; a delete may have.
            there |= {row.record: row.kind == "upsert" for row in page if row.done or row.kind == "delete"}
            after = page[-1].id
        return (
            hashes([record for record, is_there in there.items() if is_there]),
            hashes([record for record, is_there in there.items() if not is_there]),
        )

    def _compare_written(self, task: Task, report: VerifyReport, *, sample: int, look: Callable[[], None]) -> None:
        """Whether what clients wrote is as they wrote it: a call that was held up may have come after theirs."""
        made = {record: told for record, told in self._upserted(task).items() if told[1]}
        if not self._is_written(task):
            return
        other = self._other_than_written(task, made, look)
        for id in other:
            report.complain(f"record {id!r} is in {task.new[0]} with another vector than its last write gave it")
        complained = set(map(key, other))
        right = {record: told for record, told in made.items() if record not in complained}
        self._embed_written(task, right, report, sample=sample)

    def _upserted(self, task: Task) -> dict[str, tuple[int, bytes]]:
        """The last write of each record that a client wrote last, and the sketch of the vector that it gave, empty where it has
        none."""
        made: dict[str, tuple[int, bytes]] = {}
        after = 0
        while page := self._registry.written(task.upgrade, after=after):
            for row in page:
                made.pop(row.record, None)  # of what was begun since, and is not done, nobody knows
                if row.done and row.kind == "upsert":
                    made[row.record] = row.id, row.sketch or b""
            after = page[-1].id
        return made

    def _ids(self, task: Task, records: Iterable[str]) -> list[Id]:
        numbers = self._registry.collection(task.new[0]).schema["id_type"] == IdType.INT64
        return [int(record) if numbers else record for record in records]

    def _other_than_written(self, task: Task, made: Mapping[str, tuple[int, bytes]], look: Callable[[], None]) -> list[Id]:
        """Those of these records that have another vector than their last write gave them, and keep it for a grace."""
        other = self._otherwise(task, self._ids(task, made), made, look)
        end = time.monotonic() + task.grace
        while other and time.monotonic() < end:  # a server may show for a moment what a record was before
            time.sleep(0.1)
            other = self._otherwise(task, other, made, look)
        return other

    def _embed_written(self, task: Task, made: Mapping[str, tuple[int, bytes]], report: VerifyReport, *, sample: int) -> None:
        """Whether searches find a sample of what clients wrote, and it is what the model makes of these items: they may have run
        another code of it."""
        ids = self._ids(task, made)
        chosen = [id for id in ids if _share(id) < sample / len(ids)]
        records = self._store.get(task.new[0], chosen, vector=True)  # about `sample` of them
        self._search({task.new[0]: records}, report)

        def as_written(id: Id, item: Item) -> bool:  # the source may have got, or never get, another one
            return item_digest(item) == sketch.item_of(made[key(id)][1])

        differing = self._embed_again(task, records, report, only=as_written)
        now = self._registry.announced(task.upgrade, differing)
        for id, distance in differing.items():
            if (last := now.get(key(id))) is not None and last.id == made[key(id)][0]:
                report.complain(
                    f"record {id!r} lies {distance:.1e} from what {task.version} makes of the same item: a client with another "
                    "code of the model wrote it; write it again"
                )

    def _is_written(self, task: Task) -> bool:
        """Whether clients write into what is compared; after an instant roll back they write into the original."""
        return self._registry.upgrade(task.upgrade).new_collection == task.new[0]

    def _otherwise(
        self, task: Task, ids: Sequence[Id], made: Mapping[str, tuple[int, bytes]], look: Callable[[], None]
    ) -> list[Id]:
        """Those of these records that have another vector than their last write gave them."""
        found: list[Id] = []
        for start in range(0, len(ids), AT_ONCE):
            look()
            stored = self._store.get(task.new[0], ids[start : start + AT_ONCE], fields=(), vector=True)
            told = {each.id: sketch.of(each.vector) for each in stored if each.vector is not None}
            other = [id for id, found_there in told.items() if not sketch.near(found_there, made[key(id)][1])]
            now = self._registry.announced(task.upgrade, other)
            found += [id for id in other if (last := now.get(key(id))) is not None and last.id == made[key(id)][0]]
        return found


def _not_in(known: npt.NDArray[np.uint64], ids: Sequence[Id]) -> list[Id]:
    return [id for id, is_known in zip(ids, np.isin(hashes(ids), known), strict=True) if not is_known]


def _is_deletion(intent: IntentRow) -> bool:
    return intent.done and intent.kind == "delete"


def hashes(ids: Sequence[Id]) -> npt.NDArray[np.uint64]:
    """Eight bytes of each id, by which ids are compared as sets."""
    digests = (hashlib.blake2b(key(id).encode(), digest_size=8).digest() for id in ids)
    return np.frombuffer(b"".join(digests), dtype=np.uint64)


def _valid(begun: VerifyPosition | None, batches: Sequence[_Batch]) -> VerifyPosition:
    """Where to go on: at the beginning, unless what was compared is still the first of these batches."""
    before = [batch.id for batch in batches if begun and batch.id <= begun.batch]
    return begun if begun and len(before) == begun.batches else VerifyPosition()


def _newest(batches: Sequence[_Batch]) -> dict[int, int]:
    """Of what several batches had in hand, since another program put it back: the last one that took it out, or found it gone."""
    hands = [np.concatenate([batch.removed, batch.gone]) for batch in batches]
    had = np.concatenate([hashes([]), *hands])
    by = np.repeat(np.array([batch.id for batch in batches], np.int64), np.array([len(each) for each in hands], np.int64))
    different, times = np.unique(had, return_counts=True)
    again = np.isin(had, different[times > 1])
    return dict(zip(had[again].tolist(), by[again].tolist(), strict=True))


def _parts(batches: Sequence[_Batch]) -> Iterator[list[_Batch]]:
    part: list[_Batch] = []
    for batch in batches:
        part.append(batch)
        if sum(len(each.removed) for each in part) >= AT_ONCE:
            yield part
            part = []
    if part:
        yield part


def _share(id: Id) -> float:
    """A fixed number in [0, 1) of an id, by which a sample is drawn."""
    return int(hashes([id])[0]) / 2**64


def _cosine_distance(one: Any, other: Any) -> float:
    one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
    scale = float(np.linalg.norm(one) * np.linalg.norm(other))
    return 1.0 - float(one @ other) / scale if scale else float(not np.array_equal(one, other))
