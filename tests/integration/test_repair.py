"""`rmvdb verify --repair`: lost records come back from whatever still holds them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from rmvdb.catalog.galleries import remove_gallery
from rmvdb.errors import CollectionMissing, Stopped, WrongPhase
from rmvdb.learning.method import Method
from rmvdb.registry.codec import unpack_ids
from rmvdb.registry.mark import mark_of
from rmvdb.registry.tables import UpgradeRow
from rmvdb.types import Field, Id, Index, Phase, Record
from rmvdb.upgrade.lost import Lost
from tests.support.inprocess import Gallery, drive, make, vector
from tests.support.kept_original import begin, go_on

NEW, OLD = "texts_v2", "texts_v1"


@pytest.fixture
def gallery(tmp_path: Path) -> Iterator[Gallery]:
    """Forty texts, each with a field of its own, all of them moved."""
    made = make(tmp_path)
    made.store.upsert(OLD, [Record(id=id, vector=vector("v1", text), fields={"n": id}) for id, text in made.source.of.items()])
    drive(made)
    yield made
    made.registry.close()


def row(gallery: Gallery) -> UpgradeRow:
    return gallery.registry.upgrade(gallery.upgrade.id)


def lose_the_archive(gallery: Gallery) -> None:
    """Alter the files of the archive."""
    for path in gallery.archive.folder.path.rglob("*.parquet"):
        path.write_bytes(b"damaged")


def ids(by_batch: dict[int, list[Id]]) -> list[Id]:
    return sorted(id for some in by_batch.values() for id in some)


def expect_whole(gallery: Gallery) -> None:
    """Expect that nothing is lost any more, and that the upgrade ends."""
    assert gallery.verify().problems == 0
    assert gallery.conductor().lost(row(gallery)) == Lost()
    assert gallery.conductor().advance(row(gallery), gallery.worker()).phase == Phase.CUT_OVER
    gallery.expect_moved()


@pytest.mark.parametrize("archive", ["whole", "damaged"])
def test_a_record_that_an_old_collection_holds_is_moved_again_from_there(gallery: Gallery, archive: str) -> None:
    """As after the engine went back: what left the old collection is there again, and what was copied is not."""
    gallery.store.upsert(OLD, [Record(id=id, vector=vector("v1", f"t{id}"), fields={"n": id}) for id in (3, 4)])
    gallery.store.delete(NEW, [3, 4])
    if archive == "damaged":
        lose_the_archive(gallery)
    lost, said = gallery.repaired()
    assert ids(lost.in_old) == [3, 4]
    assert (lost.archived, lost.in_source, lost.for_good) == ({}, [], [])
    assert "2 records were moved and lost since; putting back from the old collection" in said
    assert {id: gallery.held()["new"][id].fields for id in (3, 4)} == {3: {"n": 3}, 4: {"n": 4}}
    expect_whole(gallery)


@pytest.mark.parametrize("engine", ["dropped", "went back"])
def test_a_collection_that_is_gone_is_made_again_and_what_was_moved_there_put_back(tmp_path: Path, engine: str) -> None:
    """Another program dropped it, or the engine is what it was before the upgrade was deployed."""
    gallery = make(tmp_path)
    before = list(gallery.records(OLD).values())
    gallery.worker().run(gallery.task, gallery.backfill, until=0.5)
    gallery.store.drop(NEW)
    if engine == "went back":
        gallery.store.drop(mark_of(NEW))
        gallery.store.upsert(OLD, before)

    conductor = gallery.conductor()
    with pytest.raises(CollectionMissing, match="rmvdb verify --repair makes it again"):
        conductor.advance(row(gallery), gallery.worker())
    assert conductor.missing_collections(row(gallery)) == [NEW]
    conductor.make_again(row(gallery))
    assert conductor.missing_collections(row(gallery)) == []
    lost, _ = gallery.repaired()
    assert len(ids(lost.in_old if engine == "went back" else lost.archived)) == 20
    expect_whole(gallery)
    gallery.registry.close()


def test_a_record_of_which_only_the_item_is_left_is_restored_without_fields_and_named(gallery: Gallery) -> None:
    gallery.store.delete(NEW, [3, 4])
    lose_the_archive(gallery)
    del gallery.source.of[4]
    lost, said = gallery.repaired()
    assert (lost.in_source, lost.for_good) == ([3], [4])
    assert "1 record was restored from the source, without the fields that nothing holds any more: 3" in said
    held = gallery.held()["new"]
    assert held[3].vector == pytest.approx(vector("v2", "t3"), abs=1e-6)
    assert held[3].fields == {}
    assert 4 not in held


def test_a_restored_item_counts_as_a_write_that_verification_believes(gallery: Gallery) -> None:
    gallery.store.delete(NEW, [3])
    lose_the_archive(gallery)
    gallery.repaired()
    expect_whole(gallery)


def test_a_write_of_a_client_that_the_engine_has_lost_is_restored_and_not_taken_for_a_deletion(gallery: Gallery) -> None:
    """The engine is from before it; of a record that the source has forgotten too, nothing is left to restore."""
    gallery.source.of |= {3: "newer", 77: "inserted"}
    with gallery.client() as client:
        client.upsert([{"id": id, "item": item, "n": id} for id, item in ((3, "newer"), (77, "inserted"), (78, "forgotten"))])
        client.delete([5])
    gallery.store.delete(NEW, [3, 77, 78])
    lost, said = gallery.repaired()
    assert (lost.in_source, lost.unexplained.absent) == ([3, 77], [78])
    assert "1 record that rmvdb wrote is in no collection, and taken for deleted: 78" in said
    assert gallery.held()["new"][3].vector == pytest.approx(vector("v2", "newer"), abs=1e-6)
    del gallery.source.of[5]
    expect_whole(gallery)


def test_a_moved_record_whose_only_write_the_registry_has_forgotten_is_kept_as_it_was_written(gallery: Gallery) -> None:
    gallery.source.of[3] = "newer"
    with gallery.client() as client:
        client.upsert([{"id": 3, "item": "newer", "n": 333}])
    with gallery.registry.engine.begin() as connection:
        connection.exec_driver_sql("DELETE FROM intents")
    lost, said = gallery.repaired()
    assert lost.unexplained.changed == [3]
    assert "1 record differs from what rmvdb last wrote, and the difference is kept: 3" in said
    assert gallery.held()["new"][3].fields["n"] == 333
    expect_whole(gallery)


def test_a_deletion_since_the_look_is_not_undone_by_what_the_look_found(gallery: Gallery) -> None:
    gallery.store.upsert(NEW, [Record(id=3, vector=vector("v2", "theirs"), fields={"n": 33})])
    conductor = gallery.conductor()
    lost = conductor.lost(row(gallery))
    assert lost.unexplained.changed == [3]
    with gallery.client() as client:
        client.delete([3])
    del gallery.source.of[3]
    conductor.repair(row(gallery), lost, gallery.worker())
    assert conductor.lost(row(gallery)).in_source == []
    assert 3 not in gallery.held()["new"]
    expect_whole(gallery)


def test_a_broken_item_keeps_no_other_record_from_being_restored(gallery: Gallery) -> None:
    gallery.store.delete(NEW, [3, 4, 5])
    lose_the_archive(gallery)
    gallery.source.of[4] = "broken"
    lost, said = gallery.repaired()
    assert sorted(map(int, lost.in_source)) == [3, 4, 5]
    assert any(each.startswith("record 4 is still lost: ") for each in said)
    assert gallery.held()["new"].keys() == gallery.source.of.keys() - {4}


def test_a_record_that_a_client_wrote_or_deleted_since_the_look_is_left_alone(gallery: Gallery) -> None:
    gallery.store.delete(NEW, [3, 4])
    lose_the_archive(gallery)
    conductor = gallery.conductor()
    lost = conductor.lost(row(gallery))
    gallery.source.of[3] = "newer"
    with gallery.client() as client:
        client.upsert([{"id": 3, "item": "newer", "n": 33}])
        client.delete([4])
    del gallery.source.of[4]
    conductor.repair(row(gallery), lost, gallery.worker())
    assert gallery.held()["new"][3].fields == {"n": 33}
    expect_whole(gallery)


def test_a_record_that_a_client_wrote_since_the_look_keeps_no_other_from_being_restored(gallery: Gallery) -> None:
    gallery.store.delete(NEW, [3, 4])
    lose_the_archive(gallery)
    conductor = gallery.conductor()
    lost = conductor.lost(row(gallery))
    gallery.source.of[3] = "newer"
    with gallery.client() as client:
        client.upsert([{"id": 3, "item": "newer", "n": 33}])
    conductor.repair(row(gallery), lost, gallery.worker())
    held = gallery.held()["new"]
    assert held[3].fields == {"n": 33}
    assert held[4].vector == pytest.approx(vector("v2", "t4"), abs=1e-6)
    expect_whole(gallery)


def test_a_collection_that_takes_no_record_without_fields_gets_none(gallery: Gallery) -> None:
    shape = gallery.store._collection(NEW).schema
    object.__setattr__(shape, "fields", (Field(name="n", type="INT64"),))
    gallery.store.delete(NEW, [3])
    lose_the_archive(gallery)
    lost, _ = gallery.repaired()
    assert (lost.in_source, lost.for_good) == ([], [3])


@pytest.mark.parametrize("method", [Method.NAIVE, Method.FCT])
def test_a_record_that_only_the_original_holds_comes_from_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: Method
) -> None:
    """Its archive file is damaged; the original that is kept for an instant roll back has it whole."""
    monkeypatch.setattr("rmvdb.planning.trial.LEAST_PAIRS", 20)
    gallery = make(tmp_path, deployed=False)
    gallery.conductor().roll_back(gallery.upgrade)
    gallery.upgrade = go_on(gallery, begin(gallery, until=0.9, method=method))
    batch = gallery.registry.batches(gallery.upgrade.id)[0]
    moved = sorted(map(int, unpack_ids(batch.ids)))[:2]
    gallery.store.delete(gallery.upgrade.new_collection, moved)
    lose_the_archive(gallery)
    lost, said = gallery.repaired()
    assert sorted(map(int, lost.in_original)) == moved
    assert "2 records were moved and lost since; putting back from the original" in said
    held = gallery.records(gallery.upgrade.new_collection)
    assert all(held[id].vector == pytest.approx(vector("v2", f"t{id}"), abs=1e-6) for id in moved)
    assert all(held[id].fields == {"n": 0} for id in moved)
    assert gallery.verify().problems == 0
    gallery.registry.close()


def test_records_that_an_engine_which_went_back_holds_twice_are_moved_again_and_can_be_cleaned_up(gallery: Gallery) -> None:
    """The backup is from when these were copied and had not left. One was written since, another one deleted."""
    with gallery.client() as client:
        gallery.source.of[3] = "newer"
        client.upsert([{"id": 3, "item": "newer", "n": 30}])
        client.delete([9])
        del gallery.source.of[9]
    assert gallery.conductor().advance(row(gallery), gallery.worker()).phase == Phase.CUT_OVER
    gallery.store.upsert(OLD, [Record(id=id, vector=vector("v1", f"t{id}"), fields={"n": id}) for id in (3, 4, 9)])

    with pytest.raises(WrongPhase, match="3 records came into 'texts_v1' after cut-over; rmvdb verify --repair moves them, then"):
        gallery.conductor().clean_up(row(gallery))
    lost, said = gallery.repaired()
    assert lost == Lost(late=[3, 4, 9])
    assert "3 records came into texts_v1 since the cut-over, and will be moved, too" in said
    assert {id: gallery.held()["new"][id].fields for id in (3, 4)} == {3: {"n": 30}, 4: {"n": 4}}
    expect_whole(gallery)
    gallery.conductor().clean_up(row(gallery))
    assert not gallery.store.exists(OLD)


def test_after_a_roll_back_a_record_that_is_moved_again_keeps_a_vector_that_v1_would_not_make_today(tmp_path: Path) -> None:
    gallery, odd = make(tmp_path), np.roll(vector("v1", "t3"), 1)
    gallery.store.upsert(OLD, [Record(id=3, vector=odd, fields={"n": 3})])
    drive(gallery)
    conductor = gallery.conductor()
    back = conductor.roll_back(conductor.advance(row(gallery), gallery.worker()))
    assert back is not None
    back = conductor.advance(back, gallery.worker())
    gallery.store.upsert(NEW, [Record(id=id, vector=vector("v2", f"t{id}"), fields={"n": id}) for id in (3, 5)])

    lost = conductor.lost(back)
    assert lost == Lost(late=[3, 5])
    conductor.repair(back, lost, gallery.worker())
    assert gallery.records(OLD)[3].vector == pytest.approx(odd, abs=1e-6)
    assert conductor.verify(back).problems == 0
    conductor.clean_up(back)
    assert not gallery.store.exists(NEW)
    gallery.registry.close()


def test_late_records_come_in_batches_of_the_usual_size(gallery: Gallery) -> None:
    """Forty at once would need the memory of forty; the conductor's batches have ten."""
    assert gallery.conductor().advance(row(gallery), gallery.worker()).phase == Phase.CUT_OVER
    texts = {1000 + at: f"late {at}" for at in range(35)}
    gallery.source.of.update(texts)
    gallery.store.upsert(OLD, [Record(id=id, vector=vector("v1", text), fields={"n": id}) for id, text in texts.items()])
    before = gallery.registry.batches(gallery.upgrade.id)[-1].id
    lost, _ = gallery.repaired()
    assert sorted(lost.late) == sorted(texts)
    made = gallery.registry.batches(gallery.upgrade.id, after=before)
    assert [len(unpack_ids(batch.ids)) for batch in made] == [10, 10, 10, 5]
    assert set(texts) <= gallery.records(NEW).keys()


