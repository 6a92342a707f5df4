"""Rescoring in one process: the first hits of searches while most records are not re-embedded yet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rmvdb.errors import EngineUnavailable
from rmvdb.items.field import FieldSource
from rmvdb.learning.method import Method
from rmvdb.planning.question import Question
from rmvdb.protocols import VectorStore
from rmvdb.registry.codec import leg_from_json, leg_to_json
from rmvdb.registry.registry import Registry
from rmvdb.registry.tables import UpgradeRow
from rmvdb.serving.client import Client
from rmvdb.serving.loaded_models import Chain, LoadedModels
from rmvdb.serving.rescorer import Rescorer
from rmvdb.types import IdType, Index, Item, Leg, Metric, Record, Schema, Vectors
from tests.support.inprocess import DIMS, Gallery, drive, make, vector
from tests.support.migrated import migrate
from tests.support.rescoring import (
    PATIENT,
    Counting,
    application,
    embedded,
    expect_true,
    truth,
    write_fields,
)

# --- ranks --------------------------------------------------------------------------------------------------------------


def test_with_all_records_rescored_a_search_answers_as_the_new_model_alone_before_anything_has_moved(gallery: Gallery) -> None:
    with application(gallery) as client:
        hits = client.search("anything", limit=10, rescore=40)
        expect_true(gallery, hits, "anything")
        assert {hit.leg for hit in hits} == {"texts_v1"}


def test_without_rescoring_a_search_is_what_it_was(gallery: Gallery) -> None:
    with application(gallery) as client, gallery.client() as plain:
        assert client.search("anything") == plain.search("anything") == client.search("anything", rescore=0)
        assert embedded() == ["anything"] * 2


def test_only_the_best_candidates_are_embedded_in_one_call_for_all_queries_each_record_once(gallery: Gallery) -> None:
    with application(gallery) as client:
        answers = client.search(["one", "two", "three"], limit=4, rescore=6)
    queries, items = Counting.calls["v2"]
    assert queries == ["one", "two", "three"]
    best = {gallery.source.of[id] for query in queries for id in list(truth(gallery, query, "v1"))[:6]}
    assert sorted(items) == sorted(best)
    for query, hits in zip(queries, answers, strict=True):
        found, far = list(truth(gallery, query, "v1"))[:6], truth(gallery, query)
        assert [hit.id for hit in hits] == sorted(found, key=far.__getitem__)[:4]


def test_rescoring_decides_ranks_and_never_who_is_found(gallery: Gallery) -> None:
    with application(gallery) as client:
        plain = client.search("anything", limit=40, rescore=0)
        rescored = client.search("anything", limit=40, rescore=5)
    assert {hit.id for hit in plain} == {hit.id for hit in rescored}
    assert {hit.id for hit in rescored if hit.raw != hit.distance} == set()
    before = {hit.id: hit.distance for hit in plain}
    assert sum(hit.distance != before[hit.id] for hit in rescored) == 5


def test_an_offset_is_cut_after_the_ranks_have_changed(gallery: Gallery) -> None:
    with application(gallery) as client:
        whole = client.search("anything", limit=20, rescore=40)
        pages = [client.search("anything", limit=5, offset=offset, rescore=40) for offset in (0, 5, 10, 15)]
    assert [hit.id for page in pages for hit in page] == [hit.id for hit in whole]


def test_a_filter_and_strong_searches_hold_for_rescored_searches(gallery: Gallery) -> None:
    with application(gallery) as client:
        hits = client.search("anything", limit=40, rescore=40, filter="n < 10", consistency="Strong")
    assert [hit.id for hit in hits] == [id for id in truth(gallery, "anything") if id < 10]
    assert set(embedded()) == {"anything", *(f"t{id}" for id in range(1, 10))}


@pytest.mark.parametrize(
    ("asked", "shown"), [((), {}), (("n",), {"n": 7}), (("text",), {"text": "t7"}), (("*",), {"n": 7, "text": "t7"})]
)
def test_hits_show_the_fields_that_were_asked_for_and_not_that_of_the_item(
    gallery: Gallery, asked: Sequence[str], shown: Mapping[str, Any]
) -> None:
    with application(gallery) as client:
        (hit,) = client.search("anything", limit=1, rescore=1, filter="id == 7", output_fields=asked)
    assert hit.fields == shown


def test_a_records_own_item_finds_it_at_once(gallery: Gallery) -> None:
    with application(gallery) as client:
        first = client.search("t7", limit=3, rescore=40)[0]
    assert (first.id, first.distance) == (7, pytest.approx(0.0, abs=1e-6))


def test_a_moved_record_is_not_embedded_again_and_ranks_among_the_others(gallery: Gallery) -> None:
    gallery.worker().run(gallery.task, gallery.backfill, until=0.5)
    moved = set(gallery.held()["new"])
    assert 0 < len(moved) < 40
    with application(gallery) as client:
        hits = client.search("anything", limit=40, rescore=40)
    expect_true(gallery, hits, "anything", limit=40)
    assert {hit.id for hit in hits if hit.leg == "texts_v2"} == moved
    assert sorted(embedded()[1:]) == sorted(gallery.source.of[id] for id in set(gallery.source.of) - moved)


def test_a_plan_may_ask_for_rescoring_and_a_search_may_do_without(gallery: Gallery) -> None:
    legs = [replace(leg, rescore=40 if leg.model == "v2" else 0) for leg in gallery.registry.plan("texts").legs]
    epoch = gallery.registry.announce("texts", legs, gallery.times)
    assert gallery.registry.activate("texts", epoch) == []
    with application(gallery) as client:
        assert client.plan.rescore == 40
        expect_true(gallery, client.search("anything"), "anything")
        assert client.search("anything", rescore=0) != client.search("anything")


def test_once_one_collection_is_left_nothing_is_rescored(gallery: Gallery) -> None:
    drive(gallery)
    final = gallery.registry.plan("texts").legs[:1]
    assert gallery.registry.activate("texts", gallery.registry.announce("texts", final, gallery.times)) == []
    with application(gallery) as client:
        expect_true(gallery, client.search("anything", rescore=40), "anything")
    assert embedded() == ["anything"]


def test_a_wrong_number_of_candidates_is_refused(gallery: Gallery) -> None:
    with application(gallery) as client:
        for wrong in (-1, 1.5, "many", True):
            with pytest.raises(Exception, match="rescore"):
                client.search("anything", rescore=wrong)  # type: ignore[call-overload]


# --- metrics, engines, and more than two legs --------------------------------------------------------------------------------


class Points:
    """A version's embedder: a fixed point for each text, on the hyperboloid if asked to, and of any length if not."""

    def __init__(self, version: str, metric: Metric) -> None:
        self.version, self.metric = version, metric

    def embed(self, items: Sequence[Item]) -> Vectors:
        return np.stack([self._point(str(item)) for item in items])

    def _point(self, text: str) -> Vectors:
        point = np.random.default_rng([*self.version.encode(), *text.encode()]).normal(size=DIMS[self.version]).astype(np.float32)
        return (
            np.concatenate([[np.sqrt(1 + point @ point)], point]).astype(np.float32) if self.metric is Metric.LORENTZ else point
        )


