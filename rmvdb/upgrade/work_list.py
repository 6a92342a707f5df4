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
from rmvdb.registry.codec import leg_from_json, unpack_ids
from rmvdb.registry.tables import BatchRow, UpgradeRow
from rmvdb.storage import files
from rmvdb.storage.archive import ArchiveFile
from rmvdb.types import BatchState, Id, Leg
from rmvdb.upgrade import plan_step
from rmvdb.upgrade.compare import hashes
from rmvdb.upgrade.context import Lead

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


def list_work(lead: Lead, upgrade: UpgradeRow) -> None:
    """Make the work list: batches in the order of their confidence, or of the archive for a roll back.

    The oldest collection goes first: its records are searched with the poorest queries, and gain most.
    """
    if upgrade.listed:
        return
    lead.registry.discard_list(upgrade.id, baton=lead.baton)  # of a listing that was interrupted
    first = lead.registry.next_priority(upgrade.id)
    work = _undone(lead, upgrade) if upgrade.undoes else _in_order(lead, upgrade)
    for batches in _chunks(work, LISTED_AT_ONCE):
        lead.check_stop()
        lead.registry.add_batches(upgrade.id, batches, first=first, baton=lead.baton)
        first += len(batches)
    lead.registry.set_upgrade(upgrade.id, listed=True, note="the work list is made", baton=lead.baton)


def _in_order(lead: Lead, upgrade: UpgradeRow) -> Iterator[tuple[list[Id], None]]:
    begun = lead.registry.listed_ids(upgrade.id)
    files.make_folder(lead.hands.folder, "home")
    counted = [(leg, lead.store.count(leg.collection)) for leg in map(leg_from_json, reversed(upgrade.plan["before"]))]
    batch = min(lead.hands.batch, max(LEAST_BATCH, sum(count for _, count in counted) // STEPS))
    for leg in (leg for leg, count in counted if count):
        for ids in _ordered(lead, upgrade, leg, begun, batch=batch):
            yield ids, None


def _ordered(lead: Lead, upgrade: UpgradeRow, leg: Leg, begun: set[Id], *, batch: int) -> Iterator[list[Id]]:
    question = Question(**upgrade.plan["question"])
    classifier = lead.hands.classifier(lead.registry.version(leg.model))
    name, order = plan_step.planner(lead).order(question, leg, classifier)
    lead.say(f"listing the records of {leg.collection} in {name} order")
    told = time.monotonic()

    def progress(done: int, total: int) -> None:
        nonlocal told
        lead.check_stop()
        lead.report(f"listing {leg.collection}", done, total)
        if time.monotonic() - told > TOLD:
            told = time.monotonic()
            far = {"collection": leg.collection, "done": done, "total": total}
            lead.registry.set_upgrade(upgrade.id, listing=far, baton=lead.baton)

    return ordered(
        lead.store,
        leg.collection,
        order,
        batch=batch,
        folder=lead.hands.folder,
        leave_out=lambda ids: begun.intersection(ids) | newer(lead, upgrade, leg.collection, ids),
        fields=[question.labels] if question.labels else [],
        progress=progress,
    )


def newer(lead: Lead, upgrade: UpgradeRow, collection: str, ids: Sequence[Id]) -> set[Id]:
    """Those of these records that a newer old collection holds, too: each is listed once, where clients are shown it."""
    before = itertools.takewhile(lambda each: each != collection, () if upgrade.lift else upgrade.old_collections)
    return {record.id for each in before for record in lead.store.get(each, ids, fields=())}


def _undone(lead: Lead, upgrade: UpgradeRow) -> Iterator[tuple[list[Id], Mapping[str, Any]]]:
    """For a roll back: what each batch moved and the file with its old vectors; each id once, the last reading first. For what
    no batch had decided to remove no file is needed: it is where it was, or another program deleted it."""
    assert upgrade.undoes is not None  # noqa: S101 (the caller looked)
    seen = lead.registry.listed_ids(upgrade.id)
    often = _often(lead, upgrade.undoes)
    for archive, moved in _moved(lead, upgrade.undoes):
        ids = [id for id in moved if id not in seen]
        seen.update(itertools.compress(ids, np.isin(hashes(ids), often)))
        if ids:
            yield ids, archive


def _often(lead: Lead, upgrade: int) -> npt.NDArray[np.uint64]:
    """Eight bytes of each id that several batches had: no others need be kept in memory to list each once."""
    found = [hashes(ids) for _, ids in _moved(lead, upgrade)]
    different, times = np.unique(np.concatenate([hashes([]), *found]), return_counts=True)
    return different[times > 1]


def _moved(lead: Lead, upgrade: int) -> Iterator[tuple[Mapping[str, Any], list[Id]]]:
    """The files with the old vectors of each batch and what it moved, the last batch first; with none what it left there."""
    before = LAST
    while page := lead.registry.batches(upgrade, before=before):
        for row in page:
            decided = row.state in (BatchState.RETIRED, BatchState.REMOVING)
            if row.archive is not None:
                removed = unpack_ids(row.remove) if decided else []
                yield row.archive, removed
                yield {}, [] if row.state == BatchState.RETIRED else _undecided(lead, row, set(removed))
        before = page[-1].id


def _undecided(lead: Lead, batch: BatchRow, removed: Set[Id]) -> list[Id]:
    """What a batch has found in the old collections and did not decide to take out of them, as far as the archive can tell; what
    it cannot comes late."""
    files = (ArchiveFile(**file) for file in (batch.archive or {}).values())
    found = {reading.record.id for file in files for reading in lead.hands.archive.found(file)}
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
