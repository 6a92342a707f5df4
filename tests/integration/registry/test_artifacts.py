"""The contents of artifacts in the registry, for machines that do not share a home."""

from __future__ import annotations

from rmvdb.registry.artifacts import PART
from rmvdb.registry.registry import Registry

DATA = bytes(range(256)) * (2 * PART // 256) + b"the rest"
SHA256 = "a" * 64


def add(registry: Registry, sha256: str, size: int) -> None:
    registry.add_artifact(sha256=sha256, kind="reverse", suffix="safetensors", size=size)


def test_contents_come_back_as_they_were_added(registry: Registry) -> None:
    for sha256, data in ((SHA256, DATA), ("b" * 64, b"short"), ("c" * 64, b"")):
        add(registry, sha256, len(data))
        for _ in range(2):
            registry.add_contents(sha256, data)
        assert registry.contents_of(sha256) == data


def test_contents_of_which_a_part_is_missing_are_none_and_are_named(registry: Registry) -> None:
    add(registry, SHA256, len(DATA))
    add(registry, "b" * 64, 5)
    registry.add_contents("b" * 64, b"short")
    assert registry.contents_of(SHA256) is None
    registry.add_part(SHA256, 0, DATA[:PART])  # killed after the first
    assert registry.contents_of(SHA256) is None
    assert registry.artifacts_without_contents() == [SHA256]
    registry.add_contents(SHA256, DATA)
    assert registry.contents_of(SHA256) == DATA
    assert registry.artifacts_without_contents() == []
    assert registry.contents_of("0" * 64) is None


def test_contents_go_with_their_artifact(registry: Registry) -> None:
    add(registry, SHA256, 5)
    registry.add_contents(SHA256, b"short")
    counts = registry.collect(older=-1.0, spared=set(), queries_days=1.0, remove=True)
    assert counts["artifacts"] == 1
    assert registry.contents_of(SHA256) is None


def test_an_artifact_that_is_registered_again_is_no_old_one(registry: Registry) -> None:
    """A plan that was made an hour ago begins its upgrade now, and `gc` must not take its ψ meanwhile."""
    add(registry, SHA256, 5)
    [first] = registry.artifacts()
    with registry.engine.begin() as connection:
        connection.exec_driver_sql("UPDATE artifacts SET created_at = 7")
    add(registry, SHA256, 5)
    [again] = registry.artifacts()
    assert again.created_at >= first.created_at
