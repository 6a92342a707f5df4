"""The claims of workers on batches, and how a claim ends."""

from __future__ import annotations

import functools
import math
import secrets
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Float, and_, bindparam, case, delete, func, insert, null, or_, select, true, tuple_, update
from sqlalchemy.orm import Session

from rmvdb import errors
from rmvdb.registry import shared_queries
from rmvdb.registry.clock import clock, day, now
from rmvdb.registry.codec import key, pack_ids, unpack_ids
from rmvdb.registry.session import Database, transaction
from rmvdb.registry.tables import TAKES_ITS_PLACE, BatchRow, GalleryRow, PlanRow, QuarantineRow, UpgradeRow, WorkerRow
from rmvdb.types import BatchState, Id, Phase

#: The largest step from one token to the next.
_GAP = 1_000_000
#: A claim: the batch, and the token that no other claim on that batch has.
Claim = tuple[int, int]

#: Whether no claim on the batch is live.
_FREE = or_(BatchRow.lease_until.is_(None), BatchRow.lease_until < clock())
#: Whether neither this claim nor an earlier one wrote anything.
_UNWRITTEN = and_(BatchRow.state == BatchState.CLAIMED, BatchRow.archive.is_(None), BatchRow.copied_at.is_(None))
_UPGRADE = bindparam("upgrade", type_=BatchRow.upgrade_id.type)
_GRACE: Any = bindparam("grace", type_=Float(53))
#: The gallery of an upgrade, locked. Like the other statements of each batch, it is made once: SQLAlchemy takes long for that.
_GALLERY = (
    select(GalleryRow.id, GalleryRow.epoch, GalleryRow.rebuilding, GalleryRow.closing_until)
    .join(UpgradeRow, UpgradeRow.gallery_id == GalleryRow.id)
    .where(UpgradeRow.id == _UPGRADE)
    .with_for_update(read=True, of=GalleryRow)
)
#: A change of a batch within its claim. The values that it is sent with set the columns of their names.
_MINE = update(BatchRow.metadata.tables[BatchRow.__tablename__]).where(
    BatchRow.id == bindparam("batch"), BatchRow.token == bindparam("held"), BatchRow.lease_until > clock()
)


