"""Rescoring by the real command line's gallery on Milvus Lite: ranks before the end, and no item embedded twice."""

from __future__ import annotations

import json

import numpy as np
import pytest

from rmvdb.types import Id
from tests.acceptance.conftest import IDS, NAIVE
from tests.support.project import Project


def nearest(project: Project, item: object) -> dict[Id, float]:
    """Return how far each record is from an item by the new model, nearest first."""
    models = project.models()
    vectors = models.v2().embed([models.item(id) for id in IDS])
    units = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    query = models.v2().embed([item])[0]
    far = 1 - units @ (query / np.linalg.norm(query))
    return dict(sorted(zip(IDS, far.tolist(), strict=True), key=lambda pair: pair[1]))


def embedded(project: Project) -> list[str]:
    """Return the records that the new model has embedded, in order."""
    return (project.folder / "calls-v2.log").read_text().split()


def test_an_application_ranks_by_the_new_model_before_the_end_and_the_backfill_embeds_nothing_again(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RMVDB_SEARCH__RESCORE_MS", "60000")
    project.ask(*NAIVE, "--until", "0.1", "--no-cutover")
    item = {"id": "query", "z": project.models().item(7)["z"]}
    far = nearest(project, item)
    (project.folder / "calls-v2.log").unlink()
    with project.client() as client:
        plain, hits = client.search(item, limit=20, rescore=0), client.search(item, limit=20, rescore=400)
        assert [hit.id for hit in hits] == list(far)[:20]
        assert np.allclose([hit.raw for hit in hits], [far[hit.id] for hit in hits], atol=1e-5)
        assert [hit.id for hit in plain] != [hit.id for hit in hits]
        client._current_plan.refresh()
        told = json.loads(project.ask("status", "--json").stdout)["rescoring"]
    searched = set(embedded(project)) - {"query", "probe"}
    assert len(searched) > 300
    assert told["searches"] == 1
    assert told["embedded_per_query"] == len(searched)
    (project.folder / "calls-v2.log").unlink()
    project.ask(*NAIVE, "--no-cutover")
    assert searched.isdisjoint(embedded(project))
    project.ask(*NAIVE)
    with project.client() as client:
        assert [hit.id for hit in client.search(item, limit=20)] == list(far)[:20]
