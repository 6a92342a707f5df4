"""Where ψ starts below the old model, both models embed the queries first; by the real command, on Milvus Lite and SQLite."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.application import searching
from tests.support.project import Project

IDS = list(range(1, 901))
#: Both models see the class. Everything else differs between them, and lengths differ from record to record.
STRANGERS = """

class Stranger(Embedder):
    def __init__(self):
        super().__init__("w2", 24, 20)
        self.matrix[:8] = 0.0


class Long(Embedder):
    def embed(self, items):
        lengths = [np.random.default_rng([7, *str(_id(each)).encode()]).normal() for each in items]
        return super().embed(items) * np.exp(0.2 * np.array(lengths, np.float32))[:, None]


def v1():
    return Long("v1", 8, 16)


def v2():
    return Stranger()
"""
RIDGE = ("--from", "v1", "--to", "v2", "--method", "ridge", "--rescore", "0", "--order", "random")


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """A gallery whose models have little in common."""
    project = Project(tmp_path / "project", batch=100)
    models = project.folder / "models.py"
    models.write_text(models.read_text() + STRANGERS)
    return project.prepare(IDS, old_metric="IP")


def test_both_models_embed_the_queries_until_one_is_enough(project: Project) -> None:
    plan = project.json("plan", *RIDGE)
    at = plan["switch"]
    assert 0 < at < 1
    told = plan["prediction"]
    assert told["verdict"] in ("ok", "warn")
    assert told["course"][0] == told["old"]  # it starts as the old model, exactly
    assert f"until t = {at:g} both models embed each query" in told["reason"]

    with searching(project, IDS) as watch:
        project.run("upgrade", *RIDGE, "--accept-risk", "--until", str(at / 2), "--no-cutover")
        assert embedders(project) == {"v1", "v2"}
        out = project.run("upgrade", *RIDGE, "--accept-risk", "--until", str((1 + at) / 2), "--no-cutover").stdout
        assert f"from t = {at:g} on the new model alone embeds the queries" in out
        assert embedders(project) == {"v2"}
        assert f"from t = {at:g} on" in project.ask("history").stdout
        project.run("rollback")
        project.ask("cleanup", "--yes")
        project.run("upgrade", *RIDGE, "--accept-risk")
    assert watch.trouble == []
    assert project.json("status")["phase"] == "cut over"
    project.stop_engine()


def embedders(project: Project) -> set[str]:
    """Return the models that embed a query now."""
    with project.client() as client:
        return set(client.plan.embedders)
