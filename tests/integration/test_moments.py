"""Registry and engine are not of one moment: either of them has gone back, and nothing that was moved is lost."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rmvdb import errors
from rmvdb.registry.codec import unpack_ids
from rmvdb.types import BatchState, Index, Phase, Record
from tests.support.faults import remove
from tests.support.inprocess import Crash, Gallery, drive, make, vector
from tests.support.waiting import run_out


@pytest.fixture
def gallery(tmp_path: Path) -> Iterator[Gallery]:
    """Forty texts, both collections served, four batches listed."""
    made = make(tmp_path)
    yield made
    made.registry.close()


class Moment:
    """A copy of the registry's file, to be put back later."""

    def __init__(self, gallery: Gallery) -> None:
        self._registry, self._file = gallery.registry, gallery.folder / "registry.sqlite"
        self._copy = gallery.folder / "moment.sqlite"
        self._move(self._file, self._copy)

    def come_back(self) -> None:
        """Set the registry back, so that it knows nothing of later events."""
        self._registry.close()
        self._move(self._copy, self._file)

    @staticmethod
    def _move(one: Path, other: Path) -> None:
        with contextlib.closing(sqlite3.connect(one)) as source, contextlib.closing(sqlite3.connect(other)) as target:
            source.backup(target)


def before(gallery: Gallery, call: str, kind: str) -> Moment:
    """Return the registry as it is just before the first such call; everything is moved since."""
    moments: list[Moment] = []

    def look(made: str, collection: str) -> None:
        if made == call and collection in getattr(gallery.task, kind) and not moments:
            moments.append(Moment(gallery))

    gallery.store.before = look
    drive(gallery, width=1)
    gallery.store.before = lambda call, collection: None
    return moments[0]


@pytest.mark.parametrize(("call", "kind"), [("upsert", "new"), ("delete", "old")])
def test_a_registry_that_went_back_loses_no_record(gallery: Gallery, call: str, kind: str) -> None:
    moment = before(gallery, call, kind)
    moment.come_back()
    with pytest.raises(errors.NotOwner, match="has gone back"):  # the mark beside the data tells
        drive(gallery)
    gallery.registry.catch_up("texts", number=1_000_000, epoch=0)  # the mark is overruled
    drive(gallery)
    gallery.expect_moved()
    assert gallery.verify().ok


def forget(gallery: Gallery, *statements: str) -> None:
    """Take retired batches for copied ones in the registry, and run these statements."""
    with gallery.registry.engine.begin() as connection:
        for each in statements:
            connection.exec_driver_sql(each)
        connection.exec_driver_sql(
            "UPDATE batches SET state = 'copied', worker = NULL, lease_until = NULL, remove = NULL WHERE copied_at IS NOT NULL"
        )


def test_a_registry_that_went_back_to_copied_loses_no_record(gallery: Gallery) -> None:
    drive(gallery)
    forget(gallery)
    drive(gallery)
    gallery.expect_moved()
    report = gallery.verify()
    assert report.ok
    assert report.fields_compared == 40


@pytest.mark.parametrize("records", [1, 3])
def test_a_small_batch_that_had_retired_loses_nothing_either(tmp_path: Path, records: int) -> None:
    small = make(tmp_path, records=records, batch=records)
    drive(small)
    forget(small)
    drive(small)
    small.expect_moved()
    small.registry.close()


def test_a_record_that_came_again_before_the_registry_went_back_is_not_lost(gallery: Gallery) -> None:
    """A record that changed is moved by a batch of its own, of which the registry then knows nothing."""

    def change(call: str, collection: str) -> None:
        if call == "upsert" and collection in gallery.task.new:
            gallery.store.before = lambda call, collection: None
            gallery.source.of[5] = "newer"
            gallery.store.upsert(gallery.task.old[0], [Record(id=5, vector=vector("v1", "newer"), fields={"n": 0})])

    gallery.store.before = change
    drive(gallery, width=1)
    forget(gallery, "DELETE FROM batches WHERE id > 4")
    drive(gallery)
    gallery.expect_moved()


