"""The settings of `rmvdb init`. The other tests change them to be quick."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from rmvdb.app import config
from tests.support.project import Project

#: Settings of the tests' projects that are not the defaults: the value, and why.
DRIFT: dict[str, tuple[Any, str]] = {
    "models.allow": (["models"], "what `rmvdb model add` writes there itself"),
    "milvus.timeout": (3.0, "a silent engine is waited for in many tests"),
    "index.type": (
        config.ProjectSettings().index.type,
        "the default, written down so that a test can write another in its place",
    ),
    "search.plan_max_age": (0.6, "each epoch and each grace waits for it"),
    "search.longest_search": (1.5, "each grace waits for it"),
    "backfill.batch": (50, "a few hundred records must make several batches"),
    "backfill.width": (3, "several batches at once on few records"),
    "backfill.lease": (9.0, "who takes over waits for it"),
    "backfill.longest_call": (3.0, "a lease lasts three of them"),
    "backfill.retry_for": (15.0, "outages are played in seconds"),
}


def test_the_tests_projects_differ_from_the_defaults_only_where_there_is_a_reason(tmp_path: Path) -> None:
    text = (Project(tmp_path).folder / "rmvdb.toml").read_text()
    set_here = {f"{section}.{name}": value for section, names in tomllib.loads(text).items() for name, value in names.items()}
    assert set_here == {name: value for name, (value, _) in DRIFT.items()}
    assert set(DRIFT) <= {f"{s}.{n}" for s in config.ProjectSettings.model_fields for n in _names(s)}


def _names(section: str) -> set[str]:
    kind = config.ProjectSettings.model_fields[section].annotation
    return set(getattr(kind, "model_fields", {}))


def test_an_instant_roll_back_is_there_with_the_default_engine_and_index(tmp_path: Path) -> None:
    project = Project(tmp_path / "project").prepare(list(range(1, 121)))
    try:
        project.run("upgrade", "--from", "v1", "--to", "v2", "--method", "naive", "--instant-rollback")
        with project.client() as client:
            assert client.count() == 120
        project.run("rollback")
        with project.client() as client:
            assert client.count() == 120
            assert [leg.model for leg in client.plan.legs] == ["v1"]
    finally:
        project.stop_engine()


def test_an_upgrade_and_its_way_back_run_with_the_settings_that_init_writes(tmp_path: Path) -> None:
    project = Project(tmp_path / "project")
    (project.folder / "rmvdb.toml").unlink()
    project.run("init")
    settings = tomllib.loads((project.folder / "rmvdb.toml").read_text())
    assert not {f"{section}.{name}" for section, names in settings.items() for name in names} - {"models.allow"}
    try:
        project.prepare(list(range(1, 121)), processes=True)
        project.run("upgrade", "--from", "v1", "--to", "v2", "--method", "naive")
        models = project.models()
        with project.client() as client:
            assert [hit.id for hit in client.search(models.item(7), limit=1)] == [7]
            client.delete([8])
            assert client.count() == 119
        project.run("rollback")
        with project.client() as client:
            assert client.count() == 119
            assert [leg.model for leg in client.plan.legs] == ["v1"]
            assert 8 not in {hit.id for hit in client.search(models.item(7), limit=120)}
    finally:
        project.stop_engine()
