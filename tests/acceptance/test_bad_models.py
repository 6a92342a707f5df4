"""Models that are broken, changed, or not the ones that made the vectors: one sentence says so."""

from __future__ import annotations

import pytest

from tests.acceptance.conftest import IDS, NAIVE, everything_is_found
from tests.support.project import Project
from tests.support.refusals import refused


def test_a_version_is_what_it_is_said_to_be(project: Project) -> None:
    add = ("model", "add", "w", "--embedder", "models:v2")
    refused(project, *add, "--dim", "7", code=2, saying="gives vectors of dimension 20, not 7; correct --dim or leave it out")
    refused(project, *add, "--classifier", "models:nothere", code=1, saying="models:nothere")
    refused(project, *add, "--classifier", "models:Classifier", code=1, saying="The classifier fails for 4 vectors")
    assert {each["name"] for each in project.json("model", "list")} == {"v1", "v2"}


def test_the_same_dimension_from_another_model_is_refused(project: Project) -> None:
    held = project.json("gallery", "show")["collections"][0]["name"]
    other = project.another()
    other.ask("model", "add", "stranger", "--embedder", "models:stranger")
    adopt = ("gallery", "add", "mine", "--collection", held, "--model", "stranger", "--source", "call:models:items")
    refused(other, *adopt, code=2, saying="were not made by model version 'stranger'")


def test_a_collection_believed_to_be_the_wrong_models_is_found_out_when_there_is_a_source(project: Project) -> None:
    copied = project.copied("copied")
    other = project.another()
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


def test_a_model_that_broke_since_it_was_registered_says_how(project: Project) -> None:
    for fault, saying in (({"raise_all": True}, "ValueError: cannot decode item probe"), ({"shape": 5}, "gives shape (4, 5)")):
        project.fault(v2=fault)
        refused(project, *NAIVE, code=1, saying="models:v2 has changed since 'v2' was registered: ")
        assert saying in project.ask("doctor", code=1).stdout


def test_a_broken_embedder_spec_names_what_is_missing(project: Project) -> None:
    add = ("model", "add", "v9", "--embedder")
    refused(project, *add, "nowhere:v9", code=1, saying="nowhere")
    refused(project, *add, "models:v9", code=1, saying="v9")
    refused(project, *add, "models", code=2, saying="models")
    refused(project, *add, "models:v1", "--options", "{", code=2, saying="--options '{' is not JSON")
