"""ψ is trained on queries without answers, too, and chosen by those with answers, by the real command."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tests.support.project import Project

PLAN = ("plan", "--from", "v1", "--to", "v2", "--method", "rqt", "--order", "random")
SIMULATE = ("simulate", "--from", "v1", "--to", "v2", "--methods", "rqt", "--orders", "random")


def log(project: Project, ids: Iterable[int]) -> Path:
    """Return a file of queries without answers."""
    models = project.models()
    items = ({"id": id, "z": models.item(id)["z"].tolist()} for id in ids)
    file = project.folder / "log.jsonl"
    file.write_text("".join(json.dumps({"item": item}) + "\n" for item in items))
    return file


def test_a_plan_is_trained_on_logged_queries_and_made_again_if_they_change(project: Project) -> None:
    without = project.json(*PLAN)
    file = log(project, range(2001, 2041))
    project.fault(v2={"raise": ["2007"]})  # an item that cannot be read is left out
    logged = project.json(*PLAN, "--queries", str(file))
    assert (without["prediction"]["logged"], logged["prediction"]["logged"]) == (0, 39)
    assert without["stages"][-1]["reverse"] != logged["stages"][-1]["reverse"]
    assert {"2001", "2040"} <= set(project.calls("v1")) & set(project.calls("v2"))
    log(project, range(2001, 2021))
    assert project.json(*PLAN, "--queries", str(file))["prediction"]["logged"] == 19
    naive = project.json(*PLAN[:5], "--method", "naive", "--queries", str(file))
    assert naive["prediction"]["logged"] == 0  # there is no ψ to train
    before = len(project.calls("v1"))
    others = project.json(*SIMULATE[:5], "--methods", "naive,fct", "--orders", "random", "--queries", str(file))
    assert others["logged"] == 0
    assert set(project.calls("v1")[before:]) <= {"probe"}


def test_logged_queries_that_are_measured_are_not_trained_on(project: Project) -> None:
    models, file = project.models(), log(project, range(2001, 2021))
    judged = []
    for id in range(2015, 2035):
        answers = [each for each in range(1, 401) if models.label(each) == models.label(id)][:4]
        judged.append(json.dumps({"item": {"id": id, "z": models.item(id)["z"].tolist()}, "answers": answers}))
    assert " and 20 logged queries, calibrated on" in project.ask(*SIMULATE, "--queries", str(file)).stdout
    with file.open("a") as end:
        end.write("\n".join(judged))
    told = project.json(*SIMULATE, "--queries", str(file))
    assert (told["logged"], told["relevance"], told["evaluated"]) == (14, "answers", 20)
    plan = project.json(*PLAN[:5], "--queries", str(file), "--sample", "2000")["prediction"]
    assert (plan["logged"], plan["evaluated"]) == (14, 20)
    said = project.ask(*PLAN[:5], "--queries", str(file), "--sample", "2000").stdout
    assert "held out (20 queries, their known answers)" in " ".join(said.split())
    assert plan["method"] == project.json(*SIMULATE[:5], "--queries", str(file))["recommended"]["method"]


def test_a_log_that_cannot_be_used_is_refused_with_the_way_out(project: Project) -> None:
    file, bad = log(project, range(2001, 2011)), project.folder / "bad.jsonl"
    bad.write_text('{"text": "red shoes"}')
    assert "Line 1 of " in project.ask(*PLAN, "--queries", str(bad), code=2).stderr
    assert "cannot be read" in project.ask(*PLAN, "--queries", "nowhere.jsonl", code=2).stderr
    models = project.folder / "models.py"
    models.write_text(models.read_text().replace('Embedder("v1", 8, 16)', 'Embedder("v1", 7, 16)'))
    done = project.run(*PLAN, "--queries", str(file), code=1)
    assert "v1 must embed the queries, too" in done.stderr
    assert "or leave --queries out" in done.stderr
