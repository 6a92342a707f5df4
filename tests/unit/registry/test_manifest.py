"""The manifest: whole or not there at all, believed only if it is as it was written, never another registry's."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from rmvdb.errors import ArtifactError, RegistryError, SchemaOutdated
from rmvdb.registry import manifest as room
from rmvdb.registry.manifest import Manifest
from rmvdb.registry.manifest_rows import Contents
from rmvdb.storage.folders import LocalFolder
from tests.support.rights import a_user


def contents(*galleries: str, version: str = "v1", at: float = 1.25) -> Contents:
    """As a registry hands them over."""
    versions = [{"id": 1, "name": version, "created_at": at, "probes": "AAAA", "options": {"größe": [1, 2.5, None]}}]
    return {"model_versions": versions, "galleries": [{"id": at, "name": name} for at, name in enumerate(galleries)]}


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    """A manifest in a folder that is not there yet."""
    return Manifest(LocalFolder(tmp_path / "home"))


def test_written_contents_are_read(manifest: Manifest) -> None:
    manifest.write(contents())
    manifest.write(contents("photos"))
    assert manifest.read() == contents("photos")
    assert [path.name for path in Path(manifest.path).parent.iterdir()] == ["manifest.json"]


def test_the_same_again_writes_nothing(manifest: Manifest) -> None:
    manifest.write(contents("photos"))
    before = Path(manifest.path).stat()
    manifest.write(contents("photos"))
    assert Path(manifest.path).stat() == before


def test_a_manifest_that_cannot_be_written_leaves_the_one_before(manifest: Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest.write(contents("photos"))

    def no_rename(*_: Any) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Path, "replace", no_rename)
    with pytest.raises(ArtifactError, match=r"manifest.json could not be written \(Input/output error\)"):
        manifest.write(contents("photos", "texts"))
    monkeypatch.undo()
    assert manifest.read() == contents("photos")
    assert [path.name for path in Path(manifest.path).parent.iterdir()] == ["manifest.json"]


def test_every_altered_byte_is_found(manifest: Manifest) -> None:
    manifest.write(contents("photos"))
    whole = Path(manifest.path).read_text()
    for before, after in (
        ("photos", "pictures"),
        ("2.5", "2.75"),
        ("null", "0"),
        ("AAAA", "AAAB"),
        ('"sha256": "', '"sha256": "0'),
    ):
        assert before in whole
        Path(manifest.path).write_text(whole.replace(before, after))
        with pytest.raises(ArtifactError, match="was altered: its SHA-256 does not match; put it back from a backup"):
            manifest.read()


@pytest.mark.parametrize("text", ["", "half a", "[]", "{}", '{"rmvdb": 1}', '{"rmvdb": 1, "sha256": "0", "tables": {}}', "\xff"])
def test_a_file_that_is_not_a_manifest_is_refused_by_name(manifest: Manifest, text: str) -> None:
    Path(manifest.path).parent.mkdir()
    Path(manifest.path).write_bytes(text.encode("latin-1"))
    with pytest.raises(ArtifactError, match=r"manifest\.json was altered"):
        manifest.read()


def test_one_that_is_missing_says_so(manifest: Manifest) -> None:
    with pytest.raises(ArtifactError, match=r"manifest\.json is missing; put it back from a backup"):
        manifest.read()


def test_one_of_a_newer_format_is_neither_read_nor_overwritten(manifest: Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "FORMAT", 2)
    manifest.write(contents("photos"))
    monkeypatch.undo()
    for use in (manifest.read, lambda: manifest.write(contents("photos", "texts"))):
        with pytest.raises(SchemaOutdated, match="is of format 2, this rmvdb knows 1; install the newer release"):
            use()
    assert json.loads(Path(manifest.path).read_text())["tables"] == contents("photos")


def test_the_next_change_repairs_a_damaged_manifest(manifest: Manifest) -> None:
    Path(manifest.path).parent.mkdir()
    Path(manifest.path).write_text("damaged")
    manifest.write(contents("photos"))
    assert manifest.read() == contents("photos")


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such rights")
def test_one_that_cannot_be_read_is_not_taken_for_none(manifest: Manifest) -> None:
    manifest.write(contents("photos"))
    Path(manifest.path).chmod(0)
    with a_user():
        for use in (manifest.read, manifest.check_forgotten, lambda: manifest.write(contents("texts", version="v9"))):
            with pytest.raises(ArtifactError, match=r"manifest\.json cannot be read \(Permission denied\)"):
                use()
    Path(manifest.path).chmod(0o600)
    assert manifest.read() == contents("photos")


@pytest.mark.parametrize("anew", [contents("photos", at=9.0), contents("texts", version="v9"), contents(at=9.0)])
def test_the_galleries_of_a_lost_registry_are_not_forgotten_for_a_new_one(manifest: Manifest, anew: Contents) -> None:
    manifest.write(contents("photos"))
    with pytest.raises(RegistryError, match=r"does not know gallery photos, which .* if the registry was lost"):
        manifest.write(anew)
    assert manifest.read() == contents("photos")


def test_an_older_copy_of_a_registry_does_not_take_the_place_of_a_newer_one(manifest: Manifest) -> None:
    newer = dict(contents("photos", "texts")) | {"changes": [{"id": 1, "number": 7}]}
    manifest.write(newer)
    manifest.write(dict(newer) | contents("photos"))  # change 7 was handed over and not committed: this is another one
    manifest.write(newer)
    with pytest.raises(RegistryError, match=r"holds its change 7, and this is change 6; put the newer database back, or"):
        manifest.write(dict(contents("photos")) | {"changes": [{"id": 1, "number": 6}]})
    assert manifest.read() == newer


def test_a_new_registry_may_begin_if_no_gallery_would_be_forgotten(manifest: Manifest) -> None:
    manifest.write(contents(at=1.0))
    manifest.write(contents("photos", at=9.0))
    assert manifest.read() == contents("photos", at=9.0)


def test_a_registry_is_known_by_any_of_its_versions(manifest: Manifest) -> None:
    both = dict(contents("photos"))
    both["model_versions"] = [*contents(version="v0")["model_versions"], *both["model_versions"]]
    manifest.write(both)
    manifest.write(contents("photos"))
    assert manifest.read() == contents("photos")
