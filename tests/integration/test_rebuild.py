"""The registry is lost in the middle of an upgrade, at every point there is, and brought back."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import text as statement

from rmvdb import errors
from rmvdb.registry.mark import Owner
from rmvdb.storage.folders import LocalFolder
from rmvdb.types import BatchState, Index, Phase, Record
from rmvdb.upgrade import leadership
from rmvdb.upgrade.status import status
from tests.support.inprocess import DIMS, Crash, Gallery, drive, make, vector
from tests.support.lost import (
    UNTOUCHED,
    crash,
    expect,
    go_on,
    lose,
    lost_before_a_write,
    lost_in_a_roll_back,
    rebuilding,
    roll_back,
    rolled_back_after_a_loss,
    with_odd_vectors,
    write,
)
from tests.support.registries import adopt, another
from tests.support.waiting import wait_until


@pytest.fixture
def gallery(tmp_path: Path) -> Iterator[Gallery]:
    """Forty texts, both collections served, four batches listed."""
    made = with_odd_vectors(tmp_path)
    yield made
    made.registry.close()


# --- what is to be had ---------------------------------------------------------------------------------------------------


def test_an_older_copy_of_the_database_does_not_forget_what_the_newer_one_had_served(tmp_path: Path) -> None:
    made = make(tmp_path, deployed=False)
    made.registry.close()
    copy = (tmp_path / "registry.sqlite").read_bytes()
    go_on(made)
    newer = (tmp_path / "manifest.json").read_bytes()
    made.registry.close()
    lose(made)
    (tmp_path / "registry.sqlite").write_bytes(copy)
    with pytest.raises(errors.RegistryError, match=r"The registry is an older copy: .* put the newer database back"):
        made.registry.set_upgrade(made.upgrade.id, note="anything, such as a worker that begins")
    assert (tmp_path / "manifest.json").read_bytes() == newer
    made.registry.close()
    lose(made)
    rebuilding(made).run()
    assert [leg.collection for leg in made.registry.plan("texts").legs] == ["texts_v2"]
    made.registry.close()


def test_a_manifest_of_before_the_upgrade_was_deployed_loses_no_record(tmp_path: Path) -> None:
    made = make(tmp_path, deployed=False)
    older = (tmp_path / "manifest.json").read_bytes()
    made.conductor().deploy(made.upgrade)
    drive(made)
    lose(made)
    (tmp_path / "manifest.json").write_bytes(older)
    rebuilding(made).run()
    with made.client() as client:
        assert [leg.collection for leg in client.plan.legs] == ["texts_v2", "texts_v1"]
        assert [hit.id for hit in client.search("t3", limit=1)] == [3]
        assert client.count() == 40
    roll_back(made)
    expect(made, UNTOUCHED, "v1", odd={})
    made.registry.close()


def test_a_process_that_was_suspended_across_the_loss_takes_no_other_write_or_claim_for_its_own(gallery: Gallery) -> None:
    write = gallery.registry.open_intents("texts", "upsert", [3], client="suspended", lasting=60.0)
    batch = gallery.registry.claim(gallery.upgrade.id, "suspended", lease=60.0, grace=0.0, copy=True)
    assert write is not None
    assert batch is not None
    lose(gallery)
    time.sleep(1.0)  # of the 30 s and more that are waited
    rebuilding(gallery).run()
    another = gallery.registry.open_intents("texts", "upsert", [5], client="another", lasting=60.0)
    gallery.conductor().list_work(gallery.registry.upgrade(gallery.upgrade.id))
    taken = gallery.registry.claim(gallery.upgrade.id, "another", lease=60.0, grace=0.0, copy=True)
    assert another is not None
    assert taken is not None
    assert (another.intents, taken.id) == (write.intents, batch.id)

    gallery.registry.close_intents(write, {write.intents[0]: b"0"})
    gallery.registry.withdraw_intents(write)
    assert not gallery.registry.extend_intents(write, lasting=1.0)
    assert [(row.record, row.done, row.sketch) for row in gallery.registry.written(gallery.upgrade.id)] == [("5", False, None)]
    with pytest.raises(errors.LeaseLost):
        gallery.registry.copied(batch, requeue=[], aside={})


def test_a_manifest_of_before_clean_up_serves_what_is_there(gallery: Gallery) -> None:
    older = (gallery.folder / "manifest.json").read_bytes()
    go_on(gallery)
    gallery.conductor().clean_up(gallery.registry.upgrade(gallery.upgrade.id))
    lose(gallery)
    (gallery.folder / "manifest.json").write_bytes(older)
    rebuilding(gallery).run()
    with gallery.client() as client:
        assert [hit.id for hit in client.search("t3", limit=1)] == [3]
    gallery.conductor().clean_up(gallery.registry.upgrade(gallery.upgrade.id))
    assert gallery.registry.active_upgrade(gallery.upgrade.gallery_id) is None


def test_a_manifest_whose_collections_are_no_more_is_refused_by_name(gallery: Gallery) -> None:
    lose(gallery)
    gallery.store.drop("texts_v2")
    for _ in range(2):  # nothing is served by halves in between
        with pytest.raises(errors.RegistryError, match=r"'texts' was served from 'texts_v2' when .* put a later manifest back"):
            rebuilding(gallery).run()


def test_a_collection_that_was_given_up_stays_if_it_holds_records(tmp_path: Path) -> None:
    made = make(tmp_path, deployed=False)
    made.store.upsert("texts_v2", [Record(id=1, vector=vector("v2", "t1"), fields={})])
    assert made.conductor().roll_back(made.upgrade) is None
    assert made.store.count("texts_v2") == 1
    made.registry.close()


@pytest.mark.parametrize("marked", [True, False], ids=["another registry", "a program without marks"])
def test_an_empty_collection_of_another_owner_that_took_the_name_stays(tmp_path: Path, marked: bool) -> None:
    made = make(tmp_path, deployed=False)
    made.registry.set_upgrade(made.upgrade.id, new_collection="theirs")
    made.registry.abandon(made.upgrade.id, note="given up, then killed")
    made.store.create(replace(made.store.describe("texts_v1"), collection="theirs"), Index(type="FLAT"))
    if marked:
        Owner(another(tmp_path / "other"), made.store).take("texts", "theirs")
    said = list[str]()
    conductor = made.conductor()
    conductor.say = said.append
    assert conductor.drop_given_up() == []
    assert made.store.exists("theirs")
    assert said == ([] if marked else ["theirs stays: it may be another program's; drop it if nothing uses it"])


def test_a_collection_that_was_given_up_stays_if_another_gallery_has_one_of_its_name_by_now(tmp_path: Path) -> None:
    made = make(tmp_path, deployed=False)
    assert made.conductor().roll_back(made.upgrade) is None
    made.store.create(replace(made.store.describe("texts_v1"), collection="texts_v2", dim=DIMS["v2"]), Index(type="FLAT"))
    with made.registry.engine.begin() as connection:
        connection.execute(statement("DELETE FROM collections WHERE name = 'texts_v2'"))  # as rmvdb gc does after an hour
    adopt(made.registry, made, "texts_v2", "v2", name="fresh")
    assert made.conductor().drop_given_up() == []
    assert made.store.exists("texts_v2")
    made.registry.close()


# --- at a few points of those of test_rebuild_points.py ------------------------------------------------------------------


@pytest.mark.parametrize("number", [4, 9])
def test_lost_before_any_write_of_a_worker_every_record_and_every_clients_write_is_there_in_the_end(
    gallery: Gallery, number: int
) -> None:
    lost_before_a_write(gallery, number)


@pytest.mark.parametrize("number", [8])
def test_a_roll_back_after_a_loss_gives_what_the_records_were_and_the_writes_since(gallery: Gallery, number: int) -> None:
    rolled_back_after_a_loss(gallery, number)


@pytest.mark.parametrize("number", [3, 6])
def test_lost_in_the_middle_of_a_roll_back_it_goes_on_to_the_old_model(gallery: Gallery, number: int) -> None:
    lost_in_a_roll_back(gallery, number)


def test_lost_after_the_last_record_was_moved_it_is_cut_over(gallery: Gallery) -> None:
    gallery.registry.set_upgrade(gallery.upgrade.id, order="cluster")  # which learns from what is left
    drive(gallery)
    lose(gallery)
    rebuilding(gallery).run()
    go_on(gallery)
    expect(gallery, UNTOUCHED, "v2")


def test_lost_after_the_cut_over_it_can_be_verified_rolled_back_and_cleaned_up(gallery: Gallery) -> None:
    go_on(gallery)
    lose(gallery)
    rebuilding(gallery).run()
    row = gallery.registry.upgrade(gallery.upgrade.id)
    assert row.phase == Phase.CUT_OVER
    assert gallery.conductor().verify(row).fields_compared == 40
    roll_back(gallery)
    expect(gallery, UNTOUCHED, "v1")
    lose(gallery)
    rebuilding(gallery).run()
    back = gallery.registry.active_upgrade(gallery.upgrade.gallery_id)
    assert back is not None
    gallery.conductor().clean_up(back)
    assert not gallery.store.exists(gallery.task.new[0])


def test_lost_twice_it_comes_back_twice(gallery: Gallery) -> None:
    truth = UNTOUCHED
    for number in (5, 4):
        crash(gallery, number, go_on)
        lose(gallery)
        rebuilding(gallery).run()
    go_on(gallery)
    expect(gallery, truth, "v2")


def test_a_record_that_another_program_changed_after_its_copy_is_moved_again(gallery: Gallery) -> None:
    def end(call: str, collection: str) -> None:
        if (call, collection) == ("upsert", gallery.task.new[0]):
            raise Crash

    gallery.store.after = end  # not at a later write: on a slow machine the first batch has left old by then
    with pytest.raises(Crash):
        drive(gallery)
    gallery.store.after = lambda call, collection: None
    copied = gallery.held()["old"].keys() & gallery.held()["new"].keys()
    assert copied
    id = min(copied)
    gallery.source.of[id] = "changed"
    gallery.store.upsert(gallery.task.old[0], [Record(id=id, vector=vector("v1", "changed"), fields={"n": 7})])
    lose(gallery)
    rebuilding(gallery).run()
    go_on(gallery)
    expect(gallery, UNTOUCHED | {id: ("changed", 7)}, "v2")


# --- the command itself -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sentences", [1, 2, 3, 4])
def test_a_rebuild_that_was_killed_is_run_again(gallery: Gallery, sentences: int) -> None:
    crash(gallery, 8)
    with gallery.client() as client:
        truth = write(gallery, client, in_source=False)
    lose(gallery)
    said = iter(range(1, sentences))

    def say(_: str) -> None:
        if next(said, None) is None:
            raise Crash

    with pytest.raises(Crash):
        rebuilding(gallery, say=say).run()
    rebuilding(gallery).run()
    written = [row.record for row in gallery.registry.written(gallery.upgrade.id)]
    assert sorted(written) == sorted(set(written))
    assert not gallery.registry.upgrade(gallery.upgrade.id).listed
    go_on(gallery)
    expect(gallery, truth, "v2")


def test_an_archive_that_is_away_for_a_moment_stops_a_rebuild_that_then_goes_on(
    gallery: Gallery, monkeypatch: pytest.MonkeyPatch
) -> None:
    drive(gallery)
    lose(gallery)

    def away(*_: object) -> bytes:
        raise errors.HomeUnreachable("no answer")

    with monkeypatch.context() as patch:
        patch.setattr(LocalFolder, "verified", away)
        with pytest.raises(errors.HomeUnreachable):
            rebuilding(gallery).run()
    rebuilding(gallery).run()
    assert gallery.registry.announced(gallery.upgrade.id, list(UNTOUCHED)) == {}
    go_on(gallery)
    expect(gallery, UNTOUCHED, "v2")


def test_two_do_not_rebuild_at_once(gallery: Gallery) -> None:
    crash(gallery, 5)
    lose(gallery)
    refused: list[str] = []

    def beside(_: str) -> None:
        with pytest.raises(errors.RegistryError, match="Another rmvdb registry rebuild works") as caught:
            rebuilding(gallery).run()
        refused.append(str(caught.value))

    rebuilding(gallery, say=beside).run()
    assert len(refused) > 2  # before, while and after the work was made again
    go_on(gallery)
    expect(gallery, UNTOUCHED, "v2")


def test_while_the_work_is_made_again_searches_go_on_and_writes_and_conductors_wait(gallery: Gallery) -> None:
    drive(gallery)
    client = gallery.client()
    lose(gallery)
    written = threading.Event()
    writer = threading.Thread(target=lambda: (client.upsert([{"id": 3, "item": "three"}]), written.set()))

    def report(step: str, done: int, _: int) -> None:
        if (step, done) == ("reading the archive", 1):
            assert len(client.search("t1", limit=100)) == 40
            writer.start()
            assert not written.wait(0.5)
            assert gallery.registry.claim(gallery.upgrade.id, "w", lease=1, grace=0, copy=True) is None
            assert "its work is being made again" in status(gallery.registry, gallery.registry.gallery("texts")).held_back
            with pytest.raises(errors.RegistryError, match="'texts' is being rebuilt; wait until rmvdb registry rebuild"):
                gallery.conductor()

    rebuilding(gallery, report=report).run()
    assert written.wait(60)
    writer.join()
    client.close()


def test_a_client_refuses_while_the_registry_is_lost_and_goes_on_when_it_is_back(gallery: Gallery) -> None:
    with gallery.client() as client:
        before = client.plan.epoch
        lose(gallery)
        time.sleep(client.plan.max_age + 0.1)
        with pytest.raises(errors.StalePlan, match="could miss records"):
            client.search("t1")
        rebuilding(gallery).run()
        assert client.search("t1", limit=1)[0].id == 1
        assert client.plan.epoch > before
        client.upsert([{"id": 1, "item": "one"}])
        assert client.search("one", limit=1)[0].id == 1


def test_a_worker_of_the_lost_registry_loses_its_claims_even_if_the_tables_are_made_again(gallery: Gallery) -> None:
    from rmvdb.registry import schema

    worker = gallery.worker()
    worker._renew(gallery.upgrade.id)
    lose(gallery)
    schema.upgrade(f"sqlite:///{gallery.folder}/registry.sqlite")
    with pytest.raises(errors.RegistryError, match=f"has no upgrade {gallery.upgrade.id}"):
        worker._renew(gallery.upgrade.id)


def test_it_waits_until_what_was_under_way_is_over(gallery: Gallery) -> None:
    lose(gallery)
    heard: list[str] = []
    began = time.monotonic()
    rebuilding(gallery, quiet=1.3, report=lambda step, *_: heard.append(step)).run()
    assert time.monotonic() - began >= 1.3
    assert "waiting" in heard


def test_stopped_while_it_waits_it_has_changed_nothing(gallery: Gallery) -> None:
    lose(gallery)
    stop = threading.Event()
    stop.set()
    with pytest.raises(errors.Stopped):
        rebuilding(gallery, quiet=60.0, stop=stop).run()
    assert list(gallery.folder.glob("registry.sqlite*")) == []


def wait_until_led_for(gallery: Gallery, seconds: float) -> None:
    """Wait until its conductor has prolonged its leadership by that long."""

    def until() -> float:
        return gallery.registry.upgrade(gallery.upgrade.id).conductor_until or 0.0

    began = until()
    wait_until(lambda: until() > began + seconds)


def test_a_conductor_stays_one_while_the_manifest_cannot_be_written(gallery: Gallery, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leadership, "LEADER_LEASE", 1.0)
    keep = gallery.registry._keeper

    def full(_: object) -> None:
        raise errors.DiskFull("no space")

    with leadership.hold_leadership(gallery.conductor(), gallery.upgrade, gallery.worker()):
        gallery.registry._keeper = full
        wait_until_led_for(gallery, 2.5)
        gallery.registry._keeper = keep


def test_a_conductor_stays_one_though_a_heartbeat_fails(gallery: Gallery, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leadership, "LEADER_LEASE", 1.0)
    real, failed = gallery.registry.keep_leading, threading.Event()

    def away(*_: object) -> bool:
        gallery.registry.keep_leading = real  # type: ignore[method-assign]
        failed.set()
        raise errors.RegistryError("away")

    with leadership.hold_leadership(gallery.conductor(), gallery.upgrade, gallery.worker()):
        gallery.registry.keep_leading = away  # type: ignore[method-assign, assignment]
        assert failed.wait(60)
        wait_until_led_for(gallery, 1.5)


def test_a_registry_that_is_not_lost_is_left_alone(gallery: Gallery) -> None:
    before = gallery.registry.contents()
    with pytest.raises(errors.AlreadyExists, match="holds gallery 'texts'; only an empty one is rebuilt"):
        rebuilding(gallery).run()
    assert gallery.registry.contents() == before


def test_without_its_archive_nothing_is_lost_but_the_old_vectors(gallery: Gallery) -> None:
    crash(gallery, 8)
    said: list[str] = []
    for path in (gallery.folder / "archive").rglob("*.parquet"):
        path.write_bytes(b"damaged")
    lose(gallery)
    rebuilding(gallery, say=said.append).run()
    assert any("was altered" in each for each in said)
    moved = gallery.held()["new"].keys() - gallery.held()["old"].keys()
    assert gallery.registry.intents(gallery.upgrade.id, moved).keys() == {str(id) for id in moved}
    go_on(gallery)
    expect(gallery, UNTOUCHED, "v2")


def test_each_record_is_noted_once_however_often_it_was_read(gallery: Gallery) -> None:
    for number in (2, 2, 2):  # a batch is read and archived, and its worker dies
        crash(gallery, number)
        time.sleep(1.7)
    drive(gallery)
    lose(gallery)
    rebuilding(gallery).run()
    rows = gallery.registry.batches(gallery.upgrade.id, state=BatchState.RETIRED)
    assert sum(row.count for row in rows) == 40
    assert gallery.registry.written(gallery.upgrade.id) == []


def test_a_grace_reaches_as_far_after_a_loss_as_before(gallery: Gallery) -> None:
    """Clients of a plan with longer times, two plans ago by then, may still be cut off."""
    with gallery.registry.engine.begin() as connection:
        connection.execute(statement("UPDATE serving_plans SET grace_before = 60"))
    gallery.registry.set_upgrade(gallery.upgrade.id, note="the manifest is written")
    lose(gallery)
    rebuilding(gallery).run()
    assert gallery.registry.plan("texts").grace == 60
