"""Upgrades whose old collection is searched with both models' queries in one vector, and the hits written out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch

from rmvdb.learning.method import Method
from rmvdb.learning.network import Network
from rmvdb.learning.transforms import Config, Transform
from rmvdb.planning.plan import Plan, Stage
from rmvdb.planning.question import Question
from rmvdb.registry.tables import UpgradeRow
from rmvdb.types import Hit, Id, Vectors
from tests.support.inprocess import DIMS, Gallery, vector

#: The old model's part of the vector.
WEIGHT = 0.4


def transform(gallery: Gallery, start: str, end: str) -> str:
    """Keep some ψ from one version's space to another's; return its SHA-256."""
    torch.manual_seed(7)
    made = Transform(Network(Config(d_in=DIMS[start], d_out=DIMS[end], hidden=9)))
    return gallery.conductor().services.artifacts.put(made.to_bytes(), suffix="safetensors")


def begin(gallery: Gallery, *stages: Stage, to: str = "v2", switch: float | None = None, **options: Any) -> UpgradeRow:
    """Begin an upgrade whose old collections are searched as these stages say."""
    conductor = gallery.conductor()
    copies = bool(options.pop("instant_rollback", False))
    question = conductor.resolve(
        Question(gallery="texts", from_version="v1", to_version=to, method=Method.RQT, order="random", instant_rollback=copies)
    )
    plan = Plan(
        question=asdict(question), method="rqt", order="random", head=None, stages=stages, trained_on=None, prediction=None,
        cost={}, skipped=0, made_at=0.0, switch=switch,
    )  # fmt: skip
    return conductor.begin(question, plan, gallery.worker(), **options)


def go_on(gallery: Gallery, row: UpgradeRow, **values: Any) -> UpgradeRow:
    """Go on with the upgrade, by a plan with these values."""
    if values:
        now = gallery.registry.upgrade(row.id)
        gallery.registry.set_upgrade(row.id, plan=replace(now.plan, **values))
    return gallery.conductor().advance(gallery.registry.upgrade(row.id), gallery.worker())


def blend(gallery: Gallery, *, start: str = "v2", end: str = "v1", legs: int = 2) -> Stage:
    """Return a stage that searches the old collection with both models' queries."""
    return Stage(reverse=transform(gallery, start, end), blend=WEIGHT, calibrations=(None,) * legs)


def unit(vectors: Vectors) -> Vectors:
    """Return the vector with length 1."""
    return vectors / np.linalg.norm(vectors)  # type: ignore[no-any-return]


def cosine(query: Vectors, stored: Vectors | None) -> float:
    """Return their cosine distance."""
    assert stored is not None
    return 1 - float(unit(query) @ unit(stored))


def by_hand(gallery: Gallery, queries: Mapping[str, Vectors]) -> list[tuple[Id, float]]:
    """Return every record with its smallest distance from these queries, nearest first; the queries by collection."""
    found: dict[Id, float] = {}
    for collection, query in queries.items():
        for id, record in gallery.records(collection).items():
            found[id] = min(found.get(id, 9.0), cosine(query, record.vector))
    return sorted(found.items(), key=lambda each: each[1])


def both(gallery: Gallery, item: str, psi: str, *, weight: float = WEIGHT) -> Vectors:
    """Return the query of v1's collection, written out."""
    reached = gallery.loaded_models.apply([psi], vector("v2", item)[None])[0]
    return (1 - weight) * unit(reached) + weight * unit(vector("v1", item))


def expect_hits(hits: Sequence[Hit], expected: Sequence[tuple[Id, float]]) -> None:
    """Expect these ids at these distances."""
    assert [hit.id for hit in hits] == [id for id, _ in expected]
    np.testing.assert_allclose([hit.distance for hit in hits], [distance for _, distance in expected], atol=1e-5)
