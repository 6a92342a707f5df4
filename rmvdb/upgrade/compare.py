"""Compare the new gallery with an offline re-embedding of the old one.

Expected ids = archive ∪ done upserts − done deletes; fields equal; a sample re-embedded within 1e-5 cosine. If a writer was
killed half-way, its record may be there or not. Memory is bounded, except for some tens of bytes a record: ids are compared as
hashes.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rmvdb.backfill.task import Task
from rmvdb.items.digest import item_digest
from rmvdb.protocols import Source, VectorStore
from rmvdb.registry.codec import key, unpack_ids
from rmvdb.registry.registry import Registry
from rmvdb.registry.tables import IntentRow
from rmvdb.serving import sketch
from rmvdb.serving.loaded_models import LoadedModels
from rmvdb.storage.archive import Archive, Reading, same_fields
from rmvdb.text import counted
from rmvdb.types import BatchState, Id, Item, Moment, Record
from rmvdb.upgrade import search_check
from rmvdb.upgrade.client_writes import ClientWrites
from rmvdb.upgrade.embed_again import EmbedAgain
from rmvdb.upgrade.id_hashes import hashes, outside, share
from rmvdb.upgrade.moved_batches import MovedBatch, MovedBatches, newest_by_hash
from rmvdb.upgrade.report import VerifyPosition, VerifyReport

#: Records that are compared at once, unless one batch holds more.
AT_ONCE = 1_000
#: The most parts that are read while an earlier one is compared: each waits for the engine's clock.
AHEAD = 5
#: Seconds after which records that seem to differ are looked at again, so that the position can be kept.
UNDECIDED = 60.0
#: The most records with other fields that are looked at again. If there are more, a busy server is not the reason.
LOOK_AGAIN = 1_000


@dataclass(frozen=True, kw_only=True, slots=True)
class UnexplainedRecords:
    """The records of the new collection that differ from the known writes.

    The registry has gone back, the engine has lost a write, a call was held up, or another program wrote.
    """

    #: Ids that no batch moved there and no known write put there.
    unknown: list[Id] = field(default_factory=list)
    #: Ids whose record is not as the last known write, or its batch, left it.
    changed: list[Id] = field(default_factory=list)
    #: Ids whose last known write is an upsert, and that no collection holds.
    absent: list[Id] = field(default_factory=list)
    #: The number of the last intent before the reading. A later one decides for its record.
    upto: int = field(default=0, compare=False)


class _Part(NamedTuple):
    """Some retired batches, and their records as the new collection has them."""

    batches: Sequence[MovedBatch]
    #: How many records the archive holds, and the readings of those that no client has written since, by id.
    archived: int
    expected: Mapping[Id, Reading]
    found: Mapping[Id, Record]
    #: Every read that asks for it shows the writes that came before.
    moment: Moment


class Verify:
    """Compares the collection that an upgrade filled with the records that filled it."""

    def __init__(
        self,
        *,
        registry: Registry,
        store: VectorStore,
        loaded_models: LoadedModels,
        source: Source | None,
        archive: Archive,
        batch: int = AT_ONCE,
        ahead: int = AHEAD,
    ) -> None:
        self._ahead = min(ahead, AHEAD)
        self._registry, self._store = registry, store
        self._moved = MovedBatches(registry, archive)
        self._writes = ClientWrites(registry, store)
        self._embed = EmbedAgain(registry=registry, loaded_models=loaded_models, source=source, batch=batch)

    def run(
        self,
        task: Task,
        *,
        sample: int = 200,
        progress: Callable[[int, int], None] = lambda *_: None,
        begun: VerifyPosition | None = None,
        keep: Callable[[VerifyPosition], None] = lambda _: None,
    ) -> VerifyReport:
        """Compare every id and field, and a sample of the vectors. A difference is reported, never raised.

        It resumes from `begun`, and gives `keep` its position while nothing differs.
        """
        batches = list(self._moved.retired(task))
        at = _valid(begun, batches)
        report = VerifyReport(
            fields_compared=at.fields_compared,
            embedded_again=at.embedded_again,
            searched=at.searched,
            passed_over=at.passed_over,
        )
        total = self._registry.progress(task.upgrade).total
        newest = newest_by_hash(batches)
        differing: dict[Id, float] = {}
        odd: dict[Id, Record] = {}
        read = functools.partial(self._read, task, newest=newest, left_out=report.unread.append)
        kept = time.monotonic()

        def look() -> None:
            progress(report.fields_compared, total)

        for part in _read_ahead(_parts(batches[at.batches :]), read, self._ahead):
            differing |= self._compare(task, part, report, odd, sample=sample, of=total)
            report.fields_compared += part.archived
            at = VerifyPosition(
                batch=part.batches[-1].id,
                batches=at.batches + len(part.batches),
                fields_compared=report.fields_compared,
                embedded_again=report.embedded_again,
                searched=report.searched,
                passed_over=report.passed_over,
            )
            if report.ok and (differing or odd) and time.monotonic() - kept > UNDECIDED:
                self._decide(task, report, odd, differing, look=look)
            if report.ok and not differing and not odd:
                keep(at)
                kept = time.monotonic()
            progress(report.fields_compared, total)

        self._compare_ids(task, batches, self._expected(task, batches, newest), report, look=look)
        self._compare_written(task, report, sample=sample, look=look)
        self._count_missing(task, report)
        report.judge_index()
        self._decide(task, report, odd, differing, look=look)
        return report

    def _decide(
        self,
        task: Task,
        report: VerifyReport,
        odd: dict[Id, Record],
        differing: dict[Id, float],
        *,
        look: Callable[[], None],
    ) -> None:
        """Look again at records that seemed to differ. Report those that still do, and empty both."""
        for id in self._still_odd(task, odd, look=look):
            _complain_of_fields(report, task, id)
        for id, distance in self._unwritten(task, differing).items():
            lies = f"record {id!r} embedded again lies {distance:.1e} from the stored vector"
            report.complain(f"{lies}; if its item has changed, write it again")
        odd.clear()
        differing.clear()

    def unexplained(self, task: Task, look: Callable[[], None] = lambda: None) -> UnexplainedRecords:
        """Find the records of the new collection that differ from the known writes, in one reading of it.

        A roll back fills collections that were not empty, so unknown records are no difference there.
        """
        gallery = self._registry.upgrade(task.upgrade).gallery_id
        upto, reached = self._registry.last_intent(gallery), self._writes.reach(task)
        made = self._writes.upserted(task) if reached else {}
        result = UnexplainedRecords(upto=upto, changed=self._writes.differing(task, made, look) if made else [])
        batches = list(self._moved.retired(task))
        newest = newest_by_hash(batches)
        odd: dict[Id, Record] = {}
        for part in _parts(batches):
            archived = [each for batch in part for each in self._moved.readings(task, batch, newest, lambda _: None)]
            found = self._rewritten(task, archived)
            if len(odd) < LOOK_AGAIN:
                odd |= found
            else:
                result.changed.extend(found)
            look()
        result.changed.extend(self._still_odd(task, odd, look=look))
        expected = self._expected(task, batches, newest)
        for collection in task.new if reached or task.undoes is None else ():
            for strangers, written in self._strangers(task, collection, batches, expected, lambda _: look()):
                if task.undoes is None:
                    result.unknown.extend(id for id in strangers if key(id) not in written)
                if reached:
                    result.changed.extend(self._writes.though_deleted(task, collection, strangers, written))
        result.absent.extend(self._writes.absent(task, made))
        return result

    def _rewritten(self, task: Task, archived: Sequence[Reading]) -> dict[Id, Record]:
        """Return the records that have other fields than their batch moved, though no write of them is known."""
        ids = [reading.record.id for reading in archived]
        written = self._registry.announced(task.upgrade, ids)
        expected = {reading.record.id: reading.record for reading in archived if key(reading.record.id) not in written}
        return self._odd(task, expected)

    def _odd(self, task: Task, expected: Mapping[Id, Record]) -> dict[Id, Record]:
        """Return the records whose fields differ where they have moved to, although no client wrote them."""
        found = self._stored(task, list(expected), vector=False, after=self._store.moment())
        other = [id for id, record in found.items() if not same_fields(record.fields, expected[id].fields)]
        since = self._registry.announced(task.upgrade, other)
        return {id: expected[id] for id in other if key(id) not in since}

    def _still_odd(self, task: Task, odd: dict[Id, Record], *, look: Callable[[], None]) -> dict[Id, Record]:
        """Look again for a grace at most: a server may show a former record for a moment."""
        end = time.monotonic() + task.grace
        while odd and time.monotonic() < end:
            time.sleep(0.1)
            look()
            odd = self._odd(task, odd)
        return odd

    # --- ids ----------------------------------------------------------------------------------------------------------

    def _expected(self, task: Task, batches: Sequence[MovedBatch], newest: Mapping[int, int]) -> npt.NDArray[np.uint64]:
        """Return hashes of the ids that batches moved, and clients wrote, into the new collection."""
        moved = (hash for batch in batches for hash in batch.removed.tolist() if newest.get(hash, batch.id) == batch.id)
        there, gone = self._writes.there_and_gone(task) if self._writes.reach(task) else (hashes([]), hashes([]))
        return np.setdiff1d(np.union1d(np.unique(np.fromiter(moved, np.uint64)), there), gone)

    def _strangers(
        self,
        task: Task,
        collection: str,
        batches: Sequence[MovedBatch],
        expected: npt.NDArray[np.uint64],
        hear: Callable[[Sequence[Record]], None],
    ) -> Iterator[tuple[list[Id], Mapping[str, IntentRow]]]:
        """Read a collection page by page: the ids that are not expected there, with their last intents. `hear` gets each page.

        In place the collection held every record from the beginning. Until all are listed, none is known to be a stranger.
        """
        listed = not task.in_place or self._registry.upgrade(task.upgrade).listed
        if task.in_place and listed:
            expected = np.union1d(expected, self._waiting(task))
        for page in self._store.scan(collection):
            hear(page)
            if not listed:
                continue
            strangers = outside(expected, [record.id for record in page])
            strangers = outside(self._moved.under_way(task, batches), strangers) if strangers else []
            if strangers and task.in_place:  # a batch may have been handed back meanwhile
                strangers = outside(self._waiting(task), strangers)
            if strangers:
                yield strangers, self._registry.announced(task.upgrade, strangers)

    def _waiting(self, task: Task) -> npt.NDArray[np.uint64]:
        """Return hashes of the ids that wait for their batch, without those that clients have deleted."""
        gone = self._writes.there_and_gone(task)[1] if self._writes.reach(task) else hashes([])
        return np.setdiff1d(self._moved.waiting(task), gone)

    def _compare_ids(
        self,
        task: Task,
        batches: Sequence[MovedBatch],
        expected: npt.NDArray[np.uint64],
        report: VerifyReport,
        *,
        look: Callable[[], None],
    ) -> None:
        stored = [np.empty(0, np.uint64)]

        def hear(page: Sequence[Record]) -> None:
            look()
            stored.append(hashes([record.id for record in page]))

        for collection in task.new:
            for strangers, written in self._strangers(task, collection, batches, expected, hear):
                if task.undoes is None:  # a roll back fills collections that were not empty
                    for id in (id for id in strangers if key(id) not in written):
                        report.complain(f"record {id!r} is in {collection} though it was neither moved nor written there")
                for id in self._writes.though_deleted(task, collection, strangers, written):
                    report.complain(f"record {id!r} is in {collection} though it was deleted")
        present = np.unique(np.concatenate(stored))
        report.records = len(present)
        # The intents are read after the scan: a record that was deleted meanwhile, or may have been, is not missing.
        if missing := len(np.setdiff1d(np.setdiff1d(expected, present), self._writes.there_and_gone(task)[1])):
            what = counted(missing, "record that was moved or written is", "records that were moved or written are")
            report.complain(f"{what} not in {' or '.join(task.new)}")

    def _count_missing(self, task: Task, report: VerifyReport) -> None:
        """Count the records that left the old collections without a batch, an intent or a client's deletion.

        For a roll back: of those that the upgrade had moved, or that clients wrote during it.
        """
        if task.in_place:
            return
        upgrades = [number for number in (task.undoes, task.upgrade) if number is not None]
        for row in self._moved.rows(task, BatchState.RETIRED):
            if task.undoes is not None and not row.origin:
                continue
            decided = {*unpack_ids(row.remove), *unpack_ids(row.requeue)}
            ids = [id for id in unpack_ids(row.ids) if id not in decided]
            written = {record for each in upgrades for record in self._registry.announced(each, ids)} if ids else set()
            there = (
                {record.id for name in (*task.new, *task.old) for record in self._store.get(name, ids, fields=())} if ids else ()
            )
            report.miss([id for id in ids if key(id) not in written and id not in there])
        if task.undoes is not None and self._writes.reach(task):
            undone = replace(task, upgrade=task.undoes)
            absent = self._writes.absent(undone, self._writes.upserted(undone))
            since = self._registry.announced(task.upgrade, absent)
            report.miss([id for id in absent if key(id) not in since])

    # --- records that batches moved -----------------------------------------------------------------------------------

    def _read(
        self, task: Task, batches: Sequence[MovedBatch], newest: Mapping[int, int], left_out: Callable[[str], None]
    ) -> _Part:
        archived = [each for batch in batches for each in self._moved.readings(task, batch, newest, left_out)]
        written = self._registry.announced(task.upgrade, [reading.record.id for reading in archived])
        expected = {reading.record.id: reading for reading in archived if key(reading.record.id) not in written}
        moment = self._store.moment()  # all that follows shows every write before it, and waits for the engine's clock once
        found = self._stored(task, list(expected), vector=task.in_place, after=moment)
        return _Part(batches, len(archived), expected, found, moment)

    def _compare(
        self, task: Task, part: _Part, report: VerifyReport, odd: dict[Id, Record], *, sample: int, of: int
    ) -> dict[Id, float]:
        """Note every difference except in vectors, and return the records whose vectors differ, with the distance.

        `odd` gets the records with other fields, which deserve a second look, as long as they are few.

        A sample is embedded again. In place, each record without the very vector that its batch made is embedded again, too: an
        engine that has gone back holds the former vector.
        """
        _, _, expected, found, moment = part
        since = self._registry.announced(task.upgrade, expected.keys())
        other: set[Id] = set()
        for id, reading in expected.items():
            if key(id) in since:
                continue  # a client wrote it during this reading
            if id not in found:
                report.complain(f"record {id!r} was moved and is not in {' or '.join(task.new)}")
            elif not same_fields(found[id].fields, reading.record.fields):
                if len(odd) < LOOK_AGAIN:
                    odd[id] = reading.record
                else:
                    _complain_of_fields(report, task, id)
            elif task.in_place and not reading.is_copied_to(found[id]):
                other.add(id)
        portion = min(1.0, sample / of) if of else 1.0
        chosen = self._by_collection(task, [id for id in expected if id in found and share(id) < portion], after=moment)
        search_check.search(self._store, self._registry, chosen, report, after=moment)
        every = [record for records in chosen.values() for record in records]
        every += [found[id] for id in other - {record.id for record in every}]
        return self._embed.differing(task, self._embed.rankable(task, every, report), report)

    def _by_collection(self, task: Task, ids: Sequence[Id], *, after: Moment) -> dict[str, list[Record]]:
        """Return the records with their vectors, each from the first collection that holds it."""
        found: dict[str, list[Record]] = {}
        for collection in task.new:
            found[collection] = self._store.get(collection, ids, vector=True, strong=not after, after=after)
            there = {record.id for record in found[collection]}
            ids = [id for id in ids if id not in there]
        return found

    def _stored(self, task: Task, ids: Sequence[Id], *, vector: bool, after: Moment) -> dict[Id, Record]:
        found: dict[Id, Record] = {}
        for collection in reversed(task.new):
            read = self._store.get(collection, ids, vector=vector, strong=not after, after=after)
            found |= {record.id: record for record in read}
        return found

    def _unwritten(self, task: Task, differing: dict[Id, float]) -> dict[Id, float]:
        """Leave out the records that a client writes within a grace: a changed item is followed by a write a moment later."""
        end = time.monotonic() + task.grace
        while True:
            written = self._registry.announced(task.upgrade, differing.keys())
            differing = {id: distance for id, distance in differing.items() if key(id) not in written}
            if not differing or time.monotonic() > end:
                return differing
            time.sleep(0.1)

    # --- records that clients wrote -----------------------------------------------------------------------------------

    def _compare_written(self, task: Task, report: VerifyReport, *, sample: int, look: Callable[[], None]) -> None:
        """Note the records that are not as clients wrote them: a delayed call may have overwritten theirs."""
        if not self._writes.reach(task):
            return
        made = {record: write for record, write in self._writes.upserted(task).items() if write[1]}
        other = self._writes.differing(task, made, look)
        for id in other:
            report.complain(f"record {id!r} is in {task.new[0]} with another vector than its last write gave it")
        complained = set(map(key, other))
        right = {record: write for record, write in made.items() if record not in complained}
        self._embed_written(task, right, report, sample=sample)

    def _embed_written(self, task: Task, made: Mapping[str, tuple[int, bytes]], report: VerifyReport, *, sample: int) -> None:
        """Search for a sample of the records that clients wrote, and embed it again: a client may run other code of the model."""
        ids = self._writes.ids(task, made)
        chosen = [id for id in ids if share(id) < sample / len(ids)]
        records = self._store.get(task.new[0], chosen, vector=True)  # about `sample` of them
        search_check.search(self._store, self._registry, {task.new[0]: records}, report)

        def as_written(id: Id, item: Item) -> bool:  # the source may have another item by now, or never get this one
            return item_digest(item) == sketch.item_of(made[key(id)][1])

        differing = self._embed.differing(task, records, report, only=as_written)
        for id in self._writes.unchanged_since(task, list(differing), lambda id: made[key(id)][0]):
            report.complain(
                f"record {id!r} lies {differing[id]:.1e} from what {task.version} makes of the same item: a client with another "
                "code of the model wrote it; write it again"
            )


def _complain_of_fields(report: VerifyReport, task: Task, id: Id) -> None:
    report.complain(f"record {id!r} has other fields in {' or '.join(task.new)} than it had when it was moved")


def _valid(begun: VerifyPosition | None, batches: Sequence[MovedBatch]) -> VerifyPosition:
    """Return the position to resume from: the beginning, unless the batches before it are still the same."""
    before = [batch.id for batch in batches if begun and batch.id <= begun.batch]
    return begun if begun and len(before) == begun.batches else VerifyPosition()


def _read_ahead(parts: Iterable[list[MovedBatch]], read: Callable[[list[MovedBatch]], _Part], ahead: int) -> Iterator[_Part]:
    """Yield what is read of each part, in order, and read the next ones meanwhile."""
    reading: deque[Future[_Part]] = deque()
    with ThreadPoolExecutor(ahead, thread_name_prefix="rmvdb-verify") as pool:
        try:
            for part in parts:
                reading.append(pool.submit(read, part))
                if len(reading) > ahead:
                    yield reading.popleft().result()
            while reading:
                yield reading.popleft().result()
        finally:
            for left in reading:
                left.cancel()


def _parts(batches: Sequence[MovedBatch]) -> Iterator[list[MovedBatch]]:
    part: list[MovedBatch] = []
    for batch in batches:
        part.append(batch)
        if sum(len(each.removed) for each in part) >= AT_ONCE:
            yield part
            part = []
    if part:
        yield part
