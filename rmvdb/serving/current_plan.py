"""The serving plan as a client knows it: asked for again and again, and made ready before it is in force."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import threading
from collections.abc import Callable, Mapping

from rmvdb import errors
from rmvdb.registry.clients import Serving
from rmvdb.registry.registry import Registry
from rmvdb.registry.waiting import within
from rmvdb.serving.latency import WINDOW, Latency
from rmvdb.serving.traffic import TrafficCounter
from rmvdb.text import storable
from rmvdb.timing import uptime
from rmvdb.types import Id, ServingPlan

log = logging.getLogger(__name__)
#: Of its own: an application may have seeded the one that all share.
_random = random.Random()  # noqa: S311 (no secret)

#: Seconds after which loading a plan's models is tried again, at most.
LONGEST_PAUSE = 60.0
#: Seconds for which a search waits for a new plan where its own is too old, if plans may not be older than that.
WAITS = 15.0
#: Seconds by which a call may end later than it should: who waits for its holder hears from it why it failed.
LATE = 5.0
#: Clients from which on each one asks less often.
MANY_CLIENTS = 20
#: Who asks for the plan also says that it serves by it: nobody would wait for a client that could only read.
CANNOT_ASK = (errors.RegistryError, errors.DiskFull)


class _TimedLock:
    """A lock for which nobody waits longer than so many seconds: its holder may wait for a registry that hangs."""

    def __init__(self, seconds: float) -> None:
        self._lock, self._seconds = threading.Lock(), seconds

    def __enter__(self) -> None:
        if not self._lock.acquire(timeout=self._seconds):
            raise errors.RegistryUnavailable(f"The registry has not answered for {self._seconds:g} s; look at its database")

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class CurrentPlan:
    """The serving plan as this process knows it, never used when it is older than its maximum age.

    A thread asks again three times within that age and reports how long searches take, and now and then what they found. Another
    one loads what an announced plan needs; until that is there this client serves, and is waited for, by the plan in force.
    """

    def __init__(
        self,
        gallery: str,
        *,
        registry: Registry,
        prepare: Callable[[ServingPlan], None],
        name: str,
        latency: Latency,
        traffic: TrafficCounter,
    ) -> None:
        self._gallery, self._registry, self._prepare, self._name = gallery, registry, prepare, name
        self._latency, self._traffic = latency, traffic
        self._process = os.getpid()
        self._ready, self._trouble = 0, ""
        #: The gallery's number that only rises, as the registry said last.
        self._trace = 0
        self._lock = _TimedLock(WAITS + LATE)
        self._loading: threading.Thread | None = None
        #: The epoch that could not be loaded last, when it is tried again, and how long after the last time that is.
        self._failed, self._again_at, self._pause = 0, 0.0, 0.0
        self._stop, self._wake = threading.Event(), threading.Event()
        #: When the registry last could not be asked, and why.
        self._failure: tuple[float, errors.RmvdbError] | None = None
        #: The plan, and when it was asked for; in one, since another thread may be replacing them.
        self._gaps, self._clients = registry.gaps, 1
        self._held = self._ask(0)
        registry.let_go()
        self._thread = threading.Thread(target=self._keep_asking, name=f"rmvdb-plans-{gallery}", daemon=True)
        self._thread.start()

    def current(self) -> ServingPlan:
        """The plan in force, at most `max_age` seconds old; StalePlan when the registry cannot be asked.

        UsageError once it is closed, and in a process that was forked off since: two must not be one to the registry.
        """
        if self._stop.is_set():
            raise errors.UsageError(f"This client of {self._gallery!r} is closed; connect again")
        if self.forked:
            raise errors.UsageError(
                f"This client of {self._gallery!r} is another process's, which forked; connect in each process"
            )
        if fresh := self._fresh():
            return fresh
        since = uptime()
        try:
            with self._lock:  # of many searches that find it too old one asks, and all hear the answer
                if self._failure and self._failure[0] >= since:
                    raise self._failure[1]
                with within(max(WAITS, self._held[0].max_age)):
                    return self._fresh() or self._renewed()
        except (*CANNOT_ASK, errors.UnknownName) as exc:  # or it lost the gallery
            plan, asked = self._held
            raise errors.StalePlan(
                f"The serving plan of {self._gallery!r} is {uptime() - asked:.0f} s old, {plan.max_age:g} s are allowed; "
                f"searching on could miss records: {exc}"
            ) from exc

    @property
    def forked(self) -> bool:
        """Whether this process was forked off the one that connected."""
        return os.getpid() != self._process

    def refresh(self) -> ServingPlan:
        """Ask the registry now."""
        with self._lock, within(max(WAITS, self._held[0].max_age)):
            return self._renewed()

    def _fresh(self) -> ServingPlan | None:
        plan, asked = self._held
        still = self._gaps == self._registry.gaps  # or the database's clock says that more time passed than was counted here
        return plan if still and uptime() - asked <= plan.max_age else None

    def _renewed(self) -> ServingPlan:
        before = self._held[0].epoch
        try:
            self._held = self._ask(before)
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
                self._held = self._ask(epoch)  # at once: writes wait to hear that this client serves by it
        return self._held[0]

    def close(self) -> None:
        """Stop asking, and tell the registry that nobody need wait for this client, and what was found last."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._wake.set()
        for thread in (self._thread, self._loading):
            if thread is not None:
                thread.join(timeout=5)  # no longer: it may be loading a model, or wait for an import that waits for this
        try:
            self._registry.leave(self._name)
        except errors.RmvdbError:  # nor would it hear anything else
            log.info("The registry did not hear that client %s left; it will notice by itself", self._name)
        else:
            self._tell_found(self._traffic.take())

    def _ask(self, holds: int) -> tuple[ServingPlan, float]:
        asked, gaps = uptime(), self._registry.gaps  # a plan's age counts from before the question: the answer can only be newer
        serving = self._tell(holds)
        self._gaps, self._clients = gaps, serving.clients
        if serving.next and self._ready < serving.next.epoch:
            self._load(serving.plan, serving.next)
        return serving.plan, asked

    def _tell(self, holds: int) -> Serving:
        searches, p99_ms = self._latency.p99()
        serving = self._registry.refresh(
            self._gallery,
            client=self._name,
            holds=holds,
            ready=self._ready,
            trouble=self._trouble,
            searches=searches,
            p99_ms=p99_ms,
        )
        if serving.plan.epoch < holds or (serving.plan.epoch == holds and serving.trace < self._trace):
            raise self.gone_back(serving.plan.epoch)
        self._trace = serving.trace
        return serving

    def gone_back(self, epoch: int) -> errors.StalePlan:
        """What to say where the registry is at an epoch before the one that this client serves by: records have moved since."""
        return errors.StalePlan(
            f"The registry has gone back: it serves {self._gallery!r} by epoch {epoch}, and this client by {self._held[0].epoch} "
            "or a later step of it; put the newer database back, or empty this one and run rmvdb registry rebuild"
        )

    def _load(self, served: ServingPlan, plan: ServingPlan) -> None:
        """Begin to load what that plan needs, where that is not under way: it may take minutes, and nothing waits for it here."""
        if plan.epoch != self._failed:
            self._again_at = self._pause = 0.0
        if (self._loading is None or not self._loading.is_alive()) and uptime() >= self._again_at:
            self._trouble = self._trouble or "it is loading what that needs"
            # No daemon: a process that ends in the middle of a library's loading dies of it.
            self._loading = threading.Thread(target=self._make_ready, args=(served, plan), name="rmvdb-loading")
            self._loading.start()

    def _make_ready(self, served: ServingPlan, plan: ServingPlan) -> None:
        with contextlib.suppress(Exception):  # who searches hears of it
            self._prepare(served)  # first: models are loaded one after the other, and searches wait for this one
        try:
            self._prepare(plan)
        except BaseException as exc:  # noqa: BLE001 (user code may raise anything; it is reported, and this client serves on)
            self._trouble = storable(f"{type(exc).__name__}: {exc}")
            self._pause = min(2 * self._pause or 1.0, LONGEST_PAUSE)
            self._failed, self._again_at = plan.epoch, uptime() + self._pause
            log.warning(
                "Epoch %s of %s cannot be served here: %s", plan.epoch, self._gallery, self._trouble, extra={"action": "prepare"}
            )
            return
        self._ready, self._trouble, self._pause = plan.epoch, "", 0.0
        self._wake.set()  # writes wait to hear it

    def _keep_asking(self) -> None:
        while True:
            self._wake.wait(self._interval())
            self._wake.clear()
            if self._stop.is_set():
                return
            try:
                self.refresh()
            except Exception as exc:  # noqa: BLE001 (without a heartbeat an upgrade would wait for this client, or not wait)
                log.warning("The serving plan of %s could not be refreshed: %s", self._gallery, exc, extra={"action": "refresh"})
            self._tell_found(self._traffic.due())  # here, where no search waits for it
            self._registry.let_go()  # a server has connections for some hundred processes, and clients ask seldom

    def _interval(self) -> float:
        """Seconds until the plan is asked for again: more of its age where many clients ask, and not all at one moment."""
        age = min(self._held[0].max_age, WINDOW)
        share = min(max(self._clients / MANY_CLIENTS, 1.0), 2.0) / 3
        return age * share * _random.uniform(0.9, 1.0)

    def _tell_found(self, found: Mapping[Id, int]) -> None:
        if not found:
            return
        try:
            self._registry.add_traffic(self._gallery, found)
        except Exception as exc:  # noqa: BLE001 (it is a statistic, and nothing else may fail because of it)
            log.info("What searches of %s found could not be counted: %s", self._gallery, exc, extra={"action": "traffic"})