def test_a_repair_that_is_stopped_says_so_and_does_not_go_on_to_verify(gallery: Gallery) -> None:
    gallery.store.upsert(OLD, [Record(id=3, vector=vector("v1", "t3"), fields={"n": 3})])
    gallery.store.delete(NEW, [3])
    conductor = gallery.conductor()
    lost = conductor.lost(row(gallery))
    gallery.store.before = lambda *_: conductor.stop.set()
    with pytest.raises(Stopped):
        conductor.repair(row(gallery), lost, gallery.worker())
    gallery.store.before = lambda *_: None
    gallery.repaired()
    expect_whole(gallery)


def test_a_clean_up_that_is_run_again_leaves_what_another_program_made_meanwhile(
    gallery: Gallery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first run dropped the old collection, and ended before it had removed the archive."""
    assert gallery.conductor().advance(row(gallery), gallery.worker()).phase == Phase.CUT_OVER
    schema = gallery.store.describe(OLD)
    with monkeypatch.context() as patched:
        patched.setattr(gallery.archive, "clear", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            gallery.conductor().clean_up(row(gallery))
    assert not gallery.store.exists(OLD)
    gallery.store.create(schema, Index(type="FLAT"))
    gallery.store.upsert(OLD, [Record(id=1, vector=vector("v1", "theirs"), fields={"n": 1})])
    gallery.conductor().clean_up(row(gallery))
    assert row(gallery).phase == Phase.ENDED
    assert gallery.store.count(OLD) == 1
    remove_gallery(gallery.registry, gallery.store, gallery.registry.gallery("texts"), drop=True)
    assert gallery.store.count(OLD) == 1
