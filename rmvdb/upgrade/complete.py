"""After the last batch: list the records that came late, until the old collections hold nothing but quarantined ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

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
from rmvdb.upgrade.id_hashes import hashes, outside

#: The most rounds of late records. If records still come after them, another program writes into the old collection without end.
ROUNDS = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class LateRecords:
    """The records of a page of an old collection that no batch has moved."""

    ids: list[Id]
    #: The ids that came back after a deletion, with that deletion's intent, which is still recorded.
    taken_in: Mapping[Id, int] = field(default_factory=dict)


def complete(context: UpgradeContext, upgrade: UpgradeRow, worker: Worker) -> None:
    """Move late records until the old collections are empty but for quarantined ones, counted at Strong twice, one grace apart.

    A lifted copy is complete if nothing in it is still lifted.

    Raises:
        EngineError: other programs never stop writing there.
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
                context.say(f"{counted(late, 'record')} came into {old} since, and will be {what}, too")
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
    total = 0
    for late in find_late(context, upgrade, collection):
        if late.ids:
            context.registry.add_late(upgrade.id, late.ids)
        if late.taken_in:  # in this order: a kill between the two leaves them listed
            context.registry.forget_done(upgrade.id, list(late.taken_in), upto=max(late.taken_in.values()))
        total += len(late.ids)
    return total


def find_late(context: UpgradeContext, upgrade: UpgradeRow, collection: str) -> Iterator[LateRecords]:
    """Find the late records of an old collection, a page at a time. A quarantined record is not late."""
    aside = {row.record for row in context.registry.quarantined(upgrade.id)}
    retired = _retired(context, upgrade) if upgrade.in_place else None
    for page in context.store.scan(collection, page=context.services.batch):
        context.check_stop()
        ids = [record.id for record in page if key(record.id) not in aside]
        if retired is None:
            yield _late_to_move(context, upgrade, collection, ids)
        else:
            yield _late_in_place(context, upgrade, ids, retired)


def _late_to_move(context: UpgradeContext, upgrade: UpgradeRow, collection: str, ids: Sequence[Id]) -> LateRecords:
    """Return the late records of a page: all, except those that a newer old collection holds, too. They are listed there."""
    newer = work_list.newer(context, upgrade, collection, ids)
    return LateRecords(ids=[id for id in ids if id not in newer])


def _late_in_place(
    context: UpgradeContext, upgrade: UpgradeRow, ids: Sequence[Id], retired: npt.NDArray[np.uint64]
) -> LateRecords:
    """Return the late records of a page in place: those that are still lifted. No batch and no client gave them the new model's
    own vector."""
    lifted = set(outside(retired, ids)) - keep_original.last_done(context, upgrade, ids).keys()
    taken_in = keep_original.taken_in_again(context, upgrade, ids)
    return LateRecords(ids=[id for id in ids if id in lifted or id in taken_in], taken_in=taken_in)


def _retired(context: UpgradeContext, upgrade: UpgradeRow) -> npt.NDArray[np.uint64]:
    """Return hashes of the ids that batches are done with."""
    parts, after = [np.empty(0, np.uint64)], 0
    while page := context.registry.batches(upgrade.id, after=after, state=BatchState.RETIRED):
        parts += [hashes(unpack_ids(row.remove)) for row in page]
        after = page[-1].id
    return np.concatenate(parts)


def refuse_quarantined(context: UpgradeContext, upgrade: UpgradeRow) -> None:
    """Raise Quarantined while a record is quarantined that no client has deleted or written since."""
    if context.registry.quarantined(upgrade.id):
        _release_deleted(context, upgrade)
        _release_written(context, upgrade)
    if aside := context.registry.quarantined(upgrade.id):
        raise errors.Quarantined(
            f"{counted(len(aside), 'record is', 'records are')} quarantined, such as {aside[0].record!r} "
            f"({aside[0].reason}); quarantined records stay findable in their old collection: "
            "rmvdb quarantine list, then retry or drop, then rmvdb cutover"
        )


def _release_deleted(context: UpgradeContext, upgrade: UpgradeRow) -> None:
    """Release quarantined records that were deleted meanwhile."""
    if upgrade.original:
        keep_original.agree(context, upgrade)
    left = set(_aside(context, upgrade))
    for collection in upgrade.old_collections:
        left -= {record.id for record in context.store.get(collection, list(left), fields=())}
    context.registry.release(upgrade.id, list(left), requeue=False)


def _release_written(context: UpgradeContext, upgrade: UpgradeRow) -> None:
    """Requeue quarantined records that a client wrote since: they are whole in the new collection, and have to leave the old."""
    written = keep_original.last_done(context, upgrade, _aside(context, upgrade))
    context.registry.release(upgrade.id, [id for id, kind in written.items() if kind == "upsert"], requeue=True)


def _aside(context: UpgradeContext, upgrade: UpgradeRow) -> list[Id]:
    numbers = context.registry.collection(upgrade.old_collections[0]).schema["id_type"] == IdType.INT64
    return [int(row.record) if numbers else row.record for row in context.registry.quarantined(upgrade.id)]
