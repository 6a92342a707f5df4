"""After the last batch: records that came late are found, until nothing but quarantined ones is left in the old collections."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from rmvdb import errors
from rmvdb.backfill.worker import Worker
from rmvdb.registry.codec import key, unpack_ids
from rmvdb.registry.tables import UpgradeRow
from rmvdb.text import counted
from rmvdb.types import BatchState, Id, IdType
from rmvdb.upgrade import backfill_step, keep_original, work_list
from rmvdb.upgrade.context import UpgradeContext
from rmvdb.upgrade.id_hashes import hashes

#: Rounds of late records after which others must be writing into the old collection without end.
ROUNDS = 20


def complete(context: UpgradeContext, upgrade: UpgradeRow, worker: Worker) -> None:
    """Until the old collections, counted at Strong twice and one grace apart, hold nothing but quarantined records; a lifted
    copy, nothing that is still lifted.

    Records that other programs put there meanwhile are found and moved; EngineError where they never stop coming.
    """
    old, grace = " and ".join(upgrade.old_collections), backfill_step.task(context, upgrade).grace
    quiet = False
    for _ in range(ROUNDS):
        if upgrade.original:
            keep_original.agree(context, upgrade)
        late = sum(_list_late(context, upgrade, collection) for collection in upgrade.old_collections)
        left = late > 0 or backfill_step.unfinished(context, upgrade)
        if left:
            if late:
                what = "re-embedded" if upgrade.in_place else "moved"
                context.say(f"{counted(late, 'record')} came into {old} meanwhile, to be {what}, too")
            backfill_step.backfill(context, upgrade, worker, until=1.0)
            if not worker.patient and context.registry.upgrade(upgrade.id).paused:
                raise errors.Stopped("paused")
        elif quiet:
            return
        else:
            what = "re-embedded" if upgrade.in_place else "empty"
            context.say(f"{old} {'is' if len(upgrade.old_collections) == 1 else 'are'} {what}; looking again in {grace:g} s")
            _outwait_writes(context, grace)
        quiet = not left
        context.check_stop()
    raise errors.EngineError(
        f"Other programs keep writing into {old} ({counted(late, 'record')} since the last look); stop them, then: rmvdb cutover"
    )


def settle(context: UpgradeContext, upgrade: UpgradeRow) -> None:
    """Until searches find what clients wrote, too: every record that is in the new collections by now."""

    def report(collection: str, indexed: int, rows: int) -> None:
        context.report_or_stop(f"indexing {collection}", indexed, rows)

    backfill_step.each_batch(context, upgrade).settle(backfill_step.task(context, upgrade), report)


def _outwait_writes(context: UpgradeContext, grace: float) -> None:
    """One grace, and until the writes that are open now have ended: one may have found its record in old before it left."""
    writes = context.registry.open_writes(context.gallery.id)
    context.stop.wait(grace)
    while writes & context.registry.open_writes(context.gallery.id):
        context.check_stop()
        context.stop.wait(0.1)


def _list_late(context: UpgradeContext, upgrade: UpgradeRow, collection: str) -> int:
    aside = {row.record for row in context.registry.quarantined(upgrade.id)}
    remade = _retired(context, upgrade) if upgrade.in_place else None
    late = 0
    for page in context.store.scan(collection, page=context.services.batch):
        context.check_stop()
        left = [record.id for record in page if key(record.id) not in aside]
        settled = (
            work_list.newer(context, upgrade, collection, left) if remade is None else _remade(context, upgrade, left, remade)
        )
        taken_in = keep_original.taken_in_again(context, upgrade, left) if upgrade.in_place else {}
        if ids := [id for id in left if id not in settled or id in taken_in]:
            context.registry.add_late(upgrade.id, ids)
        if taken_in:
            context.registry.forget_done(upgrade.id, list(taken_in), upto=max(taken_in.values()))
        late += len(ids)
    return late


def _retired(context: UpgradeContext, upgrade: UpgradeRow) -> npt.NDArray[np.uint64]:
    """Eight bytes of each id that a batch has done with."""
    found, after = [np.empty(0, np.uint64)], 0
    while page := context.registry.batches(upgrade.id, after=after, state=BatchState.RETIRED):
        found += [hashes(unpack_ids(row.remove)) for row in page]
        after = page[-1].id
    return np.concatenate(found)


def _remade(context: UpgradeContext, upgrade: UpgradeRow, ids: Sequence[Id], retired: npt.NDArray[np.uint64]) -> set[Id]:
    """Those of these records that have the new model's own vector, and not one that was lifted."""
    by_batches = {id for id, done in zip(ids, np.isin(hashes(ids), retired), strict=True) if done}
    return by_batches | keep_original.last_done(context, upgrade, ids).keys()


def refuse_quarantined(context: UpgradeContext, upgrade: UpgradeRow) -> None:
    """Quarantined while a record is quarantined that nobody has deleted or written since."""
    if context.registry.quarantined(upgrade.id):
        _release_deleted(context, upgrade)
        _release_written(context, upgrade)
    if aside := context.registry.quarantined(upgrade.id):
        raise errors.Quarantined(
            f"{counted(len(aside), 'record is', 'records are')} quarantined, such as {aside[0].record!r} "
            f"({aside[0].reason}); what is quarantined stays findable in its old collection: "
            "rmvdb quarantine list, then retry or drop, then rmvdb cutover"
        )


def _release_deleted(context: UpgradeContext, upgrade: UpgradeRow) -> None:
    """Whoever deleted a quarantined record meanwhile has settled what was to become of it."""
    if upgrade.original:
        keep_original.agree(context, upgrade)
    left = set(_aside(context, upgrade))
    for collection in upgrade.old_collections:
        left -= {record.id for record in context.store.get(collection, list(left), fields=())}
    context.registry.release(upgrade.id, list(left), requeue=False)


def _release_written(context: UpgradeContext, upgrade: UpgradeRow) -> None:
    """What a client wrote since is in the new collection as it should be, and has only to leave the old ones."""
    written = keep_original.last_done(context, upgrade, _aside(context, upgrade))
    context.registry.release(upgrade.id, [id for id, kind in written.items() if kind == "upsert"], requeue=True)


def _aside(context: UpgradeContext, upgrade: UpgradeRow) -> list[Id]:
    numbers = context.registry.collection(upgrade.old_collections[0]).schema["id_type"] == IdType.INT64
    return [int(row.record) if numbers else row.record for row in context.registry.quarantined(upgrade.id)]
