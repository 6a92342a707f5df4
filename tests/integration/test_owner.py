"""Two registries over one engine: the one that has no right to a gallery stops with a sentence, and nothing is lost."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from pathlib import Path

import pytest

from rmvdb.catalog import galleries
from rmvdb.errors import AlreadyExists, NotOwner, UnknownName, UsageError
from rmvdb.learning.method import Method
from rmvdb.planning.question import Question
from rmvdb.registry import mark, schema
from rmvdb.registry.manifest import Manifest
from rmvdb.registry.mark import Owner, is_mark, mark_of
from rmvdb.registry.registry import Registry
from rmvdb.serving.client import Client
from rmvdb.storage.folders import LocalFolder
from rmvdb.types import Index
from rmvdb.upgrade.rebuild import Rebuild
from tests.support.at_work import at_work
from tests.support.inprocess import DIMS, Crash, drive, make
from tests.support.lost import rebuilding
from tests.support.registries import adopt, another, copied, drive_until_copied, put_back, take
from tests.support.waiting import wait_until


def test_a_collection_of_another_registry_is_not_adopted_and_its_owner_is_named(tmp_path: Path) -> None:
    gallery = make(tmp_path)
    other = another(tmp_path / "other")

    with pytest.raises(NotOwner) as told:
        adopt(other, gallery, "texts_v1")
    for part in ("'texts_v1'", "gallery 'texts'", gallery.registry.shown_url, "host", "UTC", "registry rebuild", "gallery take"):
        assert part in str(told.value)
    assert other.galleries() == []
    with pytest.raises(NotOwner):  # nor what an upgrade fills
        adopt(other, gallery, "texts_v2", "v2")


def test_the_command_that_a_refusal_names_takes_the_collection_whatever_its_gallery_is_called_here(tmp_path: Path) -> None:
    gallery = make(tmp_path, deployed=False)
    Owner(gallery.registry, gallery.store).settle("texts")
    other = another(tmp_path / "other")
    with pytest.raises(NotOwner) as told:
        adopt(other, gallery, "texts_v1", name="mine")
    [named] = re.findall(r"rmvdb gallery take (\w+) --from-lost-registry", str(told.value))
    assert take(gallery, other, name=named) == ["texts_v1"]
    adopt(other, gallery, "texts_v1", name="mine")
    with pytest.raises(NotOwner) as told:  # who had it finds it by the name that it has there
        gallery.client()
    assert "rmvdb gallery take texts " in str(told.value)
    assert take(gallery) == ["texts_v1"]


def test_marks_cannot_be_adopted_and_go_with_their_gallery(tmp_path: Path) -> None:
    gallery = make(tmp_path)
    other = another(tmp_path / "other")
    with pytest.raises(UsageError, match="rmvdb's own"):
        adopt(other, gallery, mark_of("texts_v1"))

    drive(gallery)
    conductor = gallery.conductor()
    conductor.cut_over(gallery.registry.upgrade(gallery.upgrade.id), gallery.worker())
    conductor.clean_up(gallery.registry.upgrade(gallery.upgrade.id))
    assert [name for name in gallery.store.collection_names() if is_mark(name)] == [mark_of("texts_v2")]
    galleries.remove_gallery(gallery.registry, gallery.store, gallery.registry.gallery("texts"), drop=False)
    assert not any(map(is_mark, gallery.store.collection_names()))


def test_a_process_stops_before_it_removes_anything_once_another_registry_took_the_gallery(tmp_path: Path) -> None:
    gallery = make(tmp_path)
    other = another(tmp_path / "other")
    drive_until_copied(gallery)
    before = gallery.held()
    Owner(other, gallery.store).take_over("texts", ["texts_v1", "texts_v2"], lambda: None)

    for step in (
        lambda: drive(gallery),
        lambda: gallery.conductor().advance(gallery.upgrade, gallery.worker()),
        lambda: gallery.conductor().roll_back(gallery.upgrade),
        lambda: gallery.conductor().clean_up(gallery.upgrade),
        gallery.client,
    ):
        with pytest.raises(NotOwner, match="of another registry"):
            step()
    held = gallery.held()
    assert {name: held[name].keys() for name in held} == {name: before[name].keys() for name in before}


def test_a_gallery_is_taken_from_a_registry_that_is_lost_and_not_from_one_that_lives(tmp_path: Path) -> None:
    gallery = make(tmp_path)
    other = another(tmp_path / "other")
    with pytest.raises(UnknownName):
        Rebuild(
            registry=other,
            store=gallery.store,
            archive=gallery.archive,
            manifest=Manifest(LocalFolder(tmp_path / "none")),
            lock=tmp_path / "lock",
            quiet=0.0,
        ).take("nothing")
    with pytest.raises(UsageError, match="is not lost"):
        take(
            gallery,
            other,
            lambda _: Owner(gallery.registry, gallery.store).note("texts", gallery.registry.raise_trace("texts")),
        )

    taken = take(gallery, other)
    assert sorted(taken) == ["texts_v1", "texts_v2"]
    adopt(other, gallery, "texts_v1")
    with pytest.raises(NotOwner, match="of another registry"):
        gallery.client()
    with Client("texts", registry=other, store=gallery.store, loaded_models=gallery.loaded_models) as client:
        assert len(client.search("t1", limit=40)) == 40


def test_a_copy_of_a_living_registry_that_was_killed_while_it_took_a_gallery_is_still_refused(tmp_path: Path) -> None:
    gallery = make(tmp_path)
    backup = copied(gallery)
    drive(gallery)
    put_back(gallery, backup)
    number = gallery.registry.trace("texts").number

    def live(words: str) -> None:
        if words.startswith("waiting"):  # the newer registry goes on
            Owner(gallery.registry, gallery.store)._add("texts_v1", 10_000 + number, gallery="texts", epoch=9)

    def die(_: str) -> None:
        raise Crash

    registry, rebuilt = gallery.registry, gallery.registry.rebuilt
    registry.rebuilt = lambda _: None  # type: ignore[method-assign]
    with pytest.raises(Crash):
        take(gallery, say=die)
    registry.rebuilt = rebuilt  # type: ignore[method-assign]
    with pytest.raises(UsageError, match="is not lost"):
        rebuilding(gallery, say=live).run()
    assert registry.gallery("texts").rebuilding


def test_an_upgrade_takes_no_archive_of_a_lost_registry_for_its_own(tmp_path: Path) -> None:
    gallery = make(tmp_path, records=60, deployed=False)
    assert gallery.conductor().roll_back(gallery.upgrade) is None
    gallery.archive.write("texts", "7", "texts_v1", "1-1", records=list(gallery.records("texts_v1").values()))
    conductor = gallery.conductor()
    question = Question(gallery="texts", from_version="v1", to_version="v2", method=Method.NAIVE, order="random")
    question = conductor.resolve(question)
    row = conductor.begin(question, conductor.plan(question), gallery.worker())
    assert row.id > 7
    assert f"_u{row.id}_" in row.new_collection
    gallery.registry.close()


def test_a_gallery_of_the_same_name_is_another_question(tmp_path: Path) -> None:
    gallery = make(tmp_path, records=60, deployed=False)
    assert gallery.conductor().roll_back(gallery.upgrade) is None
    asked = Question(gallery="texts", from_version="v1", to_version="v2", method=Method.NAIVE, order="random")
    before = gallery.conductor().resolve(asked)
    galleries.remove_gallery(gallery.registry, gallery.store, gallery.registry.gallery("texts"), drop=False)
    adopt(gallery.registry, gallery, "texts_v1")
    assert before.key != gallery.conductor().resolve(asked).key
    gallery.registry.close()


@pytest.mark.parametrize("marked", [True, False])
def test_a_collection_that_is_not_adopted_after_all_keeps_only_the_mark_that_it_had(tmp_path: Path, marked: bool) -> None:
    gallery = make(tmp_path)
    drive(gallery)
    gallery.conductor().advance(gallery.registry.upgrade(gallery.upgrade.id), gallery.worker())
    gallery.conductor().clean_up(gallery.registry.upgrade(gallery.upgrade.id))
    shape = replace(gallery.store.describe("texts_v2"), collection="texts_v1", dim=DIMS["v1"])
    gallery.store.create(shape, Index(type="FLAT"))
    mine = Owner(gallery.registry, gallery.store)
    if marked:
        mine.take("texts", "texts_v1")
    with pytest.raises(AlreadyExists, match=r"'texts_v1' belonged to gallery 'texts' until rmvdb dropped it"):
        adopt(gallery.registry, gallery, "texts_v1", name="fresh")
    assert (mine.read("texts_v1") is not None) == marked
    assert gallery.store.exists("texts_v1")
    gallery.registry.close()


def test_a_mark_that_a_killed_gallery_add_has_left_keeps_nobody_from_taking_the_gallery(tmp_path: Path) -> None:
    gallery = make(tmp_path)
    shape = replace(gallery.store.describe("texts_v1"), collection="texts_v1_e1_abcdef")
    gallery.store.create(shape, Index(type="FLAT"))
    Owner(gallery.registry, gallery.store).take("texts", shape.collection)
    assert "texts_v1" in take(gallery)
    gallery.registry.close()


def test_an_epoch_that_died_before_it_was_written_beside_the_data_is_brought_up_to_date(tmp_path: Path) -> None:
    gallery = make(tmp_path, deployed=False)
    mine = Owner(gallery.registry, gallery.store)
    mine.settle("texts")
    gallery.registry.raise_trace("texts")
    mine.expect("texts")
    mine.settle("texts")
    mark = mine.read("texts_v1")
    assert mark is not None
    assert mark.number == gallery.registry.trace("texts").number == 3


def test_a_rebuilt_registry_goes_on_after_what_the_lost_one_wrote(tmp_path: Path) -> None:
    gallery = make(tmp_path)
    drive(gallery)
    identity, contents = gallery.registry.identity(), gallery.registry.contents()
    number = gallery.registry.trace("texts").number
    new = Registry(f"sqlite:///{tmp_path}/new.sqlite")
    schema.upgrade(f"sqlite:///{tmp_path}/new.sqlite")
    assert new.identity() != identity
    new.restore(contents)
    assert new.identity() == identity
    with pytest.raises(NotOwner, match="has gone back"):
        Owner(new, gallery.store).expect("texts")
    new.catch_up("texts", number=number + mark.BEYOND, epoch=0)
    Owner(new, gallery.store).settle("texts")
    with pytest.raises(NotOwner):  # a client of a copy of the lost one
        Owner(gallery.registry, gallery.store).expect("texts")


def test_verify_looks_whose_the_gallery_is_before_it_reads(tmp_path: Path) -> None:
    gallery = make(tmp_path)
    other = another(tmp_path / "other")
    drive(gallery)
    Owner(other, gallery.store).take_over("texts", ["texts_v1", "texts_v2"], lambda: None)
    read: list[str] = []
    gallery.store.looked = lambda _, collection: read.append(collection)

    row = gallery.registry.upgrade(gallery.upgrade.id)
    for step in (gallery.verify, lambda: gallery.conductor().lost(row)):
        with pytest.raises(NotOwner, match="of another registry"):
            step()
    assert read == []


def test_a_worker_with_nothing_to_do_says_that_another_registry_has_taken_a_gallery(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, however long it waits."""
    gallery = make(tmp_path)
    other = another(tmp_path / "other")
    gallery.conductor().advance(gallery.upgrade, gallery.worker())
    monkeypatch.setattr(mark, "COMPARE_EVERY", 0.5)
    with at_work(gallery) as said:
        time.sleep(2.0)
        assert said == []
        Owner(other, gallery.store).take_over("texts", ["texts_v1", "texts_v2"], lambda: None)
        wait_until(lambda: bool(said))
        time.sleep(2.5)
    assert len(said) == 1
    assert "belongs to gallery 'texts' of another registry" in said[0]


