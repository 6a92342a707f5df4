"""Intents: a client announces a write of a record before it makes it, and marks it done or withdraws it afterwards."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, and_, bindparam, delete, exists, func, or_, select, true, update
from sqlalchemy.orm import Session, aliased

from rmvdb.errors import Mismatch
from rmvdb.registry import shared_queries
from rmvdb.registry.clock import clock, now
from rmvdb.registry.codec import key, unpack_ids
from rmvdb.registry.session import Database, transaction
from rmvdb.registry.tables import BatchRow, ClientRow, GalleryRow, IntentRow, UpgradeRow
from rmvdb.types import BatchState, Id, IdType, Phase, ServingPlan

#: The prefix of a conductor's name as a writer. A client's name begins with its host's, which has no blanks.
CONDUCTOR = "upgrade "
#: The most bytes of an id. An index entry of PostgreSQL has about 2,700.
LONGEST_ID = 2500


@dataclass(frozen=True, kw_only=True, slots=True)
class Opened:
    """A client's open intents, and the plan that the write must follow."""

    plan: ServingPlan
    intents: tuple[int, ...]
    upgrade: int | None
    #: The name of this write.
    client: str
    #: The gallery's number, and the keys of the records.
    gallery: int
    records: tuple[str, ...]


class Intents(Database):
    """Intents, for the client that writes, for other writers and for workers."""

    @transaction
    def open_intents(
        self, s: Session, /, gallery: str, kind: str, ids: Sequence[Id], *, client: str, lasting: float
    ) -> Opened | None:
        """Announce a write of these records, and read the plan that it must follow, in one transaction.

        Return None while an epoch changes, and until every live client serves by the new plan: a client that searches by the
        plan before would miss the write. `client` names this one write of a client, so that a repeated call replaces the first.

        Raises:
            Mismatch: PostgreSQL could not store an id.
        """
        refuse_unstorable(ids)
        # Locked until the commit, so that others see two writes of one record in the order of their ids.
        row = shared_queries.named(s, GalleryRow, "gallery", gallery, lock=shared_queries.FOR_CHANGE)
        if shared_queries.closing(s, row) or s.scalar(_behind(s, row)):
            return None
        # A repetition, because the first answer was lost or an epoch was changing, must not wait for its own first try.
        mine = and_(IntentRow.record.in_([key(id) for id in ids]), IntentRow.client == client)
        s.execute(delete(IntentRow).where(IntentRow.gallery_id == row.id, mine))
        plan = shared_queries.plan(s, row, row.epoch)
        upgrade = _writing_for(s, row, plan)
        if upgrade is None:  # a statement of its own, because SQLite uses no index for an `or`
            s.execute(delete(IntentRow).where(IntentRow.gallery_id == row.id, _forgotten(row)))
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
        intents, records = tuple(each.id for each in made), tuple(each.record for each in made)
        return Opened(plan=plan, intents=intents, upgrade=upgrade, client=client, gallery=row.id, records=records)

    @transaction
    def close_intents(self, s: Session, /, opened: Opened, sketches: Mapping[int, bytes] | None = None) -> bool:
        """Mark a write as done, and return True. Return False if its deadline is over.

        Outside an upgrade the intents are deleted, because nothing reads them again. `sketches`: by intent, the sketch of the
        vector that was written into the collection that the upgrade fills.
        """
        mine = _of(opened)
        in_time = and_(mine, ~IntentRow.done, IntentRow.deadline > clock())
        if opened.upgrade is None:
            s.execute(delete(IntentRow).where(in_time))
        else:
            s.execute(update(IntentRow).where(in_time).values(done=True, done_at=clock()))
            if sketches:  # clean-up may have deleted the intent meanwhile: then the update changes nothing
                table = IntentRow.metadata.tables[IntentRow.__tablename__]
                this = and_(table.c.id == bindparam("intent"), table.c.client == opened.client)
                store = update(table).where(this).values(sketch=bindparam("of_it"))
                s.execute(store, [{"intent": intent, "of_it": sketch} for intent, sketch in sketches.items()])
            s.execute(delete(IntentRow).where(_superseded_by(opened)).execution_options(synchronize_session=False))
        return s.scalar(select(IntentRow.id).where(mine, ~IntentRow.done).limit(1)) is None

    @transaction
    def extend_intents(self, s: Session, /, opened: Opened, *, lasting: float) -> bool:
        """Extend the deadline of a write that waits. Return False if it is over: then the write counts as never made."""
        in_time = and_(_of(opened), IntentRow.deadline > clock())
        extended = s.execute(update(IntentRow).where(in_time).values(deadline=clock() + lasting))
        return bool(extended.rowcount == len(opened.intents))  # type: ignore[attr-defined]

    @transaction
    def withdraw_intents(self, s: Session, /, opened: Opened) -> None:
        """Delete the intents of a write that never began."""
        s.execute(delete(IntentRow).where(_of(opened)))

    @transaction
    def blocked(self, s: Session, /, opened: Opened, ids: Sequence[Id]) -> bool:
        """Return whether a live claim on one of these ids is *writing*, or an earlier write of one of them is still open."""
        gallery_id = s.scalar(select(IntentRow.gallery_id).where(IntentRow.id == opened.intents[0]))
        keys = [key(id) for id in ids]
        earlier = and_(IntentRow.gallery_id == gallery_id, IntentRow.record.in_(keys), IntentRow.id < opened.intents[0])
        if s.scalar(select(IntentRow.id).where(earlier, ~IntentRow.done, IntentRow.deadline > clock()).limit(1)):
            return True
        live = and_(BatchRow.upgrade_id == opened.upgrade, BatchRow.lease_until > clock())
        writing = s.scalars(select(BatchRow.ids).where(live, BatchRow.state == BatchState.WRITING)).all()
        removing = s.scalars(select(BatchRow.remove_from_new).where(live, BatchRow.state == BatchState.REMOVING)).all()
        wanted = set(ids)
        return any(wanted.intersection(unpack_ids(packed)) for packed in (*writing, *removing))

    @transaction
    def intents(self, s: Session, /, upgrade_id: int, ids: Collection[Id]) -> dict[str, IntentRow]:
        """Return, by key, the intent that decides for each record: an open one within its deadline, else the last done one."""
        valid = or_(IntentRow.done, IntentRow.deadline > clock())
        rows: dict[str, IntentRow] = {}
        for row in _intents_of(s, upgrade_id, ids, valid):
            if row.record not in rows or rows[row.record].done:
                rows[row.record] = row
        return rows

    @transaction
    def announced(self, s: Session, /, upgrade_id: int, ids: Collection[Id]) -> dict[str, IntentRow]:
        """Return, by key, the last intent of each record, in any state.

        Its writer may have been killed before or after the write reached the engine.
        """
        return {row.record: row for row in _intents_of(s, upgrade_id, ids, true())}

    @transaction
    def last_done(self, s: Session, /, upgrade_id: int, ids: Collection[Id]) -> dict[str, str]:
        """Return, by key, the kind (`upsert` or `delete`) of the last done write of each record by a client."""
        by_client = and_(IntentRow.done, ~IntentRow.client.startswith(CONDUCTOR))
        return {row.record: row.kind for row in _intents_of(s, upgrade_id, ids, by_client)}

    @transaction
    def last_intent(self, s: Session, /, gallery_id: int) -> int:
        """Return the number of the gallery's last intent. Later intents of this gallery have larger numbers."""
        return s.scalar(select(func.max(IntentRow.id)).where(IntentRow.gallery_id == gallery_id)) or 0

    @transaction
    def forget_done(self, s: Session, /, upgrade_id: int, ids: Collection[Id], *, upto: int) -> None:
        """Delete the done intents of these records up to that number: another program has put the records where they are."""
        mine = [row.id for row in _intents_of(s, upgrade_id, ids, and_(IntentRow.done, IntentRow.id <= upto))]
        for some in shared_queries.chunks(mine, 5_000):
            s.execute(delete(IntentRow).where(IntentRow.id.in_(some)))

    @transaction
    def written(self, s: Session, /, upgrade_id: int, *, after: int = 0, limit: int = 1000) -> Sequence[IntentRow]:
        """Return one page of an upgrade's intents, in any state, by row id."""
        rows = select(IntentRow).where(IntentRow.upgrade_id == upgrade_id, IntentRow.id > after)
        return s.scalars(rows.order_by(IntentRow.id).limit(limit)).all()

    @transaction
    def open_writes(self, s: Session, /, gallery_id: int) -> set[int]:
        """Return the intents of the writes under way, one for each record."""
        mine = and_(IntentRow.gallery_id == gallery_id, ~IntentRow.done, IntentRow.deadline > clock())
        return set(s.scalars(select(IntentRow.id).where(mine)))

    @transaction
    def expired_writes(self, s: Session, /, gallery: str) -> list[Id]:
        """Return the records of writes that never ended and began outside an upgrade, or while one copied.

        Such a write may be made in part.
        """
        row = shared_queries.named(s, GalleryRow, "gallery", gallery)
        unended = and_(IntentRow.gallery_id == row.id, IntentRow.upgrade_id.is_(None), ~IntentRow.done)
        keys = s.scalars(select(IntentRow.record).where(unended, IntentRow.deadline <= clock()).distinct())
        return [int(each) if row.id_type == IdType.INT64 else each for each in keys]