def decided(gallery: Gallery) -> None:
    """Copy every batch, and die before the first removal."""

    def stop(call: str, collection: str) -> None:
        if call == "delete":
            raise Crash

    gallery.store.before = stop
    with pytest.raises(Crash):
        drive(gallery)
    gallery.store.before = lambda call, collection: None


def copied(gallery: Gallery) -> None:
    """Copy every batch, and retire none."""
    decided(gallery)
    forget(gallery)
    for path in gallery.archive.folder.path.rglob("*.left"):
        path.unlink()


@pytest.mark.parametrize("when", ["before the decision", "after the decision"])
def test_a_record_that_a_client_deleted_and_wrote_again_before_the_registry_went_back_is_kept(tmp_path: Path, when: str) -> None:
    """It is in the new collection only, and looks as if another program had deleted it."""
    gallery = make(tmp_path, records=10, batch=10)
    copied(gallery)
    if when == "after the decision":  # that another program deleted it
        gallery.store.delete(gallery.task.old[0], [3])
        decided(gallery)
        assert unpack_ids(gallery.registry.batches(gallery.upgrade.id)[0].remove_from_new) == [3]
    gallery.source.of[3] = "newer"
    with gallery.client() as client:
        client.delete([3])
        client.upsert([{"id": 3, "item": "newer", "n": 7}])
    with gallery.registry.engine.begin() as connection:
        connection.exec_driver_sql("DELETE FROM intents")
    run_out(gallery.registry)
    drive(gallery)
    assert gallery.held()["new"][3].fields == {"n": 7}
    gallery.expect_moved()
    gallery.registry.close()


def test_a_record_that_another_program_deleted_leaves_the_new_collection_whichever_copy_that_holds(tmp_path: Path) -> None:
    """A batch read it changed, was killed before it copied that, and then finds it deleted."""
    gallery = make(tmp_path, records=10, batch=10)
    copied(gallery)
    gallery.store.upsert(gallery.task.old[0], [Record(id=3, vector=vector("v1", "newer"), fields={"n": 7})])

    def stop(call: str, collection: str) -> None:
        if (call, collection) == ("upsert", gallery.task.new[0]):
            raise Crash

    gallery.store.before = stop
    with pytest.raises(Crash):
        drive(gallery)
    gallery.store.before = lambda call, collection: None
    remove(gallery, 3)
    run_out(gallery.registry)
    drive(gallery)
    gallery.expect_moved()
    gallery.registry.close()


def test_records_that_are_gone_in_numbers_are_not_taken_for_deletions(gallery: Gallery) -> None:
    copied(gallery)
    first = unpack_ids(gallery.registry.batches(gallery.upgrade.id)[0].ids)
    gallery.store.delete(gallery.task.old[0], first[:6])
    with pytest.raises(errors.RecordsMissing, match="6 of the 10 records"):
        drive(gallery)
    assert set(first) <= set(gallery.held()["new"])


def test_a_batch_of_which_nothing_is_left_was_retired(gallery: Gallery) -> None:
    """The archive went back as well: what the new collection holds is exactly what the batch made."""
    copied(gallery)
    first = unpack_ids(gallery.registry.batches(gallery.upgrade.id)[0].ids)
    gallery.store.delete(gallery.task.old[0], first)
    drive(gallery)
    gallery.expect_moved()


def test_a_single_record_that_another_program_deleted_is_taken_out_of_new(gallery: Gallery) -> None:
    copied(gallery)
    gallery.store.delete(gallery.task.old[0], [7])
    del gallery.source.of[7]
    drive(gallery)
    gallery.expect_moved()


