"""Garbage goes, and nothing that an upgrade, a roll back or a rebuild needs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import insert
from sqlalchemy.orm import Session

from rmvdb.learning.method import Method
from rmvdb.planning.question import Question
from rmvdb.registry import shared_queries
from rmvdb.registry.manifest import Manifest
from rmvdb.registry.tables import AskedForRow, IntentRow, QuarantineRow
from rmvdb.storage.folders import LocalFolder
from rmvdb.types import Phase
from rmvdb.upgrade import garbage
from rmvdb.upgrade.garbage import Collector
from tests.support.inprocess import Gallery, make


@pytest.fixture
def gallery(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gallery]:
    monkeypatch.setattr(garbage, "ROWS", -1.0)
    monkeypatch.setattr(garbage, "FILES", -1.0)
    made = make(tmp_path)
    yield made
    made.registry.close()


def collector(gallery: Gallery) -> Collector:
    folder = gallery.folder
    return Collector(
        registry=gallery.registry,
        manifest=Manifest(LocalFolder(folder)),
        artifacts=[LocalFolder(folder / "artifacts")],
        archive=LocalFolder(folder / "archive"),
        caches=[LocalFolder(folder / "cache")],
        plans=LocalFolder(folder / "cache" / "plans"),
    )


def left_behind(gallery: Gallery) -> None:
    registry = gallery.registry
    registry.refresh("texts", client="killed", ready=1, trouble="")
    registry.renew("killed", gallery.upgrade.id, lease=1.0)
    for name in ("cache/embeddings/texts-v2-0/a.parquet", f"artifacts/{'a' * 64}.safetensors"):
        path = gallery.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"left")


def files(gallery: Gallery) -> set[str]:
    folders = ("archive", "cache", "artifacts")
    paths = (path for each in folders for path in (gallery.folder / each).rglob("*") if path.is_file())
    return {str(path.relative_to(gallery.folder)) for path in paths}


def test_after_the_last_clean_up_what_is_left_behind_goes_and_another_upgrade_runs(gallery: Gallery) -> None:
    conductor = gallery.conductor()
    conductor.clean_up(conductor.advance(gallery.upgrade, gallery.worker()))
    left_behind(gallery)
    before, said = files(gallery), collector(gallery).run(remove=False)
    assert files(gallery) == before
    assert {name: count for name, count in said.rows.items() if count} == {
        "clients that ended without a word": 1,
        "workers that ended without a word": 1,
        "dropped collections": 1,
    }
    assert collector(gallery).run(remove=True).rows == said.rows
    assert files(gallery) == set()
    assert collector(gallery).run(remove=False).nothing
    assert [row.name for row in gallery.registry.collections(gallery.upgrade.gallery_id)] == ["texts_v2"]
    with gallery.client() as client:
        client.upsert([{"id": 7, "item": "again"}])
        gallery.source.of[7] = "again"
        assert client.search("again", limit=1)[0].id == 7
    question = conductor.resolve(
        Question(gallery="texts", from_version="v2", to_version="v3", method=Method.NAIVE, order="random")
    )
    row = conductor.begin(question, conductor.plan(question), gallery.worker())
    assert conductor.advance(row, gallery.worker()).phase == Phase.CUT_OVER
    assert gallery.records(row.new_collection).keys() == gallery.source.of.keys()


def test_in_an_upgrade_that_took_the_place_of_another_nothing_goes_that_leads_on_or_back(gallery: Gallery) -> None:
    first = gallery.upgrade
    gallery.worker().run(gallery.task, gallery.backfill, until=0.5)
    gallery.supersede()
    gallery.worker().run(gallery.task, gallery.backfill, until=0.5)
    left_behind(gallery)
    work = {row.id for row in gallery.registry.batches(first.id)}
    kept = {name for name in files(gallery) if name.startswith(("archive", "cache"))}
    found = collector(gallery).run(remove=True)
    assert {row.id for row in gallery.registry.batches(first.id)} == work
    assert {name for name in files(gallery) if name.startswith(("archive", "cache"))} == kept
    assert f"artifacts/{'a' * 64}.safetensors" not in files(gallery)
    assert {name for name, count in found.rows.items() if count} == {
        "clients that ended without a word",
        "workers that ended without a word",
    }
    conductor = gallery.conductor()
    back = conductor.roll_back(gallery.registry.upgrade(gallery.upgrade.id))
    assert back is not None
    collector(gallery).run(remove=True)
    conductor.clean_up(conductor.advance(back, gallery.worker()))
    collector(gallery).run(remove=True)
    assert conductor.advance(gallery.registry.upgrade(first.id), gallery.worker()).phase == Phase.CUT_OVER


def test_the_work_of_an_ended_upgrade_goes_if_something_left_it(gallery: Gallery) -> None:
    conductor, upgrade = gallery.conductor(), gallery.upgrade
    conductor.clean_up(conductor.advance(upgrade, gallery.worker()))
    collector(gallery).run(remove=True)
    mine = {"upgrade_id": upgrade.id}
    write = {"kind": "upsert", "done": True, "epoch": 1, "client": "killed", "opened_at": 0.0, "deadline": 1.0}
    with Session(gallery.registry.engine) as s, s.begin():
        s.add(shared_queries.new_batch(upgrade.id, 0, [7], None))
        s.add(QuarantineRow(**mine, record="8", reason="broken", at=0.0))
        s.execute(insert(AskedForRow).values(**mine, record="9"))
        s.execute(insert(IntentRow).values(**mine, **write, gallery_id=upgrade.gallery_id, record="10"))
    assert {name for name, count in collector(gallery).run(remove=True).rows.items() if count} == {
        "batches of ended upgrades",
        "quarantined records of ended upgrades",
        "records asked for in ended upgrades",
        "writes that no upgrade needs",
    }
    assert gallery.registry.batches(upgrade.id) == []
    assert collector(gallery).run(remove=False).nothing


def test_young_rows_and_files_stay(gallery: Gallery, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(garbage, "ROWS", 3600.0)
    monkeypatch.setattr(garbage, "FILES", 86400.0)
    conductor = gallery.conductor()
    conductor.clean_up(conductor.advance(gallery.upgrade, gallery.worker()))
    left_behind(gallery)
    found = collector(gallery).run(remove=True)
    assert found.files == 0
    assert {name for name, count in found.rows.items() if count} == set()
    os.utime(gallery.folder / "artifacts" / f"{'a' * 64}.safetensors", (1.0, 1.0))
    assert collector(gallery).run(remove=True).files == 1


def test_what_a_killed_process_was_writing_goes_when_it_is_a_day_old(gallery: Gallery, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(garbage, "FILES", 86400.0)
    (folder := gallery.folder / "artifacts").mkdir(exist_ok=True)

    (left := folder / f".{'a' * 64}.json.0123456789ab.tmp").write_bytes(b"half")
    (theirs := folder / ".notes.tmp").write_bytes(b"theirs")
    collector(gallery).run(remove=True)
    assert left.exists()
    for each in (left, theirs):
        os.utime(each, (1.0, 1.0))
    collector(gallery).run(remove=True)
    assert (left.exists(), theirs.exists()) == (False, True)


def test_an_archive_that_this_registry_does_not_know_is_kept_and_said(gallery: Gallery) -> None:
    path = gallery.folder / "archive" / "others" / "7" / "a.parquet"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"the only copy")
    found = collector(gallery).run(remove=True)
    assert path.exists()
    assert any("others/7: this registry knows no such upgrade" in each for each in found.kept)
