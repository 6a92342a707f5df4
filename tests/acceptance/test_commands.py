"""Commands that tell something, on a gallery in the middle of an upgrade."""

from __future__ import annotations

import sqlite3

import pytest

from rmvdb.schema import REVISION_TABLE
from tests.acceptance.conftest import NAIVE
from tests.support.project import Project


@pytest.fixture
def half(project: Project) -> Project:
    """Half of the gallery is moved."""
    project.ask(*NAIVE, "--until", "0.5", "--no-cutover")
    return project


def test_history_tells_every_phase_in_order(half: Project) -> None:
    half.ask(*NAIVE)
    half.ask("cleanup", "--yes")
    told = half.json("history")

    phases = list(dict.fromkeys(each["phase"] for each in told))
    assert phases == ["planned", "serving both", "cut over", "cleaning up", "ended"]
    assert [each["at"] for each in told] == sorted(each["at"] for each in told)
    assert {(each["from"], each["to"]) for each in told} == {("v1", "v2")}
    assert "verified 400 records" in half.ask("history").stdout


def test_search_explains_its_legs_and_both_distances(half: Project) -> None:
    found = half.json("search", "any words", "--explain", "--limit", "5", "--field", "label")

    assert [leg["model"] for leg in found["legs"]] == ["v2", "v1"]
    assert [leg["embedder"] for leg in found["legs"]] == ["v2", "v1"]
    assert len(found["hits"]) == 5
    assert {hit["leg"] for hit in found["hits"]} <= {leg["collection"] for leg in found["legs"]}
    assert [hit["distance"] for hit in found["hits"]] == sorted(hit["distance"] for hit in found["hits"])
    assert all({"raw", "fields"} <= hit.keys() and "label" in hit["fields"] for hit in found["hits"])
    words = half.ask("search", "any words", "--explain").stdout
    assert "v1" in words
    assert "raw" in words


def test_the_source_of_a_gallery_can_be_changed(project: Project) -> None:
    said = project.ask("gallery", "source", "things", "folder:photos/{id}.jpg").stdout
    assert "folder:photos/{id}.jpg" in said
    assert project.json("gallery", "show")["source"] == "folder:photos/{id}.jpg"
    refused = project.ask("gallery", "source", "things", "folder", code=None)
    assert refused.returncode in (1, 2)
    assert "Traceback" not in refused.stderr
    assert project.json("gallery", "show")["source"] == "folder:photos/{id}.jpg"


def test_db_check_says_whether_the_registry_is_at_this_versions_schema(project: Project) -> None:
    assert "at schema" in project.ask("db", "check").stdout
    with sqlite3.connect(project.folder / ".rmvdb" / "registry.sqlite") as database:
        database.execute(f"UPDATE {REVISION_TABLE} SET version_num = '0000'")
    refused = project.ask("db", "check", code=1)
    assert "rmvdb db upgrade" in refused.stderr or "newer" in refused.stderr
    assert "Traceback" not in refused.stderr
