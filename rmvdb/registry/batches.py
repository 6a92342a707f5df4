"""The work list of an upgrade, and its progress."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import and_, delete, func, select
from sqlalchemy.orm import Session

from rmvdb.registry import shared_queries
from rmvdb.registry.clock import clock, now
from rmvdb.registry.codec import key
from rmvdb.registry.session import Database, transaction
from rmvdb.registry.tables import BatchRow, QuarantineRow
from rmvdb.types import BatchState, Id, Progress

#: Batches whose records are in the new collection.
MOVED = (BatchState.COPIED, BatchState.REMOVING, BatchState.RETIRED)
#: Seconds between two batches that may be copying, even if the batches of the upgrade usually follow one another at once.
WAIT = 2.0


class Batches(Database):
    """The batches of an upgrade, by priority."""

    @transaction
    def add_batches(
        self,
        s: Session,
        /,
        upgrade_id: int,
        batches: Sequence[tuple[Sequence[Id], Mapping[str, Any] | None]],
        *,
        first: int,
        leader_token: int | None = None,
    ) -> None:
        """Append batches (ids, origin) to the work list, with priorities from `first` on. A repeated call adds nothing.

        Raises:
            WrongPhase: the upgrade has ended.
            UpgradeRunning: another process leads the upgrade by now.
        """
        shared_queries.refuse_ended(s, upgrade_id)
        shared_queries.refuse_overtaken(s, upgrade_id, leader_token)
        for priority, (ids, origin) in enumerate(batches, start=first):
            here = select(BatchRow.ids).where(*shared_queries.at_priority(upgrade_id, priority))
            made = shared_queries.new_batch(upgrade_id, priority, ids, origin)
            if made.ids not in s.scalars(here).all():  # late records may have the priority, too
                s.add(made)

    @transaction
    def add_late(self, s: Session, /, upgrade_id: int, ids: Sequence[Id], *, batch: int = 1_000) -> None:
        """Append records as last batches of at most so many. Leave out those that are quarantined or in an unretired batch.

        If a record were in two batches at once, one batch would miss it because the other moved it.

        Raises:
            WrongPhase: the upgrade has ended.
        """
        shared_queries.refuse_ended(s, upgrade_id)
        shared_queries.lock_list(s, upgrade_id)
        listed = shared_queries.listed_among(s, upgrade_id, ids)
        aside = shared_queries.set_aside(s, upgrade_id, ids)
        late = [id for id in ids if id not in listed and key(id) not in aside]
        first = shared_queries.last_priority(s, upgrade_id) + 1
        for priority, some in enumerate(shared_queries.chunks(late, batch), start=first):
            s.add(shared_queries.new_batch(upgrade_id, priority, some, None))

    @transaction
    def put_back(self, s: Session, /, upgrade_id: int, moved_and_lost: Mapping[int, Sequence[Id]]) -> None:
        """Append the records that these batches moved and that are lost since. Their new batches restore them from the archive.

        Leave out records that are in a batch that is not retired. Quarantined ones are tried again.

        Raises:
            WrongPhase: the upgrade has ended.
        """
        shared_queries.refuse_ended(s, upgrade_id)
        shared_queries.lock_list(s, upgrade_id)
        every = [id for ids in moved_and_lost.values() for id in ids]
        listed = shared_queries.listed_among(s, upgrade_id, every)
        shared_queries.take_out(s, upgrade_id, every)
        first = shared_queries.last_priority(s, upgrade_id) + 1
        for priority, (batch, ids) in enumerate(moved_and_lost.items(), start=first):
            if lost := [id for id in ids if id not in listed]:
                row = s.get_one(BatchRow, batch)
                begun = {"state": BatchState.CLAIMED, "archive": row.archive, "restore": True}
                s.add(shared_queries.new_batch(upgrade_id, priority, lost, row.origin, **begun))

    @transaction
    def discard_list(self, s: Session, /, upgrade_id: int, *, leader_token: int | None = None) -> None:
        """Delete the pending batches, so that the list can be made again.

        Raises:
            UpgradeRunning: another process leads the upgrade by now.
        """
        shared_queries.refuse_overtaken(s, upgrade_id, leader_token)
        pending = and_(BatchRow.upgrade_id == upgrade_id, BatchRow.state == BatchState.PENDING)
        shared_queries.piecewise(s, delete(BatchRow), pending)

    @transaction
    def next_priority(self, s: Session, /, upgrade_id: int) -> int:
        """Return the priority after that of the last batch."""
        return shared_queries.last_priority(s, upgrade_id) + 1

    @transaction
    def listed_ids(self, s: Session, /, upgrade_id: int) -> set[Id]:
        """Return the ids of every batch that is not retired."""
        return set(shared_queries.listed(s, upgrade_id))

    @transaction
    def batches(
        self,
        s: Session,
        /,
        upgrade_id: int,
        *,
        after: int = 0,
        before: int | None = None,
        limit: int = 200,
        state: BatchState | None = None,
    ) -> Sequence[BatchRow]:
        """Return one page of batches by row id: upwards from `after`, or downwards from `before` if it is given."""
        page = select(BatchRow).where(BatchRow.upgrade_id == upgrade_id).limit(limit)
        if before is None:
            page = page.where(BatchRow.id > after).order_by(BatchRow.id)
        else:
            page = page.where(BatchRow.id < before).order_by(BatchRow.id.desc())
        return s.scalars(page if state is None else page.where(BatchRow.state == state)).all()

    @transaction
    def counts(self, s: Session, /, upgrade_id: int) -> dict[BatchState, tuple[int, int]]:
        """Return how many batches and records there are, by state."""
        return _counts(s, upgrade_id)

    @transaction
    def progress(self, s: Session, /, upgrade_id: int, *, window: float = 60.0) -> Progress:
        """Return how far the work list is, and how fast records were copied in the last `window` seconds."""
        mine, records = BatchRow.upgrade_id == upgrade_id, {state: count for state, (_, count) in _counts(s, upgrade_id).items()}
        total, done, begun = (
            sum(records.get(state, 0) for state in some) for some in (BatchState, MOVED, shared_queries.COPYING)
        )
        stuck = s.scalar(select(func.count()).select_from(QuarantineRow).where(QuarantineRow.upgrade_id == upgrade_id)) or 0
        copied = select(BatchRow.copied_at, func.sum(BatchRow.count)).where(mine, BatchRow.copied_at > clock() - window)
        recent = s.execute(copied.group_by(BatchRow.copied_at).order_by(BatchRow.copied_at))
        rate = _rate([(float(at or 0.0), int(count)) for at, count in recent], now=now(s))
        return Progress(done=done, total=total + stuck, begun=begun, quarantined=stuck, rate=rate)


def _counts(s: Session, upgrade_id: int) -> dict[BatchState, tuple[int, int]]:
    grouped = (
        select(BatchRow.state, func.count(), func.sum(BatchRow.count))
        .where(BatchRow.upgrade_id == upgrade_id)
        .group_by(BatchRow.state)
    )
    return {BatchState(state): (batches, int(records)) for state, batches, records in s.execute(grouped)}


def _rate(copied: Sequence[tuple[float, int]], *, now: float) -> float | None:
    """Return the records a second from the first of these times to the last, without the waits in between: a wait is not copying.

    The first batch began before its time, so the others count. If all came within a second, they count as of one second.
    """
    moved = sum(count for _, count in copied)
    if not moved:
        return None
    first, last = copied[0][0], copied[-1][0]
    steps = [(at - before, count) for (before, _), (at, count) in itertools.pairwise(copied)]
    usual = statistics.median(seconds for seconds, _ in steps) if steps else 0.0
    steps = [step for step in steps if step[0] <= max(WAIT, 10 * usual)]
    if (seconds := sum(seconds for seconds, _ in steps)) >= 1.0:
        return sum(count for _, count in steps) / seconds
    return moved / (1.0 if last > first else max(now - first, 1.0))
