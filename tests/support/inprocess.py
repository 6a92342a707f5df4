"""A gallery in one process: Faiss store, SQLite, two small embedders; for tests of the batch and write protocols."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rmvdb import schema
from rmvdb.archive import Archive
from rmvdb.artifacts import Artifacts
from rmvdb.backfill import Backfill, Task, Worker
from rmvdb.client import Client
from rmvdb.encoding import Chain, Encoder
from rmvdb.faiss_store import FaissStore
from rmvdb.registry import Registry
from rmvdb.tables import UpgradeRow
from rmvdb.types import Id, IdType, Index, Item, Leg, Metric, Phase, Record, Schema, Vectors

TIMES = {"max_age": 0.2, "longest_search": 0.1, "staleness": 0.0}
DIMS = {"v1": 6, "v2": 8}


def vector(version: str, item: Item) -> Vectors:
    """What a version gives for a text: a fixed point on the sphere."""
    found = np.random.default_rng([*version.encode(), *str(item).encode()]).normal(size=DIMS[version])
    return (found / np.linalg.norm(found)).astype(np.float32)


class TextEmbedder:
    """A version's embedder."""

    def __init__(self, version: str) -> None:
        self.version = version

    def embed(self, items: Sequence[Item]) -> Vectors:
        """(n, dim)"""
        return np.stack([vector(self.version, item) for item in items])


class Texts:
    """A source: the current text of each id."""

    def __init__(self) -> None:
        self.of: dict[Id, str] = {}

    def load(self, records: Sequence[Record]) -> Mapping[Id, Item]:
        """The texts of these records."""
        return {record.id: self.of[record.id] for record in records if record.id in self.of}


class FaultyStore(FaissStore):
    """A Faiss store that calls `before` ahead of each write, so that a test can act, or fail, just there."""

    def __init__(self) -> None:
        super().__init__()
        self.before: Callable[[str, str], None] = lambda call, collection: None

    def upsert(self, collection: str, records: Sequence[Record]) -> None:
        """As in FaissStore."""
        self.before("upsert", collection)
        super().upsert(collection, records)

    def delete(self, collection: str, ids: Sequence[Id]) -> None:
        """As in FaissStore."""
        self.before("delete", collection)
        super().delete(collection, ids)


@dataclass
class Gallery:
    """A gallery in the middle of a naive upgrade, both collections served and nothing moved yet."""

    registry: Registry
    store: FaultyStore
    source: Texts
    encoder: Encoder
    backfill: Backfill
    upgrade: UpgradeRow
    task: Task

    def client(self) -> Client:
        """An application."""
        return Client("texts", registry=self.registry, store=self.store, encoder=self.encoder, longest_call=1.0)

    def worker(self, *, width: int = 2) -> Worker:
        """A worker with a short lease."""
        return Worker(registry=self.registry, lease=1.2, longest_call=0.4, width=width)

    def held(self) -> dict[str, dict[Id, Record]]:
        """What both collections hold, by "old" and "new"."""
        return {
            name: {record.id: record for page in self.store.scan(collection, fields=None, vector=True) for record in page}
            for name, collection in (("old", self.task.old), ("new", self.task.new))
        }

    def expect_moved(self) -> None:
        """Every text of the source, and nothing else, is in the new collection as v2 embeds it; the old one is empty."""
        held = self.held()
        assert held["old"].keys() == set()
        assert set(held["new"]) == set(self.source.of)
        for id, record in held["new"].items():
            assert np.allclose(record.vector, vector("v2", self.source.of[id]), atol=1e-6), id  # type: ignore[arg-type]


def make(folder: Path, *, records: int = 40, batch: int = 10) -> Gallery:
    """A gallery of texts t1 … at v1, its upgrade to v2 deployed and its work list made."""
    url = f"sqlite:///{folder}/registry.sqlite"
    schema.upgrade(url)
    registry, store, source = Registry(url, patience=5.0), FaultyStore(), Texts()
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
    for shape in shapes.values():
        store.create(shape, Index(type="FLAT"))
    store.upsert("texts_v1", [Record(id=id, vector=vector("v1", text), fields={"n": 0}) for id, text in source.of.items()])
    gallery = registry.add_gallery(
        name="texts", model="v1", schema=shapes["v1"], adopted=False, source="tests", search={}, times=TIMES
    )
    registry.add_collection(gallery.id, model="v2", schema=shapes["v2"], search={})
    legs = [Leg(collection=f"texts_{name}", model=name, metric=Metric.COSINE, embedder=name) for name in ("v2", "v1")]
    upgrade = registry.add_upgrade(
        gallery_id=gallery.id, from_version="v1", to_version="v2", old_collection="texts_v1", new_collection="texts_v2",
        phase=Phase.PLANNED, method="naive", order="random", plan={},
    )  # fmt: skip
    epoch = registry.announce("texts", legs, TIMES)
    assert registry.activate("texts", epoch) == []
    ids = sorted(source.of)
    registry.add_batches(upgrade.id, [(ids[at : at + batch], None) for at in range(0, records, batch)], first=1)
    registry.set_upgrade(upgrade.id, phase=Phase.SERVING_BOTH, listed=True)
    artifacts = Artifacts(folder / "artifacts")
    encoder = Encoder(
        load_embedder=TextEmbedder,
        load_chain=lambda version: Chain(embedder=version, dim=DIMS[version]),
        load_artifact=artifacts.get,
    )
    archive = Archive(folder / "archive")
    backfill = Backfill(registry=registry, store=store, encoder=encoder, source=source, archive=archive, cache=None)
    task = Task(upgrade=upgrade.id, gallery="texts", old="texts_v1", new="texts_v2", version="v2", grace=sum(TIMES.values()))
    return Gallery(registry=registry, store=store, source=source, encoder=encoder, backfill=backfill, upgrade=upgrade, task=task)
