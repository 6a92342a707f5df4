"""The parts of a stress run: its processes, its choices, and what it counts."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pymilvus import MilvusClient

from rmvdb.errors import EngineUnavailable
from tests.stress.application import SHARDS
from tests.stress.engines import Breakable, Emptied, Rewindable
from tests.stress.truth import Log, Truth, Verdict
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
#: Seconds within which a server that has recovered shows what was written last.
SHOWS_WITHIN = 3.0
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
class Parts:
    """One run on one engine and one registry; `seconds` count from the moment that the first upgrade is deployed."""

    project: Project
    engine: Rewindable
    registry: Emptied
    records: int
    seconds: float
    seed: int
    #: Every upgrade keeps the original whole, not only those that the seed chooses.
    instant_rollback: bool
    roll_back: bool
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
    #: The intrusions that were refused because another registry owns the collection.
    recognized: int = 0
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

    def _end_processes(self, kind: str) -> None:
        for each in self.processes:
            if each.name.startswith(kind):
                each.process.kill()
                each.process.wait()

    def _revive(self) -> None:
        for each in self.processes:
            if each.process.poll() is None:
                continue
            if not each.again_at:
                each.again_at = time.monotonic() + self.random.uniform(0.0, 2.0)
            elif time.monotonic() > each.again_at:
                each.process, each.again_at = each.start(), 0.0

    def _revive_workers(self) -> None:
        for each in self.processes:
            if each.name.startswith("worker") and each.process.poll() is not None:
                each.process = each.start()

    def _status(self) -> dict[str, Any]:
        from rmvdb.upgrade.status import status

        with self.whole:
            return status(self.app.registry, self.app.registry.gallery("things")).to_json()

    def _goes_on(self) -> bool:
        """Return whether the upgrades came any further since the faults are over; a verification that begins again did not.

        As long as things are killed every few seconds, a verification may begin so often that it comes no further.
        """
        now = self._status()
        far = [id(self.command), *(now[key] for key in ("upgrade", "phase", "epoch", "batches", "quarantined"))]
        with self.whole:
            verified = (self.app.registry.upgrade(now["upgrade"]).verifying or {}).get("fields_compared", 0)
        if far != self.progress[0] or verified > self.progress[1] or not self.over.is_set():
            self.progress = far, verified, time.monotonic()
        return time.monotonic() - self.progress[2] < PATIENCE

    def _recovered(self) -> bool:
        """Return whether a server shows what was written last, in each collection that is searched.

        After a restart it reads again all that it had not flushed, which takes the longer the longer ago that was. A server that
        is restarted before its end never shows anything (`tests/bench/replay.py`).
        """
        if self.engine.address is None:
            return True
        with self.whole:
            legs = self.app.registry.plan("things").legs
        try:
            client = MilvusClient(uri=self.engine.address, timeout=SHOWS_WITHIN, dedicated=True)
            for leg in legs:
                client.query(leg.collection, filter="", limit=1, consistency_level="Strong", timeout=SHOWS_WITHIN, retry_times=0)
            client.close()
        except Exception:  # noqa: BLE001 (whatever it is, it isn't an answer)
            return False
        return True

    @contextmanager
    def _away(self) -> Iterator[None]:
        """Note that a part is away while the block runs."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.away.append((started, time.monotonic()))

    def _silent(self, start: float, end: float) -> bool:
        """Return whether a plain search failed or was slow meanwhile."""
        return any(asked < end and start < answered for asked, answered in self.unanswered)

    def _troubled(self, start: float, end: float) -> bool:
        """Return whether a part was away meanwhile, or did not answer a plain search."""
        while self.probed < end:
            time.sleep(0.1)
        return any(start < until + RECOVERING and since < end for since, until in self.away) or self._silent(start, end)

    def _answered(self, call: Callable[[], None]) -> None:
        """Make a call of the run's own. Repeat it if the engine is too slow for it: it may have been restarted a moment ago."""
        for _ in range(20):
            try:
                return call()
            except EngineUnavailable:
                time.sleep(1.0)
        raise Broken("the engine does not answer")

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
