"""A registry that goes back to an older copy: it is refused, it goes on once it is taken, and nothing is lost."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rmvdb.errors import CollectionMissing, NotOwner, StalePlan, VerifyFailed
from rmvdb.registry import mark
from rmvdb.registry.codec import key, unpack_ids
from rmvdb.registry.mark import Owner
from rmvdb.serving.client import Client
from rmvdb.types import BatchState, Id, Phase, Record
from rmvdb.upgrade.status import status
from tests.support.faults import silent
from tests.support.inprocess import TIMES, drive, make, vector
from tests.support.kept_original import back, begin, expect_original, go_on, put
from tests.support.lost import lose, rebuilding
from tests.support.registries import adopt, another, copied, drive_until_copied, put_back, take


@pytest.mark.parametrize("later", ["one batch", "all of it"])
def test_a_registry_that_goes_back_while_a_worker_runs_is_noticed_before_anything_is_removed(tmp_path: Path, later: str) -> None:
    """A batch that is retired reads as copied: its records, gone from old, would be taken for deletions by others."""
    gallery = make(tmp_path)
    drive_until_copied(gallery)
    backup = copied(gallery)
    time.sleep(gallery.task.grace)
    if later == "one batch":
        batch = gallery.registry.claim(gallery.upgrade.id, "w", lease=60.0, grace=0.0, copy=True)
        assert batch is not None
        assert batch.state == BatchState.COPIED
        gallery.backfill.retire(gallery.task, batch, lambda: None)
    else:
        drive(gallery)
    put_back(gallery, backup)

    for _ in range(2):
        with pytest.raises(NotOwner, match="has gone back"):
            drive(gallery)
    held = gallery.held()
    assert held["new"].keys() == gallery.source.of.keys()
    with pytest.raises(NotOwner, match="has gone back"):
        gallery.client()
    assert "has gone back" in status(gallery.registry, gallery.registry.gallery("texts")).gone_back


def test_a_record_that_had_left_before_the_registry_went_back_is_not_taken_for_deleted(tmp_path: Path) -> None:
    """The mark is overruled, and the work list not made again; a client announces a write, and gives it up."""
    gallery = make(tmp_path)
    drive_until_copied(gallery)
    backup = copied(gallery)
    time.sleep(gallery.task.grace)

    def retire() -> list[Id]:
        batch = gallery.registry.claim(gallery.upgrade.id, "w", lease=60.0, grace=0.0, copy=True)
        assert batch is not None
        assert batch.state == BatchState.COPIED
        gallery.backfill.retire(gallery.task, batch, lambda: None)
        return unpack_ids(batch.ids)

    id, *_ = retire()
    put_back(gallery, backup)
    gallery.registry.catch_up("texts", number=mark.BEYOND, epoch=0)
    opened = gallery.registry.open_intents("texts", "upsert", [id], client="c", lasting=60.0)
    assert opened is not None
    assert id in retire()
    gallery.registry.withdraw_intents(opened)
    drive(gallery)
    gallery.expect_moved()


@pytest.mark.parametrize("known", ["copied", "listed"])
def test_a_write_stays_though_the_registry_goes_back_to_before_it(tmp_path: Path, known: str) -> None:
    """Its record is gone from old, and no intent tells why: that is not another program's deletion."""
    gallery = make(tmp_path)
    backup = copied(gallery)
    drive_until_copied(gallery)
    if known == "copied":
        backup = copied(gallery)
    gallery.source.of |= {3: "newer", 99: "inserted"}
    with gallery.client() as client:
        client.upsert([{"id": id, "item": gallery.source.of[id], "n": id} for id in (3, 99)])
        client.delete([5])
    del gallery.source.of[5]
    put_back(gallery, backup)

    drive(gallery)
    held = gallery.held()["new"]
    assert held.keys() == gallery.source.of.keys()
    assert held[3].vector == pytest.approx(vector("v2", "newer"), abs=1e-6)
    assert held[3].fields == {"n": 3}
    gallery.expect_moved()
    conductor = gallery.conductor()
    with pytest.raises(VerifyFailed, match="record 99 is in texts_v2 though it was neither moved nor written there"):
        conductor.advance(gallery.upgrade, gallery.worker())
    row = gallery.registry.upgrade(gallery.upgrade.id)
    found = conductor.lost(row)
    assert found.unexplained.unknown == [99]
    conductor.repair(row, found, gallery.worker())
    assert conductor.lost(row).unexplained.unknown == []
    conductor.advance(row, gallery.worker())
    assert gallery.registry.upgrade(gallery.upgrade.id).phase == Phase.CUT_OVER


