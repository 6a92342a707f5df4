"""A worker that stays: APScheduler steps every upgrade, keeps to its window and tells the registry that it lives.

Jobs live in memory; the registry alone knows what is to be done.
"""

from __future__ import annotations

import datetime as dt
import logging
import threading
from collections.abc import Callable, Sequence

from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.triggers.cron import CronTrigger

from rmvdb import errors
from rmvdb.app import App
from rmvdb.backfill import Worker
from rmvdb.types import Phase

log = logging.getLogger(__name__)

#: Seconds between two looks for work, and between two looks at the clock.
STEP = 1.0
#: Phases in which there is nothing to do for a worker.
DONE = (Phase.CUT_OVER, Phase.CLEANING_UP)
LOOK = 5.0
#: Seconds for which a plan of one gallery may wait for its clients, before the others have their turn.
PATIENCE = 10.0


class Window:
    """When a worker may work: for one hour from each firing of a cron expression, so `0 1-6 * * *` is 01:00 to 07:00."""

    def __init__(self, expression: str | None) -> None:
        self.expression = expression
        try:
            self._trigger = CronTrigger.from_crontab(expression) if expression else None
        except ValueError as exc:
            raise errors.UsageError(
                f"--window {expression!r} is no cron expression ({exc}); for nights write '0 1-6 * * *' (01:00 to 07:00)"
            ) from exc

    def is_open(self, now: dt.datetime | None = None) -> bool:
        """Whether work may be done now."""
        if self._trigger is None:
            return True
        now = now or dt.datetime.now(self._trigger.timezone)
        fired = self._trigger.get_next_fire_time(None, now - dt.timedelta(hours=1))
        return fired is not None and fired <= now


class Scheduler:
    """Works on the galleries given (all, where none is) until it is stopped; one worker, one upgrade at a time."""

    def __init__(self, app: App, *, galleries: Sequence[str], window: Window, say: Callable[[str], None]) -> None:
        self._app, self._galleries, self._window, self._say = app, galleries, window, say
        self._worker: Worker = app.worker()
        self._stop = threading.Event()
        #: Set while the window is closed or the scheduler ends: a batch in hand is finished, no other begun.
        self._rest = threading.Event()
        #: What it last said of each gallery.
        self._last: dict[str, str] = {}

    def run(self, stop: threading.Event) -> None:
        """Work until `stop` is set; what is in hand then is finished."""
        scheduler = BackgroundScheduler()
        scheduler.add_job(self._step, "interval", seconds=STEP, max_instances=1, coalesce=True, misfire_grace_time=None)
        scheduler.add_job(self._look, "interval", seconds=LOOK, next_run_time=dt.datetime.now(dt.UTC))
        scheduler.start()
        try:
            stop.wait()
        finally:
            self._stop.set()
            self._rest.set()
            scheduler.shutdown(wait=True)
            self._app.registry.retire_worker(self._worker.name)

    def _look(self) -> None:
        """Open or close the window, and say that this worker lives."""
        if self._window.is_open():
            if not self._stop.is_set():
                self._rest.clear()
            self._worker.resting = ""
        else:
            self._rest.set()
            self._worker.resting = f"outside its window {self._window.expression}"
        try:
            for upgrade in self._upgrades().values():
                lease = self._app.settings.backfill.lease
                self._app.registry.renew(self._worker.name, upgrade, lease=lease, note=self._worker.note)
        except errors.RmvdbError as exc:
            self._complain(exc)

    def _upgrades(self) -> dict[str, int]:
        """Galleries with work, and their upgrades."""
        names = self._galleries or [row.name for row in self._app.registry.galleries()]
        found = {name: self._app.registry.active_upgrade(self._app.registry.gallery(name).id) for name in names}
        return {name: row.id for name, row in found.items() if row is not None and row.phase not in DONE}

    def _step(self) -> None:
        try:
            failed = [self._fails(name, upgrade) for name, upgrade in self._upgrades().items() if not self._rest.is_set()]
        except errors.RmvdbError as exc:
            self._complain(exc)
            failed = [True]
        if any(failed):
            self._stop.wait(LOOK)

    def _fails(self, gallery: str, upgrade: int) -> bool:
        """Work on a gallery; one that cannot go on keeps nobody from the others."""
        try:
            self._work(gallery, upgrade)
        except errors.Stopped:
            return False
        except errors.RmvdbError as exc:
            self._complain(exc, gallery)
            return True
        return False

    def _work(self, gallery: str, upgrade_id: int) -> None:
        conductor = self._app.conductor(gallery, say=self._say, stop=self._rest)
        conductor.patience = PATIENCE
        upgrade = self._app.registry.upgrade(upgrade_id)
        try:
            conductor.advance(upgrade, self._worker)
        except errors.UpgradeRunning:
            # Somebody else makes the batches and changes the phases; batches can be worked on all the same.
            if upgrade.phase == Phase.SERVING_BOTH and upgrade.listed:
                conductor.backfill(upgrade, self._worker)
        self._last.pop(gallery, None)

    def _complain(self, exc: errors.RmvdbError, about: str = "") -> None:
        if str(exc) != self._last.get(about):  # once, not once a second
            self._last[about] = str(exc)
            self._say(str(exc))
            log.error("%s", exc, extra={"action": "step"})
