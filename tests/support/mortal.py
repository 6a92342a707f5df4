"""Processes that die at a named call: before it leaves, or after it was made and before its answer was used.

A dead process makes no further call: its threads and its `finally` blocks may try, and fail. Its earlier calls stay.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rmvdb.backfill.throttle import Limits
from rmvdb.backfill.worker import Worker
from rmvdb.engines.faiss import FaissStore
from rmvdb.learning.method import Method
from rmvdb.learning.network import Network
from rmvdb.learning.transforms import Config, Transform
from rmvdb.planning.plan import Plan, Stage
from rmvdb.planning.question import Question
from rmvdb.registry.mark import is_mark
from rmvdb.registry.registry import Registry
from rmvdb.registry.tables import UpgradeRow
from rmvdb.serving.client import Client
from rmvdb.serving.loaded_models import Chain, LoadedModels
from rmvdb.storage.archive import Archive
from rmvdb.storage.artifacts import Artifacts
from rmvdb.storage.embedding_cache import EmbeddingCache
from rmvdb.storage.folders import Folder, LocalFolder
from rmvdb.types import BatchState, Index
from rmvdb.upgrade.context import Services
from rmvdb.upgrade.run import Conductor
from tests.support.inprocess import DIMS, TIMES, TextEmbedder, Texts

#: Calls that change nothing: a death at one of them is a death after the change before it.
READS = {
    "now", "version", "versions", "artifact", "gallery", "galleries", "collection", "collections", "plan", "clients",
    "active_upgrade", "upgrade", "upgrades", "history", "next_priority", "listed_ids", "workers", "batches", "counts",
    "last_done", "last_intent", "readings", "progress", "blocked", "intents", "announced",
    "numbered_queries", "written", "open_writes",
    "quarantined", "slowest_client", "refuse_ended", "refuse_overtaken", "expired_writes", "describe", "exists", "index",
    "search", "get", "moment", "scan", "count", "read", "found", "ids", "path", "left", "files", "settle", "segments", "identity",
    "trace",
    "field_names", "collection_names", "unservable", "shown_url", "unready", "fields_of", "settles_at_once", "gaps", "let_go",
    "asked_for", "pending_batches", "kept_queries", "last_upgrade", "holder",
}  # fmt: skip


def version_of(collection: str) -> str:
    """Return the model version that a collection is named after, such as texts_v1 or texts_v2_u1."""
    return next(part for part in collection.split("_") if part in DIMS)


#: The process is gone; threads end by it without a word.
Killed = SystemExit


@dataclass
class Life:
    """The calls of a process, and where it ends: at the first call of that name, "before" or "after" it."""

    end: tuple[str, str] | None = None
    seen: list[str] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    @contextlib.contextmanager
    def call(self, name: str) -> Iterator[None]:
        """Make one call to the outside."""
        self.look()
        self.seen.append(name)
        self._die_at(name, "before")
        yield
        self._die_at(name, "after")

    def look(self) -> None:
        """Raise Killed if the process is dead."""
        if self.over.is_set():
            raise Killed

    def _die_at(self, name: str, when: str) -> None:
        if self.end == (name, when):
            self.over.set()
            raise Killed(f"{when} {name}")


class Mortal:
    """A hand of a process: the calls that change something are named, and the process may die at them."""

    def __init__(self, kind: str, real: Any, life: Life, *, filled: str) -> None:
        self._kind, self._real, self._life, self._filled = kind, real, life, filled

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._real, name)
        if not callable(found):
            return found
        if name in READS:
            return self._reading(found)

        def call(*args: Any, **kwargs: Any) -> Any:
            with self._life.call(self._named(name, args, kwargs)):
                return found(*args, **kwargs)

        return call

    def _reading(self, found: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._life.look()
            return found(*args, **kwargs)

        return call

    def _named(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """As the lists in the code name it: the collection of a store's call, the state of a batch, the phase of an upgrade."""
        what = ""
        if self._kind == "store":
            changed = args[1] if method == "move_aliases" else getattr(args[0], "collection", args[0])
            what = " mark" if is_mark(changed) else " new" if version_of(changed) == self._filled else " old"
        elif method == "advance":
            what = f" {BatchState(args[1]).value}"
        elif method == "set_upgrade":
            names = sorted(kwargs.keys() - {"note", "leader_token"})
            what = f" {kwargs['phase']}" if "phase" in kwargs else "".join(f" {name}" for name in names)
        return f"{self._kind}.{method}{what}"


