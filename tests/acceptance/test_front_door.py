"""The first steps of a newcomer: `init`, models beside rmvdb.toml, refusals that say why, texts that are a field of the
record."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

import rmvdb
from rmvdb import errors
from rmvdb.cli import main as cli
from rmvdb.engines.milvus.store import MilvusStore
from rmvdb.items import objects
from rmvdb.registry.mark import Owner
from rmvdb.registry.registry import Registry
from tests.acceptance.conftest import NAIVE
from tests.support.postgres import Postgres
from tests.support.project import Project

#: Embeds texts by their letters; `broken` nothing at all.
TEXTS = """
import numpy as np

MATRIX = np.random.default_rng(1).normal(size=(256, 16)).astype(np.float32)


class Letters:
    def state_dict(self):
        return {"matrix": MATRIX}

    def embed(self, items):
        return np.stack([np.tanh(np.bincount(np.frombuffer(item.encode(), np.uint8), minlength=256) @ MATRIX) for item in items])


class Broken:
    def embed(self, items):
        raise OSError("tokenizer.json is missing")


letters, broken = Letters(), Broken()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """An empty folder with a module of embedders."""
    (tmp_path / "texts.py").write_text(TEXTS)
    yield tmp_path
    sys.modules.pop("texts", None)


@pytest.fixture
def texts(folder: Path) -> Iterator[Project]:
    """A gallery `notes` whose items are the field `text` of each record."""
    project = Project(folder / "project")
    (project.folder / "texts.py").write_text(TEXTS)
    (project.folder / "rmvdb.toml").write_text((project.folder / "rmvdb.toml").read_text().replace('["models"]', '["texts"]'))
    project.ask("init")
    project.ask("model", "add", "v1", "--embedder", "texts:letters")
    project.ask("gallery", "add", "notes", "--model", "v1", "--source", "field:text")
    yield project
    project.stop_engine()


def invoke(folder: Path, *words: str) -> tuple[int, str]:
    done = CliRunner().invoke(cli.main, ["--config", str(folder / "rmvdb.toml"), *words])
    return done.exit_code, done.output


def test_init_writes_the_milvus_that_it_is_given(folder: Path) -> None:
    code, said = invoke(folder, "init", "--milvus", "localhost")
    assert code == 2
    assert f"{folder}/rmvdb.toml: milvus.uri = 'localhost' must be a file ending in .db or an address such as http://" in said
    assert not (folder / "rmvdb.toml").exists()  # so that the same command with another address is not refused
    code, _ = invoke(folder, "init", "--milvus", "http://milvus:19530")
    assert (code, rmvdb.app.load(folder).settings.milvus.uri) == (0, "http://milvus:19530")
    assert invoke(folder, "init", "--milvus", "http://milvus:19530")[0] == 0
    code, said = invoke(folder, "init", "--milvus", "http://other:19530")
    assert code == 2
    assert f"{folder}/rmvdb.toml has milvus.uri = 'http://milvus:19530'; write the other one there, below [milvus]" in said


