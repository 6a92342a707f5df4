"""What a user sees where a promise needs a word of theirs, or where something can no longer be put right."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterable

import pytest

from tests.acceptance.conftest import IDS, NAIVE, everything_is_found
from tests.support.project import Project
from tests.support.waiting import wait_until


def deleted_by_another_program(project: Project, count: int) -> None:
    """Half upgrade the project. Then delete records from the old collection, as a program does that knows nothing of rmvdb."""
    project.ask(*NAIVE, "--until", "0.5")
    old = project.json("gallery", "show")["collections"][0]["name"]
    with project.opened() as opened:
        ids = [record.id for page in opened.store.scan(old, fields=()) for record in page][:count]
        opened.store.delete(old, ids)


def test_records_that_vanished_hold_back_the_cut_over_until_the_user_accepts_it(project: Project) -> None:
    deleted_by_another_program(project, 20)
    said = project.ask(*NAIVE, code=1).stderr
    assert "20 records of the work list are gone" in said
    assert "rmvdb cutover --accept-missing" in said
    assert project.json("status")["phase"] == "serving both"
    project.ask("cutover", code=1)  # nor by asking again
    project.ask("cutover", "--accept-missing")
    assert project.json("status")["phase"] == "cut over"
    everything_is_found(project, missing=20)


@pytest.mark.parametrize(("share", "code"), [("0.06", 0), ("0.04", 1)])
def test_a_setting_says_how_many_may_vanish(project: Project, monkeypatch: pytest.MonkeyPatch, share: str, code: int) -> None:
    monkeypatch.setenv("RMVDB_BACKFILL__MISSING", share)
    deleted_by_another_program(project, 20)  # a twentieth
    done = project.ask(*NAIVE, code=code)
    assert "20 records of the work list are gone" in done.stdout + done.stderr


def without(project: Project, ids: Iterable[int]) -> None:
    """Let the source have no items of these records any more."""
    project.fault(missing=list(ids))


def test_what_nothing_holds_any_more_is_named_as_lost_for_good(project: Project) -> None:
    project.ask(*NAIVE, "--until", "0.5")
    new = project.json("gallery", "show")["collections"][-1]["name"]
    with project.opened() as opened:
        gone, back = (record.id for record in next(opened.store.scan(new, fields=()))[:2])
        opened.store.delete(new, [gone, back])
    for path in (project.folder / ".rmvdb" / "archive").rglob("*.parquet"):
        path.write_bytes(b"damaged")
    without(project, [gone])
    said = project.ask("verify", "--repair", "--yes", code=None)
    assert f"1 record is lost for good, such as {gone}" in said.stdout + said.stderr
    assert f"restored from the source, without the fields that nothing holds any more: {back}" in said.stdout + said.stderr


def test_clean_up_says_what_it_keeps(project: Project) -> None:
    project.ask(*NAIVE)
    said = project.ask("cleanup", "--yes")
    assert "kept for another upgrade: history, model versions, transforms and cache; rmvdb gc" in said.stdout + said.stderr
    everything_is_found(project)


def test_a_registry_that_went_back_is_told_by_status_and_doctor(project: Project) -> None:
    registry = project.folder / ".rmvdb" / "registry.sqlite"
    with project.opened() as opened:
        opened.registry.engine.dispose()
    with sqlite3.connect(registry) as held, sqlite3.connect(project.folder / "backup.sqlite") as kept:
        held.backup(kept)
    project.ask(*NAIVE, "--until", "0.5")
    (project.folder / ".rmvdb" / "manifest.json").unlink()
    with sqlite3.connect(project.folder / "backup.sqlite") as kept, sqlite3.connect(registry) as held:
        kept.backup(held)
    doctor = project.ask("doctor", code=1)
    assert "gone back" in doctor.stdout + doctor.stderr
    assert "gone back" in project.json("status")["gone_back"]
    refused = project.ask(*NAIVE, code=2).stderr
    assert "gone back" in refused
    assert "rmvdb registry rebuild" in refused


def test_a_clock_that_jumped_is_told_by_status_and_doctor(project: Project) -> None:
    project.ask("upgrade", *NAIVE[1:], "--until", "0.5")
    with sqlite3.connect(project.folder / ".rmvdb" / "registry.sqlite") as registry:
        # As a process finds it whose last look was just before an administrator set the clock.
        registry.execute("UPDATE clock SET jump = 3600, jumped_at = ?", (time.time(),))
    wait_until(lambda: "went 3,600 s ahead" in project.json("status")["held_back"])
    doctor = project.ask("doctor", code=None)
    assert "went 3,600 s ahead" in doctor.stdout + doctor.stderr


def test_a_picture_over_the_limit_is_set_aside_and_the_others_are_upgraded(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    from PIL import Image

    folder = project.folder / "pictures"
    folder.mkdir()
    for id in IDS[:40]:
        size = (600, 600) if id == 7 else (8, 8)
        Image.new("RGB", size, (id * 5 % 256, id * 31 % 256, id * 83 % 256)).save(folder / f"{id}.png")
    with (project.folder / "models.py").open("a") as models:
        models.write(PIXELS)
    for name in ("p1", "p2"):
        project.ask("model", "add", name, "--embedder", f"models:{name}", "--metric", "L2")
    words = ("gallery", "add", "pictures", "--model", "p1", "--source", f"folder:{folder}/{{id}}.png", "--id-type", "INT64")
    project.ask(*words)
    with project.opened() as opened, opened.client("pictures") as client:
        client.upsert([{"id": id, "item": folder / f"{id}.png"} for id in IDS[:40]])
    monkeypatch.setenv("RMVDB_ITEMS__MAX_PIXELS", "300000")
    upgrade = ("upgrade", "--from", "p1", "--to", "p2", "--gallery", "pictures", "--method", "naive")
    assert "1 record is quarantined" in project.ask(*upgrade, code=1).stderr
    assert "360,000 pixels, and items.max_pixels is 300,000" in project.ask("quarantine", "list", "--gallery", "pictures").stdout
    assert project.json("status", "--gallery", "pictures")["done"] == 39


PIXELS = """

class Pixels:
    def __init__(self, seed, dim):
        self.matrix = np.random.default_rng(seed).normal(size=(192, dim)).astype(np.float32)

    def state_dict(self):
        return {"matrix": self.matrix}

    def embed(self, items):
        import rmvdb

        pictures = [np.asarray(rmvdb.read_image(each).convert("RGB").resize((8, 8)), np.float32).ravel() for each in items]
        return np.stack(pictures) / 255 @ self.matrix


def p1():
    return Pixels(1, 8)


def p2():
    return Pixels(2, 10)
"""
