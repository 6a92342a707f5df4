"""Workers on Ray: actors that each work as `rmvdb worker` does. Ray places them, and starts them again if they die.

The registry alone knows what is to be done: actors claim batches from its work list, as every worker does. So an actor, a node or
the whole of Ray may be lost, and nothing else is. The one file that imports ray.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from rmvdb import errors
from rmvdb.app.daemon import Scheduler
from rmvdb.app.settings import ProjectSettings
from rmvdb.app.window import Window
from rmvdb.app.wiring import App

#: Seconds between two looks at the actors.
LOOK = 1.0
#: Seconds after which the command names actors that have not started: Ray has no place for them, or the machine is busy.
PLACED = 30.0
#: Seconds after which an actor that does not answer has no process: Ray has no place for it.
SILENT = 20.0
#: Seconds without Ray's head after which the command ends. Ray itself would end it after 60, without our sentence.
HEADLESS = 20.0
#: Ray's least memory for objects. Actors share none.
OBJECTS = 80 * 2**20
#: The folder in which Ray unpacks what `ray job submit --working-dir` sends. Ray removes it after the job.
UNPACKED = "working_dir_files"
#: The environment in which Ray begins, unless the user has set a name otherwise.
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_COLOR_PREFIX": "0",
    "RAY_DEDUP_LOGS": "0",  # each line comes at once
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # else a warning about what a later Ray will do
}
#: Only with this name, whatever the system, does Ray listen on the loopback alone. It takes 127.0.0.1 for "any of my addresses".
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Places:
    """How many actors work, and what Ray keeps free for each."""

    actors: int
    num_cpus: float
    num_gpus: float

    def __str__(self) -> str:
        return f"{self.num_cpus:g} CPU and {self.num_gpus:g} GPU"


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """All that an actor needs to work as `rmvdb worker` would here.

    It reaches actors inside Ray's messages. Ray logs the environment of actors, so a password must not be sent as a variable.
    """

    settings: ProjectSettings
    #: rmvdb.toml, whose folder has the modules of the models.
    file: Path | None
    galleries: Sequence[str]
    #: A cron expression.
    window: str | None
    #: Makes the log of the actor's process. Ray shows its lines where the command runs.
    make_log: Callable[[], logging.Logger]


class Actor:
    """A worker in a process of Ray's. It loads each model once."""

    def __init__(self, job: Job) -> None:
        self._job, self._stop = job, threading.Event()

    def ready(self) -> None:
        """Return as soon as the process runs."""

    def run(self) -> None:
        """Work until `stop`. If the process dies, Ray calls this again in another one, which goes on by the registry."""
        logging.getLogger().setLevel(logging.ERROR)  # of other libraries only errors, as in every command
        job, log = self._job, self._job.make_log()
        with contextlib.closing(App(job.settings, file=job.file)) as app:
            scheduler = Scheduler(app, galleries=job.galleries, window=Window(job.window), say=log.info, warn=log.error)
            scheduler.run(self._stop)

    def stop(self) -> None:
        """Let `run` end after the batches in hand."""
        self._stop.set()


class RayWorkers:
    """Actors on the Ray that this process is connected to."""

    def __init__(self, job: Job, places: Places, *, log: logging.Logger) -> None:
        self._ray, self._places, self._log = _ray(), places, log
        self._lease = job.settings.backfill.lease
        self._head, self._heard = self._ray.get_runtime_context().gcs_address, time.monotonic()
        actor = self._ray.remote(Actor).options(
            num_cpus=places.num_cpus,
            num_gpus=places.num_gpus,
            max_restarts=-1,
            max_task_retries=-1,
            max_concurrency=2,  # `stop` comes while `run` runs
        )
        actors = [actor.remote(job) for _ in range(places.actors)]
        #: The actors that have not ended, by the answer that `run` owes.
        self._running = {each.run.remote(): each for each in actors}
        #: The answers that `ready` owes, for the actors that never had a process.
        self._unplaced = [each.ready.remote() for each in actors]
        #: The unanswered calls of `stop`, by the same, and when they were made.
        self._asked: dict[Any, tuple[Any, float]] = {}

    def run(self, stop: threading.Event) -> None:
        """Let the actors work until `stop` is set, then finish the batches in hand.

        Raises RayUnavailable if Ray's head is gone or Ray gives an actor up, and what an actor raised.
        """
        failure, named = None, time.monotonic() + PLACED
        while self._running:
            for run in self._ray.wait(list(self._running), timeout=LOOK)[0]:
                del self._running[run]
                failure = failure or self._failure(run)
            self._expect_head()
            if failure:
                stop.set()
            if stop.is_set():
                self._ask_to_stop()
            elif time.monotonic() > named:
                self._name_unplaced()
                named = float("inf")
        if failure:
            raise failure

    def _failure(self, run: Any) -> Exception | None:
        """Return why an actor has ended, None if it was asked to."""
        try:
            self._ray.get(run)
        except self._ray.exceptions.RayTaskError as exc:
            return exc.cause if isinstance(exc.cause, Exception) else exc
        except self._ray.exceptions.RayError as exc:
            return self._lost(f"Ray gave an actor up: {_last_words(exc)}")
        return None

    def _expect_head(self) -> None:
        """Raise RayUnavailable if nothing has answered at the address of Ray's head for a while."""
        if _answers(self._head):
            self._heard = time.monotonic()
        elif time.monotonic() - self._heard > HEADLESS:
            raise self._lost(f"Ray's head at {self._head} has not answered for {HEADLESS:g} s")

    def _lost(self, why: str) -> errors.RayUnavailable:
        return errors.RayUnavailable(
            f"{why}. Nothing is lost: the leases of its batches lapse after {self._lease:g} s. Run the same command again, or "
            "start plain workers: rmvdb worker"
        )

    def _ask_to_stop(self) -> None:
        """Ask every actor, again and again: one that Ray has started again meanwhile does not know of the last time."""
        for run, actor in list(self._running.items()):
            answer, since = self._asked.get(run) or (actor.stop.remote(), time.monotonic())
            self._asked.pop(run, None)
            if self._ray.wait([answer], timeout=0)[0]:
                continue
            if time.monotonic() - since < SILENT:
                self._asked[run] = answer, since
            else:  # without a process it has nothing in hand
                del self._running[run]
                self._ray.kill(actor)

    def _name_unplaced(self) -> None:
        waiting = len(self._ray.wait(self._unplaced, num_returns=len(self._unplaced), timeout=0)[1])
        if waiting:
            has = self._ray.cluster_resources()
            self._log.warning(
                "%d of %d actors have not started yet: each needs %s, and Ray has %g CPU and %g GPU",
                waiting,
                len(self._unplaced),
                self._places,
                has.get("CPU", 0.0),
                has.get("GPU", 0.0),
            )


