"""Model versions and artifacts."""

from __future__ import annotations

import hashlib
import json

import pytest

from rmvdb.catalog import versions
from rmvdb.errors import AlreadyExists, UsageError
from rmvdb.registry import manifest_rows
from rmvdb.registry.registry import Registry
from rmvdb.registry.tables import UpgradeRow, VersionRow
from rmvdb.types import Metric


def test_a_name_that_a_database_could_not_store_with_that_of_a_head_is_refused(registry: Registry) -> None:
    def add(name: str) -> VersionRow:
        return versions.add_version(
            registry, name=name, spec="tests.support.embedders:Words", options={}, classifier=None, metric=Metric.COSINE,
            dim=None, kind=None,
        )  # fmt: skip

    with pytest.raises(UsageError, match="cannot name a model version; use at most 100 letters, digits"):
        add("v" * 101)
    assert add("v" * 100).name == "v" * 100


def test_a_model_version_is_removed_when_nothing_needs_it_any_more(registry: Registry, upgrade: UpgradeRow) -> None:
    registry.add_artifact(sha256="a" * 64, kind="head", suffix="safetensors", size=3)
    registry.add_version(name="v2+a", embedder="models:new", dim=8, metric="COSINE", base="v2", head="a" * 64)
    registry.end(upgrade.id, note="over")
    for version in ("v1", "v2"):  # v2 is in the history alone
        with pytest.raises(UsageError, match=f"'{version}' is part of gallery 'photos' or its history; .* gallery remove photos"):
            registry.remove_version(version)
    registry.remove_gallery("photos")
    with pytest.raises(UsageError, match=r"'v2\+a' refers to 'v2'"):
        registry.remove_version("v2")
    for version in ("v2+a", "v2", "v1"):
        registry.remove_version(version)

    assert registry.versions() == []


def test_a_model_version_registered_twice_is_one(registry: Registry) -> None:
    first = registry.add_version(name="v1", embedder="models:old", options={"size": 2}, dim=4, metric="COSINE")
    again = registry.add_version(name="v1", embedder="models:old", options={"size": 2}, dim=4, metric="COSINE")

    assert again.id == first.id
    assert [row.name for row in registry.versions()] == ["v1"]
    assert registry.version("v1").options == {"size": 2}


def test_a_model_version_never_changes(registry: Registry) -> None:
    registry.add_version(name="v1", embedder="models:old", dim=4, metric="COSINE")

    with pytest.raises(AlreadyExists, match="'v1' is registered with another dim"):
        registry.add_version(name="v1", embedder="models:old", dim=8, metric="COSINE")


def test_a_model_version_embeds_its_queries_as_it_was_registered_to(registry: Registry) -> None:
    values = {"embedder": "models:old", "dim": 4, "metric": "COSINE"}
    registry.add_version(name="v1", **values)
    registry.add_version(name="v2", query_probes=bytes(16), **values)
    assert registry.add_version(name="v2", query_probes=bytes(range(16)), **values).query_probes == bytes(16)
    with pytest.raises(AlreadyExists, match="'v1' is registered without embed_queries; choose another name"):
        registry.add_version(name="v1", query_probes=b"", **values)
    with pytest.raises(AlreadyExists, match="'v2' is registered with embed_queries; choose another name"):
        registry.add_version(name="v2", **values)
    assert [row.has_own_queries for row in registry.versions()] == [False, True]


def test_a_version_without_queries_of_its_own_has_the_digest_that_an_earlier_rmvdb_gave(registry: Registry) -> None:
    """Embeddings and plans are kept by it."""
    made = registry.add_version(name="v1", embedder="models:old", dim=4, metric="COSINE")
    other = registry.add_version(name="v2", embedder="models:old", dim=4, metric="COSINE", query_probes=b"")
    known = {"name": "v1", "embedder": "models:old", "options": {}, "classifier": None, "dim": 4, "metric": "COSINE"}
    known |= dict.fromkeys(("fingerprint", "probes", "probe_kind", "base", "head", "compatible_with"))
    assert made.digest == hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()
    assert other.digest != made.digest


def test_that_embed_queries_takes_no_probe_survives_the_manifest(registry: Registry) -> None:
    """No bytes are not the same as none at all."""
    registry.add_version(name="v1", embedder="models:old", dim=4, metric="COSINE", query_probes=b"")
    (row,) = registry.contents()["model_versions"]
    type_ = VersionRow.__table__.columns["query_probes"].type
    assert manifest_rows._value_from_json(type_, json.loads(json.dumps(row["query_probes"]))) == b""


def test_an_artifact_is_registered_once(registry: Registry) -> None:
    for _ in range(2):
        registry.add_artifact(sha256="c" * 64, kind="reverse", suffix=".safetensors", size=2**40)

    (row,) = registry.artifacts()
    assert (row.sha256, row.size) == ("c" * 64, 2**40)
