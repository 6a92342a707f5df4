"""The pipeline over batches: claimed, kept by heartbeats, handed to `Backfill`, as fast as the limits allow."""

from __future__ import annotations

import functools
import logging
import math
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager

from rmvdb import errors
from rmvdb.backfill.batches import Backfill
from rmvdb.backfill.task import Task, grace
from rmvdb.backfill.throttle import Limits, Throttle
from rmvdb.protocols import Permit
from rmvdb.registry.claims import Claim
from rmvdb.registry.registry import Registry
from rmvdb.registry.tables import BatchRow, ClientRow
from rmvdb.serving.latency import ENOUGH, WINDOW
from rmvdb.timing import uptime
from rmvdb.types import BatchState, Phase, Progress

log = logging.getLogger(__name__)

#: Seconds between two looks at the upgrade: pause, limits, progress.
LOOK = 0.5
#: Seconds between two looks for a batch, at first; twice as long after each in vain.
IDLE = 0.05
#: Most seconds between two heartbeats, by which `status` knows that a worker lives.
BEAT = 10.0


class Settled:
    """Until when what was copied is found by searches: one flush, beside the copying, serves all batches copied before it."""

    def __init__(self, task: Task, backfill: Backfill, waiting: Callable[[], bool]) -> None:
        self._task, self._backfill, self._waiting = task, backfill, waiting
        self._thread: threading.Thread | None = None
        self._begun, self._error = float("-inf"), list[BaseException]()
        #: By the registry's time; none where an engine needs no flush.
        self._until: float | None = None if backfill.settles_at_once else 0.0
        #: What it waits for, in words.
        self.held: list[str] = []

    def until(self) -> float | None:
        """The time before which all that was copied is found; begins another flush where batches wait for one."""
        if self._error:
            raise self._error.pop()
        running = self._thread is not None and self._thread.is_alive()
        since = time.monotonic() - self._begun
        if self._until is not None and not running and since > max(LOOK, self._task.grace / 2) and self._waiting():
            self._begun = time.monotonic()
            # No one waits for it at the end: what it does is the engine's, and changes nothing.
            self._thread = threading.Thread(target=self._settle, name="rmvdb-settle", daemon=True)
            self._thread.start()
        return self._until

    def _settle(self) -> None:
        try:
            self._until = self._backfill.settle(self._task, self._hear)
        except BaseException as exc:  # noqa: BLE001 (it is raised where the batches are driven)
            self._error.append(exc)
        self.held = []

    def _hear(self, collection: str, indexed: int, rows: int) -> None:
        self.held = [f"waiting until {collection} has an index of its {rows} rows"]


