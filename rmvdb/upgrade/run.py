"""The conductor: deploy → list → backfill → complete → verify → cut over → clean up, and the way back.

Each step looks at the phase, acts, records what it did, and can be run again after a crash at any line.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar

from rmvdb import errors
from rmvdb.backfill.worker import Worker
from rmvdb.registry.shared_queries import refuse_paused
from rmvdb.registry.tables import UpgradeRow
from rmvdb.registry.upgrade_plan import EpochName
from rmvdb.text import counted
from rmvdb.types import Phase
from rmvdb.upgrade import backfill_step, change_epoch, leadership, plan_step, register, same_queries, work_list
from rmvdb.upgrade import clean_up as cleaning_up
from rmvdb.upgrade import complete as completing
from rmvdb.upgrade import deploy as deploying
from rmvdb.upgrade import lost as finding_lost
from rmvdb.upgrade import repair as repairing
from rmvdb.upgrade import roll_back as rolling_back
from rmvdb.upgrade import verify as verifying
from rmvdb.upgrade.context import UpgradeContext
from rmvdb.upgrade.status import searched

log = logging.getLogger(__name__)


class Conductor(UpgradeContext):
    """Upgrades one gallery, by the steps in the files beside this one."""

    #: The calls by which each step changes something outside this process, in order. Tests kill it before and after each of them.
    CALLS: ClassVar = {
        "begin": ("registry.add_upgrade",),
        "deploy": (
            "store.create new",
            "store.create mark",
            "registry.add_collection",
            "registry.announce",
            "registry.activate",
            "registry.set_upgrade serving both",
        ),
        # If the original is kept: before the other calls of `deploy`.
        "copy": (
            "store.create old",
            "store.create mark",
            "registry.open_intents",
            "store.upsert old",
            "registry.withdraw_intents",
            "registry.set_upgrade copying",
        ),
        "list": ("registry.discard_list", "registry.add_batches", "registry.set_upgrade listed"),
        "switch": ("registry.announce", "registry.activate", "registry.set_upgrade plan"),
        # If other programs have written past the clients: before the other calls of `cut over`.
        "late": ("registry.add_late",),
        # If the original is kept: before the other calls of `cut over`, for changes that other programs made in it.
        "agree": (
            "registry.open_intents",
            "store.upsert old",
            "registry.forget_done",
            "registry.withdraw_intents",
            "store.delete new",
            "store.delete old",
            "registry.close_intents",
        ),
        "cut over": (
            "registry.set_upgrade verifying",
            "registry.announce",
            "registry.activate",
            "store.move_aliases new",
            "registry.set_upgrade cut over",
        ),
        "clean up": (
            "registry.begin_clean_up",
            "store.move_aliases new",
            "store.drop old",
            "store.drop mark",
            "registry.mark_dropped",
            "archive.clear",
            "registry.end",
            "registry.forget_ended",
        ),
        "give up": ("registry.abandon", "store.drop new", "store.drop mark", "registry.mark_dropped", "registry.forget_ended"),
        # If the original is kept: only the copy was made.
        "give up the copy": (
            "registry.announce",
            "registry.activate",
            "registry.abandon",
            "store.drop old",
            "store.drop mark",
            "registry.mark_dropped",
            "registry.forget_ended",
        ),
        "supersede": ("registry.make_way", "registry.supersede"),
        "roll back": ("registry.supersede",),
        "back to the original": (
            "registry.supersede",
            "registry.announce",
            "registry.activate",
            "store.move_aliases new",
            "registry.set_upgrade cut over",
        ),
    }

    # The steps. A function of a context is a method here.
    resolve, plan, simulate = plan_step.resolve, plan_step.plan, plan_step.simulate
    begin, check_name = register.begin, register.check_name
    expect_unchanged = change_epoch.expect_unchanged
    deploy = deploying.deploy
    list_work = work_list.list_work
    task, backfill = backfill_step.task, backfill_step.backfill
    complete = completing.complete
    verify = verifying.verify
    clean_up, drop_given_up = cleaning_up.clean_up, cleaning_up.drop_given_up
    lost, repair = finding_lost.find_lost, repairing.repair
    missing_collections, make_again = repairing.missing_collections, repairing.make_again
    roll_back = rolling_back.roll_back

    def advance(self, upgrade: UpgradeRow, worker: Worker, *, force: bool = False) -> UpgradeRow:
        """Run an upgrade from its present state until it is cut over, `until` is reached, or it is stopped."""
        with leadership.recording_failure(self, upgrade, worker):
            # Read the row again: another conductor may have led the upgrade until now.
            self._through_pauses(upgrade, lambda now: self._advance(now, worker, force=force))
        return self.registry.upgrade(upgrade.id)

    def launch(self, upgrade: UpgradeRow, worker: Worker, *, force: bool = False) -> None:
        """Deploy, and leave the rest to workers. Return once it is deployed, by this process or a worker."""
        while self.registry.upgrade(upgrade.id).phase == Phase.PLANNED:
            try:
                with leadership.recording_failure(self, upgrade, worker):
                    self._through_pauses(upgrade, lambda now: self.deploy(now, force=force))
            except errors.UpgradeRunning as exc:
                log.info("%s", exc)
                self.stop.wait(1.0)
                self.check_stop()

    def _through_pauses(self, upgrade: UpgradeRow, step: Callable[[UpgradeRow], None]) -> None:
        """Run a repeatable step, again after each pause that interrupts it."""
        while True:
            try:
                self.check_stop()
                return step(self.registry.upgrade(upgrade.id))
            except errors.Paused:
                self.wait_for_resume(upgrade.id)

    def finish(self, upgrade: UpgradeRow, worker: Worker, *, force: bool = False, accept_missing: bool = False) -> None:
        """Ask for the cut-over, and cut over, or wait until the process that leads the upgrade does. `force` applies to both.

        `accept_missing`: the records that vanished without a reason were deleted.
        """
        said = ""
        while True:
            upgrade = self.registry.upgrade(upgrade.id)
            if upgrade.makes_way and self.registry.end_making_way(upgrade.id):
                continue
            refuse_paused(upgrade)  # a command paused it; a cut-over under way waits
            self._expect_ready(upgrade)
            asked = replace(upgrade.plan, cutover=True, accept_missing=accept_missing or upgrade.plan.accept_missing)
            if asked != upgrade.plan:
                self.registry.set_upgrade(upgrade.id, plan=asked)
            try:
                with leadership.recording_failure(self, upgrade, worker):
                    return self._through_pauses(upgrade, lambda now: self.cut_over(now, worker, force=force))
            except errors.UpgradeRunning as exc:
                if (words := str(exc)) != said:
                    self.say(said := words)
                if force and (epoch := self.registry.gallery(self.gallery.name).next_epoch):
                    change_epoch.say_forced(self, epoch)
                    self.registry.activate(self.gallery.name, epoch, force=True)
                self.stop.wait(2.0)
                self.check_stop()

    def _advance(self, upgrade: UpgradeRow, worker: Worker, *, force: bool) -> None:
        self.expect_unchanged()
        self.deploy(upgrade, force=force)
        upgrade = self.registry.upgrade(upgrade.id)
        if upgrade.phase != Phase.SERVING_BOTH:
            return
        if upgrade.undoes is None:  # a roll back takes the archive's vectors, and needs no model
            plan_step.expect_model(self, upgrade)
        change_epoch.prolong(self, upgrade, force=force)
        if self.registry.upgrade(upgrade.id).reason and (not upgrade.listed or backfill_step.unfinished(self, upgrade)):
            self.registry.set_upgrade(upgrade.id, reason="", leader_token=self.leader_token)  # it goes on
        with work_list.made_beside(self, upgrade) as grows:
            upgrade = self.registry.upgrade(upgrade.id)
            if (switch := upgrade.plan.switch) is not None:
                upgrade = self._switch(upgrade, worker, grows, at=switch, force=force)
            self.backfill(upgrade, worker, grows=grows)
        if not self.stop.is_set() and not backfill_step.unfinished(self, upgrade):
            completing.release(self, upgrade)
            self.backfill(upgrade, worker)
        upgrade = self.registry.upgrade(upgrade.id)  # `until` and `cutover` may have changed in these hours
        wanted = upgrade.plan.cutover and upgrade.plan.until >= 1.0  # batches are whole, so any `until` may move every record
        if wanted and not backfill_step.unfinished(self, upgrade) and not self.stop.is_set():
            self.cut_over(upgrade, worker, force=force)

    def _switch(self, upgrade: UpgradeRow, worker: Worker, grows: Callable[[], bool], *, at: float, force: bool) -> UpgradeRow:
        """Backfill to the planned share, then let the new model alone embed queries. Before, the old models embed them, too."""
        if self.backfill(upgrade, worker, grows=grows).t < at:
            return upgrade  # it was stopped, or `until` is smaller
        change_epoch.serve(self, upgrade, EpochName.LATER, force=force)
        note, plan = f"from t = {at:g} on the new model alone embeds the queries", self.registry.upgrade(upgrade.id).plan
        switched = replace(plan.with_epoch(EpochName.SERVING, plan.legs(EpochName.LATER)), switch=None)
        self.registry.set_upgrade(upgrade.id, plan=switched, note=note, leader_token=self.leader_token)
        self.say(note)
        return self.registry.upgrade(upgrade.id)

    def _expect_ready(self, upgrade: UpgradeRow) -> None:
        """Raise WrongPhase if an upgrade cannot be cut over, and has not been."""
        if upgrade.phase == Phase.CUT_OVER:
            return
        if upgrade.phase == Phase.CLEANING_UP:
            raise errors.WrongPhase("The upgrade is cut over, and its clean-up has begun; finish it with rmvdb cleanup")
        if upgrade.phase != Phase.SERVING_BOTH or not upgrade.listed:
            raise errors.WrongPhase(f"The upgrade is {upgrade.phase}; run rmvdb upgrade until its backfill is done")
        if upgrade.plan.until < 1.0 and backfill_step.unfinished(self, upgrade):
            now = self.registry.progress(upgrade.id)
            raise errors.WrongPhase(
                f"The backfill was asked to stop at {now.done} of {counted(now.total, 'record')}; "
                "run rmvdb upgrade without --until"
            )

    def cut_over(self, upgrade: UpgradeRow, worker: Worker, *, force: bool = False) -> None:
        """Move the rest, complete, verify, then serve the new collection alone."""
        self._expect_ready(upgrade)
        if upgrade.phase == Phase.CUT_OVER:
            self.say(f"cut over already: {searched(self.registry.plan(self.gallery.name), by_name=True)}")
            return
        if backfill_step.unfinished(self, upgrade):
            now = self.registry.progress(upgrade.id)
            paused = "; paused, until rmvdb resume" if self.registry.upgrade(upgrade.id).paused else ""
            self.say(f"{now.total - now.done} of {counted(now.total, 'record is', 'records are')} left to move{paused}")
            self.backfill(upgrade, worker, until=1.0)
        completing.refuse_quarantined(self, upgrade)
        interrupted = verifying.begun(self, upgrade)
        verifying.keep(self, upgrade, interrupted)
        self.complete(upgrade, worker)
        verifying.keep(self, upgrade, interrupted)
        completing.refuse_quarantined(self, upgrade)
        while backfill_step.unfinished(self, upgrade):  # a client may have written a quarantined record again
            self.complete(upgrade, worker)
            completing.refuse_quarantined(self, upgrade)
        repairing.put_back_late(self, upgrade, worker)
        verifying.keep(self, upgrade, interrupted)
        completing.settle(self, upgrade)
        report = verifying.expect_verified(self, upgrade, interrupted)
        compared = same_queries.difference(self, self.registry.upgrade(upgrade.id))
        change_epoch.serve(self, upgrade, EpochName.FINAL, force=force)
        change_epoch.move_aliases(self, upgrade)
        served = searched(self.registry.plan(self.gallery.name), by_name=True)
        note = "; ".join(filter(None, [f"verified {counted(report.records, 'record')}", served, compared]))
        plan = replace(self.registry.upgrade(upgrade.id).plan, answered=None)
        done = {
            "phase": Phase.CUT_OVER,
            "plan": plan,
            "verifying": None,
        }  # until here a killed process goes on with its comparison
        self.registry.set_upgrade(upgrade.id, was=Phase.SERVING_BOTH, note=note, leader_token=self.leader_token, **done)
        self.say(f"{'rolled back' if upgrade.undoes else 'cut over'}: {counted(report.records, 'record')} verified, {served} now")
        if kept := rolling_back.standing_in(self, upgrade):
            self.say(f"{counted(kept, 'record')} written since {'keeps' if kept == 1 else 'keep'} ψ's vector")
