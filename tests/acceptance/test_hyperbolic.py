"""A hyperbolic model that was trained to be compared with an old one (HBCT), served by the real commands: metric LORENTZ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.utils.data import Subset, TensorDataset

import rmvdb
from rmvdb import metrics
from rmvdb.learning import compatible, hyperbolic
from rmvdb.learning.compatible import Loss, Model, Settings
from rmvdb.learning.losses import hbct
from rmvdb.types import Hit
from tests.support.project import Project

MODELS = """
from pathlib import Path
import numpy as np
import torch
from safetensors.torch import load_file
from sklearn.datasets import load_digits
from torch import nn
from rmvdb.learning.losses import lorentz

HERE, DIGITS, DIM = Path(__file__).parent, load_digits(), 32


def network(width, zeta):
    layers = [nn.Linear(64, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, DIM)]
    return nn.Sequential(*layers, lorentz.Lift(zeta=zeta))


def items(ids):
    return {id: DIGITS.data[id] for id in ids}


class Embedder:
    def __init__(self, name, width, zeta):
        self.network = network(width, zeta).eval()
        self.network.load_state_dict(load_file(HERE / f"{name}.safetensors"))

    @torch.inference_mode()
    def embed(self, items):
        pictures = [each if isinstance(each, np.ndarray) else np.zeros(64) for each in items]
        return self.network(torch.from_numpy(np.stack(pictures)).float() / 8 - 1).numpy()


def v1():
    return Embedder("v1", 32, 1.0)


def v2():
    return Embedder("v2", 128, 1.2)
"""
ROWS = np.random.default_rng(0).permutation(1797)
TAUGHT, GALLERY, QUERIES = ROWS[:1000], sorted(ROWS[1000:1600].tolist()), ROWS[1600:].tolist()


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """v1 has learnt the digits 0 to 4, v2 all ten and to be compared with v1; the gallery holds other pictures at v1."""
    project = Project(tmp_path_factory.mktemp("hyperbolic"))
    (project.folder / "models.py").write_text(MODELS)
    _train(project)
    project.ask("init")
    project.ask("model", "add", "v1", "--embedder", "models:v1", "--metric", "LORENTZ")
    project.ask("model", "add", "v2", "--embedder", "models:v2", "--metric", "LORENTZ", "--compatible-with", "v1")
    project.ask("gallery", "add", "things", "--model", "v1", "--source", "call:models:items")
    digits = project.models().DIGITS
    with project.client() as client:
        client.upsert([{"id": id, "item": digits.data[id], "label": int(digits.target[id])} for id in GALLERY])
    yield project
    project.stop_engine()


def test_a_model_trained_by_hbct_is_better_at_once_and_its_least_certain_records_move_first(project: Project) -> None:
    models = project.models()
    with project.client() as client:
        before = quality(client, models)
    upgrade = ("upgrade", "--from", "v1", "--to", "v2", "--labels", "label", "--order", "uncertainty")
    told = project.run(*upgrade, "--until", "0.5").stdout
    assert "identity" in told
    with project.client() as client:
        half = quality(client, models)
        found, rescored = searched(client, models, rescore=0), searched(client, models, rescore=50)
        assert client.plan.embedders == ("v2",)
        new, old = client.plan.legs
        assert (new.model, old.model) == ("v2", "v1")
    moved = {hit.id for hit in found[0] if hit.leg == new.collection}
    assert len(moved) >= len(GALLERY) // 2
    certain = dict(zip(GALLERY, hyperbolic.certainty(embedded(models, "v1", GALLERY)), strict=True))
    assert max(certain[id] for id in moved) <= min(certain[id] for id in set(GALLERY) - moved) + 1e-6

    # The engine searches by inner products, and the hits have geodesic distances. The legs are merged by calibrated ones.
    queries, place = embedded(models, "v2", QUERIES), {id: number for number, id in enumerate(GALLERY)}
    exact = {leg.collection: hyperbolic.distances(queries, embedded(models, leg.model, GALLERY)) for leg in (new, old)}
    for row, (hits, better) in enumerate(zip(found, rescored, strict=True)):
        assert {hit.id for hit in hits if hit.leg == new.collection} == moved
        expected = [exact[hit.leg][row, place[hit.id]] for hit in hits]
        assert [hit.raw for hit in hits] == pytest.approx(expected, abs=2e-3)
        best = [hit for hit in better if hit.id in {each.id for each in hits[:50]}]
        true = [exact[new.collection][row, place[hit.id]] for hit in best]
        assert [hit.raw for hit in best] == pytest.approx(true, abs=2e-3)
        for leg in (new, old):
            assert np.diff([hit.raw for hit in hits if hit.leg == leg.collection]).min() >= 0

    project.run(*upgrade)
    with project.client() as client:
        after = quality(client, models)
    assert before < half < after
    assert after == pytest.approx(mean_precision(exact_alone(models), models), abs=1e-3)


def quality(client: rmvdb.Client, models: Any) -> float:
    """Return the mAP of every query over the whole gallery."""
    place = {id: number for number, id in enumerate(GALLERY)}
    distance = np.full((len(QUERIES), len(GALLERY)), np.inf)
    for row, hits in enumerate(searched(client, models)):
        assert len(hits) == len(GALLERY)
        distance[row, [place[hit.id] for hit in hits]] = np.arange(len(hits))
    return mean_precision(distance, models)


def searched(client: rmvdb.Client, models: Any, *, rescore: int | None = None) -> list[list[Hit]]:
    """Return the whole gallery for every query; few queries at a time, since a search may not take long."""
    pictures = [models.DIGITS.data[id] for id in QUERIES]
    parts = (client.search(pictures[at : at + 5], limit=len(GALLERY), rescore=rescore) for at in range(0, len(pictures), 5))
    return [hits for part in parts for hits in part]


def mean_precision(distance: np.ndarray, models: Any) -> float:
    target = models.DIGITS.target
    return metrics.mean(metrics.average_precision(distance, target[QUERIES][:, None] == target[GALLERY][None, :]))


def exact_alone(models: Any) -> np.ndarray:
    """Return the geodesic distances of v2's queries to a gallery of v2 that was embedded offline."""
    return hyperbolic.distances(embedded(models, "v2", QUERIES), embedded(models, "v2", GALLERY))


def embedded(models: Any, version: str, ids: Sequence[int]) -> np.ndarray:
    return getattr(models, version)().embed([models.DIGITS.data[id] for id in ids])


def _train(project: Project) -> None:
    models = project.models()
    digits = models.DIGITS
    whole = TensorDataset(torch.from_numpy(digits.data).float() / 8 - 1, torch.from_numpy(digits.target).long())
    settings = Settings(epochs=60, lr=0.05)
    few = Subset(whole, TAUGHT[digits.target[TAUGHT] < 5])
    torch.manual_seed(0)
    old = Model(module=models.network(32, 1.0), classifier=hbct.Classifier(models.DIM, 5))
    compatible.train(old, few, settings=settings)
    new = Model(module=models.network(128, 1.2), classifier=hbct.Classifier(models.DIM, 10))
    compatible.train(new, Subset(whole, TAUGHT), loss=Loss.HBCT, old=old, settings=settings)
    for name, model in (("v1", old), ("v2", new)):
        save_file(model.module.state_dict(), Path(project.folder) / f"{name}.safetensors")
