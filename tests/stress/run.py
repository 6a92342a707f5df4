"""A stress run: upgrades and roll backs one after the other while applications write and search and things are killed."""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import rmvdb
from rmvdb.errors import EngineUnavailable, NotOwner, WrongPhase
from rmvdb.registry.engine import Away
from rmvdb.registry.mark import Owner
from rmvdb.registry.upgrade_plan import EpochName
from rmvdb.types import Phase, Record
from tests.stress.application import SHARDS, fields
from tests.stress.engines import Breakable, Emptied, Freezable, Rewindable, Settable
from tests.stress.models import TEXT
from tests.stress.truth import GONE, Log, Truth, Verdict
from tests.support.project import Project

WORKERS, WRITERS, SEARCHERS = 3, 2, 2
#: Records that another program puts straight into the old collection have ids from here on.
FOREIGN = 5_000_000
#: Seconds after an engine or a database came back within which a command that had begun may still fail.
RECOVERING = 5.0
#: Seconds for which a worker is suspended now and then: longer than its lease.
SUSPENDED = 10.0
#: Seconds of a plain search after which one of rmvdb's is asked again: `search.longest_search` of the project.
SLOW = 1.5
#: Seconds without any progress after which something hangs: on an overloaded machine planning alone takes minutes.
PATIENCE = 600.0


#: Counts of the faults by which parts are of different moments, or strange.
NOT_OF_ONE_MOMENT = ("poison", "intrusions", "adopted", "jumps", "freezes", "registry_back", "engine_back", "rebuilds")


class Broken(Exception):
    """The run cannot go on: something did what it must never do."""


@dataclass
class Process:
    """One process of the run, started again whenever it ends."""

    name: str
    start: Callable[[], subprocess.Popen[Any]]
    process: subprocess.Popen[Any]
    again_at: float = 0.0