class Claims(Database):
    """Claims on batches, and the workers that hold them."""

    @transaction
    def claim(
        self,
        s: Session,
        /,
        upgrade_id: int,
        worker: str,
        *,
        lease: float,
        grace: float,
        copy: bool,
        by_plan: bool = False,
        room: Collection[BatchState] = (BatchState.CLAIMED, BatchState.COPIED),
        settled: float | None = None,
    ) -> BatchRow | None:
        """Claim the first batch that has work. Return None if there is none, or while an epoch changes.

        A batch has work if its grace is over, if a worker began and left it, or, with `copy`, if it is pending. During a pause no
        pending batch begins. `by_plan`: if the grace of the plan in force is longer, it counts. `room`: *claimed* if the worker
        has room for a batch to copy, *copied* if for one to retire. `settled`: only batches that were copied before that time may
        retire, because searches may not find the others yet.
        """
        # Locked first, so that no upgrade ends and no epoch changes between the look and the claim.
        gallery = s.connection().execute(_GALLERY, {"upgrade": upgrade_id}).one()
        if not room or shared_queries.closing(s, gallery):
            return None
        at = now(s)
        values = {
            "upgrade": upgrade_id,
            "by": worker,
            "since": int(at),
            "step": secrets.randbelow(_GAP),
            "until": at + lease,
            "grace": grace,
            "settled": math.inf if settled is None else settled,
            "gallery": gallery.id,
            "served": gallery.epoch,
        }
        row = s.connection().execute(_claim(frozenset(room), copy=copy, by_plan=by_plan), values).one_or_none()
        return None if row is None else BatchRow(**row._mapping)

    @transaction
    def renew(
        self, s: Session, /, worker: str, upgrade_id: int | None, claims: Collection[Claim] = (), *, lease: float, note: str = ""
    ) -> set[Claim]:
        """Record a worker's heartbeat and extend the leases of its claims. Return the extended claims.

        A claim whose lease has run out stays lost.

        Raises:
            RegistryError: the registry does not know the upgrade. It may have been lost, so the claims must run out.
        """
        if upgrade_id is not None and s.get(UpgradeRow, upgrade_id) is None:
            raise errors.RegistryError(f"The registry at {self.shown_url} has no upgrade {upgrade_id}; rmvdb registry rebuild")
        live = and_(BatchRow.worker == worker, BatchRow.lease_until > clock())
        mine = tuple_(BatchRow.id, BatchRow.token).in_(claims)
        renewed = update(BatchRow).where(live, mine).values(lease_until=clock() + lease).returning(BatchRow.id, BatchRow.token)
        extended = {(id, token) for id, token in s.execute(renewed)}
        values = {"upgrade_id": upgrade_id, "note": note, "seen_at": clock(), "heard_at": day(s)}
        if not s.execute(update(WorkerRow).where(WorkerRow.id == worker).values(**values)).rowcount:  # type: ignore[attr-defined]
            shared_queries.forget_silent(s, WorkerRow, true())
            s.execute(insert(WorkerRow).values(id=worker, **values))
        return extended

    @transaction
    def retire_worker(self, s: Session, /, worker: str) -> None:
        """Remove a worker that ends, and release its claims."""
        _let_go(s, BatchRow.worker == worker)
        s.execute(delete(WorkerRow).where(WorkerRow.id == worker))

    @transaction
    def workers(self, s: Session, /, upgrade_id: int, *, within: float) -> Sequence[WorkerRow]:
        """Return the workers of this upgrade with a heartbeat in the last `within` seconds, by the database's clock.

        A command that takes the upgrade's place is none.
        """
        heard = and_(WorkerRow.heard_at > day(s) - within, ~WorkerRow.id.startswith(TAKES_ITS_PLACE, autoescape=True))
        return s.scalars(select(WorkerRow).where(WorkerRow.upgrade_id == upgrade_id, heard)).all()

    @transaction
    def advance(self, s: Session, /, batch: BatchRow, state: BatchState, **values: Any) -> int:
        """Change the state of a batch within its claim.

        Before records may leave a collection, raise the gallery's trace in the same transaction and return its number, else 0.

        Raises:
            LeaseLost: the claim has ended.
        """
        _move(s, batch, state, **values)
        if state != BatchState.REMOVING:
            return 0
        return shared_queries.raise_trace(s, select(UpgradeRow.gallery_id).where(UpgradeRow.id == batch.upgrade_id))

    @transaction
    def copied(self, s: Session, /, batch: BatchRow, *, requeue: Sequence[Id], aside: Mapping[Id, str]) -> None:
        """End the claim on a copied batch, which waits for its grace.

        `requeue`: ids that a client is writing. `aside`: ids to quarantine, with the reason.
        """
        left = [id for id in unpack_ids(batch.ids) if id not in aside]
        ended = {"copied_at": now(s), "lease_until": None, "worker": None}
        if _end(s, batch, BatchState.COPIED, ids=pack_ids(left), count=len(left), requeue=pack_ids(requeue), **ended):
            _set_aside(s, batch.upgrade_id, aside)

    @transaction
    def hand_back(self, s: Session, /, batch: BatchRow) -> None:
        """Release a claim. Does nothing if the claim has ended."""
        _let_go(s, and_(BatchRow.id == batch.id, BatchRow.token == batch.token))

    @transaction
    def retire(self, s: Session, /, batch: BatchRow, *, moved: int, requeue: Sequence[Id]) -> None:
        """End a batch. The ids in `requeue` become a new batch of the same priority."""
        if _end(s, batch, BatchState.RETIRED, count=moved, lease_until=None, worker=None) and requeue:
            # It isn't pending: its records are in the new collection, too, and differ from those in the old one.
            begun = {"state": BatchState.CLAIMED, "copied_at": batch.copied_at, "archive": batch.archive, "left": batch.left}
            begun |= {"root": batch.root or batch.id, "restore": batch.restore}
            s.add(shared_queries.new_batch(batch.upgrade_id, batch.priority, requeue, batch.origin, **begun))


@functools.cache
def _claim(room: frozenset[BatchState], *, copy: bool, by_plan: bool) -> Any:
    """Make the statement of a claim, once for each of its forms: to make it takes as long as to send it."""
    # Larger than every token of a registry that was lost, and different from every token of one that has gone back.
    since: Any = bindparam("since", type_=BatchRow.token.type)
    token = case((BatchRow.token >= since, BatchRow.token + 1), else_=since) + bindparam("step", type_=BatchRow.token.type)
    begins = BatchRow.state.in_((BatchState.PENDING, BatchState.WRITING))
    return (
        update(BatchRow)
        .where(BatchRow.id == _first_with_work(room, copy=copy, by_plan=by_plan))
        .values(
            worker=bindparam("by"),
            token=token,
            lease_until=bindparam("until"),
            state=case((begins, BatchState.CLAIMED), else_=BatchRow.state),
        )
        .returning(*(column.label(column.key) for column in BatchRow.__table__.c))
    )


