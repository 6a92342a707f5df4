"""Rescoring in one process: what searches find first while most records are not re-embedded yet, and what may go wrong there."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from rmvdb.backfill.batches import Backfill
from rmvdb.cli.show_status import print_status
from rmvdb.items.field import FieldSource
from rmvdb.learning.method import Method
from rmvdb.planning.question import Question
from rmvdb.protocols import Source, VectorStore
from rmvdb.registry.codec import leg_from_json, leg_to_json
from rmvdb.registry.registry import Registry
from rmvdb.registry.tables import UpgradeRow
from rmvdb.serving.client import Client
from rmvdb.serving.loaded_models import Chain, LoadedModels
from rmvdb.serving.rescorer import Rescorer
from rmvdb.serving.shared_vectors import SharedVectors
from rmvdb.storage.embedding_cache import EmbeddingCache
from rmvdb.types import Hit, Id, IdType, Index, Item, Leg, Metric, Record, Schema, Vectors
from rmvdb.upgrade.status import status
from tests.support.inprocess import DIMS, Gallery, TextEmbedder, drive, make, vector
from tests.support.migrated import migrate
from tests.support.waiting import wait_until

#: Enough for any machine: only tests of the budget want less.
PATIENT = 60.0
SCHEMA = Schema(collection="texts_v1", dim=DIMS["v1"], metric=Metric.COSINE, id_type=IdType.INT64)


class Counting(TextEmbedder):
    """An embedder that counts its calls and their items, by version."""

    calls: ClassVar[dict[str, list[list[Item]]]] = {}
    #: Called before each embedding by the new version.
    before: Callable[[Sequence[Item]], None] = staticmethod(lambda items: None)

    def embed(self, items: Sequence[Item]) -> Vectors:
        self.calls.setdefault(self.version, []).append(list(items))
        if self.version == "v2":
            type(self).before(items)
        return super().embed(items)


@pytest.fixture(autouse=True)
def _count_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Counting, "calls", {})
    monkeypatch.setattr(Counting, "before", staticmethod(lambda items: None))


@pytest.fixture
def gallery(tmp_path: Path) -> Iterator[Gallery]:
    """Forty texts in the middle of an upgrade, nothing moved yet. Each record has its text in a field, too."""
    made = make(tmp_path)
    write_fields(made)
    yield made
    made.registry.close()


def write_fields(gallery: Gallery) -> None:
    records = gallery.records("texts_v1").values()
    gallery.store.upsert(
        "texts_v1", [replace(each, fields={"n": each.id, "text": gallery.source.of[each.id]}) for each in records]
    )


def application(
    gallery: Gallery,
    source: Source | None = None,
    *,
    budget: float = PATIENT,
    cache: int = 1_000_000,
    shared: SharedVectors | None = None,
    load: Callable[[str], Any] = Counting,
) -> Client:
    """A client in a process of its own. Its items come from the field, unless it has another source."""
    models = LoadedModels(
        load_embedder=load, load_chain=lambda version: Chain(embedder=version, dim=DIMS[version]), load_artifact=lambda _: b""
    )
    rescorer = Rescorer(
        loaded_models=models,
        source=lambda: source or FieldSource("text"),
        schema=SCHEMA,
        budget=budget,
        cache=cache,
        shared=shared,
    )
    return Client(
        "texts", registry=gallery.registry, store=gallery.store, loaded_models=models, engine_timeout=1.0, rescorer=rescorer
    )


def truth(gallery: Gallery, query: str, version: str = "v2") -> dict[Id, float]:
    """How far each record is from a query by that version, by id, nearest first."""
    far = {id: float(1 - vector(version, text) @ vector(version, query)) for id, text in gallery.source.of.items()}
    return dict(sorted(far.items(), key=lambda pair: pair[1]))


def embedded(version: str = "v2") -> list[Item]:
    """Every item that the version embedded, in order."""
    return [item for items in Counting.calls.get(version, []) for item in items]


def expect_true(gallery: Gallery, hits: Sequence[Hit], query: str) -> None:
    """These are the nearest records by the new model, with their true distances."""
    far = truth(gallery, query)
    assert [hit.id for hit in hits] == list(far)[: len(hits)]
    assert np.allclose([hit.distance for hit in hits], [far[hit.id] for hit in hits], atol=1e-5)
    assert np.allclose([hit.raw for hit in hits], [far[hit.id] for hit in hits], atol=1e-5)


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


def test_what_has_moved_is_not_embedded_again_and_ranks_among_the_others(gallery: Gallery) -> None:
    gallery.worker().run(gallery.task, gallery.backfill, until=0.5)
    moved = set(gallery.held()["new"])
    assert 0 < len(moved) < 40
    with application(gallery) as client:
        hits = client.search("anything", limit=40, rescore=40)
    expect_true(gallery, hits, "anything")
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


# --- what is kept ---------------------------------------------------------------------------------------------------------


class Changing:
    """A source whose items change behind the back of every client."""

    def __init__(self, of: dict[Id, str]) -> None:
        self.of, self.asked = dict(of), 0

    def load(self, records: Sequence[Record]) -> Mapping[Id, Item]:
        self.asked += len(records)
        return {record.id: self.of[record.id] for record in records if record.id in self.of}


def test_a_second_search_embeds_its_query_alone(gallery: Gallery) -> None:
    with application(gallery) as client:
        first = client.search("anything", rescore=40)
        Counting.calls.clear()
        assert client.search("anything", rescore=40) == first
    assert embedded() == ["anything"]


def test_a_kept_vector_does_not_outlive_a_write_of_its_record_by_any_client(gallery: Gallery) -> None:
    with application(gallery) as client, gallery.client() as other:
        client.search("anything", limit=40, rescore=40)
        for writer, text in ((client, "mine"), (other, "theirs"), (other, "t7")):
            writer.upsert([{"id": 7, "item": text, "text": text, "n": 7}])
            gallery.source.of[7] = text
            expect_true(gallery, client.search(text, limit=40, rescore=40, consistency="Strong"), text)
            assert client.search(text, limit=1, rescore=40, consistency="Strong")[0].id == 7


def test_a_kept_vector_does_not_outlive_a_write_that_only_the_old_collection_shows(gallery: Gallery) -> None:
    with application(gallery) as client:
        client.search("anything", limit=40, rescore=40)
        gallery.source.of[7] = "another program's"
        old = Record(id=7, vector=vector("v1", "another program's"), fields={"n": 7, "text": "another program's"})
        gallery.store.upsert("texts_v1", [old])
        expect_true(gallery, client.search("anything", limit=40, rescore=40), "anything")
    assert embedded().count("another program's") == 1


def test_a_kept_vector_does_not_outlive_a_change_of_the_sources_item(gallery: Gallery) -> None:
    source = Changing(gallery.source.of)
    with application(gallery, source) as client:
        expect_true(gallery, client.search("anything", limit=40, rescore=40), "anything")
        gallery.source.of[7] = source.of[7] = "changed"
        expect_true(gallery, client.search("anything", limit=40, rescore=40), "anything")
        gallery.source.of[7] = source.of[7] = "t7"
        expect_true(gallery, client.search("anything", limit=40, rescore=40), "anything")
    assert source.asked == 3 * 40
    assert sorted(embedded()) == sorted(["anything"] * 3 + [f"t{id}" for id in range(1, 41)] + ["changed"])


def test_a_deleted_record_is_not_found_though_its_vector_is_kept(gallery: Gallery) -> None:
    with application(gallery) as client:
        client.search("anything", limit=40, rescore=40)
        client.delete(7)
        del gallery.source.of[7]
        expect_true(gallery, client.search("anything", limit=40, rescore=40), "anything")


def test_the_cache_stays_within_its_bytes(gallery: Gallery) -> None:
    with application(gallery, cache=5 * 500) as client:
        for query in ("one", "two", "three"):
            expect_true(gallery, client.search(query, limit=40, rescore=40), query)
            assert client._reader._rescorer is not None
            kept = client._reader._rescorer._cache
            assert 0 < len(kept) <= 5
            assert kept.bytes <= 5 * 500


# --- the budget -----------------------------------------------------------------------------------------------------------


def test_a_search_waits_for_its_budget_and_no_longer_and_the_next_one_finds_the_late_vectors(gallery: Gallery) -> None:
    go_on, slow = threading.Event(), threading.Event()

    def before(items: Sequence[Item]) -> None:
        if slow.is_set() and len(items) > 1:
            go_on.wait(60.0)

    Counting.before = staticmethod(before)  # type: ignore[assignment]
    with application(gallery, budget=0.2) as client:
        plain = client.search("anything", rescore=0)
        slow.set()
        began = time.monotonic()
        late = client.search("anything", rescore=40)
        assert time.monotonic() - began < 10.0
        assert late == plain
        go_on.set()
        wait_until(lambda: kept(client) == 40)
        expect_true(gallery, client.search("anything", rescore=40), "anything")
    assert sorted(embedded()) == sorted(["anything"] * 3 + [f"t{id}" for id in range(1, 41)])


def kept(client: Client) -> int:
    """How many vectors a client keeps."""
    assert client._reader._rescorer is not None
    return len(client._reader._rescorer._cache)


def test_a_source_that_hangs_holds_no_search_up(gallery: Gallery) -> None:
    go_on = threading.Event()

    class Hanging(Changing):
        def load(self, records: Sequence[Record]) -> Mapping[Id, Item]:
            go_on.wait(60.0)
            return super().load(records)

    with application(gallery, Hanging(gallery.source.of), budget=0.05) as client:
        plain = client.search("anything", rescore=0)
        began = time.monotonic()
        for _ in range(30):  # more than its threads, and those that may wait for one
            assert client.search("anything", rescore=40) == plain
        assert time.monotonic() - began < 30.0
        assert threading.active_count() < 40
        go_on.set()


def test_the_time_for_rescoring_is_not_a_search_that_took_too_long(gallery: Gallery) -> None:
    asked: list[str] = []
    Counting.before = staticmethod(lambda items: time.sleep(0.5 if len(items) > 1 else 0.0))  # type: ignore[assignment]
    with application(gallery) as client:
        client.search("anything")  # its models are loaded
        gallery.store.before = lambda call, collection: asked.append(collection)
        expect_true(gallery, client.search("anything", rescore=40), "anything")
        assert gallery.times["longest_search"] < 0.5
    assert len(asked) == 2 or asked.count("texts_v1") < 5  # a busy machine may repeat it, rescoring never does


def test_the_wall_time_that_clients_report_counts_rescoring(gallery: Gallery) -> None:
    Counting.before = staticmethod(lambda items: time.sleep(0.3 if len(items) > 1 else 0.0))  # type: ignore[assignment]
    with application(gallery) as client:
        client.search("anything", rescore=40)
        searches, p99_ms = client._latency.p99()
    assert searches == 1
    assert p99_ms >= 300.0


# --- what fails -------------------------------------------------------------------------------------------------------------


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]


def test_a_source_that_fails_costs_no_search_and_is_logged_once(gallery: Gallery, caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def load(self, records: Sequence[Record]) -> Mapping[Id, Item]:
            raise OSError("the disk is on fire")

    with application(gallery, Broken()) as client:
        plain = client.search("anything", rescore=0)
        for _ in range(3):
            assert client.search("anything", rescore=40) == plain
    assert ["the disk is on fire" in words for words in warnings_of(caplog)] == [True]


def test_a_source_that_cannot_be_loaded_costs_no_search(gallery: Gallery, caplog: pytest.LogCaptureFixture) -> None:
    def load() -> Source:
        raise ImportError("no such module")

    with application(gallery) as client:
        assert client._reader._rescorer is not None
        client._reader._rescorer._load_source = load
        assert client.search("anything", rescore=40) == client.search("anything", rescore=0)
    assert ["no such module" in words for words in warnings_of(caplog)] == [True]


def test_an_application_that_cannot_reach_items_is_served_as_before(gallery: Gallery, caplog: pytest.LogCaptureFixture) -> None:
    with application(gallery) as client:
        assert client._reader._rescorer is not None
        client._reader._rescorer._load_source = lambda: None
        assert client.search("anything", rescore=40) == client.search("anything", rescore=0)
    assert warnings_of(caplog) == []


def test_an_embedder_that_fails_for_every_candidate_costs_no_search(gallery: Gallery, caplog: pytest.LogCaptureFixture) -> None:
    def before(items: Sequence[Item]) -> None:
        if list(items) != ["anything"]:
            raise RuntimeError("out of memory")

    Counting.before = staticmethod(before)  # type: ignore[assignment]
    with application(gallery) as client:
        plain = client.search("anything", rescore=0)
        assert [client.search("anything", rescore=40) for _ in range(3)] == [plain] * 3
    assert ["out of memory" in words for words in warnings_of(caplog)] == [True]


def test_one_bad_item_keeps_its_rank_and_the_others_are_rescored(gallery: Gallery, caplog: pytest.LogCaptureFixture) -> None:
    held = gallery.records("texts_v1")[7]
    gallery.store.upsert("texts_v1", [replace(held, fields={"n": 7, "text": "broken"})])
    with application(gallery) as client:
        plain = {hit.id: hit for hit in client.search("anything", limit=40, rescore=0)}
        for _ in range(2):
            hits = {hit.id: hit for hit in client.search("anything", limit=40, rescore=40)}
            far = truth(gallery, "anything")
            assert hits[7] == plain[7]
            assert all(np.isclose(hit.distance, far[hit.id], atol=1e-5) for hit in hits.values() if hit.id != 7)
    assert ["record 7 cannot be embedded" in words for words in warnings_of(caplog)] == [True]
    assert sum(items.count("broken") for items in Counting.calls["v2"]) < 15  # halved once, and not again by the second search


def test_records_without_an_item_keep_their_rank(gallery: Gallery, caplog: pytest.LogCaptureFixture) -> None:
    with application(gallery, Changing({7: "t7", 8: "t8"})) as client:
        plain = {hit.id: hit.distance for hit in client.search("anything", limit=40, rescore=0)}
        hits = {hit.id: hit.distance for hit in client.search("anything", limit=40, rescore=40)}
    assert {id for id in hits if hits[id] != plain[id]} == {7, 8}
    assert warnings_of(caplog) == []


def test_quarantined_records_keep_being_found_and_rescored_ones_pass_them(gallery: Gallery) -> None:
    gallery.source.of[7] = "broken"
    drive(gallery)
    assert set(gallery.held()["old"]) == {7}
    with application(gallery) as client:
        hits = client.search("anything", limit=40, rescore=40)
        assert {hit.id for hit in hits} == set(range(1, 41))
        assert {hit.id for hit in hits if hit.leg == "texts_v1"} == {7}


def test_a_field_that_no_collection_has_is_not_asked_for(gallery: Gallery) -> None:
    fixed = replace(SCHEMA, dynamic=False)
    with application(gallery) as client:
        assert client._reader._rescorer is not None
        client._reader._rescorer._schema = fixed
        assert client.search("anything", rescore=40) == client.search("anything", rescore=0)


def test_a_client_that_is_closed_while_it_embeds_ends_at_once(gallery: Gallery) -> None:
    go_on = threading.Event()
    Counting.before = staticmethod(lambda items: go_on.wait(60.0) if len(items) > 1 else None)  # type: ignore[assignment]
    client = application(gallery, budget=0.05)
    client.search("anything", rescore=40)
    began = time.monotonic()
    client.close()
    assert time.monotonic() - began < 10.0
    go_on.set()


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
    """A client of twenty texts, all in the collection of the last version; the plan searches that of each version."""
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


# --- for everybody ------------------------------------------------------------------------------------------------------------


def cached(gallery: Gallery) -> EmbeddingCache:
    """The embeddings that clients and workers of this gallery share, as one more process reads them."""
    return EmbeddingCache(gallery.folder / "shared", model="v2", dim=DIMS["v2"])


def sharing(gallery: Gallery, most: int = 1_000_000) -> SharedVectors:
    return SharedVectors(
        "texts", registry=gallery.registry, store=gallery.store, cache=lambda version: cached(gallery), most=most
    )


def test_what_searches_embedded_is_not_embedded_again_by_the_backfill(gallery: Gallery) -> None:
    backfill = sharing_backfill(gallery)  # its cache is open before the client writes
    assert backfill._cache is not None
    assert backfill._cache.knows(gallery.source.of) == set()
    with application(gallery, shared=sharing(gallery)) as client:
        client.search("anything", limit=5, rescore=12)
    searched = set(embedded()) - {"anything"}
    assert len(searched) == 12
    Counting.calls.clear()
    gallery.worker().run(gallery.task, backfill)
    gallery.expect_moved()
    assert set(embedded()) == set(gallery.source.of.values()) - searched


def sharing_backfill(gallery: Gallery) -> Backfill:
    models = LoadedModels(
        load_embedder=Counting, load_chain=lambda name: Chain(embedder=name, dim=DIMS[name]), load_artifact=lambda _: b""
    )
    return Backfill(
        registry=gallery.registry, store=gallery.store, loaded_models=models, source=gallery.source,
        archive=gallery.archive, cache=cached(gallery),
    )  # fmt: skip


def test_a_record_that_was_written_after_a_search_embedded_it_is_embedded_again_by_the_backfill(gallery: Gallery) -> None:
    with application(gallery, shared=sharing(gallery)) as client:
        client.search("anything", limit=40, rescore=40)
    gallery.source.of[7] = "changed behind every client"
    gallery.worker().run(gallery.task, sharing_backfill(gallery))
    gallery.expect_moved()


def test_what_is_shared_stays_within_its_bytes(gallery: Gallery) -> None:
    with application(gallery, shared=sharing(gallery, most=1)) as client:
        client.search("one", rescore=3)
        shared = client._reader._rescorer._shared  # type: ignore[union-attr]
        assert shared is not None
        wait_until(lambda: cached(gallery).size > 0)
        client.search("two", rescore=40)
        shared.share()
    assert len(cached(gallery).knows(gallery.source.of)) == 3


def test_a_cache_that_cannot_be_written_costs_no_search(gallery: Gallery, caplog: pytest.LogCaptureFixture) -> None:
    (gallery.folder / "shared").write_text("no folder")
    with application(gallery, shared=sharing(gallery)) as client:
        expect_true(gallery, client.search("anything", rescore=40), "anything")
    assert warnings_of(caplog) == []


def test_records_that_searches_asked_for_are_moved_first(gallery: Gallery) -> None:
    with application(gallery, shared=sharing(gallery)) as client:
        client.search("anything", limit=5, rescore=6)
    asked = {id for id, text in gallery.source.of.items() if text in embedded()[1:]}
    assert len(asked) == 6
    gallery.worker(width=1).run(gallery.task, gallery.backfill, until=0.1)
    assert set(gallery.held()["new"]) == asked
    assert gallery.registry.asked_for(gallery.upgrade.id, most=10) == {}
    drive(gallery)
    gallery.expect_moved()


def test_status_tells_what_rescoring_did(gallery: Gallery, capsys: pytest.CaptureFixture[str]) -> None:
    with application(gallery) as client:
        client.search(["one", "two"], rescore=40)
        client.search("three", rescore=40)
        client._current_plan.refresh()
        now = status(gallery.registry, gallery.registry.gallery("texts"))
        print_status(now)
    assert now.rescoring is not None
    assert now.rescoring["searches"] == 2
    assert now.rescoring["embedded_per_query"] == pytest.approx(40 / 3, abs=1e-3)
    assert now.rescoring["from_cache"] == 0.5
    assert "2 searches in the last 30 s, 13.3 items embedded per query, 50 % of the vectors from cache" in capsys.readouterr().out
    with gallery.client():
        assert status(gallery.registry, gallery.registry.gallery("texts")).rescoring is None


# --- from a plan to its end -----------------------------------------------------------------------------------------------------


def begin(gallery: Gallery, **asked: Any) -> UpgradeRow:
    """An upgrade whose plan asks for rescoring, served and listed, with nothing moved."""
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


def test_a_source_that_loads_slowly_makes_no_answer_of_the_legs_late(gallery: Gallery) -> None:
    go_on, asked = threading.Event(), list[str]()

    def load() -> Source:
        go_on.wait(60.0)
        return FieldSource("text")

    with application(gallery, budget=3.0) as client:
        plain = client.search("anything", rescore=0)
        assert client._reader._rescorer is not None
        client._reader._rescorer._load_source = load
        gallery.store.before = lambda call, collection: asked.append(collection)
        assert client.search("anything", rescore=40) == plain  # it waited for 3 s, and a search may take 0.1 s
        assert asked.count("texts_v1") < 10
        go_on.set()
        wait_until(lambda: client.search("anything", rescore=40) != plain)
        expect_true(gallery, client.search("anything", rescore=40), "anything")
