"""Leadership: only one of an upgrade's conductors makes batches and changes phases."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from rmvdb import errors
from rmvdb.backfill.worker import Worker
from rmvdb.registry.tables import UpgradeRow
from rmvdb.text import storable
from rmvdb.upgrade.context import UpgradeContext

log = logging.getLogger(__name__)

#: Seconds that a conductor may be silent before another takes its place.
LEADER_LEASE = 10.0


@contextmanager
def recording_failure(context: UpgradeContext, upgrade: UpgradeRow, worker: Worker) -> Iterator[None]:
    """Lead the upgrade, and record an error in it."""
    with hold_leadership(context, upgrade, worker):
        try:
            context.owner.settle(context.gallery.name)
            yield
        except errors.Paused:
            context.registry.set_upgrade(upgrade.id, reason="")  # a pause is no failure
            raise
        except errors.Stopped as exc:
            context.registry.refuse_ended(upgrade.id)
            reason = storable(errors.message_of(exc)) if worker.patient else ""  # a worker goes on by itself
            context.registry.set_upgrade(upgrade.id, reason=reason, leader_token=context.leader_token)
            raise
        except Exception as exc:
            context.registry.refuse_ended(upgrade.id)  # it failed because another upgrade took its place
            context.registry.set_upgrade(upgrade.id, reason=storable(errors.message_of(exc)), leader_token=context.leader_token)
            raise
        context.registry.set_upgrade(upgrade.id, reason="")


@contextmanager
def hold_leadership(context: UpgradeContext, upgrade: UpgradeRow, worker: Worker) -> Iterator[None]:
    """Be the one process that makes batches and changes phases.

    Raises:
        UpgradeRunning: another process is.
    """
    context.leader_token = leader_token = _taken(context, upgrade, worker)
    context.worker, context.leads, ended = worker, upgrade.id, threading.Event()

    def hold() -> None:
        failing = False
        while not ended.wait(LEADER_LEASE / 4):
            try:
                context.registry.keep_leading(upgrade.id, leader_token, LEADER_LEASE)
            except Exception as exc:  # noqa: BLE001 (the next try may succeed)
                if not failing:  # say it once, not at every try
                    log.warning("The leadership could not be renewed: %s", exc, extra={"action": "leadership"})
                failing = True
            else:
                failing = False

    holder = threading.Thread(target=hold, name="rmvdb-leadership", daemon=True)
    holder.start()
    try:
        yield
    finally:
        ended.set()
        holder.join()
        context.leader_token = context.worker = context.leads = None
        try:
            worker.leave()
        finally:
            context.registry.keep_leading(upgrade.id, leader_token, 0)


def _taken(context: UpgradeContext, upgrade: UpgradeRow, worker: Worker) -> int:
    """Take over from a conductor that is silent, as after a kill. Return the leader token.

    Raises:
        UpgradeRunning: it gave a sign of life.
    """
    seen: float | None = None
    while (leader_token := context.registry.lead(upgrade.id, worker.name, LEADER_LEASE)) is None:
        row = context.registry.upgrade(upgrade.id)
        if seen is None:
            seen = row.conductor_until
            if row.conductor != context.waits_for:
                context.waits_for = row.conductor
                context.announce(f"{row.conductor} leads this upgrade; taking over if it is silent for {LEADER_LEASE:g} s")
        elif row.conductor_until != seen:
            raise errors.UpgradeRunning(f"{row.conductor} works on this upgrade; watch it with rmvdb status --watch")
        context.check_stop()
        context.stop.wait(0.2)
    return leader_token
