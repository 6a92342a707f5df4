"""An application whose searches are rescored, and an embedder that counts: for tests in one process."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest

from rmvdb.items.field import FieldSource
from rmvdb.protocols import Source
from rmvdb.serving.client import Client
from rmvdb.serving.loaded_models import Chain, LoadedModels
from rmvdb.serving.rescorer import Rescorer
from rmvdb.serving.shared_vectors import SharedVectors
from rmvdb.types import Hit, Id, IdType, Item, Metric, Schema, Vectors
from tests.support.inprocess import DIMS, Gallery, TextEmbedder, vector

#: Enough for any machine: only tests of the budget want less.
PATIENT = 60.0
SCHEMA = Schema(collection="texts_v1", dim=DIMS["v1"], metric=Metric.COSINE, id_type=IdType.INT64)


class Counting(TextEmbedder):
    """An embedder that counts its calls and their items, by version."""

    calls: ClassVar[dict[str, list[list[Item]]]] = {}
    #: Called before each embedding by the new version.
    before: Callable[[Sequence[Item]], None] = staticmethod(lambda items: None)

    def embed(self, items: Sequence[Item]) -> Vectors:
        self.calls.setdefault(self.version, []).append(list(items))
        if self.version == "v2":
            type(self).before(items)
        return super().embed(items)


def write_fields(gallery: Gallery) -> None:
    records = gallery.records("texts_v1").values()
    gallery.store.upsert(
        "texts_v1", [replace(each, fields={"n": each.id, "text": gallery.source.of[each.id]}) for each in records]
    )


def application(
    gallery: Gallery,
    source: Source | None = None,
    *,
    budget: float = PATIENT,
    cache: int = 1_000_000,
    shared: SharedVectors | None = None,
    load: Callable[[str], Any] = Counting,
) -> Client:
    """Return a client in a process of its own. Its items come from the field, unless it has another source."""
    models = LoadedModels(
        load_embedder=load, load_chain=lambda version: Chain(embedder=version, dim=DIMS[version]), load_artifact=lambda _: b""
    )
    rescorer = Rescorer(
        loaded_models=models,
        source=lambda: source or FieldSource("text"),
        schema=SCHEMA,
        budget=budget,
        cache=cache,
        shared=shared,
    )
    return Client(
        "texts", registry=gallery.registry, store=gallery.store, loaded_models=models, engine_timeout=1.0, rescorer=rescorer
    )


def truth(gallery: Gallery, query: str, version: str = "v2") -> dict[Id, float]:
    """Return how far each record is from a query by that version, by id, nearest first."""
    far = {id: float(1 - vector(version, text) @ vector(version, query)) for id, text in gallery.source.of.items()}
    return dict(sorted(far.items(), key=lambda pair: pair[1]))


def embedded(version: str = "v2") -> list[Item]:
    """Return every item that the version embedded, in order."""
    return [item for items in Counting.calls.get(version, []) for item in items]


def expect_true(gallery: Gallery, hits: Sequence[Hit], query: str, *, limit: int = 10) -> None:
    """Expect the `limit` nearest records by the new model, with their true distances."""
    far = truth(gallery, query)
    assert len(hits) == min(limit, len(far))
    assert [hit.id for hit in hits] == list(far)[: len(hits)]
    assert np.allclose([hit.distance for hit in hits], [far[hit.id] for hit in hits], atol=1e-5)
    assert np.allclose([hit.raw for hit in hits], [far[hit.id] for hit in hits], atol=1e-5)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]


def kept(client: Client) -> int:
    """Return how many vectors a client keeps."""
    assert client._reader._rescorer is not None
    return len(client._reader._rescorer._cache)
