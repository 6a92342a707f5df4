"""What several rooms ask of a row, write into one, or refuse."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from sqlalchemy import ColumnElement, Select, and_, case, delete, func, select, update
from sqlalchemy.orm import Session

from rmvdb import errors
from rmvdb.registry.clock import clock, now
from rmvdb.registry.codec import key, leg_from_json, leg_to_json, pack_ids, unpack_ids
from rmvdb.registry.tables import (
    BatchRow,
    ClientRow,
    CollectionRow,
    GalleryRow,
    IntentRow,
    PlanRow,
    QuarantineRow,
    TraceRow,
    UpgradeRow,
    VersionRow,
    WorkerRow,
)
from rmvdb.types import BatchState, Id, Leg, Phase, ServingPlan

T = TypeVar("T")
Named = TypeVar("Named", VersionRow, GalleryRow, CollectionRow)
#: Batches that a worker is copying, or has left at it: another one goes on.
COPYING = (BatchState.CLAIMED, BatchState.WRITING)
#: Batches that a worker is at, or has left.
BEGUN = (*COPYING, BatchState.REMOVING)
#: Seconds after which a client or a worker that ended without a word is forgotten, and how many at once: writes wait meanwhile.
FORGOTTEN, SOME = 86400.0, 1000
#: Of a gallery's row, by whoever changes its epoch or begins a write; in the way of another one and of `{"read": True}`.
FOR_CHANGE = {"key_share": True}


def named(
    s: Session, table: type[Named], kind: str, name: str, *, hint: str = "", lock: Mapping[str, Any] | None = None
) -> Named:
    """The row of that name, locked where `lock` says how; UnknownName offers the nearest."""
    found = select(table).where(table.name == name)
    if lock:
        found = found.with_for_update(**lock)
    row = s.scalar(found)
    if row is None:
        raise errors.UnknownName(kind, name, s.scalars(select(table.name)), hint=hint)
    return row


def gallery_of(upgrade_id: int) -> Select[GalleryRow]:
    """The gallery that an upgrade is of."""
    return select(GalleryRow).join(UpgradeRow, UpgradeRow.gallery_id == GalleryRow.id).where(UpgradeRow.id == upgrade_id)


def closing(s: Session, gallery: GalleryRow) -> bool:
    """Whether new writes and claims wait: an epoch changes, or the gallery's work is not whole yet."""
    return gallery.rebuilding or (gallery.closing_until is not None and gallery.closing_until > now(s))


def live_clients(s: Session, gallery: GalleryRow) -> Select[ClientRow]:
    """A client seen longer ago than its plan's maximum age asks again before it searches, so nobody needs to wait for it."""
    newest = plan(s, gallery, gallery.epoch).max_age  # what it was told last; until it says so it has the plan before
    held = and_(PlanRow.gallery_id == ClientRow.gallery_id, PlanRow.epoch == ClientRow.epoch)
    max_age = case((PlanRow.max_age > newest, PlanRow.max_age), else_=newest)
    seen = ClientRow.seen_at > clock() - max_age
    return select(ClientRow).outerjoin(PlanRow, held).where(ClientRow.gallery_id == gallery.id, seen)


def forget_silent(s: Session, table: type[ClientRow] | type[WorkerRow], which: ColumnElement[bool], *, longer: Any = 0.0) -> None:
    """Forget some of those that have not been heard of for a day, and for so much `longer`: each that is new makes room."""
    silent = select(table.id).where(which, table.seen_at < clock() - FORGOTTEN - longer).limit(SOME)
    mine = table.id.in_(silent.with_for_update(skip_locked=True))
    s.execute(delete(table).where(mine).execution_options(synchronize_session=False))


def plan(s: Session, gallery: GalleryRow, epoch: int) -> ServingPlan:
    """The plan of that epoch, as clients serve by it."""
    row = row_of_plan(s, gallery, epoch)
    legs = [leg_from_json(leg) for leg in row.legs]
    return ServingPlan(
        gallery=gallery.name,
        epoch=row.epoch,
        legs=tuple(leg for leg in legs if leg.searched),
        mirrors=tuple(leg for leg in legs if not leg.searched),
        max_age=row.max_age,
        longest_search=row.longest_search,
        staleness=row.staleness,
        grace_before=row.grace_before,
    )


def row_of_plan(s: Session, gallery: GalleryRow, epoch: int) -> PlanRow:
    """The same as it is written, legs and mirrors in one list."""
    return s.scalars(select(PlanRow).where(PlanRow.gallery_id == gallery.id, PlanRow.epoch == epoch)).one()


def new_plan(
    gallery: GalleryRow,
    epoch: int,
    legs: Sequence[Leg],
    times: Mapping[str, float],
    *,
    at: float,
    grace_before: float = 0.0,
) -> PlanRow:
    """A plan to be added, in the place of one whose clients need `grace_before`; `times` are its columns of seconds."""
    written = [leg_to_json(leg) for leg in legs]
    return PlanRow(gallery_id=gallery.id, epoch=epoch, legs=written, created_at=at, grace_before=grace_before, **times)


