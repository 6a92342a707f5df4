"""A gallery in one process: Faiss store, SQLite, two small embedders; for tests of the batch and write protocols."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rmvdb.backfill.batches import Backfill
from rmvdb.backfill.task import Task
from rmvdb.backfill.throttle import Limits
from rmvdb.backfill.worker import Worker
from rmvdb.engines.faiss import FaissStore
from rmvdb.learning.method import Method
from rmvdb.planning.question import Question
from rmvdb.protocols import Permit, always
from rmvdb.registry.codec import unpack_ids
from rmvdb.registry.manifest import Manifest
from rmvdb.registry.mark import is_mark
from rmvdb.registry.registry import Registry
from rmvdb.registry.tables import UpgradeRow
from rmvdb.registry.upgrade_plan import EpochName, UpgradePlan
from rmvdb.serving.client import Client
from rmvdb.serving.loaded_models import Chain, LoadedModels
from rmvdb.storage.archive import Archive
from rmvdb.storage.artifacts import Artifacts
from rmvdb.storage.embedding_cache import EmbeddingCache
from rmvdb.storage.folders import LocalFolder
from rmvdb.types import BatchState, Hit, Id, IdType, Index, Item, Leg, Metric, Phase, Record, Schema, Vectors
from rmvdb.upgrade.context import Services
from rmvdb.upgrade.lost import Lost
from rmvdb.upgrade.report import VerifyReport
from rmvdb.upgrade.run import Conductor
from tests.support.migrated import migrate

TIMES = {"max_age": 0.2, "longest_search": 0.1, "staleness": 0.0}
DIMS = {"v1": 6, "v2": 8, "v3": 7, "v4": 5}
UNLIMITED = Limits()


def vector(version: str, item: Item) -> Vectors:
    """Return a version's vector of a text: a fixed point on the sphere."""
    found = np.random.default_rng([*version.encode(), *str(item).encode()]).normal(size=DIMS[version])
    return (found / np.linalg.norm(found)).astype(np.float32)


class TextEmbedder:
    """A version's embedder; each call takes so many `seconds` more."""

    def __init__(self, version: str) -> None:
        self.version, self.seconds = version, 0.0

    def embed(self, items: Sequence[Item]) -> Vectors:
        """(n, dim); what is broken cannot be read."""
        time.sleep(self.seconds)
        if "broken" in items:
            raise ValueError("broken")
        return np.stack([vector(self.version, item) for item in items])


class Texts:
    """A source: the current text of each id."""

    def __init__(self) -> None:
        self.of: dict[Id, str] = {}

    def load(self, records: Sequence[Record]) -> Mapping[Id, Item]:
        """Return the texts of these records."""
        return {record.id: self.of[record.id] for record in records if record.id in self.of}


class FaultyStore(FaissStore):
    """A Faiss store that calls `before` ahead of each search and write, `after` behind each write and `looked` behind each search
    and reading, so that a test can act, wait or fail just there. Marks (`rmvdb.registry.mark`) are not among them."""

    def __init__(self) -> None:
        super().__init__()
        self.before: Callable[[str, str], None] = lambda call, collection: None
        self.after: Callable[[str, str], None] = lambda call, collection: None
        self.looked: Callable[[str, str], None] = lambda call, collection: None

    def search(self, collection: str, *args: Any, **options: Any) -> list[list[Hit]]:
        """As in FaissStore."""
        self.before("search", collection)
        found = super().search(collection, *args, **options)
        self.looked("search", collection)
        return found

    def get(self, collection: str, ids: Sequence[Id], **options: Any) -> list[Record]:
        """As in FaissStore."""
        found = super().get(collection, ids, **options)
        if not is_mark(collection):
            self.looked("get", collection)
        return found

    def upsert(self, collection: str, records: Sequence[Record], *, as_read: bool = False, permit: Permit = always) -> None:
        """As in FaissStore."""
        if is_mark(collection):
            return super().upsert(collection, records, permit=permit)
        self.before("upsert", collection)
        super().upsert(collection, records, as_read=as_read, permit=permit)
        return self.after("upsert", collection)

    def delete(self, collection: str, ids: Sequence[Id], *, permit: Permit = always) -> None:
        """As in FaissStore."""
        if is_mark(collection):
            return super().delete(collection, ids, permit=permit)
        self.before("delete", collection)
        super().delete(collection, ids, permit=permit)
        return self.after("delete", collection)


