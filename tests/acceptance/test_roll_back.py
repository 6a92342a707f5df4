"""Roll backs, by the real command: the same ids, fields and vectors are there again, and so are later writes."""

from __future__ import annotations

import numpy as np
import pytest

from rmvdb.upgrade.work_list import LEAST_BATCH
from tests.acceptance.conftest import IDS, NAIVE, TRAINED
from tests.support.application import searching
from tests.support.project import Project


@pytest.mark.parametrize("until", ["0", "0.3", "1", "cut over"])
def test_a_roll_back_gives_back_the_same_ids_fields_and_vectors(planned: Project, until: str) -> None:
    project = planned
    app = project.app()
    old = app.registry.plan("things").legs[0].collection
    before = app.store.get(old, IDS, vector=True)
    share = 1.0 if until == "cut over" else float(until)
    project.ask(*TRAINED, "--until", str(share), *([] if until == "cut over" else ["--no-cutover"]))
    assert project.json("status")["t"] == pytest.approx(share, abs=LEAST_BATCH / len(IDS))  # to a batch
    with searching(project, IDS) as watch:
        project.run("rollback")
    assert watch.trouble == []
    after = app.store.get(old, IDS, vector=True)
    assert [record.id for record in after] == IDS
    assert all(np.array_equal(a.vector, b.vector) and a.fields == b.fields for a, b in zip(before, after, strict=True))
    project.ask("cleanup", "--yes")
    assert project.collections() == {"v1": 400}


def test_a_roll_back_keeps_the_writes_made_since(planned: Project) -> None:
    project = planned
    models = project.models()
    project.ask(*TRAINED, "--until", "0.5", "--no-cutover")
    with project.client() as client:
        project.editions(**{"7": 1})
        client.upsert([{"id": 7, "item": models.item(7), "label": 99}, {"id": 1001, "item": models.item(1001), "label": 5}])
        client.delete([8, 9])
    project.ask("rollback")
    with project.client() as client:
        found = {record.id: record.fields["label"] for record in client.get([7, 8, 9, 1001])}
        assert client.count() == 399
        assert client.search(models.item(7), limit=1)[0].id == 7
    assert found == {7: 99, 1001: 5}
    app = project.app()
    record = app.store.get(app.registry.plan("things").legs[0].collection, [7], vector=True)[0]
    own = app.loaded_models.embed("v1", [models.item(7)])[0]
    assert np.allclose(record.vector, own, atol=1e-5)


def test_a_roll_back_to_the_original_takes_a_moment(project: Project) -> None:
    """The gallery is adopted. No record ever leaves the original, so no consent is needed."""
    plan = project.json("plan", "--from", "v1", "--to", "v2", "--method", "naive", "--instant-rollback")
    assert plan["cost"]["copy_bytes"] == plan["cost"]["archive_bytes"] > 0
    original = project.json("status")["legs"][0]["collection"]
    with searching(project, IDS) as watch:
        out = project.run(*NAIVE, "--instant-rollback", "--until", "0.5", "--no-cutover").stdout
        assert f"copying {original} into" in out
        assert project.json("status")["mirrors"] == [original]
        assert {each["name"]: each["records"] for each in project.json("gallery", "show", "things")["collections"]}[
            original
        ] == 400
        write_one(project, 7)
        out = project.run("rollback").stdout
        assert f"rolled back: only {original} is searched now" in out
        status = project.json("status")
        assert (status["phase"], status["legs"], status["mirrors"]) == (
            "cut over",
            [{"collection": original, "model": "v1"}],
            [],
        )
        project.ask("cleanup", "--yes")
        assert project.collections() == {"v1": 400}
        project.ask(*NAIVE, "--instant-rollback")
        out = project.ask("cleanup", "--yes").stdout
        assert original in out
    assert watch.trouble == []
    assert project.collections() == {"v2": 400}
    with project.client() as client:
        assert [record.fields["label"] for record in client.get([7])] == [50]


def write_one(project: Project, id: int) -> None:
    """Change a record as an application does."""
    models = project.models()
    project.editions(**models.editions() | {str(id): 1})
    with project.client() as client:
        client.upsert([{"id": id, "item": models.item(id), "label": 50}])
