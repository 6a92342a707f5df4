"""Queries, changes and refusals that several subjects of the registry share."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from sqlalchemy import ColumnElement, Delete, Row, Select, Update, and_, case, delete, func, select, text, update
from sqlalchemy.orm import Session

from rmvdb import errors
from rmvdb.registry.clock import clock, now
from rmvdb.registry.codec import key, leg_from_json, leg_to_json, pack_ids, unpack_ids
from rmvdb.registry.tables import (
    AskedForRow,
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
#: Batches that a worker is copying, or left while copying. Another worker continues them.
COPYING = (BatchState.CLAIMED, BatchState.WRITING)
#: Batches that a worker works on, or left.
BEGUN = (*COPYING, BatchState.REMOVING)
#: How an upgrade's row is locked while clients go on announcing writes, which name the upgrade.
BESIDE_WRITES: Any = {"key_share": True}
#: Rows that one statement deletes or changes at most: PostgreSQL ends a statement after 30 seconds.
MANY = 50_000
#: Seconds after which rmvdb forgets a silent client or worker, and how many it forgets at once, because writes wait meanwhile.
FORGOTTEN, SOME = 86400.0, 1000
#: The lock on a gallery's row for a change of its epoch or a new write. It excludes itself and `{"read": True}`.
FOR_CHANGE = {"key_share": True}
#: The notes of an upgrade whose work list is made again, because the registry was lost or went back.
BROUGHT_BACK, TAKEN = "brought back by registry rebuild", "taken from a lost registry; its work list is made again"


def named(
    s: Session, table: type[Named], kind: str, name: str, *, hint: str = "", lock: Mapping[str, Any] | None = None
) -> Named:
    """Return the row of that name, locked as `lock` says.

    Raises:
        UnknownName: there is none. The message offers the nearest name.
    """
    query = select(table).where(table.name == name)
    if lock:
        query = query.with_for_update(**lock)
    row = s.scalar(query)
    if row is None:
        raise errors.UnknownName(kind, name, s.scalars(select(table.name)), hint=hint)
    return row


def skip_numbers(s: Session, table: type[UpgradeRow], upto: int) -> None:
    """Let the next row of this table get a larger number than `upto`."""
    if upto <= (s.scalar(select(func.max(table.id))) or 0):
        return
    if s.get_bind().dialect.name == "postgresql":
        sequence = func.pg_get_serial_sequence(table.__tablename__, "id")
        if s.execute(select(func.nextval(sequence))).scalar_one() < upto:
            s.execute(select(func.setval(sequence, upto)))
        return
    last = {"name": table.__tablename__, "upto": upto}
    if not s.execute(text("UPDATE sqlite_sequence SET seq = max(seq, :upto) WHERE name = :name"), last).rowcount:  # type: ignore[attr-defined]
        s.execute(text("INSERT INTO sqlite_sequence (name, seq) VALUES (:name, :upto)"), last)


def gallery_of(upgrade_id: int) -> Select[GalleryRow]:
    """Select the gallery of an upgrade."""
    return select(GalleryRow).join(UpgradeRow, UpgradeRow.gallery_id == GalleryRow.id).where(UpgradeRow.id == upgrade_id)


def closing(s: Session, gallery: GalleryRow | Row[*tuple[Any, ...]]) -> bool:
    """Return whether new writes and claims wait, because the epoch is changing or the gallery is being rebuilt."""
    return gallery.rebuilding or (gallery.closing_until is not None and gallery.closing_until > now(s))


def live_clients(s: Session, gallery: GalleryRow) -> Select[ClientRow]:
    """Select the clients that may search by the plan they have.

    A client that was silent for its plan's maximum age asks again before it searches, so an epoch need not wait for it.
    """
    newest = plan(s, gallery, gallery.epoch).max_age  # it may have received this plan, and still report the one before
    served = and_(PlanRow.gallery_id == ClientRow.gallery_id, PlanRow.epoch == ClientRow.epoch)
    max_age = case((PlanRow.max_age > newest, PlanRow.max_age), else_=newest)
    seen = ClientRow.seen_at > clock() - max_age
    return select(ClientRow).outerjoin(PlanRow, served).where(ClientRow.gallery_id == gallery.id, seen)


def forget_silent(s: Session, table: type[ClientRow] | type[WorkerRow], which: ColumnElement[bool], *, longer: Any = 0.0) -> None:
    """Delete some clients or workers that were silent for a day and `longer` seconds. Each new one calls this to make room."""
    silent = select(table.id).where(which, table.seen_at < clock() - FORGOTTEN - longer).limit(SOME)
    mine = table.id.in_(silent.with_for_update(skip_locked=True))
    s.execute(delete(table).where(mine).execution_options(synchronize_session=False))


def plan(s: Session, gallery: GalleryRow, epoch: int) -> ServingPlan:
    """Return the plan of that epoch, as clients use it."""
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
    """Return the row of that plan. It holds legs and mirrors in one list."""
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
    """Make the row of a new plan. Clients of the plan that it replaces need `grace_before`; `times`: its columns of seconds."""
    packed = [leg_to_json(leg) for leg in legs]
    return PlanRow(gallery_id=gallery.id, epoch=epoch, legs=packed, created_at=at, grace_before=grace_before, **times)


def serve_after(s: Session, gallery: GalleryRow, legs: Sequence[Mapping[str, Any]], *, after: int = 0) -> None:
    """Serve by these legs from now on, at an epoch above every earlier one and `after`. The plan in force gives the times."""
    newest = s.scalar(select(func.max(PlanRow.epoch)).where(PlanRow.gallery_id == gallery.id)) or 0
    served, epoch = plan(s, gallery, gallery.epoch), max(newest, after) + 1
    times = {name: getattr(served, name) for name in ("max_age", "longest_search", "staleness")}
    some = [leg_from_json(leg) for leg in legs]
    s.add(new_plan(gallery, epoch, some, times, at=now(s), grace_before=served.grace))
    gallery.epoch, gallery.next_epoch = epoch, None


def raise_trace(s: Session, which: Select[int]) -> int:
    """Raise the trace of the gallery whose number `which` selects by one, and return it. Each number is given once."""
    mine = TraceRow.gallery_id == which.scalar_subquery()
    raised = update(TraceRow).where(mine).values(number=TraceRow.number + 1).returning(TraceRow.number)
    if (number := s.scalar(raised, execution_options={"synchronize_session": False})) is None:
        s.add(TraceRow(gallery_id=s.scalars(which).one(), number=(number := 1)))
        s.flush()
    return number


def refuse_ended(s: Session, upgrade_id: int | None) -> None:
    """Raise WrongPhase if the upgrade has ended."""
    if upgrade_id is not None and s.scalar(select(UpgradeRow.phase).where(UpgradeRow.id == upgrade_id)) == Phase.ENDED:
        raise errors.WrongPhase(f"Upgrade {upgrade_id} has ended; see what took its place: rmvdb history")


def refuse_paused(row: UpgradeRow | None) -> None:
    """Raise Paused if the upgrade is paused; the caller holds a lock that `Upgrades.pause` takes, too."""
    if row is not None and row.paused:
        way_out = "run rmvdb resume, then the same command again"
        if row.makes_way:
            way_out = "another upgrade is taking its place; if that command was killed, run this one again in half a minute"
        raise errors.Paused(f"Upgrade {row.id} is paused; {way_out}")


def active_upgrade(s: Session, gallery_id: int) -> UpgradeRow | None:
    """Return the upgrade of this gallery that has not ended."""
    return s.scalar(select(UpgradeRow).where(UpgradeRow.gallery_id == gallery_id, UpgradeRow.phase != Phase.ENDED))


def needed_upgrades(s: Session) -> set[int]:
    """Return the upgrades that have not ended, and those that they undo or supersede."""
    columns = select(UpgradeRow.id, UpgradeRow.phase, UpgradeRow.undoes, UpgradeRow.supersedes)
    rows = {row.id: row for row in s.execute(columns)}
    needed, more = set[int](), [row.id for row in rows.values() if row.phase != Phase.ENDED]
    while more:
        row = rows[more.pop()]
        needed.add(row.id)
        more += [each for each in (row.undoes, row.supersedes) if each is not None and each not in needed]
    return needed


def refuse_overtaken(s: Session, upgrade_id: int, leader_token: int | None) -> None:
    """Raise UpgradeRunning if another process leads the upgrade. Lock the row, so that none takes over before the commit."""
    row = s.get_one(UpgradeRow, upgrade_id, with_for_update=BESIDE_WRITES)
    if leader_token not in (None, row.leader_token):
        raise errors.UpgradeRunning(
            f"{row.conductor or 'Another process'} took upgrade {upgrade_id} over while this one was suspended; "
            "watch it with rmvdb status --watch"
        )


def refuse_gone_on(s: Session, upgrade_id: int | None, phase: str | None, leader_token: int | None) -> None:
    """Refuse a change of the serving plan that an upgrade decided on in another `phase`.

    Raises:
        WrongPhase: the upgrade has ended, or left that phase.
        UpgradeRunning: another process leads the upgrade.
    """
    if upgrade_id is None:
        return
    refuse_ended(s, upgrade_id)
    refuse_overtaken(s, upgrade_id, leader_token)
    if phase not in (None, now_in := s.get_one(UpgradeRow, upgrade_id).phase):
        raise errors.WrongPhase(f"Upgrade {upgrade_id} is {now_in} by now, not {phase}; run the same command again")


def forget_work(s: Session, upgrades: Sequence[int]) -> None:
    """Delete the work lists, intents and quarantine of these upgrades, and the requests of searches."""
    forget_list(s, upgrades)
    piecewise(s, delete(IntentRow), IntentRow.upgrade_id.in_(upgrades))


def forget_list(s: Session, upgrades: Sequence[int]) -> None:
    """Delete the work lists and quarantine of these upgrades, and the requests of searches."""
    for table in (BatchRow, QuarantineRow, AskedForRow):
        piecewise(s, delete(table), table.upgrade_id.in_(upgrades))


def piecewise(s: Session, change: Delete | Update, which: ColumnElement[bool]) -> None:
    """Delete or change the rows that match, `MANY` at a time. A row that was changed must not match any more."""
    (own,) = change.table.primary_key
    some = change.where(own.in_(select(own).where(which).limit(MANY))).execution_options(synchronize_session=False)
    while s.execute(some).rowcount:  # type: ignore[attr-defined]
        pass


def new_batch(upgrade_id: int, priority: int, ids: Sequence[Id], origin: Mapping[str, Any] | None, **begun: Any) -> BatchRow:
    """Make the row of a batch: a pending one, except for the columns in `begun`."""
    return BatchRow(
        upgrade_id=upgrade_id,
        priority=priority,
        ids=pack_ids(ids),
        count=len(ids),
        origin=None if origin is None else dict(origin),
        **{"state": BatchState.PENDING} | begun,
    )


def lock_list(s: Session, upgrade_id: int) -> None:
    """Let no other transaction add single records to the upgrade's work list until this one ends."""
    s.execute(select(UpgradeRow.id).where(UpgradeRow.id == upgrade_id).with_for_update(key_share=True))