class Worker:
    """Claims batches of one upgrade after the other and drives them through `Backfill`; any number of them may run anywhere.

    `lease`: seconds for which others leave a claim alone that gets no heartbeat; `longest_call`: seconds that one call may take,
    at most a third of it; `width`: batches in hand at once, which bounds its memory; `limits`: how gently it copies where nothing
    else is asked for of the upgrade.
    """

    def __init__(self, *, registry: Registry, lease: float, longest_call: float, width: int, limits: Limits) -> None:
        self.name = f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:6]}"
        self._registry = registry
        self._lease, self._longest_call, self._width = lease, longest_call, width
        self._throttle = Throttle(limits, width=width)
        #: Why it does not run at all, such as the window it keeps to, in words; set by who keeps it from running.
        self.resting = ""
        #: Whether it stays with an upgrade that is paused; one that others wait for leaves it once nothing is in hand.
        self.patient = True
        #: Whether the upgrade was paused when it looked last.
        self.paused = False
        #: What it keeps to, or waits for, while it runs, in words.
        self._held: list[str] = []
        #: The claims that it works under. One whose answer was lost is not among them, and no heartbeat keeps it.
        self._in_hand: set[Claim] = set()
        #: When its last heartbeat asked the database, and which of them the database still found to be its own.
        self._found: tuple[float, set[Claim]] = float("-inf"), set()
        self._renewing = threading.Lock()

    @property
    def note(self) -> str:
        """What `status` says of this worker besides that it lives."""
        return "; ".join(filter(None, [self.resting, *self._held]))

    def run(
        self,
        task: Task,
        backfill: Backfill,
        *,
        until: float = 1.0,
        patient: bool = True,
        stop: threading.Event | None = None,
        progress: Callable[[Progress], None] = lambda _: None,
    ) -> Progress:
        """Work until every batch is retired, or the share `until` is copied and nothing is in hand, or nothing is and it is not
        `patient` in a pause, or `stop` is set, or the upgrade has ended because another took its place.

        An error of one batch ends the run after the others in hand have ended; what it had claimed is free again.
        """
        stop = stop or threading.Event()
        ended = threading.Event()
        heart = threading.Thread(target=self._beat, args=(task.upgrade, ended), name="rmvdb-heartbeat", daemon=True)
        self._renew(task.upgrade)
        heart.start()
        try:
            with ThreadPoolExecutor(max_workers=self._width, thread_name_prefix="rmvdb-batch") as pool:
                return self._drive(task, backfill, pool, until=until, patient=patient, stop=stop, progress=progress)
        finally:
            ended.set()
            heart.join()
            self.leave()

    def leave(self) -> None:
        """Its work is over for now."""
        self._held = []
        self._registry.retire_worker(self.name)

    @contextmanager
    def within_limits(self, upgrade: int, gallery: str, *, count: int, stop: threading.Event) -> Iterator[None]:
        """Copy so many records that are no batch, once a batch might begin to be copied, or `stop` is set."""
        while (left := self._held_for(upgrade, gallery)) and not stop.is_set():
            stop.wait(min(left, LOOK))
        self._throttle.begin(count)
        try:
            yield
        finally:
            self._throttle.end()

    def _held_for(self, upgrade: int, gallery: str) -> float:
        row = self._registry.upgrade(upgrade)
        self._held = self._throttle.look(row, functools.partial(self._slowest_client, gallery))
        self._renew(upgrade)
        return math.inf if row.paused else self._throttle.wait()

    def _drive(
        self,
        task: Task,
        backfill: Backfill,
        pool: ThreadPoolExecutor,
        *,
        until: float,
        patient: bool,
        stop: threading.Event,
        progress: Callable[[Progress], None],
    ) -> Progress:
        at_work: set[Future[None]] = set()
        settled = Settled(task, backfill, lambda: BatchState.COPIED in self._registry.counts(task.upgrade))
        looked, idle = float("-inf"), IDLE
        while True:
            if time.monotonic() - looked >= LOOK or until < 1.0:
                now, row = self._registry.progress(task.upgrade), self._registry.upgrade(task.upgrade)
                looked, self.paused = time.monotonic(), row.paused
                progress(now)
                held = self._throttle.look(row, functools.partial(self._slowest_client, task.gallery))
                waiting = min(now.left, until * now.total - now.done) > now.begun
                self._say(task, (held if waiting else []) + settled.held)
            # To the end means to the end: a batch may come back when all seem copied.
            copy = until >= 1.0 or now.done + now.begun < until * now.total
            stay = copy and (patient or not row.paused)
            claimed, asked = None, uptime()
            if not stop.is_set() and len(at_work) < self._width:
                claimed = self._claim(task, copy=copy and not row.paused, settled=settled.until())
            if claimed is not None:
                at_work.add(pool.submit(self._work, task, backfill, claimed, self._in_time(claimed, asked)))
            elif not at_work and (stop.is_set() or row.phase == Phase.ENDED or not self._unfinished(task, copy=stay)):
                now = self._registry.progress(task.upgrade)
                progress(now)
                return now
            idle = IDLE if claimed is not None else min(2 * idle, LOOK)
            self._reap(at_work, patience=0.0 if claimed is not None else idle)
            if claimed is None and not at_work:
                stop.wait(min(max(self._throttle.wait(), idle), LOOK))

    @staticmethod
    def _reap(at_work: set[Future[None]], *, patience: float) -> None:
        """Take out what has ended; its error, if it had one, is raised here."""
        done = wait(at_work, timeout=patience, return_when=FIRST_COMPLETED).done if at_work else set()
        for each in done:
            at_work.remove(each)
            each.result()

    def _work(self, task: Task, backfill: Backfill, batch: BatchRow, in_time: Permit) -> None:
        try:
            if batch.state == BatchState.CLAIMED:
                backfill.copy(task, batch, in_time)
            else:
                backfill.retire(task, batch, in_time)
        except errors.LeaseLost as exc:
            log.warning("%s", exc, extra={"action": "lease-lost", "batch": batch.id})
            # Otherwise this worker's own heartbeat would hold for ever what it no longer works on.
            self._registry.hand_back(batch)
        finally:
            self._in_hand.discard((batch.id, batch.token))
            if batch.state == BatchState.CLAIMED:
                self._throttle.end()

    def _unfinished(self, task: Task, *, copy: bool) -> bool:
        """Whether there is, or will be, something for this worker to do."""
        ended = {BatchState.RETIRED} if copy else {BatchState.RETIRED, BatchState.PENDING}
        return bool(self._registry.counts(task.upgrade).keys() - ended)

    def _claim(self, task: Task, *, copy: bool, settled: float | None) -> BatchRow | None:
        copy = copy and self._throttle.wait() == 0
        wait = grace(self._registry, task)
        claimed = self._registry.claim(task.upgrade, self.name, lease=self._lease, grace=wait, copy=copy, settled=settled)
        if claimed is not None:
            self._in_hand.add((claimed.id, claimed.token))
            if claimed.state == BatchState.CLAIMED:
                self._throttle.begin(claimed.count)
        return claimed

    def _slowest_client(self, gallery: str) -> ClientRow | None:
        return self._registry.slowest_client(gallery, enough=ENOUGH, within=WINDOW)

    def _say(self, task: Task, held: list[str]) -> None:
        """Let `status` know at once what holds this worker back now."""
        if held != self._held:
            self._held = held
            self._renew(task.upgrade)

    def _in_time(self, batch: BatchRow, asked: float) -> Permit:
        """Return a permit that raises LeaseLost unless two longest calls remain: one for the call, one for clock skew.

        `asked`: when the claim was asked for.
        """
        known = uptime()

        def check() -> None:
            renewed, found = self._found
            # The database has the last word, of a question that was put when the claim was known; each lease counts from its
            # question, so that it never ends later there than here.
            lost = renewed > known and (batch.id, batch.token) not in found
            since = renewed if renewed > known else asked
            if lost or uptime() > since + self._lease - 2 * self._longest_call:
                raise errors.LeaseLost(
                    "This worker was suspended or cut off for longer than its lease; its batch is left to others"
                )

        return check

    def _renew(self, upgrade: int) -> None:
        with self._renewing:
            asked, mine = uptime(), frozenset(self._in_hand)
            self._found = asked, self._registry.renew(self.name, upgrade, mine, lease=self._lease, note=self.note)

    def _beat(self, upgrade: int, ended: threading.Event) -> None:
        failing = False
        while not ended.wait(min(self._lease / 6, BEAT)):
            try:
                self._renew(upgrade)
            except Exception as exc:  # noqa: BLE001 (a full disk, too: there may be room for the next one)
                if not failing:  # told when it changes, not at every beat
                    log.warning("No heartbeat: %s", exc, extra={"action": "heartbeat"})
                failing = True
            else:
                if failing:
                    log.info("Heartbeats are heard again", extra={"action": "heartbeat"})
                failing = False
