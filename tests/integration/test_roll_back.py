"""A roll back without the old model's embedder: records written since keep ψ's vector, and are counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sqlalchemy import text

from rmvdb import errors
from rmvdb.learning.method import Method
from rmvdb.planning.question import Question
from rmvdb.registry.codec import pack_ids, unpack_ids
from rmvdb.registry.tables import BatchRow
from rmvdb.types import BatchState, Phase, Record
from rmvdb.upgrade import work_list
from rmvdb.upgrade.context import UpgradeContext
from tests.support.faults import copied, remove
from tests.support.inprocess import Crash, drive, make, vector
from tests.support.kept_original import go_on, put, without_v1


def killed_at_removal(call: str, _: str) -> None:
    if call == "delete":
        raise Crash


def test_a_record_that_another_program_deleted_stays_away_though_the_worker_that_saw_it_was_killed(tmp_path: Path) -> None:
    gallery = make(tmp_path, records=30)
    copied(gallery)
    remove(gallery, 3)
    gallery.store.before = killed_at_removal
    with pytest.raises(Crash):
        drive(gallery)
    gallery.store.before = lambda *_: None
    assert 3 in gallery.records("texts_v2")
    conductor = gallery.conductor()
    back = conductor.roll_back(gallery.registry.upgrade(gallery.upgrade.id))
    assert back is not None
    assert conductor.advance(back, gallery.worker()).phase == Phase.CUT_OVER
    assert gallery.records("texts_v1").keys() == gallery.source.of.keys()
    gallery.registry.close()


@pytest.mark.parametrize("lost", ["some", "all"])
@pytest.mark.parametrize("far", ["half", "all of it", "cut over"])
def test_a_roll_back_puts_back_the_records_that_the_new_collection_has_lost(tmp_path: Path, lost: str, far: str) -> None:
    """The engine has gone back, or another program emptied that collection; what a client deleted stays away."""
    gallery = make(tmp_path, records=30)
    before = gallery.records("texts_v1")
    gallery.worker(width=1).run(gallery.task, gallery.backfill, until=0.5 if far == "half" else 1.0)
    conductor = gallery.conductor()
    if far == "cut over":
        conductor.advance(gallery.upgrade, gallery.worker())
    with gallery.client() as client:
        client.delete([7])
    moved = gallery.records("texts_v2").keys()
    gallery.store.delete("texts_v2", [id for id in moved if lost == "all" or id in (1, 2)])

    back = conductor.roll_back(gallery.registry.upgrade(gallery.upgrade.id))
    assert back is not None
    assert conductor.advance(back, gallery.worker()).phase == Phase.CUT_OVER
    held = gallery.records("texts_v1")
    assert held.keys() == before.keys() - {7}
    for id, record in held.items():
        assert np.array_equal(record.vector, before[id].vector)  # type: ignore[arg-type]
        assert record.fields == before[id].fields
    report = conductor.verify(gallery.registry.upgrade(back.id))
    assert (report.ok, report.missing) == (True, 0)
    gallery.registry.close()


def test_records_that_nothing_holds_any_more_are_named_before_a_roll_back_ends(tmp_path: Path) -> None:
    gallery = make(tmp_path, records=30)
    drive(gallery)
    gallery.store.delete("texts_v2", list(gallery.records("texts_v2")))
    for file in list(gallery.archive.folder.path.rglob("*.parquet"))[:1]:
        file.write_bytes(b"")
    conductor = gallery.conductor()
    back = conductor.roll_back(gallery.registry.upgrade(gallery.upgrade.id))
    assert back is not None
    with pytest.raises(errors.RecordsMissing, match="10 records of the work list are gone"):
        conductor.advance(back, gallery.worker())
    assert len(gallery.records("texts_v1")) == 20
    gallery.registry.close()


def test_writes_that_the_engine_has_lost_are_named_before_a_roll_back_ends(tmp_path: Path) -> None:
    gallery = make(tmp_path, records=30)
    drive(gallery)
    new = range(51, 57)
    with gallery.client() as client:
        client.upsert([{"id": id, "item": f"t{id}"} for id in new])
    gallery.store.delete("texts_v2", list(new)[:5])
    conductor = gallery.conductor()
    back = conductor.roll_back(gallery.registry.upgrade(gallery.upgrade.id))
    assert back is not None
    with gallery.client() as client:
        client.upsert([{"id": 51, "item": "again"}])
    gallery.source.of |= {51: "again", 56: "t56"}
    with pytest.raises(errors.RecordsMissing, match="4 records of the work list are gone, such as 52"):
        conductor.advance(back, gallery.worker())
    assert gallery.records("texts_v1").keys() == {*range(1, 31), 51, 56}
    gallery.registry.close()


def test_a_batch_that_is_decided_while_a_roll_back_is_listed_is_listed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gallery = make(tmp_path, records=30)
    copied(gallery)
    conductor, often = gallery.conductor(), work_list._often

    def decided_since(context: UpgradeContext, upgrade: int) -> Any:
        found = often(context, upgrade)
        row = next(iter(gallery.registry.batches(upgrade, state=BatchState.COPIED)))
        values = {"state": BatchState.REMOVING.value, "remove": row.ids, "gone": pack_ids([]), "id": row.id}
        with gallery.registry.engine.begin() as connection:
            told = text("UPDATE batches SET state = :state, remove = :remove, gone = :gone WHERE id = :id")
            connection.execute(told, values)
        return found

    monkeypatch.setattr(work_list, "_often", decided_since)
    back = conductor.roll_back(gallery.registry.upgrade(gallery.upgrade.id))
    assert back is not None
    assert conductor.advance(back, gallery.worker(width=1)).phase == Phase.CUT_OVER
    ids = [id for row in gallery.registry.batches(back.id) for id in unpack_ids(row.ids)]
    assert len(ids) == len(set(ids)) == 10
    assert gallery.records("texts_v1").keys() == gallery.source.of.keys()
    gallery.registry.close()


def test_a_copied_batch_goes_back_though_its_archive_was_altered(tmp_path: Path) -> None:
    gallery = make(tmp_path, records=30)
    copied(gallery)
    gallery.store.upsert("texts_v1", [Record(id=4, vector=vector("v1", "t4"), fields={"n": 77})])
    before = gallery.records("texts_v1")
    for file in gallery.archive.folder.path.rglob("*.parquet"):
        file.write_bytes(file.read_bytes()[:-1] + b"x")
    conductor = gallery.conductor()
    back = conductor.roll_back(gallery.registry.upgrade(gallery.upgrade.id))
    assert back is not None
    assert conductor.advance(back, gallery.worker()).phase == Phase.CUT_OVER
    held = gallery.records("texts_v1")
    assert held.keys() == before.keys()
    assert all(np.array_equal(held[id].vector, before[id].vector) for id in before)  # type: ignore[arg-type]
    assert held[4].fields["n"] == 77
    assert gallery.records("texts_v2") == {}
    gallery.registry.close()


@pytest.mark.parametrize("moment", ["copied", "removing", "retired"])
def test_changes_of_another_program_in_the_old_collection_stay_after_a_roll_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """One gone, one changed before it had left, or put there again since; a third one is in hand all the same."""
    gallery = make(tmp_path, records=30)
    copied(gallery)
    if moment == "removing":
        gallery.store.before = killed_at_removal
        with pytest.raises(Crash):
            drive(gallery)
        gallery.store.before = lambda *_: None
        assert BatchState.REMOVING in gallery.registry.counts(gallery.upgrade.id)
    elif moment == "retired":
        drive(gallery)
    else:
        remove(gallery, 3)
    gallery.source.of[4] = "other"
    gallery.store.upsert("texts_v1", [Record(id=4, vector=vector("v1", "other"), fields={"n": 77})])
    conductor = gallery.conductor()
    back = conductor.roll_back(gallery.registry.upgrade(gallery.upgrade.id))
    assert back is not None
    if moment == "copied":  # nothing has to be embedded for it
        monkeypatch.setattr(gallery.loaded_models, "_load_embedder", without_v1)
    assert conductor.advance(back, gallery.worker()).phase == Phase.CUT_OVER
    held = gallery.records("texts_v1")
    assert held.keys() == gallery.source.of.keys()
    assert {id: record.fields["n"] for id, record in held.items() if record.fields["n"]} == {4: 77}
    assert all(np.allclose(held[id].vector, vector("v1", text)) for id, text in gallery.source.of.items())  # type: ignore[arg-type]
    assert gallery.records("texts_v2") == {}
    gallery.registry.close()


def test_written_records_keep_the_vector_of_psi_and_all_others_their_own(tmp_path: Path) -> None:
    gallery = make(tmp_path, records=200, deployed=False)
    assert gallery.conductor().roll_back(gallery.upgrade) is None
    before = gallery.records("texts_v1")
    conductor = gallery.conductor()
    question = conductor.resolve(Question(gallery="texts", from_version="v1", to_version="v2", method=Method.RQT, order="random"))
    row = go_on(gallery, conductor.begin(question, conductor.plan(question), gallery.worker(), until=0.5, cutover=False))
    (psi,) = gallery.registry.plan("texts").legs[1].transforms
    gallery.loaded_models._load_embedder = without_v1
    gallery.loaded_models._loaded.pop(("Embedder", "v1"), None)
    moved = next(iter(gallery.records(row.new_collection)))
    still = next(iter(gallery.records("texts_v1")))
    said = list[str]()
    with gallery.client() as client:
        put(gallery, client, moved, "written where it had moved to")
        put(gallery, client, 300, "new")
        client.delete([still])
        conductor = gallery.conductor()
        conductor.say = said.append
        back = conductor.roll_back(gallery.registry.upgrade(row.id))
        assert back is not None
        assert conductor.advance(back, gallery.worker()).phase == Phase.CUT_OVER
        assert client.plan.embedders == ("v2",)
        assert client.search("new", limit=1)[0].id == 300
    held = gallery.records("texts_v1")
    assert held.keys() == (before.keys() | {300}) - {still}
    for id, item in ((moved, "written where it had moved to"), (300, "new")):
        assert np.allclose(held[id].vector, gallery.loaded_models.apply([psi], vector("v2", item)[None])[0], atol=1e-6)  # type: ignore[arg-type]
    assert all(np.array_equal(held[id].vector, before[id].vector) for id in held.keys() - {moved, 300})  # type: ignore[arg-type]
    assert said[-1] == "2 records written since keep ψ's vector"
    gallery.registry.close()


def test_a_record_that_was_left_in_place_and_is_missing_there_goes_back_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gallery = make(tmp_path, records=30)
    drive(gallery)
    gallery.store.upsert("texts_v1", [Record(id=4, vector=vector("v1", "t4"), fields={"n": 77})])
    conductor = gallery.conductor()
    back = conductor.roll_back(gallery.registry.upgrade(gallery.upgrade.id))
    assert back is not None
    real = gallery.registry.copied

    def then_it_is_gone(batch: BatchRow, **values: Any) -> None:
        real(batch, **values)
        if 4 in unpack_ids(batch.ids):
            monkeypatch.undo()
            gallery.store.delete("texts_v1", [4])

    monkeypatch.setattr(gallery.registry, "copied", then_it_is_gone)
    assert conductor.advance(back, gallery.worker()).phase == Phase.CUT_OVER
    assert gallery.records("texts_v1").keys() == gallery.source.of.keys()
    assert gallery.records("texts_v2") == {}
    gallery.registry.close()


def test_psi_stands_in_for_nothing_that_only_an_archive_could_give_back(tmp_path: Path) -> None:
    gallery = make(tmp_path, records=200, deployed=False)
    conductor = gallery.conductor()
    assert conductor.roll_back(gallery.upgrade) is None
    question = conductor.resolve(Question(gallery="texts", from_version="v1", to_version="v2", method=Method.RQT, order="random"))
    row = go_on(gallery, conductor.begin(question, conductor.plan(question), gallery.worker()))
    for file in gallery.archive.folder.path.rglob("*.parquet"):
        file.write_bytes(file.read_bytes()[:-1] + b"x")
    gallery.loaded_models._load_embedder = without_v1
    gallery.loaded_models._loaded.clear()
    back = conductor.roll_back(row)
    assert back is not None
    with pytest.raises(errors.ArtifactError, match="was altered"):
        conductor.advance(back, gallery.worker())
    gallery.registry.close()


@pytest.mark.parametrize("copied_again", [False, True])
def test_a_record_that_a_repair_was_putting_back_returns_to_the_old_collection(tmp_path: Path, copied_again: bool) -> None:
    gallery = make(tmp_path, records=30)
    drive(gallery)
    gallery.store.delete("texts_v2", [3])
    lost = gallery.conductor().lost(gallery.registry.upgrade(gallery.upgrade.id))
    gallery.registry.put_back(gallery.upgrade.id, lost.archived)  # the repair ends here
    if copied_again:
        batch = gallery.registry.claim(gallery.upgrade.id, "w", lease=60.0, grace=1e6, copy=True)
        assert batch is not None
        gallery.backfill.copy(gallery.task, batch, lambda: None)
        assert 3 in gallery.records("texts_v2")
    conductor = gallery.conductor()
    back = conductor.roll_back(gallery.registry.upgrade(gallery.upgrade.id))
    assert back is not None
    assert conductor.advance(back, gallery.worker()).phase == Phase.CUT_OVER
    held = gallery.records("texts_v1")
    assert held.keys() == gallery.source.of.keys()
    assert np.allclose(held[3].vector, vector("v1", "t3"), atol=1e-6)  # type: ignore[arg-type]
    gallery.registry.close()


def test_a_forgotten_write_of_a_moved_record_returns_with_its_fields_and_the_vector_of_its_item(tmp_path: Path) -> None:
    gallery = make(tmp_path, records=30)
    gallery.worker(width=1).run(gallery.task, gallery.backfill, until=0.5)
    other, same, gone, *_ = gallery.records("texts_v2")
    before = gallery.records("texts_v1").keys()
    with gallery.client() as client:
        gallery.source.of[other] = "another"
        client.upsert([{"id": other, "item": "another", "n": 1_001}, {"id": same, "item": f"t{same}", "n": 1_002}])
        client.upsert([{"id": gone, "item": "without a source", "n": 1_003}])
    del gallery.source.of[gone]
    with gallery.registry.engine.begin() as connection:
        connection.execute(text("DELETE FROM intents"))
    conductor = gallery.conductor()
    back = conductor.roll_back(gallery.registry.upgrade(gallery.upgrade.id))
    assert back is not None
    assert conductor.advance(back, gallery.worker()).phase == Phase.CUT_OVER
    held = gallery.records("texts_v1")
    assert before | {other, same, gone} <= held.keys() == {*gallery.source.of, gone}
    assert [held[id].fields["n"] for id in (other, same, gone)] == [1_001, 1_002, 1_003]
    for id, item in ((other, "another"), (same, f"t{same}"), (gone, f"t{gone}")):  # nothing else can be had for the last
        assert np.allclose(held[id].vector, vector("v1", item), atol=1e-6), id  # type: ignore[arg-type]
    gallery.registry.close()


@pytest.mark.parametrize("far", [0.5, 0.0])
def test_a_forgotten_write_leaves_no_vector_of_psi_in_the_place_of_the_old_models(tmp_path: Path, far: float) -> None:
    """A write leaves ψ's vector in an old collection that still has the record. A registry that went back knows no such write.

    The record moved later, with ψ's vector in the archive, or it never moved.
    """
    gallery = make(tmp_path, records=200, deployed=False)
    assert gallery.conductor().roll_back(gallery.upgrade) is None
    conductor = gallery.conductor()
    question = conductor.resolve(Question(gallery="texts", from_version="v1", to_version="v2", method=Method.RQT, order="random"))
    row = go_on(gallery, conductor.begin(question, conductor.plan(question), gallery.worker(), until=0.01, cutover=False))
    still = list(gallery.records("texts_v1"))[:20]
    with gallery.client() as client:
        for id in still:
            put(gallery, client, id, f"other {id}")
    held = gallery.records("texts_v1")
    assert not any(np.allclose(held[id].vector, vector("v1", f"other {id}"), atol=0.1) for id in still)  # type: ignore[arg-type]
    with gallery.registry.engine.begin() as connection:
        connection.execute(text("DELETE FROM intents"))
    if far:
        gallery.worker(width=1).run(conductor.task(row), gallery.backfill, until=far)
    back = conductor.roll_back(gallery.registry.upgrade(row.id))
    assert back is not None
    assert conductor.advance(back, gallery.worker()).phase == Phase.CUT_OVER
    held = gallery.records("texts_v1")
    assert held.keys() == gallery.source.of.keys()
    for id, item in gallery.source.of.items():
        assert np.allclose(held[id].vector, vector("v1", item), atol=1e-6), (id, item)  # type: ignore[arg-type]
    gallery.registry.close()
