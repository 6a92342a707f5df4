"""The new collection and its original are compared, and what differs is put right before the cut-over."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from rmvdb import errors
from rmvdb.registry.codec import unpack_ids
from rmvdb.registry.mark import is_mark
from rmvdb.serving.announced_writes import Writes
from rmvdb.timing import WRITE_LASTS
from rmvdb.types import Phase, Record
from rmvdb.upgrade import complete as completing
from rmvdb.upgrade import keep_original
from tests.support.inprocess import Crash, Gallery, vector
from tests.support.kept_original import ORIGINAL, back, begin, expect_holds, expect_original, foreign, go_on, put
from tests.support.lost import lose, rebuilding
from tests.support.waiting import grow_old


def test_insertions_and_deletions_of_other_programs_in_the_original_are_followed_before_the_cut_over(gallery: Gallery) -> None:
    row = go_on(gallery, begin(gallery, until=0.5))
    batches = gallery.registry.batches(row.id)
    [moved, *_], [waiting, *_] = (unpack_ids(batches[at].ids) for at in (0, -1))
    foreign(gallery, 60)
    for gone in (moved, waiting):
        gallery.store.delete(ORIGINAL, [gone])
        gallery.source.of.pop(gone)
    gallery.registry.set_upgrade(row.id, plan=replace(row.plan, until=1.0, cutover=True))
    row = go_on(gallery, row)
    assert row.phase == Phase.CUT_OVER
    expect_holds(gallery, row.new_collection, "v2")
    expect_original(gallery)


def test_a_record_that_comes_into_the_original_after_the_cut_over_is_not_dropped(gallery: Gallery) -> None:
    row = go_on(gallery, begin(gallery))
    foreign(gallery, 60)
    with pytest.raises(errors.WrongPhase, match=f"1 record came into '{ORIGINAL}' after cut-over"):
        gallery.conductor().clean_up(row)
    assert gallery.store.exists(ORIGINAL)
    assert go_on(gallery, gallery.conductor().roll_back(row)).phase == Phase.CUT_OVER
    expect_original(gallery)


def test_equal_collections_are_found_equal_range_by_range(gallery: Gallery, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by asking for every page of records in every collection: on a server each question waits for its turn."""
    row = go_on(gallery, begin(gallery, until=0.5))
    monkeypatch.setattr("rmvdb.upgrade.copy_collection.RANGE", 15)
    mirror, gets = keep_original.mirror(gallery.conductor(), row), list[str]()
    gallery.store.looked = lambda call, collection: gets.append(collection)
    assert mirror.agree(keep_original.beside(row)) == 0
    assert list(mirror.unknown(keep_original.beside(row))) == []
    assert gets == []
    gallery.store.delete(ORIGINAL, [3, 17, 40])  # one of each range
    gallery.store.upsert(ORIGINAL, [Record(id=id, vector=vector("v1", f"t{id}"), fields={"n": id}) for id in (-1, 90)])
    assert sorted(id for page in mirror.unknown(keep_original.beside(row)) for id in page) == [-1, 90]
    assert mirror.agree(keep_original.beside(row)) == 5
    assert mirror.agree(keep_original.beside(row)) == 0


def test_agreeing_takes_out_nothing_that_a_client_put_back_meanwhile(gallery: Gallery) -> None:
    row = go_on(gallery, begin(gallery, until=1.0))
    gallery.store.delete(ORIGINAL, [2, 3])
    gallery.source.of.pop(3)
    mirror, real, done = keep_original.mirror(gallery.conductor(), row), Writes.announced, threading.Event()

    def announced(self: Writes, kind: str, ids: list[int], **options: object) -> object:
        if kind == "delete" and not done.is_set():
            done.set()
            with gallery.client() as client:
                put(gallery, client, 2, "back again")
        return real(self, kind, ids, **options)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Writes, "announced", announced)
        assert mirror.agree(keep_original.beside(row)) == 1
    expect_holds(gallery, row.new_collection, "v2")
    assert gallery.conductor().verify(gallery.registry.upgrade(row.id)).ok


@pytest.mark.parametrize("written", ["by nobody", "by a client", "by a client, and moved"])
def test_a_record_that_another_program_deletes_and_inserts_again_is_found(gallery: Gallery, written: str) -> None:
    """Though a look at the end of the backfill came between, and took it out of the copy."""
    row = go_on(gallery, begin(gallery, until=0.9 if written != "by a client, and moved" else 1.0 - 1e-9))
    if written != "by nobody":
        with gallery.client() as client:
            put(gallery, client, 2, "written")
    gallery.store.delete(ORIGINAL, [2])
    keep_original.agree(gallery.conductor(), row)
    assert 2 not in gallery.records(*keep_original.beside(row))
    gallery.source.of[2] = "again"
    gallery.store.upsert(ORIGINAL, [Record(id=2, vector=vector("v1", "again"), fields={"n": 5})])
    gallery.registry.set_upgrade(row.id, plan=replace(row.plan, until=1.0, cutover=True))
    row = go_on(gallery, row)
    assert row.phase == Phase.CUT_OVER
    assert gallery.records(row.new_collection)[2].fields == {"n": 5}
    expect_holds(gallery, row.new_collection, "v2")
    gallery.conductor().clean_up(row)


