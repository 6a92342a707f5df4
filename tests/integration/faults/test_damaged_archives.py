"""Files of the archive are damaged or missing."""

from __future__ import annotations

import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rmvdb import errors
from rmvdb.registry.codec import unpack_ids
from rmvdb.registry.tables import BatchRow
from rmvdb.storage.archive import ArchiveFile
from rmvdb.types import Phase, Record
from rmvdb.upgrade import complete, work_list
from tests.support.faults import copied, decided, drive
from tests.support.inprocess import Gallery, make, vector


def _damage(gallery: Gallery, kind: str) -> Path:
    file = next(gallery.archive.folder.path.rglob("*.parquet"))
    if kind == "missing":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-1] + b"x")
    return file


@pytest.mark.parametrize("kind", ["altered", "missing"])
def test_a_batch_whose_archive_is_damaged_comes_again_and_is_archived_again(gallery: Gallery, kind: str) -> None:
    before = gallery.held()["old"]
    copied(gallery)
    _damage(gallery, kind)
    row = gallery.conductor().advance(gallery.registry.upgrade(gallery.upgrade.id), gallery.worker())
    assert row.phase == Phase.CUT_OVER
    gallery.expect_moved()
    back = gallery.conductor().roll_back(row)
    assert back is not None
    gallery.conductor().advance(back, gallery.worker())
    held = gallery.held()["old"]
    assert held.keys() == before.keys()
    assert all(np.array_equal(held[id].vector, before[id].vector) for id in before)  # type: ignore[arg-type]


def test_a_removal_that_was_decided_is_not_made_where_nothing_can_be_put_back_any_more(gallery: Gallery) -> None:
    decided(gallery)
    _damage(gallery, "altered")
    time.sleep(0.7)
    drive(gallery)
    gallery.expect_moved()
    retired = gallery.registry.batches(gallery.upgrade.id)
    assert [len(unpack_ids(row.remove)) for row in retired] == [0, 8]
    assert len(gallery.archive.readings(ArchiveFile(**retired[1].archive["texts_v1"]))) == 8


@pytest.mark.parametrize("kind", ["altered", "missing"])
def test_a_roll_back_has_the_old_model_embed_what_a_damaged_archive_held(gallery: Gallery, kind: str) -> None:
    before = gallery.held()["old"]
    drive(gallery)
    file, conductor, said = _damage(gallery, kind), gallery.conductor(), list[str]()
    conductor.say = said.append
    row = conductor.advance(gallery.registry.upgrade(gallery.upgrade.id), gallery.worker())
    assert row.phase == Phase.CUT_OVER
    assert [words for words in said if words.startswith(f"left out: {file}")]
    back = conductor.roll_back(row)
    assert back is not None
    assert conductor.advance(back, gallery.worker()).phase == Phase.CUT_OVER
    held = gallery.held()
    assert held["old"].keys() == before.keys()
    assert not held["new"]
    assert all(np.allclose(held["old"][id].vector, before[id].vector, atol=1e-6) for id in before)  # type: ignore[arg-type]


def test_an_archive_that_is_away_stops_what_needs_it(gallery: Gallery) -> None:
    copied(gallery)
    gallery.archive.folder.path.rename(gallery.folder / "elsewhere")
    with pytest.raises(errors.ArtifactError, match="is missing; put it back"):
        drive(gallery)
    (gallery.folder / "elsewhere").rename(gallery.archive.folder.path)
    drive(gallery)
    gallery.expect_moved()


def test_a_roll_back_is_listed_a_page_at_a_time_with_each_record_once_by_its_last_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gallery = make(tmp_path, records=12, batch=2)
    drive(gallery)
    gallery.store.upsert(gallery.task.old[0], [Record(id=3, vector=vector("v1", "t3"), fields={"n": 7})])
    complete._list_late(gallery.conductor(), gallery.upgrade, gallery.task.old[0])
    drive(gallery)
    real, pages = gallery.registry.batches, list[list[weakref.ref[BatchRow]]]()

    def batches(*args: Any, **options: Any) -> Any:
        assert not [row for page in pages[:-1] for row in page if row() is not None]
        found = real(*args, **options | {"limit": 2})
        pages.append([weakref.ref(row) for row in found])
        return found

    monkeypatch.setattr(gallery.registry, "batches", batches)
    back = gallery.conductor().roll_back(gallery.registry.upgrade(gallery.upgrade.id))
    assert back is not None
    listed = [(ids, gallery.backfill._kept(file)) for ids, file in work_list._undone(gallery.conductor(), back)]
    assert [ids for ids, _ in listed] == [[3], [11, 12], [9, 10], [7, 8], [5, 6], [4], [1, 2]]
    assert listed[0][1]["texts_v1"][0].fields == {"n": 7}
    assert len(pages) == 10
    gallery.registry.close()
