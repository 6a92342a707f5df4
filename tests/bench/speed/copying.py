"""One worker that moves batches, against pymilvus that reads, upserts and deletes the same, and the embedder alone."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image
from pymilvus import MilvusClient

from rmvdb.engines.milvus import MilvusStore
from rmvdb.items.folder import ImageFolder
from rmvdb.items.torch import TorchEmbedder
from rmvdb.serving.loaded_models import Chain, LoadedModels
from rmvdb.types import Index
from tests.bench.speed.moving import BATCH, SHORT, WIDTH, Given, Moving
from tests.bench.speed.row import Options, Row, compared
from tests.bench.speed.world import COLLECTIONS, World, vectors, world
from tests.bench.speed.writes import SETTINGS
from tests.support.milvus_server import MilvusServer

#: Rounds of each side.
ROUNDS = 2
#: Different pictures; every record is a name of one of them. Of so many records a round embeds each.
PICTURES, EMBEDDED = 64, 1500


def measure(options: Options) -> Iterator[Row]:
    """Measure on a server of its own, whose index is FLAT, so that neither side waits until one is built."""
    with (
        tempfile.TemporaryDirectory(prefix="rmvdb-bench-") as folder,
        MilvusServer(Path(folder), settings=SETTINGS) as server,
        tempfile.TemporaryDirectory(prefix="rmvdb-bench-") as archive,
    ):
        store = MilvusStore(lambda: server.address, timeout=60.0)
        try:
            for family in (_free, _real):
                whole = Options(records=options.records, dim=options.dim, t=0.0, calls=options.calls)
                with world(store, whole, index=Index(type="FLAT"), times=SHORT) as made:
                    made.client.close()
                    yield from family(made, server.address, whole, Path(archive) / family.__name__)
        finally:
            store.close()


def _free(made: World, address: str, options: Options, archive: Path) -> Iterator[Row]:
    moving = Moving(made, archive, Given(vectors(options.records, options.dim, seed=1)), made.loaded_models)
    bare, rates = Bare(address), ([], [])  # type: tuple[Bare, tuple[list[float], list[float]]]
    few = min(options.records // 10, 100)
    moving.add(range(few))  # makes the marks beside the collections
    moving.run()
    for ids, others in _in_turns(range(few, options.records), ROUNDS):
        moving.add(ids)
        rates[0].append(len(ids) / moving.run())
        began = time.perf_counter()
        bare.move(others)
        rates[1].append(len(others) / (time.perf_counter() - began))
    bare.close()
    name = f"copying, free embedder, {options.records:,} × {options.dim}, {WIDTH} batches of {BATCH} at once"
    against = "read, upsert and delete"
    yield compared(name, *rates, against=against, target=0.9, unit="records/s", better="higher")


def _real(made: World, _: str, options: Options, archive: Path) -> Iterator[Row]:
    with tempfile.TemporaryDirectory(prefix="rmvdb-bench-") as pictures:
        count = min(options.records, 2 * ROUNDS * EMBEDDED)
        _draw(Path(pictures), count)
        embedder, source = network(options.dim), ImageFolder(f"{pictures}/{{id}}.jpg")
        models = LoadedModels(
            load_embedder=lambda _: embedder,
            load_chain=lambda version: Chain(embedder=version, dim=options.dim),
            load_artifact=lambda _: b"",
        )
        moving, rates = Moving(made, archive, source, models), ([], [])  # type: tuple[Moving, tuple[list[float], list[float]]]
        for ids, others in _in_turns(range(count), ROUNDS):
            moving.add(ids, batch=max(1, len(ids) // 12))
            rates[0].append(len(ids) / moving.run())
            paths = [Path(pictures) / f"{id}.jpg" for id in others]
            began = time.perf_counter()
            embedder.embed(paths)
            rates[1].append(len(others) / (time.perf_counter() - began))
    name = f"copying, a network for pictures, {count:,} files"
    yield compared(name, *rates, against="the embedder alone", target=0.95, unit="records/s", better="higher")


class Bare:
    """The same batches moved by pymilvus alone, as many at once, with vectors that are ready."""

    def __init__(self, address: str) -> None:
        self._client, self._pool = MilvusClient(uri=address), ThreadPoolExecutor(WIDTH)

    def move(self, ids: Sequence[int]) -> None:
        """Move them, batch by batch."""
        list(self._pool.map(self._one, [ids[at : at + BATCH] for at in range(0, len(ids), BATCH)]))

    def _one(self, ids: Sequence[int]) -> None:
        rows = self._client.query(COLLECTIONS[1], filter=f"id in {list(ids)}", output_fields=["id", "vector"])
        assert len(rows) == len(ids)
        self._client.upsert(COLLECTIONS[0], rows)
        self._client.delete(COLLECTIONS[1], ids=list(ids))

    def close(self) -> None:
        """End its threads."""
        self._pool.shutdown()
        self._client.close()


def network(dim: int) -> TorchEmbedder:
    """Return a network of depthwise convolutions, as EfficientNet-Lite0 is one, with random weights, for 112 pixels."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    widths, layers = (32, 32, 64, 64, 128, 128, 256, 256), list[nn.Module]([nn.Conv2d(3, 32, 3, 2, 1), nn.ReLU6()])
    for at, (narrow, wide) in enumerate(zip(widths, (*widths[1:], 512), strict=True)):
        inner = 4 * narrow
        layers += [nn.Conv2d(narrow, inner, 1), nn.ReLU6(), nn.Conv2d(inner, inner, 3, 1 + at % 2, 1, groups=inner), nn.ReLU6()]
        layers += [nn.Conv2d(inner, wide, 1)]
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, dim))

    def pixels(image: Image.Image) -> torch.Tensor:
        return torch.from_numpy(np.asarray(image.resize((112, 112))).copy()).permute(2, 0, 1).float() / 127.5 - 1

    return TorchEmbedder(net, pixels, dim=dim, device="cpu", batch_size=32)


def _draw(folder: Path, count: int) -> None:
    rng = np.random.default_rng(0)
    for id in range(count):
        path = folder / f"{id}.jpg"
        if id < PICTURES:
            Image.fromarray(rng.integers(0, 255, (224, 224, 3), dtype=np.uint8)).save(path)
        else:
            os.link(folder / f"{id % PICTURES}.jpg", path)


def _in_turns(ids: range, rounds: int) -> Iterator[tuple[list[int], list[int]]]:
    """Yield parts of the ids in pairs, one for each side."""
    size = len(ids) // (2 * rounds)
    parts = [list(ids[at * size : (at + 1) * size]) for at in range(2 * rounds)]
    yield from zip(parts[::2], parts[1::2], strict=True)
