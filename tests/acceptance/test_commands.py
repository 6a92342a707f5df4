"""Commands that tell something, on a gallery in the middle of an upgrade."""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from sqlalchemy import text

from rmvdb.engines.milvus import MilvusStore
from rmvdb.learning.method import Method
from rmvdb.planning.question import Question
from rmvdb.registry.schema import REVISION_TABLE, head
from rmvdb.types import Index, Record, Segments
from tests.acceptance.conftest import IDS, NAIVE, copy, once
from tests.support.project import Project

HALF = (*NAIVE, "--rescore", "0", "--until", "0.5", "--no-cutover")


@pytest.fixture(scope="module")
def half_template(template: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project of which half of the gallery is moved; nothing runs in it."""

    def move(folder: Path) -> Project:
        project = copy(template, folder)
        project.ask(*HALF)
        return project

    return once(tmp_path_factory, "half", move)


@pytest.fixture
def half(half_template: Path, tmp_path: Path) -> Iterator[Project]:
    """Half of the gallery is moved."""
    project = copy(half_template, tmp_path / "project")
    yield project
    project.stop_engine()


def test_history_tells_every_phase_in_order(half: Project) -> None:
    half.ask(*NAIVE)
    half.ask("cleanup", "--yes")
    told = half.json("history")

    phases = list(dict.fromkeys(each["phase"] for each in told))
    assert phases == ["planned", "serving both", "cut over", "cleaning up", "ended"]
    assert [each["at"] for each in told] == sorted(each["at"] for each in told)
    assert {(each["from"], each["to"]) for each in told} == {("v1", "v2")}
    assert "verified 400 records" in half.ask("history").stdout
    no_way_back = (
        "no upgrade in progress, and the last one is cleaned up; to go back, begin another: rmvdb upgrade --from v2 --to v1"
    )
    assert no_way_back in half.ask("rollback", code=2).stderr


def test_a_step_that_is_over_or_not_begun_is_not_reported_as_done(half: Project) -> None:
    assert "upgrade v1 → v2: no longer paused" in half.ask("resume").stdout
    old, new = (each["name"] for each in half.json("gallery", "show")["collections"])
    half.ask(*NAIVE)
    again = half.ask("cutover").stdout
    assert again.splitlines() == [
        f"cut over already: only {new} is searched",
        f"rmvdb cleanup drops {old}; until then rmvdb rollback leads back",
    ]
    for words in (("pause",), ("resume",), ("throttle", "--rate", "9")):
        assert "The upgrade is cut over: no batch is left to hold back" in half.ask(*words, code=2).stderr
    back = half.ask("rollback")
    assert f"rolled back: 400 records verified, only {old} is searched now" in back.stdout
    assert back.stdout.endswith(f"rmvdb cleanup drops {new}\n")
    lines = [line for line in back.stderr.splitlines() if not line.startswith("waiting for the registry")]  # a busy machine
    waits = [line for line in lines if not re.fullmatch(r"\w+: \d+ of 400", line)]
    assert all(re.match(r"listing the records of |\w+ is empty; looking again in |verifying$", line) for line in waits), waits
    assert "verifying" in waits
    assert not set(waits) & set(back.stdout.splitlines())
    (ended,) = (each for each in half.json("history") if each["phase"] == "ended")
    assert ended["note"] == "a roll back to v1 takes its place"
    half.ask("cleanup", "--yes")
    assert f"phase: ended — no upgrade is on; only {old} is searched" in half.ask("status").stdout


def test_half_is_shown_as_half_and_no_time_is_left_without_a_worker(project: Project) -> None:
    project.ask(*HALF)  # just now: it has a rate
    status, told = project.json("status"), "both collections are searched; 200 of 400 records are re-embedded"
    assert status["doing"] == f"{told}, as far as --until says; to continue, run rmvdb upgrade"
    assert (status["done"], status["workers"], status["eta"]) == (200, [], None)
    assert status["rate"] > 0
    assert status["held_back"] == ""  # a worker would do nothing


def test_verify_names_every_kind_of_difference(half: Project) -> None:
    new = half.json("gallery", "show")["collections"][-1]["name"]
    with half.opened() as opened:
        assert half.json("verify")["problems"] == 0
        lost, other, turned, *_ = next(opened.store.scan(new, fields=None, vector=True))
        opened.store.delete(new, [lost.id])
        opened.store.upsert(new, [replace(other, fields={"label": 99}), replace(turned, vector=-turned.vector)])
        opened.store.upsert(new, [replace(lost, id=5000)])
    said = half.ask("verify", "--sample", "400", code=1).stdout
    assert f"differs: record {lost.id} was moved and is not in {new}" in said
    assert f"differs: record {other.id} has other fields in {new} than it had when it was moved" in said
    assert f"differs: record {turned.id} embedded again lies 2.0e+00 from the stored vector" in said
    assert f"differs: record 5000 is in {new} though it was neither moved nor written there" in said
    assert "differences" in half.ask(*NAIVE, code=1).stderr
    assert half.json("status")["phase"] == "serving both"


def test_verify_repairs_what_was_lost_and_keeps_what_no_write_is_known_of_once_it_may(half: Project) -> None:
    new = half.json("gallery", "show")["collections"][-1]["name"]
    assert "no lost record can be put back" in half.ask("verify", "--repair").stdout
    with half.opened() as opened:
        lost, other, *_ = next(opened.store.scan(new, fields=None, vector=True))
        opened.store.delete(new, [lost.id])
        opened.store.upsert(new, [replace(other, id=5000)])
    asked = half.ask("verify", "--repair", code=2)
    assert "Put back 1 record from the archive. Keep 1 record without a known write, such as 5000" in asked.stdout
    assert "Nothing was changed; run the same command with --yes to agree" in asked.stderr
    said = half.ask("verify", "--repair", "--yes").stdout
    assert "1 record without a known write is kept" in said
    assert said.endswith("0 differences\n")
    with half.opened() as opened:
        assert opened.store.get(new, [lost.id], vector=True)[0].fields == lost.fields
    half.ask(*NAIVE)
    assert half.json("status")["phase"] == "cut over"


def test_verify_repairs_what_the_archive_has_no_more_from_the_old_collection_and_from_the_source(half: Project) -> None:
    old, new = (each["name"] for each in half.json("gallery", "show")["collections"])
    with half.opened() as opened:
        back, bare, *_ = next(opened.store.scan(new, fields=None, vector=True))
        any_vector = next(opened.store.scan(old, vector=True))[0].vector
        opened.store.upsert(old, [replace(back, vector=any_vector)])  # as after the engine has gone back
        opened.store.delete(new, [back.id, bare.id])
    for path in (half.folder / ".rmvdb" / "archive").rglob("*.parquet"):
        path.write_bytes(b"damaged")
    asked = half.ask("verify", "--repair", code=2).stdout
    assert f"Put back 1 record from the old collection. Restore 1 record from the source alone, such as {bare.id}" in asked
    said = half.ask("verify", "--repair", "--yes").stdout
    assert f"1 record was restored from the source, without the fields that nothing holds any more: {bare.id}" in said
    assert said.endswith("0 differences\n")
    with half.opened() as opened:
        held = {each.id: each for each in opened.store.get(new, [back.id, bare.id], vector=True)}
    assert held[back.id].fields == back.fields
    assert held[bare.id].fields != bare.fields
    assert held[bare.id].vector == pytest.approx(bare.vector, abs=1e-6)


def test_doctor_names_a_collection_whose_rows_wait_for_their_index(half: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MilvusStore, "segments", lambda *_: Segments(rows=9_000, waiting=7_000, exact=2_500))
    said = half.ask("doctor", code=1).stdout
    assert said.count("FAIL") == 2
    assert "7000 of 9000 rows wait for their index, and searches with a filter may miss them until they have it" in said


def test_search_explains_its_legs_and_both_distances(half: Project) -> None:
    found = half.json("search", "any words", "--explain", "--limit", "5", "--field", "label")

    assert [leg["model"] for leg in found["legs"]] == ["v2", "v1"]
    assert [leg["embedder"] for leg in found["legs"]] == ["v2", "v1"]
    planned = half.json("status")["prediction"]["calibrated"]
    calibrated = {leg["collection"]: leg["calibrated"] for leg in found["legs"]}
    assert planned is calibrated[found["legs"][1]["collection"]] is True  # the common scale may be the newest leg's own
    assert all((hit["raw"] != hit["distance"]) is calibrated[hit["leg"]] for hit in found["hits"])
    assert len(found["hits"]) == 5
    assert {hit["leg"] for hit in found["hits"]} <= {leg["collection"] for leg in found["legs"]}
    assert [hit["distance"] for hit in found["hits"]] == sorted(hit["distance"] for hit in found["hits"])
    assert all({"raw", "fields"} <= hit.keys() and "label" in hit["fields"] for hit in found["hits"])
    words = half.ask("search", "any words", "--explain").stdout
    assert "v1" in words
    assert "raw" in words


def test_the_list_of_models_shows_their_fingerprints(project: Project) -> None:
    header, *rows = project.ask("model", "list").stdout.splitlines()
    told = {row["name"]: row["fingerprint"] for row in project.json("model", "list")}
    at = header.index("fingerprint")
    assert {row.split()[0]: row[at:].split()[0] for row in rows} == told
    assert all(re.fullmatch("[0-9a-f]{64}", each) for each in told.values())


def test_the_source_of_a_gallery_can_be_changed(project: Project) -> None:
    (project.folder / "photos").mkdir()
    said = project.ask("gallery", "source", "things", "folder:photos/{id}.jpg").stdout
    assert "items come from folder:photos/{id}.jpg; no vector could be compared" in said
    assert project.json("gallery", "show")["source"] == "folder:photos/{id}.jpg"
    said = project.ask("gallery", "source", "things", "folder:mounted/elsewhere/{id}.jpg").stdout
    assert "no vector could be compared: Folder" in said
    assert "mounted/elsewhere does not exist; mount it, or correct the source" in said
    assert "mounted/elsewhere does not exist" in project.ask("doctor", code=1).stdout
    assert "mounted/elsewhere does not exist" in project.ask("plan", "--from", "v1", "--to", "v2", code=1).stderr
    project.ask("gallery", "source", "things", "folder:photos/{id}.jpg")
    refused = project.ask("gallery", "source", "things", "folder", code=None)
    assert refused.returncode in (1, 2)
    assert "Traceback" not in refused.stderr
    assert project.json("gallery", "show")["source"] == "folder:photos/{id}.jpg"


def test_a_version_that_was_removed_and_registered_as_another_model_is_planned_and_embedded_again(project: Project) -> None:
    wrong = project.json("plan", *NAIVE[1:])
    project.ask("model", "remove", "v2")
    project.ask("model", "add", "v2", "--embedder", "models:v3")
    right = project.json("plan", *NAIVE[1:])
    assert set(project.calls("v3")) == {"probe", *map(str, IDS)}
    assert wrong["prediction"] != right["prediction"]
    assert project.json("plan", *NAIVE[1:])["made_at"] == right["made_at"]


def test_a_gallery_is_removed_and_its_collection_stays_unless_rmvdb_made_it_and_may_drop_it(project: Project) -> None:
    (held,) = (each["name"] for each in project.json("gallery", "show")["collections"])
    again = ("gallery", "add", "things", "--model", "v1", "--source")
    project.ask(*again, "call:models:items")
    assert "rmvdb gallery source things 'call:models:v1'" in project.ask(*again, "call:models:v1", code=2).stderr
    with project.opened() as opened, opened.registry.engine.begin() as connection:
        connection.execute(
            text("UPDATE serving_plans SET max_age = 60")
        )  # its client counts, however long this machine stands still
    with project.client():
        assert "is served by client" in project.ask("gallery", "remove", "things", "--yes", code=2).stderr
    assert f"forgotten; {held} stays" in project.ask("gallery", "remove", "things", "--yes").stdout
    assert project.json("gallery", "list") == []
    assert json.loads((project.folder / ".rmvdb" / "manifest.json").read_text())["tables"]["galleries"] == []

    add = ("gallery", "add", "things", "--model", "v1")
    project.ask(*add)
    assert [each["records"] for each in project.json("gallery", "show")["collections"]] == [0]
    project.ask("gallery", "remove", "things", "--drop", "--yes")
    project.ask(*add, "--collection", held)
    assert f"forgotten; {held} stays" in project.ask("gallery", "remove", "things", "--drop", "--yes").stdout
    project.ask(*add, "--collection", held)
    assert project.json("gallery", "show")["collections"][0]["records"] == 400

    project.ask("gallery", "add", "made", "--model", "v2")
    project.ask("gallery", "remove", "made", "--drop", "--yes")
    project.ask("gallery", "add", "made", "--model", "v2")
    assert project.json("gallery", "show", "made")["epoch"] == 1


def test_a_gallery_in_an_upgrade_is_not_forgotten(half: Project) -> None:
    assert "is in upgrade 1 from v1 to v2 (serving both)" in half.ask("gallery", "remove", "things", "--yes", code=2).stderr
    assert half.json("status")["done"] == 200


def test_a_collection_of_others_is_neither_filled_nor_dropped_by_an_upgrade_that_would_be_named_like_it(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("secrets.token_hex", lambda _: "chance")
    held = project.json("gallery", "show")["collections"][0]["name"]
    with project.opened() as opened:
        schema = replace(opened.store.describe(held), collection="things_v2_u1_chance", dim=20)
        opened.store.create(schema, Index(type="FLAT"))
        opened.store.upsert(schema.collection, [Record(id=1, vector=np.ones(20, np.float32), fields={})])
        refused = project.ask(*NAIVE, code=2).stderr
        there = "Collection 'things_v2_u1_chance' exists already and holds records"
        assert f"{there}; drop it, or give up the upgrade with rmvdb rollback" in refused
        project.ask("rollback")
        assert opened.store.count(schema.collection) == 1


def test_a_rollback_that_was_killed_in_giving_up_is_ended_by_the_next(project: Project) -> None:
    held = project.json("gallery", "show")["collections"][0]["name"]
    with project.opened() as opened:
        gallery = opened.registry.gallery("things")
        row = opened.registry.add_upgrade(
            lambda number: {"new_collection": f"things_v2_u{number}", "old_collections": [held]},
            gallery_id=gallery.id, from_version="v1", to_version="v2", phase="planned", method="naive", order="random",
        )  # fmt: skip
        schema = replace(opened.store.describe(held), collection="things_v2_u1", dim=20)
        opened.store.create(schema, Index(type="FLAT"))
        opened.registry.add_collection(gallery.id, model="v2", schema=schema, search={})
        opened.registry.abandon(row.id, note="given up, and killed before anything was dropped")
    assert "dropping things_v2_u1, whose upgrade was given up" in project.ask("rollback").stdout
    assert [each["name"] for each in project.json("gallery", "show")["collections"]] == [held]
    assert "has no upgrade in progress" in project.ask("rollback", code=2).stderr


def test_db_check_says_whether_the_registry_is_at_this_versions_schema(project: Project) -> None:
    assert "at schema" in project.ask("db", "check").stdout
    assert project.json("db", "check")["schema"] == head()
    with sqlite3.connect(project.folder / ".rmvdb" / "registry.sqlite") as database:
        database.execute(f"UPDATE {REVISION_TABLE} SET version_num = '0000'")
    refused = project.ask("db", "check", code=1)
    assert "rmvdb db upgrade" in refused.stderr or "newer" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_a_worker_that_lives_for_months_loads_what_has_a_forgotten_versions_name(project: Project) -> None:
    with project.opened() as worker:
        worker.conductor("things")
        before = worker.loaded_models.embedder("v2")
        project.ask("model", "remove", "v2")
        project.ask("model", "add", "v2", "--embedder", "models:v3")
        worker.conductor("things")
        assert worker.loaded_models.embedder("v2") is not before


def test_the_new_collection_is_called_as_asked(project: Project) -> None:
    (old,) = (each["name"] for each in project.json("gallery", "show")["collections"])
    for name, why in (
        ("2nd", "cannot be called '2nd'"),
        ("rmvdb_owner_of_x", "do not begin with rmvdb_owner_of_"),
        (old, f"Collection '{old}' exists, or existed"),
    ):
        assert why in project.ask(*NAIVE, "--collection", name, code=2).stderr
    assert project.json("history") == []
    project.ask(*NAIVE, "--collection", "things_by_v2", "--until", "0.5", "--no-cutover")
    assert [each["name"] for each in project.json("gallery", "show")["collections"]] == [old, "things_by_v2"]
    assert (
        "fills 'things_by_v2', not 'another'; leave --collection out"
        in project.ask(*NAIVE, "--collection", "another", code=2).stderr
    )
    project.ask(*NAIVE, "--collection", "things_by_v2")
    assert [leg["collection"] for leg in project.json("status")["legs"]] == ["things_by_v2"]


def test_with_json_nothing_but_json_goes_to_stdout(half: Project) -> None:
    _, new = (each["name"] for each in half.json("gallery", "show")["collections"])
    with half.opened() as app:
        moved = next(app.store.scan(new))[0].id
        app.store.delete(new, [moved])
    refused = half.ask("verify", "--repair", "--json", code=2)
    assert refused.stdout == ""
    assert "Do this?" in refused.stderr
    repaired = half.ask("verify", "--repair", "--yes", "--json")
    assert json.loads(repaired.stdout)["problems"] == 0
    assert "1 record was moved and lost since" in repaired.stderr
    assert half.run("gc", "--json", code=None).stdout[:1] in ("", "{")


def test_a_cut_over_that_is_refused_accepts_no_missing_records_for_later(half: Project) -> None:
    half.ask("pause")
    assert "paused" in half.ask("cutover", "--accept-missing", code=2).stderr
    with half.opened() as app:
        (upgrade,) = app.registry.upgrades(app.registry.gallery("things").id)
        assert not upgrade.plan.accept_missing


def test_an_upgrade_that_is_being_cleaned_up_names_that_command(half: Project) -> None:
    half.ask(*NAIVE)
    with half.opened() as app:
        (upgrade,) = app.registry.upgrades(app.registry.gallery("things").id)
        app.registry.begin_clean_up(upgrade.id)
    assert "rmvdb cleanup" in half.ask("cutover", code=2).stderr
    assert "the clean-up has begun; finish it with rmvdb cleanup" in half.ask(*NAIVE).stdout


def test_nothing_is_repaired_before_anything_moved(project: Project) -> None:
    with project.opened() as app:
        conductor = app.conductor("things")
        question = conductor.resolve(Question(gallery="things", from_version="v1", to_version="v2", method=Method.NAIVE))
        conductor.begin(question, conductor.plan(question), app.worker())
    for words in (("verify",), ("verify", "--repair", "--yes")):
        assert "there is nothing to compare yet" in project.ask(*words, code=2).stderr