def test_init_can_be_repeated_with_a_file_and_in_a_folder(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        assert invoke(folder, "init", "--milvus", "data/milvus.db")[0] == 0
    (tmp_path / "another").mkdir()
    done = CliRunner().invoke(cli.main, ["--config", str(tmp_path / "another"), "init"])
    assert (done.exit_code, (tmp_path / "another" / "rmvdb.toml").is_file()) == (0, True)
    done = CliRunner().invoke(cli.main, ["--config", str(tmp_path / "another"), "init", "--here", str(tmp_path)])
    assert done.exit_code == 2
    assert "--config and --here both say where rmvdb.toml lies" in done.output


@pytest.mark.postgres
def test_init_leaves_no_connection_open(
    folder: Path, postgres: Postgres, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RMVDB_REGISTRY__URL", postgres_url)
    assert invoke(folder, "init")[0] == 0
    [(sessions,)] = postgres.run("SELECT count(*) FROM pg_stat_activity WHERE datname = 'test'")
    assert sessions == 0


def test_models_are_found_beside_the_configuration_from_a_folder_below(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    invoke(folder, "init")
    (folder / "below").mkdir()
    monkeypatch.chdir(folder / "below")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(objects, "_folders", [])
    done = CliRunner().invoke(cli.main, ["model", "add", "v1", "--embedder", "texts:letters"])
    assert done.exit_code == 0, done.output


def test_a_model_that_was_added_after_its_module_was_loaded_asks_for_a_restart(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert objects.load_object("texts:letters")
    file = folder / "texts.py"
    file.write_text(f"{TEXTS}\nnewer = Letters()\n")
    with pytest.raises(errors.UsageError, match=f"this process loaded {file} before 'newer' was added to it; restart"):
        objects.load_object("texts:newer")
    with pytest.raises(errors.UsageError, match="has no 'newest'; check the name after the colon"):
        objects.load_object("texts:newest")


def test_why_an_embedder_embeds_nothing_is_said_at_once(texts: Project) -> None:
    said = texts.ask("model", "add", "v2", "--embedder", "texts:broken", code=2).stderr
    assert said.count("tokenizer.json is missing") == 1
    assert said.endswith("if its items are neither, give its dimension: --dim N\n")


def test_the_text_of_a_record_is_its_item_and_is_written_once(texts: Project) -> None:
    with texts.client() as client:
        assert client.upsert({"id": 1, "text": "one text"}) == 1
        client.upsert([{"id": 2, "text": "another", "item": "another"}])
        with pytest.raises(errors.UsageError, match="Record 3 has one item and another 'text', which holds the items"):
            client.upsert([{"id": 3, "text": "that one", "item": "this one"}])
        with pytest.raises(errors.UsageError, match="an item, or the field 'text' that holds it; this one has: id"):
            client.upsert([{"id": 3}])
        assert [hit.id for hit in client.search("one text", limit=5)] == [1, 2]
    texts.ask("model", "add", "v2", "--embedder", "texts:letters")


def test_a_collection_that_is_not_there_names_the_setting_and_a_field_that_is_not_there_is_refused(texts: Project) -> None:
    said = texts.ask("gallery", "add", "more", "--model", "v1", "--collection", "abstracts", code=1).stderr
    assert f"milvus.uri in {texts.folder}/rmvdb.toml is '{texts.folder}/.rmvdb/milvus.db': name your Milvus there" in said
    with texts.client() as client:
        client.upsert({"id": 1, "text": "one text"})
    said = texts.ask("gallery", "source", "notes", "field:texd", code=2).stderr
    assert "has no field 'texd', from which --source takes the items; it has: text" in said
    assert texts.json("gallery", "list")[0]["source"] == "field:text"


def test_status_lists_several_galleries_and_python_gets_no_advice_about_flags(texts: Project) -> None:
    texts.ask("gallery", "add", "more", "--model", "v1")
    said = texts.ask("status").stdout
    assert said.startswith("gallery notes: epoch 1")
    assert "\n\ngallery more: epoch 1" in said
    assert len(texts.ask("status", "--json").stdout.splitlines()) == 2
    with pytest.raises(errors.UsageError, match=r"There are 2 galleries; name one with connect\(gallery=…\): notes, more"):
        rmvdb.connect(texts.folder)


def test_a_connection_that_fails_leaves_nothing_open(texts: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []
    for part in (Registry, MilvusStore):
        close = part.close
        monkeypatch.setattr(part, "close", lambda self, close=close: (closed.append(type(self).__name__), close(self)))
    monkeypatch.setattr(Owner, "expect", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        rmvdb.connect(texts.folder)
    assert sorted(closed) == ["MilvusStore", "Registry"]


def test_after_a_lost_registry_each_listing_names_the_manifest(texts: Project) -> None:
    for file in (texts.folder / ".rmvdb").glob("registry.sqlite*"):
        file.unlink()
    assert "rmvdb registry rebuild" in texts.ask("init").stdout
    for words in (("gallery", "list"), ("model", "list"), ("status",)):
        assert "rmvdb registry rebuild" in texts.ask(*words, code=1).stderr


def test_an_application_logs_each_serving_plan_that_is_new_to_it(project: Project, caplog: pytest.LogCaptureFixture) -> None:
    with project.client() as client, caplog.at_level(logging.INFO, logger="rmvdb"):
        client.search(project.models().item(1), limit=1)
        project.ask(*NAIVE, "--until", "0.5", "--no-cutover")
        client.search(project.models().item(1), limit=1)
        new, old = (leg.collection for leg in client.plan.legs)
    told = [record.getMessage() for record in caplog.records if getattr(record, "action", "") == "plan"]
    assert told == [f"things is served by epoch 2 now: {new} (v2), {old} (v1)"]


#: Ways to hold a model that have no `embed`, as its maker may have written them.
BARE = """

def plain(texts):
    return letters.embed(texts)


class Sentence:
    def __init__(self, *, scale=1.0):
        self.scale = scale

    def state_dict(self):
        return {"matrix": MATRIX}

    def encode(self, texts):
        return self.scale * letters.embed(texts)


sentence = Sentence()


def make():
    return Sentence()
"""


@pytest.mark.parametrize("name", ["plain", "sentence", "make", "Sentence"])
def test_a_model_without_embed_is_refused_with_a_line_that_makes_an_embedder_of_it(texts: Project, name: str) -> None:
    module = texts.folder / "texts.py"
    module.write_text(TEXTS + BARE)
    said = texts.run("model", "add", "v2", "--embedder", f"texts:{name}", code=1).stderr
    line = said.partition("`")[2].partition("`")[0]
    assert f"add the line `{line}` to the end of texts.py and name texts:Embedder" in said
    module.write_text(f"{module.read_text()}\n\n{line}\n")
    told = texts.run("model", "add", "v2", "--embedder", "texts:Embedder").stdout
    assert ("weights" in told) == (name != "plain")  # so that other weights are noticed


def test_a_record_that_has_an_item_and_no_field_for_it_keeps_the_item_for_the_backfill(texts: Project) -> None:
    with texts.client() as client:
        client.upsert({"id": 1, "item": "one text"})
        assert client.get([1])[0].fields == {"text": "one text"}


def test_a_version_of_the_wrong_metric_says_how_to_register_it_anew(texts: Project) -> None:
    said = texts.ask("model", "add", "v1", "--embedder", "texts:letters", "--metric", "IP", code=2).stderr
    assert "another metric; choose another name, or forget the registered one first: rmvdb model remove v1" in said


def test_doctor_in_a_folder_without_a_project_says_so_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor"])
    assert ended.value.code == 1
    assert "or make one: rmvdb init" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_a_gallery_that_is_no_text_is_refused() -> None:
    with pytest.raises(errors.UsageError, match="gallery is a text, not 5"):
        rmvdb.connect(gallery=5)  # type: ignore[arg-type]
    with pytest.raises(errors.UsageError, match="config is a text or a Path, not 5"):
        rmvdb.connect(5)  # type: ignore[arg-type]
