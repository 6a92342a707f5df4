"""Where registry and engine are not of one moment: records that were moved and are lost since are put back from the archive, and
those of whose write the registry knows nothing are taken in as they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rmvdb.backfill.task import Task
from rmvdb.backfill.worker import Worker
from rmvdb.registry.codec import key, unpack_ids
from rmvdb.registry.tables import BatchRow, UpgradeRow
from rmvdb.storage.archive import ArchiveFile, Reading
from rmvdb.text import counted
from rmvdb.types import BatchState, Id
from rmvdb.upgrade import backfill_step, verify, work_list
from rmvdb.upgrade.context import UpgradeContext


@dataclass(kw_only=True, slots=True)
class Lost:
    """What retired batches moved and no collection holds any more."""

    #: By batch, what the archive has of it.
    archived: dict[int, list[Id]] = field(default_factory=dict)
    #: What nothing is left of.
    for_good: list[Id] = field(default_factory=list)
    #: What the new collection holds, and no batch moved and no write that the registry knows of put there.
    unknown: list[Id] = field(default_factory=list)
    #: What it holds otherwise than the last known write left it, and of which such a write is known and nothing is there.
    changed: list[Id] = field(default_factory=list)
    absent: list[Id] = field(default_factory=list)

    @property
    def count(self) -> int:
        """How many can be put back."""
        return sum(map(len, self.archived.values()))


def lost(context: UpgradeContext, upgrade: UpgradeRow) -> Lost:
    """Find what the new collections have lost of what was moved into them, and where they differ from the known writes."""
    found, check = _moved_and_lost(context, upgrade), verify.check_of(context)
    task = backfill_step.task(context, upgrade)
    for strangers in check.unknown(task):
        found.unknown += strangers
        context.check_stop()
    found.changed, found.absent = check.changed(task)
    return found


def _moved_and_lost(context: UpgradeContext, upgrade: UpgradeRow) -> Lost:
    """What was moved and is lost since, but for what a client has written or deleted."""
    task, found, seen = backfill_step.task(context, upgrade), Lost(), set[Id]()
    before = work_list.LAST
    while page := context.registry.batches(upgrade.id, before=before, state=BatchState.RETIRED):
        for row in page:  # the last batch that moved a record has its last reading
            ids = [id for id in _moved(row) if id not in seen]
            written = context.registry.announced(upgrade.id, ids)
            there = _remade(context, task, row, ids) if task.in_place else _there(context, task, ids)
            missing = [id for id in ids if id not in there and key(id) not in written]
            seen.update(missing if not task.in_place else ids)
            _sort(context, row, missing, found)
            context.check_stop()
        before = page[-1].id
    return found


def repair(context: UpgradeContext, upgrade: UpgradeRow, found: Lost, worker: Worker) -> None:
    """Put back what was found, as batches of its own; the rest counts as written, or deleted, by a client from now on."""
    if found.unknown:
        context.registry.add_written(upgrade.id, found.unknown)
        what = counted(len(found.unknown), "record of which no write was known is", "records of which no write was known are")
        context.say(f"{what} kept")
    if found.changed:
        context.registry.add_written(upgrade.id, found.changed)
        kept = counted(len(found.changed), "record")
        context.say(f"{kept} kept as found, which the last known write left otherwise: {_shown(found.changed)}")
    if found.absent:
        context.registry.add_written(upgrade.id, found.absent, kind="delete")
        context.say(f"{counted(len(found.absent), 'record')} of which a write is known taken for deleted: {_shown(found.absent)}")
    for batch, ids in found.archived.items():
        context.registry.put_back(upgrade.id, ids, of=batch)
    if found.archived:
        context.say(f"{counted(found.count, 'record was', 'records were')} moved and lost since; putting back from the archive")
        backfill_step.backfill(context, upgrade, worker, until=1.0)


def put_back_late(context: UpgradeContext, upgrade: UpgradeRow, worker: Worker) -> None:
    """Before a roll back ends: what a call that was held up has removed from where it was put back, or left."""
    if upgrade.undoes is not None:
        repair(context, upgrade, _moved_and_lost(context, upgrade), worker)


def _shown(ids: Sequence[Id]) -> str:
    return ", ".join(map(repr, ids[:20])) + (" …" if len(ids) > 20 else "")


def _there(context: UpgradeContext, task: Task, ids: Sequence[Id]) -> set[Id]:
    return {record.id for name in {*task.new, *task.old} for record in context.store.get(name, ids, fields=())}


def _remade(context: UpgradeContext, task: Task, row: BatchRow, ids: Sequence[Id]) -> set[Id]:
    """Those of these records that have, in place, the vector which their batch made of them."""
    wanted = set(ids)
    made = {each.record.id: each for each in _readings(context, row) if each.record.id in wanted}
    stored = [record for name in task.new for record in context.store.get(name, list(made), vector=True)]
    return {record.id for record in stored if made[record.id].is_copied_to(record)}


def _moved(row: BatchRow) -> list[Id]:
    """What a batch moved, or a roll back left where the upgrade had been about to remove it."""
    left = set() if row.origin else set(unpack_ids(row.left))
    return [id for id in unpack_ids(row.remove) if id not in left]


def _sort(context: UpgradeContext, row: BatchRow, missing: list[Id], found: Lost) -> None:
    if not missing:
        return
    archived = {reading.record.id for reading in _readings(context, row)}
    if ids := [id for id in missing if id in archived]:
        found.archived[row.id] = ids
    found.for_good += [id for id in missing if id not in archived]


def _readings(context: UpgradeContext, row: BatchRow) -> list[Reading]:
    files = [ArchiveFile(**file) for file in (row.archive or {}).values()]
    return [reading for file in files for reading in context.services.archive.found(file)]
