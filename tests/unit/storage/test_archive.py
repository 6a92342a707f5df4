"""The archive gives back what it was given, bit for bit, or says what is wrong; the cache gives only what still holds."""

from __future__ import annotations

import copy
import io
import json
import logging
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from PIL import Image

from rmvdb.errors import ArtifactError, HomeUnreachable
from rmvdb.items.digest import item_digest
from rmvdb.storage import files
from rmvdb.storage.archive import Archive, ArchiveFile
from rmvdb.storage.embedding_cache import EmbeddingCache
from rmvdb.storage.folders import LocalFolder
from rmvdb.types import Id, Record, Vectors
from tests.support.small_disk import REPOSITORY, on_small_disk

_IN_ONE_FOLDER = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)

_INT64 = st.integers(-(2**63), 2**63 - 1)
_SCALARS = st.none() | st.booleans() | _INT64 | st.floats() | st.floats(width=32) | st.text()
_VALUES = st.recursive(
    _SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4), max_leaves=8
)
_FIELDS = st.dictionaries(st.text(), _VALUES, max_size=4)
#: Every bit pattern of a float32, NaN with a payload too.
_BITS = hnp.arrays(np.uint32, 5, elements=st.integers(0, 2**32 - 1))


@st.composite
def batches(draw: st.DrawFn) -> list[Record]:
    ids: list[Id] = draw(st.lists(_INT64, unique=True, max_size=6) | st.lists(st.text(), unique=True, max_size=6))
    return [
        Record(id=id, vector=draw(st.none() | _BITS.map(lambda bits: bits.view(np.float32))), fields=draw(_FIELDS)) for id in ids
    ]


def same(a: Any, b: Any) -> bool:
    """Equal in value and in type; NaN equals NaN and 0.0 is not -0.0."""
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float) and isinstance(b, float):
        return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    return type(a) is type(b) and a == b


def bits(vector: Vectors | None) -> bytes | None:
    return None if vector is None else vector.tobytes()


@given(records=batches())
@_IN_ONE_FOLDER
def test_records_come_back_bit_for_bit(tmp_path: Path, records: list[Record]) -> None:
    archive = Archive(LocalFolder(tmp_path))
    file = archive.write("photos", "1", "7", records=records)
    found = [each.record for each in archive.readings(file)]
    assert [record.id for record in found] == [record.id for record in records]
    assert [bits(record.vector) for record in found] == [bits(record.vector) for record in records]
    assert same([dict(record.fields) for record in found], [dict(record.fields) for record in records])
    assert archive.ids(file) == [record.id for record in records]


def test_values_of_engines_become_plain_values(tmp_path: Path) -> None:
    fields = {"f": np.float32(0.1), "i": np.int64(7), "b": np.bool_(True), "a": np.array([1.5, 2.5], np.float32), "t": (1, 2)}
    file = Archive(LocalFolder(tmp_path)).write("g", records=[Record(id=1, fields=fields)])
    found = Archive(LocalFolder(tmp_path)).readings(file)[0].record.fields
    assert found == {"f": float(np.float32(0.1)), "i": 7, "b": True, "a": [1.5, 2.5], "t": [1, 2]}
    assert np.float32(found["f"]) == np.float32(0.1)


def test_any_program_can_read_the_file(tmp_path: Path) -> None:
    vector = np.array([1, 2, 3], np.float32)
    file = Archive(LocalFolder(tmp_path)).write("g", records=[Record(id="a", vector=vector, fields={"label": 3})])
    assert pq.read_table(tmp_path / file.path, columns=["id", "vector", "fields"]).to_pylist() == [
        {"id": "a", "vector": [1.0, 2.0, 3.0], "fields": '{"label": 3}'}
    ]


@pytest.mark.parametrize("value", [b"bytes", object(), {1: "a number as key"}, 1j])
def test_a_value_that_cannot_be_kept_is_named_with_its_record(tmp_path: Path, value: object) -> None:
    with pytest.raises(ArtifactError, match="fields of record 7 cannot be kept"):
        Archive(LocalFolder(tmp_path)).write("g", records=[Record(id=7, fields={"x": [value]})])
    assert list(tmp_path.iterdir()) == []


