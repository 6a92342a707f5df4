"""Serving plans: announced, then put in force."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sqlalchemy import and_, func, select
from sqlalchemy.orm import Session

from rmvdb import errors
from rmvdb.registry import shared_queries
from rmvdb.registry.clock import clock, now
from rmvdb.registry.codec import leg_from_json
from rmvdb.registry.session import Database, transaction
from rmvdb.registry.tables import BatchRow, GalleryRow, IntentRow, PlanRow, UpgradeRow
from rmvdb.types import BatchState, Leg, ServingPlan

#: Seconds for which new writes and claims wait while an epoch changes. Each try renews it, so a dead conductor blocks nothing.
CLOSING = 5.0
#: Seconds after which a write counts as long, and for which other writes go on while an epoch waits for the long ones.
LONG, LINGER = 1.0, 60.0


class Plans(Database):
    """Serving plans and their epochs."""

    @transaction
    def plan(self, s: Session, /, gallery: str) -> ServingPlan:
        """Return the serving plan in force."""
        row = shared_queries.named(s, GalleryRow, "gallery", gallery)
        return shared_queries.plan(s, row, row.epoch)

    @transaction
    def announce(
        self,
        s: Session,
        /,
        gallery: str,
        legs: Sequence[Leg],
        times: Mapping[str, float],
        *,
        upgrade: int | None = None,
        phase: str | None = None,
        leader_token: int | None = None,
        must_not_serve: str | None = None,
        expected_epoch: int | None = None,
    ) -> int:
        """Write the next plan, so that clients prepare for it. Return its epoch; a repeated call returns the same one.

        `upgrade` asks for the change, in that `phase`.

        Raises:
            WrongPhase: the upgrade has left that phase, the collection `must_not_serve` is the plan's first one already, or
                another epoch than `expected_epoch` is in force.
            UpgradeRunning: another process leads the upgrade, and decides what is served.
            Paused: the gallery's upgrade is paused.
        """
        row = shared_queries.named(s, GalleryRow, "gallery", gallery, lock=shared_queries.FOR_CHANGE)
        shared_queries.refuse_gone_on(s, upgrade, phase, leader_token)
        shared_queries.refuse_paused(shared_queries.active_upgrade(s, row.id))
        served = shared_queries.plan(s, row, row.epoch)
        if served.legs[0].collection == must_not_serve:
            raise errors.WrongPhase(f"Collection {must_not_serve!r} is served already; see rmvdb status")
        if expected_epoch not in (None, row.epoch):
            raise errors.WrongPhase(f"Gallery {gallery!r} is served differently since; run the same command again")
        if row.next_epoch and _same(s, row, row.next_epoch, legs, times):
            return row.next_epoch
        if _same(s, row, row.epoch, legs, times):
            row.next_epoch, row.closing_until = None, None
            return row.epoch
        newest = s.scalar(select(func.max(PlanRow.epoch)).where(PlanRow.gallery_id == row.id)) or 0
        row.next_epoch = newest + 1
        s.add(shared_queries.new_plan(row, row.next_epoch, legs, times, at=now(s), grace_before=served.own_grace))
        return row.next_epoch

    @transaction
    def unready(self, s: Session, /, gallery: str, epoch: int) -> list[str]:
        """Return a sentence for each live client that cannot serve the plan of that epoch yet."""
        return _unready(s, shared_queries.named(s, GalleryRow, "gallery", gallery), epoch)

    @transaction
    def activate(
        self,
        s: Session,
        /,
        gallery: str,
        epoch: int,
        *,
        force: bool = False,
        upgrade: int | None = None,
        phase: str | None = None,
        leader_token: int | None = None,
    ) -> list[str]:
        """Put the announced plan in force, and return []. If it must wait, return a sentence for each reason.

        An epoch changes only when older writes and claims have ended and every live client can serve the next plan. `force` does
        not wait for the clients. If only the times of the plan change, claims go on. Raises the errors of `announce`.
        """
        row = shared_queries.named(s, GalleryRow, "gallery", gallery, lock=shared_queries.FOR_CHANGE)
        shared_queries.refuse_gone_on(s, upgrade, phase, leader_token)
        if row.epoch == epoch:
            return []
        shared_queries.refuse_paused(shared_queries.active_upgrade(s, row.id))
        if row.next_epoch != epoch:
            announced = f", which is {row.next_epoch}" if row.next_epoch else "; none is"
            raise errors.WrongPhase(f"Plan epoch {epoch} of gallery {gallery!r} is not the announced one{announced}")
        if waiting := ([] if force else _unready(s, row, epoch)):
            return waiting
        if row.rebuilding:
            return ["its registry is being rebuilt"]
        moved = shared_queries.row_of_plan(s, row, epoch).legs != shared_queries.row_of_plan(s, row, row.epoch).legs
        if waiting := (_claimed(s, row) if moved else []) or _lingering(s, row, epoch):
            return waiting
        # New writes and claims wait from here on, so that the open ones end under steady load, too.
        row.closing_until = now(s) + CLOSING
        if waiting := _writing(s, row):
            return waiting
        row.epoch, row.next_epoch, row.closing_until, row.served_since = epoch, None, None, now(s)
        shared_queries.raise_trace(s, select(GalleryRow.id).where(GalleryRow.id == row.id))
        return []


def _same(s: Session, gallery: GalleryRow, epoch: int, legs: Sequence[Leg], times: Mapping[str, float]) -> bool:
    """Return whether the plan of that epoch has these legs, mirrors and times."""
    plan = shared_queries.row_of_plan(s, gallery, epoch)
    return [leg_from_json(leg) for leg in plan.legs] == list(legs) and all(getattr(plan, name) == times[name] for name in times)


def _unready(s: Session, gallery: GalleryRow, epoch: int) -> list[str]:
    return [
        f"client {row.id} cannot serve epoch {epoch} yet{': ' + row.trouble if row.trouble else ''}"
        for row in s.scalars(shared_queries.live_clients(s, gallery))
        if row.ready < epoch
    ]


def _claimed(s: Session, gallery: GalleryRow) -> list[str]:
    upgrades = select(UpgradeRow.id).where(UpgradeRow.gallery_id == gallery.id)
    # Only these states have a lease. They are named, since the index has them.
    held = BatchRow.state.in_((*shared_queries.BEGUN, BatchState.COPIED))
    claims = and_(BatchRow.upgrade_id.in_(upgrades), held, BatchRow.lease_until > clock())
    return [
        f"worker {row.worker} is at batch {row.id}" if row.worker else f"a call that failed may still arrive for batch {row.id}"
        for row in s.scalars(select(BatchRow).where(claims).limit(5))
    ]


def _writing(s: Session, gallery: GalleryRow, *, before: float | None = None) -> list[str]:
    open_writes = and_(IntentRow.gallery_id == gallery.id, ~IntentRow.done, IntentRow.deadline > clock())
    if before is not None:
        open_writes = and_(open_writes, IntentRow.opened_at < before)
    return [f"{row.client} is writing record {row.record}" for row in s.scalars(select(IntentRow).where(open_writes).limit(5))]


def _lingering(s: Session, gallery: GalleryRow, epoch: int) -> list[str]:
    """Return the long writes, such as those of a killed client until their deadline. Other writes go on meanwhile.

    This ends after `LINGER` seconds: if every write took long, an epoch would never change.
    """
    announced = s.scalar(select(PlanRow.created_at).where(PlanRow.gallery_id == gallery.id, PlanRow.epoch == epoch)) or 0.0
    at = now(s)
    return _writing(s, gallery, before=at - LONG) if at < announced + LINGER else []
