"""Models that embed queries otherwise than records: who is asked for what, in one process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from rmvdb.errors import ItemError, ModelError
from rmvdb.planning.sample import Sample, Sampler
from rmvdb.serving.loaded_models import Chain
from rmvdb.storage.embedding_cache import EmbeddingCache
from rmvdb.storage.folders import LocalFolder
from rmvdb.types import Item, Leg, Metric, Query, Vectors
from tests.support.blends import begin, blend, both, by_hand, expect_hits, go_on
from tests.support.inprocess import DIMS, Gallery, TextEmbedder, make, vector

ASKING = "where is "


class Asked(TextEmbedder):
    """It understands a question by `embed_queries` alone: by `embed`, one lies anywhere."""

    def embed_queries(self, items: Sequence[Item]) -> Vectors:
        """(n, dim)"""
        return self.embed([item.removeprefix(ASKING) for item in items])


class Short(TextEmbedder):
    """Its queries have one dimension less."""

    def embed_queries(self, items: Sequence[Item]) -> Vectors:
        """(n, dim - 1)"""
        return self.embed(items)[:, :-1]


def own_queries(gallery: Gallery, kind: type[TextEmbedder] = Asked, *, registered: bool = True) -> None:
    """Make every version of this kind from now on."""
    loaded = gallery.loaded_models
    loaded._load_embedder = kind
    loaded._load_chain = lambda version: Chain(embedder=version, dim=DIMS[version], has_own_queries=registered)
    loaded._loaded.clear()


@pytest.fixture
def gallery(tmp_path: Path) -> Iterator[Gallery]:
    """Forty texts, before an upgrade; v1 and v2 answer questions."""
    made = make(tmp_path, deployed=False)
    made.registry.abandon(made.upgrade.id, note="another one is planned by the tests")
    own_queries(made)
    yield made
    made.registry.close()


def test_a_search_embeds_queries_their_own_way_and_a_write_embeds_records(gallery: Gallery) -> None:
    with gallery.client() as client:
        assert client.search(f"{ASKING}t7", limit=1)[0].id == 7
        client.upsert([{"id": 50, "item": f"{ASKING}t8"}])  # a record is no question, whatever it says
        assert client.search(f"{ASKING}t8", limit=1)[0].id == 8
    held = gallery.records("texts_v1")
    np.testing.assert_allclose(held[50].vector, vector("v1", f"{ASKING}t8"), atol=1e-6)  # type: ignore[arg-type]


def test_a_version_registered_without_it_embeds_queries_as_before(gallery: Gallery) -> None:
    """Of an earlier rmvdb, or of an embedder that got `embed_queries` later: one name keeps one meaning."""
    own_queries(gallery, registered=False)
    with gallery.client() as client:
        expect_hits(client.search(f"{ASKING}t7", limit=40), by_hand(gallery, {"texts_v1": vector("v1", f"{ASKING}t7")}))


def test_queries_of_another_dimension_are_refused_in_one_sentence(gallery: Gallery) -> None:
    own_queries(gallery, Short)
    with gallery.client() as client, pytest.raises(ModelError) as refused:
        client.search("t7")
    expected = "embed_queries gives vectors of dimension 5, and embed gives 6; let both give vectors of one space"
    assert str(refused.value) == expected


def test_a_query_that_cannot_be_read_is_named(gallery: Gallery) -> None:
    with gallery.client() as client, pytest.raises(ItemError, match="Item 1 of 2 cannot be embedded: ValueError: broken"):
        client.search(["t7", "broken"])


def test_both_parts_of_a_blend_embed_the_question_and_the_backfill_embeds_records(gallery: Gallery) -> None:
    stage = blend(gallery)
    row = go_on(gallery, begin(gallery, stage, until=0.5, cutover=False))
    with gallery.client() as client:
        queries = {row.new_collection: vector("v2", "t21"), "texts_v1": both(gallery, "t21", str(stage.reverse))}
        expect_hits(client.search(f"{ASKING}t21", limit=40), by_hand(gallery, queries))
    for id, record in gallery.records(row.new_collection).items():
        np.testing.assert_allclose(record.vector, vector("v2", gallery.source.of[id]), atol=1e-6)  # type: ignore[arg-type]


def sample(gallery: Gallery, **options: Sequence[object]) -> Sample:
    sampler = Sampler(
        store=gallery.store, loaded_models=gallery.loaded_models, source=gallery.source,
        cache=lambda version: EmbeddingCache(LocalFolder(gallery.folder / "embeddings"), model=version),
    )  # fmt: skip
    leg = Leg(collection="texts_v1", model="v1", metric=Metric.COSINE, embedder="v1")
    return sampler.sample("v2", [leg], [1000], frozenset(), lambda *_: None, seed=0, **options)  # type: ignore[arg-type]


def stacked(version: str, texts: Sequence[str]) -> Vectors:
    return np.stack([vector(version, text) for text in texts])


def test_a_plan_embeds_judged_and_logged_queries_as_searches_do_and_its_records_as_the_backfill_does(gallery: Gallery) -> None:
    asked = [f"t{id}" for id in range(1, 6)]
    judged = [Query(item=f"{ASKING}{text}", answers=(int(text[1:]),)) for text in asked]
    found = sample(gallery, queries=judged, logged=[f"{ASKING}{text}" for text in asked])
    assert found.queries is not None
    assert found.logged is not None
    for queries in (found.queries, found.logged):
        np.testing.assert_allclose(queries.old, stacked("v1", asked), atol=1e-6)
        np.testing.assert_allclose(queries.new, stacked("v2", asked), atol=1e-6)
    texts = [gallery.source.of[record.id] for record in found.records]
    np.testing.assert_allclose(found.new, stacked("v2", texts), atol=1e-6)


def test_a_plan_asks_long_texts_by_excerpts_and_others_only_if_a_model_has_queries_of_its_own(gallery: Gallery) -> None:
    """Real queries are shorter than the texts that they find."""
    own_queries(gallery, TextEmbedder, registered=False)
    assert sample(gallery, texts=True).as_queries is None  # short texts stand for their queries
    own_queries(gallery)
    short = sample(gallery, texts=True).as_queries
    assert short is not None
    assert not short.excerpts

    seen = []

    class Watched(TextEmbedder):
        def embed_queries(self, items: Sequence[Item]) -> Vectors:
            seen.extend(items)
            return self.embed(items)

    for id in gallery.source.of:
        gallery.source.of[id] = " ".join(f"t{id}w{number}" for number in range(40))
    own_queries(gallery, Watched)
    found = sample(gallery, texts=True)
    assert found.as_queries is not None
    assert found.as_queries.excerpts
    assert len(set(seen)) == len(found.records)
    assert all(6 <= len(text.split()) <= 18 and any(text in whole for whole in gallery.source.of.values()) for text in seen)
    own_queries(gallery, TextEmbedder, registered=False)
    assert sample(gallery, texts=True).as_queries is not None
    assert sample(gallery).as_queries is None  # pictures
