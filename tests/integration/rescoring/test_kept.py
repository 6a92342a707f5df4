"""Rescoring in one process: vectors that are kept and shared, that come too late, or that cannot be made."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest

from rmvdb.backfill.batches import Backfill
from rmvdb.cli.show_status import print_status
from rmvdb.items.field import FieldSource
from rmvdb.protocols import Source
from rmvdb.serving.loaded_models import Chain, LoadedModels
from rmvdb.serving.shared_vectors import SharedVectors
from rmvdb.storage.embedding_cache import EmbeddingCache
from rmvdb.storage.folders import LocalFolder
from rmvdb.types import Id, Item, Record
from rmvdb.upgrade.status import status
from tests.support.inprocess import DIMS, Gallery, drive, vector
from tests.support.rescoring import (
    SCHEMA,
    Counting,
    application,
    embedded,
    expect_true,
    kept,
    truth,
    warnings_of,
)
from tests.support.waiting import wait_until

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
            expect_true(gallery, client.search(text, limit=40, rescore=40, consistency="Strong"), text, limit=40)
            assert client.search(text, limit=1, rescore=40, consistency="Strong")[0].id == 7


def test_a_kept_vector_does_not_outlive_a_write_that_only_the_old_collection_shows(gallery: Gallery) -> None:
    with application(gallery) as client:
        client.search("anything", limit=40, rescore=40)
        gallery.source.of[7] = "another program's"
        old = Record(id=7, vector=vector("v1", "another program's"), fields={"n": 7, "text": "another program's"})
        gallery.store.upsert("texts_v1", [old])
        expect_true(gallery, client.search("anything", limit=40, rescore=40), "anything", limit=40)
    assert embedded().count("another program's") == 1


def test_a_kept_vector_does_not_outlive_a_change_of_the_sources_item(gallery: Gallery) -> None:
    source = Changing(gallery.source.of)
    with application(gallery, source) as client:
        expect_true(gallery, client.search("anything", limit=40, rescore=40), "anything", limit=40)
        gallery.source.of[7] = source.of[7] = "changed"
        expect_true(gallery, client.search("anything", limit=40, rescore=40), "anything", limit=40)
        gallery.source.of[7] = source.of[7] = "t7"
        expect_true(gallery, client.search("anything", limit=40, rescore=40), "anything", limit=40)
    assert source.asked == 3 * 40
    assert sorted(embedded()) == sorted(["anything"] * 3 + [f"t{id}" for id in range(1, 41)] + ["changed"])


def test_a_deleted_record_is_not_found_though_its_vector_is_kept(gallery: Gallery) -> None:
    with application(gallery) as client:
        client.search("anything", limit=40, rescore=40)
        client.delete(7)
        del gallery.source.of[7]
        expect_true(gallery, client.search("anything", limit=40, rescore=40), "anything", limit=40)


def test_the_cache_stays_within_its_bytes(gallery: Gallery) -> None:
    with application(gallery, cache=5 * 500) as client:
        for query in ("one", "two", "three"):
            expect_true(gallery, client.search(query, limit=40, rescore=40), query, limit=40)
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


def test_a_source_that_hangs_holds_no_search_up(gallery: Gallery) -> None:
    go_on = threading.Event()

    class Hanging(Changing):
        def load(self, records: Sequence[Record]) -> Mapping[Id, Item]:
            go_on.wait(60.0)
            return super().load(records)

    with application(gallery, Hanging(gallery.source.of), budget=0.05) as client:
        plain = client.search("anything", rescore=0)
        began = time.monotonic()
        for _ in range(30):  # more than its threads and its places to wait
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


# --- what fails -------------------------------------------------------------------------------------------------------------


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


def test_a_client_is_closed_while_the_engine_is_away_from_the_vectors_that_it_shares(
    gallery: Gallery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rmvdb.serving.shared_vectors.LONGEST", 0.2)
    go_on = threading.Event()
    client = application(gallery, shared=sharing(gallery))
    gallery.store.looked = lambda call, _: go_on.wait(60.0) if call == "get" else None  # type: ignore[assignment]
    client.search("anything", rescore=40)
    began = time.monotonic()
    client.close()
    took = time.monotonic() - began
    go_on.set()
    assert took < 20.0


# --- for everybody ------------------------------------------------------------------------------------------------------------


def cached(gallery: Gallery) -> EmbeddingCache:
    """Return the embeddings that clients and workers of this gallery share, as one more process reads them."""
    return EmbeddingCache(LocalFolder(gallery.folder / "shared"), model="v2", dim=DIMS["v2"])


def sharing(gallery: Gallery, most: int = 1_000_000) -> SharedVectors:
    return SharedVectors(
        "texts", registry=gallery.registry, store=gallery.store, cache=lambda version: cached(gallery), most=most
    )


def test_the_backfill_does_not_embed_again_the_records_that_searches_embedded(gallery: Gallery) -> None:
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


def test_shared_vectors_stay_within_their_bytes(gallery: Gallery) -> None:
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


def test_a_record_whose_embedder_was_away_for_a_moment_is_rescored_later(
    gallery: Gallery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rmvdb.serving.rescorer.AGAIN", 0.3)
    away = True

    def before(items: Sequence[Item]) -> None:
        if away and items != ["anything"]:
            raise TimeoutError("the service does not answer")

    monkeypatch.setattr(Counting, "before", staticmethod(before))
    with application(gallery) as client:
        plain = client.search("anything", limit=1, rescore=0)
        assert client.search("anything", limit=1, rescore=1)[0].distance == plain[0].distance
        away = False
        time.sleep(0.4)
        monkeypatch.setattr(client._reader._rescorer, "_rests_until", 0.0)
        hits = client.search("anything", limit=1, rescore=1)
        assert np.isclose(hits[0].distance, truth(gallery, "anything")[hits[0].id], atol=1e-5)
