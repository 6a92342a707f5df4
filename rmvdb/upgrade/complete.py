"""After the last batch: list the records that came late, until the old collections hold nothing but quarantined ones."""

from __future__ import annotations

import itertools

from rmvdb import errors
from rmvdb.backfill.fate import too_many
from rmvdb.backfill.worker import Worker
from rmvdb.registry.codec import key
from rmvdb.registry.tables import UpgradeRow
from rmvdb.text import counted
from rmvdb.types import Id, IdType
from rmvdb.upgrade import backfill_step, keep_original, late
from rmvdb.upgrade.context import UpgradeContext

#: Pages of late records that are listed in one transaction, which reads the work list once.
PAGES_AT_ONCE = 50
#: The most rounds of late records. If records still come after them, another program writes into the old collection without end.
ROUNDS = 20


def complete(context: UpgradeContext, upgrade: UpgradeRow, worker: Worker) -> None:
    """Move late records until the old collections are empty but for quarantined ones, counted at Strong twice, one grace apart.

    A lifted copy is complete if nothing in it is still lifted.

    Raises:
        EngineError: other programs never stop writing there.
    """
    old, grace = " and ".join(upgrade.old_collections), backfill_step.task(context, upgrade).grace
    quiet, came_last = False, 0
    for _ in range(ROUNDS):
        if upgrade.original:
            keep_original.agree(context, upgrade)
        came = sum(_list_late(context, upgrade, collection) for collection in upgrade.old_collections)
        left = came > 0 or backfill_step.unfinished(context, upgrade)
        if left:
            if came:
                came_last = came
                what = "re-embedded" if upgrade.in_place else "moved"
                context.say(f"{counted(came, 'record')} came into {old} since, and will be {what}, too")
            backfill_step.backfill(context, upgrade, worker, until=1.0)
            if not worker.patient and backfill_step.unfinished(context, upgrade):
                raise errors.Stopped("paused, or held back by a limit")
        elif quiet:
            return
        else:
            what = "re-embedded" if upgrade.in_place else "empty"
            context.announce(f"{old} {'is' if len(upgrade.old_collections) == 1 else 'are'} {what}; looking again in {grace:g} s")
            _outwait_writes(context, grace)
        quiet = not left
        context.check_stop()
    raise errors.EngineError(
        f"Other programs keep writing into {old} ({counted(came_last, 'record')} the last time); stop them, then: rmvdb cutover"
    )


def settle(context: UpgradeContext, upgrade: UpgradeRow) -> None:
    """Wait until searches find every record that is in the new collections by now."""

    def report(collection: str, indexed: int, rows: int) -> None:
        context.report_or_stop(f"indexing {collection}", indexed, rows)

    backfill_step.each_batch(context, upgrade).settle(backfill_step.task(context, upgrade), report)


def _outwait_writes(context: UpgradeContext, grace: float) -> None:
    """Wait for one grace and for the writes that are open now: one may have found its record in old before it left."""
    writes = context.registry.open_writes(context.gallery.id)
    context.stop.wait(grace)
    while writes & context.registry.open_writes(context.gallery.id):
        context.check_stop()
        context.stop.wait(0.1)


def _list_late(context: UpgradeContext, upgrade: UpgradeRow, collection: str) -> int:
    """Put late records on the work list. Return how many."""
    total, pages = 0, (page for page in late.find_late(context, upgrade, collection) if page.ids)
    while some := list(itertools.islice(pages, PAGES_AT_ONCE)):
        ids = [id for page in some for id in page.ids]
        context.registry.add_late(upgrade.id, ids, batch=context.services.batch)
        for page in some:
            if page.taken_in:  # in this order: a kill between the two leaves them listed
                context.registry.forget_done(upgrade.id, list(page.taken_in), upto=max(page.taken_in.values()))
        total += len(ids)
    return total


def release(context: UpgradeContext, upgrade: UpgradeRow) -> None:
    """Take the records out of quarantine that were deleted or written since."""
    if context.registry.quarantined(upgrade.id):
        _release_deleted(context, upgrade)
        _release_written(context, upgrade)


def refuse_quarantined(context: UpgradeContext, upgrade: UpgradeRow) -> None:
    """Raise Quarantined while a record is quarantined that no client has deleted or written since."""
    release(context, upgrade)
    if aside := context.registry.quarantined(upgrade.id):
        raise errors.Quarantined(
            f"{counted(len(aside), 'record is', 'records are')} quarantined, such as {aside[0].record!r} "
            f"({aside[0].reason}); quarantined records stay findable in their old collection: "
            "rmvdb quarantine list, then retry or drop, then rmvdb cutover"
        )


def _release_deleted(context: UpgradeContext, upgrade: UpgradeRow) -> None:
    """Release quarantined records that were deleted meanwhile.

    Raises:
        RecordsMissing: more of them are gone than another program's single deletions explain.
    """
    left = _aside(context, upgrade)
    if upgrade.original:
        keep_original.mirror(context, upgrade).take_out(left, keep_original.beside(upgrade))
    for collection in upgrade.old_collections:
        there = {record.id for record in context.store.get(collection, left, fields=())}
        left = [id for id in left if id not in there]
    announced = context.registry.announced(upgrade.id, left)
    if gone := [id for id in left if key(id) not in announced]:
        what = counted(len(gone), "quarantined record is", "quarantined records are")
        sentence = f"{what} gone, such as {gone[0]!r}: no client deleted {'it' if len(gone) == 1 else 'them'}"
        if too_many(len(gone), context.registry.progress(upgrade.id).total, backfill_step.task(context, upgrade).missing):
            raise errors.RecordsMissing(f"{sentence}. If another program deleted them: rmvdb cutover --accept-missing")
        context.say(sentence)
    context.registry.release(upgrade.id, left, requeue=False)


def _release_written(context: UpgradeContext, upgrade: UpgradeRow) -> None:
    """Requeue quarantined records that a client wrote since: they are whole in the new collection, and have to leave the old."""
    written = keep_original.last_done(context, upgrade, _aside(context, upgrade))
    context.registry.release(upgrade.id, [id for id, kind in written.items() if kind == "upsert"], requeue=True)


def _aside(context: UpgradeContext, upgrade: UpgradeRow) -> list[Id]:
    numbers = context.registry.collection(upgrade.old_collections[0]).schema["id_type"] == IdType.INT64
    return [int(row.record) if numbers else row.record for row in context.registry.quarantined(upgrade.id)]
