"""A folder on a disk and one in a bucket do the same, whole or not at all, and say what is wrong."""

from __future__ import annotations

import builtins
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rmvdb.errors import ArtifactError, ConfigError, HomeUnreachable, RegistryError
from rmvdb.registry.manifest import Manifest
from rmvdb.storage import bucket as buckets
from rmvdb.storage import files
from rmvdb.storage.archive import Archive, ArchiveFile
from rmvdb.storage.bucket import Bucket
from rmvdb.storage.embedding_cache import EmbeddingCache
from rmvdb.storage.folders import Folder, LocalFolder
from rmvdb.types import Record
from tests.support.rights import a_user
from tests.support.s3 import S3Server

HERE = "a folder on a disk"
RECORDS = [Record(id=n, vector=np.full(3, n, np.float32), fields={"label": n}) for n in range(5)]


@pytest.fixture(params=[HERE, "a folder in a bucket"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Folder:
    if request.param == HERE:
        return LocalFolder(tmp_path / "home")
    there: Folder = request.getfixturevalue("bucket")
    return there


@pytest.mark.parametrize("name", ["a", "with blanks", "50%2E~ü#?+&", "deep/er/file.parquet", "5-0123.left"])
def test_a_file_is_read_as_it_was_written_last(folder: Folder, name: str) -> None:
    folder.write(name, b"before")
    folder.write(name, memoryview(b"\0after" * 1000))
    assert folder.read(name) == b"\0after" * 1000
    assert folder.verified(name, files.sha256(b"\0after" * 1000)) == folder.read(name)
    assert [(each.path, each.bytes) for each in folder.entries()] == [(name, 6000)]
    assert abs(next(folder.entries()).written - time.time()) < 60
    with pytest.raises(ArtifactError, match="was altered: its SHA-256 is not 0000"):
        folder.verified(name, "0" * 64)


def test_a_missing_file_is_named(folder: Folder) -> None:
    with pytest.raises(ArtifactError, match="x/none is missing; put it back from a backup") as caught:
        folder.read("x/none")
    assert isinstance(caught.value.__cause__, FileNotFoundError)
    assert list(folder.entries()) == list(folder.entries("x")) == []
    assert not folder.has("x")
    folder.remove("x/none")
    folder.clear("x")
    folder.clear()


@pytest.mark.parametrize("path", ["../b", "/b", "a/../../b", "", "a\0b"])
def test_a_path_that_leaves_the_folder_is_refused(folder: Folder, path: str) -> None:
    with pytest.raises(ArtifactError, match="do not belong together"):
        folder.read(path)
    with pytest.raises(ArtifactError, match="do not belong together"):
        folder.remove(path)


def test_a_folder_is_cleared_and_its_neighbours_stay(folder: Folder) -> None:
    names = ["1/a", "1/b/c", "1.x", "10/a", "2"]
    for name in names:
        folder.write(name, name.encode())
    assert sorted(each.path for each in folder.entries()) == sorted(names)
    assert sorted(each.path for each in folder.entries("1")) == ["1/a", "1/b/c"]
    assert [each.path for each in folder.folder("1").folder("b").entries()] == ["c"]
    assert [folder.has(each) for each in ("1", "1/b", "3")] == [True, True, False]
    folder.clear("1")
    assert sorted(each.path for each in folder.entries()) == ["1.x", "10/a", "2"]
    folder.remove("2")
    folder.folder("10").clear()
    assert [each.path for each in folder.entries()] == ["1.x"]


def test_an_archive_is_kept_there(folder: Folder) -> None:
    archive = Archive(folder)
    first = archive.write("things", "1", "old", "9", records=RECORDS[:3])
    second = archive.write("things", "1", "old", "10", records=RECORDS[3:])
    archive.leave("things", "1", "9", "7", ids=[1, 2])
    archive.leave("things", "1", "9", "8", ids=[2])
    assert archive.ids(first) == [0, 1, 2]
    assert archive.files("things", "1") == [second, first]  # the later one first, though a bucket counts in seconds
    assert archive.files("things", "1", begins="9-") == [first]
    assert archive.left("things", "1", "9") == {1: 7, 2: 8}
    archive.folder.remove(first.path)
    told: list[str] = []
    assert archive.found(first, left_out=told.append) == []
    assert "is missing" in told[0]
    with pytest.raises(ArtifactError):  # not even the folder is there: another archive may be mounted
        archive.found(ArchiveFile(path="things/2/old/9-0.parquet", sha256="0"))
    archive.clear("things", "1")
    assert list(folder.entries()) == []


def test_embeddings_are_kept_there_and_found_by_another_process(folder: Folder) -> None:
    one, other = (EmbeddingCache(folder, model="v 2/ü", dim=3) for _ in range(2))
    assert other.size == 0
    one.put([1, 2], np.ones((2, 2), np.float32), [b"x", b"y"], np.eye(2, 3, dtype=np.float32))
    assert other.get([1, 2], np.ones((2, 2), np.float32), [b"x", b"z"])[1].tolist() == [1, 0, 0]
    assert other.size == one.size > 0
    one.clear()
    assert EmbeddingCache(folder, model="v 2/ü", dim=3).knows([1]) == set()


def test_what_another_thread_reads_stays_as_it_is_while_embeddings_are_kept(folder: Folder) -> None:
    cache = EmbeddingCache(folder, model="v2")
    cache.put([1], np.ones((1, 2), np.float32), [b"x"], np.eye(1, 3, dtype=np.float32))
    reading = iter(cache._load())
    cache.put([2], np.ones((1, 2), np.float32), [b"y"], np.eye(1, 3, dtype=np.float32))
    assert [id for id, _ in reading] == [1]
    assert cache.knows([1, 2, 3]) == {1, 2}


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such rights")
def test_a_folder_that_this_user_may_not_read_is_named(tmp_path: Path) -> None:
    folder = LocalFolder(tmp_path / "home")
    folder.write("plans/a/b", b"x")
    (tmp_path / "home" / "plans").chmod(0)
    with a_user():
        for use in (lambda: list(folder.entries("plans")), lambda: folder.has("plans/a")):
            with pytest.raises(ArtifactError, match=r"home/plans.* cannot be read \(Permission denied\); correct its owner or"):
                use()
    (tmp_path / "home" / "plans").chmod(0o700)


# --- a bucket -----------------------------------------------------------------------------------------------------------


def test_all_of_many_files_are_listed_and_cleared(bucket: Bucket) -> None:
    for number in range(1005):  # more than one answer of S3 holds
        bucket.write(f"{number % 2}/{number:04}", b"x")
    assert len({each.path for each in bucket.entries()}) == 1005
    bucket.clear()
    assert list(bucket.entries()) == []


def test_a_bucket_that_comes_back_is_waited_for(s3_server: S3Server, bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "ANSWER", 1.0)
    patient = Bucket(bucket.address, patience=30.0)
    patient.write("a", b"1")
    with s3_server.hung():
        reader: list[bytes] = []
        thread = threading.Thread(target=lambda: reader.append(patient.read("a")))
        thread.start()
        time.sleep(2.5)
        assert not reader
    thread.join(30)
    assert reader == [b"1"]


def test_a_bucket_that_does_not_answer_is_a_sentence_and_its_manifest_is_not_taken_for_none(
    s3_server: S3Server, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A manifest that is away may hold the galleries of another registry: it must not be overwritten."""
    monkeypatch.setattr(buckets, "ANSWER", 0.5)
    home = Bucket(bucket.address, patience=1.0)

    def contents(version: str) -> dict[str, list[dict[str, Any]]]:
        versions = [{"name": version, "created_at": 1.0}]
        return {"galleries": [{"name": "things"}], "model_versions": versions, "changes": []}

    Manifest(home).write(contents("theirs"))
    with s3_server.hung():
        since = time.monotonic()
        with pytest.raises(HomeUnreachable, match=r"manifest.json: the bucket did not answer within 1 s \(ReadTimeoutError\)"):
            Manifest(home).check_forgotten()
        with pytest.raises(HomeUnreachable):
            Manifest(home).write(contents("ours"))
        with pytest.raises(HomeUnreachable):
            Archive(home).found(ArchiveFile(path="things/1/old/1-0.parquet", sha256="0"))
        with pytest.raises(HomeUnreachable):
            Archive(home).left("things", "1", "9")
        assert time.monotonic() - since < 15
    with pytest.raises(RegistryError, match=f"does not know gallery things, which {home.address}/manifest.json holds"):
        Manifest(home).write(contents("ours"))


def test_a_bucket_that_is_not_there_and_missing_keys_are_sentences_at_once(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    since = time.monotonic()
    with pytest.raises(
        ArtifactError, match=r"nothing-here/x/a cannot be used \(NoSuchBucket\); make that bucket, or correct home"
    ):
        Bucket("s3://nothing-here/x", patience=60.0).write("a", b"1")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", "/nonexistent")
    with pytest.raises(ArtifactError, match=r"cannot be used \(NoCredentialsError\); give this machine keys") as caught:
        Bucket(bucket.address, patience=60.0).read("a")
    assert "hidden-word" not in str(caught.value)
    assert time.monotonic() - since < 20


def test_without_boto3_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    there = builtins.__import__

    def missing(name: str, *more: Any, **others: Any) -> Any:
        if name == "boto3":
            raise ImportError("No module named 'boto3'")
        return there(name, *more, **others)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ConfigError, match=r"pip install 'rmvdb\[s3\]'"):
        Bucket("s3://any/home", patience=1.0)


def test_an_archive_that_was_moved_behind_a_link_is_away_and_not_damaged(tmp_path: Path) -> None:
    """An operator moves a gallery's archive to another disk. Its files are whole: nothing is to be made again."""
    folder = LocalFolder(tmp_path / "archive")
    archive = Archive(folder)
    file = archive.write("photos", "1", "c", "1-1", records=RECORDS, made=RECORDS)
    (tmp_path / "disk").mkdir()
    (tmp_path / "archive" / "photos").rename(tmp_path / "disk" / "photos")
    (tmp_path / "archive" / "photos").symlink_to(tmp_path / "disk" / "photos")
    with pytest.raises(ArtifactError, match=r"it leads out by a link; let that whole folder be a link"):
        archive.found(file)
    with pytest.raises(ArtifactError, match="by a link"):
        folder.write("photos/1/c/2-1.parquet", b"x")