class World:
    """The parts that survive a death: the engine, the database, the files, the source."""

    def __init__(self, folder: Path, url: str, texts: dict[int, str], archive: Folder) -> None:
        self.folder, self.url, self.store, self.source, self.archive = folder, url, FaissStore(), Texts(), archive
        self.source.of = dict(texts)
        #: Seconds of a worker's lease: short, since the heirs of the dead wait for it.
        self.lease = 1.9

    def process(self, *, end: tuple[str, str] | None = None, filled: str = "v2") -> Process:
        """Return a new process, which dies there; `filled` is the version whose collection the lists in the code call new."""
        return Process(self, Life(end=end), filled)


class Process:
    """A command, a worker or an application."""

    def __init__(self, world: World, life: Life, filled: str) -> None:
        self.world, self.life = world, life
        self.registry: Any = Mortal("registry", Registry(world.url, patience=60.0), life, filled=filled)
        self.store: Any = Mortal("store", world.store, life, filled=filled)
        self.archive: Any = Mortal("archive", Archive(world.archive), life, filled=filled)
        artifacts = Artifacts(world.folder / "artifacts")
        self.loaded_models = LoadedModels(
            load_embedder=TextEmbedder,
            load_chain=lambda version: Chain(embedder=version, dim=DIMS[version]),
            load_artifact=artifacts.get,
        )
        self._services = Services(
            registry=self.registry, store=self.store, loaded_models=self.loaded_models, artifacts=artifacts, archive=self.archive,
            source=world.source, cache=lambda version: EmbeddingCache(LocalFolder(world.folder / "cache"), model=version),
            classifier=lambda row: None, index=Index(type="FLAT"), times=TIMES, batch=5, engine_timeout=1.0,
            folder=world.folder / "work",
        )  # fmt: skip

    def conductor(self) -> Conductor:
        """Return its conductor."""
        return Conductor("texts", self._services)

    def worker(self) -> Worker:
        """Return its worker."""
        return Worker(registry=self.registry, lease=self.world.lease, longest_call=0.4, width=1, limits=Limits())

    def client(self) -> Client:
        """Return a client of it."""
        return Client("texts", registry=self.registry, store=self.store, loaded_models=self.loaded_models, engine_timeout=0.2)

    def active(self) -> UpgradeRow | None:
        """Return the upgrade that has not ended."""
        found: UpgradeRow | None = self.registry.active_upgrade(self.registry.gallery("texts").id)
        return found

    def begin(self, *, to: str = "", keep: bool = False, lift: bool = False) -> UpgradeRow:
        """Register an upgrade from v1 to v2 that needs no training, if there is none. `to`: another version, which supersedes
        one. `keep`: keep the original whole. `lift`: lift the copy, by an h that has learnt nothing."""
        if (row := self.active()) and row.to_version == (to or row.to_version):
            return row
        question = Question(
            gallery="texts", from_version="v1", to_version=to or "v2", method=Method.FCT if lift else Method.NAIVE,
            order="random", sample=10, instant_rollback=keep,
        )  # fmt: skip
        question = self.conductor().resolve(question)
        nothing_trained = Plan(
            question=asdict(question), method=str(question.method), order="random", head=None, trained_on=None,
            lift=self._h() if lift else None,
            stages=(Stage(calibrations=(None,) * (len(question.old) + 1)),), prediction=None, cost={}, skipped=0, made_at=0.0,
        )  # fmt: skip
        return self.conductor().begin(question, nothing_trained, self.worker())

    def _h(self) -> str:
        network = Network(Config(d_in=DIMS["v1"], d_out=DIMS["v2"], blocks=1))
        return self._services.artifacts.put(Transform(network).to_bytes(), suffix="safetensors")