@pytest.mark.parametrize("how", ["stopped", "not lost"])
def test_a_gallery_that_is_not_taken_after_all_goes_on_as_before(tmp_path: Path, how: str) -> None:
    gallery = make(tmp_path)
    owner = Owner(gallery.registry, gallery.store)
    owner.settle("texts")

    def meanwhile(_: str) -> None:
        if how == "stopped":
            raise KeyboardInterrupt
        owner.note("texts", gallery.registry.raise_trace("texts"))

    with pytest.raises(KeyboardInterrupt if how == "stopped" else UsageError):
        take(gallery, say=meanwhile)
    drive(gallery)
    gallery.expect_moved()


def test_a_client_of_a_copied_registry_stops_once_the_original_moves_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It connected before, when both were alike. It found half of the records, and its deletions of moved ones did nothing."""
    monkeypatch.setattr(mark, "COMPARE_EVERY", 0.3)
    gallery = make(tmp_path)
    Owner(gallery.registry, gallery.store).settle("texts")
    original, copy = gallery.registry, Registry(f"sqlite:///{copied(gallery)}")
    gallery.registry = copy
    with gallery.client() as stranded:
        gallery.registry = original
        assert len(stranded.search("t5", limit=100)) == 40
        gallery.worker().run(gallery.task, gallery.backfill, until=0.5)

        def search() -> bool:
            try:
                stranded.search("t5", limit=100)
            except NotOwner:
                return True
            return False

        wait_until(search)
        for call in (lambda: stranded.delete([1]), lambda: stranded.upsert([{"id": 1, "item": "late"}])):
            with pytest.raises(NotOwner, match="has gone back"):
                call()
    with gallery.client() as client:
        assert len(client.search("t5", limit=100)) == 40
        gallery.worker().run(gallery.task, gallery.backfill)  # the trace rises while this client looks
        time.sleep(1.0)
        assert len(client.search("t5", limit=100)) == 40
    copy.close()
