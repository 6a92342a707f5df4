"""A blend on Milvus Lite: what the application finds is what the blended query finds by hand, at every moment of an upgrade."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
import torch

from rmvdb.app.wiring import App
from rmvdb.learning.method import Method
from rmvdb.learning.network import Network
from rmvdb.learning.transforms import Config, Transform
from rmvdb.planning.plan import Plan, Stage
from rmvdb.planning.question import Question
from rmvdb.types import Blend, Record, ServingPlan, Vectors
from tests.acceptance.conftest import IDS
from tests.support.project import Project

WEIGHT = 0.35


def begin(opened: App) -> str:
    """Register an upgrade to v2 with a blend for its only stage; return the SHA-256 of its ψ."""
    torch.manual_seed(5)
    psi = Transform(Network(Config(d_in=20, d_out=16, hidden=12)))
    stage = Stage(reverse=opened.artifacts.put(psi.to_bytes(), suffix="safetensors"), blend=WEIGHT, calibrations=(None, None))
    conductor = opened.conductor("things")
    question = conductor.resolve(
        Question(gallery="things", from_version="v1", to_version="v2", method=Method.RQT, order="random")
    )
    plan = Plan(
        question=asdict(question), method="rqt", order="random", head=None, stages=(stage,), trained_on=None, prediction=None,
        cost={}, skipped=0, made_at=0.0,
    )  # fmt: skip
    conductor.begin(question, plan, opened.worker(), until=0.0, cutover=False)
    return str(stage.reverse)


def unit(vectors: Vectors) -> Vectors:
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)  # type: ignore[no-any-return]


def records(opened: App, collection: str) -> list[Record]:
    return [record for page in opened.store.scan(collection, vector=True) for record in page]


def nearest(opened: App, plan: ServingPlan, item: object, psi: str) -> list[object]:
    """Return the ten records nearest to the item, by queries made here."""
    one, two = (opened.loaded_models.embed(version, [item]) for version in ("v1", "v2"))
    both = (1 - WEIGHT) * unit(opened.loaded_models.apply([psi], two)) + WEIGHT * unit(one)
    found: dict[object, float] = {}
    for leg, query in zip(plan.legs, (two, both), strict=False):
        for record in records(opened, leg.collection):
            distance = 1 - float((unit(query) @ unit(np.asarray(record.vector)))[0])
            found[record.id] = min(found.get(record.id, 9.0), distance)
    return sorted(found, key=found.__getitem__)[:10]


def test_the_application_finds_what_the_blended_query_finds_while_it_is_upgraded_and_rolled_back(project: Project) -> None:
    models, upgrade = project.models(), ("upgrade", "--from", "v1", "--to", "v2")
    with project.opened() as opened:
        psi = begin(opened)

    def expect(asked: set[str], blend: Blend | None) -> None:
        with project.opened() as opened, project.client() as client:
            assert (set(client.plan.embedders), client.plan.legs[-1].blend) == (asked, blend)
            for item in (models.item(7), models.item(311), models.item(2001)):
                assert [hit.id for hit in client.search(item)] == nearest(opened, client.plan, item, psi)

    blend = Blend(embedder="v1", weight=WEIGHT)
    for until in ("0.0", "0.5"):
        project.ask(*upgrade, "--until", until, "--no-cutover")
        expect({"v1", "v2"}, blend)
    project.editions(**{"3": 1})
    written = {id: models.item(id) for id in (900, 3)}
    with project.client() as client:
        client.upsert([{"id": id, "item": item} for id, item in written.items()])
        assert [client.search(item, limit=1)[0].id for item in written.values()] == list(written)
        expect({"v1", "v2"}, blend)
    project.ask("rollback")
    with project.client() as client:
        assert client.plan.embedders == ("v1",)
        assert [client.search(item, limit=1)[0].id for item in written.values()] == list(written)
        assert client.count() == len(IDS) + 1