def test_ids_of_two_kinds_and_vectors_of_two_dimensions_are_refused(tmp_path: Path) -> None:
    archive = Archive(LocalFolder(tmp_path))
    with pytest.raises(ArtifactError, match="neither all INT64 nor all VARCHAR"):
        archive.write("g", records=[Record(id=1), Record(id="1")])
    with pytest.raises(ArtifactError, match="neither all INT64"):
        archive.write("g", records=[Record(id=2**63)])
    with pytest.raises(ArtifactError, match="a collection has one dimension"):
        archive.write("g", records=[Record(id=n, vector=np.zeros(n, np.float32)) for n in (2, 3)])


def test_another_content_under_the_same_name_leaves_the_first_file_as_it_is(tmp_path: Path) -> None:
    archive = Archive(LocalFolder(tmp_path))
    first = archive.write("g", "u", "1", records=[Record(id=1)])
    second = archive.write("g", "u", "1", records=[Record(id=2)])
    again = archive.write("g", "u", "1", records=[Record(id=1)])
    assert (archive.ids(first), archive.ids(second)) == ([1], [2])
    assert again == first


def test_an_altered_or_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    archive = Archive(LocalFolder(tmp_path))
    file = archive.write("g", "1", records=[Record(id=1, vector=np.ones(8, np.float32))])
    path = tmp_path / file.path
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    for read in (archive.readings, archive.ids):
        with pytest.raises(ArtifactError, match=rf"{path.name} was altered"):
            read(file)
    archive.folder.remove(file.path)
    with pytest.raises(ArtifactError, match=rf"{path.name} is missing"):
        archive.readings(file)


def test_names_and_paths_cannot_leave_the_folder(tmp_path: Path) -> None:
    archive = Archive(LocalFolder(tmp_path / "archive"))
    for name in ["../../escape", "/etc", "..", ".", "", "a/b", "ä" * 200]:
        archive.write(name, name, records=[Record(id=1)])
    assert [path.name for path in tmp_path.iterdir()] == ["archive"]
    with pytest.raises(ArtifactError, match="is not a file in"):
        archive.readings(ArchiveFile(path="../archive2/x.parquet", sha256="0" * 64))
    archive.clear("..")
    assert (tmp_path / "archive").is_dir()


def test_clearing_removes_one_upgrade_and_can_be_repeated(tmp_path: Path) -> None:
    archive = Archive(LocalFolder(tmp_path))
    gone = archive.write("photos", "1", "7", records=[Record(id=1)])
    kept = archive.write("photos", "2", "7", records=[Record(id=1)])
    for _ in range(2):
        archive.clear("photos", "1")
        archive.folder.remove(gone.path)
    assert not (tmp_path / gone.path).exists()
    assert archive.ids(kept) == [1]


def test_vectors_do_not_keep_the_batch_in_memory(tmp_path: Path) -> None:
    records = [Record(id=n, vector=np.full(4, n, np.float32)) for n in range(3)]
    archive = Archive(LocalFolder(tmp_path))
    found = [each.record for each in archive.readings(archive.write("g", records=records))]
    assert all(record.vector is not None and record.vector.base is None for record in found)


OLD = np.arange(12, dtype=np.float32).reshape(3, 4)
NEW = np.arange(6, dtype=np.float32).reshape(3, 2)


def test_how_long_embeddings_took_is_known_to_this_process_and_the_next(tmp_path: Path) -> None:
    cache = EmbeddingCache(LocalFolder(tmp_path), model="v2")
    cache.put([1], OLD[:1], [b"a"], NEW[:1])  # unknown
    assert cache.per_second is None
    cache.put([1, 2, 3], OLD, [b"a"] * 3, NEW, seconds=0.5)
    cache.put([4], OLD[:1], [b"a"], NEW[:1], seconds=1.5)
    assert cache.per_second == EmbeddingCache(LocalFolder(tmp_path), model="v2").per_second == 2.0
    cache.clear()
    assert cache.per_second is None


