"""The serving plan of a client: refreshed all the time, and its models loaded before it is in force."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import threading
from collections.abc import Callable, Mapping

from rmvdb import errors
from rmvdb.registry import mark
from rmvdb.registry.clients import Serving
from rmvdb.registry.registry import Registry
from rmvdb.registry.waiting import within
from rmvdb.serving.latency import WINDOW, Latency
from rmvdb.text import storable
from rmvdb.timing import uptime
from rmvdb.types import ServingPlan

log = logging.getLogger(__name__)
#: An application may have seeded the shared generator, and forked children share the state of any other.
_random = random.SystemRandom()

#: The most seconds between two tries to load a plan's models.
LONGEST_PAUSE = 60.0
#: Seconds for which a search waits for a new plan if its own is too old and plans may not be older than that.
WAITS = 15.0
#: Seconds by which a call may be late. A thread that waits longer for its lock raises RegistryUnavailable.
LATE = 5.0
#: The shares of a plan's maximum age after which a client asks again: usually, and while another plan is announced, because
#: writes wait until every client has heard of a change. The rest of the age is for a registry that is away for a moment.
SELDOM, OFTEN = 2 / 3, 1 / 6
#: The errors of asking for the plan. A client that asks also reports its epoch, so it needs the right to write. No epoch would
#: wait for a client that only reads.
CANNOT_ASK = (errors.RegistryError, errors.DiskFull)


class _TimedLock:
    """A lock with a limit on the wait, because its holder may wait for a registry that hangs."""

    def __init__(self, seconds: float) -> None:
        self._lock, self._seconds = threading.Lock(), seconds

    def __enter__(self) -> None:
        if not self._lock.acquire(timeout=self._seconds):
            raise errors.RegistryUnavailable(f"The registry has not answered for {self._seconds:g} s; look at its database")

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class CurrentPlan:
    """The serving plan of this process. It is never used after its maximum age.

    One thread asks for it before that, and reports how long searches take. One compares the marks beside the data once a minute.
    Another thread loads the models of an announced plan. Meanwhile this client serves by the plan in force, and the next epoch
    waits for it.
    """

    def __init__(
        self,
        gallery: str,
        *,
        registry: Registry,
        prepare: Callable[[ServingPlan], None],
        name: str,
        latency: Latency,
        rescoring: Callable[[], Mapping[str, float] | None] = lambda: None,
        expect_owned: Callable[[ServingPlan, int], None] = lambda *_: None,
    ) -> None:
        """`rescoring` returns what rescoring did lately, as the registry keeps it. `expect_owned` gets the plan and the number of
        the registry's trace, and raises NotOwner if the marks beside the data show another registry, or a later state of this
        one."""
        self._rescoring, self._expect_owned = rescoring, expect_owned
        #: The last answer of `expect_owned`.
        self._not_owner: errors.NotOwner | None = None
        self._gallery, self._registry, self._prepare, self._name = gallery, registry, prepare, name
        self._latency = latency
        self._process = os.getpid()
        self._ready, self._trouble = 0, ""
        #: The registry's last answer.
        self._known: Serving | None = None
        self._lock = _TimedLock(WAITS + LATE)
        self._loading: threading.Thread | None = None
        #: The epoch that failed to load last, when to try it again, and the pause before that try.
        self._failed, self._again_at, self._pause = 0, 0.0, 0.0
        self._stop, self._wake = threading.Event(), threading.Event()
        #: When the registry last failed to answer, and its error.
        self._failure: tuple[float, errors.RmvdbError] | None = None
        self._gaps = registry.gaps
        #: The plan, and when it was asked for: one tuple, because another thread may replace them.
        self._held = self._ask(0)
        # Close them at once. When 200 clients connected together to a server of 20 connections, they kept it busy for 33 s.
        # Since this line, they do for 9 s.
        registry.let_go()
        self._thread = threading.Thread(target=self._keep_asking, name=f"rmvdb-plans-{gallery}", daemon=True)
        self._thread.start()
        # Of its own: it asks the engine, and heartbeats must not wait for that.
        self._comparing = threading.Thread(target=self._keep_comparing, name=f"rmvdb-marks-{gallery}", daemon=True)
        self._comparing.start()

    def expect_usable(self) -> None:
        """Raise UsageError if this client is closed, or belongs to the process that forked this one."""
        if self._stop.is_set():
            raise errors.UsageError(f"This client of {self._gallery!r} is closed; connect again")
        if self.forked:
            raise errors.UsageError(
                f"This client of {self._gallery!r} belongs to the process that forked this one; connect in each process"
            )

    def current(self) -> ServingPlan:
        """Return the plan in force, at most `max_age` seconds old.

        Raises:
            StalePlan: the plan is too old, and the registry does not answer.
            NotOwner: this is a copy of the registry, and another moved records since. Looked at once a minute.
            UsageError: this client is closed, or belongs to the process that forked this one.
        """
        self.expect_usable()
        if (not_owner := self._not_owner) is not None:
            raise errors.NotOwner(str(not_owner))  # a new one each time: each raise would lengthen the traceback of the same
        if fresh := self._fresh():
            return fresh
        since = uptime()
        try:
            with self._lock:  # if many searches find the plan too old, one asks, and all get the answer
                if self._failure and self._failure[0] >= since:
                    raise self._failure[1]
                with within(max(WAITS, self._held[0].max_age)):
                    return self._fresh() or self._renewed()
        except (*CANNOT_ASK, errors.UnknownName) as exc:  # UnknownName: the registry has lost the gallery
            plan, asked = self._held
            raise errors.StalePlan(
                f"The serving plan of {self._gallery!r} is {uptime() - asked:.0f} s old, {plan.max_age:g} s are allowed; "
                f"a search by it could miss records: {exc}"
            ) from exc

    @property
    def forked(self) -> bool:
        """Whether another process connected and forked this one."""
        return os.getpid() != self._process

    def refresh(self) -> ServingPlan:
        """Ask the registry now. Return the plan in force."""
        with self._lock, within(max(WAITS, self._held[0].max_age)):
            return self._renewed()

    def _confirm(self) -> None:
        """Ask the registry whether the plan is still in force."""
        with self._lock, within(max(WAITS, self._held[0].max_age)):
            self._renewed(known=self._known)

    def _fresh(self) -> ServingPlan | None:
        plan, asked = self._held
        counted = self._gaps == self._registry.gaps  # else more time passed by the database's clock than this process counted
        return plan if counted and uptime() - asked <= plan.max_age else None

    def _renewed(self, known: Serving | None = None) -> ServingPlan:
        before = self._held[0].epoch
        try:
            self._held = self._ask(before, known)
        except CANNOT_ASK as exc:
            self._failure = uptime(), exc
            raise
        if (epoch := self._held[0].epoch) != before:
            log.info(
                "%s is served by epoch %s now: %s",
                self._gallery,
                epoch,
                ", ".join(f"{leg.collection} ({leg.model})" for leg in self._held[0].legs),
                extra={"action": "plan", "epoch": epoch},
            )
            with contextlib.suppress(*CANNOT_ASK):
                self._held = self._ask(epoch)  # at once: writes wait until this client reports the epoch
        return self._held[0]

    def close(self) -> None:
        """Stop asking, and tell the registry that no epoch need wait for this client."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._wake.set()
        for thread in (self._thread, self._comparing, self._loading):
            if thread is not None:
                thread.join(timeout=5)  # do not wait longer: it may load a model, or wait for an import that waits for this
        try:
            self._registry.leave(self._name)
        except errors.RmvdbError:
            log.info("Client %s could not tell the registry that it ends. The registry notices after a while.", self._name)

    def _ask(self, holds: int, known: Serving | None = None) -> tuple[ServingPlan, float]:
        asked, gaps = uptime(), self._registry.gaps  # the plan's age counts from before the call
        serving = self._report(holds, known)
        self._gaps = gaps
        if serving.next and self._ready < serving.next.epoch:
            self._load(serving.plan, serving.next)
        return serving.plan, asked

    def _report(self, holds: int, known: Serving | None) -> Serving:
        searches, p99_ms = self._latency.p99()
        serving = self._registry.refresh(
            self._gallery,
            client=self._name,
            holds=holds,
            ready=self._ready,
            trouble=self._trouble,
            searches=searches,
            p99_ms=p99_ms,
            rescoring=self._rescoring(),
            known=known,
            added=self._known.added if self._known else None,
        )
        trace = self._known.trace if self._known else 0
        if serving.plan.epoch < holds or (serving.plan.epoch == holds and serving.trace < trace):
            raise self.gone_back(serving.plan.epoch)
        self._known = serving
        return serving

    def gone_back(self, epoch: int) -> errors.StalePlan:
        """Make the error for a registry at an epoch before the one that this client serves by: records have moved since."""
        return errors.StalePlan(
            f"The registry has gone back: it serves {self._gallery!r} by epoch {epoch}, and this client by {self._held[0].epoch} "
            "or a later step of it; put the newer database back, or empty this one and run rmvdb registry rebuild"
        )

    def _load(self, served: ServingPlan, plan: ServingPlan) -> None:
        """Start a thread that loads the models of that plan, unless one runs. Loading may take minutes, so this does not wait."""
        if plan.epoch != self._failed:
            self._again_at = self._pause = 0.0
        if (self._loading is None or not self._loading.is_alive()) and uptime() >= self._again_at:
            self._trouble = self._trouble or "it is loading its models"
            # Not a daemon: a process that ends while a library loads crashes.
            self._loading = threading.Thread(target=self._make_ready, args=(served, plan), name="rmvdb-loading")
            self._loading.start()

    def _make_ready(self, served: ServingPlan, plan: ServingPlan) -> None:
        with contextlib.suppress(Exception, SystemExit):  # a search raises it
            self._prepare(served)  # first: models load one after the other, and searches wait for this one
        try:
            self._prepare(plan)
        except BaseException as exc:  # noqa: BLE001 (user code may raise anything; this client reports it and continues)
            self._trouble = storable(f"{type(exc).__name__}: {exc}")
            self._pause = min(2 * self._pause or 1.0, LONGEST_PAUSE)
            self._failed, self._again_at = plan.epoch, uptime() + self._pause
            log.warning(
                "This client cannot serve epoch %s of %s: %s",
                plan.epoch,
                self._gallery,
                self._trouble,
                extra={"action": "prepare"},
            )
            return
        self._ready, self._trouble, self._pause = plan.epoch, "", 0.0
        self._wake.set()  # writes wait for this report

    def _keep_asking(self) -> None:
        while True:
            self._wake.wait(self._interval())
            self._wake.clear()
            if self._stop.is_set():
                return
            try:
                self._confirm()
            except Exception as exc:  # noqa: BLE001 (the heartbeats must go on: upgrades wait for clients by them)
                log.warning("The serving plan of %s could not be refreshed: %s", self._gallery, exc, extra={"action": "refresh"})
            self._registry.let_go()

    def _keep_comparing(self) -> None:
        while not self._stop.wait(mark.COMPARE_EVERY):
            try:
                self._expect_owned(self._held[0], self._known.trace if self._known else 0)
                self._not_owner = None
            except errors.NotOwner as exc:
                self._not_owner = exc
                log.warning("This client answers no more: %s", exc, extra={"action": "owner"})
            except Exception as exc:  # noqa: BLE001 (the registry is away, or the client is being closed)
                log.info("rmvdb could not check who owns the collections of %s: %s", self._gallery, exc)

    def _interval(self) -> float:
        """Return the seconds until the next call: random, so that clients spread out."""
        share = OFTEN if self._known and self._known.next else SELDOM
        return min(self._held[0].max_age, WINDOW) * share * _random.uniform(0.9, 1.0)
