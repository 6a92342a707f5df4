"""The life of a quarantined record: it stays findable, every command that stops at it names the way on, and none loses it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rmvdb.errors import Quarantined, RecordsMissing, WrongPhase
from rmvdb.protocols import always
from rmvdb.registry.tables import UpgradeRow
from rmvdb.types import Phase, Record
from rmvdb.upgrade import complete
from rmvdb.upgrade.lost import Lost
from tests.support.faults import claimed, copied
from tests.support.inprocess import Gallery, crash_at, drive, make, vector
from tests.support.waiting import run_out

NEW, OLD = "texts_v2", "texts_v1"


@pytest.fixture
def gallery(tmp_path: Path) -> Iterator[Gallery]:
    """Forty texts, none of them moved."""
    made = make(tmp_path)
    yield made
    made.registry.close()


def row(gallery: Gallery) -> UpgradeRow:
    return gallery.registry.upgrade(gallery.upgrade.id)


def aside(gallery: Gallery) -> set[str]:
    return {each.record for each in gallery.registry.quarantined(gallery.upgrade.id)}


def put(gallery: Gallery, id: int, text: str, n: int = 0) -> None:
    """Write a record into the old collection, as another program."""
    gallery.store.upsert(OLD, [Record(id=id, vector=vector("v1", text), fields={"n": n})])


def cut_over(gallery: Gallery) -> None:
    assert gallery.conductor().advance(row(gallery), gallery.worker()).phase == Phase.CUT_OVER


def losing_three(gallery: Gallery) -> None:
    """Record 3 was moved, the engine has lost it since, and its item is gone."""
    drive(gallery)
    gallery.store.delete(NEW, [3])
    del gallery.source.of[3]


def test_a_lost_record_whose_item_is_gone_is_findable_in_the_old_collection_and_stops_the_cut_over(gallery: Gallery) -> None:
    losing_three(gallery)
    _, said = gallery.repaired()
    assert aside(gallery) == {"3"}
    assert gallery.held()["old"][3].fields == {"n": 0}
    assert "1 record is quarantined, such as '3' (the source has no item of this id); rmvdb quarantine list" in said[-1]
    with gallery.client() as client:
        assert [hit.id for hit in client.search("t3", limit=40)].count(3) == 1
    with pytest.raises(Quarantined, match="1 record is quarantined, such as '3'"):
        gallery.conductor().advance(row(gallery), gallery.worker())

    gallery.source.of[3] = "t3"
    gallery.registry.release(gallery.upgrade.id, [3], requeue=True)
    cut_over(gallery)
    gallery.expect_moved()


def test_killed_before_it_is_set_aside_it_is_set_aside_by_the_next_worker(gallery: Gallery) -> None:
    losing_three(gallery)
    gallery.registry.put_back(gallery.upgrade.id, gallery.conductor().lost(row(gallery)).archived)
    gallery.store.after = crash_at(2)  # behind the write into the old collection, after that of nothing into the new one
    with pytest.raises(BaseException, match="upsert texts_v1"):
        gallery.backfill.copy(gallery.task, claimed(gallery), always)
    gallery.store.after = lambda *_: None
    run_out(gallery.registry)
    drive(gallery)
    assert aside(gallery) == {"3"}
    assert 3 in gallery.held()["old"]


def test_a_repair_tries_a_quarantined_record_again_and_takes_it_out_of_quarantine(gallery: Gallery) -> None:
    losing_three(gallery)
    gallery.repaired()
    gallery.source.of[3] = "t3"
    lost, _ = gallery.repaired()
    assert list(lost.in_old.values()) == [[3]]
    assert aside(gallery) == set()
    cut_over(gallery)
    gallery.expect_moved()


def test_a_record_in_the_archive_alone_leaves_the_quarantine_as_it_is_put_back(gallery: Gallery) -> None:
    losing_three(gallery)
    gallery.repaired()
    gallery.store.delete(OLD, [3])
    gallery.source.of[3] = "t3"
    lost, _ = gallery.repaired()
    assert list(lost.archived.values()) == [[3]]
    assert aside(gallery) == set()
    assert 3 in gallery.held()["new"]


def test_a_late_record_without_an_item_is_named_by_clean_up_and_moved_once_its_item_is_there(gallery: Gallery) -> None:
    cut_over(gallery)
    put(gallery, 77, "late")
    gallery.repaired()
    for _ in range(2):
        with pytest.raises(WrongPhase, match="some are quarantined: correct their items and run rmvdb verify"):
            gallery.conductor().clean_up(row(gallery))
        lost, said = gallery.repaired()
        assert lost.late == [77]
        assert "1 record is quarantined, such as '77'" in said[-1]
    gallery.source.of[77] = "late"
    gallery.repaired()
    assert (aside(gallery), 77 in gallery.held()["new"]) == (set(), True)
    gallery.conductor().clean_up(row(gallery))


def test_a_record_that_another_program_changed_without_an_item_is_no_stranger_where_it_was_copied(gallery: Gallery) -> None:
    """Else a repair would keep it as a client's write, and the cut-over would drop the change."""
    copied(gallery)
    put(gallery, 3, "changed", n=7)
    del gallery.source.of[3]
    drive(gallery)
    assert aside(gallery) == {"3"}
    assert gallery.conductor().lost(row(gallery)).unexplained.unknown == []
    assert gallery.held()["old"][3].fields == {"n": 7}