@pytest.mark.parametrize("ending", ["fails", "is killed"])
def test_a_look_that_ends_while_it_takes_a_record_in_forgets_no_deletion(
    gallery: Gallery, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    row = go_on(gallery, begin(gallery, until=0.9))
    gallery.store.delete(ORIGINAL, [2])
    keep_original.agree(gallery.conductor(), row)
    gallery.store.upsert(ORIGINAL, [Record(id=2, vector=vector("v1", "t2"), fields={"n": 2})])

    def die(call: str, _: str) -> None:
        if call == "upsert":
            raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(gallery.store, "before", die)
        if ending == "is killed":
            patch.setattr(type(gallery.registry), "withdraw_intents", lambda *_: None)
        with pytest.raises(Crash):
            keep_original.agree(gallery.conductor(), row)
    gallery.store.delete(ORIGINAL, [2])
    gallery.source.of.pop(2)
    grow_old(gallery.registry, seconds=WRITE_LASTS + 1)  # what it had announced is past its deadline
    gallery.registry.set_upgrade(row.id, plan=replace(row.plan, until=1.0, cutover=True))
    row = go_on(gallery, row)
    assert row.phase == Phase.CUT_OVER
    expect_holds(gallery, row.new_collection, "v2")


def test_a_write_after_an_instant_roll_back_is_not_a_difference(gallery: Gallery) -> None:
    """They write into the original, and what is compared is the copy."""
    row = go_on(gallery, begin(gallery, until=0.5))
    with gallery.client() as client:
        put(gallery, client, 3, "before")
    rolled = back(gallery, row)
    with gallery.client() as client:
        put(gallery, client, 3, "later")
        put(gallery, client, 91, "a new one")
    assert gallery.conductor().verify(gallery.registry.upgrade(rolled.id)).examples == []


def test_after_a_registry_is_lost_behind_the_cut_over_moved_and_written_records_are_not_differences(gallery: Gallery) -> None:
    row = go_on(gallery, begin(gallery))
    with gallery.client() as client:
        put(gallery, client, 3, "written")
        put(gallery, client, 91, "a new one")
    lose(gallery)
    rebuilding(gallery).run()
    report = gallery.conductor().verify(gallery.registry.upgrade(row.id))
    assert (report.records, report.examples) == (41, [])
    back(gallery, row)
    expect_original(gallery)


def test_a_record_that_was_taken_in_again_is_embedded_though_its_look_was_killed_before_it_forgot(
    gallery: Gallery, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = go_on(gallery, begin(gallery, until=0.9))
    gallery.store.delete(ORIGINAL, [2])
    keep_original.agree(gallery.conductor(), row)
    gallery.source.of[2] = "again"
    gallery.store.upsert(ORIGINAL, [Record(id=2, vector=vector("v1", "again"), fields={"n": 5})])

    def die(*_: object, **__: object) -> None:
        raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(gallery.registry, "forget_done", die)
        patch.setattr(type(gallery.registry), "withdraw_intents", lambda *_: None)
        with pytest.raises(Crash):
            keep_original.agree(gallery.conductor(), row)
    grow_old(gallery.registry, seconds=WRITE_LASTS + 1)  # what it had announced is past its deadline
    gallery.registry.set_upgrade(row.id, plan=replace(row.plan, until=1.0, cutover=True))
    row = go_on(gallery, row)
    assert row.phase == Phase.CUT_OVER
    expect_holds(gallery, row.new_collection, "v2")


def test_a_quarantined_record_costs_no_reading_of_the_whole_gallery(gallery: Gallery, monkeypatch: pytest.MonkeyPatch) -> None:
    gallery.source.of[7] = "broken"
    row = begin(gallery)
    with pytest.raises(errors.Quarantined):
        go_on(gallery, row)
    scanned: list[str] = []
    scan = gallery.store.scan
    monkeypatch.setattr(
        gallery.store, "scan", lambda name, *args, **options: scanned.append(name) or scan(name, *args, **options)
    )
    conductor = gallery.conductor()
    completing.release(conductor, gallery.registry.upgrade(row.id))
    assert not [name for name in scanned if not is_mark(name)]

    gallery.store.delete(ORIGINAL, [7])  # by another program
    completing.release(conductor, gallery.registry.upgrade(row.id))
    assert not gallery.registry.quarantined(row.id)
    assert 7 not in gallery.records(*row.old_collections, row.new_collection)