def served(folder: Path, store: VectorStore, metric: Metric, versions: Sequence[str], name: str) -> tuple[Client, list[str]]:
    """Return a client of twenty texts, all in the collection of the last version; the plan searches that of each version."""
    migrate(url := f"sqlite:///{folder}/{name}.sqlite")
    registry = Registry(url, patience=60.0, keep=lambda _: None)
    texts = {id: f"text {id}" for id in range(1, 21)}
    schemas = {}
    for version in versions:
        dim = DIMS[version] + (metric is Metric.LORENTZ)
        schemas[version] = Schema(collection=f"{name}_{version}", dim=dim, metric=metric.stored, id_type=IdType.INT64)
        registry.add_version(
            name=version, embedder=f"tests:{version}", options={}, classifier=None, dim=dim, metric=metric.value,
            fingerprint=None, probes=None, probe_kind=None, base=None, head=None,
        )  # fmt: skip
        store.create(schemas[version], Index(type="FLAT"))
    old = versions[-1]
    vectors = Points(old, metric).embed(list(texts.values()))
    store.upsert(
        schemas[old].collection,
        [Record(id=id, vector=vectors[at], fields={"text": text}) for at, (id, text) in enumerate(texts.items())],
    )
    times = {"max_age": 60.0, "longest_search": 60.0, "staleness": store.staleness}
    row = registry.add_gallery(
        name=name, model=old, schema=schemas[old], adopted=False, source="field:text", search={}, times=times
    )
    for version in versions[:-1]:
        registry.add_collection(row.id, model=version, schema=schemas[version], search={})
    legs = [Leg(collection=schemas[each].collection, model=each, metric=metric, embedder=each) for each in versions]
    registry.activate(name, registry.announce(name, legs, times), force=True)
    models = LoadedModels(
        load_embedder=lambda version: Points(version, metric),
        load_chain=lambda version: Chain(embedder=version, dim=schemas[version].dim),
        load_artifact=lambda _: b"",
    )
    rescorer = Rescorer(loaded_models=models, source=lambda: FieldSource("text"), schema=schemas[old], budget=PATIENT)
    client = Client(name, registry=registry, store=store, loaded_models=models, rescorer=rescorer, closing=registry.close)
    return client, [schema.collection for schema in schemas.values()]


