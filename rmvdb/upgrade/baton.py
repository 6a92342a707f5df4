"""The baton: of all conductors of an upgrade one makes its batches and changes its phases."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rmvdb import errors
from rmvdb.plural import storable
from rmvdb.tables import UpgradeRow
from rmvdb.upgrade.lead import Lead
from rmvdb.worker import Worker

log = logging.getLogger(__name__)

#: Seconds for which a conductor may be silent before another takes its place.
BATON = 10.0


@contextmanager
def leading(lead: Lead, upgrade: UpgradeRow, worker: Worker) -> Iterator[None]:
    """Hold the baton, and note what goes wrong."""
    with held(lead, upgrade, worker):
        try:
            yield
        except Exception as exc:
            lead.registry.refuse_ended(upgrade.id)  # whatever failed did so because another upgrade took the place
            lead.registry.set_upgrade(upgrade.id, reason=storable(errors.told(exc)), baton=lead.baton)
            raise
        lead.registry.set_upgrade(upgrade.id, reason="")


@contextmanager
def held(lead: Lead, upgrade: UpgradeRow, worker: Worker) -> Iterator[None]:
    """Be the one process that makes batches and changes phases; UpgradeRunning where another is."""
    lead.baton = baton = _taken(lead, upgrade, worker)
    lead.worker, ended = worker, threading.Event()

    def hold() -> None:
        while not ended.wait(BATON / 4):
            try:
                lead.registry.keep_leading(upgrade.id, baton, BATON)
            except Exception as exc:  # noqa: BLE001 (whatever it was, the next time may go well)
                log.warning("The baton could not be held: %s", exc, extra={"action": "baton"})

    holder = threading.Thread(target=hold, name="rmvdb-baton", daemon=True)
    holder.start()
    try:
        yield
    finally:
        ended.set()
        holder.join()
        lead.baton = lead.worker = None
        worker.leave()
        lead.registry.keep_leading(upgrade.id, baton, 0)


def _taken(lead: Lead, upgrade: UpgradeRow, worker: Worker) -> int:
    """Wait for the baton of a conductor that is silent, as after a kill; refuse at the first sign that it lives."""
    seen: float | None = None
    silent: float | None = None  # a clock that was set back would keep what it is held until in the future
    while (baton := lead.registry.lead(upgrade.id, worker.name, BATON, silent=silent)) is None:
        row = lead.registry.upgrade(upgrade.id)
        if seen is None:
            seen, since = row.conductor_until, time.monotonic()
            if row.conductor != lead.waits_for:
                lead.waits_for = row.conductor
                lead.say(f"{row.conductor} has this upgrade; taking over if it is silent for {BATON:g} s")
        elif row.conductor_until != seen:
            raise errors.UpgradeRunning(f"{row.conductor} is at work on this upgrade; watch it with rmvdb status --watch")
        elif time.monotonic() > since + BATON:
            silent = seen
        lead.check_stop()
        lead.stop.wait(0.2)
    return baton