@contextmanager
def connected(address: str | None, settings: ProjectSettings) -> Iterator[None]:
    """Connect to the Ray at `address`, or that RAY_ADDRESS names, or start one on this machine that ends with the block.

    Raises ConfigError if ray is not installed, UsageError if a project cannot work on this Ray, RayUnavailable if none answers.
    """
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    if "://" in address:
        raise errors.UsageError(
            f"{address!r} is not the address of a node; run this command on a node of Ray (--address auto), or submit it: "
            "ray job submit --working-dir . -- rmvdb worker --engine ray"
        )
    _refuse_unpacked(settings)
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    here: dict[str, Any] = {}
    if address == "local":
        os.environ.update(LOOPBACK)  # before the import, which reads it
        here = {"include_dashboard": False, "object_store_memory": OBJECTS}
    ray = _ray()
    if ":" in address and not _answers(address):  # Ray would try for minutes
        raise errors.RayUnavailable(f"No Ray answers at {address!r}; start it there, or name another with --address")
    try:
        ray.init(address=address, logging_level=logging.ERROR, **here)
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as exc:
        why = str(exc).strip().partition("\n")[0]
        raise errors.RayUnavailable(f"No Ray that this command can use is at {address!r}: {why}") from exc
    try:
        _refuse_files(settings, {node["NodeManagerHostname"] for node in ray.nodes() if node["Alive"]})
        yield
    finally:
        ray.shutdown()


def _answers(address: str) -> bool:
    """Return whether a program listens at HOST:PORT."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=5 * LOOK).close()
    except (OSError, ValueError, OverflowError):
        return False
    return True


def _last_words(exc: Exception) -> str:
    """Return the first sentence of the last line: Ray's messages have the cause last, then numbers of its own."""
    return str(exc).strip().splitlines()[-1].partition(". ")[0].rstrip(".")


def _ray() -> ModuleType:
    try:
        import ray
    except ImportError as exc:
        raise errors.ConfigError("--engine ray needs ray, which is not installed; run pip install 'rmvdb[ray]'") from exc
    return ray


def _refuse_unpacked(settings: ProjectSettings) -> None:
    """Raise UsageError if the archive, the registry or the vectors would be removed with a job's folder."""
    for path in filter(None, (settings.home, settings.registry_file, Path(settings.milvus.uri))):
        if UNPACKED in path.parts:
            raise errors.UsageError(
                f"{path} is in the folder of a job, which Ray removes after it; in rmvdb.toml or RMVDB_HOME name a folder that "
                "every node has as home, and servers as registry.url and milvus.uri"
            )


def _refuse_files(settings: ProjectSettings, hosts: set[str]) -> None:
    """Raise UsageError if actors on another machine could not reach the registry or the vectors."""
    here = [name for name, is_file in (("registry.url", settings.registry_file), ("milvus.uri", _is_file(settings))) if is_file]
    if here and len(hosts) > 1:
        raise errors.UsageError(
            f"Ray has nodes on {len(hosts)} machines ({', '.join(sorted(hosts))}), and {' and '.join(here)} can be reached on "
            "one alone; use PostgreSQL and a Milvus server, or start plain workers on that machine: rmvdb worker"
        )


def _is_file(settings: ProjectSettings) -> bool:
    return settings.milvus.uri.startswith("unix:") or "://" not in settings.milvus.uri