@pytest.mark.parametrize("ids", [[1, 2, 3], ["a", "b", "c"]])
def test_a_kept_embedding_is_found_by_this_process_and_the_next(tmp_path: Path, ids: list[Id]) -> None:
    cache = EmbeddingCache(LocalFolder(tmp_path), model="v2")
    assert cache.get(ids, OLD, [b"a"] * 3) == {}
    cache.put(ids, OLD, [b"a"] * 3, NEW)
    for each in (cache, EmbeddingCache(LocalFolder(tmp_path), model="v2")):
        found = each.get([ids[2], ids[0], "unknown"], OLD[[2, 0, 1]], [b"a"] * 3)
        assert list(found) == [ids[2], ids[0]]
        np.testing.assert_array_equal(np.stack(list(found.values())), NEW[[2, 0]])


def test_a_record_that_changed_since_is_embedded_again(tmp_path: Path) -> None:
    cache = EmbeddingCache(LocalFolder(tmp_path), model="v2")
    cache.put([1, 2, 3], OLD, [b"a"] * 3, NEW)
    changed = OLD.copy()
    changed[1, 0] = np.nextafter(changed[1, 0], np.float32(9))
    assert list(cache.get([1, 2, 3], changed, [b"a"] * 3)) == [1, 3]


def _painted(*, red: int) -> Image.Image:
    """Return a picture of one colour of a palette."""
    made = Image.new("P", (2, 2), 0)
    made.putpalette([red, 0, 0])
    return made


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("a text", "a text and more"),
        (b"one", b"two"),
        ({"z": np.ones(2)}, {"z": np.zeros(2)}),
        (np.zeros((2, 3)), np.zeros((3, 2))),
        (np.zeros(4, np.uint8), np.zeros(2, np.uint16)),
        (Image.new("L", (2, 3)), Image.new("L", (3, 2))),
        (Image.new("L", (2, 2), 1), Image.new("L", (2, 2), 2)),
        (7, "7"),
        ([b"a", "x"], [b"b", "x"]),
        (_painted(red=255), _painted(red=0)),
    ],
)
def test_a_record_whose_item_is_another_one_now_is_embedded_again(tmp_path: Path, one: Any, other: Any) -> None:
    cache = EmbeddingCache(LocalFolder(tmp_path), model="v2")
    cache.put([1], OLD[:1], [item_digest(one)], NEW[:1])
    assert list(cache.get([1], OLD[:1], [item_digest(copy.copy(one))])) == [1]
    assert cache.get([1], OLD[:1], [item_digest(other)]) == {}
    assert cache.knows([1, 2]) == {1}


def test_a_file_that_was_written_since_is_another_item_and_an_item_without_a_digest_always_is(tmp_path: Path) -> None:
    file, cache = tmp_path / "item.txt", EmbeddingCache(LocalFolder(tmp_path / "kept"), model="v2")
    file.write_text("a")
    first = item_digest(file)
    assert item_digest(file) == first
    os.utime(file, (1, 1))
    second = item_digest(file)
    file.write_text("ab")
    os.utime(file, (1, 1))
    assert len({first, second, item_digest(file)}) == 3
    file.unlink()
    cut = io.BytesIO()
    Image.effect_noise((64, 64), 50).save(cut, "PNG")
    broken = Image.open(io.BytesIO(cut.getvalue()[:900] + b"not a chunk" + cut.getvalue()[911:]))
    assert [item_digest(each) for each in (file, object(), {"a": object()}, np.array([object()]), broken)] == [None] * 5
    cache.put([1], OLD[:1], [None], NEW[:1])
    assert cache.get([1], OLD[:1], [None]) == {}


