"""A worker that stays: APScheduler steps every upgrade, keeps to its window and tells the registry that it lives.

Jobs live in memory; the registry alone knows what is to be done.
"""

from __future__ import annotations

import datetime as dt
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.triggers.base import BaseTrigger

from rmvdb import errors
from rmvdb.app.window import Window
from rmvdb.app.wiring import App
from rmvdb.backfill.worker import Worker
from rmvdb.registry import mark
from rmvdb.registry.mark import Owner
from rmvdb.registry.tables import UpgradeRow
from rmvdb.types import BatchState, Phase
from rmvdb.upgrade.status import rests

log = logging.getLogger(__name__)

#: Seconds between two checks for work, and between two checks of the window.
STEP = 1.0
#: Phases in which a worker has nothing to do.
DONE = (Phase.CUT_OVER, Phase.CLEANING_UP)
LOOK = 5.0
#: The most seconds until rmvdb tries a gallery again that it could not continue.
LONGEST = 600.0
#: Seconds for which one gallery's plan may wait for its clients before other galleries have their turn.
PATIENCE = 10.0


class _Every(BaseTrigger):  # type: ignore[misc]  # APScheduler has no types
    """Fires again so many seconds from now. APScheduler's own interval counts up each one since the last, and there are a
    billion if the time of day is set forward by years.
    """

    def __init__(self, seconds: float) -> None:
        self._pause = dt.timedelta(seconds=seconds)

    def get_next_fire_time(self, previous_fire_time: dt.datetime | None, now: dt.datetime) -> dt.datetime:
        """Return the time of the next call."""
        return now + self._pause


class _Wait(NamedTuple):
    """The pause before the next try of a gallery: since when, for how long, and the state that the failed try found."""

    since: float
    seconds: float
    seen: object


