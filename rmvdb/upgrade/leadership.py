"""The baton: of all conductors of an upgrade one makes its batches and changes its phases."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from rmvdb import errors
from rmvdb.backfill.worker import Worker
from rmvdb.registry.tables import UpgradeRow
from rmvdb.text import storable
from rmvdb.upgrade.context import Lead

log = logging.getLogger(__name__)

#: Seconds for which a conductor may be silent before another takes its place.
BATON = 10.0


@contextmanager
def leading(lead: Lead, upgrade: UpgradeRow, worker: Worker) -> Iterator[None]:
    """Hold the baton, and note what goes wrong."""
    with held(lead, upgrade, worker):
        try:
            lead.owner.settle(lead.gallery.name)
            yield
        except errors.Paused:
            lead.registry.set_upgrade(upgrade.id, reason="")  # a pause is no failure
            raise
        except Exception as exc:
            lead.registry.refuse_ended(upgrade.id)  # whatever failed did so because another upgrade took the place
            lead.registry.set_upgrade(upgrade.id, reason=storable(errors.told(exc)), baton=lead.baton)
            raise
        lead.registry.set_upgrade(upgrade.id, reason="")


@contextmanager
def held(lead: Lead, upgrade: UpgradeRow, worker: Worker) -> Iterator[None]:
    """Be the one process that makes batches and changes phases; UpgradeRunning where another is."""
    lead.baton = baton = _taken(lead, upgrade, worker)
    lead.worker, lead.leads, ended = worker, upgrade.id, threading.Event()

    def hold() -> None:
        failing = False
        while not ended.wait(BATON / 4):
            try:
                lead.registry.keep_leading(upgrade.id, baton, BATON)
            except Exception as exc:  # noqa: BLE001 (whatever it was, the next time may go well)
                if not failing:  # told when it changes, not at every try
                    log.warning("The baton could not be held: %s", exc, extra={"action": "baton"})
                failing = True
            else:
                failing = False

    holder = threading.Thread(target=hold, name="rmvdb-baton", daemon=True)
    holder.start()
    try:
        yield
    finally:
        ended.set()
        holder.join()
        lead.baton = lead.worker = lead.leads = None
        worker.leave()
        lead.registry.keep_leading(upgrade.id, baton, 0)


def _taken(lead: Lead, upgrade: UpgradeRow, worker: Worker) -> int:
    """Wait for the baton of a conductor that is silent, as after a kill; refuse at the first sign that it lives."""
    seen: float | None = None
    while (baton := lead.registry.lead(upgrade.id, worker.name, BATON)) is None:
        row = lead.registry.upgrade(upgrade.id)
        if seen is None:
            seen = row.conductor_until
            if row.conductor != lead.waits_for:
                lead.waits_for = row.conductor
                lead.say(f"{row.conductor} has this upgrade; taking over if it is silent for {BATON:g} s")
        elif row.conductor_until != seen:
            raise errors.UpgradeRunning(f"{row.conductor} is at work on this upgrade; watch it with rmvdb status --watch")
        lead.check_stop()
        lead.stop.wait(0.2)
    return baton
