"""A model is what its probes say, whenever it is loaded: weights, preprocessing and the order of rows that change under way."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from rmvdb import errors
from tests.acceptance.conftest import IDS, NAIVE
from tests.support.project import Project

#: Of a model that shows no weights, as one behind a network or in a file of its own format.
WITHOUT_WEIGHTS = "\n\ndef v2():\n    embedder = Embedder('v2', 20, 20)\n    embedder.state_dict = None\n    return embedder\n"
#: Another training of it, and the same one with its items prepared in another way.
SWAPPED = WITHOUT_WEIGHTS.replace("    return", "    embedder.matrix = embedder.matrix[:, ::-1].copy()\n    return")
PREPARED = (
    "\n\nclass Other(Embedder):\n    def embed(self, items):\n        return np.tanh(1.1 * np.arctanh(super().embed(items)))\n"
)
PREPARED += "\n\ndef v2():\n    return Other('v2', 20, 20)\n"
#: A model whose items no probe is like.
UNPROBED = "\n\n_probe = None\n"


def change(project: Project, text: str) -> None:
    """Append this to the models' code."""
    models = project.folder / "models.py"
    models.write_text(models.read_text() + text)


def register(project: Project, *, text: str, extra: tuple[str, ...] = ()) -> None:
    project.ask("model", "remove", "v2")
    change(project, text)
    project.ask("model", "add", "v2", "--embedder", "models:v2", *extra)


@pytest.mark.parametrize(("before", "after"), [(WITHOUT_WEIGHTS, SWAPPED), ("", PREPARED)], ids=["weights", "preprocessing"])
def test_an_upgrade_does_not_go_on_with_a_model_that_was_changed_under_way(project: Project, before: str, after: str) -> None:
    if before:
        register(project, text=before)
    project.ask(*NAIVE, "--until", "0.3", "--no-cutover")
    right = (project.folder / "models.py").read_text()
    begun = project.json("status")["done"]
    assert begun > 0

    change(project, after)

    saying = "gives other vectors for the probe items than when 'v2' was registered; put the old model and its preprocessing back"
    assert saying in project.ask(*NAIVE, code=1).stderr
    with pytest.raises(errors.ModelError, match="gives other vectors for the probe items"), project.client() as client:
        client.search(project.models().item(1))
    assert saying in project.ask("doctor", code=1).stdout
    assert project.json("status")["done"] == begun
    (project.folder / "models.py").write_text(right)
    assert f"{len(IDS)} records verified" in project.ask(*NAIVE).stdout


#: A model that reads a file at each call, or asks another machine.
ELSEWHERE = """

def v2():
    class Elsewhere(Embedder):
        state_dict = None
        def embed(self, items):
            made = super().embed(items)
            return made[:, ::-1].copy() if (HERE / "other").exists() else made
    return Elsewhere("v2", 20, 20)
"""


@pytest.mark.parametrize("when", ["while it copies", "before it is verified"])
def test_a_model_that_changes_while_it_is_loaded_is_named_and_no_item_is_blamed(
    project: Project, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    monkeypatch.setattr("rmvdb.backfill.vectors.CHECK_EVERY", 0.0 if when == "while it copies" else 1e9)
    register(project, text=ELSEWHERE)
    project.ask(*NAIVE, "--until", "0.3", "--no-cutover")
    shutil.rmtree(project.folder / ".rmvdb" / "cache")  # the plan had embedded all of them
    with project.opened() as app:
        conductor = app.conductor("things")
        row = app.registry.active_upgrade(app.registry.gallery("things").id)
        assert row is not None
        app.loaded_models.embedder("v2")
        conductor.backfill(row, app.worker(), until=0.5 if when == "while it copies" else 1.0)
        (project.folder / "other").touch()
        with pytest.raises(errors.ModelError, match="gives other vectors for the probe items than when 'v2' was registered"):
            _ = conductor.backfill(row, app.worker(), until=1.0) if when == "while it copies" else conductor.verify(row)
        (project.folder / "other").unlink()
    assert f"{len(IDS)} records verified" in project.ask(*NAIVE).stdout


def test_a_model_that_no_probe_fits_is_compared_by_what_it_made(project: Project) -> None:
    register(project, text=WITHOUT_WEIGHTS + UNPROBED, extra=("--dim", "20"))
    project.ask(*NAIVE, "--until", "0.3", "--no-cutover")
    right = (project.folder / "models.py").read_text()

    change(project, SWAPPED)

    assert "were not made by model version 'v2' from these items" in project.ask(*NAIVE, code=2).stderr
    (project.folder / "models.py").write_text(right)
    assert "records verified" in project.ask(*NAIVE).stdout


@pytest.mark.parametrize("noise", [1e-2, 2e-3])
def test_an_embedder_that_is_not_steady_enough_is_refused_when_it_is_registered(project: Project, noise: float) -> None:
    """At 2e-3 it lies between 1e-5, which verification allows, and 1e-4, which was allowed here once."""
    noisy = "\n\nclass Noisy(Embedder):\n    def embed(self, items):\n        made = super().embed(items)\n"
    noisy += f"        return made + {noise} * np.random.default_rng().normal(size=made.shape)\n"
    change(project, noisy + "\n\ndef noisy():\n    return Noisy('noisy', 20, 20)\n")
    refused = project.ask("model", "add", "noisy", "--embedder", "models:noisy", code=1).stderr
    assert "gives another vector for item" in refused
    assert "1e-05 is allowed" not in refused  # half of it, when it is registered
    assert "noisy" not in [row["name"] for row in project.json("model", "list")]


@pytest.mark.parametrize("least", [1, 20], ids=["any batch", "large batches"])
def test_rows_in_another_order_are_found_before_any_is_kept(project: Project, least: int) -> None:
    """As of an embedder that sorts its texts by length, or takes the answers of its threads as they come."""
    sorted_ = "\n\nclass Sorting(Embedder):\n    def embed(self, items):\n        made = super().embed(items)\n"
    sorted_ += f"        return made[np.argsort(made[:, 0])] if len(items) > {least} else made\n"
    change(project, sorted_ + "\n\ndef sorting():\n    return Sorting('sorting', 20, 20)\n")
    add = ("model", "add", "sorting", "--embedder", "models:sorting")
    saying = "gives another vector for item"
    if least == 1:
        assert saying in project.ask(*add, code=1).stderr
        return
    project.ask(*add)
    upgrade = ("upgrade", "--from", "v1", "--to", "sorting", "--method", "naive")
    assert saying in project.ask(*upgrade, code=1).stderr
    models = project.models()
    with project.client() as client:
        assert client.count() == len(IDS)
        assert np.isfinite(client.search(models.item(1), limit=1)[0].distance)
    assert not list((Path(project.folder) / ".rmvdb" / "cache").rglob("*.parquet"))
