"""Bad input, by the real command: one sentence that names the thing, the value and the way out."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import delete

from rmvdb.errors import CollectionMissing
from rmvdb.registry.tables import ArtifactPartRow
from tests.acceptance.conftest import IDS, NAIVE, TRAINED
from tests.support.project import Project


def refused(project: Project, *words: str, code: int, saying: str, process: bool = False) -> None:
    """Expect that the command ends with that code and one sentence that says so, without a traceback."""
    done = (project.run if process else project.ask)(*words, code=code)
    errors = [line for line in done.stderr.splitlines() if line.startswith("Error: ")]
    assert len(errors) == 1, done.stderr
    assert saying in errors[0]
    assert "Traceback" not in done.stderr + done.stdout


def everything_is_found(project: Project, *, missing: int = 0) -> None:
    with project.client() as client:
        hits = client.search(project.models().item(1), limit=len(IDS) + 10)
    assert len({hit.id for hit in hits}) == len(hits) == len(IDS) - missing


def test_an_unknown_version_is_named_with_the_nearest_one(project: Project) -> None:
    refused(
        project,
        *("upgrade", "--from", "v1", "--to", "v22"),
        code=2,
        saying="No model version is called 'v22'; did you mean 'v2'?",
        process=True,
    )


def test_a_version_cannot_be_upgraded_to_itself(project: Project) -> None:
    refused(project, "upgrade", "--from", "v1", "--to", "v1", code=2, saying="--from and --to both say 'v1'")


def test_a_gallery_of_another_version_is_named(project: Project) -> None:
    project.ask("model", "add", "v3", "--embedder", "models:v3")
    refused(project, "upgrade", "--from", "v3", "--to", "v2", code=2, saying="holds vectors of 'v1', not of 'v3'; use --from v1")


def test_a_third_version_waits_until_there_are_records_of_the_second(project: Project) -> None:
    project.ask("model", "add", "v3", "--embedder", "models:v3")
    project.ask(*NAIVE, "--detach")
    third = ("upgrade", "--from", "v1", "--to", "v3")
    refused(project, *third, code=1, saying="holds 0 records of v2, and a plan needs 60 or more")
    refused(project, *third, "--method", "naive", code=1, saying="holds 0 records of v2, and a plan needs 1 or more")
    refused(project, "upgrade", "--from", "v2", "--to", "v1", code=2, saying="of 'v1' already; name another version by --to")
    assert project.json("status")["upgrade"] == 1


def test_a_third_version_waits_for_the_end_of_a_roll_back_and_for_clean_up(project: Project) -> None:
    project.ask("model", "add", "v3", "--embedder", "models:v3")
    project.ask(*NAIVE)
    third = ("upgrade", "--from", "v2", "--to", "v3", "--method", "naive")
    refused(project, *third, code=2, saying="is in an upgrade from v1 to v2 (cut over); end it first: rmvdb cleanup")
    project.ask("rollback")
    refused(project, *third, code=2, saying="is in a roll back from v2 to v1 (cut over); end it first: rmvdb cleanup")


def test_a_field_of_labels_that_no_record_has_is_named_before_anything_is_embedded(project: Project) -> None:
    plan = ("plan", "--from", "v1", "--to", "v2", "--labels", "lable")
    refused(project, *plan, code=2, saying="No field of the records is called 'lable'; did you mean 'label'?")
    assert [each for each in project.calls("v2") if each != "probe"] == []


def test_records_without_a_label_are_left_out_of_the_sample_and_counted_and_upgraded_like_any_other(project: Project) -> None:
    models = project.models()
    with project.client() as client:
        client.upsert([{"id": id, "item": models.item(id)} for id in range(1, 41)])
    found = project.json("plan", *NAIVE[1:])
    parts = ("trained", "held_out", "evaluated")
    assert (found["unlabelled"], sum(found["prediction"][part] for part in parts)) == (40, 360)
    assert "40 records of the sample have no label and were left out" in project.ask("plan", *NAIVE[1:]).stdout
    project.ask(*NAIVE)
    everything_is_found(project)


def test_two_commands_do_not_conduct_the_same_upgrade(project: Project) -> None:
    project.fault(v2={"slow": 0.06})
    first = project.start(*NAIVE, "--sample", "70")
    try:
        _wait_for(first, "backfilling")
        refused(project, *NAIVE, code=2, saying="works on this upgrade; watch it with rmvdb status --watch")
    finally:
        first.terminate()
        first.communicate(timeout=60)


def test_an_upgrade_that_goes_on_is_not_said_to_be_what_it_was_not_begun_as(project: Project) -> None:
    begun = tuple(word for word in NAIVE if word not in ("--labels", "label"))
    project.ask(*begun, "--until", "0.5")
    for option in (("--instant-rollback",), ("--labels", "label"), ("--paper",)):
        refused(project, *begun, *option, code=2, saying=f"Upgrade 1 was begun without {option[0]}; leave it out to go on")
    for option in (("--sample", "70"), ("--seed", "3")):
        refused(project, *begun, *option, code=2, saying=f"Upgrade 1 was begun with another {option[0]}; leave it out to go on")
    project.ask(*begun, "--until", "0.5", "--seed", "0")
    assert project.json("status")["done"] == 200
    project.ask(*begun)


def test_a_version_is_what_it_is_said_to_be(project: Project) -> None:
    add = ("model", "add", "w", "--embedder", "models:v2")
    refused(project, *add, "--dim", "7", code=2, saying="gives vectors of dimension 20, not 7; correct --dim or leave it out")
    refused(project, *add, "--classifier", "models:nothere", code=1, saying="models:nothere")
    refused(project, *add, "--classifier", "models:Classifier", code=1, saying="The classifier fails for 4 vectors")
    assert {each["name"] for each in project.json("model", "list")} == {"v1", "v2"}


def test_outside_a_project_nothing_is_made(project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    empty = Project.__new__(Project)
    empty.folder = elsewhere
    done = subprocess.run(empty.command("status"), cwd=elsewhere, env=project.environment, capture_output=True, text=True)
    assert (done.returncode, list(elsewhere.iterdir())) == (2, [])
    assert "go to the folder that has rmvdb.toml, or make one: rmvdb init" in done.stderr
    (elsewhere / "file").touch()
    monkeypatch.setenv("RMVDB_HOME", str(elsewhere / "file" / "x"))
    refused(project, "init", code=2, saying="cannot be made (Not a directory); set home, or registry.url, to one that can be")


def test_a_collection_of_another_dimension_or_metric_is_refused(project: Project) -> None:
    held = project.json("gallery", "show")["collections"][0]["name"]
    other = _other(project)
    other.ask("model", "add", "v2", "--embedder", "models:v2")
    other.ask("model", "add", "ip", "--embedder", "models:v1", "--metric", "IP")
    adopt = ("gallery", "add", "mine", "--collection", held, "--model")
    refused(other, *adopt, "v2", code=2, saying="has dimension 16, model version 'v2' gives 20")
    refused(other, *adopt, "ip", code=2, saying="is compared by COSINE, model version 'ip' by IP")


def test_the_same_dimension_from_another_model_is_refused(project: Project) -> None:
    held = project.json("gallery", "show")["collections"][0]["name"]
    other = _other(project)
    other.ask("model", "add", "stranger", "--embedder", "models:stranger")
    adopt = ("gallery", "add", "mine", "--collection", held, "--model", "stranger", "--source", "call:models:items")
    refused(other, *adopt, code=2, saying="were not made by model version 'stranger'")


def test_a_collection_believed_to_be_the_wrong_models_is_found_out_when_there_is_a_source(project: Project) -> None:
    copied = project.copied("copied")
    other = _other(project)
    for version in ("stranger", "v1"):
        other.ask("model", "add", version, "--embedder", f"models:{version}")
    other.ask("gallery", "add", "mine", "--collection", copied, "--model", "stranger")
    source = ("gallery", "source", "mine", "call:models:items")
    refused(other, *source, code=2, saying="were not made by model version 'stranger' from these items: 8 of 8 records, such as ")
    assert other.json("gallery", "show")["source"] is None

    with other.opened() as opened:
        opened.registry.set_source("mine", "call:models:items")
    (found,) = (each for each in other.ask("doctor", code=1).stdout.splitlines() if each.startswith("FAIL"))
    assert "gallery mine: source" in found
    assert "were not made by model version 'stranger'" in found
    right = project.ask("gallery", "source", "things", "call:models:items").stdout
    assert "8 records, embedded again, match the stored vectors" in right
    assert "8 records, embedded again, match the stored vectors" in project.ask("doctor").stdout


def test_a_collection_of_which_no_vector_could_be_compared_is_added_and_fails_as_doctor_does(project: Project) -> None:
    held = project.json("gallery", "show")["collections"][0]["name"]
    project.copied("copied")
    with project.opened() as opened:
        for page in opened.store.scan(held, fields=None, vector=True):
            opened.store.upsert("copied", [replace(record, fields={"caption": None}) for record in page])
    other = _other(project)
    other.ask("model", "add", "v1", "--embedder", "models:v1")
    add = ("gallery", "add", "mine", "--model", "v1", "--collection", "copied", "--source", "field:caption")
    none = "field:caption has no item of record 1, and of 5 of 5 in all"
    for _ in range(2):  # the same again is no error of its own
        said = other.ask(*add, code=1)
        assert "no vector could be compared" in said.stdout
        assert f"Error: {none}; the gallery is added all the same: rmvdb gallery source mine SPEC" in said.stderr
    assert f"FAIL  gallery mine: source: {none}" in other.ask("doctor", code=1).stdout


def test_one_item_that_cannot_be_embedded_is_set_aside_and_the_others_go_on(project: Project) -> None:
    project.fault(v2={"raise": ["7"], "nan": ["9"]}, missing=[11])
    refused(project, *NAIVE, code=1, saying="3 records are quarantined")
    aside = {each["id"]: each["reason"] for each in project.json("quarantine", "list")}
    assert aside == {
        "7": "ValueError: cannot decode item 7",
        "9": "the embedder gives NaN or infinity for it",
        "11": "the source has no item of this id",
    }
    assert project.json("status")["done"] == 397
    everything_is_found(project)
    refused(project, "cutover", code=1, saying="quarantined")
    project.fault(v2={"raise": ["7"]})
    project.ask("quarantine", "retry")
    refused(project, *NAIVE, code=1, saying="1 record is quarantined")
    refused(project, "quarantine", "drop", "77", code=2, saying="No quarantined record is called '77'; did you mean '7'?")
    project.ask("quarantine", "drop", "7", "--yes")
    project.ask(*NAIVE)
    everything_is_found(project, missing=1)


def test_an_upgrade_that_stops_short_of_its_cut_over_tells_of_quarantined_records_by_its_exit_code(project: Project) -> None:
    project.fault(v2={"raise": ["7"]})
    refused(project, *NAIVE, "--no-cutover", code=1, saying="1 record is quarantined, and findable in the old collection")
    project.fault()
    project.ask("quarantine", "retry")
    project.ask(*NAIVE, "--no-cutover")


def test_a_record_that_was_written_since_its_quarantine_is_not_dropped(project: Project) -> None:
    project.fault(v2={"raise": ["7", "9"]})
    refused(project, *NAIVE, code=1, saying="2 records are quarantined")
    project.fault()
    with project.client() as client:
        client.upsert([{"id": 7, "item": project.models().item(7), "label": 3}])
    said = project.ask("quarantine", "drop", "--yes").stdout
    assert said == "1 record is deleted; 1 record was written since, and left\n"
    project.ask(*NAIVE)
    everything_is_found(project, missing=1)
    with project.client() as client:
        assert [record.id for record in client.get([7, 9])] == [7]


def test_several_bad_items_are_set_aside_where_all_others_are_embedded_already(project: Project) -> None:
    """Only they are asked for then, and all that are asked for fail: that is no broken source, and no broken model."""
    project.fault(v2={"raise": ["7", "9"]}, missing=[11, 12])
    project.ask("simulate", "--from", "v1", "--to", "v2", "--methods", "naive", "--orders", "random")
    refused(project, *NAIVE, code=1, saying="4 records are quarantined")
    project.fault()
    project.ask("quarantine", "retry")
    project.fault(missing=[11, 12])  # now a batch of their own
    refused(project, *NAIVE, code=1, saying="2 records are quarantined")
    project.fault()
    project.ask("quarantine", "retry")
    project.ask(*NAIVE)
    everything_is_found(project)


@pytest.mark.parametrize(
    ("fault", "saying"),
    [
        ({"raise_all": True}, "cannot decode item"),
        ({"shape": 5}, "shape"),
        ({"nan": [str(id) for id in IDS]}, "NaN"),
    ],
)
def test_a_broken_model_stops_the_upgrade_which_goes_on_once_the_model_is_corrected(
    project: Project, fault: dict[str, object], saying: str
) -> None:
    project.ask(*NAIVE, "--sample", "80", "--detach")
    project.fault(v2=fault)
    refused(project, *NAIVE, code=1, saying=saying)
    assert saying in project.json("status")["stopped"]
    everything_is_found_by_v1_alone(project)
    project.fault()
    project.ask(*NAIVE)
    everything_is_found(project)


def everything_is_found_by_v1_alone(project: Project) -> None:
    """Expect every record in one collection. No search can show that, because the broken model embeds no query."""
    records = project.json("gallery", "show")["collections"]
    assert max(each["records"] for each in records) == len(IDS)


def test_weights_that_changed_since_they_were_registered_are_refused(project: Project) -> None:
    models = project.folder / "models.py"
    models.write_text(models.read_text().replace('Embedder("v2", 20, 20)', 'Embedder("v2", 19, 20)'))
    refused(project, *NAIVE, code=1, saying="weights of model version 'v2' are not the registered ones")
    assert project.ask("doctor", code=1).stdout.count("FAIL") == 1


def test_an_upgrade_that_would_lower_the_quality_is_not_begun(project: Project) -> None:
    project.ask("model", "add", "stranger", "--embedder", "models:stranger")
    models = project.folder / "models.py"  # without v1 queries cannot be embedded by both models until one is enough
    models.write_text(models.read_text().replace("def v1():", "def gone():"))
    worse = (
        "--from",
        "v1",
        "--to",
        "stranger",
        "--labels",
        "label",
        "--method",
        "identity",
        "--order",
        "random",
        "--rescore",
        "0",
    )
    assert project.json("plan", *worse)["prediction"]["verdict"] == "refuse"
    refused(project, "upgrade", *worse, code=1, saying="identity would start below")
    status = project.json("status")
    assert (status["upgrade"], status["epoch"]) == (None, 1)


def test_a_source_that_knows_nothing_stops_the_upgrade(project: Project) -> None:
    project.fault(missing=IDS)
    refused(project, *NAIVE, code=1, saying="has no item for any of 400 records, such as ", process=True)


def test_a_source_that_forgot_everything_since_stops_the_backfill_and_sets_no_record_aside(project: Project) -> None:
    project.ask(*NAIVE, "--sample", "80", "--detach")
    project.fault(missing=IDS)
    refused(project, *NAIVE, code=1, saying="Repair the source (rmvdb gallery show names it), then run the same command again")
    assert project.json("status")["quarantined"] == 0
    project.fault()
    project.ask(*NAIVE)
    everything_is_found(project)


def test_a_collection_dropped_or_replaced_behind_our_back_is_noticed(project: Project) -> None:
    from rmvdb.types import IdType, Index, Metric, Schema

    held = project.json("gallery", "show")["collections"][0]["name"]
    with project.opened() as opened:
        opened.store.drop(held)
        refused(project, *NAIVE, code=1, saying=held)
        opened.store.create(Schema(collection=held, dim=5, metric=Metric.COSINE, id_type=IdType.INT64), Index(type="FLAT"))
    refused(project, *NAIVE, code=1, saying=f"Collection '{held}' has dim 5, not 16 as when it was registered")


def test_a_missing_or_altered_artifact_comes_from_the_registry_and_is_named_if_that_lacks_it_too(planned: Project) -> None:
    project = planned
    project.ask(*TRAINED, "--detach")
    artifact = next((project.folder / ".rmvdb" / "artifacts").glob("*.safetensors"))
    whole = artifact.read_bytes()
    damages = (lambda: artifact.write_bytes(whole[:-1] + b"x"), lambda: artifact.unlink())
    for damage in damages:
        damage()
        project.ask("search", "x")
        assert [file.read_bytes() for file in artifact.parent.glob(f"{artifact.stem}.*")] == [whole]
    with project.opened() as opened, opened.registry.engine.begin() as connection:
        connection.execute(delete(ArtifactPartRow))
    (artifact,) = artifact.parent.glob(f"{artifact.stem}.*")
    for damage in damages:
        damage()
        refused(project, "search", "x", code=1, saying=artifact.stem)
        artifact.write_bytes(whole)
    project.ask(*TRAINED)
    everything_is_found(project)


def test_records_of_an_altered_archive_file_are_archived_again_and_nothing_is_lost(project: Project) -> None:
    project.fault(v2={"slow": 0.01})
    first = project.start(*NAIVE, "--sample", "70")
    _wait_for(first, "backfilling")
    archive = project.folder / ".rmvdb" / "archive"
    _until(lambda: list(archive.rglob("*.parquet")))
    first.kill()
    first.communicate()
    project.fault()
    written = next(archive.rglob("*.parquet"))
    written.write_bytes(written.read_bytes()[:-1] + b"x")
    project.ask(*NAIVE)
    everything_is_found(project)
    project.ask("rollback")
    everything_is_found(project)


@pytest.mark.parametrize(
    ("line", "saying"),
    [
        ("[milvos]\nuri = 'x.db'", "did you mean 'milvus'"),
        ("[backfill]\nbach = 3", "batch"),
        ("[backfill]\nbatch = 'many'", "batch"),
        ("[index]\ntype = 'HNSV'", "HNSW"),
        (
            "[registry]\nurl = 'postgresql://u:s3cret@h:port/db'",
            "registry.url = 'postgresql+psycopg://***' cannot be read",
        ),
    ],
)
def test_a_slip_in_the_configuration_names_the_nearest_key(tmp_path: Path, line: str, saying: str) -> None:
    project = Project(tmp_path)
    (tmp_path / "rmvdb.toml").write_text(line)
    if "index" in line:
        project.ask("init")
        project.ask("model", "add", "v1", "--embedder", "models:v1")
        refused(project, "gallery", "add", "things", "--model", "v1", code=2, saying=saying)
        project.stop_engine()
    else:
        refused(project, "gallery", "list", code=2, saying=saying, process=True)


def test_an_index_for_a_gallery_that_is_not_there_is_named_by_doctor(project: Project) -> None:
    settings = project.folder / "rmvdb.toml"
    settings.write_text(f'{settings.read_text()}\n[indexes.thing]\ntype = "FLAT"\n[indexes.things]\ntype = "FLAT"')
    found = [each for each in project.ask("doctor", "--json", code=1).stdout.splitlines() if "did you mean" in each]
    assert len(found) == 1
    assert "No gallery is called 'thing'; did you mean 'things'?" in found[0]


@pytest.mark.parametrize(("kind", "saying"), [("HNWS", "did you mean 'HNSW'?"), ("HNSW", "has no index of type HNSW")])
def test_doctor_looks_at_the_index_before_there_is_a_gallery(tmp_path: Path, kind: str, saying: str) -> None:
    project = Project(tmp_path / "new", index=kind)
    project.ask("init")
    assert saying in project.ask("doctor", code=1).stdout
    project.stop_engine()


def test_an_index_that_the_engine_lacks_is_refused_before_anything_is_made(project: Project) -> None:
    saying = r"milvus-lite 2.5.1 has no index of type HNSW; set index.type to one that it has: AUTOINDEX, FLAT, IVF_FLAT"
    collections = project.json("gallery", "show")["collections"]
    settings = project.folder / "rmvdb.toml"
    settings.write_text(settings.read_text().replace('type = "AUTOINDEX"', 'type = "HNSW"'))

    refused(project, "gallery", "add", "more", "--model", "v1", code=2, saying=saying)
    for words in (("plan", *NAIVE[1:]), NAIVE):
        refused(project, *words, code=2, saying=saying)
    report = project.ask("doctor", code=1).stdout

    assert saying in " ".join(report.split())
    assert [each["name"] for each in project.json("gallery", "list")] == ["things"]
    assert project.json("gallery", "show")["collections"] == collections
    assert project.calls("v2").count("probe") == len(project.calls("v2"))  # no record was embedded for nothing


@pytest.mark.parametrize(
    ("options", "saying"),
    [
        ((), "Nothing to limit was named; give --rate, --nice or --p99-ms"),
        (("--rate", "nan"), "'nan' is no number to limit by; 0 lifts the limit"),
        (("--rate", "inf"), "'inf' is no number to limit by; 0 lifts the limit"),
        (("--nice", "50"), "50.0 is not in the range 0<=x<=1"),
        (("--p99-ms", "-1"), "-1.0 is not in the range x>=0"),
    ],
)
def test_a_value_that_is_not_a_limit_is_refused(project: Project, options: tuple[str, ...], saying: str) -> None:
    refused(project, "throttle", *options, code=2, saying=saying)


def test_a_value_that_is_not_a_window_is_refused_before_a_worker_has_started(project: Project) -> None:
    refused(project, "worker", "--window", "bad", code=2, saying="--window 'bad' is not a cron expression")
    assert project.ask("worker", "--window", "bad", code=2).stdout == ""


def test_a_registry_that_was_never_made_says_how_to_make_it(tmp_path: Path) -> None:
    refused(Project(tmp_path), "gallery", "list", code=2, saying="make one: rmvdb init")
    (tmp_path / ".rmvdb").mkdir()
    refused(Project(tmp_path), "gallery", "list", code=1, saying="rmvdb db upgrade")


def test_a_full_disk_while_archiving_stops_the_upgrade_with_nothing_lost(project: Project) -> None:
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-rm", "true"], check=False).returncode:
        pytest.skip("this kernel gives no mount namespace to mount a small tmpfs in")
    archive = project.folder / ".rmvdb" / "archive"
    archive.mkdir(exist_ok=True)
    project.ask(*NAIVE, "--detach")  # the shared Lite process runs outside the namespace
    rmvdb = f"{sys.executable} -m rmvdb"
    upgrade = f"{rmvdb} {' '.join(NAIVE)}; echo ended with $?"
    script = f"""
        mount -t tmpfs -o size=16k tmpfs {archive} && {upgrade}
        {rmvdb} search x --limit 500 --json
        mount -o remount,size=16m {archive} && {upgrade}
    """
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script],
        cwd=project.folder,
        env=project.environment,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    told = done.stdout + done.stderr
    assert [line for line in told.splitlines() if line.startswith("ended with")] == ["ended with 1", "ended with 0"], told
    assert "the disk is full" in done.stderr
    assert "Traceback" not in done.stderr
    # In between nothing was missing, and nothing was there twice.
    found = re.findall(r'"id": (\d+)', done.stdout)
    assert sorted(map(int, found)) == IDS
    everything_is_found(project)


@pytest.mark.parametrize(
    ("options", "saying"),
    [
        (("--field", "size:STRING"), "No type of --field size is called 'STRING'; there are: BOOL"),
        (("--field", "size:FLOAT_VECTOR"), "No type of --field size is called 'FLOAT_VECTOR'"),
        (("--field", "size:VARCHAR(70000)"), "only VARCHAR has a length, from 1 to 65535"),
        (("--field", "vector:INT64"), "give --field vector another name"),
        (("--field", "item:VARCHAR"), "give --field item another name"),
        (("--field", "size:INT64", "--field", "size:INT64"), "give --field size another name"),
        (("--collection", "thing_v1_e1"), "There is no collection 'thing_v1_e1' at unix:"),
        (("--collection", "{held}", "--field", "size:INT64"), "is adopted unchanged; leave --field and --id-type out"),
    ],
)
def test_a_gallery_that_cannot_be_added_is_refused_and_nothing_is_made(
    project: Project, options: tuple[str, ...], saying: str
) -> None:
    code = 1 if "no collection" in saying else 2
    held = project.json("gallery", "show")["collections"][0]["name"]
    options = tuple(each.format(held=held) for each in options)
    refused(project, "gallery", "add", "more", "--model", "v1", *options, code=code, saying=saying)
    assert [each["name"] for each in project.json("gallery", "list")] == ["things"]
    there = pytest.raises(CollectionMissing, match=f"there are: {held}$")
    with project.opened() as opened, there:
        opened.store.describe("missing")


def test_a_missing_collection_is_named_with_the_one_that_is_meant(project: Project) -> None:
    held = project.json("gallery", "show")["collections"][0]["name"]
    adopt = ("gallery", "add", "mine", "--model", "v1", "--collection", held.replace("things", "thing"))
    refused(project, *adopt, code=1, saying=f"; did you mean '{held}'?")


def test_a_gallery_that_is_there_is_not_said_to_have_what_it_has_not(project: Project) -> None:
    add = ("gallery", "add", "things", "--model", "v1")
    project.ask(*add)
    project.ask(*add, "--id-type", "INT64")
    refused(project, *add, "--id-type", "VARCHAR", code=2, saying="exists with INT64 ids and these fields: none")
    refused(project, *add, "--field", "size:INT64", code=2, saying="exists with INT64 ids and these fields: none")


def test_a_text_may_be_longer_than_any_name_of_a_file(project: Project) -> None:
    assert len(project.json("search", "a red bicycle in front of a white wall " * 7)["hits"]) == 10


def test_a_picture_that_is_not_there_is_not_taken_for_a_text(project: Project) -> None:
    project.ask("model", "add", "eye", "--embedder", "models:v1", "--kind", "image")
    project.ask("gallery", "add", "pictures", "--model", "eye")
    search = ("search", "nothere.jpg", "-g")
    refused(project, *search, "pictures", code=2, saying="There is no file 'nothere.jpg', and eye embeds pictures")
    assert len(project.json(*search, "things")["hits"]) == 10


def test_a_model_that_broke_since_it_was_registered_says_how(project: Project) -> None:
    for fault, saying in (({"raise_all": True}, "ValueError: cannot decode item probe"), ({"shape": 5}, "gives shape (4, 5)")):
        project.fault(v2=fault)
        refused(project, *NAIVE, code=1, saying="models:v2 has changed since 'v2' was registered: ")
        assert saying in project.ask("doctor", code=1).stdout


def test_without_an_answer_nothing_is_removed(project: Project) -> None:
    project.fault(v2={"raise": ["7"]})
    project.ask(*NAIVE, code=1)
    remove = ("quarantine", "drop", "7")
    refused(project, *remove, code=2, saying="Nothing was deleted; run rmvdb quarantine drop --yes to agree", process=True)
    project.ask(*remove, "--yes")
    project.ask(*NAIVE)
    refused(project, "cleanup", code=2, saying="Nothing was dropped; run rmvdb cleanup --yes to agree", process=True)
    forget = "Nothing was forgotten; run rmvdb gallery remove --yes to agree"
    project.ask("cleanup", "--yes")
    refused(project, "gallery", "remove", "things", code=2, saying=forget, process=True)
    everything_is_found(project, missing=1)


def test_a_broken_embedder_spec_names_what_is_missing(project: Project) -> None:
    add = ("model", "add", "v9", "--embedder")
    refused(project, *add, "nowhere:v9", code=1, saying="nowhere")
    refused(project, *add, "models:v9", code=1, saying="v9")
    refused(project, *add, "models", code=2, saying="models")
    refused(project, *add, "models:v1", "--options", "{", code=2, saying="--options '{' is not JSON")


def _other(project: Project) -> Project:
    """Return another project on the same Milvus file, with its own registry."""
    other = Project(project.folder / "other", milvus=str(project.folder / ".rmvdb" / "milvus.db"))
    other.ask("init")
    return other


def _wait_for(process: subprocess.Popen[str], words: str) -> None:
    assert process.stderr is not None  # where progress goes
    for line in process.stderr:
        if words in line:
            return
    raise AssertionError(f"it ended before it said {words!r}")


def _until(true: object, *, seconds: float = 60) -> None:
    import time

    end = time.monotonic() + seconds
    while not true():  # type: ignore[operator]
        assert time.monotonic() < end
        time.sleep(0.05)
