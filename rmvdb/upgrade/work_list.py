"""The work list: which records are moved, in batches, and in which order."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import numpy as np
import numpy.typing as npt

from rmvdb.planning.orders import ordered
from rmvdb.planning.plan import Question
from rmvdb.registry.codec import unpack_ids
from rmvdb.registry.tables import BatchRow, UpgradeRow
from rmvdb.registry.upgrade_plan import EpochName
from rmvdb.storage import files
from rmvdb.storage.archive import ArchiveFile
from rmvdb.types import BatchState, Id, Leg
from rmvdb.upgrade import plan_step
from rmvdb.upgrade.context import UpgradeContext
from rmvdb.upgrade.id_hashes import hashes

#: Batches put on the work list in one transaction.
LISTED_AT_ONCE = 50
#: Batches that a gallery is split into at least: they move as a whole, so quality rises, and `--until` is met, in such steps.
STEPS = 50
#: Unless batches would be smaller than this: each costs some 25 ms on Milvus Lite, whatever is in it.
LEAST_BATCH = 20
#: Seconds between two notes of how far a list is.
TOLD = 1.0
#: No batch has such a number.
LAST = 2**62


def list_work(context: UpgradeContext, upgrade: UpgradeRow) -> None:
    """Make the work list: batches in the order of their confidence, or of the archive for a roll back.

    The oldest collection goes first: its records are searched with the poorest queries, and gain most.
    """
    if upgrade.listed:
        return
    context.registry.discard_list(upgrade.id, leader_token=context.leader_token)  # of a listing that was interrupted
    first = context.registry.next_priority(upgrade.id)
    work = _undone(context, upgrade) if upgrade.undoes else _in_order(context, upgrade)
    for batches in _chunks(work, LISTED_AT_ONCE):
        context.check_stop()
        context.registry.add_batches(upgrade.id, batches, first=first, leader_token=context.leader_token)
        first += len(batches)
    context.registry.set_upgrade(upgrade.id, listed=True, note="the work list is made", leader_token=context.leader_token)


def _in_order(context: UpgradeContext, upgrade: UpgradeRow) -> Iterator[tuple[list[Id], None]]:
    begun = context.registry.listed_ids(upgrade.id)
    files.make_folder(context.services.folder, "home")
    counted = [(leg, context.store.count(leg.collection)) for leg in reversed(upgrade.plan.legs(EpochName.BEFORE))]
    batch = min(context.services.batch, max(LEAST_BATCH, sum(count for _, count in counted) // STEPS))
    for leg in (leg for leg, count in counted if count):
        for ids in _ordered(context, upgrade, leg, begun, batch=batch):
            yield ids, None


def _ordered(context: UpgradeContext, upgrade: UpgradeRow, leg: Leg, begun: set[Id], *, batch: int) -> Iterator[list[Id]]:
    question = Question(**upgrade.plan.question)
    classifier = context.services.classifier(context.registry.version(leg.model))
    name, order = plan_step.planner(context).order(question, leg, classifier)
    context.say(f"listing the records of {leg.collection} in {name} order")
    told = time.monotonic()

    def progress(done: int, total: int) -> None:
        nonlocal told
        context.check_stop()
        context.report(f"listing {leg.collection}", done, total)
        if time.monotonic() - told > TOLD:
            told = time.monotonic()
            far = {"collection": leg.collection, "done": done, "total": total}
            context.registry.set_upgrade(upgrade.id, listing=far, leader_token=context.leader_token)

    return ordered(
        context.store,
        leg.collection,
        order,
        batch=batch,
        folder=context.services.folder,
        leave_out=lambda ids: begun.intersection(ids) | newer(context, upgrade, leg.collection, ids),
        fields=[question.labels] if question.labels else [],
        progress=progress,
    )


def newer(context: UpgradeContext, upgrade: UpgradeRow, collection: str, ids: Sequence[Id]) -> set[Id]:
    """Those of these records that a newer old collection holds, too: each is listed once, where clients are shown it."""
    before = itertools.takewhile(lambda each: each != collection, () if upgrade.lift else upgrade.old_collections)
    return {record.id for each in before for record in context.store.get(each, ids, fields=())}


def _undone(context: UpgradeContext, upgrade: UpgradeRow) -> Iterator[tuple[list[Id], Mapping[str, Any]]]:
    """For a roll back: what each batch moved and the file with its old vectors; each id once, the last reading first. For what
    no batch had decided to remove no file is needed: it is where it was, or another program deleted it."""
    assert upgrade.undoes is not None  # noqa: S101 (the caller looked)
    seen = context.registry.listed_ids(upgrade.id)
    often = _often(context, upgrade.undoes)
    for archive, moved in _moved(context, upgrade.undoes):
        ids = [id for id in moved if id not in seen]
        seen.update(itertools.compress(ids, np.isin(hashes(ids), often)))
        if ids:
            yield ids, archive


def _often(context: UpgradeContext, upgrade: int) -> npt.NDArray[np.uint64]:
    """Eight bytes of each id that several batches had: no others need be kept in memory to list each once."""
    found = [hashes(ids) for _, ids in _moved(context, upgrade)]
    different, times = np.unique(np.concatenate([hashes([]), *found]), return_counts=True)
    return different[times > 1]


def _moved(context: UpgradeContext, upgrade: int) -> Iterator[tuple[Mapping[str, Any], list[Id]]]:
    """The files with the old vectors of each batch and what it moved, the last batch first; with none what it left there."""
    before = LAST
    while page := context.registry.batches(upgrade, before=before):
        for row in page:
            decided = row.state in (BatchState.RETIRED, BatchState.REMOVING)
            if row.archive is not None:
                removed = unpack_ids(row.remove) if decided else []
                yield row.archive, removed
                yield {}, [] if row.state == BatchState.RETIRED else _undecided(context, row, set(removed))
        before = page[-1].id


def _undecided(context: UpgradeContext, batch: BatchRow, removed: Set[Id]) -> list[Id]:
    """What a batch has found in the old collections and did not decide to take out of them, as far as the archive can tell; what
    it cannot comes late."""
    files = (ArchiveFile(**file) for file in (batch.archive or {}).values())
    found = {reading.record.id for file in files for reading in context.services.archive.found(file)}
    return [id for id in unpack_ids(batch.ids) if id in found and id not in removed]


def _chunks(work: Iterable[Any], size: int) -> Iterator[list[Any]]:
    chunk: list[Any] = []
    for each in work:
        chunk.append(each)
        if len(chunk) == size:
            yield chunk
            chunk = []
    if chunk:
        yield chunk
