"""Repair a gallery after its registry or its engine has gone back.

Records that were moved and are lost since are put back from the place that still holds them. Records whose write the registry
does not know stay as they are, and count as written by a client.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from rmvdb import errors
from rmvdb.backfill.worker import Worker
from rmvdb.canonical.vectors import unrankable
from rmvdb.items.digest import item_digest
from rmvdb.items.sources import given
from rmvdb.registry.codec import schema_from_json
from rmvdb.registry.intents import CONDUCTOR
from rmvdb.registry.tables import UpgradeRow
from rmvdb.serving import sketch
from rmvdb.serving.announced_writes import Writes
from rmvdb.serving.writes import WRITE_BATCH
from rmvdb.text import counted
from rmvdb.types import Id, Item, Leg, Phase, Record, ServingPlan, Vectors
from rmvdb.upgrade import backfill_step, keep_original, verify
from rmvdb.upgrade.compare import UnexplainedRecords
from rmvdb.upgrade.context import UpgradeContext
from rmvdb.upgrade.lost import Lost, count_of, find_moved_and_lost
from rmvdb.upgrade.status import quarantine_way

#: Ids that a sentence names.
IDS_SHOWN = 20


def repair(context: UpgradeContext, upgrade: UpgradeRow, lost: Lost, worker: Worker) -> None:
    """Put lost records back, and count unexplained ones as a client's writes or deletions from now on.

    A record that an old collection or the archive holds goes through a new batch.
    """
    context.owner.settle(context.gallery.name)
    _explain(context, upgrade, lost.unexplained)
    if upgrade.undoes is None:
        _move_again(context, upgrade, [id for ids in lost.in_old.values() for id in ids])
    elif lost.in_old:  # the batches before had files, which hold their vectors
        context.registry.put_back(upgrade.id, lost.in_old)
    if lost.archived:
        context.registry.put_back(upgrade.id, lost.archived)
    if lost.in_original:  # into the copy that the batches read
        keep_original.mirror(context, upgrade).take_in(lost.in_original, keep_original.beside(upgrade))
        _move_again(context, upgrade, lost.in_original)
    places = {
        "the old collection": count_of(lost.in_old),
        "the archive": count_of(lost.archived),
        "the original": len(lost.in_original),
    }
    for place, number in places.items():
        if number:
            context.say(f"{counted(number, 'record was', 'records were')} moved and lost since; putting back from {place}")
    if lost.late:
        _move_again(context, upgrade, lost.late)
        late = counted(len(lost.late), "record")
        context.say(f"{late} came into {' and '.join(upgrade.old_collections)} since the cut-over, and will be moved, too")
    if any(places.values()) or lost.late:
        backfill_step.backfill(context, upgrade, worker, until=1.0)
        context.check_stop()  # a worker that is stopped returns
        if aside := context.registry.quarantined(upgrade.id):
            are = counted(len(aside), "record is", "records are")
            context.say(f"{are} quarantined, such as {aside[0].record!r} ({aside[0].reason}); {quarantine_way(upgrade)}")
    if lost.in_source:
        _write_items(context, upgrade, lost.in_source)


def missing_collections(context: UpgradeContext, upgrade: UpgradeRow) -> list[str]:
    """Return the collections that the upgrade fills, empties or serves, and that do not exist: another program dropped them, or
    the engine went back.

    Raises:
        WrongPhase: nothing is moved yet.
    """
    if upgrade.undoes is None:
        verify.refuse_planned(upgrade)
    served = [leg.collection for leg in context.registry.plan(context.gallery.name).write_targets]
    emptied = () if upgrade.phase == Phase.CLEANING_UP else upgrade.old_collections
    needed = dict.fromkeys((*backfill_step.task(context, upgrade).new, *served, *emptied))
    return [name for name in needed if not context.store.exists(name)]


def make_again(context: UpgradeContext, upgrade: UpgradeRow) -> None:
    """Make the missing collections again, as they were registered, without records."""
    context.owner.expect(context.gallery.name)
    known = [row.name for row in context.registry.collections(context.gallery.id)]
    there = next((name for name in known if context.store.exists(name)), None)
    for name in missing_collections(context, upgrade):
        context.say(f"making {name} again, without records")
        context.store.create(schema_from_json(context.registry.collection(name).schema), context.services.index, like=there)
    context.owner.settle(context.gallery.name)


def put_back_late(context: UpgradeContext, upgrade: UpgradeRow, worker: Worker) -> None:
    """Put back the records that a delayed call removed again, before a roll back ends."""
    if upgrade.undoes is not None:
        repair(context, upgrade, Lost(archived=find_moved_and_lost(context, upgrade).archived), worker)


def shown(ids: Sequence[Id]) -> str:
    """Return the first of these ids, as a sentence names them."""
    return ", ".join(map(repr, ids[:IDS_SHOWN])) + (" …" if len(ids) > IDS_SHOWN else "")


def _move_again(context: UpgradeContext, upgrade: UpgradeRow, ids: Sequence[Id]) -> None:
    """List records for another move, and try quarantined ones among them again."""
    if ids:
        context.registry.release(upgrade.id, ids, requeue=True)
        context.registry.add_late(upgrade.id, ids, batch=context.services.batch)


def _explain(context: UpgradeContext, upgrade: UpgradeRow, unexplained: UnexplainedRecords) -> None:
    def note(ids: Sequence[Id], kind: str = "upsert") -> list[Id]:
        return context.registry.add_written(upgrade.id, ids, kind=kind, upto=unexplained.upto) if ids else []

    if unknown := note(unexplained.unknown):
        few = counted(len(unknown), "record without a known write is", "records without a known write are")
        context.say(f"{few} kept")
    if changed := note(unexplained.changed):
        differing = counted(len(changed), "record differs", "records differ")
        context.say(f"{differing} from what rmvdb last wrote, and the difference is kept: {shown(changed)}")
    if absent := note(unexplained.absent, kind="delete"):
        few = counted(len(absent), "record that rmvdb wrote is", "records that rmvdb wrote are")
        context.say(f"{few} in no collection, and taken for deleted: {shown(absent)}")


def _write_items(context: UpgradeContext, upgrade: UpgradeRow, ids: Sequence[Id]) -> None:
    """Write records again from the source's items, as a client would, without fields."""
    written: list[Id] = []
    size = min(context.services.batch, WRITE_BATCH)
    waiting = [list(ids[at : at + size]) for at in range(0, len(ids), size)]
    while waiting:
        context.check_stop()
        part = waiting.pop(0)
        try:
            written += _write_page(context, upgrade, part)
        except errors.ItemError as exc:
            if len(part) == 1:
                context.say(f"record {part[0]!r} is still lost: {exc}")
            else:
                waiting[:0] = [part[: len(part) // 2], part[len(part) // 2 :]]
    if written:
        what = counted(len(written), "record was", "records were")
        context.say(f"{what} restored from the source, without the fields that nothing holds any more: {shown(written)}")


def _write_page(context: UpgradeContext, upgrade: UpgradeRow, ids: Sequence[Id]) -> list[Id]:
    """Write a page of records that are still lost once no other writer holds them. Return their ids.

    Raises:
        ItemError: one of them cannot be embedded.
    """
    source = context.services.source
    items = given(source, [Record(id=id) for id in ids])[0] if source else {}
    ids = list(items)
    if not ids:
        return []
    digests = {id: item_digest(item) for id, item in items.items()}  # before embedding: the item may change
    embedded: dict[str, Vectors] = {}
    still: list[Id] = []

    def still_lost(plan: ServingPlan) -> list[Id]:
        there = {each.id for leg in plan.write_targets for each in context.store.get(leg.collection, ids, fields=())}
        done = keep_original.last_done(context, upgrade, ids)
        still[:] = [id for id in ids if id not in there and done.get(id) != "delete"]
        return still

    # The slow part: embed before other writers wait for this one.
    for leg in context.registry.plan(context.gallery.name).write_targets:
        _rows(context, leg, items, embedded)
    name, sketches = f"{CONDUCTOR}{upgrade.id}:{uuid.uuid4().hex[:8]}", dict[Id, bytes]()
    writes = Writes(context.gallery.name, registry=context.registry, name=name, engine_timeout=context.services.engine_timeout)
    with writes.announced("upsert", ids, only=still_lost, sketches=sketches) as (plan, permit):
        lost = set(still)
        for leg in (*plan.mirrors, plan.legs[0]):
            rows = [row for row in _rows(context, leg, items, embedded) if row.id in lost]
            if rows:
                context.store.upsert(leg.collection, rows, permit=permit)
        sketches |= {row.id: sketch.of(row.vector, item=digests[row.id]) for row in rows if row.vector is not None}
    return still


def _rows(context: UpgradeContext, leg: Leg, items: dict[Id, Item], embedded: dict[str, Vectors]) -> list[Record]:
    """Return records without fields for one leg."""
    vectors = context.services.loaded_models.stored(leg, list(items.values()), embedded)
    for at, why in unrankable(vectors, leg.metric).items():
        raise errors.ItemError(f"its vector for {leg.collection} {why}; correct the item of record {list(items)[at]!r}")
    return [Record(id=id, vector=vector) for id, vector in zip(items, vectors, strict=True)]
