"""Model versions and artifacts."""

from __future__ import annotations

import pytest

from rmvdb.errors import AlreadyExists, ArtifactError, UsageError
from rmvdb.registry.registry import Registry
from rmvdb.registry.tables import UpgradeRow


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


def test_an_artifact_is_found_by_its_hash(registry: Registry) -> None:
    for _ in range(2):
        registry.add_artifact(sha256="c" * 64, kind="reverse", suffix=".safetensors", size=2**40)

    assert registry.artifact("c" * 64).size == 2**40
    with pytest.raises(ArtifactError, match="not in the registry"):
        registry.artifact("d" * 64)
