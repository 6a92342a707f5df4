"""The Milvus server and PostgreSQL are stopped, and started again, in each phase of an upgrade: its work goes on by itself.

Killed at a call of that phase, made in this process so that the moment is no chance.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from rmvdb.engines.milvus import MilvusStore
from rmvdb.registry.registry import Registry
from rmvdb.serving.client import Client
from rmvdb.upgrade.compare import Verify
from tests.acceptance.conftest import NAIVE
from tests.support.milvus_server import MilvusServer
from tests.support.on_servers import IDS, make
from tests.support.postgres import Postgres
from tests.support.project import Project
from tests.support.waiting import wait_for_processes

pytestmark = [pytest.mark.server, pytest.mark.postgres]

ROLLBACK, CLEANUP = ("rollback",), ("cleanup", "--yes")


@dataclass(frozen=True)
class Phase:
    """The commands before it, the one that is in it, and a call that this one makes there."""

    before: tuple[tuple[str, ...], ...]
    command: tuple[str, ...]
    owner: type
    call: str
    #: The models of the collections that hold every record at its end.
    held: tuple[str, ...] = ("v2",)


PHASES = {
    "deploying": Phase((), NAIVE, MilvusStore, "create"),
    "copying": Phase((), (*NAIVE, "--instant-rollback"), Registry, "withdraw_intents", held=("v1", "v2")),
    "backfilling": Phase((), NAIVE, Registry, "claim"),
    "verifying": Phase((), NAIVE, Verify, "run"),
    "cutting over": Phase((), NAIVE, MilvusStore, "move_aliases"),
    "rolling back": Phase(((*NAIVE, "--until", "0.5"),), ROLLBACK, Registry, "claim", held=("v1",)),
    "rolling back after the cut-over": Phase((NAIVE,), ROLLBACK, Registry, "claim", held=("v1",)),
    "cleaning up": Phase((NAIVE,), CLEANUP, MilvusStore, "drop"),
}


@dataclass
class Searches:
    """The searches of an application that searches all the time. Each failed one has the time at which it began."""

    made: int = 0
    #: When the first that began after the outage, and succeeded, ended.
    again: float = 0.0
    failed: list[tuple[float, str]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


@contextlib.contextmanager
def searching(project: Project, outage: Outage) -> Iterator[Searches]:
    """Give an application that asks for the whole gallery again and again, and goes on if a search fails."""
    seen, stop, models = Searches(), threading.Event(), project.models()

    def search(client: Client) -> None:
        while not stop.wait(0.1):
            began = time.monotonic()
            try:
                found = [hit.id for hit in client.search(models.item(1), limit=len(IDS) + 50)]
            except Exception as exc:  # noqa: BLE001 (whatever it is, a search failed)
                seen.failed.append((began, repr(exc)))
                continue
            seen.made += 1
            if not seen.again and began > (outage.ended or math.inf):
                seen.again = time.monotonic()
            if sorted(found) != IDS:
                seen.wrong.append(f"{len(found)} hits, missed {sorted(set(IDS) - set(found))[:5]}")

    with project.client() as client:
        client.search(models.item(1), limit=1, consistency="Strong")  # from here on every search shows what was written
        thread = threading.Thread(target=search, args=(client,))
        thread.start()
        try:
            yield seen
        finally:
            stop.set()
            thread.join()


class Outage:
    """Away from the first call on, for two seconds and as long as it takes to start."""

    def __init__(self, stop: Callable[[], None], start: Callable[[], None]) -> None:
        self._stop, self._start = stop, start
        self.began, self.ended = 0.0, 0.0
        self._stopped, self._over = threading.Event(), threading.Event()

    def _away(self) -> None:
        self._stop()
        self._stopped.set()
        time.sleep(2)
        self._start()
        self.ended = time.monotonic()
        self._over.wait()  # what a thread has started ends with it

    @contextlib.contextmanager
    def at(self, phase: Phase) -> Iterator[None]:
        """Begin the outage at that phase's call in this block, and end it with the block."""
        real, lock = getattr(phase.owner, phase.call), threading.Lock()

        def call(*args: object, **options: object) -> object:
            with lock:
                if not self.began:
                    self.began = time.monotonic()
                    threading.Thread(target=self._away, daemon=True).start()
                    assert self._stopped.wait(timeout=240)
            return real(*args, **options)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(phase.owner, phase.call, call)
            yield
        assert self.began, f"{phase.call} was not called"
        wait_for_processes(lambda: self.ended)

    def over(self) -> None:
        """Let its thread end."""
        self._over.set()


@pytest.mark.parametrize("away", ["server", "database"])
@pytest.mark.parametrize("name", PHASES)
def test_work_goes_on_by_itself_when_what_was_away_is_back(
    tmp_path: Path, own_milvus_server: MilvusServer, stoppable_postgres: Postgres, name: str, away: str
) -> None:
    phase = PHASES[name]
    project = make(tmp_path, own_milvus_server, stoppable_postgres.database(), retry_for=90.0)
    for command in phase.before:
        project.ask(*command)
    outage = Outage(stoppable_postgres.stop, stoppable_postgres.start)
    if away == "server":
        outage = Outage(lambda: own_milvus_server.stop(kill=True), own_milvus_server.start)
    with searching(project, outage) as seen:
        with outage.at(phase):
            project.ask(*phase.command)
        wait_for_processes(lambda: seen.again > 0)
        before = seen.made
        wait_for_processes(lambda: seen.made >= before + 10)
    # From the first search that is answered again none fails: a server that has just started answers nothing at first.
    wrong = [words for began, words in seen.failed if not outage.began - 10 < began < seen.again]
    assert (seen.wrong, wrong) == ([], [])
    assert seen.again - outage.ended < (60 if away == "database" else 150)
    held = [(each["model"], each["records"]) for each in project.json("gallery", "show")["collections"] if each["records"]]
    assert sorted(held) == [(model, len(IDS)) for model in phase.held]
    outage.over()