def serve_after(s: Session, gallery: GalleryRow, legs: Sequence[Mapping[str, Any]], *, after: int = 0) -> None:
    """By these legs, with the times of the plan in force, at an epoch after every other one, and after that one."""
    newest = s.scalar(select(func.max(PlanRow.epoch)).where(PlanRow.gallery_id == gallery.id)) or 0
    served, epoch = plan(s, gallery, gallery.epoch), max(newest, after) + 1
    times = {name: getattr(served, name) for name in ("max_age", "longest_search", "staleness")}
    some = [leg_from_json(leg) for leg in legs]
    s.add(new_plan(gallery, epoch, some, times, at=now(s), grace_before=served.grace))
    gallery.epoch, gallery.next_epoch = epoch, None


def raise_trace(s: Session, gallery_id: int) -> int:
    """One more; the number, which is given once."""
    risen = (
        update(TraceRow).where(TraceRow.gallery_id == gallery_id).values(number=TraceRow.number + 1).returning(TraceRow.number)
    )
    if (number := s.scalar(risen)) is None:
        s.add(TraceRow(gallery_id=gallery_id, number=(number := 1)))
        s.flush()
    return number


def refuse_ended(s: Session, upgrade_id: int | None) -> None:
    """Nobody goes on with an upgrade that somebody else has ended: WrongPhase."""
    if upgrade_id is not None and s.scalar(select(UpgradeRow.phase).where(UpgradeRow.id == upgrade_id)) == Phase.ENDED:
        raise errors.WrongPhase(f"Upgrade {upgrade_id} has ended; see what took its place: rmvdb history")


def refuse_paused(row: UpgradeRow | None) -> None:
    """Raise Paused if the upgrade is paused; the caller holds a lock that `Upgrades.pause` takes, too."""
    if row is not None and row.paused:
        way_out = "it makes way for another upgrade" if row.makes_way else "run rmvdb resume, then the same command again"
        raise errors.Paused(f"Upgrade {row.id} is paused, and nothing of it goes on; {way_out}")


def active_upgrade(s: Session, gallery_id: int) -> UpgradeRow | None:
    """The upgrade of this gallery that has not ended."""
    return s.scalar(select(UpgradeRow).where(UpgradeRow.gallery_id == gallery_id, UpgradeRow.phase != Phase.ENDED))


def refuse_overtaken(s: Session, upgrade_id: int, leader_token: int | None) -> None:
    """UpgradeRunning if another has taken the leadership. Locks the row, so that none takes it before the commit."""
    row = s.get_one(UpgradeRow, upgrade_id, with_for_update=True)
    if leader_token not in (None, row.baton):
        raise errors.UpgradeRunning(
            f"{row.conductor or 'Another process'} took upgrade {upgrade_id} over while this one was suspended; "
            "watch it with rmvdb status --watch"
        )


def refuse_gone_on(s: Session, upgrade_id: int | None, phase: str | None, leader_token: int | None) -> None:
    """Nobody changes what is served for an upgrade that has left the `phase` in which that was decided: WrongPhase."""
    if upgrade_id is None:
        return
    refuse_ended(s, upgrade_id)
    refuse_overtaken(s, upgrade_id, leader_token)
    if phase not in (None, now_in := s.get_one(UpgradeRow, upgrade_id).phase):
        raise errors.WrongPhase(f"Upgrade {upgrade_id} is {now_in} by now, not {phase}; run the same command again")


def forget_work(s: Session, upgrades: Sequence[int]) -> None:
    """Their work lists, intents and quarantine."""
    for table in (BatchRow, IntentRow, QuarantineRow):
        s.execute(delete(table).where(table.upgrade_id.in_(upgrades)))


def new_batch(upgrade_id: int, priority: int, ids: Sequence[Id], origin: Mapping[str, Any] | None, **begun: Any) -> BatchRow:
    """A batch to be added, fresh but for what `begun` says of it."""
    return BatchRow(
        upgrade_id=upgrade_id,
        priority=priority,
        ids=pack_ids(ids),
        count=len(ids),
        origin=None if origin is None else dict(origin),
        **{"state": BatchState.PENDING} | begun,
    )


def lock_list(s: Session, upgrade_id: int) -> None:
    """From here to the end of this transaction nobody else puts single records on the upgrade's work list."""
    s.execute(select(UpgradeRow.id).where(UpgradeRow.id == upgrade_id).with_for_update(key_share=True))


def listed(s: Session, upgrade_id: int) -> Iterator[Id]:
    """The ids of every batch that is not retired."""
    rows = s.scalars(select(BatchRow.ids).where(BatchRow.upgrade_id == upgrade_id, BatchRow.state != BatchState.RETIRED))
    return (id for packed in rows for id in unpack_ids(packed))


def set_aside(s: Session, upgrade_id: int, ids: Sequence[Id]) -> set[str]:
    """Keys of those records that are quarantined; what leaves a batch for that is found in either, if batches are read first."""
    mine = [and_(QuarantineRow.upgrade_id == upgrade_id, QuarantineRow.record.in_(map(key, some))) for some in chunks(ids, 500)]
    return {record for each in mine for record in s.scalars(select(QuarantineRow.record).where(each))}


def last_priority(s: Session, upgrade_id: int) -> int:
    """Of the batch behind every other one; 0 where there is none."""
    return s.scalar(select(func.max(BatchRow.priority)).where(BatchRow.upgrade_id == upgrade_id)) or 0


def chunks(values: Sequence[T], size: int) -> Iterable[Sequence[T]]:
    """In order, so many at a time: no database takes a statement of any length."""
    return (values[start : start + size] for start in range(0, len(values), size))