def test_a_registry_that_forgot_the_last_write_of_a_record_ends_its_upgrade_all_the_same(tmp_path: Path) -> None:
    """It knows of an earlier one, and verification believes that one until an operator accepts the present record."""
    gallery = make(tmp_path)
    drive(gallery)
    item = gallery.source.of
    with gallery.client() as client:
        client.upsert([{"id": id, "item": item[id], "n": id} for id in (3, 4)])
        client.delete([5])
        backup = copied(gallery)
        item |= {3: "newer", 5: "again"}
        client.upsert([{"id": id, "item": item[id], "n": id} for id in (3, 5)])
        client.delete([4])
        del item[4]
    put_back(gallery, backup)

    conductor = gallery.conductor()
    with pytest.raises(VerifyFailed, match="3 differences"):
        conductor.advance(gallery.upgrade, gallery.worker())
    row = gallery.registry.upgrade(gallery.upgrade.id)
    found = conductor.lost(row)
    unexplained = found.unexplained
    assert (found.archived, unexplained.unknown, sorted(map(int, unexplained.changed)), unexplained.absent) == (
        {},
        [],
        [3, 5],
        [4],
    )
    conductor.repair(row, found, gallery.worker())
    conductor.advance(row, gallery.worker())
    assert gallery.registry.upgrade(gallery.upgrade.id).phase == Phase.CUT_OVER
    held = gallery.held()["new"]
    assert held.keys() == item.keys()
    assert held[3].vector == pytest.approx(vector("v2", "newer"), abs=1e-6)
    assert held[5].vector == pytest.approx(vector("v2", "again"), abs=1e-6)


def test_a_client_never_goes_to_a_smaller_epoch_and_status_says_so(tmp_path: Path) -> None:
    gallery = make(tmp_path, deployed=False)
    backup = copied(gallery)
    gallery.conductor().deploy(gallery.upgrade)
    with gallery.client() as client:
        assert client.plan.epoch == 2
        drive(gallery)
        assert len(client.search("t1", limit=40)) == 40
        put_back(gallery, backup)
        time.sleep(TIMES["max_age"] * 1.5)
        with pytest.raises(StalePlan, match="has gone back: it serves 'texts' by epoch 1, and this client by 2"):
            client.search("t1", limit=40)
        with pytest.raises(StalePlan, match="has gone back"):
            client.upsert([{"id": 1, "item": "t1"}])
        found = status(gallery.registry, gallery.registry.gallery("texts"))
        assert "a client served by epoch 2" in found.gone_back
    assert gallery.held()["new"].keys() == gallery.source.of.keys()


def test_a_write_by_a_registry_that_has_gone_back_is_refused_while_the_clients_plan_is_young(tmp_path: Path) -> None:
    """It would go into the old collection alone."""
    gallery = make(tmp_path, deployed=False, times={**TIMES, "max_age": 60.0})
    backup = copied(gallery)
    gallery.conductor().deploy(gallery.upgrade)
    with gallery.client() as client:
        assert client.plan.epoch == 2
        silent(client._current_plan)
        put_back(gallery, backup)
        with pytest.raises(StalePlan, match="has gone back"):
            client.upsert([{"id": 1, "item": "changed"}])
        assert gallery.registry.open_writes(gallery.registry.gallery("texts").id) == set()
    assert gallery.held()["old"][1].fields == {"n": 0}
    assert gallery.held()["new"] == {}