@pytest.mark.parametrize("engine", ["faiss_store", "lite_store"])
@pytest.mark.parametrize("metric", list(Metric))
@pytest.mark.parametrize("versions", [("v2", "v1"), ("v3", "v2", "v1")], ids=["two legs", "three legs"])
def test_the_distance_of_a_rescored_hit_is_what_the_engine_gives_once_the_record_has_moved(
    tmp_path: Path, request: pytest.FixtureRequest, engine: str, metric: Metric, versions: Sequence[str]
) -> None:
    store: VectorStore = request.getfixturevalue(engine)
    client, collections = served(tmp_path, store, metric, versions, f"rescored_{metric.value.lower()}_{len(versions)}")
    try:
        with client:
            rescored = client.search("anything", limit=20, rescore=20, consistency="Strong")
            moved = store.get(collections[-1], [hit.id for hit in rescored])
            points = Points(versions[0], metric).embed([record.fields["text"] for record in moved])
            store.upsert(
                collections[0],
                [Record(id=each.id, vector=point, fields=each.fields) for each, point in zip(moved, points, strict=True)],
            )
            store.delete(collections[-1], [each.id for each in moved])
            in_place = client.search("anything", limit=20, rescore=0, consistency="Strong")
        assert {hit.leg for hit in rescored} == {collections[-1]}
        assert {hit.leg for hit in in_place} == {collections[0]}
        assert [hit.id for hit in rescored] == [hit.id for hit in in_place]
        assert np.allclose([hit.raw for hit in rescored], [hit.raw for hit in in_place], atol=1e-3, rtol=1e-4)
    finally:
        for collection in collections:
            store.drop(collection)


# --- from a plan to its end -----------------------------------------------------------------------------------------------------


def begin(gallery: Gallery, **asked: Any) -> UpgradeRow:
    """Return an upgrade whose plan asks for rescoring, served and listed, with nothing moved."""
    assert gallery.conductor().roll_back(gallery.upgrade) is None  # that of the fixture has not been deployed
    conductor = gallery.conductor()
    question = conductor.resolve(
        Question(gallery="texts", from_version="v1", to_version="v2", method=Method.NAIVE, order="random", **asked)
    )
    row = conductor.begin(question, replace(conductor.plan(question), rescore=40), gallery.worker())
    conductor.deploy(row)
    conductor.list_work(gallery.registry.upgrade(row.id))
    return gallery.registry.upgrade(row.id)


