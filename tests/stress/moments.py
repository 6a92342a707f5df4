"""Registry, engine and clock of a stress run are not of one moment: one of them goes back, stands still or is set."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import Any

from rmvdb.errors import NotOwner, WrongPhase
from rmvdb.registry.mark import Owner
from rmvdb.types import Phase
from tests.stress.comparing import Comparing
from tests.stress.engines import Freezable, Settable
from tests.stress.parts import RECOVERING, SUSPENDED


@dataclass
class Moments(Comparing):
    """Put one of them into another moment than the others."""

    def _moment(self) -> None:
        kinds = [self._registry_goes_back, self._engine_goes_back]
        kinds += [self._jump] * isinstance(self.registry, Settable) + [self._freeze] * isinstance(self.registry, Freezable)
        self.moments.choice(kinds)()

    def _jump(self) -> None:
        """Set the database's clock by minutes or hours, as an administrator may."""
        assert isinstance(self.registry, Settable)
        self.registry.jump(self.moments.choice((-1, 1)) * self.moments.choice((30.0, 600.0, 7200.0)))
        self.jumps += 1

    def _freeze(self) -> None:
        """Suspend the database for longer than a search may go on without it."""
        assert isinstance(self.registry, Freezable)
        started = time.monotonic()
        self.registry.freeze(self.moments.uniform(2.0, 12.0))
        self.away.append((started, time.monotonic()))
        self.freezes += 1

    def _at(self) -> tuple[Any, ...]:
        """Where the upgrade is: a copy of another phase, or from before a command that returned, would undo more than moments."""
        now = self._status()
        return now["upgrade"], now["phase"], now["epoch"], self.commands, self.paused

    def _registry_goes_back(self) -> None:
        """Set the database back by some seconds while workers run on: it has lost acknowledged commits.

        If the marks beside the data show it, rmvdb refuses the registry from then on. The documented way out is to rebuild it.
        """
        if (at := self._at())[1] != Phase.SERVING_BOTH:
            return
        kept = time.monotonic() - RECOVERING  # a deletion that began before may have been noted as done after it
        with self._away(), self.whole:
            self.registry.keep()
        time.sleep(self.moments.uniform(0.2, 8.0))
        with self._quiet(), self.whole:
            if self._at() != at:
                return
            with self._away():
                self.registry.go_back()
                self.app.registry.engine.dispose()
            self.registry_back += 1
            self.truth.may_come_back(kept, time.monotonic())
            self.say("the registry has gone back")
            # A worker that wrote a decision down just before may have been suspended, and writes its mark only now.
            end = time.monotonic() + SUSPENDED + 2.0
            while time.monotonic() < end:
                try:
                    Owner(self.app.registry, self.app.store).expect("things")
                except NotOwner as exc:
                    self.say(str(exc)[:200])
                    self._rebuild()
                    return
                self._revive_workers()
                time.sleep(0.2)

    def _rebuild(self) -> None:
        with self._away():
            self._end_processes("")
            if self.command is not None:
                self.command.kill()
                self.command.wait()
            self.app.registry.engine.dispose()
            self.registry.empty()
            self.project.run("registry", "rebuild")
            self.rebuilds += 1
            if self.paused is not None:
                self.paused = None
                with contextlib.suppress(WrongPhase):
                    self.app.registry.resume(self._status()["upgrade"])

    def _engine_goes_back(self) -> None:
        """The engine is from before some seconds of the backfill; applications wrote nothing in them, because such writes would
        be lost for good."""
        if (at := self._at())[1] != Phase.SERVING_BOTH or self.app.registry.upgrade(at[0]).in_place:
            return  # what was re-embedded in place, and is not any more, only verification finds
        with self._quiet():
            with self._away():
                self.engine.keep()
            end = time.monotonic() + self.moments.uniform(2.0, 6.0)
            while time.monotonic() < end:
                self._revive_workers()
                time.sleep(0.1)
            if self._at() != at:
                return
            with self._away():
                # To put a backup back takes longer than a worker acts on an earlier answer.
                self._end_processes("worker")
                if self.command is not None:
                    self.command.kill()
                self.engine.go_back()
            self.engine_back += 1
            self.say("the engine has gone back")
            self._compare()