def _first_with_work(room: Collection[BatchState], *, copy: bool, by_plan: bool) -> Any:
    """Select the first batch with work, state by state: so an index leads to it, however many batches there are."""
    longest = _longest() if by_plan else _GRACE
    due = and_(_FREE, BatchRow.copied_at <= clock() - longest, BatchRow.copied_at <= bindparam("settled", type_=Float(53)))
    which: list[tuple[ColumnElement[bool], ColumnElement[bool]]] = []
    if BatchState.COPIED in room:
        which += [(BatchRow.state == BatchState.REMOVING, _FREE), (BatchRow.state == BatchState.COPIED, due)]
    if BatchState.CLAIMED in room:
        which += [(BatchRow.state.in_(shared_queries.COPYING), _FREE)]
        which += [(BatchRow.state == BatchState.PENDING, ~_is(UpgradeRow.paused))] if copy else []
    mine = (BatchRow.upgrade_id == _UPGRADE, ~_is(UpgradeRow.phase == Phase.ENDED))
    first = [
        select(BatchRow.id).where(*mine, state, so).order_by(BatchRow.priority).limit(1)
        for state, so in which
    ]  # fmt: skip
    locked = (each.with_for_update(skip_locked=True, of=BatchRow).correlate(None).scalar_subquery() for each in first)
    return func.coalesce(*locked, null())


def _is(so: Any) -> Any:
    """Select a condition on the upgrade, which is read after its gallery is locked."""
    return select(so).where(UpgradeRow.id == _UPGRADE).scalar_subquery()


def _longest() -> Any:
    """Select the longer one of the grace and that of the plan in force."""
    own = PlanRow.max_age + PlanRow.longest_search + PlanRow.staleness
    longest = case((own >= PlanRow.grace_before, own), else_=PlanRow.grace_before)
    longest = case((longest >= _GRACE, longest), else_=_GRACE)
    served = (PlanRow.gallery_id == bindparam("gallery"), PlanRow.epoch == bindparam("served"))
    return select(longest).where(*served).scalar_subquery()


def _end(s: Session, batch: BatchRow, state: BatchState, **values: Any) -> bool:
    """End a claim in that state. Return False if it has ended so before: the call is a repetition, since its answer was lost."""
    try:
        _move(s, batch, state, **values)
    except errors.LeaseLost:
        mine = and_(BatchRow.id == batch.id, BatchRow.token == batch.token, BatchRow.lease_until.is_(None))
        if s.scalar(select(BatchRow.state).where(mine)) != state:
            raise
        return False
    return True


def _move(s: Session, batch: BatchRow, state: BatchState, **values: Any) -> None:
    """Change a claimed batch under its fencing token, while its lease runs.

    A roll back waits until the lease ends, then lists the records that the upgrade moved.
    """
    if not s.connection().execute(_MINE, {"batch": batch.id, "held": batch.token, "state": state, **values}).rowcount:
        raise errors.LeaseLost(
            f"The lease on batch {batch.id} ran out, or another worker has taken it over; this worker changed nothing since"
        )


def _let_go(s: Session, mine: ColumnElement[bool]) -> None:
    """Release claims: unwritten batches now, others when the lease ends, because a failed call may still arrive. No heartbeat
    extends that lease."""
    s.execute(update(BatchRow).where(mine, _UNWRITTEN).values(state=BatchState.PENDING))
    unwritten = BatchRow.state.in_((BatchState.PENDING, BatchState.CLAIMED, BatchState.COPIED))
    # With a new token, calls that still run in a process that ends change nothing.
    ended = {"worker": None, "token": BatchRow.token + 1}
    s.execute(update(BatchRow).where(mine).values(**ended, lease_until=case((unwritten, None), else_=BatchRow.lease_until)))


def _set_aside(s: Session, upgrade_id: int, reasons: Mapping[Id, str]) -> None:
    for id, reason in reasons.items():
        mine = and_(QuarantineRow.upgrade_id == upgrade_id, QuarantineRow.record == key(id))
        s.execute(delete(QuarantineRow).where(mine))
        s.add(QuarantineRow(upgrade_id=upgrade_id, record=key(id), reason=reason, at=day(s)))