class Scheduler:
    """Works on the named galleries, or on all, until it is stopped. One worker works on one upgrade at a time."""

    def __init__(
        self,
        app: App,
        *,
        galleries: Sequence[str],
        window: Window,
        say: Callable[[str], None],
        warn: Callable[[str], None] | None = None,
    ) -> None:
        self._app, self._galleries, self._window, self._say = app, galleries, window, say
        self._warn = warn or say
        self._worker: Worker = app.worker()
        self._stop = threading.Event()
        #: Set while the window is closed or the scheduler ends. The worker then finishes its batches and begins no others.
        self._rest = threading.Event()
        #: The last warning about each gallery, and the lines of its steps in this phase and epoch.
        self._last: dict[str, str] = {}
        self._lines: dict[str, tuple[object, set[str]]] = {}
        #: The upgrade that it is working on.
        self._at: int | None = None
        #: Locked while the worker reports its upgrade: the registry has one row for each worker.
        self._telling = threading.Lock()
        self._waits: dict[str, _Wait] = {}
        #: Why this worker cannot go on and must end.
        self._unfit: errors.SchemaOutdated | None = None
        #: When it last read the marks of galleries without work.
        self._marks_read = float("-inf")
        #: Upgrades that it has advanced once. It advances each upgrade at least once, because the settings may have longer times
        #: by now.
        self._stepped: set[int] = set()

    def run(self, stop: threading.Event) -> None:
        """Work until `stop` is set, then finish the batches in hand.

        Raises:
            SchemaOutdated: another release has changed the registry's schema.
        """
        self._worker.patient = False
        if not self._window.is_open():
            self._rest.set()
        scheduler = BackgroundScheduler(timezone=dt.UTC)
        once = {"max_instances": 1, "coalesce": True, "misfire_grace_time": None}
        scheduler.add_job(self._step, _Every(STEP), **once)
        scheduler.add_job(self._look, _Every(LOOK), next_run_time=dt.datetime.now(dt.UTC), **once)
        scheduler.start()
        ahead = time.time() - time.monotonic()
        try:
            while not (stop.wait(0.2) or self._unfit):
                if (now := time.time() - time.monotonic()) < ahead - STEP:  # the jobs would wait until it is as late again
                    for job in scheduler.get_jobs():
                        job.modify(next_run_time=dt.datetime.now(dt.UTC))
                ahead = now
        finally:
            self._stop.set()
            self._rest.set()
            scheduler.shutdown(wait=True)
            if self._unfit is None:
                self._app.registry.retire_worker(self._worker.name)
        if self._unfit is not None:
            raise self._unfit

    def _look(self) -> None:
        """Open or close the window, and send a heartbeat."""
        if self._window.is_open():
            self._rest.clear()
            if self._stop.is_set():  # checked last: it may be set meanwhile
                self._rest.set()
            self._worker.resting = ""
        else:
            self._rest.set()
            self._worker.resting = f"outside its window {self._window.expression}"
        try:
            with self._telling:
                if (upgrade := self._at or self._waits_for()) is not None:
                    self._tell(upgrade)
        except errors.RmvdbError as exc:
            self._complain(exc)

    def _tell(self, upgrade: int) -> None:
        lease, note = self._app.settings.backfill.lease, self._worker.note
        self._app.registry.renew(self._worker.name, upgrade, lease=lease, note=note)

    def _waits_for(self) -> int | None:
        """Return the upgrade to show it at while it works on none: one with work, else a paused one."""
        active = self._active().values()
        with_work = (row.id for row in active if self._has_work(row))
        return next(with_work, None) or next((row.id for row in active if row.paused), None)

    def _upgrades(self) -> dict[str, int]:
        """Return the upgrades with work, by gallery. One whose successor's command was killed continues at the next step."""
        active = self._active()
        for row in active.values():
            if row.makes_way:
                self._app.registry.end_making_way(row.id)
        return {name: row.id for name, row in active.items() if self._has_work(row)}

    def _active(self) -> dict[str, UpgradeRow]:
        """Return the upgrades that have not ended, by gallery."""
        upgrades = {name: self._app.registry.active_upgrade(id) for name, id in self._watched().items()}
        return {name: row for name, row in upgrades.items() if row is not None}

    def _watched(self) -> dict[str, int]:
        """Return the ids in the registry of the galleries that it works on, by name."""
        there = {row.name: row.id for row in self._app.registry.galleries()}
        for name in set(self._galleries) - there.keys():
            self._complain(errors.UnknownName("gallery", name, list(there)), name)
        return {name: there[name] for name in self._galleries or there if name in there}

    def _has_work(self, row: UpgradeRow) -> bool:
        """Return whether an upgrade has work for it. During a pause, only a batch in hand is work."""
        states = self._app.registry.counts(row.id).keys()
        in_hand = not states <= {BatchState.PENDING, BatchState.RETIRED}
        if row.paused:
            return in_hand  # it is finished during a pause, too
        if row.phase != Phase.SERVING_BOTH or not row.listed:
            return row.phase not in DONE
        if in_hand:
            return True
        return row.id not in self._stepped or not rests(row, states, self._app.registry.progress(row.id))

    def _step(self) -> None:
        try:
            with_work = self._upgrades()
            for name, upgrade in with_work.items():
                if not self._rest.is_set() and self._is_due(name, upgrade):
                    self._try(name, upgrade)
            if not self._rest.is_set() and time.monotonic() - self._marks_read > mark.COMPARE_EVERY:
                self._marks_read = time.monotonic()
                self._expect_owned([name for name in self._watched() if name not in with_work])
        except errors.SchemaOutdated as exc:  # this process cannot serve the registry any more, and another release must
            self._unfit = exc
        except errors.RmvdbError as exc:
            self._complain(exc)
            self._stop.wait(LOOK)

    def _expect_owned(self, galleries: Sequence[str]) -> None:
        """Warn of galleries that another registry has taken, or whose registry has gone back. Galleries with work check this
        themselves."""
        for name in galleries:
            try:
                Owner(self._app.registry, self._app.store).expect(name)
            except errors.NotOwner as exc:
                self._complain(exc, name)
            except errors.EngineError as exc:
                log.info("The owner of the collections of %s could not be read: %s", name, exc)
                if isinstance(exc, errors.EngineUnavailable):
                    return

    def _try(self, gallery: str, upgrade: int) -> None:
        """Work on a gallery. If it cannot go on, the other galleries still do."""
        try:
            with self._telling:
                self._at = upgrade
                self._tell(upgrade)
            self._work(gallery, upgrade)
        except (errors.Stopped, errors.Paused):
            pass
        except errors.SchemaOutdated:
            raise
        except (Exception, SystemExit) as exc:  # noqa: BLE001 (any other failure, too: its traceback is in the log)
            self._complain(exc, gallery)
            self._put_off(gallery, upgrade, exc)
        finally:
            self._at = None

    def _is_due(self, gallery: str, upgrade: int) -> bool:
        if (wait := self._waits.get(gallery)) is None:
            return True
        waited = time.monotonic() - wait.since
        return waited >= wait.seconds or (waited >= LOOK and self._seen(gallery, upgrade) != wait.seen)

    def _put_off(self, gallery: str, upgrade: int, exc: BaseException) -> None:
        """Double the wait until the next try, as long as nothing changes: each failed try may read the whole gallery."""
        seen, before = self._seen(gallery, upgrade), self._waits.get(gallery)
        away = isinstance(exc, errors.EngineUnavailable | errors.RegistryUnavailable | errors.NotServed)  # nothing was read
        unchanged = before is not None and before.seen == seen and not away
        seconds = min(2 * before.seconds, LONGEST) if before and unchanged else LOOK
        self._waits[gallery] = _Wait(time.monotonic(), seconds, seen)

    def _seen(self, gallery: str, upgrade: int) -> object:
        """Return the values that commands and workers change during an upgrade."""
        registry = self._app.registry
        now, row = registry.progress(upgrade), registry.gallery(gallery)
        return upgrade, len(registry.history(upgrade)), row.source, row.epoch, now.done, now.total, now.begun, now.quarantined

    def _work(self, gallery: str, upgrade_id: int) -> None:
        conductor = self._app.conductor(gallery, say=self._once(gallery, upgrade_id), stop=self._rest)
        conductor.patience = PATIENCE
        upgrade = self._app.registry.upgrade(upgrade_id)
        if upgrade.paused:  # only batches in hand are work, and no step may wait for the end of the pause
            conductor.expect_unchanged()
            conductor.backfill(upgrade, self._worker)
        else:
            try:
                conductor.advance(upgrade, self._worker)
            except errors.UpgradeRunning:
                # Another process makes the batches and changes the phases. This one can still work on the batches.
                if upgrade.phase == Phase.SERVING_BOTH:
                    conductor.expect_unchanged()
                    conductor.backfill(upgrade, self._worker)
            self._stepped.add(upgrade_id)
        self._last.pop(gallery, None)
        self._waits.pop(gallery, None)

    def _once(self, gallery: str, upgrade: int) -> Callable[[str], None]:
        """Say a sentence once in each phase and epoch: a step that fails is tried again without end."""
        registry = self._app.registry
        seen = upgrade, registry.upgrade(upgrade).phase, registry.gallery(gallery).epoch
        before, said = self._lines.get(gallery, (None, set[str]()))
        if before != seen:
            said = set()
        self._lines[gallery] = seen, said

        def say(words: str) -> None:
            if words not in said:
                said.add(words)
                self._say(words)

        return say

    def _complain(self, exc: BaseException, about: str = "") -> None:
        if (message := errors.message_of(exc)) != self._last.get(about):  # once, not once a second
            self._last[about] = message
            self._warn(message)
            if not isinstance(exc, errors.RmvdbError):
                log.error("Where that came from:", extra={"action": "step"}, exc_info=exc)
