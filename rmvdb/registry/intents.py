"""Writes of clients: announced record by record before they are made, done or given up after."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, and_, bindparam, delete, func, or_, select, true, update
from sqlalchemy.orm import Session

from rmvdb.errors import Mismatch
from rmvdb.registry import shared_queries
from rmvdb.registry.clock import clock, now
from rmvdb.registry.codec import key, unpack_ids
from rmvdb.registry.session import Database, transaction
from rmvdb.registry.tables import BatchRow, ClientRow, GalleryRow, IntentRow, UpgradeRow
from rmvdb.types import BatchState, Id, IdType, Phase, ServingPlan

#: How the name begins under which a conductor writes. That of a client begins with its host's, which has no blanks.
CONDUCTOR = "upgrade "
#: Bytes of an id: an entry of an index of PostgreSQL has about 2,700.
LONGEST_ID = 2500


@dataclass(frozen=True, kw_only=True, slots=True)
class Opened:
    """A client's intents, and the plan that they were made under."""

    plan: ServingPlan
    intents: tuple[int, ...]
    upgrade: int | None
    #: The name of this write.
    client: str


class Intents(Database):
    """Intents, and what they say to workers and to other writers."""

    @transaction
    def open_intents(
        self, s: Session, /, gallery: str, kind: str, ids: Sequence[Id], *, client: str, lasting: float
    ) -> Opened | None:
        """Register a write of these records and read the plan it must follow in one transaction; None while an epoch changes,
        and until every live client serves by it: one that searches by the plan before would miss what is written.

        `client` names this one write of a client, so that the same call again takes the place of the first. Mismatch for an id
        that PostgreSQL could not keep.
        """
        if (bad := next((id for id in ids if "\0" in key(id)), None)) is not None:
            raise Mismatch(f"The id {bad!r} cannot be kept: it contains NUL, which PostgreSQL has in no text; rename the record")
        if (long := next((id for id in ids if len(key(id).encode()) > LONGEST_ID), None)) is not None:
            raise Mismatch(
                f"The id {long!r:.60}… has more than {LONGEST_ID:,} bytes, which PostgreSQL cannot index; rename the record"
            )
        # Locked until the commit, so that of two writes of one record the one with the smaller id is also seen first.
        row = shared_queries.named(s, GalleryRow, "gallery", gallery, lock=shared_queries.FOR_CHANGE)
        if shared_queries.closing(s, row) or s.scalar(_behind(s, row)):
            return None
        # Repeated because the first answer was lost, or an epoch was changing: this write must not wait for itself.
        mine = and_(IntentRow.record.in_([key(id) for id in ids]), IntentRow.client == client)
        s.execute(delete(IntentRow).where(IntentRow.gallery_id == row.id, or_(mine, _forgotten(row))))
        plan = shared_queries.plan(s, row, row.epoch)
        upgrade = _writing_for(s, row, plan)
        at = now(s)
        made = [
            IntentRow(
                gallery_id=row.id,
                upgrade_id=upgrade,
                record=key(id),
                kind=kind,
                epoch=row.epoch,
                client=client,
                opened_at=at,
                deadline=at + lasting,
            )
            for id in ids
        ]
        s.add_all(made)
        s.flush()
        return Opened(plan=plan, intents=tuple(each.id for each in made), upgrade=upgrade, client=client)

    @transaction
    def close_intents(self, s: Session, /, opened: Opened, sketches: Mapping[int, bytes] | None = None) -> bool:
        """Mark a write as done, unless it is past its deadline; outside an upgrade nobody asks for it again.

        `sketches`: by intent, of the vectors that were written into the collection that the upgrade fills.
        """
        mine = _of(opened)
        in_time = and_(mine, ~IntentRow.done, IntentRow.deadline > clock())
        if opened.upgrade is None:
            s.execute(delete(IntentRow).where(in_time))
        else:
            s.execute(update(IntentRow).where(in_time).values(done=True, done_at=clock()))
            if sketches:  # of an intent that clean-up has forgotten meanwhile nothing is kept
                table = IntentRow.metadata.tables[IntentRow.__tablename__]
                this = and_(table.c.id == bindparam("intent"), table.c.client == opened.client)
                kept = update(table).where(this).values(sketch=bindparam("of_it"))
                s.execute(kept, [{"intent": intent, "of_it": sketch} for intent, sketch in sketches.items()])
        return s.scalar(select(IntentRow.id).where(mine, ~IntentRow.done).limit(1)) is None

    @transaction
    def extend_intents(self, s: Session, /, opened: Opened, *, lasting: float) -> bool:
        """Announce a write that still waits anew; False where its deadline has made everybody believe that it was never made."""
        in_time = and_(_of(opened), IntentRow.deadline > clock())
        extended = s.execute(update(IntentRow).where(in_time).values(deadline=clock() + lasting))
        return bool(extended.rowcount == len(opened.intents))  # type: ignore[attr-defined]

    @transaction
    def withdraw_intents(self, s: Session, /, opened: Opened) -> None:
        """Forget a write that never began."""
        s.execute(delete(IntentRow).where(_of(opened)))

    @transaction
    def blocked(self, s: Session, /, opened: Opened, ids: Sequence[Id]) -> bool:
        """Whether a live claim that holds one of these ids is *writing*, or an earlier write of one of them is still open."""
        gallery_id = s.scalar(select(IntentRow.gallery_id).where(IntentRow.id == opened.intents[0]))
        keys = [key(id) for id in ids]
        earlier = and_(IntentRow.gallery_id == gallery_id, IntentRow.record.in_(keys), IntentRow.id < opened.intents[0])
        if s.scalar(select(IntentRow.id).where(earlier, ~IntentRow.done, IntentRow.deadline > clock()).limit(1)):
            return True
        live = and_(BatchRow.upgrade_id == opened.upgrade, BatchRow.lease_until > clock())
        writing = s.scalars(select(BatchRow.ids).where(live, BatchRow.state == BatchState.WRITING)).all()
        undoing = s.scalars(select(BatchRow.gone).where(live, BatchRow.state == BatchState.REMOVING)).all()
        wanted = set(ids)
        return any(wanted.intersection(unpack_ids(packed)) for packed in (*writing, *undoing))

    @transaction
    def intents(self, s: Session, /, upgrade_id: int, ids: Collection[Id]) -> dict[str, IntentRow]:
        """By key, the intent that decides for each of these records: one that is open within its deadline, else the last done."""
        valid = or_(IntentRow.done, IntentRow.deadline > clock())
        rows: dict[str, IntentRow] = {}
        for row in _intents_of(s, upgrade_id, ids, valid):
            if row.record not in rows or rows[row.record].done:
                rows[row.record] = row
        return rows

    @transaction
    def announced(self, s: Session, /, upgrade_id: int, ids: Collection[Id]) -> dict[str, IntentRow]:
        """By key, the last intent of each of these records, in whatever state: its writer may have been killed before or after
        the write reached the engine."""
        return {row.record: row for row in _intents_of(s, upgrade_id, ids, true())}

    @transaction
    def last_done(self, s: Session, /, upgrade_id: int, ids: Collection[Id]) -> dict[str, str]:
        """By key, `upsert` or `delete`: what the last write by a client that was done of each of these records was."""
        by_client = and_(IntentRow.done, ~IntentRow.client.startswith(CONDUCTOR))
        return {row.record: row.kind for row in _intents_of(s, upgrade_id, ids, by_client)}

    @transaction
    def last_intent(self, s: Session, /) -> int:
        """The number of the last one; those to come are larger."""
        return s.scalar(select(func.max(IntentRow.id))) or 0

    @transaction
    def forget_done(self, s: Session, /, upgrade_id: int, ids: Collection[Id], *, upto: int) -> None:
        """What was written of these records, up to that intent, counts no more: another program has put them where they are."""
        mine = and_(IntentRow.upgrade_id == upgrade_id, IntentRow.record.in_([key(id) for id in ids]))
        s.execute(delete(IntentRow).where(mine, IntentRow.done, IntentRow.id <= upto))

    @transaction
    def written(self, s: Session, /, upgrade_id: int, *, after: int = 0, limit: int = 1000) -> Sequence[IntentRow]:
        """The intents of an upgrade, in whatever state, by row id, a page at a time."""
        rows = select(IntentRow).where(IntentRow.upgrade_id == upgrade_id, IntentRow.id > after)
        return s.scalars(rows.order_by(IntentRow.id).limit(limit)).all()

    @transaction
    def open_writes(self, s: Session, /, gallery_id: int) -> set[int]:
        """The intents of writes that are under way, one a record."""
        mine = and_(IntentRow.gallery_id == gallery_id, ~IntentRow.done, IntentRow.deadline > clock())
        return set(s.scalars(select(IntentRow.id).where(mine)))

    @transaction
    def expired_writes(self, s: Session, /, gallery: str) -> list[Id]:
        """The records of writes that were begun outside an upgrade, or while one copied, and never ended: in part they may be
        made."""
        row = shared_queries.named(s, GalleryRow, "gallery", gallery)
        never = and_(IntentRow.gallery_id == row.id, IntentRow.upgrade_id.is_(None), ~IntentRow.done)
        keys = s.scalars(select(IntentRow.record).where(never, IntentRow.deadline <= clock()).distinct())
        return [int(each) if row.id_type == IdType.INT64 else each for each in keys]