@pytest.mark.parametrize(("gone", "accepted"), [(2, False), (6, False), (6, True)])
def test_quarantined_records_that_vanish_in_numbers_are_not_taken_for_deletions(
    gallery: Gallery, gone: int, accepted: bool
) -> None:
    for id in range(1, 7):
        del gallery.source.of[id]
    drive(gallery)
    assert len(aside(gallery)) == 6
    gallery.store.delete(OLD, list(range(1, gone + 1)))
    said: list[str] = []
    conductor = gallery.conductor()
    conductor.say = said.append
    if accepted:
        gallery.registry.set_upgrade(gallery.upgrade.id, plan=replace(row(gallery).plan, accept_missing=True))
    if gone == 6 and not accepted:
        with pytest.raises(
            RecordsMissing, match=r"6 quarantined records are gone, such as 1: no client deleted them\..* --accept-missing"
        ):
            complete.release(conductor, row(gallery))
        assert len(aside(gallery)) == 6
        return
    complete.release(conductor, row(gallery))
    assert len(aside(gallery)) == 6 - gone
    assert any("quarantined records are gone, such as 1" in each for each in said)


def test_an_upgrade_short_of_its_cut_over_releases_what_a_client_deleted(gallery: Gallery) -> None:

    gallery.registry.set_upgrade(gallery.upgrade.id, plan=replace(row(gallery).plan, cutover=False))
    del gallery.source.of[3]
    gallery.conductor().advance(row(gallery), gallery.worker())
    assert aside(gallery) == {"3"}
    with gallery.client() as client:
        client.delete([3])
    assert gallery.conductor().advance(row(gallery), gallery.worker()).phase == Phase.SERVING_BOTH
    assert aside(gallery) == set()


def test_what_a_later_batch_found_deleted_is_not_lost(gallery: Gallery) -> None:
    """Another program put a moved record back, and deleted it while it was moved again."""
    drive(gallery)
    put(gallery, 3, "again")
    gallery.source.of[3] = "again"
    gallery.registry.add_late(gallery.upgrade.id, [3])
    gallery.backfill.copy(gallery.task, claimed(gallery), always)
    gallery.store.delete(OLD, [3])
    drive(gallery)
    del gallery.source.of[3]
    assert 3 not in gallery.held()["new"]
    assert gallery.conductor().lost(row(gallery)) == Lost()
    cut_over(gallery)
    gallery.conductor().clean_up(row(gallery))


def test_dropping_the_quarantine_leaves_what_the_registry_knows_of_a_later_write(gallery: Gallery) -> None:
    """An application wrote record 7 again: its last write still counts, whatever its source says."""
    gallery.source.of |= {7: "broken", 8: "broken"}
    drive(gallery)
    assert aside(gallery) == {"7", "8"}
    with gallery.client() as client:
        client.upsert([{"id": 7, "item": "t7", "n": 1}])
        client.delete_those([7, 8], confirm=lambda ids: [id for id in ids if id == 8])
    assert gallery.registry.last_done(gallery.upgrade.id, [7, 8]) == {"7": "upsert", "8": "delete"}