@pytest.mark.parametrize("how", ["lost some", "made anew"])
def test_a_record_that_new_does_not_hold_stays_in_old_and_is_copied_again(gallery: Gallery, how: str) -> None:
    copied(gallery)
    if how == "lost some":
        gallery.store.delete(gallery.task.new[0], [1, 2, 3, 21, 22])
    else:
        schema = gallery.store.describe(gallery.task.new[0])
        gallery.store.drop(gallery.task.new[0])
        gallery.store.create(schema, Index(type="FLAT"))
    drive(gallery)
    gallery.expect_moved()


def test_a_write_that_the_engine_has_lost_is_made_again_from_its_item(gallery: Gallery) -> None:
    """The engine is what it was before the write; the registry says that the write is done."""
    copied(gallery)
    with gallery.client() as client:
        gallery.source.of[5] = "newer"
        client.upsert([{"id": 5, "item": "newer", "n": 0}])
    gallery.store.delete(gallery.task.new[0], [5])
    drive(gallery)
    gallery.expect_moved()


def test_a_decision_is_not_carried_out_on_what_new_has_lost_since(gallery: Gallery) -> None:
    decided(gallery)
    removing = gallery.registry.batches(gallery.upgrade.id, state=BatchState.REMOVING)
    gallery.store.delete(gallery.task.new[0], unpack_ids(removing[0].remove)[:4])
    drive(gallery)
    gallery.expect_moved()


def held_back(gallery: Gallery, count: int) -> None:
    """Remove records from old, as another program does, before any batch reads them."""
    gallery.store.delete(gallery.task.old[0], list(range(1, count + 1)))
    for id in range(1, count + 1):
        del gallery.source.of[id]


def test_a_gallery_of_which_another_took_a_part_is_not_cut_over(gallery: Gallery) -> None:
    held_back(gallery, 20)
    with pytest.raises(errors.RecordsMissing, match="20 records of the work list are gone"):
        gallery.conductor().advance(gallery.upgrade, gallery.worker())
    row = gallery.registry.upgrade(gallery.upgrade.id)
    gallery.registry.set_upgrade(row.id, plan=replace(row.plan, accept_missing=True))
    found = gallery.conductor().advance(gallery.registry.upgrade(row.id), gallery.worker())
    assert found.phase == Phase.CUT_OVER


def test_a_record_that_new_loses_after_the_last_batch_is_put_back_from_the_archive(gallery: Gallery) -> None:
    drive(gallery)
    gallery.store.delete(gallery.task.new[0], list(range(5, 25)))
    conductor, row = gallery.conductor(), gallery.registry.upgrade(gallery.upgrade.id)
    assert not gallery.verify().ok
    lost = conductor.lost(row)
    assert sum(map(len, lost.archived.values())) == 20
    conductor.repair(row, lost, gallery.worker())
    gallery.expect_moved()
    assert gallery.verify().ok


@pytest.mark.parametrize("lost", ["what was moved", "a client's write", "nothing"])
def test_the_archive_goes_only_once_the_new_collection_was_asked_for_all_that_was_moved(gallery: Gallery, lost: str) -> None:
    """The engine goes back after the cut-over: the archive, or a source, is all that is left."""
    conductor = gallery.conductor()
    with gallery.client() as client:
        gallery.source.of[50] = "t50"
        client.upsert([{"id": 50, "item": "t50"}])
        row = conductor.advance(gallery.upgrade, gallery.worker())
        client.delete([7])
        del gallery.source.of[7]
    gone = {"what was moved": [5, 6], "a client's write": [50], "nothing": []}[lost]
    gallery.store.delete(gallery.task.new[0], gone)
    if gone:
        with pytest.raises(
            errors.VerifyFailed, match=rf"texts_v2 has lost {len(gone)} records? that .*, such as {gone[0]};.*--repair"
        ):
            conductor.clean_up(row)
        assert conductor.registry.upgrade(row.id).phase == Phase.CUT_OVER
        assert list(gallery.archive.folder.path.rglob("*.parquet"))
        conductor.repair(row, conductor.lost(row), gallery.worker())
    conductor.clean_up(conductor.registry.upgrade(row.id))
    assert set(gallery.records("texts_v2")) == set(gallery.source.of)


