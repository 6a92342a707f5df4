"""Artifacts are read back as they were written, or not at all."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rmvdb.errors import ArtifactError
from rmvdb.storage import files
from rmvdb.storage.artifacts import Artifacts
from rmvdb.storage.folders import LocalFolder


@given(data=st.binary(max_size=2000), suffix=st.sampled_from(["json", "safetensors", ".json"]))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=50)
def test_stored_bytes_come_back(tmp_path: Path, data: bytes, suffix: str) -> None:
    artifacts = Artifacts(tmp_path)
    digest = artifacts.put(data, suffix=suffix)
    assert digest == hashlib.sha256(data).hexdigest()
    assert artifacts.get(digest) == data
    assert (tmp_path / f"{digest}.{suffix.removeprefix('.')}").is_file()


def test_the_same_bytes_are_kept_once_and_nothing_else_is_left(tmp_path: Path) -> None:
    artifacts = Artifacts(tmp_path / "deep" / "folder")
    digests = {artifacts.put(b"psi", suffix="safetensors") for _ in range(3)}
    assert [path.name for path in artifacts.folder.iterdir()] == [f"{digests.pop()}.safetensors"]


def test_an_altered_artifact_is_refused_by_name_and_repaired_by_putting_it_again(tmp_path: Path) -> None:
    artifacts = Artifacts(tmp_path)
    digest = artifacts.put(b"calibration", suffix="json")
    artifacts.path(digest).write_bytes(b"calibratioN")
    with pytest.raises(ArtifactError, match=f"{digest}.json was altered"):
        artifacts.get(digest)
    artifacts.put(b"calibration", suffix="json")
    assert artifacts.get(digest) == b"calibration"


def test_a_missing_artifact_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=f"{'0' * 64} is missing; put it back"):
        Artifacts(tmp_path).get("0" * 64)


def test_a_file_that_this_folder_lacks_or_that_was_altered_comes_from_elsewhere_and_is_kept(tmp_path: Path) -> None:
    asked = []

    def elsewhere(sha256: str) -> bytes | None:
        asked.append(sha256)
        return b"psi" if sha256 == files.sha256(b"psi") else b"something else"

    artifacts, digest = Artifacts(tmp_path, elsewhere=elsewhere), files.sha256(b"psi")
    assert artifacts.get(digest) == artifacts.get(digest) == b"psi"
    assert asked == [digest]
    artifacts.path(digest).write_bytes(b"altered")
    assert artifacts.get(digest) == artifacts.get(digest) == b"psi"
    assert asked == [digest] * 2
    assert list(artifacts.here([digest, "0" * 64])) == [(digest, b"psi")]
    with pytest.raises(ArtifactError, match="is missing"):
        artifacts.get("0" * 64)  # what elsewhere gives is not what was asked for


def test_bytes_from_elsewhere_are_returned_even_if_they_cannot_be_kept(tmp_path: Path) -> None:
    (tmp_path / "artifacts").write_bytes(b"a file where the folder should be")
    assert Artifacts(tmp_path / "artifacts", elsewhere=lambda _: b"psi").get(files.sha256(b"psi")) == b"psi"


@pytest.mark.parametrize("digest", ["", "../secret", "*", "A" * 64, "0" * 63, f"../{'0' * 61}", "0" * 64 + "\n"])
def test_only_a_sha256_is_looked_for(tmp_path: Path, digest: str) -> None:
    folder = tmp_path / "artifacts"
    Artifacts(folder).put(b"x", suffix="json")
    (tmp_path / "secret").write_bytes(b"secret")
    with pytest.raises(ArtifactError, match="is not the SHA-256"):
        Artifacts(folder).get(digest)


@pytest.mark.parametrize("suffix", ["", ".", "a/b", "..", "../x", "a\0"])
def test_a_suffix_cannot_name_another_folder(tmp_path: Path, suffix: str) -> None:
    with pytest.raises(ArtifactError, match="cannot end a file's name"):
        Artifacts(tmp_path).put(b"x", suffix=suffix)


def test_a_folder_that_cannot_be_made_is_an_error_with_a_way_out(tmp_path: Path) -> None:
    (tmp_path / "artifacts").write_bytes(b"a file where the folder should be")
    with pytest.raises(ArtifactError, match=r"could not be written .*; fix that"):
        Artifacts(tmp_path / "artifacts").put(b"x", suffix="json")


def test_many_writers_of_the_same_bytes_do_not_disturb_each_other(tmp_path: Path) -> None:
    artifacts = Artifacts(tmp_path / "new")
    data = bytes(200_000)
    found: list[bytes] = []

    def put_and_get() -> None:
        for _ in range(10):
            found.append(artifacts.get(artifacts.put(data, suffix="bin")))

    threads = [threading.Thread(target=put_and_get) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [data] * 60
    assert len(list(artifacts.folder.iterdir())) == 1


@given(names=st.lists(st.text(max_size=200), min_size=2, max_size=2, unique=True))
def test_file_names_are_distinct_short_and_plain(names: list[str]) -> None:
    first, second = map(files.file_name, names)
    assert first != second
    assert len(first.encode()) < 200
    assert Path(first).parts == (first,)
    assert not first.startswith(".")


def test_a_path_from_the_registry_cannot_leave_its_folder(tmp_path: Path) -> None:
    (tmp_path / "archive").mkdir()
    (tmp_path / "archive" / "way-out").symlink_to(tmp_path)
    for path in ["../secret", "/etc/passwd", "a/../../secret", "", "a\0b", "way-out/secret"]:
        with pytest.raises(ArtifactError, match="is not a file in"):
            files.inside(tmp_path / "archive", path)
    assert files.inside(tmp_path / "archive", "photos/1.parquet") == tmp_path / "archive" / "photos" / "1.parquet"


def test_removing_twice_is_removing_once(tmp_path: Path) -> None:
    files.durable_write(tmp_path / "a" / "b" / "c", b"x")
    for _ in range(2):
        files.remove(tmp_path / "a" / "b" / "c")
        files.remove(tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


def test_a_bucket_keeps_each_file_for_a_machine_that_lost_its_folder_and_a_registry_that_lost_its_rows(tmp_path: Path) -> None:
    bucket = LocalFolder(tmp_path / "bucket")
    digest = Artifacts(tmp_path / "lost", bucket=lambda: bucket).put(b"psi", suffix="safetensors")
    other = Artifacts(tmp_path / "other", bucket=lambda: bucket)
    assert list(other.here([digest, "0" * 64])) == [(digest, b"psi")]
    assert other.get(digest) == b"psi"
    assert other.lacking([digest, "0" * 64]) == ["0" * 64]
    (tmp_path / "bucket" / f"{digest}.safetensors").write_bytes(b"altered")
    assert other.get(digest) == b"psi"
    with pytest.raises(ArtifactError, match=f"{digest}.safetensors was altered"):
        Artifacts(tmp_path / "third", bucket=lambda: bucket).get(digest)


def test_a_folder_without_a_bucket_lacks_nothing_there(tmp_path: Path) -> None:
    assert Artifacts(tmp_path).lacking(["0" * 64]) == []
