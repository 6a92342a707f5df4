"""Every method and order before anything is changed, by the real command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.conftest import IDS
from tests.support.project import Project

SIMULATE = ("simulate", "--from", "v1", "--to", "v2")
LABELS = ("--labels", "label")
#: Little is trained where what is tested depends on no method.
NAIVE = ("--methods", "naive", "--orders", "random")


def everything(project: Project) -> dict[str, Any]:
    """Return the state that a simulation must not change."""
    told = project.json("gallery", "show", "things")
    return {"gallery": told, "models": project.json("model", "list"), "status": project.json("status"), "files": kept(project)}


def kept(project: Project) -> list[str]:
    """Return the files of plans, artifacts, archive and manifest."""
    home = project.folder / ".rmvdb"
    return sorted(
        str(path.relative_to(home)) for path in home.rglob("*") if path.is_file() and "embeddings" not in path.parts
        and not path.name.startswith((".", "milvus", "registry"))
    )  # fmt: skip


def test_a_simulation_compares_recommends_draws_and_changes_nothing(project: Project) -> None:
    before = everything(project)
    picture = project.folder / "curves.png"
    told = project.json(*SIMULATE, *LABELS, "--methods", "naive,rqt,rm", "--orders", "cluster,random", "--png", str(picture))
    assert everything(project) == before
    assert picture.read_bytes().startswith(b"\x89PNG\r\n")
    assert len(picture.read_bytes()) > 20_000
    assert told["relevance"] == "labels"
    assert told["trained"] + told["held_out"] + told["evaluated"] == 400
    rows = {(row["name"], row["order"]): row for row in told["rows"]}
    assert {name for name, _ in rows} >= {"old", "new", "naive", "rqt"}
    assert {order for name, order in rows if name in ("naive", "rqt")} == {"cluster", "random"}
    for row in rows.values():
        assert row["curve"]["ts"] == [i / 10 for i in range(11)]
        assert row["auc_map"][0] <= row["curve"]["auc_map"] <= row["auc_map"][1]
    advice = told["recommended"]
    assert (advice["method"], advice["order"]) in rows
    assert advice["verdict"] in ("ok", "warn")
    assert "is worth most" in advice["choice"]
    # Every embedding that was made for it is kept: a plan on the same records makes none.
    calls = len(project.calls("v2"))
    project.json("plan", "--from", "v1", "--to", "v2", *LABELS, "--method", "naive")
    assert [each for each in project.calls("v2")[calls:] if each != "probe"] == []


def test_the_table_names_every_row_and_the_command_to_go_on_with(project: Project) -> None:
    done = project.ask(*SIMULATE, *LABELS, "--methods", "naive,rqt", "--orders", "cluster,random")
    out = done.stdout
    assert "embedding the sample" in done.stderr
    assert "training rqt" in done.stderr
    lines = [line.split() for line in out.splitlines() if line.strip()]
    assert {"old", "new", "naive", "rqt"} <= {words[0] for words in lines}
    assert "recommended: --method " in out
    assert "80 other records that search for records of the same label" in out


def test_queries_with_known_answers_are_what_is_measured(project: Project) -> None:
    models = project.models()
    file = project.folder / "queries.jsonl"
    lines = []
    for id in range(2001, 2031):
        item = models.item(id)
        answers = [each for each in IDS if models.label(each) == models.label(id)][:4]
        lines.append(json.dumps({"item": {"id": id, "z": item["z"].tolist()}, "answers": [*answers, 999_999]}))
    file.write_text("\n".join(lines) + "\n")
    before = everything(project)
    told = project.json(*SIMULATE, *NAIVE, "--sample", "200", "--queries", str(file))
    assert everything(project) == before
    assert (told["relevance"], told["evaluated"]) == ("answers", 30)
    assert told["trained"] + told["held_out"] > 100
    rows = {row["name"]: row for row in told["rows"]}
    assert rows["new"]["curve"]["auc_map"] > rows["old"]["curve"]["auc_map"]
    assert {"2001", "2030"} <= set(project.calls("v1")) & set(project.calls("v2"))


@pytest.mark.parametrize(
    ("text", "saying"),
    [
        ('{"answers": [7]}', "Line 1 of "),
        ('["a"]', "Line 1 of "),
        ("", "holds no query"),
        ("no json", "Line 1 of "),
        ('{"item": "a", "answers": 7}', "has answers 7; write a list of ids"),
        ('{"item": "a", "answers": ["7"]}', "Answer '7' to query 'a' is not an id of this gallery; its ids are int"),
    ],
)
def test_a_file_that_holds_no_queries_is_named(project: Project, text: str, saying: str) -> None:
    file = project.folder / "queries.jsonl"
    file.write_text(text)
    done = project.ask(*SIMULATE, *NAIVE, "--queries", str(file), code=2)
    assert saying in done.stderr
    assert "Traceback" not in done.stderr


def test_a_question_that_cannot_be_simulated_is_refused_before_anything_is_embedded(project: Project) -> None:
    for words, saying in (
        (("--methods", "naive,rmm"), "No method is called 'rmm'; did you mean 'rm'?"),
        (("--orders", "clusters"), "No order is called 'clusters'; did you mean 'cluster'?"),
        (("--png", "nowhere/c.png"), "The folder of 'nowhere/c.png' does not exist"),
        (("--queries", "nowhere.jsonl"), "The queries in 'nowhere.jsonl' cannot be read"),
        ((*NAIVE, "--side", "label"), "Only the method fct uses side information; add it to --methods, or leave --side out"),
        (("--methods", "fct", "--paper"), "fct is always trained with its own paper's settings; leave --paper out"),
    ):
        done = project.ask(*SIMULATE, *words, code=2)
        assert saying in done.stderr
    assert [each for each in project.calls("v2") if each != "probe"] == []


def test_the_papers_settings_calibrate_nothing(project: Project) -> None:
    asked = (*SIMULATE, *LABELS, "--methods", "naive,rqt", "--orders", "random")
    told = [project.json(*asked, *more)["rows"] for more in ((), ("--paper",))]
    calibrated = [{row["name"] for row in rows if row["calibrated"]} for rows in told]
    assert calibrated[0] >= {"naive", "rqt"}
    assert calibrated[1] == set()


def test_a_gallery_in_an_upgrade_is_simulated_for_a_third_version_only(project: Project) -> None:
    project.ask("upgrade", "--from", "v1", "--to", "v2", "--method", "naive", "--until", "0.5", "--no-cutover")
    done = project.ask(*SIMULATE, *NAIVE, code=2)
    assert "holds vectors of 'v2' already" in done.stderr
    project.ask("model", "add", "v3", "--embedder", "models:v3")
    told = project.json("simulate", "--from", "v2", "--to", "v3", *LABELS, *NAIVE)
    assert {row["name"] for row in told["rows"]} >= {"old", "new", "naive"}
    assert project.json("status")["upgrade"] == 1


def test_an_upgrade_chooses_its_method_and_the_same_command_goes_on_with_it(project: Project) -> None:
    # With the time to train each: a busy machine would choose among fewer.
    upgrade = ("upgrade", "--from", "v1", "--to", "v2", *LABELS, "--sample", "300", "--minutes", "30")
    plan = project.json("plan", *upgrade[1:], "--method", "auto")
    assert plan["question"]["method"] is None
    assert plan["method"] in ("naive", "rqt", "mcl", "rm")
    assert "is worth most" in plan["prediction"]["choice"]
    out = project.ask(*upgrade, "--until", "0.5", "--no-cutover").stdout
    assert "is worth most" in out
    status = project.json("status")
    assert (status["upgrade"], status["method"]) == (1, plan["method"])
    out = project.ask(*upgrade).stdout
    assert "continuing upgrade 1" in out
    status = project.json("status")
    assert (status["upgrade"], status["phase"], status["method"], status["t"]) == (1, "cut over", plan["method"], 1.0)
    project.ask(*upgrade)
    assert project.json("verify")["ok"]
    assert {each["upgrade"] for each in project.json("history")} == {1}
    project.ask("cleanup", "--yes")
    assert "holds v2 already" in project.ask(*upgrade).stdout
    app_records = [each["records"] for each in project.json("gallery", "show", "things")["collections"]]
    assert app_records == [400]


def test_without_the_old_models_embedder_naive_is_not_chosen(project: Project) -> None:
    """Its weights are gone; the vectors are there."""
    models = project.folder / "models.py"
    models.write_text(models.read_text().replace('Embedder("v1", 8, 16)', 'Embedder("v1", 7, 16)'))
    plan = project.json("plan", "--from", "v1", "--to", "v2", *LABELS, "--sample", "300")
    assert plan["method"] != "naive"
    assert Path(project.folder, ".rmvdb").exists()


def test_all_orders_are_all_that_can_be_given_and_another_is_refused_at_once(project: Project) -> None:
    told = project.json(*SIMULATE, "--methods", "naive", "--orders", "all", "--sample", "100")
    assert {row["order"] for row in told["rows"] if row["name"] == "naive"} == {"cluster", "classification-score", "random"}
    for order, saying in (
        ("uncertainty", "of hyperbolic galleries"),
        ("centroid", "needs the field of a record's class"),
    ):
        refused = project.ask(*SIMULATE, "--methods", "naive", "--orders", order, "--sample", "120", code=None)
        assert refused.returncode in (1, 2)
        assert saying in refused.stderr
        assert "embedding the sample" not in refused.stdout + refused.stderr