def test_a_client_notices_a_registry_that_has_gone_back_within_an_epoch(tmp_path: Path) -> None:
    gallery = make(tmp_path, times={**TIMES, "max_age": 3.0})  # a batch waits for so long
    Owner(gallery.registry, gallery.store).settle("texts")
    backup = copied(gallery)
    with gallery.client() as client:
        silent(client._current_plan)
        drive(gallery)
        client._current_plan.refresh()
        put_back(gallery, backup)
        with pytest.raises(StalePlan, match="has gone back"):
            client._current_plan.refresh()


def test_a_client_that_connects_to_an_older_copy_is_refused(tmp_path: Path) -> None:
    gallery = make(tmp_path, deployed=False)
    Owner(gallery.registry, gallery.store).settle("texts")
    backup = copied(gallery)
    gallery.conductor().deploy(gallery.upgrade)
    put_back(gallery, backup)
    with pytest.raises(NotOwner, match="has gone back"):
        gallery.client()
    with pytest.raises(NotOwner, match="has gone back"):
        gallery.conductor().advance(gallery.upgrade, gallery.worker())


def test_a_registry_that_has_gone_back_goes_on_once_it_is_taken_at_a_later_epoch(tmp_path: Path) -> None:
    gallery = make(tmp_path, deployed=False)
    Owner(gallery.registry, gallery.store).settle("texts")
    backup = copied(gallery)
    gallery.conductor().deploy(gallery.upgrade)
    client = gallery.client()
    put_back(gallery, backup)
    with pytest.raises(NotOwner):
        gallery.client()

    assert take(gallery) == ["texts_v1"]
    assert gallery.registry.plan("texts").epoch > 2
    assert status(gallery.registry, gallery.registry.gallery("texts")).gone_back == ""
    client._current_plan.refresh()
    assert client.plan.epoch == gallery.registry.plan("texts").epoch
    client.close()
    gallery.conductor().deploy(gallery.registry.upgrade(gallery.upgrade.id))
    gallery.conductor().list_work(gallery.registry.upgrade(gallery.upgrade.id))
    drive(gallery)
    gallery.expect_moved()


def test_a_registry_from_before_an_upgrade_that_was_cleaned_up_is_refused_though_its_collection_is_gone(tmp_path: Path) -> None:
    """With the collection went its mark: only the marks of what the upgrade filled know of later steps."""
    gallery = make(tmp_path, deployed=False)
    Owner(gallery.registry, gallery.store).settle("texts")
    backup = copied(gallery)
    conductor = gallery.conductor()
    conductor.advance(gallery.upgrade, gallery.worker())
    conductor.clean_up(gallery.registry.upgrade(gallery.upgrade.id))
    put_back(gallery, backup)

    with pytest.raises(NotOwner, match="has gone back"):
        gallery.client()
    with pytest.raises(NotOwner, match="has gone back"):
        gallery.conductor().advance(gallery.upgrade, gallery.worker())
    assert "has gone back" in status(gallery.registry, gallery.registry.gallery("texts")).gone_back
    with pytest.raises(CollectionMissing, match="'texts_v1', by which this registry serves gallery 'texts', is gone"):
        take(gallery)

    anew = another(tmp_path / "anew")
    assert take(gallery, anew) == ["texts_v2"]
    adopt(anew, gallery, "texts_v2", "v2")
    with Client("texts", registry=anew, store=gallery.store, loaded_models=gallery.loaded_models) as client:
        assert len(client.search("t1", limit=40)) == 40


