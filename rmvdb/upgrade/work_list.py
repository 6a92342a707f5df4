"""The work list: the batches of records to move, in their order."""

from __future__ import annotations

import functools
import itertools
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from rmvdb.planning.orders.table import ORDERS
from rmvdb.planning.question import Question
from rmvdb.registry.codec import key, unpack_ids
from rmvdb.registry.tables import BatchRow, UpgradeRow
from rmvdb.registry.upgrade_plan import EpochName
from rmvdb.storage import files
from rmvdb.storage.archive import ArchiveFile
from rmvdb.types import BatchState, Id, Leg
from rmvdb.upgrade import plan_step
from rmvdb.upgrade.context import UpgradeContext
from rmvdb.upgrade.id_hashes import hashes
from rmvdb.upgrade.sorted_ids import batches_in_order

#: Batches that are added to the work list in one transaction.
BATCHES_AT_ONCE = 50
#: The fewest batches of a gallery. A batch moves as a whole, so quality rises, and `--until` is met, in such steps.
STEPS = 50
#: The smallest batch, even if that makes fewer steps. A batch costs some 25 ms on Milvus Lite, however small it is.
LEAST_BATCH = 20
#: Seconds between two notes of the progress of a list.
NOTED_EVERY = 1.0
#: A number larger than any batch's.
LAST = 2**62


@contextmanager
def made_beside(context: UpgradeContext, upgrade: UpgradeRow) -> Iterator[Callable[[], bool]]:
    """Make the work list while the block works on its batches.

    Yield a function that returns whether the list still grows. It raises the error that ended the listing. An interrupted list is
    made again from the records that the old collections still hold. A roll back, and a lifted copy, leave the records where they
    are, so their list is made before the work begins.
    """
    if upgrade.listed or upgrade.undoes is not None or upgrade.in_place:
        list_work(context, upgrade)
        yield lambda: False
        return
    given_up = threading.Event()
    with ThreadPoolExecutor(1, thread_name_prefix="rmvdb-list") as pool:
        listing = pool.submit(list_work, context, upgrade, given_up)

        def grows() -> bool:
            return not listing.done() or listing.result() is not None

        try:
            yield grows
            listing.result()
        finally:
            given_up.set()


def list_work(context: UpgradeContext, upgrade: UpgradeRow, given_up: threading.Event | None = None) -> None:
    """Make the work list: batches in order of confidence, or in the archive's order for a roll back.

    The oldest collection comes first: its records are searched with the poorest queries, and gain most. Set `given_up` to end it.
    """
    if upgrade.listed:
        return

    check_stop = functools.partial(context.check_stop, given_up)
    context.registry.discard_list(upgrade.id, leader_token=context.leader_token)  # of an interrupted listing
    first = context.registry.next_priority(upgrade.id)
    with closing(_undone(context, upgrade) if upgrade.undoes else _in_order(context, upgrade, check_stop)) as work:
        for batches in _chunks(work, BATCHES_AT_ONCE):
            check_stop()
            context.registry.add_batches(upgrade.id, batches, first=first, leader_token=context.leader_token)
            first += len(batches)
    context.registry.set_upgrade(upgrade.id, listed=True, note="the work list is made", leader_token=context.leader_token)