@pytest.mark.parametrize("way", ["forward", "back"])
def test_records_that_an_engine_from_before_the_cut_over_has_in_old_alone_are_lost_and_not_late(
    gallery: Gallery, way: str
) -> None:
    """Clean-up does not ask to remove them: no other collection holds them."""
    conductor = gallery.conductor()
    row = conductor.advance(gallery.upgrade, gallery.worker())
    if way == "back":
        back = conductor.roll_back(row)
        assert back is not None
        row = conductor.advance(back, gallery.worker())
    new, old, version = row.new_collection, row.old_collections[0], row.from_version
    gallery.store.delete(new, [5, 6])
    gallery.store.upsert(old, [Record(id=id, vector=vector(version, f"t{id}"), fields={"n": 0}) for id in (5, 6)])
    with pytest.raises(errors.VerifyFailed, match=rf"{new} has lost 2 records that .*, such as [56]; run rmvdb verify --repair"):
        conductor.clean_up(row)
    conductor.repair(row, conductor.lost(row), gallery.worker())
    conductor.clean_up(conductor.registry.upgrade(row.id))
    assert set(gallery.records(new)) == set(gallery.source.of)


def test_a_deletion_by_another_program_after_the_cut_over_is_accepted_once_that_is_said(gallery: Gallery) -> None:
    conductor = gallery.conductor()
    row = conductor.advance(gallery.upgrade, gallery.worker())
    gallery.store.delete(gallery.task.new[0], [5])
    conductor.clean_up(row, accept_missing=True)
    assert conductor.registry.upgrade(row.id).phase == Phase.ENDED


def test_a_removal_that_arrives_after_a_roll_back_is_found_and_undone(gallery: Gallery) -> None:
    late: list[list[object]] = []
    real = gallery.store.delete

    def relay(collection: str, ids: list[object], **options: object) -> None:
        if collection in gallery.task.old and not late:
            late.append(ids)
            raise Crash
        real(collection, ids, **options)  # type: ignore[arg-type]

    gallery.store.delete = relay  # type: ignore[method-assign,assignment]
    with pytest.raises(Crash):
        drive(gallery)
    gallery.store.delete = real  # type: ignore[method-assign]
    conductor = gallery.conductor()
    back = conductor.roll_back(gallery.registry.upgrade(gallery.upgrade.id))
    assert back is not None
    conductor.deploy(back)
    conductor.list_work(gallery.registry.upgrade(back.id))
    conductor.backfill(gallery.registry.upgrade(back.id), gallery.worker())
    real(gallery.task.old[0], late[0])  # type: ignore[arg-type]
    found = gallery.conductor().advance(gallery.registry.upgrade(back.id), gallery.worker())
    assert found.phase == Phase.CUT_OVER
    assert set(gallery.records(gallery.task.old[0])) == set(gallery.source.of)


def test_verify_searches_with_a_filter_too(gallery: Gallery) -> None:
    drive(gallery)
    real = gallery.store.search

    def search(collection: str, *args: object, **options: object) -> list[object]:
        found = real(collection, *args, **options)
        return [hits[:2] for hits in found] if options.get("filter") else found  # type: ignore[misc]

    gallery.store.search = search  # type: ignore[method-assign,assignment]
    report = gallery.verify()
    assert report.searched == 40
    assert not report.ok
    assert "a search with a filter by its key does not find it" in report.examples[0]