def listed(s: Session, upgrade_id: int) -> Iterator[Id]:
    """Yield the ids of every batch that is not retired."""
    after, mine = 0, and_(BatchRow.upgrade_id == upgrade_id, BatchRow.state != BatchState.RETIRED)
    # A page at a time: PostgreSQL ends a transaction that sends nothing for ten seconds, and unpacking takes long.
    page = select(BatchRow.id, BatchRow.ids).where(mine).order_by(BatchRow.id).limit(500)
    while rows := s.execute(page.where(BatchRow.id > after)).all():
        for after, packed in rows:  # noqa: B007 (the next page begins after the last)
            yield from unpack_ids(packed)


def listed_among(s: Session, upgrade_id: int, ids: Collection[Id]) -> set[Id]:
    """Return those of these ids that a batch holds which is not retired."""
    return set(ids).intersection(listed(s, upgrade_id)) if ids else set()


def set_aside(s: Session, upgrade_id: int, ids: Sequence[Id]) -> set[str]:
    """Return the keys of the records among these that are quarantined.

    If you read the batches first, you find each record that moves from a batch to the quarantine in at least one of them.
    """
    mine = [and_(QuarantineRow.upgrade_id == upgrade_id, QuarantineRow.record.in_(map(key, some))) for some in chunks(ids, 500)]
    return {record for each in mine for record in s.scalars(select(QuarantineRow.record).where(each))}


def take_out(s: Session, upgrade_id: int, ids: Sequence[Id]) -> set[str]:
    """Take records out of quarantine. Return the keys of those that were in it."""
    removed: set[str] = set()
    for some in chunks(list(ids), 500):
        mine = and_(QuarantineRow.upgrade_id == upgrade_id, QuarantineRow.record.in_([key(id) for id in some]))
        removed.update(s.scalars(delete(QuarantineRow).where(mine).returning(QuarantineRow.record)))
    return removed


def at_priority(upgrade_id: int, priority: int) -> tuple[ColumnElement[bool], ...]:
    """Match the batches of that priority, in any state. The states are named, since the index has them before the priority."""
    return BatchRow.upgrade_id == upgrade_id, BatchRow.state.in_(list(BatchState)), BatchRow.priority == priority


def last_priority(s: Session, upgrade_id: int) -> int:
    """Return the priority of the last batch, 0 if there is none."""
    return s.scalar(select(func.max(BatchRow.priority)).where(BatchRow.upgrade_id == upgrade_id)) or 0


def chunks(values: Sequence[T], size: int) -> Iterable[Sequence[T]]:
    """Yield `size` values at a time, in order, because every database limits the length of a statement."""
    return (values[start : start + size] for start in range(0, len(values), size))
