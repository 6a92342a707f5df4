"""A gallery called photos and its upgrade as a registry knows of them: nothing is embedded, and no engine runs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rmvdb.registry.intents import Opened
from rmvdb.registry.registry import Registry
from rmvdb.registry.tables import BatchRow, GalleryRow, UpgradeRow
from rmvdb.types import Field, IdType, Leg, Metric, Phase, Schema

TIMES = {"max_age": 60.0, "longest_search": 5.0, "staleness": 1.0}
OLD = Leg(collection="photos_1", model="v1", metric=Metric.COSINE, embedder="v1")
NEW = Leg(collection="photos_2", model="v2", metric=Metric.COSINE, embedder="v2", transforms=("a" * 64,), calibration="b" * 64)
NEWEST = Leg(collection="photos_3", model="v3", metric=Metric.COSINE, embedder="v3")
OLD_AGAIN = Leg(collection="photos_3", model="v1", metric=Metric.COSINE, embedder="v1")


def shape(collection: str = "photos_1") -> Schema:
    """Return a schema with everything that a schema can have."""
    fields = (Field(name="tag", type="VARCHAR", params={"max_length": 64}), Field(name="year", type="INT64"))
    return Schema(collection=collection, dim=4, metric=Metric.COSINE, id_type=IdType.INT64, fields=fields)


def add_gallery(registry: Registry, name: str = "photos", **values: Any) -> GalleryRow:
    """Return a gallery of one collection in model v1."""
    registry.add_version(name="v1", embedder="models:old", dim=4, metric="COSINE")
    defaults: dict[str, Any] = {
        "model": "v1",
        "schema": shape(f"{name}_1"),
        "adopted": True,
        "source": None,
        "search": {"ef": 64},
        "times": TIMES,
    }
    return registry.add_gallery(name=name, **defaults | values)


def add_upgrade(registry: Registry, gallery: GalleryRow, **values: Any) -> UpgradeRow:
    """Return an upgrade of that gallery to v2."""
    registry.add_version(name="v2", embedder="models:new", dim=8, metric="COSINE")
    defaults = {
        "from_version": "v1",
        "to_version": "v2",
        "old_collections": ["photos_1"],
        "new_collection": "photos_2",
        "phase": Phase.SERVING_BOTH,
        "method": "reverse",
        "order": "confidence",
    }
    return registry.add_upgrade(gallery_id=gallery.id, **defaults | values)


def supersede(registry: Registry, upgrade: UpgradeRow, **values: Any) -> UpgradeRow:
    """Register an upgrade to v3 that supersedes one to v2."""
    registry.add_version(name="v3", embedder="models:newest", dim=8, metric="COSINE")
    plan = registry.plan("photos")
    defaults: dict[str, Any] = {
        "epoch": plan.epoch, "note": "superseded", "gallery_id": upgrade.gallery_id, "from_version": "v2", "to_version": "v3",
        "old_collections": ["photos_2", "photos_1"], "new_collection": "photos_3", "supersedes": upgrade.id,
        "phase": Phase.PLANNED, "method": "naive", "order": "random",
    }  # fmt: skip
    return registry.supersede(upgrade.id, **defaults | values)


def claim(registry: Registry, upgrade: UpgradeRow, worker: str = "w1", **changed: Any) -> BatchRow | None:
    """Claim as a worker does, for a minute unless told otherwise."""
    settings: dict[str, Any] = {"lease": 60.0, "grace": 0.0, "copy": True}
    return registry.claim(upgrade.id, worker, **settings | changed)


def claimed(registry: Registry, upgrade: UpgradeRow, worker: str = "w1", **changed: Any) -> BatchRow:
    """Claim a batch, which must exist."""
    batch = claim(registry, upgrade, worker, **changed)
    assert batch is not None
    return batch


def set_aside(registry: Registry, upgrade: UpgradeRow, reasons: dict[int, str]) -> None:
    """Copy a batch of these records and quarantine all of them."""
    registry.add_batches(upgrade.id, [(list(reasons), None)], first=registry.next_priority(upgrade.id))
    registry.copied(claimed(registry, upgrade), requeue=[], aside=reasons)


def opened(registry: Registry, ids: list[int], *, client: str = "c1", lasting: float = 60.0) -> Opened:
    """Open intents while no epoch is changing."""
    made = registry.open_intents("photos", "upsert", ids, client=client, lasting=lasting)
    assert made is not None
    return made


def at_once(count: int, work: Callable[[int], Any]) -> list[Any]:
    """Run `work(0)`, `work(1)` … in threads that begin together; their results."""
    together = threading.Barrier(count)

    def begin(number: int) -> Any:
        together.wait()
        return work(number)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(begin, range(count)))
