"""Upgrades, their history, and who conducts them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from sqlalchemy import and_, or_, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from rmvdb import errors
from rmvdb.registry import shared_queries
from rmvdb.registry.clock import clock, day, now
from rmvdb.registry.session import Database, transaction
from rmvdb.registry.tables import BatchRow, GalleryRow, IntentRow, PhaseRow, UpgradeRow
from rmvdb.types import BatchState, Phase

#: How the note begins of an upgrade that goes on once another that had taken its place has ended.
GOES_ON = "goes on after upgrade"
#: Gives those columns of a new upgrade that depend on its number.
Details: TypeAlias = Callable[[int], Mapping[str, Any]]


class Upgrades(Database):
    """Upgrades, their history, and the leadership of each: who conducts it."""

    @transaction
    def add_upgrade(self, s: Session, /, details: Details = lambda _: {}, **values: Any) -> UpgradeRow:
        """Register an upgrade; UpgradeRunning while the gallery has one that has not ended."""
        try:
            row = _new_upgrade(s, values, details)
        except IntegrityError as exc:
            s.rollback()
            raise errors.UpgradeRunning(
                "Another upgrade of this gallery has not ended; see it with: rmvdb status, then cutover, cleanup or rollback"
            ) from exc
        s.add(PhaseRow(upgrade_id=row.id, at=day(s), phase=row.phase, note="registered"))
        return row

    @transaction
    def supersede(
        self, s: Session, /, ended: int, details: Details = lambda _: {}, *, epoch: int, note: str, **values: Any
    ) -> UpgradeRow:
        """End one upgrade and register the one that takes its place, in one transaction; what it announced is taken back.

        WrongPhase where it has ended or is being cleaned up, or where another plan is in force than that of `epoch`: what was
        decided is out of date.
        """
        # Locked before anything is looked at: whoever conducts the upgrade that ends may be about to change the plan.
        gallery = s.scalars(shared_queries.gallery_of(ended).with_for_update(key_share=True, of=GalleryRow)).one()
        before = s.get_one(UpgradeRow, ended, with_for_update=True)
        heir = and_(or_(UpgradeRow.undoes == ended, UpgradeRow.supersedes == ended), UpgradeRow.phase != Phase.ENDED)
        if there := s.scalar(select(UpgradeRow).where(heir, UpgradeRow.to_version == values["to_version"])):
            return there  # repeated, because the answer of the first try was lost
        shared_queries.refuse_ended(s, ended)
        if not before.makes_way:
            shared_queries.refuse_paused(before)
        if before.phase == Phase.CLEANING_UP:
            raise errors.WrongPhase(f"Upgrade {ended} is {before.phase}; there is no way back from there")
        if gallery.epoch != epoch:
            raise errors.WrongPhase(f"Gallery {gallery.name!r} is served differently since; run the same command again")
        in_hand = and_(
            BatchRow.upgrade_id == values.get("supersedes"), BatchRow.state.in_((*shared_queries.BEGUN, BatchState.COPIED))
        )
        if batch := s.scalar(select(BatchRow.id).where(in_hand).limit(1)):
            raise errors.WrongPhase(f"Batch {batch} of upgrade {ended} is in hand again; run the same command again")
        gallery.next_epoch, gallery.closing_until = None, None
        before.phase, before.ended_at = Phase.ENDED, day(s)
        s.flush()  # one active upgrade per gallery: the old one ends first
        row = _new_upgrade(s, values, details)
        s.add(PhaseRow(upgrade_id=ended, at=day(s), phase=Phase.ENDED, note=note))
        s.add(PhaseRow(upgrade_id=row.id, at=day(s), phase=row.phase, note=f"takes the place of upgrade {ended}"))
        return row

    @transaction
    def active_upgrade(self, s: Session, /, gallery_id: int) -> UpgradeRow | None:
        """The upgrade of this gallery that has not ended."""
        return shared_queries.active_upgrade(s, gallery_id)

    @transaction
    def upgrade(self, s: Session, /, upgrade_id: int) -> UpgradeRow:
        """One upgrade as it is now."""
        return s.get_one(UpgradeRow, upgrade_id)

    @transaction
    def upgrades(self, s: Session, /, gallery_id: int | None = None) -> Sequence[UpgradeRow]:
        """Upgrades, ended ones too, oldest first."""
        every = select(UpgradeRow).order_by(UpgradeRow.id)
        return s.scalars(every if gallery_id is None else every.where(UpgradeRow.gallery_id == gallery_id)).all()

    @transaction
    def set_upgrade(
        self,
        s: Session,
        /,
        upgrade_id: int,
        *,
        note: str = "",
        was: Phase | None = None,
        leader_token: int | None = None,
        **values: Any,
    ) -> None:
        """Change attributes; a changed phase or a note goes into the history. WrongPhase for the phase of one that has ended.

        Nothing changes where `was` is given and the upgrade is in another phase: somebody else was faster. UpgradeRunning where
        another has taken the leadership since that token was given.
        """
        row = s.get_one(UpgradeRow, upgrade_id, with_for_update=True)
        shared_queries.refuse_overtaken(s, upgrade_id, leader_token)
        if was is not None and row.phase not in (was, Phase.ENDED):
            return
        changed = values.get("phase", row.phase) != row.phase
        if changed:
            shared_queries.refuse_ended(s, upgrade_id)
        for name, value in values.items():
            setattr(row, name, value)
        if values.get("phase") == Phase.ENDED:
            row.ended_at = day(s)
        if changed or note:
            s.add(PhaseRow(upgrade_id=upgrade_id, at=day(s), phase=row.phase, note=note))

    @transaction
    def pause(self, s: Session, /, upgrade_id: int, *, note: str = "paused") -> None:
        """Let nothing of an upgrade go on but what is in hand: once this returns, no batch begins and no epoch changes.

        Raises:
            WrongPhase: the upgrade has ended.
        """
        gallery, row = _locked(s, upgrade_id)
        shared_queries.refuse_ended(s, upgrade_id)
        if row.paused_at is None:
            row.paused, row.paused_at = True, now(s)
            s.add(PhaseRow(upgrade_id=upgrade_id, at=day(s), phase=row.phase, note=note))
        gallery.closing_until = None  # a change of epoch that cannot come holds up no write

    @transaction
    def resume(self, s: Session, /, upgrade_id: int, *, note: str = "no longer paused") -> None:
        """Let an upgrade go on after a pause; a comparison that the pause interrupted goes on from where it was."""
        _, row = _locked(s, upgrade_id)
        if row.verifying and row.paused_at is not None and "at" in row.verifying:
            row.verifying = row.verifying | {"at": row.verifying["at"] + now(s) - max(row.paused_at, row.verifying["at"])}
        row.paused, row.paused_at = False, None
        s.add(PhaseRow(upgrade_id=upgrade_id, at=day(s), phase=row.phase, note=note))

    @transaction
    def make_way(self, s: Session, /, upgrade_id: int, *, paused: bool, note: str) -> None:
        """Pause an upgrade while another takes its place, or let it go on if none did; a pause by command stays."""
        _, row = _locked(s, upgrade_id)
        row.paused = paused or row.paused_at is not None
        s.add(PhaseRow(upgrade_id=upgrade_id, at=day(s), phase=row.phase, note=note))

    @transaction
    def since_given_up(self, s: Session, /, gallery_id: int) -> bool:
        """Whether the upgrade that is on has got any further since one that had taken its place was given up, if one was."""
        row = s.scalar(select(UpgradeRow).where(UpgradeRow.gallery_id == gallery_id, UpgradeRow.phase != Phase.ENDED))
        if row is None:
            return False
        last = s.scalar(select(PhaseRow.note).where(PhaseRow.upgrade_id == row.id).order_by(PhaseRow.id.desc()).limit(1))
        return not (last or "").startswith(GOES_ON)

    @transaction
    def refuse_ended(self, s: Session, /, upgrade_id: int) -> None:
        """WrongPhase where the upgrade has ended: another has taken its place, or undone it."""
        shared_queries.refuse_ended(s, upgrade_id)

    @transaction
    def begin_clean_up(self, s: Session, /, upgrade_id: int) -> None:
        """From here on there is no way back; WrongPhase where the upgrade is not cut over, or what would go is in service."""
        gallery = s.scalars(shared_queries.gallery_of(upgrade_id).with_for_update(key_share=True, of=GalleryRow)).one()
        row = s.get_one(UpgradeRow, upgrade_id, with_for_update=True)
        shared_queries.refuse_ended(s, upgrade_id)
        shared_queries.refuse_paused(row)
        if row.phase not in (Phase.CUT_OVER, Phase.CLEANING_UP):
            raise errors.WrongPhase(f"The upgrade is {row.phase}; clean up comes after cut-over: rmvdb cutover")
        if served := _in_service(s, gallery, row) & set(row.leaving):
            raise errors.WrongPhase(f"Collection {min(served)!r} is in service and cannot be dropped: rmvdb rollback")
        if row.phase == Phase.CUT_OVER:
            row.phase = Phase.CLEANING_UP
            s.add(PhaseRow(upgrade_id=upgrade_id, at=day(s), phase=row.phase, note="no way back from here"))

    @transaction
    def abandon(self, s: Session, /, upgrade_id: int, *, note: str) -> bool:
        """End an upgrade that nothing is served by, and take back what it announced; the one that it superseded goes on.

        True where it was given up with this `note` before; False where it is served already, or ended in another way.
        """
        gallery = s.scalars(shared_queries.gallery_of(upgrade_id).with_for_update(of=GalleryRow)).one()
        upgrade = s.get_one(UpgradeRow, upgrade_id)
        ended = select(PhaseRow.id).where(PhaseRow.upgrade_id == upgrade_id, PhaseRow.phase == Phase.ENDED, PhaseRow.note == note)
        if s.scalar(ended):
            return True  # by another one at once, or by a first try whose answer was lost
        shared_queries.refuse_paused(upgrade)
        if (
            upgrade.phase != Phase.PLANNED
            or upgrade.new_collection == shared_queries.plan(s, gallery, gallery.epoch).legs[0].collection
        ):
            return False
        gallery.next_epoch, gallery.closing_until = None, None
        _end(s, [upgrade_id], note=note, resume=upgrade.supersedes)
        return True

    @transaction
    def end(self, s: Session, /, upgrade_id: int, *others: int, note: str, resume: int | None = None) -> None:
        """End an upgrade for good. Its work list and intents go, and those of the `others` that ended before; histories stay.

        `resume`: the upgrade that goes on from where it was superseded; the writes announced since are its own from here on.
        """
        _end(s, (upgrade_id, *others), note=note, resume=resume)

    @transaction
    def history(self, s: Session, /, upgrade_id: int) -> Sequence[PhaseRow]:
        """What happened to an upgrade, in order."""
        return s.scalars(select(PhaseRow).where(PhaseRow.upgrade_id == upgrade_id).order_by(PhaseRow.id)).all()

    @transaction
    def lead(self, s: Session, /, upgrade_id: int, worker: str, seconds: float) -> int | None:
        """Become the one process that makes batches and changes phases; its fencing token, None while another has it."""
        free = or_(UpgradeRow.conductor.is_(None), UpgradeRow.conductor == worker, UpgradeRow.conductor_until < clock())
        row = s.scalar(select(UpgradeRow).where(UpgradeRow.id == upgrade_id, free).with_for_update())
        if row is None:
            return None
        row.conductor, row.conductor_until, row.baton = worker, now(s) + seconds, row.baton + 1
        return row.baton

    @transaction
    def keep_leading(self, s: Session, /, upgrade_id: int, leader_token: int, seconds: float) -> bool:
        """Hold the leadership for longer; `seconds=0` hands it back. False if another has it by now."""
        row = s.get(UpgradeRow, upgrade_id, with_for_update=True)
        if row is None or row.baton != leader_token:
            return False
        row.conductor, row.conductor_until = (row.conductor, now(s) + seconds) if seconds else (None, None)
        return True

    @transaction
    def refuse_overtaken(self, s: Session, /, upgrade_id: int, leader_token: int | None) -> None:
        """UpgradeRunning if another has taken the leadership."""
        shared_queries.refuse_overtaken(s, upgrade_id, leader_token)


def _locked(s: Session, upgrade_id: int) -> tuple[GalleryRow, UpgradeRow]:
    """The gallery and the upgrade, locked against every claim and every change of epoch."""
    gallery = s.scalars(shared_queries.gallery_of(upgrade_id).with_for_update(of=GalleryRow)).one()
    return gallery, s.get_one(UpgradeRow, upgrade_id, with_for_update=True)


def _in_service(s: Session, gallery: GalleryRow, upgrade: UpgradeRow) -> set[str]:
    """What the plan in force searches or keeps current, but for an original that is kept: clean-up takes it out itself."""
    kept = upgrade.original if upgrade.undoes is None else None
    return {leg.collection for leg in shared_queries.plan(s, gallery, gallery.epoch).write_targets if leg.collection != kept}


def _new_upgrade(s: Session, values: Mapping[str, Any], details: Details) -> UpgradeRow:
    row = UpgradeRow(**{"old_collections": [], "new_collection": ""} | dict(values), created_at=day(s))
    s.add(row)
    s.flush()
    for name, value in details(row.id).items():
        setattr(row, name, value)
    return row


def _end(s: Session, ended: Sequence[int], *, note: str, resume: int | None) -> None:
    """The first of these ends now, the others ended before it."""
    if resume is not None:
        # What was written meanwhile went into another collection, and what was put back here is another program's, too.
        theirs = IntentRow.upgrade_id.in_([*ended, resume])
        s.execute(update(IntentRow).where(theirs).values(upgrade_id=resume, sketch=None))
    shared_queries.forget_work(s, ended)
    row = s.get_one(UpgradeRow, ended[0])
    if row.phase == Phase.ENDED:
        return  # repeated, because the answer of the first try was lost
    row.phase, row.ended_at = Phase.ENDED, day(s)
    s.add(PhaseRow(upgrade_id=row.id, at=day(s), phase=Phase.ENDED, note=note))
    s.flush()  # one active upgrade per gallery: this one ends first
    if resume is not None:
        again = s.get_one(UpgradeRow, resume)
        again.phase, again.ended_at, again.verifying = Phase.SERVING_BOTH, None, None
        again.paused, again.paused_at = False, None
        s.add(PhaseRow(upgrade_id=resume, at=day(s), phase=again.phase, note=f"{GOES_ON} {row.id}"))
