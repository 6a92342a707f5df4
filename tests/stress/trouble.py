"""The faults of a stress run."""

from __future__ import annotations

import json
import signal
import threading
import time
from dataclasses import dataclass

from rmvdb.errors import WrongPhase
from rmvdb.registry.engine import Away
from rmvdb.types import Phase
from tests.stress.moments import Moments
from tests.stress.parts import PATIENCE, SUSPENDED, Broken, Process


@dataclass
class Trouble(Moments):
    """Kill, suspend, pause, lock, restart and stall."""

    def _trouble(self, driver: threading.Thread) -> None:
        """Kill, suspend, restart and stall until the time is over; read and compare all the while."""
        next_fault = time.monotonic() + 3.0
        self.next_pause = time.monotonic() + self.rests.uniform(5.0, 15.0)
        next_checkpoint, next_lock = time.monotonic() + 20.0, time.monotonic() + 6.0
        next_moment = time.monotonic() + self.moments.uniform(20.0, 40.0)
        while time.monotonic() < self.deployed + self.seconds:
            self._revive()
            self._read()
            if not driver.is_alive():
                raise self.driver_error or Broken("the upgrades ended before their time")
            if (now := time.monotonic()) > next_fault:
                self._fault()
                took = time.monotonic() - now  # what came back slowly is used for as long before the next fault
                next_fault = time.monotonic() + took + self.random.uniform(0.5, 4.0)
            if time.monotonic() > self.next_pause:
                self._resume() if self.paused is not None else self._pause()
            if time.monotonic() > next_lock:
                self._lock()
                next_lock = time.monotonic() + self.holds.uniform(8.0, 20.0)
            if (now := time.monotonic()) > next_moment:
                self._moment()
                took = time.monotonic() - now
                next_moment = time.monotonic() + took + self.moments.uniform(15.0, 45.0)
            if self.random.random() < 0.2:  # in mid-search, most likely
                self._suspended(self._one("searcher"), self.random.uniform(0.2, 1.2))
            if time.monotonic() > next_checkpoint:
                self._checkpoint()
                next_checkpoint = time.monotonic() + 30.0
            time.sleep(0.1)

    def _calm(self, driver: threading.Thread) -> None:
        """Stop the faults, and let everything that was begun end."""
        self._resume()
        while driver.is_alive() and self._goes_on():
            self._revive()
            self._read()
            time.sleep(0.1)
        if driver.is_alive():
            raise Broken(f"the last upgrade stands still for {PATIENCE:g} s: {json.dumps(self._status())}")
        if self.driver_error:
            raise self.driver_error

    def _fault(self) -> None:
        kinds = [self._kill] * 4 + [self._suspend] * 2 + [self._suspend_long] + [self._restart] * 2 + [self._stall] * 2
        self.random.choice(kinds)()

    def _one(self, *kinds: str) -> Process:
        return self.random.choice([each for each in self.processes if each.name.startswith(kinds)])

    def _kill(self) -> None:
        """Kill a worker, an application or the running command."""
        command = self.command
        if command is not None and command.poll() is None and self.random.random() < 0.3:
            command.kill()
        else:
            self._one("worker", "worker", "writer", "searcher").process.kill()
        self.kills += 1

    def _suspend(self) -> None:
        self._suspended(self._one("worker", "writer"), self.random.uniform(0.2, 2.5))

    def _suspend_long(self) -> None:
        """Suspend a process for longer than a lease."""
        self._suspended(self._one("worker"), SUSPENDED)

    def _suspended(self, chosen: Process, seconds: float) -> None:
        process = chosen.process
        process.send_signal(signal.SIGSTOP)
        threading.Timer(seconds, process.send_signal, [signal.SIGCONT]).start()
        self.suspensions += 1

    def _pause(self) -> None:
        """Pause as `rmvdb pause` does, for some seconds: applications go on writing."""
        upgrade = self.app.registry.active_upgrade(self.app.registry.gallery("things").id)
        if upgrade is None or upgrade.phase not in (Phase.PLANNED, Phase.SERVING_BOTH):
            return
        try:
            self.app.registry.pause(upgrade.id)
        except WrongPhase:  # it ended just now
            return
        self.paused, self.next_pause = upgrade.id, time.monotonic() + self.rests.uniform(2.0, 6.0)
        self.pauses += 1

    def _resume(self) -> None:
        """Resume as `rmvdb resume` does, if it was paused."""
        if self.paused is not None:
            self.app.registry.resume(self.paused)
        self.paused, self.next_pause = None, time.monotonic() + self.rests.uniform(5.0, 15.0)

    def _lock(self) -> None:
        """An administrator holds a lock on the registry for a moment: every write there waits, and what is asked, too."""
        started, engine = time.monotonic(), self.app.registry.engine
        try:
            with engine.begin() as connection:  # in SQLite the transaction, which begins IMMEDIATE, is the lock
                if engine.dialect.name == "postgresql":
                    connection.exec_driver_sql("LOCK TABLE galleries IN ACCESS EXCLUSIVE MODE")
                time.sleep(self.holds.uniform(0.5, 3.0))
        except Away:  # a process that is suspended holds it
            return
        self.away.append((started, time.monotonic()))
        self.locks += 1

    def _restart(self) -> None:
        part = self.random.choice(self.breakable)
        if part is self.engine and not self._recovered():
            return
        started = time.monotonic()
        part.restart(kill=self.random.random() < 0.5)
        self.away.append((started, time.monotonic()))
        self.restarts += 1

    def _stall(self) -> None:
        self.random.choice(self.breakable).stall(self.random.uniform(0.2, 1.0))
