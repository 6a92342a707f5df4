"""Galleries and collections that cannot be added, or that changed since: one sentence names the value and the way out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rmvdb.errors import CollectionMissing
from tests.acceptance.conftest import NAIVE
from tests.support.project import Project
from tests.support.refusals import refused


def test_a_collection_of_another_dimension_or_metric_is_refused(project: Project) -> None:
    held = project.json("gallery", "show")["collections"][0]["name"]
    other = project.another()
    other.ask("model", "add", "v2", "--embedder", "models:v2")
    other.ask("model", "add", "ip", "--embedder", "models:v1", "--metric", "IP")
    adopt = ("gallery", "add", "mine", "--collection", held, "--model")
    refused(other, *adopt, "v2", code=2, saying="has dimension 16, model version 'v2' gives 20")
    refused(other, *adopt, "ip", code=2, saying="is compared by COSINE, model version 'ip' by IP")


def test_a_collection_of_which_no_vector_could_be_compared_is_added_and_fails_as_doctor_does(project: Project) -> None:
    held = project.json("gallery", "show")["collections"][0]["name"]
    project.copied("copied")
    with project.opened() as opened:
        for page in opened.store.scan(held, fields=None, vector=True):
            opened.store.upsert("copied", [replace(record, fields={"caption": None}) for record in page])
    other = project.another()
    other.ask("model", "add", "v1", "--embedder", "models:v1")
    add = ("gallery", "add", "mine", "--model", "v1", "--collection", "copied", "--source", "field:caption")
    correct = "add them there, or correct the source: rmvdb gallery source mine SPEC"
    none = f"field:caption has no item of 5 of 5 records, such as 1; {correct}"
    for _ in range(2):  # the same again is no error of its own
        said = other.ask(*add, code=1)
        assert "no vector could be compared" in said.stdout
        assert f"Error: {none} (the gallery is added all the same)" in said.stderr
    assert f"FAIL  gallery mine: source: {none}" in other.ask("doctor", code=1).stdout


def test_a_collection_dropped_or_replaced_behind_our_back_is_noticed(project: Project) -> None:
    from rmvdb.types import IdType, Index, Metric, Schema

    held = project.json("gallery", "show")["collections"][0]["name"]
    with project.opened() as opened:
        opened.store.drop(held)
        refused(project, *NAIVE, code=1, saying=held)
        opened.store.create(Schema(collection=held, dim=5, metric=Metric.COSINE, id_type=IdType.INT64), Index(type="FLAT"))
    refused(project, *NAIVE, code=1, saying=f"Collection '{held}' has dim 5, not 16 as when it was registered")


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