@pytest.fixture
def planned(tmp_path: Path) -> Iterator[Gallery]:
    """Forty texts whose upgrade is not deployed."""
    made = make(tmp_path, deployed=False)
    write_fields(made)
    yield made
    made.registry.close()


@pytest.mark.parametrize("instantly", [False, True], ids=["moved", "moved with the original kept"])
def test_an_upgrade_rescores_from_its_deployment_to_its_cut_over(planned: Gallery, instantly: bool) -> None:
    with application(planned) as client:
        assert client.plan.rescore == 0
        row = begin(planned, instant_rollback=instantly)
        assert client._current_plan.refresh().rescore == 40
        assert bool(client.plan.mirrors) == instantly
        expect_true(planned, client.search("anything"), "anything")
        client.upsert([{"id": 7, "item": "anything", "text": "anything", "n": 7}])
        planned.source.of[7] = "anything"
        expect_true(planned, client.search("anything", consistency="Strong"), "anything")
        planned.conductor().advance(planned.registry.upgrade(row.id), planned.worker())
        assert client._current_plan.refresh().rescore == 0
        Counting.calls.clear()
        expect_true(planned, client.search("anything"), "anything")
        assert embedded() == ["anything"]


def test_a_third_version_rescores_by_itself_and_not_for_the_second(gallery: Gallery) -> None:
    gallery.worker().run(gallery.task, gallery.backfill, until=0.5)
    gallery.supersede()
    assert [leg.model for leg in gallery.registry.plan("texts").legs] == ["v3", "v2", "v1"]
    assert gallery.registry.plan("texts").rescore == 0
    with application(gallery) as client:
        hits = client.search("anything", limit=40, rescore=40)
        far = truth(gallery, "anything", "v3")
        assert [hit.id for hit in hits] == list(far)
        assert {hit.leg for hit in hits} == {"texts_v1", "texts_v2"}


def test_a_search_of_one_collection_is_not_rescored_whatever_its_plan_says(planned: Gallery) -> None:
    legs = [replace(planned.registry.plan("texts").legs[0], rescore=40)]
    planned.registry.activate("texts", planned.registry.announce("texts", legs, planned.times))
    with application(planned) as client:
        assert client.plan.rescore == 0
        assert client.search("anything", rescore=40) == client.search("anything")
    assert set(embedded("v1")) == {"anything"}


def test_a_serving_plan_of_an_earlier_rmvdb_rescores_nothing() -> None:
    stored = leg_to_json(Leg(collection="texts", model="v1", metric=Metric.COSINE, embedder="v1"))
    assert "rescore" not in stored
    assert leg_from_json(stored).rescore == 0
    assert leg_from_json(leg_to_json(replace(leg_from_json(stored), rescore=20))).rescore == 20


def test_a_record_in_both_collections_has_its_true_distance(gallery: Gallery) -> None:
    """Copied, and waiting for its grace: the old leg may seem to have it nearer."""
    new = [replace(each, vector=vector("v2", gallery.source.of[each.id])) for each in gallery.records("texts_v1").values()]
    gallery.store.upsert("texts_v2", new)
    with application(gallery) as client:
        expect_true(gallery, client.search("anything", limit=40, rescore=40), "anything", limit=40)


def test_a_search_that_is_too_large_with_the_items_is_answered_without_rescoring(
    gallery: Gallery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rmvdb.serving.search.MANY_HITS", 5)
    real = gallery.store.search

    def search(collection: str, *args: Any, fields: Sequence[str] | None = (), **options: Any) -> Any:
        if fields is None or "text" in fields:
            raise EngineUnavailable("Milvus gave no answer within 10 s")
        return real(collection, *args, fields=fields, **options)

    monkeypatch.setattr(gallery.store, "search", search)
    with application(gallery) as client:
        assert len(client.search("anything", limit=10, output_fields=("n",), rescore=10)) == 10
