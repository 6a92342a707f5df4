"""Long texts are asked by an excerpt, and other items as they are."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rmvdb.learning.method import AsQueries, Pairs
from rmvdb.planning.excerpts import LEAST_WORDS, MOST_WORDS, excerpt
from rmvdb.planning.part import OlderCollection, Part
from rmvdb.types import Metric

LONG = " ".join(f"word{number}" for number in range(60))


def test_an_excerpt_is_some_successive_words_of_a_long_text() -> None:
    rng = np.random.default_rng(0)
    made = [str(excerpt(LONG, rng)) for _ in range(200)]
    assert all(each in LONG and LEAST_WORDS <= len(each.split()) <= MOST_WORDS for each in made)
    assert len(set(made)) > 100
    assert any(each.startswith("word0 ") for each in made)
    assert any(each.endswith(" word59") for each in made)


def test_short_texts_and_other_items_are_asked_as_they_are() -> None:
    rng = np.random.default_rng(0)
    for item in ("three short words", " ".join(["word"] * MOST_WORDS), b"bytes", {"id": 3}, None):
        assert excerpt(item, rng) is item


def part(*, excerpts: bool) -> Part:
    """Twenty records, of which three were not embedded as queries."""
    rng = np.random.default_rng(1)
    old, new, asked_old, asked_new = (rng.normal(size=(20, 4)).astype(np.float32) for _ in range(4))
    asked_old[:3] = np.nan
    asked = AsQueries(old=asked_old, new=asked_new, excerpts=excerpts)
    behind = OlderCollection(
        metric=Metric.COSINE,
        held=np.zeros(20, dtype=np.bool_),
        vectors=old,
        lead=lambda vectors: vectors,
        own_queries=old + 1,
        as_queries=old + 2,
    )
    return Part(
        pairs=Pairs(old=old, new=new, labels=np.arange(20) % 2, as_queries=asked),
        confidence=np.arange(20.0),
        old_metric=Metric.COSINE,
        new_metric=Metric.COSINE,
        behind=(behind,),
    )


def test_a_record_answers_an_excerpt_of_its_own_text_but_not_its_own_item() -> None:
    for excerpts in (True, False):
        queries = part(excerpts=excerpts).query_set
        itself = np.arange(3, 20)[:, None] == np.arange(20)
        assert len(queries) == 17  # those that were embedded as queries
        assert queries.leave_out.any() != excerpts
        assert (queries.relevance & itself).any() == excerpts


def test_a_short_text_among_excerpts_does_not_find_itself() -> None:
    made = part(excerpts=True)
    asked = made.pairs.as_queries
    assert asked is not None
    whole = np.arange(20) % 2 == 0
    mixed = replace(asked, whole=whole, new=np.where(whole[:, None], made.pairs.new, asked.new))
    itself = np.arange(3, 20)[:, None] == np.arange(20)
    for labels in (made.pairs.labels, None):
        queries = replace(made, pairs=replace(made.pairs, labels=labels, as_queries=mixed)).query_set
        np.testing.assert_array_equal(queries.leave_out, itself & whole)
        assert not (queries.relevance & itself & whole).any()
        assert (queries.relevance.sum(axis=1) > 0).all()
    halved = replace(made, pairs=replace(made.pairs, as_queries=mixed)).take(np.arange(10, 20)).query_set
    np.testing.assert_array_equal(halved.leave_out.any(axis=1), whole[10:])


def test_each_collection_is_asked_by_the_same_excerpts() -> None:
    made = part(excerpts=True)
    queries = made.query_set
    assert made.pairs.as_queries is not None
    np.testing.assert_array_equal(queries.new, made.pairs.as_queries.new[3:])
    np.testing.assert_array_equal(queries.behind[0], made.behind[0].as_queries[3:])  # type: ignore[arg-type,index]


def test_whether_a_record_finds_itself_is_asked_by_its_whole_item() -> None:
    made = part(excerpts=True)
    queries = made.of_themselves(20).query_set
    np.testing.assert_array_equal(queries.new, made.pairs.new)
    np.testing.assert_array_equal(queries.behind[0], made.behind[0].own_queries)  # type: ignore[arg-type]
    whole = part(excerpts=False)  # a model with queries of its own embeds the item as a query
    assert whole.pairs.as_queries is not None
    np.testing.assert_array_equal(whole.of_themselves(20).query_set.new, whole.pairs.as_queries.new[3:])