def _of(opened: Opened) -> ColumnElement[bool]:
    """A registry that was lost and rebuilt may have given these numbers to another write."""
    return and_(IntentRow.id.in_(opened.intents), IntentRow.client == opened.client)


def _forgotten(gallery: GalleryRow) -> ColumnElement[bool]:
    """Intents past their deadline while there is no upgrade: one that comes begins with what they left. (`expired_writes` gives
    those from while a copy was made.)"""
    on = select(UpgradeRow.id).where(UpgradeRow.gallery_id == gallery.id, UpgradeRow.phase != Phase.ENDED)
    return and_(IntentRow.upgrade_id.is_(None), ~IntentRow.done, IntentRow.deadline <= clock(), ~on.exists())


def _writing_for(s: Session, gallery: GalleryRow, plan: ServingPlan) -> int | None:
    """The upgrade that must know of a write made under this plan: the one that fills the collection written to.

    Not simply the active one: while an upgrade is planned its writes still go to the old collection alone, or belong to the
    upgrade whose place it takes.
    """
    active = s.scalar(select(UpgradeRow).where(UpgradeRow.gallery_id == gallery.id, UpgradeRow.phase != Phase.ENDED))
    if active is None:
        return None
    before = (s.get(UpgradeRow, each) for each in (active.undoes, active.supersedes) if each is not None)
    filling = (each.id for each in (active, *before) if each is not None and each.new_collection == plan.legs[0].collection)
    return next(filling, None)


def _behind(s: Session, gallery: GalleryRow) -> Any:
    return shared_queries.live_clients(s, gallery).where(ClientRow.epoch < gallery.epoch).limit(1)


def _intents_of(s: Session, upgrade_id: int, ids: Collection[Id], which: ColumnElement[bool]) -> Iterable[IntentRow]:
    for some in shared_queries.chunks([key(id) for id in ids], 500):
        found = select(IntentRow).where(IntentRow.upgrade_id == upgrade_id, IntentRow.record.in_(some), which)
        yield from s.scalars(found.order_by(IntentRow.id))