def refuse_unstorable(ids: Sequence[Id]) -> None:
    """Raise Mismatch for an id that a registry in PostgreSQL cannot hold."""
    if (bad := next((id for id in ids if "\0" in key(id)), None)) is not None:
        raise Mismatch(
            f"The id {bad!r} cannot be stored: it contains NUL, which a registry in PostgreSQL cannot hold; rename the record"
        )
    if (long := next((id for id in ids if len(key(id).encode()) > LONGEST_ID), None)) is not None:
        raise Mismatch(
            f"The id {long!r:.60}… has more than {LONGEST_ID:,} bytes, which a registry in PostgreSQL cannot index; "
            "rename the record"
        )


def _superseded_by(opened: Opened) -> ColumnElement[bool]:
    """Select the done intents before a done write of the same records: only the last one counts.

    A conductor's write supersedes only conductors' ones, because the last write by a client counts, too.
    """
    own = aliased(IntentRow)
    before = and_(
        IntentRow.gallery_id == opened.gallery,
        IntentRow.record.in_(opened.records),
        IntentRow.upgrade_id == opened.upgrade,
        IntentRow.done,
        IntentRow.id < min(opened.intents, default=0),
        exists().where(own.id.in_(opened.intents), own.client == opened.client, own.done),
    )
    return and_(before, IntentRow.client.startswith(CONDUCTOR)) if opened.client.startswith(CONDUCTOR) else before


