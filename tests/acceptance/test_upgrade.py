"""The main job, by the real command in real processes, on Milvus Lite and SQLite."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rmvdb.app
from rmvdb import errors
from rmvdb.app.daemon import Scheduler
from rmvdb.app.window import Window
from rmvdb.engines.milvus import MilvusStore
from rmvdb.learning.method import Method
from rmvdb.planning.question import Question
from rmvdb.types import Id, Index, Metric
from rmvdb.upgrade import leadership
from rmvdb.upgrade.work_list import LEAST_BATCH
from tests.acceptance.conftest import IDS, NAIVE, TRAINED, UPGRADE
from tests.support.project import Project


@dataclass
class Watch:
    """The observations of an application that searches all the time."""

    searches: int = 0
    failed: list[str] = field(default_factory=list)
    missed: list[Any] = field(default_factory=list)
    duplicated: list[Any] = field(default_factory=list)

    @property
    def trouble(self) -> list[Any]:
        return [*self.failed[:3], *self.missed[:3], *self.duplicated[:3]]


@contextmanager
def searching(project: Project, ids: Sequence[Id]) -> Iterator[Watch]:
    """Give an application that asks for the whole gallery again and again while the block runs."""
    watch, stop = Watch(), threading.Event()
    models = project.models()

    def go_on(client: rmvdb.Client) -> None:
        while not stop.is_set():
            try:
                hits = client.search(models.item(ids[watch.searches % len(ids)]), limit=len(ids) + 50)
            except Exception as exc:  # noqa: BLE001 (whatever it is, a search failed)
                watch.failed.append(repr(exc))
                continue
            time.sleep(0.1)  # the upgrade needs a share of the machine, too
            found = [hit.id for hit in hits]
            watch.searches += 1
            if missing := set(ids) - set(found):
                watch.missed.append((watch.searches, sorted(missing)[:5], len(missing)))
            if len(found) != len(set(found)):
                watch.duplicated.append(watch.searches)

    with pytest.MonkeyPatch.context() as patch, project.client() as client:
        patch.setattr("rmvdb.serving.search.ATTEMPTS", 25)  # on a slow machine a search is so slow that it is repeated
        thread = threading.Thread(target=go_on, args=(client,))
        thread.start()
        try:
            yield watch
        finally:
            stop.set()
            thread.join()


def collections(project: Project) -> dict[str, int]:
    """Return the records of the existing collections, by model version."""
    return {each["model"]: each["records"] for each in project.json("gallery", "show", "things")["collections"]}


def test_a_gallery_is_upgraded_while_an_application_searches_it(project: Project) -> None:
    with searching(project, IDS) as watch:
        out = project.run(*UPGRADE).stdout
    assert watch.trouble == []
    assert watch.searches > 5
    assert "cut over: 400 records verified" in out
    status = project.json("status")
    assert (status["phase"], status["t"], status["done"], status["total"]) == ("cut over", 1.0, 400, 400)
    project.run("cleanup", "--yes")
    assert list(collections(project).values()) == [400]
    assert project.json("status")["phase"] == "ended"


def test_the_new_gallery_is_what_an_offline_reindex_would_have_given(planned: Project) -> None:
    project = planned
    project.ask(*TRAINED)
    app = _app(project)
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


def test_ctrl_c_stops_and_the_same_command_goes_on(project: Project) -> None:
    project.fault(v2={"slow": 0.06})
    first = project.start(*NAIVE, "--sample", "80")
    _until(lambda: project.json("status")["done"] > 0)
    first.send_signal(signal.SIGINT)
    _, err = first.communicate(timeout=60)
    assert first.returncode == 130
    assert "Stopped. Run the same command to resume." in err
    assert 0 < project.json("status")["t"] < 1
    assert project.json("status")["workers"] == []
    with searching(project, IDS) as watch:
        project.run(*NAIVE)
    assert watch.trouble == []
    assert project.json("status")["phase"] == "cut over"


def test_ctrl_c_while_it_plans_stops_it_and_nothing_is_registered(project: Project) -> None:
    project.fault(v2={"slow": 0.06})
    begun = project.calls("v2")
    process = project.start(*UPGRADE)
    _until(lambda: project.calls("v2") != begun)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "Stopped. Run the same command to resume." in err
    assert project.json("status")["upgrade"] is None
    assert len(project.calls("v2")) < len(IDS)


@pytest.mark.parametrize("command", [(*NAIVE, "--sample", "80"), ("worker",)])
def test_ctrl_c_twice_stops_at_once(project: Project, command: tuple[str, ...]) -> None:
    """A batch that is being embedded for half a minute is not waited for."""
    project.ask(*NAIVE, "--sample", "80", "--detach")
    project.fault(v2={"slow": 1.5})
    begun = project.calls("v2")
    process = project.start(*command)
    try:
        _until(lambda: project.calls("v2") != begun)
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        assert any("once more stops at once" in line for line in process.stderr)  # two that come together are one
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=20)
    finally:
        process.kill()
    assert process.returncode == 130
    assert err.strip().endswith("Stopped at once. Run the same command to resume.")


def test_a_killed_upgrade_run_again_ends_in_the_same_state(project: Project) -> None:
    project.fault(v2={"slow": 0.02})
    with searching(project, IDS) as watch:
        for share in (0.1, 0.4):
            first = project.start(*NAIVE, "--sample", "80")
            _until(lambda share=share: project.json("status")["t"] > share)
            first.kill()
            first.communicate()
        project.run(*NAIVE)
    assert watch.trouble == []
    assert project.json("verify")["ok"]
    assert sorted(collections(project).values()) == [0, 400]


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


@pytest.mark.parametrize("until", ["0", "0.3", "1", "cut over"])
def test_a_roll_back_gives_back_the_same_ids_fields_and_vectors(planned: Project, until: str) -> None:
    project = planned
    app = _app(project)
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
    assert collections(project) == {"v1": 400}


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
    app = _app(project)
    record = app.store.get(app.registry.plan("things").legs[0].collection, [7], vector=True)[0]
    own = app.loaded_models.embed("v1", [models.item(7)])[0]
    assert np.allclose(record.vector, own, atol=1e-5)


def test_an_application_reads_and_writes_as_if_no_upgrade_were_on(planned: Project) -> None:
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
        project.ask(*UPGRADE, "--until", "0.5", "--no-cutover", "--method", method)
        before = {version: project.calls(version).count("3") for version in expected}
        with project.client() as client:
            client.search(models.item(3))
        assert {version: project.calls(version).count("3") - before[version] for version in expected} == expected
        project.ask("rollback")
        project.ask("cleanup", "--yes")


def test_a_worker_takes_over_what_detach_left(project: Project) -> None:
    project.ask(*NAIVE, "--detach")
    status = project.json("status")
    assert (status["phase"], status["t"], status["doing"]) == (
        "serving both",
        0.0,
        "both collections are searched; the work list is not made yet",
    )
    assert "waiting for a worker" in status["held_back"]
    worker = project.start("worker")
    try:
        _until(lambda: project.json("status")["phase"] == "cut over")
    finally:
        worker.send_signal(signal.SIGTERM)
        out, err = worker.communicate(timeout=120)
    assert worker.returncode == 0, out + err


@pytest.mark.parametrize("leads", [True, False])
def test_a_worker_that_knew_another_collection_of_that_name_leaves_no_field_behind(project: Project, leads: bool) -> None:
    held = project.json("gallery", "show", "things")["collections"][0]["name"]
    app, other = rmvdb.app.load(project.folder), rmvdb.app.load(project.folder)
    schema = replace(other.store.describe(held), collection="mine")
    other.store.create(replace(schema, dynamic=False), Index(type="FLAT"))
    assert app.store.count("mine") == 0  # the worker's, months ago
    other.store.drop("mine")
    other.store.create(schema, Index(type="FLAT"))
    for page in other.store.scan(held, fields=None, vector=True):
        other.store.upsert("mine", [replace(record, fields={**record.fields, "price": record.id}) for record in page])
    project.ask("gallery", "add", "mine", "--model", "v1", "--collection", "mine", "--source", "call:models:items")
    part = ("--until", "0.1", "--no-cutover")
    project.ask(*NAIVE, "-g", "mine", "--execute", *(("--detach",) if leads else part))
    row = other.registry.active_upgrade(other.registry.gallery("mine").id)
    assert row is not None
    other.registry.set_upgrade(row.id, plan=replace(row.plan, until=1.0))

    scheduler, stop = Scheduler(app, galleries=["mine"], window=Window(None), say=lambda _: None), threading.Event()
    worker = threading.Thread(target=scheduler.run, args=(stop,))
    with nullcontext() if leads else leadership.hold_leadership(other.conductor("mine"), row, other.worker()):
        worker.start()
        try:
            _until(lambda: project.json("status", "-g", "mine")["t"] == 1.0)
        finally:
            stop.set()
            worker.join(30.0)

    moved = [record for page in other.store.scan(row.new_collection, fields=["price"]) for record in page]
    assert [record.fields for record in moved] == [{"price": id} for id in IDS]
    for each in (app, other):
        each.close()


def test_pause_throttle_and_windows_are_obeyed_and_said(project: Project) -> None:
    project.ask(*NAIVE, "--detach")
    project.ask("pause")
    worker = project.start("worker")
    try:
        _until(lambda: project.json("status")["workers"])
        time.sleep(2)
        status = project.json("status")
        assert status["done"] == 0
        assert "paused" in status["held_back"]
        project.ask("throttle", "--rate", "25")
        began = time.monotonic()
        project.ask("resume")
        _until(lambda: project.json("status")["held_back"] == "throttled to 25 records/s")
        _until(lambda: project.json("status")["done"] == 400)
        assert time.monotonic() - began > 10
    finally:
        worker.send_signal(signal.SIGTERM)
        worker.communicate(timeout=120)


def test_a_share_of_time_a_flag_file_and_slow_searches_hold_it_back_and_are_said(project: Project) -> None:
    with (project.folder / "rmvdb.toml").open("a") as settings:
        settings.write('[throttle]\nflag = "hold"\n')
    flag = project.folder / "hold"
    project.ask(*NAIVE, "--detach")
    assert project.ask("throttle", "--nice", "0.001").stdout.endswith(": nice 0.001\n")
    worker = project.start("worker")
    try:
        _until(lambda: project.json("status")["held_back"] == "nice 0.001: copies at most 0.1 % of the time")
        _until(lambda: project.json("status")["done"] > 0)
        flag.touch()
        project.ask("throttle", "--nice", "0")
        _until(lambda: project.json("status")["held_back"] == f"flag file {flag} exists")
        with searching(project, IDS) as watch:  # to the end: what a client did 30 s ago does not count
            _until(lambda: watch.searches > 30)
            project.ask("throttle", "--p99-ms", "0.01")
            _until(lambda: "p99 of client " in project.json("status")["held_back"])
            assert "ms above the ceiling of 0.01 ms" in project.ask("status").stdout
            begun = project.json("status")["done"]
            assert begun <= 3 * 50  # what one burst of a worker may begin
            flag.unlink()
            time.sleep(2)
            assert project.json("status")["done"] == begun
            project.ask("throttle", "--p99-ms", "0")
            _until(lambda: project.json("status")["phase"] == "cut over")
        assert watch.trouble == []
        assert project.json("status")["held_back"] == ""
    finally:
        worker.send_signal(signal.SIGTERM)
        worker.communicate(timeout=120)


def test_a_worker_outside_its_window_waits_and_says_so(project: Project) -> None:
    project.ask(*NAIVE, "--detach")
    closed = (time.localtime().tm_hour + 12) % 24
    worker = project.start("worker", "--window", f"0 {closed} * * *")
    try:
        _until(lambda: "outside its window" in project.json("status")["held_back"])
        assert project.json("status")["done"] == 0
    finally:
        worker.send_signal(signal.SIGTERM)
        worker.communicate(timeout=120)


def test_a_plan_changes_nothing(project: Project) -> None:
    before = (collections(project), project.json("model", "list"))
    plan = project.json("plan", *UPGRADE[1:], "--sample", "300")
    assert plan["prediction"]["evaluated"] > 0
    assert (collections(project), project.json("model", "list")) == before
    assert project.json("status")["upgrade"] is None


def test_an_adopted_collection_is_emptied_only_with_consent(project: Project) -> None:
    old = project.copied("copied")
    other = Project(project.folder / "other", milvus=str(project.folder / ".rmvdb" / "milvus.db"))
    other.ask("init")
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
    assert sorted(collections(project).values()) == [0, 200]


def _app(project: Project) -> Any:
    import rmvdb.app

    project.models()
    return rmvdb.app.load(project.folder)


def _until(true: Any, *, seconds: float = 240) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if true():
            return
        time.sleep(0.2)
    raise AssertionError(f"that was not so within {seconds} s")


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
        assert collections(project) == {"v1": 400}
        project.ask(*NAIVE, "--instant-rollback")
        out = project.ask("cleanup", "--yes").stdout
        assert original in out
    assert watch.trouble == []
    assert collections(project) == {"v2": 400}
    with project.client() as client:
        assert [record.fields["label"] for record in client.get([7])] == [50]


def write_one(project: Project, id: int) -> None:
    """Change a record as an application does."""
    models = project.models()
    project.editions(**models.editions() | {str(id): 1})
    with project.client() as client:
        client.upsert([{"id": id, "item": models.item(id), "label": 50}])


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