@dataclass
class Run:
    """One run on one engine and one registry; `seconds` count from the moment that the first upgrade is deployed."""

    project: Project
    engine: Rewindable
    registry: Emptied
    records: int
    seconds: float
    seed: int
    #: Every upgrade keeps the original whole, not only those that the seed chooses.
    instant_rollback: bool
    #: Of every upgrade, not the one that the seed chooses.
    method: str | None
    say: Callable[[str], None]
    verdict: Verdict = field(default_factory=Verdict)
    kills: int = 0
    restarts: int = 0
    suspensions: int = 0
    pauses: int = 0
    locks: int = 0
    upgrades: int = 0
    rollbacks: int = 0
    #: Of the upgrades: those that keep the original whole, those of them that lift its copy, those that follow a schedule over t.
    instant: int = 0
    lifted: int = 0
    scheduled: int = 0
    checkpoints: int = 0
    failed_writes: int = 0
    #: Poison that writers gave, attempts of another registry to take a collection, and those that were let in.
    poison: int = 0
    intrusions: int = 0
    adopted: int = 0
    #: How often the database's clock was set, the database suspended, the registry or the engine went back, and the registry was
    #: made again because it had.
    jumps: int = 0
    freezes: int = 0
    registry_back: int = 0
    engine_back: int = 0
    rebuilds: int = 0
    #: Searches that failed while plain ones failed or were slow, too.
    excused: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.rests = random.Random(f"{self.seed} rests")  # of its own: the other choices of a seed stay what they were
        self.holds = random.Random(f"{self.seed} locks")
        self.moments = random.Random(f"{self.seed} moments")
        #: The services that can be restarted and stalled. A SQLite file cannot.
        self.breakable = [part for part in (self.engine, self.registry) if isinstance(part, Breakable)]
        #: The upgrade that is paused, and when that changes next.
        self.paused: int | None = None
        self.next_pause = 0.0
        self.truth = Truth(self.records, shards=SHARDS)
        self.processes: list[Process] = []
        self.logs: dict[str, Log] = {}
        self.waiting: list[tuple[str, dict[str, Any]]] = []
        self.away: list[tuple[float, float]] = []
        #: When plain searches failed or were slow, and until when it is known.
        self.unanswered: list[tuple[float, float]] = []
        self.probed = 0.0
        #: Held while no collection may be dropped, and no plan may end.
        self.steady = threading.Lock()
        #: Held while the registry is asked, which may be away for a moment.
        self.whole = threading.RLock()
        #: Commands of the driver that have come to their end.
        self.commands = 0
        self.over = threading.Event()
        self.driver_error: BaseException | None = None
        self.foreign = FOREIGN
        #: When the first upgrade was.
        self.deployed = float("inf")
        #: The present command of the driver, which may be killed.
        self.command: subprocess.Popen[str] | None = None
        #: How far the upgrades were at the last look, how many records were verified there, and since when.
        self.progress: tuple[list[Any], int, float] = ([], 0, time.monotonic())

    # --- the run ------------------------------------------------------------------------------------------------------

    def run(self) -> dict[str, Any]:
        """Fill the gallery, run for as long as asked, end what was begun, compare; the counts."""
        self._fill()
        started = time.monotonic()
        driver = threading.Thread(target=self._drive, name="driver", daemon=True)
        intruder = threading.Thread(target=self._intrude, name="intruder", daemon=True)
        try:
            self._start_processes()
            driver.start()
            intruder.start()
            self._trouble(driver)
            self.over.set()
            self._calm(driver)
            intruder.join(PATIENCE)
            self._checkpoint()
        finally:
            self.over.set()
            for each in self.processes:
                each.process.send_signal(signal.SIGCONT)
                each.process.kill()
                each.process.wait()
            self.app.close()
        return self._counts(time.monotonic() - started)

    def _fill(self) -> None:
        (self.project.folder / "models.py").write_text(TEXT)
        (self.project.folder / "stress.json").write_text(json.dumps({"records": self.records}))
        self.project.run("init")
        for name, metric in (("a", "IP"), ("b", "COSINE")):
            self.project.run("model", "add", name, "--embedder", f"models:{name}", "--metric", metric)
        typed = [word for name in ("edition", "shard", "label") for word in ("--field", f"{name}:INT64")]
        self.project.run("gallery", "add", "things", "--model", "a", "--source", "call:models:things", *typed)
        self.models = self.project.models()
        started = time.monotonic()
        with self.project.client() as client:
            for first in range(0, self.records, 500):
                ids = range(first, min(first + 500, self.records))
                client.upsert([{"id": id, "item": self.models.item(id, 0), **fields(self.models, id, 0)} for id in ids])
        self.app = rmvdb.app.load(self.project.folder)
        # A server searches so many fresh rows in part until they have an index, without rmvdb, too.
        for leg in self.app.registry.plan("things").legs:
            self.app.store.settle(leg.collection)
        self.say(f"{self.records} records written in {time.monotonic() - started:.0f} s")

    def _start_processes(self) -> None:
        for number in range(WORKERS):
            self._keep(f"worker-{number}", lambda number=number: self._spawn(f"worker-{number}", ["-m", "rmvdb", "worker"]))
        for kind, count in (("writer", WRITERS), ("searcher", SEARCHERS)):
            for number in range(count):
                words = [
                    "-m",
                    "tests.stress.application",
                    kind,
                    str(self.project.folder),
                    str(number),
                    str(count),
                    str(self.seed),
                ]
                self._keep(f"{kind}-{number}", lambda name=f"{kind}-{number}", words=words: self._spawn(name, words))
        self._keep("probe", lambda: self._spawn("probe", ["-m", "tests.stress.probe", str(self.project.folder)]))

    def _keep(self, name: str, start: Callable[[], subprocess.Popen[Any]]) -> None:
        self.processes.append(Process(name=name, start=start, process=start()))

    def _spawn(self, name: str, words: list[str]) -> subprocess.Popen[Any]:
        environment = dict(self.project.environment)
        environment["PYTHONPATH"] = os.pathsep.join([str(Path.cwd()), environment["PYTHONPATH"]])
        with (self.project.folder / f"{name}.out").open("ab") as out:
            return subprocess.Popen(
                [sys.executable, *words],
                cwd=self.project.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )

    # --- the upgrades -------------------------------------------------------------------------------------------------

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
        ending = chosen.choice(("clean up", "clean up", "roll back on the way", "roll back at the end"))
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
            out, err = command.communicate(timeout=PATIENCE)
            if command.returncode == 0:
                self.commands += 1
                return True
            if refusal and refusal in err:
                return False
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
            if self.registry_back and "--repair" in now["stopped"]:  # what was written just before is unknown to it
                self.project.run("verify", "--repair", "--yes", code=None, timeout=PATIENCE)
            time.sleep(0.3)

    def _goes_on(self) -> bool:
        """Return whether the upgrades came any further lately; a verification that begins again is no further than it was."""
        now = self._status()
        far = [id(self.command), *(now[key] for key in ("upgrade", "phase", "epoch", "batches", "quarantined"))]
        with self.whole:
            verified = (self.app.registry.upgrade(now["upgrade"]).verifying or {}).get("fields_compared", 0)
        if far != self.progress[0] or verified > self.progress[1]:
            self.progress = far, verified, time.monotonic()
        return time.monotonic() - self.progress[2] < PATIENCE

    def _status(self) -> dict[str, Any]:
        from rmvdb.upgrade.status import status

        with self.whole:
            return status(self.app.registry, self.app.registry.gallery("things")).to_json()

    # --- trouble ------------------------------------------------------------------------------------------------------

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
            if time.monotonic() > next_moment:
                self._moment()
                next_moment = time.monotonic() + self.moments.uniform(15.0, 45.0)
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
        started = time.monotonic()
        part.restart(kill=self.random.random() < 0.5)
        self.away.append((started, time.monotonic()))
        self.restarts += 1

    def _stall(self) -> None:
        self.random.choice(self.breakable).stall(self.random.uniform(0.2, 1.0))

    def _troubled(self, start: float, end: float) -> bool:
        """Return whether a part was away meanwhile, or did not answer a plain search."""
        while self.probed < end:
            time.sleep(0.1)
        return any(start < until + RECOVERING and since < end for since, until in self.away) or self._silent(start, end)

    def _revive(self) -> None:
        for each in self.processes:
            if each.process.poll() is None:
                continue
            if not each.again_at:
                each.again_at = time.monotonic() + self.random.uniform(0.0, 2.0)
            elif time.monotonic() > each.again_at:
                each.process, each.again_at = each.start(), 0.0

    # --- registry, engine and clock are not of one moment ------------------------------------------------------------------

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

    def _end_processes(self, kind: str) -> None:
        for each in self.processes:
            if each.name.startswith(kind):
                each.process.kill()
                each.process.wait()

    def _revive_workers(self) -> None:
        for each in self.processes:
            if each.name.startswith("worker") and each.process.poll() is not None:
                each.process = each.start()

    @contextmanager
    def _away(self) -> Iterator[None]:
        """Note that a part is away while the block runs."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.away.append((started, time.monotonic()))

    def _intrude(self) -> None:
        """Another registry, which believes a collection of this one to be its own, tries to take it again and again."""
        chosen = random.Random(f"{self.seed} intruder")
        try:
            other = self._other_project()
            while not self.over.wait(chosen.uniform(10.0, 30.0)):
                with self.whole:
                    collection = chosen.choice([leg.collection for leg in self.app.registry.plan("things").write_targets])
                words = ("gallery", "add", f"theirs{self.intrusions}", "--model", "a", "--collection", collection)
                done = other.run(*words, "--source", "call:models:things", code=None, timeout=PATIENCE)
                self.intrusions += 1
                if done.returncode == 0:
                    self.adopted += 1
                    self.say(f"another registry was let into {collection}")
        except BaseException as exc:  # noqa: BLE001 (it is raised again in the main thread)
            self.driver_error = self.driver_error or exc

    def _other_project(self) -> Project:
        address = self.engine.address or str(self.project.folder / ".rmvdb" / "milvus.db")
        other = Project(self.project.folder / "another", milvus=address)
        (other.folder / "models.py").write_text(TEXT)
        other.run("init")
        other.run("model", "add", "a", "--embedder", "models:a", "--metric", "IP")
        return other

    # --- comparing ----------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        """Take in what the applications wrote down, and judge every search that lies a moment back."""
        for path in sorted(self.project.folder.glob("*.jsonl")):
            log = self.logs.setdefault(path.stem, Log(path))
            for line in log.new():
                if "write" in line and "trouble" not in line:
                    self.truth.read([line], path.stem)
                elif "trouble" in line:
                    self.failed_writes += "write" in line
                    self.say(f"{path.stem}: {line['trouble'][:200]}") if "write" in line else None
                elif "asked" in line:
                    self._learn(line)
                elif "poison" in line:
                    self.poison += 1
                    if not line["refused"]:
                        self.verdict.complain("poisoned", f"{path.stem}: {line['poison']} was not refused")
                else:
                    self.waiting.append((path.stem, line))
        settled = time.monotonic() - 1.0
        rest = []
        for who, line in self.waiting:
            if line.get("end", 0.0) > settled or line.get("at", 0.0) > self.probed:
                rest.append((who, line))
            else:
                self._judge(who, line)
        self.waiting = rest

    def _learn(self, plain: dict[str, Any]) -> None:
        """Note the outcome of a plain search, and with it of every one before."""
        self.probed = plain["asked"]
        if plain["failed"] or plain["answered"] - plain["asked"] > SLOW:
            self.unanswered.append((plain["asked"], plain["answered"]))

    def _silent(self, start: float, end: float) -> bool:
        """Return whether a plain search failed or was slow meanwhile."""
        return any(asked < end and start < answered for asked, answered in self.unanswered)

    def _judge(self, who: str, line: dict[str, Any]) -> None:
        self.verdict.searches += 1
        if "failed" in line:
            if self._silent(line["started"], line["at"]):
                self.excused += 1
            else:
                self.verdict.complain("failed_searches", f"{who} at {line['at']:.3f}: {line['failed'][:300]}")
        elif "own" in line:
            if line["shown"] != line["expected"]:
                kind = "duplicated" if len(line["shown"]) > 1 else "stale_reads"
                self.verdict.complain(kind, f"{who}: its own record {line['own']} is {line['shown']}, not {line['expected']}")
        else:
            self.truth.judge(line["shard"], line["hits"], line["start"], line["end"], self.verdict, who)

    def _checkpoint(self) -> None:
        """With no write under way, both collections together hold the truth, and their vectors are their models'."""
        with self._quiet():
            self._compare()
        self.checkpoints += 1
        self.truth.forget_before(time.monotonic() - 60.0)
        self.say(json.dumps(self._counts(0.0) | {"now": {key: self._status()[key] for key in ("phase", "t", "rolls_back")}}))

    @contextmanager
    def _quiet(self) -> Iterator[None]:
        """Let applications stand still while no collection is dropped."""
        quiet = self.project.folder / "quiet"
        quiet.touch()
        try:
            with self._steadied():
                self._wait_until_quiet()
                yield
        finally:
            quiet.unlink()
            for path in self.project.folder.glob("quiet-*"):
                path.unlink()

    @contextmanager
    def _steadied(self) -> Iterator[None]:
        while not self.steady.acquire(timeout=0.1):
            self._read()  # the thread that has it may wait for the outcome of plain searches
        try:
            yield
        finally:
            self.steady.release()

    def _wait_until_quiet(self) -> None:
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            self._revive()
            self._read()
            alive = {
                f"quiet-{each.name}-{each.process.pid}" for each in self.processes if each.name.startswith(("writer", "searcher"))
            }
            if all((self.project.folder / name).exists() for name in alive) and not self.waiting:
                return
            time.sleep(0.1)
        raise Broken("an application, or the probe, did not come to rest: its last call hangs")

    def _compare(self) -> None:
        before = copy.deepcopy(self.verdict)

        def compare() -> None:
            self.verdict = copy.deepcopy(before)
            self._compare_collections(time.monotonic())

        self._answered(compare)

    def _answered(self, call: Callable[[], None]) -> None:
        """Make a call of the run's own. Repeat it if the engine is too slow for it: it may have been restarted a moment ago."""
        for _ in range(20):
            try:
                return call()
            except EngineUnavailable:
                time.sleep(1.0)
        raise Broken("the engine does not answer")

    def _compare_collections(self, now: float) -> None:
        plan = self.app.registry.plan("things")
        upgrade = self.app.registry.active_upgrade(self.app.registry.gallery("things").id)
        lifted = upgrade is not None and upgrade.in_place and upgrade.phase in (Phase.PLANNED, Phase.SERVING_BOTH)
        found: dict[int, int] = {}
        for leg in reversed(plan.legs):  # the one that is emptied first: what leaves it is in the next one
            exact = leg is plan.legs[0] and leg.write_with is None and not lifted
            for page in self.app.store.scan(leg.collection, fields=["edition"], vector=exact):
                held = {int(record.id): record.fields["edition"] for record in page}
                self._compare_leg(leg.collection, held, now)
                found |= held
                if exact:
                    self._compare_vectors(leg.model, page)
        self._compare_all(found, now, "the collections")
        if self._status()["phase"] != "planned":  # while a copy is made it is not whole
            for mirror in plan.mirrors:  # as much the truth as what is searched
                pages = self.app.store.scan(mirror.collection, fields=["edition"])
                held = {int(record.id): record.fields["edition"] for page in pages for record in page}
                self._compare_all(held, now, f"the mirror {mirror.collection}")

    def _compare_all(self, found: dict[int, int], now: float, who: str) -> None:
        for shard in range(SHARDS):
            hits = [(id, edition) for id, edition in found.items() if id % SHARDS == shard]
            self.truth.judge(shard, hits, now, now, self.verdict, who)

    def _compare_leg(self, collection: str, held: dict[int, int], now: float) -> None:
        """Expect that no collection holds replaced or deleted content, even if another one holds the truth."""
        for id, edition in held.items():
            if edition not in (allowed := self.truth.allowed(id, now, now)):
                kind = "resurrected" if allowed == {GONE} else "stale_reads"
                self.verdict.complain(kind, f"{collection} holds record {id} as {edition}, not {sorted(allowed)}")

    def _compare_vectors(self, model: str, page: Sequence[Record]) -> None:
        expected = self.app.loaded_models.apply_head(
            model, self.app.loaded_models.embed(model, [self.models.item(record.id, record.fields["edition"]) for record in page])
        )
        stored = np.stack([record.vector for record in page if record.vector is not None])
        norms = np.linalg.norm(stored, axis=1) * np.linalg.norm(expected, axis=1)
        for at in np.flatnonzero(1.0 - (stored * expected).sum(axis=1) / norms > 1e-5):
            self.verdict.complain("stale_reads", f"the vector of record {page[at].id} is not its item's by {model}")

    def _counts(self, seconds: float) -> dict[str, Any]:
        names = ("lost", "duplicated", "stale_reads", "resurrected", "failed_searches", "poisoned")
        return {
            "seed": self.seed,
            "seconds": round(seconds),
            "records": self.records,
            "searches": self.verdict.searches,
            "writes": self.truth.returned,
            "failed_writes": self.failed_writes,
            "kills": self.kills,
            "suspensions": self.suspensions,
            "pauses": self.pauses,
            "locks": self.locks,
            "restarts": self.restarts,
            "upgrades": self.upgrades,
            "rollbacks": self.rollbacks,
            "instant": self.instant,
            "lifted": self.lifted,
            "scheduled": self.scheduled,
            **{name: getattr(self, name) for name in NOT_OF_ONE_MOMENT},
            "checkpoints": self.checkpoints,
            "excused": self.excused,
            **{name: getattr(self.verdict, name) for name in names},
        }
