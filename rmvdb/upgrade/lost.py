"""The records that were moved and are lost since, and where each can still be read."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rmvdb import errors
from rmvdb.backfill.task import Task
from rmvdb.items.check import KNOWN_GOOD
from rmvdb.items.sources import given
from rmvdb.registry.codec import key, unpack_ids
from rmvdb.registry.tables import BatchRow, UpgradeRow
from rmvdb.storage.archive import ArchiveFile, Reading
from rmvdb.types import BatchState, Id, Moment, Phase, Record
from rmvdb.upgrade import backfill_step, late, verify, work_list
from rmvdb.upgrade.client_writes import PAGE, ClientWrites
from rmvdb.upgrade.compare import UnexplainedRecords
from rmvdb.upgrade.context import UpgradeContext
from rmvdb.upgrade.moved_batches import moved_ids


@dataclass(kw_only=True, slots=True)
class Lost:
    """The lost records by the place that still holds them: the first of these places, in this order."""

    #: By batch: records that an old collection holds.
    in_old: dict[int, list[Id]] = field(default_factory=dict)
    #: By batch: records that the archive holds.
    archived: dict[int, list[Id]] = field(default_factory=dict)
    #: Records that the original holds, which is kept for an instant roll back.
    in_original: list[Id] = field(default_factory=list)
    #: Records of which only the source's item is left. Their fields are lost.
    in_source: list[Id] = field(default_factory=list)
    #: Records of which nothing is left.
    for_good: list[Id] = field(default_factory=list)
    #: Records that an old collection holds although the upgrade is cut over. The new collection may hold them, too.
    late: list[Id] = field(default_factory=list)
    #: The records of the new collection that differ from the known writes.
    unexplained: UnexplainedRecords = field(default_factory=UnexplainedRecords)


def count_of(by_batch: Mapping[int, Sequence[Id]]) -> int:
    """Return how many records there are in all batches."""
    return sum(map(len, by_batch.values()))


def find_lost(context: UpgradeContext, upgrade: UpgradeRow) -> Lost:
    """Find the records that the new collections have lost, that came back to the old ones, or that differ from the known writes.

    Raises:
        NotOwner: another registry has taken the gallery, or this one has gone back.
    """
    context.owner.expect(context.gallery.name)
    lost = find_moved_and_lost(context, upgrade)
    lost.late = _late(context, upgrade, but=lost.in_old)
    task = backfill_step.task(context, upgrade)
    context.announce("comparing each record with its last known write")
    unexplained = verify.check_of(context).unexplained(task, context.check_stop)
    # Either the engine lost a client's write, or the registry lost a deletion. To lose the write would be worse.
    written = _with_items(context, task, unexplained.absent)
    lost.in_source += [id for id in unexplained.absent if id in written]
    lost.unexplained = replace(unexplained, absent=[id for id in unexplained.absent if id not in written])
    return lost


def _late(context: UpgradeContext, upgrade: UpgradeRow, *, but: Mapping[int, Sequence[Id]]) -> list[Id]:
    """Find the records that came into an old collection after the cut-over: by another program, or the engine went back.

    No search reads them there, not even those that are quarantined.
    """
    if upgrade.phase != Phase.CUT_OVER or upgrade.original:
        return []
    known = {id for ids in but.values() for id in ids}
    there = (each for each in upgrade.old_collections if context.store.exists(each))
    pages = (page for each in there for page in late.find_late(context, upgrade, each, quarantined=True))
    return [id for page in pages for id in page.ids if id not in known]


def find_moved_and_lost(context: UpgradeContext, upgrade: UpgradeRow) -> Lost:
    """Find the records that batches moved and that are lost, except for those that a client has written or deleted since."""
    task, lost, seen = backfill_step.task(context, upgrade), Lost(), set[Id]()
    elsewhere: list[Id] = []
    before, looked = work_list.LAST, 0
    total, _ = context.registry.counts(upgrade.id).get(BatchState.RETIRED, (0, 0))
    report = context.report_if_slow()
    while page := context.registry.batches(upgrade.id, before=before, state=BatchState.RETIRED):
        moment = context.store.moment()  # the reads of a page wait for the engine's clock once
        for row in page:  # the last batch that moved a record has its last reading
            ids = [id for id in moved_ids(row) if id not in seen]
            written = context.registry.announced(upgrade.id, ids)
            read = functools.cache(functools.partial(_readings, context, row))
            there = _kept_in_place(context, task, read, ids) if task.in_place else _held_by(context, task.new, ids, moment)
            missing = [id for id in ids if id not in there and key(id) not in written]
            seen.update(ids if task.in_place else missing)
            seen.update(unpack_ids(row.remove_from_new))  # another program put them back, and deleted them
            elsewhere += _sort(context, task, row.id, missing, read, lost)
            looked += 1
            report("looking for lost records", looked, total)
        before = page[-1].id
    _look_elsewhere(context, upgrade, task, elsewhere, lost)
    return lost


def unserved(context: UpgradeContext, upgrades: Sequence[UpgradeRow]) -> list[Id]:
    """Return the records that batches of these upgrades moved or clients wrote, and that no collection in service holds now.

    The upgrades end together, so a later one may have moved or deleted what an earlier one moved.
    """
    numbers = [upgrade.id for upgrade in upgrades]
    found = dict[Id, None]()
    for upgrade in upgrades:
        writes, task = ClientWrites(context.registry, context.store), backfill_step.task(context, upgrade)
        written = writes.ids(task, writes.upserted(task))
        moment = context.store.moment()  # all of these were written before it, so the reads wait for the engine's clock once
        for ids in itertools.chain(_moved(context, upgrade), _pages(written)):
            missing = _not_served(context, ids, moment)
            others = {key(id) for each in numbers if missing for id in _deleted_or_open(context, each, missing)}
            found |= dict.fromkeys(id for id in missing if key(id) not in others)
            context.check_stop()
    deleted = _found_deleted(context, numbers, found)
    # Asked again: a record may have been deleted before the moment and written after it.
    return _not_served(context, [id for id in found if id not in deleted], 0)


def _found_deleted(context: UpgradeContext, upgrades: Sequence[int], ids: Iterable[Id]) -> set[Id]:
    """Return the ids that their last batch recorded as deleted: another program had put them back, and deleted them."""
    left, deleted = set(ids), set[Id]()
    for upgrade in upgrades:
        before = work_list.LAST
        while left and (page := context.registry.batches(upgrade, before=before, state=BatchState.RETIRED)):
            for row in page:
                here = left.intersection(unpack_ids(row.remove_from_new))
                deleted |= here
                left -= here.union(unpack_ids(row.remove))
            before = page[-1].id
    return deleted


def _moved(context: UpgradeContext, upgrade: UpgradeRow) -> Iterator[list[Id]]:
    after, done = 0, 0
    total, _ = context.registry.counts(upgrade.id).get(BatchState.RETIRED, (0, 0))
    while page := context.registry.batches(upgrade.id, after=after, state=BatchState.RETIRED):
        yield from map(moved_ids, page)
        after, done = page[-1].id, done + len(page)
        context.report("asking for moved records", done, total)


def _pages(ids: Sequence[Id]) -> Iterator[Sequence[Id]]:
    return (ids[start : start + PAGE] for start in range(0, len(ids), PAGE))


def _not_served(context: UpgradeContext, ids: Sequence[Id], after: Moment) -> list[Id]:
    there = _held_by(context, (leg.collection for leg in context.registry.plan(context.gallery.name).legs), ids, after)
    return [id for id in ids if id not in there]


def _deleted_or_open(context: UpgradeContext, upgrade: int, ids: Sequence[Id]) -> list[Id]:
    """Return the ids whose last write may have deleted them, or may never have been made."""
    last = context.registry.announced(upgrade, ids)
    return [id for id in ids if (write := last.get(key(id))) and (write.kind == "delete" or not write.done)]


def _held_by(context: UpgradeContext, collections: Iterable[str], ids: Sequence[Id], after: Moment = 0) -> set[Id]:
    """Return the ids that one of these collections holds, as of that moment or later. 0: as of now."""
    if not ids:
        return set()
    get = functools.partial(context.store.get, ids=ids, fields=(), strong=not after, after=after)
    return {record.id for name in set(collections) for record in get(name)}


def _kept_in_place(context: UpgradeContext, task: Task, read: Callable[[], Mapping[Id, Reading]], ids: Sequence[Id]) -> set[Id]:
    """Return the ids that still have the vector that their batch made, in place.

    If its archive file is damaged, an id that is there counts as kept.
    """
    readings = read() if ids else {}
    stored = [record for name in task.new for record in context.store.get(name, ids, vector=True)] if ids else []
    return {each.id for each in stored if each.id not in readings or readings[each.id].is_copied_to(each)}


def _sort(
    context: UpgradeContext, task: Task, batch: int, missing: Sequence[Id], read: Callable[[], Mapping[Id, Reading]], lost: Lost
) -> list[Id]:
    """Note the missing records of a batch that an old collection or the archive holds. Return the others."""
    if not missing:
        return []
    # An old collection comes first: another program may have changed a record there since it was archived.
    in_old = set() if task.in_place else _held_by(context, task.old, missing)
    readings = read() if len(in_old) < len(missing) else {}
    for place, ids in (
        (lost.in_old, [id for id in missing if id in in_old]),
        (lost.archived, [id for id in missing if id not in in_old and id in readings]),
    ):
        if ids:
            place[batch] = ids
    return [id for id in missing if id not in in_old and id not in readings]


def _look_elsewhere(context: UpgradeContext, upgrade: UpgradeRow, task: Task, ids: Sequence[Id], lost: Lost) -> None:
    """Look for records in the original that is kept, then in the source."""
    originals = [upgrade.original] if upgrade.original and upgrade.undoes is None else []
    in_original = _held_by(context, originals, ids)
    lost.in_original += [id for id in ids if id in in_original]
    rest = [id for id in ids if id not in in_original]
    items = _with_items(context, task, rest)
    lost.in_source += [id for id in rest if id in items]
    lost.for_good += [id for id in rest if id not in items]


def _with_items(context: UpgradeContext, task: Task, ids: Sequence[Id]) -> set[Id]:
    """Return the ids of which the source has an item. None if the collection takes no record without fields."""
    if not ids or context.services.source is None:
        return set()
    try:
        context.store.fields_of(task.new[0], [Record(id=ids[0])])
    except errors.Unwritable:  # a declared field must have a value, and nothing holds it
        return set()

    def known_good() -> list[Record]:
        return next(context.store.scan(task.new[0], fields=None, page=KNOWN_GOOD), [])

    with_items: set[Id] = set()
    for start in range(0, len(ids), context.services.batch):
        context.check_stop()
        part = [Record(id=id) for id in ids[start : start + context.services.batch]]
        with_items |= given(context.services.source, part, known_good=known_good)[0].keys()
    return with_items


def _readings(context: UpgradeContext, row: BatchRow) -> dict[Id, Reading]:
    files = [ArchiveFile(**file) for file in (row.archive or {}).values()]
    return {reading.record.id: reading for file in files for reading in context.services.archive.found(file)}