def _of(opened: Opened) -> ColumnElement[bool]:
    """Match the intents of this write. A registry that was rebuilt may have given their numbers to another write."""
    return and_(IntentRow.id.in_(opened.intents), IntentRow.client == opened.client)


def _forgotten(gallery: GalleryRow) -> ColumnElement[bool]:
    """Match intents past their deadline while there is no upgrade: the next upgrade begins with whatever they wrote.

    `expired_writes` returns those from the time of a copy.
    """
    on = select(UpgradeRow.id).where(UpgradeRow.gallery_id == gallery.id, UpgradeRow.phase != Phase.ENDED)
    return and_(IntentRow.upgrade_id.is_(None), ~IntentRow.done, IntentRow.deadline <= clock(), ~on.exists())


def _writing_for(s: Session, gallery: GalleryRow, plan: ServingPlan) -> int | None:
    """Return the upgrade that must know of a write under this plan: the one that fills the plan's first collection.

    This may not be the active one: while an upgrade is planned, writes still go to the old collection alone, or belong to the
    upgrade that it supersedes.
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
    # The statement does not name the upgrade: SQLite would read all its intents rather than look these records up.
    gallery = select(UpgradeRow.gallery_id).where(UpgradeRow.id == upgrade_id).scalar_subquery()
    for some in shared_queries.chunks([key(id) for id in ids], 5_000):
        rows = select(IntentRow).where(IntentRow.gallery_id == gallery, IntentRow.record.in_(some), which)
        yield from (row for row in s.scalars(rows.order_by(IntentRow.id)) if row.upgrade_id == upgrade_id)
