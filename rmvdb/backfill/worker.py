"""The worker: it claims batches, keeps its claims by heartbeats, and runs `Backfill` on them as fast as the limits allow."""

from __future__ import annotations

import logging
import math
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from rmvdb import errors
from rmvdb.backfill.asked_for import MovedFirst
from rmvdb.backfill.batches import Backfill
from rmvdb.backfill.hand import HALVES, LOOK, Hand, half_of
from rmvdb.backfill.next_action import Action, Goal, next_action
from rmvdb.backfill.settle import Settled
from rmvdb.backfill.task import Task
from rmvdb.backfill.throttle import Limits, Throttle
from rmvdb.protocols import Permit
from rmvdb.registry.claims import Claim
from rmvdb.registry.registry import Registry
from rmvdb.registry.tables import BatchRow, UpgradeRow
from rmvdb.serving.latency import ENOUGH, WINDOW
from rmvdb.timing import uptime
from rmvdb.types import BatchState, Progress

log = logging.getLogger(__name__)

#: The most seconds between two heartbeats, by which `status` knows that a worker lives.
BEAT = 10.0
#: Seconds after which a worker that others wait for leaves an upgrade in which no batch may begin.
HELD = 60.0


class Worker:
    """Claims batches of one upgrade, one after the other, and runs `Backfill` on them; any number of workers may run anywhere.

    `lease`: seconds for which other workers leave a claim without a heartbeat alone. `longest_call`: seconds that one call may
    take, at most a third of the lease. `width`: batches in hand, some that are copied and some that leave the old collections.
    This bounds its memory. `limits`: how gently it copies unless the upgrade says otherwise.
    """

    def __init__(self, *, registry: Registry, lease: float, longest_call: float, width: int, limits: Limits) -> None:
        self.name = f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:6]}"
        self._registry = registry
        self._lease, self._longest_call, self._width = lease, longest_call, width
        self._throttle = Throttle(limits, width=width)
        #: Why it does not run at all, in words, such as the window it keeps to; set by the caller.
        self.resting = ""
        #: Whether it stays with a paused upgrade. If others wait for the worker, it leaves once it has nothing in hand.
        self.patient = True
        #: Whether the upgrade was paused at the last look.
        self.paused = False
        #: Its limits, and the things it waits for, while it runs, in words.
        self._reasons: list[str] = []
        #: The claims that it works under. If the answer to a claim was lost, the claim is not among them and gets no heartbeat.
        self._in_hand: set[Claim] = set()
        #: When its last heartbeat asked the database, and the claims that the database confirmed.
        self._confirmed: tuple[float, set[Claim]] = float("-inf"), set()
        self._renewing = threading.Lock()

    @property
    def note(self) -> str:
        """The sentence of `status` about this worker, besides that it lives."""
        return "; ".join(filter(None, [self.resting, *self._reasons]))

    def run(
        self,
        task: Task,
        backfill: Backfill,
        *,
        until: float = 1.0,
        patient: bool = True,
        stop: threading.Event | None = None,
        progress: Callable[[Progress], None] = lambda _: None,
        grows: Callable[[], bool] = lambda: False,
    ) -> Progress:
        """Work until every batch is retired and the work list no longer `grows`.

        The run also ends once nothing is in hand if the share `until` is copied, if `stop` is set, or if the upgrade has ended
        because another took its place. A worker that is not `patient` also leaves a paused upgrade, and one that a limit has held
        back for long.

        An error of one batch ends the run after the other batches in hand have ended; its claims are free again.
        """
        stop, goal = stop or threading.Event(), Goal(until=until, width=self._width, patient=patient)
        ended = threading.Event()
        heart = threading.Thread(target=self._beat, args=(task.upgrade, ended), name="rmvdb-heartbeat", daemon=True)
        self._renew(task.upgrade)
        heart.start()
        try:
            with ThreadPoolExecutor(max_workers=goal.width, thread_name_prefix="rmvdb-batch") as pool:
                return self._drive(task, backfill, pool, goal, stop=stop, progress=progress, grows=grows)
        finally:
            ended.set()
            heart.join()
            self.leave()

    def leave(self) -> None:
        """Tell the registry that this worker stops working for now."""
        self._reasons = []
        self._registry.retire_worker(self.name)

    @contextmanager
    def within_limits(
        self, upgrade: int, gallery: str, *, count: int, stop: threading.Event, check: Callable[[], None]
    ) -> Iterator[None]:
        """Copy `count` records outside of any batch, once the limits would let a batch begin.

        `check` runs before each look at them, and may raise what ends the wait: a pause, a stop.
        """
        check()
        while left := self._wait_for_limits(upgrade, gallery):
            stop.wait(min(left, LOOK))
            check()
        self._throttle.begin(count)
        try:
            yield
        finally:
            self._throttle.end()

    def _wait_for_limits(self, upgrade: int, gallery: str) -> float:
        row = self._registry.upgrade(upgrade)
        self._reasons = self._look(row, gallery)
        self._renew(upgrade)
        return math.inf if row.paused else self._throttle.wait()

    def _drive(
        self,
        task: Task,
        backfill: Backfill,
        pool: ThreadPoolExecutor,
        goal: Goal,
        *,
        stop: threading.Event,
        progress: Callable[[Progress], None],
        grows: Callable[[], bool],
    ) -> Progress:
        hand = Hand(self._width)
        pause = max(LOOK, task.grace / 2)
        settled = Settled(task, backfill, pause=pause, waiting=lambda: BatchState.COPIED in self._registry.counts(task.upgrade))
        looked = float("-inf")
        # A roll back takes its vectors from the archive, and a search of one collection asks for no record.
        asked_for = None if task.undoes or task.in_place else MovedFirst(self._registry, task.upgrade)
        while True:
            growing = grows()  # asked first: the progress and a claim then show all that the list had by now
            if time.monotonic() - looked >= LOOK or goal.until < 1.0:
                now, row = self._registry.progress(task.upgrade), self._registry.upgrade(task.upgrade)
                looked, self.paused = time.monotonic(), row.paused
                progress(now)
                if row.makes_way:
                    self._registry.end_making_way(row.id)
                limits = self._look(row, task.gallery)
                self._say(task, (limits if goal.is_short(now) else []) + settled.reasons)
            claimed, asked = None, uptime()
            action = next_action(now, row, len(hand), goal, stopping=stop.is_set())
            if action is Action.CLAIM:
                copy = goal.wants_more(now) and not row.paused
                if copy and asked_for is not None:
                    asked_for.step()
                if room := hand.room():
                    claimed = self._claim(task, copy=copy, room=room, settled=settled.until())
                    hand.note(room, vain=claimed is None)
            if claimed is not None:
                hand.take(pool.submit(self._work, task, backfill, claimed, self._in_time(claimed, asked)), half_of(claimed))
            elif action is Action.CLAIM and not hand:
                states = self._registry.counts(task.upgrade).keys()
                held = self._throttle.held > HELD
                action = next_action(now, row, 0, goal, stopping=stop.is_set(), states=states, held=held)
            if action is Action.STOP and (stop.is_set() or not growing):
                now = self._registry.progress(task.upgrade)
                progress(now)
                return now
            idle = 0.0 if claimed is not None else hand.idle
            hand.reap(patience=LOOK if action is Action.WAIT else idle)
            if claimed is None and not hand:
                stop.wait(min(max(self._throttle.wait(), idle), LOOK))

    def _work(self, task: Task, backfill: Backfill, batch: BatchRow, in_time: Permit) -> None:
        try:
            if half_of(batch) is BatchState.CLAIMED:
                backfill.copy(task, batch, in_time)
            else:
                backfill.retire(task, batch, in_time)
        except errors.LeaseLost as exc:
            log.warning("%s", exc, extra={"action": "lease-lost", "batch": batch.id})
            # Otherwise this worker's own heartbeat would keep for ever a claim that it no longer works on.
            self._registry.hand_back(batch)
        finally:
            self._in_hand.discard((batch.id, batch.token))
            if batch.state == BatchState.CLAIMED:
                self._throttle.end()

    def _claim(self, task: Task, *, copy: bool, settled: float | None, room: Collection[BatchState] = HALVES) -> BatchRow | None:
        copy = copy and self._throttle.wait() == 0
        claimed = self._registry.claim(
            task.upgrade, self.name, lease=self._lease, grace=task.grace, by_plan=True, copy=copy, room=room, settled=settled
        )
        if claimed is not None:
            self._in_hand.add((claimed.id, claimed.token))
            if claimed.state == BatchState.CLAIMED:
                self._throttle.begin(claimed.count)
        return claimed

    def _look(self, row: UpgradeRow, gallery: str) -> list[str]:
        """Return what holds the worker back now, in words: limits, slow searches."""
        return self._throttle.look(row, lambda: self._registry.slowest_client(gallery, enough=ENOUGH, within=WINDOW))

    def _say(self, task: Task, reasons: list[str]) -> None:
        """Let `status` show at once what holds this worker back now."""
        if reasons != self._reasons:
            self._reasons = reasons
            self._renew(task.upgrade)

    def _in_time(self, batch: BatchRow, asked: float) -> Permit:
        """Return a permit that raises LeaseLost unless two longest calls remain: one for the call, one for clock skew.

        `asked`: when the worker asked for the claim.
        """
        known = uptime()

        def check() -> None:
            renewed, confirmed = self._confirmed
            # The database has the last word, if it was asked after the claim was known. Each lease counts from the moment the
            # worker asked, so that it never ends later here than in the database.
            lost = renewed > known and (batch.id, batch.token) not in confirmed
            since = renewed if renewed > known else asked
            if lost or uptime() > since + self._lease - 2 * self._longest_call:
                raise errors.LeaseLost(
                    "This worker was suspended or cut off for longer than its lease. Another worker takes its batch over"
                )

        return check

    def _renew(self, upgrade: int) -> None:
        with self._renewing:
            asked, mine = uptime(), frozenset(self._in_hand)
            self._confirmed = asked, self._registry.renew(self.name, upgrade, mine, lease=self._lease, note=self.note)

    def _beat(self, upgrade: int, ended: threading.Event) -> None:
        failing = False
        while not ended.wait(min(self._lease / 6, BEAT)):
            try:
                self._renew(upgrade)
            except Exception as exc:  # noqa: BLE001 (a full disk, too: there may be room for the next one)
                if not failing:  # logged when it changes, not at every beat
                    log.warning("A heartbeat failed: %s", exc, extra={"action": "heartbeat"})
                failing = True
            else:
                if failing:
                    log.info("Heartbeats reach the registry again", extra={"action": "heartbeat"})
                failing = False