def test_no_record_leaves_old_that_a_filtered_search_does_not_find_in_new(
    gallery: Gallery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rmvdb.backfill.retire._PATIENCE", (0.0,))
    real = gallery.store.search
    gallery.store.search = lambda *args, **options: [[] for _ in real(*args, **options)]  # type: ignore[method-assign]
    with pytest.raises(errors.EngineError, match="the batch stays in"):
        drive(gallery)
    assert len(gallery.held()["old"]) == 40


def test_not_one_record_of_a_batch_leaves_old_that_a_filtered_search_does_not_find_in_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of sixty: a sample of twenty, asked for by their own vectors, would not tell."""
    monkeypatch.setattr("rmvdb.backfill.retire._PATIENCE", (0.0,))
    made = make(tmp_path, records=60, batch=60)
    real = made.store.search

    def search(collection: str, *args: Any, **options: Any) -> Any:
        hidden = {2, 3} if collection == made.task.new[0] and options.get("filter") else set[int]()
        return [[hit for hit in hits if hit.id not in hidden] for hits in real(collection, *args, **options)]

    made.store.search = search  # type: ignore[method-assign]
    with pytest.raises(errors.EngineError, match=r"holds record [23], and a search with a filter by its key does not find it"):
        drive(made)
    assert len(made.held()["old"]) == 60
    made.registry.close()


@pytest.mark.parametrize(
    ("records", "few", "stays"),
    [
        (20, 5, False),  # a quarter of one batch
        (20, 6, True),
        (1, 1, True),  # its search finds nothing at all
        (40, 5, False),
        (3, 1, True),  # the search of three gives all there is
    ],
)
def test_records_leave_old_though_an_approximate_index_passes_over_some_in_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, records: int, few: int, stays: bool
) -> None:
    """A search with a filter finds each of a batch. One without may find farther records instead of a quarter of its sample."""
    monkeypatch.setattr("rmvdb.backfill.retire._PATIENCE", (0.0,))
    made = make(tmp_path, records=records, batch=20)
    real, hidden = made.store.search, list(made.source.of)[:few]

    def search(*args: Any, limit: int, **options: Any) -> Any:
        found = real(*args, limit=limit + few, **options)
        return [[hit for hit in hits if options.get("filter") or hit.id not in hidden][:limit] for hits in found]

    made.store.search = search  # type: ignore[method-assign]
    made.store.index = lambda _: Index(type="HNSW")  # type: ignore[method-assign]
    if stays:
        with pytest.raises(errors.EngineError, match=r"a search by its own vector does not find it; the batch stays in"):
            drive(made)
    else:
        drive(made)
    assert bool(made.held()["old"]) == stays
    made.registry.close()


def test_records_stay_once_an_index_passes_over_more_than_one_in_twenty_of_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of ten in each batch: no batch alone would tell."""
    monkeypatch.setattr("rmvdb.backfill.retire._PATIENCE", ())
    made = make(tmp_path, records=200, batch=10)
    real = made.store.search

    def search(*args: Any, limit: int, **options: Any) -> Any:
        found = real(*args, limit=limit + 20, **options)
        return [[hit for hit in hits if options.get("filter") or int(hit.id) % 10 != 3][:limit] for hits in found]

    made.store.search = search  # type: ignore[method-assign]
    made.store.index = lambda _: Index(type="HNSW")  # type: ignore[method-assign]
    with pytest.raises(errors.EngineError, match=r"a search by its own vector does not find it; the batch stays in"):
        drive(made)
    assert 100 <= len(made.held()["old"]) < 200
    made.registry.close()


def test_no_archive_goes_that_alone_holds_records_which_an_earlier_upgrade_had_moved(gallery: Gallery) -> None:
    """The second collection lost records before a third version took over, which never saw them."""
    drive(gallery)
    gallery.store.delete("texts_v2", [1, 2, 12])
    with gallery.client() as client:
        client.delete([7])
    gallery.supersede()
    conductor = gallery.conductor()
    row = conductor.advance(gallery.upgrade, gallery.worker())
    assert row.phase == Phase.CUT_OVER
    with pytest.raises(errors.VerifyFailed, match="has lost 3 records that moved or were written, such as 1;"):
        conductor.clean_up(row)
    kept = {file.name.partition("-")[0] for file in (gallery.archive.folder.path / "texts" / "1").rglob("*.parquet")}
    assert kept == {"1", "2", "3", "4"}
