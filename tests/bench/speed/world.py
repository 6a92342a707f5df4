"""A gallery in the middle of an upgrade: a share of its records in the new collection, the others in the old one behind ψ."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rmvdb.app.settings import SearchSection
from rmvdb.learning.calibration import Calibration
from rmvdb.learning.transforms import Config, Transform, Weights
from rmvdb.protocols import VectorStore
from rmvdb.registry.mark import Owner, mark_of
from rmvdb.registry.registry import Registry
from rmvdb.serving.client import Client
from rmvdb.serving.loaded_models import Chain, LoadedModels
from rmvdb.types import IdType, Index, Item, Leg, Metric, Record, Schema, Vectors
from tests.bench.speed.row import Options
from tests.support.migrated import migrate

#: Parameters of both collections' searches.
SEARCH: Mapping[str, object] = {"ef": 64}
TIMES = {"max_age": SearchSection().plan_max_age, "longest_search": 10.0, "staleness": 5.0}
#: The names of the collections, newest first, and of the models whose vectors they hold.
COLLECTIONS = ("bench_v2", "bench_v1")


class Free:
    """An embedder that costs nothing: an item is its vector."""

    def embed(self, items: Sequence[Item]) -> Vectors:
        """Return the vectors (n, dim)."""
        return np.stack(list(items))


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """The gallery, engine and models that the rows measure."""

    client: Client
    registry: Registry
    store: VectorStore
    loaded_models: LoadedModels
    #: Queries of the new model (n, dim), and the same through ψ.
    queries: Vectors
    mapped: Vectors


def psi(dim: int, *, residual: bool = False, seed: int = 0) -> Transform:
    """Return a network of the size that training makes for two spaces of that dimension: two blocks, 2 dim wide."""
    rng = np.random.default_rng(seed)
    shapes = {"body.0": (2 * dim, dim), "body.2": (dim, 2 * dim)}
    arrays: dict[str, Vectors] = {}
    for name, shape in shapes.items():
        arrays[f"{name}.weight"] = (rng.normal(size=shape) / np.sqrt(shape[1])).astype(np.float32)
        arrays[f"{name}.bias"] = np.zeros(shape[0], np.float32)
    return Transform(Weights(config=Config(d_in=dim, d_out=dim, hidden=2 * dim, residual=residual), arrays=arrays))


def vectors(count: int, dim: int, seed: int) -> Vectors:
    """Return vectors (count, dim) of length 1 around a few hundred centres."""
    rng = np.random.default_rng(seed)
    centres = np.random.default_rng(7).normal(size=(300, dim))
    made = centres[rng.integers(0, 300, count)] + rng.normal(size=(count, dim))
    return (made / np.linalg.norm(made, axis=1, keepdims=True)).astype(np.float32)


@contextlib.contextmanager
def world(
    store: VectorStore, options: Options, *, index: Index, fill: bool = True, times: Mapping[str, float] = TIMES
) -> Iterator[World]:
    """Make the gallery in this store, connect, and take it away again. Without `fill` the collections stay empty."""
    folder = Path(tempfile.mkdtemp(prefix="rmvdb-bench-"))
    url = f"sqlite:///{folder}/registry.sqlite"
    migrate(url)
    registry = Registry(url, patience=60.0, keep=lambda *_: None)
    made, files = psi(options.dim), _files(psi(options.dim))
    shapes = [Schema(collection=name, dim=options.dim, metric=Metric.COSINE, id_type=IdType.INT64) for name in COLLECTIONS]
    try:
        for shape in shapes:
            store.create(shape, index)
        if fill:
            _fill(store, options)
        _register(registry, shapes, list(files), times)
        Owner(registry, store).settle("bench")  # as every gallery of a user's is
        models = LoadedModels(
            load_embedder=lambda _: Free(),
            load_chain=lambda version: Chain(embedder=version, dim=options.dim),
            load_artifact=files.__getitem__,
        )
        queries = vectors(200, options.dim, seed=3)
        with Client("bench", registry=registry, store=store, loaded_models=models) as client:
            yield World(
                client=client, registry=registry, store=store, loaded_models=models, queries=queries, mapped=made.apply(queries)
            )
    finally:
        for shape in shapes:
            store.drop(shape.collection)
            store.drop(mark_of(shape.collection))
        registry.close()
        shutil.rmtree(folder)


def _files(made: Transform) -> dict[str, bytes]:
    """Return ψ and two calibrations by names, as artifacts."""
    knots = tuple(np.linspace(0.0, 2.0, 24).tolist())
    scales = [Calibration(x=knots, y=tuple(factor * knot for knot in knots)) for factor in (1.0, 1.1)]
    return {"psi": made.to_bytes(), "new": scales[0].to_bytes(), "old": scales[1].to_bytes()}


def _register(registry: Registry, shapes: Sequence[Schema], files: Sequence[str], times: Mapping[str, float]) -> None:
    for name in ("v1", "v2"):
        registry.add_version(
            name=name, embedder=f"bench:{name}", options={}, classifier=None, dim=shapes[0].dim, metric="COSINE",
            fingerprint=None, probes=None, probe_kind=None, base=None, head=None,
        )  # fmt: skip
    gallery = registry.add_gallery(
        name="bench", model="v1", schema=shapes[1], adopted=False, source="bench", search=SEARCH, times=times
    )
    registry.add_collection(gallery.id, model="v2", schema=shapes[0], search=SEARCH)
    psi, new, old = files
    legs = [
        Leg(collection=COLLECTIONS[0], model="v2", metric=Metric.COSINE, embedder="v2", calibration=new),
        Leg(collection=COLLECTIONS[1], model="v1", metric=Metric.COSINE, embedder="v2", transforms=(psi,), calibration=old),
    ]
    waiting = registry.activate("bench", registry.announce("bench", legs, times), force=True)
    assert not waiting, waiting


def _fill(store: VectorStore, options: Options) -> None:
    moved = round(options.t * options.records)
    made = vectors(options.records, options.dim, seed=1)
    _write(store, COLLECTIONS[0], range(moved), made)
    _write(store, COLLECTIONS[1], range(moved, options.records), made)
    for name in COLLECTIONS:
        store.settle(name)


def _write(store: VectorStore, collection: str, ids: range, made: Vectors) -> None:
    for start in range(0, len(ids), 5000):
        store.upsert(collection, [Record(id=id, vector=made[id], fields={}) for id in ids[start : start + 5000]])