@dataclass
class Gallery:
    """A gallery in the middle of a naive upgrade, both collections served and nothing moved yet."""

    folder: Path
    registry: Registry
    store: FaultyStore
    source: Texts
    loaded_models: LoadedModels
    archive: Archive
    backfill: Backfill
    upgrade: UpgradeRow
    task: Task
    times: Mapping[str, float]

    def client(self) -> Client:
        """Return an application."""
        return Client("texts", registry=self.registry, store=self.store, loaded_models=self.loaded_models, engine_timeout=1.0)

    def worker(self, *, width: int = 2, limits: Limits = UNLIMITED, lease: float = 1.6) -> Worker:
        """Return a worker with a short lease."""
        return Worker(registry=self.registry, lease=lease, longest_call=lease / 4, width=width, limits=limits)

    def conductor(self) -> Conductor:
        """Return a conductor, as another process would have it."""
        services = Services(
            registry=self.registry, store=self.store, loaded_models=self.loaded_models,
            artifacts=Artifacts(self.folder / "artifacts"), archive=self.archive, source=self.source,
            cache=lambda version: EmbeddingCache(LocalFolder(self.folder), model=version),
            classifier=lambda row: None, index=Index(type="FLAT"), times=self.times, batch=10, engine_timeout=1.0,
            folder=self.folder / "cache",
        )  # fmt: skip
        return Conductor("texts", services)

    def verify(self) -> VerifyReport:
        """Compare the new collection."""
        return self.conductor().verify(self.registry.upgrade(self.upgrade.id))

    def repaired(self) -> tuple[Lost, list[str]]:
        """Repair. Return the lost records and the repair's lines."""
        said: list[str] = []
        conductor, row = self.conductor(), self.registry.upgrade(self.upgrade.id)
        conductor.say = said.append  # type: ignore[method-assign]
        lost = conductor.lost(row)
        conductor.repair(row, lost, self.worker())
        return lost, said

    def held(self) -> dict[str, dict[Id, Record]]:
        """Return the records of both collections, by "old" and "new"."""
        return {"old": self.records(*self.task.old), "new": self.records(*self.task.new)}

    def records(self, *collections: str) -> dict[Id, Record]:
        """Return the records of these collections."""
        pages = (page for each in collections for page in self.store.scan(each, fields=None, vector=True))
        return {record.id: record for page in pages for record in page}

    def in_state(self, state: BatchState) -> set[Id]:
        """Return the ids of the batches in that state."""
        return {id for row in self.registry.batches(self.upgrade.id, state=state) for id in unpack_ids(row.ids)}

    def expect_moved(self) -> None:
        """Expect every text, and nothing else, in the new collection as its version embeds it, and no record in an old one."""
        held = self.held()
        assert held["old"].keys() == set()
        assert set(held["new"]) == set(self.source.of)
        for id, record in held["new"].items():
            assert np.allclose(record.vector, vector(self.task.version, self.source.of[id]), atol=1e-6), id  # type: ignore[arg-type]

    def supersede(self, *, to: str = "v3") -> None:
        """Begin and deploy an upgrade that supersedes the present one, make its work list, and make it `upgrade`."""
        conductor = self.conductor()
        question = Question(gallery="texts", from_version="v1", to_version=to, method=Method.NAIVE, order="random")
        question = conductor.resolve(question)
        row = conductor.begin(question, conductor.plan(question), self.worker())
        conductor.deploy(row)
        conductor.list_work(self.registry.upgrade(row.id))
        self.upgrade = self.registry.upgrade(row.id)
        self.task = conductor.task(self.upgrade)


