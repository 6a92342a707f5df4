"""An embedder is used as it is meant to be; one bad item is singled out, a bad model stops everything."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rmvdb.errors import ItemError, ModelError
from rmvdb.items.check import CheckedEmbedder, embed_checked, scored
from rmvdb.items.query_embedder import QueryEmbedder
from rmvdb.types import Item, Metric, Vectors
from tests.support.embedders import Gives, Words


def test_good_items_are_embedded_in_one_call() -> None:
    embedder = Words()
    vectors, failed = embed_checked(embedder, ["a", "bb", "ccc"], 3)
    assert failed == {}
    assert vectors[:, 0].tolist() == [1, 2, 3]
    assert embedder.calls == 1


@given(items=st.lists(st.sampled_from(["a", "bb", "bad", "nan", "inf"]), max_size=40))
@settings(deadline=None)
def test_exactly_the_bad_items_fail_and_all_others_have_their_vector(items: list[str]) -> None:
    bad = {index for index, item in enumerate(items) if item in ("bad", "nan", "inf")}
    if len(items) > 1 and len(bad) == len(items):
        with pytest.raises(ModelError, match=f"fails for each of {len(items)} items"):
            embed_checked(Words(), items, 3)
        return
    vectors, failed = embed_checked(Words(), items, 3)
    assert set(failed) == bad
    for index, item in enumerate(items):
        if index in bad:
            assert np.isnan(vectors[index]).all()
            assert ("ValueError: bad cannot be read" if item == "bad" else "gives NaN or infinity") in failed[index]
        else:
            np.testing.assert_array_equal(vectors[index], Words().embed([item])[0])


def test_one_bad_item_in_a_thousand_costs_a_few_calls() -> None:
    embedder = Words()
    failed = embed_checked(embedder, ["a"] * 700 + ["bad"] + ["a"] * 299, 3)[1]
    assert failed == {700: "ValueError: bad cannot be read"}
    assert embedder.calls <= 22


def test_a_batch_that_does_not_fit_into_memory_is_embedded_in_smaller_parts() -> None:
    sizes: list[int] = []

    def small(items: Sequence[Item]) -> Vectors:
        sizes.append(len(items))
        if len(items) > 5:
            raise MemoryError
        return np.ones((len(items), 2), np.float32)

    vectors, failed = embed_checked(Gives(small), ["a"] * 16, 2)
    assert failed == {}
    assert np.isfinite(vectors).all()
    assert sizes == [16, 8, 4, 4, 8, 4, 4]


@pytest.mark.parametrize("raised", [SystemExit(3), SystemExit("run download.sh")])
def test_an_embedder_that_would_end_the_process_fails_an_item_and_no_more(raised: SystemExit) -> None:
    def exits(items: Sequence[Item]) -> Vectors:
        if "bad" in items:
            raise raised
        return np.ones((len(items), 2), np.float32)

    failed = embed_checked(Gives(exits), ["a", "bad", "b"], 2)[1]
    assert failed == {1: f"SystemExit: {raised}"}


def test_an_item_that_spoils_its_batch_is_singled_out() -> None:
    def normalised_by_batch(items: Sequence[Item]) -> Vectors:
        values = np.array([[float(item), 1.0] for item in items])
        return (values / values.sum()).astype(np.float32)

    vectors, failed = embed_checked(Gives(normalised_by_batch), [1, 2, np.nan, 4], 2)
    assert set(failed) == {2}
    assert np.isfinite(vectors[[0, 1, 3]]).all()


def test_one_item_alone_is_tried_twice_and_compared_with_what_is_sure() -> None:
    away = iter([True])

    def embed(items: Sequence[Item]) -> Vectors:
        if next(away, False):
            raise ConnectionError("503 Service Unavailable")
        return Words().embed(items)

    assert embed_checked(Gives(embed), ["a"], 3, known_good=lambda: ["a"])[1] == {}

    def broken(items: Sequence[Item]) -> Vectors:
        raise ConnectionError("503 Service Unavailable")

    with pytest.raises(ModelError, match="fails for each of 1 item"):
        embed_checked(Gives(broken), ["a"], 3, known_good=lambda: ["a"])
    assert embed_checked(Gives(broken), ["a"], 3)[1] == {0: "ConnectionError: 503 Service Unavailable"}


@pytest.mark.parametrize("calls", [4, 15])  # to the first single item; to the last one
def test_an_embedder_that_is_away_for_a_moment_fails_no_good_item(calls: int) -> None:
    words = Words()

    def embed(items: Sequence[Item]) -> Vectors:
        if words.calls < calls:
            words.calls += 1
            raise ConnectionError("503 Service Unavailable")
        return words.embed(items)

    vectors, failed = embed_checked(Gives(embed), ["a"] * 7 + ["bad"], 3, known_good=lambda: ["a"])
    assert failed == {7: "ValueError: bad cannot be read"}
    assert vectors[:7, 0].tolist() == [1] * 7


def test_a_single_item_that_fails_is_that_items_fault() -> None:
    assert embed_checked(Words(), ["bad"], 3)[1] == {0: "ValueError: bad cannot be read"}
    assert embed_checked(Words(), [], 3)[0].shape == (0, 3)


@pytest.mark.parametrize(
    ("output", "problem"),
    [
        (lambda items: np.zeros((len(items), 2)), r"gives shape \(2, 2\) for 2 items and must give \(2, 3\); fix it"),
        (lambda items: np.zeros((1, 3)), r"gives shape \(1, 3\) for 2 items"),
        (lambda items: np.zeros(3), r"gives shape \(3,\)"),
        (lambda items: None, r"gives shape \(\)"),
        (lambda items: "vectors", r"gives a str instead of an array of numbers"),
        (lambda items: [[1.0], [1.0, 2.0]], r"gives a list instead of an array of numbers"),
    ],
)
def test_a_wrong_shape_is_the_models_fault(output: Callable[[Sequence[Item]], Any], problem: str) -> None:
    with pytest.raises(ModelError, match=problem):
        embed_checked(Gives(output), ["a", "b"], 3)


@pytest.mark.parametrize("odd", [[1.0, 2.0], "vectors", None, [[1.0, 2.0, 3.0]]])
def test_one_row_of_another_shape_is_that_items_fault(odd: object) -> None:
    good = [1.0, 2.0, 3.0]
    vectors, failed = embed_checked(Gives(lambda items: [odd if item == "bad" else good for item in items]), ["a", "bad", "b"], 3)
    assert list(failed) == [1]
    assert "must give" in failed[1] or "instead of an array" in failed[1]
    assert vectors[[0, 2]].tolist() == [good, good]


@pytest.mark.parametrize("items", [["bad", "a"], ["a", "bad"], ["a", "b", "bad", "c"]])
def test_an_item_that_makes_a_batch_of_tensors_ragged_is_named(items: list[str]) -> None:
    """Such an embedder fails for the whole batch, and gives the bad item alone another dimension."""
    embedder = Gives(lambda items: torch.stack([torch.ones(2 if item == "bad" else 3) for item in items]))
    vectors, failed = embed_checked(embedder, items, 3)
    assert list(failed) == [items.index("bad")]
    assert "gives shape (1, 2) for 1 items and must give (1, 3)" in failed[items.index("bad")]
    assert np.isfinite(np.delete(vectors, items.index("bad"), axis=0)).all()


def test_items_that_all_have_another_dimension_are_the_models_fault_though_it_fails_for_them_together() -> None:
    def embed(items: Sequence[Item]) -> Vectors:
        if len(items) > 1:
            raise MemoryError
        return np.zeros((1, 2), np.float32)

    with pytest.raises(ModelError, match=r"gives shape \(1, 2\) for 1 items"):
        embed_checked(Gives(embed), ["a", "b"], 3)


@pytest.mark.parametrize("items", [["bad"], ["bad", "bad"]])
def test_items_of_another_shape_that_stand_alone_are_judged_by_known_good_ones(items: list[str]) -> None:
    embedder = Gives(lambda items: torch.stack([torch.ones(2 if item == "bad" else 3) for item in items]))
    vectors, failed = embed_checked(embedder, items, 3, known_good=lambda: ["a", "b"])
    assert list(failed) == list(range(len(items)))
    assert np.isnan(vectors).all()
    with pytest.raises(ModelError, match=r"and must give \(\d, 3\)"):
        embed_checked(embedder, items, 3, known_good=lambda: ["bad"])


def test_a_model_that_is_away_is_not_asked_for_each_of_a_thousand_items() -> None:
    calls: list[int] = []

    def embed(items: Sequence[Item]) -> Vectors:
        calls.append(len(items))
        raise TimeoutError("no answer within 30 s")

    with pytest.raises(ModelError, match="fails for each of 10 items: TimeoutError: no answer within 30 s"):
        embed_checked(Gives(embed), ["a"] * 1000, 3, known_good=lambda: ["b"] * 10)
    assert len(calls) < 50


@pytest.mark.parametrize(
    "output",
    [
        lambda items: [[1, 2, 3] for _ in items],
        lambda items: np.ones((len(items), 3), np.float16),
        lambda items: torch.ones(len(items), 3, dtype=torch.bfloat16, requires_grad=True),
    ],
)
def test_any_array_of_numbers_becomes_float32(output: Callable[[Sequence[Item]], Any]) -> None:
    vectors, failed = embed_checked(Gives(output), ["a", "b"], 3)
    assert (vectors.dtype, failed) == (np.float32, {})


def test_numbers_too_large_for_float32_fail_as_infinity() -> None:
    failed = embed_checked(Gives(lambda items: np.array([[1e300 if item == "b" else 1.0] for item in items])), ["a", "b"], 1)[1]
    assert failed == {1: "the embedder gives NaN or infinity for it"}


def test_a_query_that_cannot_be_embedded_is_an_error() -> None:
    embedder = CheckedEmbedder(Words(), dim=3)
    assert embedder.embed(["a"]).shape == (1, 3)
    with pytest.raises(ItemError, match=r"^The item cannot be embedded: ValueError: bad cannot be read$"):
        embedder.embed(["bad"])
    with pytest.raises(ItemError, match=r"^Item 1 of 2 cannot be embedded: the embedder gives NaN"):
        embedder.embed(["a", "nan"])
    with pytest.raises(ModelError, match="must give"):
        CheckedEmbedder(Words(), dim=4).embed(["a"])


class Scores:
    def __init__(self, found):
        self.found = found

    def scores(self, vectors):
        if isinstance(self.found, Exception):
            raise self.found
        return self.found


@pytest.mark.parametrize(
    ("found", "saying"),
    [
        (np.full((3, 4), 0.25), "gives shape (3, 4) for 2 vectors"),
        (np.full(2, 0.25), "gives shape (2,) for 2 vectors"),
        (np.array([[0.5, 0.5], [np.nan, 0.5]]), "gives nan, and probabilities lie between 0 and 1"),
        (np.array([[0.5, 0.5], [50.0, 0.5]]), "gives 50, and probabilities lie between 0 and 1; end it with a softmax"),
        (KeyError("class"), "fails for 2 vectors: KeyError"),
        ("none", "instead of an array of numbers"),
    ],
)
def test_a_classifier_gives_a_probability_of_each_class(found, saying):
    with pytest.raises(ModelError, match=re.escape(saying)):
        scored(Scores(found), np.zeros((2, 3), np.float32))


def test_rounding_does_not_make_a_classifier_a_bad_one():
    found = np.array([[1.00001, -1e-6], [0.5, 0.5]])
    np.testing.assert_allclose(scored(Scores(found), np.zeros((2, 3), np.float32)), found, rtol=1e-6)


def test_a_vector_without_a_direction_fails_beside_one_that_is_not_a_number() -> None:
    of = {"nan": np.full(3, np.nan), "zero": np.zeros(3), "good": np.ones(3)}
    embedder = Gives(lambda items: np.stack([of[str(item)] for item in items]))
    _, failed = embed_checked(embedder, list(of), 3, metric=Metric.COSINE)
    assert list(failed) == [0, 1]


@pytest.mark.parametrize("odd", [None, [1.0, 2.0]])
def test_one_odd_query_of_several_is_that_querys_fault(odd: object) -> None:
    class Asked(Words):
        def embed_queries(self, items: Sequence[Item]) -> Any:
            return [odd if item == "odd" else [float(len(str(item))), 1.0, 0.0] for item in items]

    vectors, failed = embed_checked(QueryEmbedder(Asked(), dim=3), ["a", "odd", "ccc"], 3)
    assert list(failed) == [1]
    assert vectors[[0, 2], 0].tolist() == [1, 3]


def test_a_list_of_tensors_that_need_gradients_is_the_models_fault() -> None:
    rows = Gives(lambda items: [torch.ones(3, requires_grad=True) for _ in items])
    vectors, failed = embed_checked(rows, ["a", "b"], 3)
    assert failed == {}
    assert vectors.tolist() == [[1, 1, 1]] * 2
