"""The upgrades of a stress run, one after the other."""

from __future__ import annotations

import itertools
import json
import random
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rmvdb.registry.upgrade_plan import EpochName
from rmvdb.types import Record
from tests.stress.application import fields
from tests.stress.parts import PATIENCE, WORKERS, Broken, Parts

#: How an upgrade ends that is not cleaned up.
ROLL_BACKS = ("roll back on the way", "roll back at the end")


@dataclass
class Upgrades(Parts):
    """Drive them by commands, which may be killed."""

    def _drive(self) -> None:
        try:
            chosen = random.Random(f"{self.seed} upgrades")
            self.lifts = random.Random(f"{self.seed} lifts")  # of its own: the other choices of a seed stay what they were
            held, other = "a", "b"
            while not self.over.is_set():
                held, other = self._upgrade(held, other, chosen)
        except BaseException as exc:  # noqa: BLE001 (it is raised again in the main thread)
            self.driver_error = exc

    def _upgrade(self, held: str, other: str, chosen: random.Random) -> tuple[str, str]:
        """Run one upgrade to its end or back. The version held afterwards comes first."""
        method = chosen.choice(("naive", "rqt", "rqt", "mcl"))
        method = self.method or ("fct" if self.lifts.random() < 0.2 else method)
        ending = chosen.choice(ROLL_BACKS * 2 if self.roll_back else ("clean up", "clean up", *ROLL_BACKS))
        share = chosen.uniform(0.05, 0.8)
        begin = ["upgrade", "--from", held, "--to", other, "--labels", "label", "--order", "random", "--sample", "1500"]
        begin.append("--accept-risk")
        if chosen.random() < 0.4 or self.instant_rollback:
            begin.append("--instant-rollback")
        side = ["--side", "hint"] * (method == "fct")
        if not self._command(*begin, "--method", method, *side, "--detach", refusal="would start below"):
            self._command(*begin, "--method", "naive", "--detach")
        self._count(ending)
        self.deployed = min(self.deployed, time.monotonic())
        self._command("throttle", "--rate", str(max(20, self.records // (WORKERS * 45))), refusal="no batch is left")
        self._insert_past_the_client(held)
        self._until(lambda now: now["phase"] == "cut over" or (ending == "roll back on the way" and now["t"] > share))
        self.upgrades += 1
        if ending != "clean up":
            self._command("rollback")
            self._until(lambda now: now["phase"] == "cut over" and now["rolls_back"])
            self.rollbacks += 1
        with self.steady:
            self._command("cleanup", "--yes")
        return (other, held) if ending == "clean up" else (held, other)

    def _count(self, ending: str) -> None:
        with self.whole:
            row = self.app.registry.upgrades(self.app.registry.gallery("things").id)[-1]
        self.instant += bool(row.original)
        self.lifted += bool(row.lift)
        self.scheduled += EpochName.LATER in row.plan.epochs
        kinds = ["keeps the original"] * bool(row.original) + ["follows a schedule"] * (EpochName.LATER in row.plan.epochs)
        self.say(f"{row.from_version} → {row.to_version}: {', '.join([str(row.method), *kinds])}; to {ending}")

    def _insert_past_the_client(self, held: str) -> None:
        """Insert into the old collection as a program does that knows nothing of rmvdb."""
        with self.steady, self.whole:
            plan = self.app.registry.plan("things")
            leg = plan.legs[-1]
            if plan.mirrors or leg.model != held or self._status()["t"] > 0.5:
                return  # what is put past the client into a mirror is not found at once, which the truth would call lost
            ids = list(range(self.foreign, self.foreign + 20))
            self.foreign += 20
            vectors = self.app.loaded_models.apply_head(
                held, self.app.loaded_models.embed(held, [self.models.item(id, 0) for id in ids])
            )
            rows = [
                Record(id=id, vector=vector, fields=fields(self.models, id, 0)) for id, vector in zip(ids, vectors, strict=True)
            ]
            began = {"begin": time.monotonic(), "write": self.foreign, "ids": ids, "edition": 0}
            self.truth.read([began], "foreign")
            self._answered(lambda: self.app.store.upsert(leg.collection, rows))
            self.truth.read([{"end": time.monotonic(), "write": self.foreign}], "foreign")

    def _command(self, *words: str, refusal: str = "") -> bool:
        """Run a command. Repeat it if it was killed or a part was away. Return False if it refuses with that word."""
        for tries in itertools.count():
            started = time.monotonic()
            command = self.project.start(*words)
            self.command = command if tries < 2 else None  # on a slow machine planning would never end
            out, err = command.communicate(timeout=3 * PATIENCE)  # a plan trains, and shares the machine
            if command.returncode == 0:
                self.commands += 1
                return True
            if refusal and refusal in err:
                return False
            if self._repaired(err):
                continue
            if " is paused; " in err:  # the way out is `rmvdb resume`, which this run calls in time
                time.sleep(0.5)
                continue
            killed = command.returncode == -signal.SIGKILL or "works on this upgrade" in err
            if not killed and not self._troubled(started, time.monotonic()):
                raise Broken(f"rmvdb {' '.join(words)} ended with {command.returncode}:\n{out}\n{err}")
            if words[0] == "cleanup" and self._status()["phase"] == "ended":
                return True
            time.sleep(0.5)
        raise AssertionError("it is tried again without end")

    def _until(self, reached: Callable[[dict[str, Any]], bool]) -> None:
        while not reached(now := self._status()):
            if not self._goes_on():
                raise Broken(f"the upgrade stands still for {PATIENCE:g} s: {json.dumps(now)}")
            self._repaired(now["stopped"])
            time.sleep(0.3)

    def _repaired(self, words: str) -> bool:
        """Repair if these words advise it because the registry has gone back: writes of just before are unknown to it."""
        if not self.registry_back or "--repair" not in words:
            return False
        said = self.project.run("verify", "--repair", "--yes", code=None, timeout=3 * PATIENCE)
        told = f"{said.stdout}\n{said.stderr}"
        self.say(f"repaired: {told[-1000:]}")
        for kept in re.findall(r"the difference is kept: ([\d, ]+)", told):
            if other := {int(id) for id in kept.split(",") if id.strip()} - self.truth.forgotten:
                raise Broken(f"a repair kept differences of records whose writes the registry never forgot: {sorted(other)}")
        return True
