"""The main job, by the real command in real processes, on Milvus Lite and SQLite."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import rmvdb.app
from rmvdb import errors
from rmvdb.engines.milvus import MilvusStore
from rmvdb.learning.method import Method
from rmvdb.planning.question import Question
from rmvdb.types import Index, Metric
from rmvdb.upgrade.work_list import LEAST_BATCH
from tests.acceptance.conftest import IDS, NAIVE, TRAINED, UPGRADE
from tests.support.application import searching
from tests.support.project import Project


def test_a_gallery_is_upgraded_while_an_application_searches_it(project: Project) -> None:
    with searching(project, IDS) as watch:
        out = project.run(*UPGRADE).stdout
    assert watch.trouble == []
    assert watch.searches > 5
    assert "cut over: 400 records verified" in out
    status = project.json("status")
    assert (status["phase"], status["t"], status["done"], status["total"]) == ("cut over", 1.0, 400, 400)
    project.run("cleanup", "--yes")
    assert list(project.collections().values()) == [400]
    assert project.json("status")["phase"] == "ended"


def test_the_new_gallery_is_what_an_offline_reindex_would_have_given(planned: Project) -> None:
    project = planned
    project.ask(*TRAINED)
    app = project.app()
    leg = app.registry.plan("things").legs[0]
    models = project.models()
    records = app.store.get(leg.collection, IDS, vector=True)
    raw = app.loaded_models.embed("v2", [models.item(id) for id in IDS])
    expected = app.loaded_models.apply_head(leg.model, raw)
    assert [record.id for record in records] == IDS
    cosines = [float(a.vector @ b / np.linalg.norm(a.vector) / np.linalg.norm(b)) for a, b in zip(records, expected, strict=True)]
    assert min(cosines) > 1 - 1e-5
    assert [record.fields["label"] for record in records] == [models.label(id) for id in IDS]


def test_an_embedding_made_for_the_plan_is_not_made_again(project: Project) -> None:
    first, again = (project.json("plan", *NAIVE[1:], *more)["cost"] for more in ((), ("--again",)))
    assert first["seconds"] == again["seconds"] > 0  # nor is it forgotten how long it took
    project.ask(*NAIVE, "--no-cutover")
    asked = [each for each in project.calls("v2") if each != "probe"]
    assert set(asked) == set(map(str, IDS))
    assert len(asked) == len(IDS) + 1  # one of the sample's only batch is embedded alone, too: are its rows in order?


def test_until_a_share_never_cuts_over(project: Project) -> None:
    project.ask(*NAIVE, "--until", "0.99")  # with the last batch, which is moved as a whole, all is
    now = project.json("status")
    assert (now["phase"], now["t"]) == ("serving both", 1.0)
    project.ask(*NAIVE)
    assert project.json("status")["phase"] == "cut over"


@pytest.mark.parametrize("share", [0.07, 0.5])
def test_a_share_of_a_gallery_that_would_be_one_batch_is_a_share_of_it(
    project: Project, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    monkeypatch.setenv("RMVDB_BACKFILL__BATCH", "1000")
    project.run(*NAIVE, "--until", str(share))
    now = project.json("status")
    assert (now["phase"], now["done"]) == ("serving both", pytest.approx(share * len(IDS), abs=LEAST_BATCH))
    assert 0 < now["done"] < len(IDS)


def test_an_application_reads_and_writes_as_if_no_upgrade_were_on(planned: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    # Its searches are rescored. On a busy machine some end in time and others do not, and these rank otherwise.
    monkeypatch.setenv("RMVDB_SEARCH__RESCORE_MS", "20000")
    project = planned
    models = project.models()
    project.ask(*TRAINED, "--until", "0.5", "--no-cutover")
    with project.client() as client:
        assert len(client.plan.legs) == 2
        assert client.count() == 400
        assert client.count("label == 3") == sum(models.label(id) == 3 for id in IDS)
        assert [record.id for record in client.query("label == 3", limit=5)] == [id for id in IDS if models.label(id) == 3][:5]
        assert [record.id for record in client.get([5, 399, 5, 77])] == [5, 399, 77]
        project.editions(**{"5": 1, "399": 1})
        client.upsert([{"id": id, "item": models.item(id), "label": 50} for id in (5, 399, 2000)])
        assert client.count("label == 50") == 3
        for id in (5, 399, 2000):
            assert client.search(models.item(id), limit=1, output_fields=["label"])[0].fields["label"] == 50
        assert client.delete(filter="label == 50") == 3
        assert client.count() == 398
        first, both = client.search(models.item(1), limit=10), client.search([models.item(1), models.item(2)], limit=10)
        assert [hit.id for hit in both[0]] == [hit.id for hit in first]
        assert [hit.id for hit in client.search(models.item(1), limit=5, offset=5)] == [hit.id for hit in first[5:]]
        vector = client._loaded_models.embed("v2", [models.item(1)])[0]
        assert [hit.id for hit in client.search(vector=vector, model="v2", limit=10)] == [hit.id for hit in first]
        with pytest.raises(rmvdb.errors.Mismatch, match="No transform leads from vectors of model 'v1'"):
            client.search(vector=np.zeros(16, np.float32), model="v1")
    project.ask(*TRAINED)
    with project.client() as client:
        assert client.count() == 398


def test_a_query_is_embedded_once_and_twice_only_by_naive(planned: Project) -> None:
    project = planned
    models = project.models()
    for method, expected in (("rm", {"v1": 0, "v2": 1}), ("naive", {"v1": 1, "v2": 1})):
        # With rescoring the record 3 itself may be embedded, too. Whether a plan takes it depends on the machine's speed.
        project.ask(*UPGRADE, "--until", "0.5", "--no-cutover", "--method", method, "--rescore", "0")
        before = {version: project.calls(version).count("3") for version in expected}
        with project.client() as client:
            client.search(models.item(3))
        assert {version: project.calls(version).count("3") - before[version] for version in expected} == expected
        project.ask("rollback")
        project.ask("cleanup", "--yes")


def test_a_plan_changes_nothing(project: Project) -> None:
    before = (project.collections(), project.json("model", "list"))
    plan = project.json("plan", *UPGRADE[1:], "--sample", "300")
    assert plan["prediction"]["evaluated"] > 0
    assert (project.collections(), project.json("model", "list")) == before
    assert project.json("status")["upgrade"] is None


def test_an_adopted_collection_is_emptied_only_with_consent(project: Project) -> None:
    old = project.copied("copied")
    other = project.another()
    other.ask("model", "add", "v1", "--embedder", "models:v1")
    other.ask("model", "add", "v2", "--embedder", "models:v2")
    other.ask("gallery", "add", "mine", "--model", "v1", "--collection", old, "--source", "call:models:items")
    dry = other.ask(*NAIVE).stdout
    assert dry.startswith(f"dry run: rmvdb did not make {old}. Without --execute it plans and changes nothing\n")
    assert "dry run: nothing has changed. To upgrade, run the same command with --execute." in dry.splitlines()[-1]
    assert other.json("gallery", "show", "mine")["collections"][0]["records"] == 400
    assert other.json("status")["upgrade"] is None
    app = rmvdb.app.load(other.folder)
    conductor = app.conductor("mine")
    question = conductor.resolve(Question(gallery="mine", from_version="v1", to_version="v2", method=Method.NAIVE))
    plan = conductor.plan(question)
    with pytest.raises(errors.NeedsConsent, match="run the same command with --execute to agree"):
        conductor.begin(question, plan, app.worker())
    assert "dry run" not in other.ask(*NAIVE, "--execute").stdout
    assert other.json("status")["phase"] == "cut over"
    assert f"Drop {old} (yours, adopted; 0 records) and the archive?" in other.run("cleanup", code=2).stdout


def test_an_adopted_collection_is_searched_with_the_parameters_of_its_index(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = rmvdb.app.load(project.folder)
    schema = app.store.describe(project.json("gallery", "show")["collections"][0]["name"])
    for name in ("mine", "other"):
        app.store.create(replace(schema, collection=name), Index(type="IVF_FLAT", params={"nlist": 16}))
    adopt = ("gallery", "add", "--model", "v1", "mine", "--collection", "mine")
    settings = project.folder / "rmvdb.toml"
    before = settings.read_text()

    settings.write_text(f'{before}\n[indexes.mine]\ntype = "IVF_FLAT"\nsearch = {{ nprobe = 17 }}')
    assert "IVF_FLAT index: search.nprobe = 17 must not exceed params.nlist = 16" in project.ask(*adopt, code=2).stderr
    settings.write_text(f'{before}\n[indexes.mine]\ntype = "IVF_FLAT"\nsearch = {{ nprobe = 7 }}')
    project.ask(*adopt)
    settings.write_text(f"{before}\n[indexes.other]\nsearch = {{ level = 2 }}")
    told = project.ask(*adopt[:4], "other", "--collection", "other").stdout

    assert "its index is of type IVF_FLAT and index.search for AUTOINDEX: it is searched with Milvus' own" in told
    assert project.json("gallery", "show", "mine")["collections"][0]["search"] == {"nprobe": 7}
    asked: list[object] = []
    search = MilvusStore.search
    monkeypatch.setattr(MilvusStore, "search", lambda *words, **named: asked.append(named["search"]) or search(*words, **named))
    for gallery in ("mine", "other"):
        with rmvdb.connect(project.folder, gallery=gallery) as client:
            client.search(project.models().item(1), limit=1)
    assert asked == [{"nprobe": 7}, {}]


@pytest.mark.parametrize(("old_metric", "new_metric"), [("L2", "L2"), ("IP", "COSINE"), ("LORENTZ", "COSINE"), ("L2", "LORENTZ")])
def test_other_metrics_and_a_change_of_metric_are_upgraded_too(tmp_path: Path, old_metric: str, new_metric: str) -> None:
    project = Project(tmp_path).prepare(IDS, old_metric=old_metric, new_metric=new_metric)
    upgrade = (*UPGRADE, "--sample", "300")
    project.ask(*upgrade, "--until", "0.5", "--no-cutover")
    models = project.models()
    with project.client() as client:
        hits = client.search(models.item(3), limit=500)
        assert sorted(hit.id for hit in hits) == IDS
        assert len({hit.leg for hit in hits[:50]}) == 2  # distances of both legs are on one scale
        client.upsert([{"id": 3, "item": models.item(3), "label": 77}])
        assert client.search(models.item(3), limit=1, output_fields=["label"])[0].fields == {"label": 77}
    project.ask(*upgrade)
    assert project.json("status")["phase"] == "cut over"
    project.stop_engine()


def test_a_comparable_model_is_served_without_any_transform(project: Project) -> None:
    refused = project.ask("plan", "--from", "v1", "--to", "v2", "--method", "identity", code=1)
    assert "20 dimensions of COSINE cannot be compared with 16 of COSINE" in refused.stderr
    project.ask("model", "add", "kin", "--embedder", "models:kin")
    upgrade = ("upgrade", "--from", "v1", "--to", "kin", "--method", "identity")
    project.ask(*upgrade, "--until", "0.5", "--no-cutover")
    with project.client() as client:
        assert client.plan.embedders == ("kin",)
        hits = client.search(project.models().item(3), limit=500)
        assert sorted(hit.id for hit in hits) == IDS
    project.ask(*upgrade)
    assert project.json("status")["phase"] == "cut over"


def test_a_model_that_is_declared_compatible_is_upgraded_to_without_training(project: Project) -> None:
    add = ("model", "add", "--compatible-with", "v1")
    refused = project.ask(*add, "v9", "--embedder", "models:v2", code=2).stderr
    assert "'v9' has dimension 20, 'v1' has 16, so their vectors cannot be compared; leave --compatible-with out" in refused
    refused = project.ask(*add, "v9", "--embedder", "models:kin", "--metric", "IP", code=2).stderr
    assert "'v9' has metric IP, 'v1' has COSINE" in refused
    assert "compatible with v1" in project.ask(*add, "kin", "--embedder", "models:kin").stdout
    assert {each["name"]: each["compatible_with"] for each in project.json("model", "list")} == {
        "v1": None,
        "v2": None,
        "kin": "v1",
    }
    project.ask(*add, "posing", "--embedder", "models:stranger")
    kin, posing = (project.json("plan", "--from", "v1", "--to", to, "--labels", "label") for to in ("kin", "posing"))
    assert (kin["method"], kin["prediction"]["verdict"] == "refuse") == ("identity", False)
    assert kin["prediction"]["choice"].endswith("so nothing is trained")
    assert posing["method"] != "identity"
    assert "declared to be compatible, but would start below" in posing["prediction"]["choice"]


def test_records_with_varchar_ids_are_upgraded_too(tmp_path: Path) -> None:
    ids = [f"ü/\\ {n}%" for n in range(200)]  # Milvus Lite 2.5 takes no quotes
    project = Project(tmp_path).prepare(ids)
    with searching(project, ids) as watch:
        project.run(*NAIVE)
    assert watch.trouble == []
    assert sorted(project.collections().values()) == [0, 200]


def test_a_small_gallery_of_another_metric_is_merged_on_one_scale(tmp_path: Path) -> None:
    """Too few records to measure on; squared Euclidean distances beside cosine ones would put every old record last."""
    ids = list(range(1, 51))
    project = Project(tmp_path / "project", batch=20).prepare(ids, old_metric="L2", new_metric="COSINE")
    project.ask(*NAIVE, "--until", "0.5", "--no-cutover")
    with project.client() as client:
        new, old = client.plan.legs
        assert (old.metric, new.metric) == (Metric.L2, Metric.COSINE)
        assert old.calibration is not None
        assert new.calibration is None  # the common scale is its own
        found = [client.search(project.models().item(id), limit=10) for id in ids]
    assert [hits[0].id for hits in found] == ids
    share = project.json("status")["t"]
    assert abs(sum(hit.leg == new.collection for hits in found for hit in hits) / 500 - share) < 0.2
    few = Project(tmp_path / "few").prepare(ids[:3], old_metric="L2", new_metric="COSINE")
    assert "3 records are too few to bring distances of L2 and COSINE to one scale" in few.ask(*NAIVE, code=1).stderr