def _in_order(context: UpgradeContext, upgrade: UpgradeRow, check_stop: Callable[[], None]) -> Generator[tuple[list[Id], None]]:
    begun = context.registry.listed_ids(upgrade.id)
    aside = {row.record for row in context.registry.quarantined(upgrade.id)}
    files.make_folder(context.services.folder, "home")
    counted = [(leg, context.store.count(leg.collection)) for leg in reversed(upgrade.plan.legs(EpochName.BEFORE))]
    batch = min(context.services.batch, max(LEAST_BATCH, sum(count for _, count in counted) // STEPS))
    for leg in (leg for leg, count in counted if count):

        def leave_out(ids: Sequence[Id], collection: str = leg.collection) -> set[Id]:
            known = begun.intersection(ids) | {id for id in ids if aside and key(id) in aside}
            return known | newer(context, upgrade, collection, ids)

        for ids in _ordered(context, upgrade, leg, leave_out, check_stop, batch=batch):
            yield ids, None


def _ordered(
    context: UpgradeContext,
    upgrade: UpgradeRow,
    leg: Leg,
    leave_out: Callable[[Sequence[Id]], set[Id]],
    check_stop: Callable[[], None],
    *,
    batch: int,
) -> Iterator[list[Id]]:
    question = Question.of_upgrade(upgrade.plan.question)
    classifier = context.services.classifier(context.registry.version(leg.model))
    name = upgrade.order.split(", ")[0]
    reads = name not in ORDERS or ORDERS[name].reads_records  # this rmvdb replaces an order that only an earlier one knows
    order = plan_step.planner(context).order(question, leg, classifier, name, check_stop)
    context.announce(f"listing the records of {leg.collection} in {name} order")
    noted = time.monotonic()

    def progress(done: int, total: int) -> None:
        nonlocal noted
        check_stop()
        context.report(f"listing {leg.collection}", done, total)
        if time.monotonic() - noted > NOTED_EVERY:
            noted = time.monotonic()
            far = {"collection": leg.collection, "done": done, "total": total}
            context.registry.set_upgrade(upgrade.id, listing=far, leader_token=context.leader_token)

    return batches_in_order(
        context.store,
        leg.collection,
        order,
        batch=batch,
        folder=context.services.folder,
        leave_out=leave_out,
        fields=[question.labels] if question.labels and reads else [],
        vector=reads,
        whole=reads,  # an order of ids alone has no preference
        progress=progress,
    )


def newer(context: UpgradeContext, upgrade: UpgradeRow, collection: str, ids: Sequence[Id]) -> set[Id]:
    """Return the ids that a newer old collection also holds. A record is listed once, from the collection that clients see."""
    before = itertools.takewhile(lambda each: each != collection, () if upgrade.lift else upgrade.old_collections)
    return {record.id for each in before for record in context.store.get(each, ids, fields=())}


def _undone(context: UpgradeContext, upgrade: UpgradeRow) -> Generator[tuple[list[Id], Mapping[str, Any]]]:
    """Return, for a roll back, the ids that each batch moved, with the files of their old vectors. Each id comes once, by its
    last batch.

    An id that no batch decided to remove needs no file: its record is in its place, or another program deleted it.
    """
    assert upgrade.undoes is not None  # noqa: S101 (the caller looked)
    seen = context.registry.listed_ids(upgrade.id)
    often = _often(context, upgrade.undoes)
    for archive, moved in _moved(context, upgrade.undoes):
        ids = [id for id in moved if id not in seen]
        seen.update(itertools.compress(ids, np.isin(hashes(ids), often)))
        if ids:
            yield ids, archive


def _often(context: UpgradeContext, upgrade: int) -> npt.NDArray[np.uint64]:
    """Return hashes of the ids that several batches had. To list each id once, only these need to be kept in memory."""
    parts = [hashes(ids) for _, ids in _moved(context, upgrade)]
    different, times = np.unique(np.concatenate([hashes([]), *parts]), return_counts=True)
    return different[times > 1]


def _moved(context: UpgradeContext, upgrade: int) -> Iterator[tuple[Mapping[str, Any], list[Id]]]:
    """Read the batches, the last first: the files of old vectors with the moved ids, then no file with the ids that stayed.

    A batch of a repair that was interrupted has its files for the undecided ids, too.
    """
    before, report = LAST, context.report_if_slow()
    total, read = sum(batches for batches, _ in context.registry.counts(upgrade).values()), 0
    while page := context.registry.batches(upgrade, before=before):
        for row in page:
            decided = row.state in (BatchState.RETIRED, BatchState.REMOVING)
            if row.archive is not None:
                removed = unpack_ids(row.remove) if decided else []
                yield row.archive, removed
                # A record that a repair was putting back may be in the archive alone.
                yield (
                    row.archive if row.restore else {},
                    [] if row.state == BatchState.RETIRED else _undecided(context, row, set(removed)),
                )
        before, read = page[-1].id, read + len(page)
        report("reading what the upgrade has moved", read, total)


def _undecided(context: UpgradeContext, batch: BatchRow, removed: Set[Id]) -> list[Id]:
    """Return the ids that a batch read in the old collections and did not decide to remove, as far as the archive tells.
    `complete` finds the others.
    """
    files = (ArchiveFile(**file) for file in (batch.archive or {}).values())
    ids_read = {reading.record.id for file in files for reading in context.services.archive.found(file)}
    return [id for id in unpack_ids(batch.ids) if id in ids_read and id not in removed]


def _chunks(work: Iterable[Any], size: int) -> Iterator[list[Any]]:
    chunk: list[Any] = []
    for each in work:
        chunk.append(each)
        if len(chunk) == size:
            yield chunk
            chunk = []
    if chunk:
        yield chunk