def test_a_registry_from_before_the_deployment_serves_what_was_moved_since_once_it_is_taken(tmp_path: Path) -> None:
    gallery = make(tmp_path, deployed=False)
    Owner(gallery.registry, gallery.store).settle("texts")
    backup = copied(gallery)
    gallery.conductor().deploy(gallery.upgrade)
    drive(gallery)
    put_back(gallery, backup)

    take(gallery)
    with gallery.client() as client:
        assert len(client.search("t1", limit=40)) == 40
    gallery.conductor().advance(gallery.registry.upgrade(gallery.upgrade.id), gallery.worker())
    assert gallery.registry.upgrade(gallery.upgrade.id).phase == Phase.CUT_OVER
    gallery.expect_moved()


@pytest.mark.parametrize(
    ("until", "known", "then"),
    [
        (0.5, "the cut-over", "forward"),
        (0.5, "the cut-over", "back"),
        (1.0, "the cut-over", "forward"),
        (1.0, "a planned roll back", "back"),
    ],
)
def test_a_registry_from_before_a_roll_back_serves_what_was_put_back_since_once_it_is_taken(
    tmp_path: Path, until: float, known: str, then: str
) -> None:
    """Its plan searches the new collection alone, which the roll back has emptied, in part or as a whole."""
    gallery = make(tmp_path)
    conductor = gallery.conductor()
    conductor.advance(gallery.upgrade, gallery.worker())
    backup = copied(gallery)
    back = conductor.roll_back(gallery.registry.upgrade(gallery.upgrade.id))
    assert back is not None
    if known != "the cut-over":
        backup = copied(gallery)
    gallery.registry.set_upgrade(back.id, plan=replace(back.plan, until=until))
    conductor.advance(gallery.registry.upgrade(back.id), gallery.worker())
    with gallery.client() as client:
        gallery.source.of[7] = "newer"
        client.upsert([{"id": 7, "item": "newer", "n": 1}])
        client.delete([9, 31])
        del gallery.source.of[9], gallery.source.of[31]
    put_back(gallery, backup)

    take(gallery)
    with gallery.client() as client:
        assert {hit.id for hit in client.search("t1", limit=100)} == gallery.source.of.keys()
    now = gallery.registry.active_upgrade(back.gallery_id)
    assert now is not None
    if now.undoes is None and then == "back":
        now = gallery.conductor().roll_back(now)
        assert now is not None
    row = gallery.conductor().advance(now, gallery.worker())
    assert row.phase == Phase.CUT_OVER
    assert gallery.records(*row.old_collections) == {}
    held, version = gallery.records(row.new_collection), row.to_version
    assert held.keys() == gallery.source.of.keys()
    assert all(np.allclose(held[id].vector, vector(version, text), atol=1e-6) for id, text in gallery.source.of.items())  # type: ignore[arg-type]


@pytest.mark.parametrize("until", [0.5, 1.0])
def test_a_registry_from_before_an_instant_roll_back_names_it_and_serves_everything_once_it_is_rolled_back(
    tmp_path: Path, until: float
) -> None:
    gallery = make(tmp_path, deployed=False)
    gallery.conductor().roll_back(gallery.upgrade)
    upgrade = go_on(gallery, begin(gallery, until=until))
    said: list[str] = []
    take(gallery, say=said.append)
    assert "rmvdb rollback" not in " ".join(said)  # nothing is forgotten
    backup = copied(gallery)
    back(gallery, upgrade)
    with gallery.client() as client:
        put(gallery, client, 7, "newer")
        put(gallery, client, 77, "t77")
        client.delete([9, 31])
        del gallery.source.of[9], gallery.source.of[31]
    put_back(gallery, backup)

    take(gallery, say=said.append)
    assert (
        "run rmvdb rollback once this has ended: until then searches miss what was written since, which only texts_v1 holds"
        in " ".join(said)
    )
    again = gallery.registry.active_upgrade(upgrade.gallery_id)
    assert again is not None
    assert back(gallery, again).phase == Phase.CUT_OVER
    with gallery.client() as client:
        assert {hit.id for hit in client.search("t1", limit=100)} == gallery.source.of.keys()
    expect_original(gallery)


