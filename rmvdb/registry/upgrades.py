"""Upgrades, their history, and their conductors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from sqlalchemy import and_, delete, or_, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from rmvdb import errors
from rmvdb.registry import shared_queries
from rmvdb.registry.clock import clock, day, now
from rmvdb.registry.session import Database, transaction
from rmvdb.registry.tables import (
    TAKES_ITS_PLACE,
    AskedForRow,
    BatchRow,
    GalleryRow,
    IntentRow,
    PhaseRow,
    QuarantineRow,
    UpgradeRow,
    WorkerRow,
)
from rmvdb.types import BatchState, Phase

#: The beginning of the note of an upgrade that continues after the end of another that superseded it.
GOES_ON = "goes on after upgrade"
#: Seconds without a sign of life after which such a command counts as killed.
COUNTS_AS_KILLED = 30.0
#: Rows that `forget_ended` deletes at once: in SQLite nobody else writes meanwhile.
FORGOTTEN_AT_ONCE = 5_000
#: Returns the columns of a new upgrade that depend on its number.
Details: TypeAlias = Callable[[int], Mapping[str, Any]]


class Upgrades(Database):
    """Upgrades, their history, and the leadership of each."""

    @transaction
    def add_upgrade(self, s: Session, /, details: Details = lambda _: {}, *, above: int = 0, **values: Any) -> UpgradeRow:
        """Register an upgrade, with a number larger than `above`.

        Raises:
            UpgradeRunning: the gallery has an upgrade that has not ended.
        """
        try:
            shared_queries.skip_numbers(s, UpgradeRow, above)
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
        self, s: Session, /, ended: int, details: Details = lambda _: {}, *, epoch: int, note: str, above: int = 0, **values: Any
    ) -> UpgradeRow:
        """End one upgrade, withdraw its announced plan, and register the upgrade that takes its place, in one transaction.

        Its number is larger than `above`.

        Raises:
            WrongPhase: it has ended or is being cleaned up, or another epoch than `epoch` is in force, so the decision is out of
                date.
        """
        # Locked before anything is read: the conductor of the upgrade that ends may be about to change the plan.
        gallery = s.scalars(shared_queries.gallery_of(ended).with_for_update(key_share=True, of=GalleryRow)).one()
        before = s.get_one(UpgradeRow, ended, with_for_update=True)
        heir = and_(or_(UpgradeRow.undoes == ended, UpgradeRow.supersedes == ended), UpgradeRow.phase != Phase.ENDED)
        if row := s.scalar(select(UpgradeRow).where(heir, UpgradeRow.to_version == values["to_version"])):
            return row  # a repetition, because the first answer was lost
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
        shared_queries.skip_numbers(s, UpgradeRow, above)
        row = _new_upgrade(s, values, details)
        s.add(PhaseRow(upgrade_id=ended, at=day(s), phase=Phase.ENDED, note=note))
        s.add(PhaseRow(upgrade_id=row.id, at=day(s), phase=row.phase, note=f"takes the place of upgrade {ended}"))
        return row

    @transaction
    def active_upgrade(self, s: Session, /, gallery_id: int) -> UpgradeRow | None:
        """Return the upgrade of this gallery that has not ended."""
        return shared_queries.active_upgrade(s, gallery_id)

    @transaction
    def upgrade(self, s: Session, /, upgrade_id: int) -> UpgradeRow:
        """Return one upgrade as it is now."""
        return s.get_one(UpgradeRow, upgrade_id)

    @transaction
    def upgrades(self, s: Session, /, gallery_id: int | None = None) -> Sequence[UpgradeRow]:
        """Return the upgrades, oldest first, including ended ones."""
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
        """Change columns. A changed phase or a note goes into the history.

        If the upgrade is not in the phase `was`, change nothing: another process was faster.

        Raises:
            WrongPhase: the phase would change, and the upgrade has ended.
            UpgradeRunning: another process leads the upgrade since that token was given.
        """
        row = s.get_one(UpgradeRow, upgrade_id, with_for_update=shared_queries.BESIDE_WRITES)
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
    def pause(self, s: Session, /, upgrade_id: int) -> None:
        """Pause an upgrade: once this returns, no batch begins and no epoch changes. Batches in work continue.

        Raises:
            WrongPhase: the upgrade has ended.
        """
        gallery, row = _locked(s, upgrade_id)
        shared_queries.refuse_ended(s, upgrade_id)
        if row.paused_at is None:
            row.paused, row.paused_at = True, now(s)
            s.add(PhaseRow(upgrade_id=upgrade_id, at=day(s), phase=row.phase, note="paused"))
        gallery.closing_until = None  # no epoch changes, so no write waits

    @transaction
    def resume(self, s: Session, /, upgrade_id: int) -> None:
        """End the pause of an upgrade. A comparison that the pause interrupted continues from its position."""
        _, row = _locked(s, upgrade_id)
        if row.verifying and row.paused_at is not None and "at" in row.verifying:
            row.verifying = row.verifying | {"at": row.verifying["at"] + now(s) - max(row.paused_at, row.verifying["at"])}
        row.paused, row.paused_at = False, None
        s.add(PhaseRow(upgrade_id=upgrade_id, at=day(s), phase=row.phase, note="no longer paused"))

    @transaction
    def make_way(self, s: Session, /, upgrade_id: int, *, note: str) -> None:
        """Pause an upgrade while another takes its place. The command that does sends heartbeats under a name of its own."""
        _, row = _locked(s, upgrade_id)
        row.paused = True
        s.add(PhaseRow(upgrade_id=upgrade_id, at=day(s), phase=row.phase, note=note))

    @transaction
    def end_making_way(self, s: Session, /, upgrade_id: int, *, note: str = "the command that took its place was killed") -> bool:
        """Let an upgrade that made way continue, unless a command still takes its place. Return whether it continues.

        A pause by command stays.
        """
        _, row = _locked(s, upgrade_id)  # first: another command may be about to take its place
        theirs = and_(WorkerRow.upgrade_id == upgrade_id, WorkerRow.id.startswith(TAKES_ITS_PLACE, autoescape=True))
        if s.scalar(select(WorkerRow.id).where(theirs, WorkerRow.seen_at > clock() - COUNTS_AS_KILLED).limit(1)) is not None:
            return False
        s.execute(delete(WorkerRow).where(theirs).execution_options(synchronize_session=False))
        if row.phase == Phase.ENDED or not row.makes_way:
            return False
        row.paused = False
        s.add(PhaseRow(upgrade_id=upgrade_id, at=day(s), phase=row.phase, note=note))
        return True

    @transaction
    def since_given_up(self, s: Session, /, gallery_id: int) -> bool:
        """Return whether the active upgrade has a newer event than the end of an upgrade that superseded it, if one did."""
        row = s.scalar(select(UpgradeRow).where(UpgradeRow.gallery_id == gallery_id, UpgradeRow.phase != Phase.ENDED))
        if row is None:
            return False
        notes = select(PhaseRow.note).where(PhaseRow.upgrade_id == row.id).order_by(PhaseRow.id.desc())
        # A registry that was lost and rebuilt since does not make the end older.
        last = next((note for note in s.scalars(notes) if note not in (shared_queries.BROUGHT_BACK, shared_queries.TAKEN)), None)
        return not (last or "").startswith(GOES_ON)

    @transaction
    def refuse_ended(self, s: Session, /, upgrade_id: int) -> None:
        """Raise WrongPhase if the upgrade has ended, because another took its place or undid it."""
        shared_queries.refuse_ended(s, upgrade_id)

    @transaction
    def begin_clean_up(self, s: Session, /, upgrade_id: int) -> None:
        """Set the phase to *cleaning up*, from which there is no way back.

        Raises:
            WrongPhase: the upgrade is not cut over, or a collection that would be dropped is in service.
        """
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
        """End an upgrade before it serves searches, and withdraw its announced plan. The one that it superseded continues.

        Return True, also if a call with this `note` ended it before. Return False if it serves searches, or ended in another way.
        """
        gallery = s.scalars(shared_queries.gallery_of(upgrade_id).with_for_update(of=GalleryRow)).one()
        upgrade = s.get_one(UpgradeRow, upgrade_id)
        ended = select(PhaseRow.id).where(PhaseRow.upgrade_id == upgrade_id, PhaseRow.phase == Phase.ENDED, PhaseRow.note == note)
        if s.scalar(ended):
            return True  # another process did it at once, or the first answer was lost
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
        """End an upgrade for good, like the `others` that ended before. `forget_ended` deletes what they leave. Histories stay.

        `resume`: the superseded upgrade that continues. The writes announced since belong to it from now on.
        """
        _end(s, (upgrade_id, *others), note=note, resume=resume)

    @transaction
    def forget_ended(self, s: Session, /, gallery_id: int, *, most: int = FORGOTTEN_AT_ONCE) -> int:
        """Delete some of the work lists, intents and quarantine of upgrades that nothing needs any more. Return how many rows.

        Call it until it returns 0. There may be millions, and writes of others get their turn in between.
        """
        needed = shared_queries.needed_upgrades(s)
        ended = select(UpgradeRow.id).where(UpgradeRow.gallery_id == gallery_id, UpgradeRow.phase == Phase.ENDED)
        for upgrade_id in (each for each in s.scalars(ended).all() if each not in needed):
            for table in (BatchRow, QuarantineRow, AskedForRow, IntentRow):
                (own,) = delete(table).table.primary_key
                some = delete(table).where(own.in_(select(own).where(table.upgrade_id == upgrade_id).limit(most)))
                if gone := s.execute(some.execution_options(synchronize_session=False)).rowcount:  # type: ignore[attr-defined]
                    return int(gone)
        return 0

    @transaction
    def history(self, s: Session, /, upgrade_id: int) -> Sequence[PhaseRow]:
        """Return the events of an upgrade, oldest first."""
        return s.scalars(select(PhaseRow).where(PhaseRow.upgrade_id == upgrade_id).order_by(PhaseRow.id)).all()

    @transaction
    def lead(self, s: Session, /, upgrade_id: int, worker: str, seconds: float) -> int | None:
        """Take the leadership: one process makes batches and changes phases. Return its fencing token, None if another leads."""
        free = or_(UpgradeRow.conductor.is_(None), UpgradeRow.conductor == worker, UpgradeRow.conductor_until < clock())
        row = s.scalar(
            select(UpgradeRow).where(UpgradeRow.id == upgrade_id, free).with_for_update(**shared_queries.BESIDE_WRITES)
        )
        if row is None:
            return None
        row.conductor, row.conductor_until, row.leader_token = worker, now(s) + seconds, row.leader_token + 1
        return row.leader_token

    @transaction
    def keep_leading(self, s: Session, /, upgrade_id: int, leader_token: int, seconds: float) -> bool:
        """Keep the leadership for so many seconds more. 0 hands it back. Return False if another process leads by now."""
        row = s.get(UpgradeRow, upgrade_id, with_for_update=shared_queries.BESIDE_WRITES)
        if row is None or row.leader_token != leader_token:
            return False
        row.conductor, row.conductor_until = (row.conductor, now(s) + seconds) if seconds else (None, None)
        return True

    @transaction
    def refuse_overtaken(self, s: Session, /, upgrade_id: int, leader_token: int | None) -> None:
        """Raise UpgradeRunning if another process leads the upgrade."""
        shared_queries.refuse_overtaken(s, upgrade_id, leader_token)


def _locked(s: Session, upgrade_id: int) -> tuple[GalleryRow, UpgradeRow]:
    """Return the gallery and the upgrade. Lock them against every claim and every change of epoch."""
    gallery = s.scalars(shared_queries.gallery_of(upgrade_id).with_for_update(of=GalleryRow)).one()
    return gallery, s.get_one(UpgradeRow, upgrade_id, with_for_update=True)


def _in_service(s: Session, gallery: GalleryRow, upgrade: UpgradeRow) -> set[str]:
    """Return the collections of the plan in force, except an original that is kept: clean-up takes it out itself."""
    kept = upgrade.original if upgrade.undoes is None else None
    return {leg.collection for leg in shared_queries.plan(s, gallery, gallery.epoch).write_targets if leg.collection != kept}


def _new_upgrade(s: Session, values: Mapping[str, Any], details: Details) -> UpgradeRow:
    row = UpgradeRow(**{"old_collections": [], "new_collection": ""} | dict(values), created_at=day(s))
    s.add(row)
    s.flush()
    for name, value in details(row.id).items():
        setattr(row, name, value)
    return row


def _hand_over_writes(s: Session, ended: Sequence[int], resume: int) -> None:
    """Give the intents of these upgrades to the one that continues."""
    # The writes meanwhile went into another collection, and another program wrote the records put back here: no sketch fits.
    theirs = IntentRow.upgrade_id.in_(ended) | and_(IntentRow.upgrade_id == resume, IntentRow.sketch.is_not(None))
    shared_queries.piecewise(s, update(IntentRow).values(upgrade_id=resume, sketch=None), theirs)


def _end(s: Session, ended: Sequence[int], *, note: str, resume: int | None) -> None:
    """End the first of these upgrades. The others ended before."""
    if resume is not None:
        _hand_over_writes(s, ended, resume)  # the many, while clients go on announcing others
    s.scalars(shared_queries.gallery_of(ended[0]).with_for_update(of=GalleryRow)).one()
    if resume is not None:
        _hand_over_writes(s, ended, resume)  # those announced since
    row = s.get_one(UpgradeRow, ended[0])
    if row.phase == Phase.ENDED:
        return  # a repetition, because the first answer was lost
    row.phase, row.ended_at = Phase.ENDED, day(s)
    s.add(PhaseRow(upgrade_id=row.id, at=day(s), phase=Phase.ENDED, note=note))
    s.flush()  # one active upgrade per gallery: this one ends first
    if resume is not None:
        resumed = s.get_one(UpgradeRow, resume)
        resumed.phase, resumed.ended_at, resumed.verifying = Phase.SERVING_BOTH, None, None
        resumed.paused, resumed.paused_at = False, None
        s.add(PhaseRow(upgrade_id=resume, at=day(s), phase=resumed.phase, note=f"{GOES_ON} {row.id}"))
