"""Two registries over one engine, and a registry that goes back: the wrong one stops with a sentence, and nothing is lost."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rmvdb.catalog import galleries
from rmvdb.errors import CollectionMissing, NotOwner, StalePlan, UnknownName, UsageError, VerifyFailed
from rmvdb.registry import mark, schema
from rmvdb.registry.codec import key, unpack_ids
from rmvdb.registry.manifest import Manifest
from rmvdb.registry.mark import Owner, is_mark, mark_of
from rmvdb.registry.registry import Registry
from rmvdb.serving.client import Client
from rmvdb.storage.folders import LocalFolder
from rmvdb.types import BatchState, Id, Index, Phase, Record
from rmvdb.upgrade.rebuild import Rebuild
from rmvdb.upgrade.status import status
from tests.integration.test_scheduler import at_work
from tests.support.inprocess import DIMS, TIMES, Gallery, drive, make, vector
from tests.support.waiting import wait_until

FILE = "registry.sqlite"


def copied(gallery: Gallery) -> Path:
    """Return a backup of the registry as it is now."""
    gallery.registry.engine.dispose()
    backup = gallery.folder / "backup.sqlite"
    for end in ("", "-wal"):
        if (file := gallery.folder / f"{FILE}{end}").exists():
            shutil.copy(file, f"{backup}{end}")
    return backup


def put_back(gallery: Gallery, backup: Path) -> None:
    """Put the backup of the database back while all programs run on, without a manifest that would show it."""
    (gallery.folder / "manifest.json").unlink()
    gallery.registry.engine.dispose()
    for end in ("", "-wal", "-shm"):
        (gallery.folder / f"{FILE}{end}").unlink(missing_ok=True)
        if Path(f"{backup}{end}").exists():
            shutil.copy(f"{backup}{end}", gallery.folder / f"{FILE}{end}")


def another(folder: Path) -> Registry:
    """Return a registry that another `rmvdb init` made, with the same model versions."""
    folder.mkdir()
    url = f"sqlite:///{folder}/{FILE}"
    schema.upgrade(url)
    registry = Registry(url, keep=Manifest(LocalFolder(folder)).write)
    for name, dim in DIMS.items():
        registry.add_version(
            name=name, embedder=f"tests:{name}", options={}, classifier=None, dim=dim, metric="COSINE", fingerprint=None,
            probes=None, probe_kind=None, base=None, head=None,
        )  # fmt: skip
    return registry


def take(
    gallery: Gallery, registry: Registry | None = None, say: Callable[[str], None] = lambda _: None, *, name: str = "texts"
) -> list[str]:
    """As `rmvdb gallery take NAME --from-lost-registry`; nothing of the lost registry is under way, so nothing is waited for."""
    registry = registry or gallery.registry
    manifest = Manifest(LocalFolder(Path(str(registry.url.database)).parent))
    rebuild = Rebuild(
        registry=registry,
        store=gallery.store,
        archive=gallery.archive,
        manifest=manifest,
        lock=gallery.folder / "lock",
        quiet=0.0,
        say=say,
    )
    return rebuild.take(name)


def adopt(registry: Registry, gallery: Gallery, collection: str, model: str = "v1", *, name: str = "texts") -> None:
    """Adopt as `rmvdb gallery add --collection` does."""
    galleries.add_gallery(
        registry, gallery.store, gallery.loaded_models, name=name, model=model, collection=collection, id_type=None, fields=(),
        source=None, loaded_source=None, chosen_index=Index(type="FLAT"), times=TIMES,
    )  # fmt: skip


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


def drive_until_copied(gallery: Gallery) -> None:
    """Copy every batch, and stop before any record leaves."""
    worker = gallery.worker()
    while (batch := gallery.registry.claim(gallery.upgrade.id, worker.name, lease=60.0, grace=1e6, copy=True)) is not None:
        gallery.backfill.copy(gallery.task, batch, lambda: None)


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