def test_models_do_not_see_each_others_embeddings(tmp_path: Path) -> None:
    EmbeddingCache(LocalFolder(tmp_path), model="v2").put([1, 2, 3], OLD, [b"a"] * 3, NEW)
    assert EmbeddingCache(LocalFolder(tmp_path), model="v3").get([1, 2, 3], OLD, [b"a"] * 3) == {}


def test_an_altered_cache_file_is_left_out_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = EmbeddingCache(LocalFolder(tmp_path), model="v2")
    cache.put([1], OLD[:1], [b"a"], NEW[:1])
    cache.put([2], OLD[1:2], [b"a"], NEW[1:2])
    broken = sorted(cache.folder.path.iterdir())[0]
    broken.write_bytes(broken.read_bytes()[:-1])
    with caplog.at_level(logging.WARNING):
        assert len(EmbeddingCache(LocalFolder(tmp_path), model="v2").get([1, 2], OLD[:2], [b"a"] * 2)) == 1
    assert "Embeddings are computed again" in caplog.text
    assert [record.__dict__["action"] for record in caplog.records] == ["cache-skip"]


def test_the_cache_forgets_on_request(tmp_path: Path) -> None:
    cache = EmbeddingCache(LocalFolder(tmp_path), model="v2")
    cache.put([1, 2, 3], OLD, [b"a"] * 3, NEW)
    cache.clear()
    assert cache.get([1, 2, 3], OLD, [b"a"] * 3) == {}
    cache.clear()


def test_a_sample_of_more_than_one_file_is_whole(tmp_path: Path) -> None:
    n = 20_000
    old, new = np.random.default_rng(0).normal(size=(2, n, 2)).astype(np.float32)
    cache = EmbeddingCache(LocalFolder(tmp_path), model="v2")
    cache.put(list(range(n)), old, [b"a"] * n, new)
    assert len(list(cache.folder.path.iterdir())) == 3
    found = EmbeddingCache(LocalFolder(tmp_path), model="v2").get(list(range(n)), old, [b"a"] * n)
    np.testing.assert_array_equal(np.stack([found[id] for id in range(n)]), new)


READ = """
import os, sys
from pathlib import Path
import numpy as np
from rmvdb.storage import files
from rmvdb.storage.archive import Archive
from rmvdb.storage.embedding_cache import EmbeddingCache
from rmvdb.storage.folders import LocalFolder
from rmvdb.types import Record

folder, vectors = Path(sys.argv[1]), np.ones((500, 512), np.float32)
file = Archive(LocalFolder(folder)).write("g", "1", records=[Record(id=n, vector=vectors[n]) for n in range(500)])
EmbeddingCache(LocalFolder(folder), model="v2").put(list(range(500)), vectors, [b"a"] * 500, vectors)
before = len(os.listdir("/proc/self/task"))
assert len(Archive(LocalFolder(folder)).readings(file)) == 500
assert len(EmbeddingCache(LocalFolder(folder), model="v2").get(list(range(500)), vectors, [b"a"] * 500)) == 500
print(len(os.listdir("/proc/self/task")) - before)
"""


