"""Models whose queries are no records, by the real commands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rmvdb.errors import ModelError
from tests.support.project import Project

IDS = list(range(1, 121))
#: Queries show what they look for upside down: `embed` would find the opposite.
ASKING = """

class Asking(Embedder):
    turn = -1.0

    def embed_queries(self, items):
        made = [each["z"] if isinstance(each, dict) else _probe(each) for each in items]
        return self.embed([{"id": "query", "z": self.turn * np.asarray(z, dtype=np.float32)} for z in made])


def v1():
    return Asking("v1", 8, 16)


def v2():
    return Asking("v2", 20, 20)
"""
#: Other weights in the part for queries alone, which no `state_dict` shows.
SWAPPED = "\n\nAsking.turn = np.where(np.arange(LATENT) % 2, 1.0, -1.0)\n"
SHORT = """

def v2():
    made = Asking("v2", 20, 20)
    made.embed_queries = lambda items: made.embed(items)[:, :7]
    return made
"""
#: Queries of a form that no probe has.
UNPROBED = """

def v2():
    made = Asking("v2", 20, 20)
    asked = made.embed_queries
    made.embed_queries = lambda items: asked([{"z": each["z"]} for each in items])
    return made
"""
CLIP = """

class Clip:
    def embed(self, items):
        return np.stack([np.resize(np.asarray(each, dtype=np.float32), 9) + 1 for each in items])

    def embed_queries(self, items):
        return np.stack([np.resize(np.frombuffer(each.encode(), np.uint8), 9) for each in items]).astype(np.float32)
"""


def change(project: Project, text: str) -> None:
    models = project.folder / "models.py"
    models.write_text(models.read_text() + text)


def question(project: Project, id: int) -> dict[str, object]:
    return {"id": id, "z": (-project.models().latent(id)).tolist()}


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """A gallery of v1 with v2 registered, both with queries of their own."""
    made = Project(tmp_path / "project")
    change(made, ASKING)
    return made.prepare(IDS)


def test_queries_are_embedded_their_own_way_from_registration_to_the_end_of_an_upgrade(project: Project) -> None:
    said = project.ask("model", "add", "again", "--embedder", "models:v2").stdout
    assert said.strip().endswith(", queries: by embed_queries")
    assert {row["name"]: row["queries"] for row in project.json("model", "list")} == dict.fromkeys(
        ("v1", "v2", "again"), "embed_queries"
    )
    file = project.folder / "queries.jsonl"
    asked = [{"item": question(project, id), "answers": [id]} for id in IDS[:30]]
    file.write_text("".join(json.dumps(each) + "\n" for each in asked))
    told = project.json("plan", "--from", "v1", "--to", "v2", "--method", "naive", "--queries", str(file))["prediction"]
    assert (told["relevance"], told["map_old"], told["map_new"]) == ("answers", 1.0, 1.0)

    upgrade = ("upgrade", "--from", "v1", "--to", "v2", "--method", "naive", "--queries", str(file))
    project.ask(*upgrade, "--until", "0.5", "--no-cutover")
    with project.client() as client:
        assert [client.search(question(project, id), limit=1)[0].id for id in IDS[:40]] == IDS[:40]
    assert f"{len(IDS)} records verified" in project.ask(*upgrade).stdout
    with project.client() as client:
        assert [client.search(question(project, id), limit=1)[0].id for id in IDS[:40]] == IDS[:40]


def test_other_weights_for_queries_are_refused_like_other_weights_for_records(project: Project) -> None:
    change(project, SWAPPED)
    saying = "embed_queries of models:v1 gives other vectors for the probe items than when 'v1' was registered; put the old model"
    with pytest.raises(ModelError, match=saying), project.client() as client:
        client.search(question(project, 1))
    assert saying in project.ask("doctor", code=1).stdout
    assert "embed_queries of models:v2 gives other" in project.ask("plan", "--from", "v1", "--to", "v2", code=1).stderr


def test_a_model_that_has_lost_embed_queries_is_refused(project: Project) -> None:
    change(project, "\n\ndel Asking.embed_queries\n")
    saying = "models:v1 has no embed_queries any more, by which 'v1' embeds queries; put it back"
    with pytest.raises(ModelError, match=saying), project.client() as client:
        client.search(question(project, 1))


def test_queries_of_another_dimension_are_refused_at_registration(project: Project) -> None:
    change(project, SHORT)
    refused = project.ask("model", "add", "short", "--embedder", "models:v2", code=1).stderr
    assert "embed_queries gives vectors of dimension 7, and embed gives 20; let both give vectors of one space" in refused
    assert "short" not in [row["name"] for row in project.json("model", "list")]


def test_queries_that_no_probe_is_like_need_the_dimension(project: Project) -> None:
    change(project, UNPROBED)
    project.ask("model", "remove", "v2")
    refused = project.ask("model", "add", "own", "--embedder", "models:v2", code=1).stderr
    assert "embed_queries takes neither the probe texts nor the probe images" in refused
    said = project.ask("model", "add", "own", "--embedder", "models:v2", "--dim", "20").stdout
    assert "queries: by embed_queries" in said
    project.ask("doctor")


def test_texts_may_search_pictures(project: Project) -> None:
    change(project, CLIP)
    said = project.ask("model", "add", "clip", "--embedder", "models:Clip").stdout
    assert "9 dimensions, COSINE, queries: by embed_queries" in said
    with project.opened() as opened:
        assert opened.registry.version("clip").probe_kind == "image"
        opened.embedder("clip")


def test_a_version_registered_before_its_model_had_embed_queries_goes_on_as_it_was(tmp_path: Path) -> None:
    project = Project(tmp_path / "project").prepare(IDS)
    item = project.models().item(7)
    change(project, ASKING)
    with project.client() as client:
        assert client.search(item, limit=1)[0].id == 7  # a query is embedded as a record, as ever
    assert [row["queries"] for row in project.json("model", "list")] == ["embed", "embed"]
    assert "it has got embed_queries since it was registered" in project.ask("doctor").stdout
    refused = project.ask("model", "add", "v1", "--embedder", "models:v1", "--classifier", "models:Classifier", code=2).stderr
    assert "'v1' is registered without embed_queries; choose another name" in refused
