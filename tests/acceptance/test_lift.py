"""`--method fct`: the old gallery lifted into the new space, then re-embedded; by the real command, on Milvus Lite and SQLite."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from tests.support.application import searching
from tests.support.project import Project

IDS = list(range(1, 401))
#: With the time to train: on a busy machine two minutes may end the training too early.
TIME = ("--minutes", "30")
LABELS = ("--from", "v1", "--to", "v2", "--labels", "label")
FCT = (*LABELS, *TIME, "--order", "classification-score", "--method", "fct", "--side", "hint")


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """A gallery of L2 whose records carry side information, except for a few."""
    project = Project(tmp_path / "project", batch=50).prepare(IDS, fill=False, old_metric="L2")
    models = project.models()
    with project.client() as client:
        hints = {id: {"hint": [float(part) for part in models.latent(id)[8:20]]} for id in IDS if id % 50}
        rows = ({"id": id, "item": models.item(id), "label": models.label(id), **hints.get(id, {})} for id in IDS)
        client.upsert(list(rows))
    return project


def records_embedded(project: Project) -> list[str]:
    """Return the records that v2 has been asked to embed, queries among them; each process that loads it embeds some probes,
    too."""
    return [id for id in project.calls("v2") if id != "probe"]


def test_a_lifted_gallery_is_searched_by_the_new_model_from_the_start(project: Project) -> None:
    plan = project.json("plan", *FCT)
    told = plan["prediction"]
    assert told["verdict"] in ("ok", "warn")
    assert told["curve"]["map"][0] > told["naive"]["map"][0] + 0.02  # without side information it is less
    assert "copy_bytes" not in plan["cost"]  # it becomes the new collection
    embedded = len(records_embedded(project))

    with searching(project, IDS) as watch:
        out = project.run("upgrade", *FCT, "--until", "0.5", "--no-cutover").stdout
        [(original, copy)] = re.findall(r"lifting (\w+) into (\w+)$", out, re.MULTILINE)
        expect_least_certain_first(project, original, copy)
        embedded += len(IDS)
        with project.client() as client:
            legs, mirrors = client.plan.legs, client.plan.mirrors
            assert [(leg.collection, leg.embedder, leg.transforms, leg.metric) for leg in legs] == [(copy, "v2", (), "COSINE")]
            assert [(leg.collection, leg.embedder) for leg in mirrors] == [(original, "v1")]
            models = project.models()
            client.upsert([{"id": 7, "item": models.item(7), "label": models.label(7), "hint": "none known"}])
        project.ask("rollback")
        with project.client() as client:
            assert [leg.collection for leg in client.plan.legs] == [original]
        project.ask("cleanup", "--yes")
        project.run("upgrade", *FCT, "--until", "0.3", "--no-cutover")
        said = project.ask("upgrade", *LABELS, "--method", "rm", code=2).stderr
        assert "uses the method fct, not rm; leave --method out to resume it" in said
        assert "continuing upgrade" in project.run("upgrade", *FCT).stdout
    assert watch.trouble == []
    # The backfill embeds no record that the plan embedded. The verification embeds half of the records again.
    assert len(records_embedded(project)) - embedded < watch.searches + len(IDS) / 2 + 50
    project.ask("cleanup", "--yes")
    assert project.collections() == {"v2": 400}
    project.stop_engine()


def expect_least_certain_first(project: Project, original: str, copy: str) -> None:
    """Expect that the records of which the old model's classifier is least certain came first. About half have the new model's
    own vector."""
    models = project.models()
    with project.opened() as opened:
        old = np.stack([record.vector for record in opened.store.get(original, IDS, vector=True)])
        new = np.stack([record.vector for record in opened.store.get(copy, IDS, vector=True)])
    certain = models.Classifier().scores(old).max(axis=1)
    own = models.v2().embed([models.item(id) for id in IDS])
    own /= np.linalg.norm(own, axis=1, keepdims=True)
    new /= np.linalg.norm(new, axis=1, keepdims=True)
    moved = (own * new).sum(axis=1) > 1 - 1e-5
    assert 200 <= moved.sum() < 260
    assert certain[moved].max() <= certain[~moved].min() + 1e-6


def test_a_plan_with_a_warning_goes_on_only_if_the_risk_is_accepted(project: Project) -> None:
    """52 held-out records do not show that a lifted gallery starts no lower than v1."""
    few = (*FCT, "--sample", "260")
    assert project.json("plan", *few)["prediction"]["verdict"] == "warn"
    words = (
        "upgrade",
        *(word for word in few if word not in ("--method", "fct")),
        "--method=fct",
        "--until",
        "0",
        "--no-cutover",
    )
    done = project.ask(*words, code=2)  # these words have no consent of the helper's
    assert "fct may start below the old model" in done.stderr
    assert "run the same command with --accept-risk to go on all the same" in done.stderr
    assert project.json("status")["upgrade"] is None
    project.ask(*words, "--accept-risk")
    assert project.json("status")["phase"] == "serving both"


def test_a_gallery_that_cannot_be_lifted_is_refused_in_a_sentence(project: Project) -> None:
    said = project.ask("plan", *FCT[:-1], "label", code=2).stderr
    assert "side information is a list of numbers, as long in every record" in said
    said = project.ask("upgrade", *LABELS, "--side", "hint", code=2).stderr
    assert "auto does not try it; add --method fct" in said
    said = project.ask("plan", *LABELS, "--method", "rm", "--side", "hint", code=2).stderr
    assert "Only the method fct uses side information, not rm" in said
    with project.client() as client:
        client.upsert([{"id": 7, "item": project.models().item(7), "label": 3, "hint": "none known"}])
    said = project.ask("plan", *FCT, code=2).stderr
    assert "Field 'hint' of record 7 is 'none known'" in said
    said = project.ask("plan", *FCT[:-1], "unknown", code=2).stderr
    assert "0 records of the sample have something in field 'unknown', which is too few to learn from" in said
    said = project.ask("plan", *FCT[:-2], "--paper", code=2).stderr
    assert "fct is always trained with its own paper's settings; leave --paper out" in said
    assert set(project.calls("v2")) == {"probe"}  # it is said before anything is embedded
    project.stop_engine()
