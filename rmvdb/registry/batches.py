"""The work list of an upgrade, and how far it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from rmvdb.registry import shared_queries
from rmvdb.registry.clock import clock, now
from rmvdb.registry.codec import key
from rmvdb.registry.session import Database, transaction
from rmvdb.registry.tables import BatchRow, QuarantineRow
from rmvdb.types import BatchState, Id, Progress

#: Batches whose records are found in the new collection.
MOVED = (BatchState.COPIED, BatchState.REMOVING, BatchState.RETIRED)


class Batches(Database):
    """The batches of an upgrade in their order."""

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
        """Append batches (ids, origin) to the work list, priorities counting from `first`; none is added twice.

        WrongPhase where the upgrade has ended, UpgradeRunning where another one has the leadership by now: whoever makes its list
        does not know yet.
        """
        shared_queries.refuse_ended(s, upgrade_id)
        shared_queries.refuse_overtaken(s, upgrade_id, leader_token)
        for priority, (ids, origin) in enumerate(batches, start=first):
            there = select(BatchRow.id).where(BatchRow.upgrade_id == upgrade_id, BatchRow.priority == priority)
            if s.scalar(there) is None:
                s.add(shared_queries.new_batch(upgrade_id, priority, ids, origin))

    @transaction
    def add_late(self, s: Session, /, upgrade_id: int, ids: Sequence[Id]) -> None:
        """Put records behind every batch, but for those that a batch holds which is not retired, and those set aside: in two
        batches at once, one would find them gone because of the other. WrongPhase where the upgrade has ended."""
        shared_queries.refuse_ended(s, upgrade_id)
        shared_queries.lock_list(s, upgrade_id)
        held = set(ids).intersection(shared_queries.listed(s, upgrade_id))
        aside = shared_queries.set_aside(s, upgrade_id, ids)
        if late := [id for id in ids if id not in held and key(id) not in aside]:
            s.add(shared_queries.new_batch(upgrade_id, shared_queries.last_priority(s, upgrade_id) + 1, late, None))

    @transaction
    def put_back(self, s: Session, /, upgrade_id: int, ids: Sequence[Id], *, of: int) -> None:
        """Put records that were moved by a batch and are lost since behind every other batch, to be made again from the archive;
        not those that a batch holds which is not retired. WrongPhase where the upgrade has ended."""
        shared_queries.refuse_ended(s, upgrade_id)
        shared_queries.lock_list(s, upgrade_id)
        row, held = s.get_one(BatchRow, of), set(ids).intersection(shared_queries.listed(s, upgrade_id))
        if lost := [id for id in ids if id not in held]:
            begun = {"state": BatchState.CLAIMED, "archive": row.archive, "restore": True}
            s.add(
                shared_queries.new_batch(upgrade_id, shared_queries.last_priority(s, upgrade_id) + 1, lost, row.origin, **begun)
            )

    @transaction
    def discard_list(self, s: Session, /, upgrade_id: int, *, leader_token: int | None = None) -> None:
        """Forget the batches nobody has begun, so that the list can be made again; UpgradeRunning as in `add_batches`."""
        shared_queries.refuse_overtaken(s, upgrade_id, leader_token)
        s.execute(delete(BatchRow).where(BatchRow.upgrade_id == upgrade_id, BatchRow.state == BatchState.PENDING))

    @transaction
    def next_priority(self, s: Session, /, upgrade_id: int) -> int:
        """The first priority that is behind every batch."""
        return shared_queries.last_priority(s, upgrade_id) + 1

    @transaction
    def listed_ids(self, s: Session, /, upgrade_id: int) -> set[Id]:
        """The ids of every batch that is not retired."""
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
        """Batches by row id, a page at a time; those `before` a number from there downwards."""
        page = select(BatchRow).where(BatchRow.upgrade_id == upgrade_id).limit(limit)
        if before is None:
            page = page.where(BatchRow.id > after).order_by(BatchRow.id)
        else:
            page = page.where(BatchRow.id < before).order_by(BatchRow.id.desc())
        return s.scalars(page if state is None else page.where(BatchRow.state == state)).all()

    @transaction
    def counts(self, s: Session, /, upgrade_id: int) -> dict[BatchState, tuple[int, int]]:
        """Batches and records by state."""
        grouped = (
            select(BatchRow.state, func.count(), func.sum(BatchRow.count))
            .where(BatchRow.upgrade_id == upgrade_id)
            .group_by(BatchRow.state)
        )
        return {BatchState(state): (batches, int(records)) for state, batches, records in s.execute(grouped)}

    @transaction
    def progress(self, s: Session, /, upgrade_id: int, *, window: float = 60.0) -> Progress:
        """How far the work list is, and how fast records were copied in the last `window` seconds."""
        mine = BatchRow.upgrade_id == upgrade_id
        total = s.scalar(select(func.sum(BatchRow.count)).where(mine)) or 0
        done = s.scalar(select(func.sum(BatchRow.count)).where(mine, BatchRow.state.in_(MOVED))) or 0
        begun = s.scalar(select(func.sum(BatchRow.count)).where(mine, BatchRow.state.in_(shared_queries.COPYING))) or 0
        stuck = s.scalar(select(func.count()).select_from(QuarantineRow).where(QuarantineRow.upgrade_id == upgrade_id)) or 0
        copied = select(BatchRow.copied_at, func.sum(BatchRow.count)).where(mine, BatchRow.copied_at > clock() - window)
        recent = s.execute(copied.group_by(BatchRow.copied_at).order_by(BatchRow.copied_at))
        rate = _rate([(float(at or 0.0), int(count)) for at, count in recent], now=now(s))
        return Progress(done=int(done), total=int(total) + stuck, begun=int(begun), quarantined=stuck, rate=rate)


def _rate(copied: Sequence[tuple[float, int]], *, now: float) -> float | None:
    """Return the records a second from the first of these times to the last: what is waited after that is not copying.

    The first batch began before its time, so the others count. If all came within a second, they count as of one second.
    """
    moved = sum(count for _, count in copied)
    if not moved:
        return None
    (first, before), (last, _) = copied[0], copied[-1]
    if last - first >= 1.0:
        return (moved - before) / (last - first)
    return moved / (1.0 if last > first else max(now - first, 1.0))