def make(
    folder: Path, *, records: int = 40, batch: int = 10, deployed: bool = True, times: Mapping[str, float] = TIMES
) -> Gallery:
    """Return a gallery of texts t1 … at v1, its upgrade to v2 deployed, unless told otherwise, and its work list made."""
    url = f"sqlite:///{folder}/registry.sqlite"
    migrate(url)
    registry = Registry(url, patience=60.0, keep=Manifest(LocalFolder(folder)).write)
    store, source = FaultyStore(), Texts()
    source.of = {id: f"t{id}" for id in range(1, records + 1)}
    for name, dim in DIMS.items():
        registry.add_version(
            name=name, embedder=f"tests:{name}", options={}, classifier=None, dim=dim, metric="COSINE", fingerprint=None,
            probes=None, probe_kind=None, base=None, head=None,
        )  # fmt: skip
    shapes = {
        name: Schema(collection=f"texts_{name}", dim=dim, metric=Metric.COSINE, id_type=IdType.INT64)
        for name, dim in DIMS.items()
    }
    for name in ("v1", "v2"):
        store.create(shapes[name], Index(type="FLAT"))
    store.upsert("texts_v1", [Record(id=id, vector=vector("v1", text), fields={"n": 0}) for id, text in source.of.items()])
    gallery = registry.add_gallery(
        name="texts", model="v1", schema=shapes["v1"], adopted=False, source="tests", search={}, times=times
    )
    registry.add_collection(gallery.id, model="v2", schema=shapes["v2"], search={})
    legs = [Leg(collection=f"texts_{name}", model=name, metric=Metric.COSINE, embedder=name) for name in ("v2", "v1")]
    question = Question(gallery="texts", from_version="v1", to_version="v2", method=Method.NAIVE, order="random")
    epochs = {EpochName.SERVING: tuple(legs), EpochName.FINAL: tuple(legs[:1]), EpochName.BEFORE: tuple(legs[1:])}
    plan = UpgradePlan(epochs=epochs, question=asdict(question))
    upgrade = registry.add_upgrade(
        gallery_id=gallery.id, from_version="v1", to_version="v2", old_collections=["texts_v1"], new_collection="texts_v2",
        phase=Phase.PLANNED, method="naive", order="random", plan=plan,
    )  # fmt: skip
    ids = sorted(source.of)
    registry.add_batches(upgrade.id, [(ids[at : at + batch], None) for at in range(0, records, batch)], first=1)
    registry.set_upgrade(upgrade.id, listed=True)
    artifacts = Artifacts(folder / "artifacts")
    loaded_models = LoadedModels(
        load_embedder=TextEmbedder,
        load_chain=lambda version: Chain(embedder=version, dim=DIMS[version]),
        load_artifact=artifacts.get,
    )
    archive = Archive(LocalFolder(folder / "archive"))
    backfill = Backfill(registry=registry, store=store, loaded_models=loaded_models, source=source, archive=archive, cache=None)
    task = Task(
        upgrade=upgrade.id, gallery="texts", old=("texts_v1",), new=("texts_v2",), version="v2", grace=sum(times.values())
    )
    made = Gallery(
        folder=folder, registry=registry, store=store, source=source, loaded_models=loaded_models, archive=archive,
        backfill=backfill, upgrade=registry.upgrade(upgrade.id), task=task, times=times,
    )  # fmt: skip
    if deployed:
        made.conductor().deploy(made.upgrade)
        made.upgrade = registry.upgrade(upgrade.id)
    return made


class Crash(BaseException):
    """The process ends here."""


def crash_at(number: int) -> Callable[[str, str], None]:
    """Return a hook that fails the given write, counting from 1, before it reaches the engine, as a kill would."""
    calls = iter(range(1, 10_000))

    def before(call: str, collection: str) -> None:
        if next(calls) == number:
            raise Crash(f"{call} {collection}")

    return before


def drive(gallery: Gallery, *, width: int = 2) -> None:
    """Work until every batch is retired."""
    gallery.worker(width=width).run(gallery.task, gallery.backfill)


def die_and_drive_again(gallery: Gallery, number: int) -> None:
    """Let a worker die before the write of that number. Expect no loss, and let the next worker end the work."""
    gallery.store.before = crash_at(number)
    with pytest.raises(Crash):
        drive(gallery)
    held = gallery.held()
    assert set(held["old"]) | set(held["new"]) == set(gallery.source.of)
    gallery.store.before = lambda call, collection: None
    drive(gallery)
    gallery.expect_moved()