def test_reading_starts_no_thread_that_could_abort_the_process_as_it_ends(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", READ, tmp_path], capture_output=True, text=True, cwd=REPOSITORY, check=False)
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr


FULL_DISK = """
import json, sys
from pathlib import Path
import numpy as np
from rmvdb.storage import files
from rmvdb.storage.archive import Archive
from rmvdb.storage.embedding_cache import EmbeddingCache
from rmvdb.storage.artifacts import Artifacts
from rmvdb.storage.folders import LocalFolder
from rmvdb.errors import DiskFull
from rmvdb.types import Record

disk = Path(sys.argv[1])
noise = np.random.default_rng(0).normal(size=(500, 512)).astype(np.float32)  # 1 MB on a disk of 512 kB
big = [Record(id=n, vector=noise[n]) for n in range(500)]
archive, artifacts = Archive(LocalFolder(disk / "archive")), Artifacts(disk / "artifacts")
cache = EmbeddingCache(LocalFolder(disk / "cache"), model="v2")
kept, digest = archive.write("g", "1", records=big[:20]), artifacts.put(b"psi", suffix="json")
cache.put([1], noise[:1], [b"a"], noise[:1])
before = sorted(str(path) for path in disk.rglob("*"))
messages = []
for write in (
    lambda: archive.write("g", "1", records=big),
    lambda: artifacts.put(noise.tobytes(), suffix="bin"),
    lambda: cache.put(list(range(500)), noise, [b"a"] * 500, noise),
):
    try:
        write()
    except DiskFull as exc:
        messages.append(str(exc))
same = len(archive.readings(kept)) == 20 and artifacts.get(digest) == b"psi" and len(cache.get([1], noise[:1], [b"a"])) == 1
same = same and sorted(str(path) for path in disk.rglob("*")) == before
print(json.dumps({"messages": messages, "same": same}))
"""


def test_a_full_disk_is_a_sentence_and_leaves_everything_as_it_was(tmp_path: Path) -> None:
    result = json.loads(on_small_disk(tmp_path, "512k", FULL_DISK))
    assert result["same"]
    assert len(result["messages"]) == 3
    for message, folder in zip(result["messages"], ["archive/g/1-", "artifacts/", "cache/v2/"], strict=True):
        assert message.startswith(f"{tmp_path}/{folder}")
        assert "the disk is full and the file needs" in message
        assert message.endswith("bytes; make room and run the step again")


@pytest.mark.parametrize(
    "what", ["no Parquet", "empty", "another table", "another dimension", "texts", "NaN", "a folder", "a pipe"]
)
def test_a_kept_embedding_that_is_not_what_it_says_is_made_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    """Though its name is its SHA-256."""
    cache = EmbeddingCache(LocalFolder(tmp_path), model="v2", dim=3)
    cache.put([1], np.ones((1, 2), np.float32), [b"x"], np.ones((1, 3), np.float32))
    other = EmbeddingCache(LocalFolder(tmp_path / "other"), model="v2")
    if what in ("another dimension", "NaN"):
        row = np.full((1, 3), np.nan, np.float32) if what == "NaN" else np.ones((1, 4), np.float32)
        other.put([1], np.ones((1, 2), np.float32), [b"x"], row)
        data = next(other.folder.path.glob("*.parquet")).read_bytes()
    elif what in ("another table", "texts"):
        columns = {"id": [1], "of": [b"0" * 16], "vector": ["three"]} if what == "texts" else {"of": [1]}
        sink = io.BytesIO()
        pq.write_table(pa.table(columns), sink)
        data = sink.getvalue()
    else:
        data = b"" if what == "empty" else b"PAR1 and no more"
    path = cache.folder.path / f"{files.sha256(data)}.parquet"
    if what == "a folder":
        path.mkdir()
        (path / "file").touch()
    elif what == "a pipe":
        os.mkfifo(path)
    else:
        path.write_bytes(data)

    again = EmbeddingCache(LocalFolder(tmp_path), model="v2", dim=3)

    assert again.get([1], np.ones((1, 2), np.float32), [b"x"])[1].tolist() == [1, 1, 1]
    assert [record.__dict__["action"] for record in caplog.records] == ["cache-skip"]


def test_embeddings_that_a_bucket_does_not_give_for_a_moment_are_read_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are not damaged, and to make them again takes long."""
    one = np.ones((1, 4), np.float32)
    EmbeddingCache(LocalFolder(tmp_path), model="v2").put([1], one, [b"item"], one)
    other = EmbeddingCache(LocalFolder(tmp_path), model="v2")

    def away(*_: object) -> bytes:
        raise HomeUnreachable("the bucket did not answer")

    with monkeypatch.context() as moment:
        moment.setattr(LocalFolder, "read", away)
        with pytest.raises(HomeUnreachable):
            other.knows([1])
    assert other.knows([1]) == {1}
