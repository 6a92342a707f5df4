"""Is the new gallery the old one, re-embedded?

Expected ids = archive ∪ done upserts − done deletes; fields equal; a sample re-embedded within 1e-5 cosine. Of a record whose
writer was killed half-way nothing is expected. Bounded memory but for some tens of bytes a record: ids are compared as sets.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rmvdb import sketch
from rmvdb.archive import Archive, ArchiveFile, same_fields
from rmvdb.backfill import Task
from rmvdb.embedders import embed_checked
from rmvdb.encoding import Encoder
from rmvdb.plural import counted
from rmvdb.protocols import Source, VectorStore
from rmvdb.registry import Registry, key, unpack_ids
from rmvdb.tables import BatchRow, IntentRow
from rmvdb.types import BatchState, Id, IdType, Record

#: Largest cosine distance between a stored vector and the item embedded again.
TOLERANCE = 1e-5
#: Problems that a report names; the rest it counts.
NAMED = 20
#: The states of what is under way, in their order: read one after the other, a batch that goes on meanwhile is in the next.
IN_HAND = (BatchState.CLAIMED, BatchState.WRITING, BatchState.COPIED, BatchState.REMOVING)
#: Records that are compared at once, whatever their batches hold.
AT_ONCE = 1_000


@dataclass(kw_only=True, slots=True)
class Report:
    """What was compared and what did not agree."""

    records: int = 0
    fields_compared: int = 0
    embedded_again: int = 0
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
class Position:
    """How far a comparison has come in which everything agreed."""

    #: The last batch whose records were compared, and how many batches that makes.
    batch: int = 0
    batches: int = 0
    fields_compared: int = 0
    embedded_again: int = 0


class _Batch(NamedTuple):
    id: int
    #: What it read, by old collection.
    archive: Mapping[str, Any]
    #: Eight bytes of each id that it took out of the old collections, and of each that it found gone, and took out of the new.
    removed: npt.NDArray[np.uint64]
    gone: npt.NDArray[np.uint64]


class Verify:
    """Compares the collection that an upgrade filled with what it was filled from."""

    def __init__(
        self, *, registry: Registry, store: VectorStore, encoder: Encoder, source: Source | None, archive: Archive
    ) -> None:
        self._registry, self._store, self._encoder = registry, store, encoder
        self._source, self._archive = source, archive

    def run(
        self,
        task: Task,
        *,
        sample: int = 200,
        progress: Callable[[int, int], None] = lambda *_: None,
        begun: Position | None = None,
        keep: Callable[[Position], None] = lambda _: None,
    ) -> Report:
        """Compare every id and field, and a sample of the vectors; never raises for a difference, the report says it.

        It goes on from where one that was interrupted had `begun`, and tells `keep` how far it is while nothing differs.
        """
        batches = list(self._retired(task))
        at = _valid(begun, batches)
        report = Report(fields_compared=at.fields_compared, embedded_again=at.embedded_again)
        total = self._registry.progress(task.upgrade).total
        newest = _newest(batches)
        differing: dict[Id, float] = {}
        for part in _parts(batches[at.batches :]):
            archived = [record for batch in part for record in self._moved(batch, newest, report)]
            differing |= self._compare(task, archived, report, sample=sample, of=total)
            report.fields_compared += len(archived)
            at = Position(
                batch=part[-1].id,
                batches=at.batches + len(part),
                fields_compared=report.fields_compared,
                embedded_again=report.embedded_again,
            )
            if report.ok and not differing:
                keep(at)
            progress(report.fields_compared, total)
        moved = (hash for batch in batches for hash in batch.removed.tolist() if newest.get(hash, batch.id) == batch.id)

        def look() -> None:
            progress(report.fields_compared, total)

        self._compare_ids(task, batches, np.unique(np.fromiter(moved, np.uint64)), report, look=look)
        self._compare_written(task, report, look=look)
        for id, distance in self._unwritten(task, differing).items():
            lies = f"record {id!r} embedded again lies {distance:.1e} from the stored vector"
            report.complain(f"{lies}; if its item has changed, write it again")
        return report

    def _retired(self, task: Task) -> Iterator[_Batch]:
        """What batches took out of the old collections, in the order in which they were listed."""
        for row in self._batches(task, BatchState.RETIRED):
            if row.archive and row.remove is not None:
                left = set(unpack_ids(row.left))  # another program's, and not what was moved
                moved = [id for id in unpack_ids(row.remove) if id not in left]
                yield _Batch(row.id, row.archive, hashes(moved), hashes(unpack_ids(row.gone)))

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

    def _moved(self, batch: _Batch, newest: Mapping[int, int], report: Report) -> Iterator[Record]:
        """The records that a batch took out, as they were read; but for those that a later one did again."""
        left = {hash for hash in batch.removed.tolist() if newest.get(hash, batch.id) == batch.id}
        for file in batch.archive.values():
            read = [reading.record for reading in self._archive.found(ArchiveFile(**file), left_out=report.unread.append)]
            hashed = hashes([record.id for record in read]).tolist()
            yield from (record for record, hash in zip(read, hashed, strict=True) if hash in left)

    def _compare(self, task: Task, archived: Sequence[Record], report: Report, *, sample: int, of: int) -> dict[Id, float]:
        """Complains of what differs but for vectors: those come back, with their distance."""
        ids = [record.id for record in archived]
        written = self._registry.announced(task.upgrade, ids)
        expected = {record.id: record for record in archived if key(record.id) not in written}
        found = self._stored(task, list(expected))
        since = self._registry.announced(task.upgrade, expected.keys())
        for id, record in expected.items():
            if key(id) in since:
                continue  # written while this was read
            if id not in found:
                report.complain(f"record {id!r} was moved and is not in {' or '.join(task.new)}")
            elif not same_fields(found[id].fields, record.fields):
                report.complain(f"record {id!r} has other fields in {' or '.join(task.new)} than it had when it was moved")
        share = min(1.0, sample / of) if of else 1.0
        chosen = self._stored(task, [id for id in expected if id in found and _share(id) < share], vector=True)
        return self._embed_again(task, list(chosen.values()), report)

    def _stored(self, task: Task, ids: Sequence[Id], *, vector: bool = False) -> dict[Id, Record]:
        found: dict[Id, Record] = {}
        for collection in reversed(task.new):
            found |= {record.id: record for record in self._store.get(collection, ids, vector=vector)}
        return found

    def _embed_again(self, task: Task, records: Sequence[Record], report: Report) -> dict[Id, float]:
        # A roll back puts back what was there; there is nothing to embed.
        if not records or self._source is None or task.undoes is not None:
            return {}
        items = self._source.load(records)
        there = [record for record in records if record.id in items]
        if not there:
            return {}
        chain = self._encoder.chain(task.version)
        raw, bad = embed_checked(self._encoder.embedder(chain.embedder), [items[record.id] for record in there], chain.dim)
        there = [record for at, record in enumerate(there) if at not in bad]  # an item that broke since tells nothing
        if not there:
            return {}
        again = self._encoder.own(task.version, raw[[at for at in range(len(raw)) if at not in bad]])
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
        moved: npt.NDArray[np.uint64],
        report: Report,
        *,
        look: Callable[[], None],
    ) -> None:
        upserted, deleted = self._written(task) if self._is_written(task) else (hashes([]), hashes([]))
        expected = np.setdiff1d(np.union1d(moved, upserted), deleted)
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

    def _complain_of_strangers(self, task: Task, collection: str, strangers: Sequence[Id], report: Report) -> None:
        written = self._registry.announced(task.upgrade, strangers)
        if task.undoes is None:  # a roll back fills collections that were not empty
            for id in strangers:
                if key(id) not in written:
                    report.complain(f"record {id!r} is in {collection} though it was neither moved nor written there")
        deleted = {id: written[key(id)].id for id in strangers if key(id) in written and _is_deletion(written[key(id)])}
        # Deleted after this page was read, or written again since, is no difference.
        back = [record.id for record in self._store.get(collection, list(deleted), fields=())]
        now = self._registry.announced(task.upgrade, back)
        for id in back:
            if (last := now.get(key(id))) is not None and last.id == deleted[id]:
                report.complain(f"record {id!r} is in {collection} though it was deleted")

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

    def _compare_written(self, task: Task, report: Report, *, look: Callable[[], None]) -> None:
        """Whether what clients wrote is as they wrote it: a call that was held up may have come after theirs."""
        made: dict[str, tuple[int, bytes]] = {}
        after = 0
        while page := self._registry.written(task.upgrade, after=after):
            for row in page:
                made.pop(row.record, None)  # of what was begun since, and is not done, nobody knows
                if row.done and row.sketch:
                    made[row.record] = row.id, row.sketch
            after = page[-1].id
        if not self._is_written(task):
            return
        numbers = self._registry.collection(task.new[0]).schema["id_type"] == IdType.INT64
        other = self._otherwise(task, [int(record) if numbers else record for record in made], made, look)
        end = time.monotonic() + task.grace
        while other and time.monotonic() < end:  # a server may show for a moment what a record was before
            time.sleep(0.1)
            other = self._otherwise(task, other, made, look)
        for id in other:
            report.complain(f"record {id!r} is in {task.new[0]} with another vector than its last write gave it")

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


def _valid(begun: Position | None, batches: Sequence[_Batch]) -> Position:
    """Where to go on: at the beginning, unless what was compared is still the first of these batches."""
    before = [batch.id for batch in batches if begun and batch.id <= begun.batch]
    return begun if begun and len(before) == begun.batches else Position()


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
