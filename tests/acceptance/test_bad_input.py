"""Words, settings and projects that commands cannot use: one sentence names the thing, the value and the way out."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.acceptance.conftest import NAIVE, everything_is_found
from tests.support.project import Project
from tests.support.refusals import refused


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


@pytest.mark.parametrize(
    ("options", "saying"),
    [
        ((), "No limit was given; give --rate, --nice or --p99-ms"),
        (("--rate", "nan"), "'nan' is not a limit; give 0 or more, and 0 lifts the limit"),
        (("--rate", "inf"), "'inf' is not a limit; give 0 or more, and 0 lifts the limit"),
        (("--nice", "50"), "50.0 is not in the range 0<=x<=1"),
        (("--p99-ms", "-1"), "-1.0 is not in the range x>=0"),
    ],
)
def test_a_value_that_is_not_a_limit_is_refused(project: Project, options: tuple[str, ...], saying: str) -> None:
    refused(project, "throttle", *options, code=2, saying=saying)


@pytest.mark.parametrize("options", [("--until", "nan"), ("--minutes", "inf")])
def test_a_share_and_a_time_are_finite(project: Project, options: tuple[str, str]) -> None:
    refused(project, *NAIVE, *options, code=2, saying=f"'{options[1]}' is not a finite number")


@pytest.mark.parametrize("command", [("db", "check"), ("registry", "rebuild")])
def test_a_question_outside_a_project_makes_no_registry(tmp_path: Path, command: tuple[str, str]) -> None:
    refused(Project(tmp_path), *command, code=2, saying="There is no registry in")
    assert not (tmp_path / ".rmvdb").exists()


def test_a_value_that_is_not_a_window_is_refused_before_a_worker_has_started(project: Project) -> None:
    refused(project, "worker", "--window", "bad", code=2, saying="--window 'bad' is not a cron expression")
    assert project.ask("worker", "--window", "bad", code=2).stdout == ""


def test_a_registry_that_was_never_made_says_how_to_make_it(tmp_path: Path) -> None:
    refused(Project(tmp_path), "gallery", "list", code=2, saying="make one: rmvdb init")
    (tmp_path / ".rmvdb").mkdir()
    refused(Project(tmp_path), "gallery", "list", code=1, saying="rmvdb db upgrade")


def test_a_text_may_be_longer_than_any_name_of_a_file(project: Project) -> None:
    assert len(project.json("search", "a red bicycle in front of a white wall " * 7)["hits"]) == 10


def test_a_picture_that_is_not_there_is_not_taken_for_a_text(project: Project) -> None:
    project.ask("model", "add", "eye", "--embedder", "models:v1", "--kind", "image")
    project.ask("gallery", "add", "pictures", "--model", "eye")
    search = ("search", "nothere.jpg", "-g")
    refused(project, *search, "pictures", code=2, saying="There is no file 'nothere.jpg', and eye embeds pictures")
    assert len(project.json(*search, "things")["hits"]) == 10


def test_without_an_answer_nothing_is_removed(project: Project) -> None:
    project.fault(v2={"raise": ["7"]})
    project.ask(*NAIVE, code=1)
    remove = ("quarantine", "drop", "7")
    refused(project, *remove, code=2, saying="Nothing was deleted; run the same command with --yes to agree")
    project.ask(*remove, "--yes")
    project.ask(*NAIVE)
    refused(project, "cleanup", code=2, saying="Nothing was dropped; run the same command with --yes to agree")
    forget = "Nothing was forgotten; run the same command with --yes to agree"
    project.ask("cleanup", "--yes")
    refused(project, "gallery", "remove", "things", code=2, saying=forget, process=True)
    everything_is_found(project, missing=1)


def test_a_search_in_one_of_several_galleries_asks_for_the_option(project: Project) -> None:
    project.ask("gallery", "add", "others", "--model", "v1")
    refused(project, "search", "a text", code=2, saying="There are 2 galleries; name one with --gallery: ")


def test_what_was_not_agreed_to_is_not_offered_for_more_records(project: Project) -> None:
    project.fault(v2={"raise": ["7", "9"]})
    project.ask(*NAIVE, code=1)
    refused(project, "quarantine", "drop", "7", code=2, saying="run the same command with --yes")
    project.ask("quarantine", "drop", "7", "--yes")
    assert [each["id"] for each in project.json("quarantine", "list")] == ["9"]