def test_a_rebuild_from_a_manifest_of_before_an_instant_roll_back_names_it(tmp_path: Path) -> None:
    gallery = make(tmp_path, deployed=False)
    gallery.conductor().roll_back(gallery.upgrade)
    upgrade = go_on(gallery, begin(gallery))
    older = (gallery.folder / "manifest.json").read_bytes()
    for forgotten in (False, True):
        if forgotten:
            back(gallery, upgrade)
            (gallery.folder / "manifest.json").write_bytes(older)
        lose(gallery)
        said: list[str] = []
        rebuilding(gallery, say=said.append).run()
        assert ("run rmvdb rollback once this has ended" in " ".join(said)) is forgotten
    gallery.registry.close()


def test_a_batch_that_was_taken_apart_before_the_registry_went_back_is_known_to_have_moved(tmp_path: Path) -> None:
    """Its records moved under another number: only the archive and the new collection know of that."""
    gallery = make(tmp_path)
    odd = {id: np.roll(vector("v1", f"t{id}"), 1) for id in (3, 14, 25, 30)}  # v1 would not make them again today
    gallery.store.upsert(gallery.task.old[0], [Record(id=id, vector=each, fields={"n": 0}) for id, each in odd.items()])
    backup = copied(gallery)
    assert gallery.registry.move_first(gallery.upgrade.id, {key(id) for id in (3, 14, 25)}, batches=[1, 2, 3, 4], rows=[]) == 3
    drive(gallery)
    put_back(gallery, backup)
    with pytest.raises(NotOwner, match="has gone back"):
        drive(gallery)

    take(gallery)
    drive(gallery)
    gallery.expect_moved()
    assert gallery.verify().ok
    conductor = gallery.conductor()
    back = conductor.roll_back(gallery.registry.upgrade(gallery.upgrade.id))
    assert back is not None
    conductor.advance(back, gallery.worker())
    held = gallery.records("texts_v1")
    assert held.keys() == gallery.source.of.keys()
    for id, each in odd.items():
        assert held[id].vector == pytest.approx(each, abs=1e-6)


def test_a_record_that_left_quarantine_before_the_registry_went_back_is_not_taken_for_deleted(tmp_path: Path) -> None:
    """It moved by a batch of its own, and the older copy knows it in the batch that had to leave it out."""
    gallery = make(tmp_path)
    gallery.source.of[3] = "broken"
    backups: list[Path] = []
    real = gallery.registry.copied

    def look(*args: Any, **options: Any) -> None:
        backups.extend([copied(gallery)] if not backups else [])
        real(*args, **options)

    gallery.registry.copied = look  # type: ignore[method-assign]
    drive(gallery, width=1)
    gallery.source.of[3] = "t3"
    gallery.registry.release(gallery.upgrade.id, [3], requeue=True)
    drive(gallery)
    gallery.expect_moved()
    put_back(gallery, backups[0])

    take(gallery)
    time.sleep(1.6)  # the lease of the batch that was being written
    drive(gallery)
    gallery.expect_moved()
    assert gallery.verify().ok


def test_a_registry_that_does_not_know_a_later_upgrade_takes_nothing(tmp_path: Path) -> None:
    gallery = make(tmp_path)
    gallery.worker(width=1).run(gallery.task, gallery.backfill, until=0.5)
    backup = copied(gallery)
    gallery.supersede()
    drive(gallery)
    put_back(gallery, backup)
    before = gallery.registry.plan("texts").epoch
    with pytest.raises(CollectionMissing, match=r"has records in collection '.*', which this registry does not know"):
        take(gallery)
    assert not gallery.registry.gallery("texts").rebuilding
    assert gallery.registry.plan("texts").epoch == before
