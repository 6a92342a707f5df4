"""A third version while v1 → v2 is unfinished, by the real command in real processes, on Milvus Lite and SQLite."""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rmvdb.types import Id
from tests.acceptance.conftest import IDS, UPGRADE, copy
from tests.support.application import searching
from tests.support.project import Project
from tests.support.waiting import wait_for_processes

THIRD = ("upgrade", "--from", "v2", "--to", "v3", "--labels", "label", "--sample", "160")
#: Records that are written and deleted before v3, and while v3 comes; those that stay as they are all the while.
WRITTEN, DELETED = (7, 150, 399), (8, 151, 398)
LATER, GONE = (10, 200, 390), (11, 201, 391)
ALWAYS = [id for id in IDS if id not in (*DELETED, *GONE)]
METHODS = pytest.mark.parametrize("method", ["naive", "rm"])


@pytest.fixture(scope="module")
def halfways(template: Path, planned_template: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """For each method a project where v1 → v2 is at t = 0.4, with some writes since; v3 is registered, and planned by rm."""

    @functools.cache
    def made(method: str) -> Path:
        project = copy(template if method == "naive" else planned_template, tmp_path_factory.mktemp(method) / "project")
        project.ask("model", "add", "v3", "--embedder", "models:v3")
        project.ask(*UPGRADE, "--method", method, "--until", "0.4", "--no-cutover")
        write(project, (*WRITTEN, 1001), DELETED)
        if method == "rm":
            project.ask("plan", *THIRD[1:], "--method", method)
        project.stop_engine()
        return project.folder

    return made


@pytest.fixture
def halfway(halfways: Callable[[str], Path], method: str, tmp_path: Path) -> Iterator[Project]:
    """One of these, of the test's own."""
    project = copy(halfways(method), tmp_path / "project")
    yield project
    project.stop_engine()


def write(project: Project, ids: tuple[int, ...], deleted: tuple[int, ...]) -> None:
    """Let the application give these records another item, and delete others."""
    models = project.models()
    with project.client() as client:
        for id in ids:
            project.editions(**models.editions() | {str(id): 1})
            client.upsert([{"id": id, "item": models.item(id), "label": 50}])
        client.delete(deleted)


def vectors(project: Project, *which: str) -> dict[str, dict[Id, Any]]:
    """Return the vectors of each collection in service, by model version."""
    app = project.app()
    legs = [leg for leg in app.registry.plan("things").legs if not which or leg.model in which]
    pages = {leg.model: app.store.scan(leg.collection, vector=True) for leg in legs}
    return {model: {record.id: record.vector for page in some for record in page} for model, some in pages.items()}


@METHODS
def test_a_third_version_takes_over_from_an_unfinished_upgrade(halfway: Project, method: str) -> None:
    project, third = halfway, (*THIRD, "--method", method)
    with searching(project, ALWAYS) as watch:
        project.fault(v3={"slow": 0.06})
        first = project.start(*third)
        seen: list[dict[str, Any]] = []

        def under_way() -> bool:
            seen.append(project.json("status"))
            return seen[-1]["upgrade"] == 2 and seen[-1]["t"] > 0.2

        wait_for_processes(under_way)
        assert [leg["model"][:2] for leg in seen[-1]["legs"]] == ["v3", "v2", "v1"]
        first.kill()
        first.communicate()
        write(project, (*LATER, 1002), GONE)
        project.fault()
        out = project.run(*third).stdout
    assert watch.trouble == []
    assert watch.searches > 5
    left = {*ALWAYS, 1001, 1002}
    assert f"cut over: {len(left)} records verified" in out
    project.ask("cleanup", "--yes")
    assert list(project.collections().values()) == [len(left)]
    app, models = project.app(), project.models()
    leg = app.registry.plan("things").legs[0]
    records = app.store.get(leg.collection, sorted(left), vector=True)
    expected = app.loaded_models.apply_head(leg.model, app.loaded_models.embed("v3", [models.item(id) for id in sorted(left)]))
    assert np.allclose([record.vector for record in records], expected, atol=1e-5)
    labels = {record.id: record.fields["label"] for record in records}
    assert labels == {id: 50 if id in (*WRITTEN, *LATER, 1001, 1002) else models.label(id) for id in left}
    assert not list((project.folder / ".rmvdb" / "archive").rglob("*.parquet"))


@pytest.mark.parametrize(("method", "calls"), [("naive", {"v1": 1, "v2": 1, "v3": 1}), ("rm", {"v1": 0, "v2": 0, "v3": 1})])
def test_three_legs_need_one_extraction_a_query_unless_naive(halfway: Project, method: str, calls: dict[str, int]) -> None:
    project = halfway
    # So late that the new model alone embeds the queries, whatever schedule over t the plan found worth it on so few records.
    # Rescoring would embed records beside the query.
    project.ask(*THIRD, "--method", method, "--rescore", "0", "--until", "0.95", "--no-cutover")
    before = {version: project.calls(version).count("3") for version in calls}
    with project.client() as client:
        plan = client.plan
        client.search(project.models().item(3))
    assert {version: project.calls(version).count("3") - before[version] for version in calls} == calls
    newest, second, oldest = plan.legs
    if method == "rm":
        assert oldest.transforms[: len(second.transforms)] == second.transforms
        assert second.transforms[: len(newest.transforms)] == newest.transforms
        assert len(oldest.transforms) == len(second.transforms) + 1
    scales = [leg.calibration for leg in plan.legs]  # by relevance, to the newest leg's distances, or not at all
    assert (len(set(scales) - {None}), scales[0] is None) in ((3, False), (2, True), (0, True))


@METHODS
def test_a_roll_back_of_a_third_version_lets_the_upgrade_before_it_go_on(halfway: Project, method: str) -> None:
    project = halfway
    project.ask(*THIRD, "--method", method, "--until", "0", "--no-cutover")
    before = vectors(project)
    project.ask(*THIRD, "--method", method, "--until", "0.6", "--no-cutover")
    write(project, (*LATER, 1002), GONE)
    with searching(project, ALWAYS) as watch:
        project.run("rollback")
        out = project.ask("cleanup", "--yes").stdout
        assert "the upgrade from v1 to v2" in out
        after = vectors(project)
        status = project.json("status")
        assert (status["upgrade"], status["phase"], [leg["model"][:2] for leg in status["legs"]]) == (
            1,
            "serving both",
            ["v2", "v1"],
        )
        for model, held in after.items():
            untouched = before[model].keys() - {*WRITTEN, *LATER, *GONE}
            assert untouched <= held.keys()
            assert all(np.array_equal(held[id], before[model][id]) for id in untouched)
        project.run(*UPGRADE, "--method", method)
    assert watch.trouble == []
    project.ask("cleanup", "--yes")
    assert list(project.collections().values()) == [len(ALWAYS) + 2]
    with project.client() as client:
        found = {record.id: record.fields["label"] for record in client.get([7, 10, 1001, 1002, *GONE])}
    assert found == dict.fromkeys([7, 10, 1001, 1002], 50)


@pytest.mark.parametrize("method", ["naive"])
def test_workers_go_on_with_the_upgrade_that_takes_the_place(halfway: Project, method: str) -> None:
    project = halfway
    project.fault(v2={"slow": 0.02})
    project.ask(*UPGRADE, "--method", method, "--until", "0.4", "--detach")
    worker = project.start("worker")
    try:
        wait_for_processes(lambda: project.json("status")["workers"])
        with searching(project, ALWAYS) as watch:
            project.run(*THIRD, "--method", method, "--detach")
            wait_for_processes(lambda: (now := project.json("status"))["upgrade"] == 2 and now["phase"] == "cut over")
        assert watch.trouble == []
    finally:
        worker.send_signal(signal.SIGTERM)
        out, err = worker.communicate(timeout=120)
    assert worker.returncode == 0, out + err
    project.ask("cleanup", "--yes")
    assert project.collections() == {"v3": len(IDS) - len(DELETED) + 1}


@pytest.mark.parametrize("method", ["naive"])
def test_a_command_whose_upgrade_is_superseded_ends_and_says_so(halfway: Project, method: str) -> None:
    project = halfway
    project.fault(v2={"slow": 0.08})
    first = project.start(*UPGRADE, "--method", method)
    wait_for_processes(lambda: project.json("status")["workers"])
    project.ask(*THIRD, "--method", method, "--until", "0.3", "--no-cutover")
    _, err = first.communicate(timeout=60)
    assert (first.returncode, err.count("Error: ")) == (2, 1), err
    assert "Error: Upgrade 1 has ended" in err
    assert "what took its place: rmvdb history" in err
    assert project.json("status")["upgrade"] == 2
