"""Ids, arguments and vectors: canonical, or refused in one sentence."""

from __future__ import annotations

import enum
import re
from datetime import datetime
from typing import Any

import numpy as np
import pytest
import torch

from rmvdb.canonical.arguments import names_of, whole
from rmvdb.canonical.ids import INT64_BOUNDS, checked_id, id_of, ids_of
from rmvdb.canonical.vectors import queries_of, unrankable
from rmvdb.errors import Mismatch, UsageError
from rmvdb.registry.codec import key
from rmvdb.types import IdType, Metric, Schema

NUMBERS = Schema(collection="c", dim=2, metric=Metric.COSINE, id_type=IdType.INT64)
TEXTS = Schema(collection="c", dim=2, metric=Metric.COSINE, id_type=IdType.VARCHAR)


class Shelf(enum.IntEnum):
    TOP = 7


class Colour(enum.StrEnum):
    RED = "red"


class Mixed(str, enum.Enum):  # noqa: UP042 - its own str() is "Mixed.RED"
    RED = "red"


class Text(str):
    def __str__(self) -> str:
        return "another"


def _name(given: Any) -> str:
    """Return the name of a case, without an address in memory: each process of a parallel run would have another one."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(given))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (5, 5),
        ("5", "5"),
        ("", ""),
        (np.int32(5), 5),
        (np.uint64(5), 5),
        (np.array(5), 5),
        (np.str_("a"), "a"),
        (torch.tensor(5), 5),
        (torch.tensor(5, dtype=torch.uint8), 5),
        (Shelf.TOP, 7),
        (Colour.RED, "red"),
        (Mixed.RED, "red"),
        (Text("a"), "a"),
        (2**70, 2**70),
    ],
    ids=_name,
)
def test_an_id_is_an_int_or_a_str_and_nothing_else(given: Any, expected: Any) -> None:
    found = id_of(given)
    assert (found, type(found)) == (expected, type(expected))
    assert key(found) == str(expected)


NO_IDS = [True, np.True_, torch.tensor(True), 5.0, np.float64(5), torch.tensor(5.0), b"7", np.bytes_(b"7"), bytearray(b"7"), None]
NO_IDS += [
    [5],
    (5,),
    np.array([5]),
    torch.tensor([5]),
    {"id": 5},
    5j,
    datetime(2026, 1, 1),
    np.datetime64("2026-01-01"),
    np.datetime64("2026-01-01", "ns"),
    np.timedelta64(5, "ns"),
    object(),
]


@pytest.mark.parametrize("given", NO_IDS, ids=_name)
def test_a_value_that_is_almost_an_id_is_refused(given: Any) -> None:
    with pytest.raises(Mismatch, match="An id is a whole number or a text, not "):
        id_of(given)
    for schema in (NUMBERS, TEXTS):
        with pytest.raises(Mismatch, match=f"'c' has ids of type {schema.id_type.value}"):
            checked_id(given, schema)
    with pytest.raises(TypeError, match="not an id"):
        key(given)


@pytest.mark.parametrize("given", [np.int64(5), Shelf.TOP, Colour.RED, np.str_("a")], ids=_name)
def test_the_registry_takes_only_what_is_canonical(given: Any) -> None:
    with pytest.raises(TypeError, match="not an id"):
        key(given)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (5, [5]),
        ("abc", ["abc"]),
        ([1, 2, 1], [1, 2, 1]),
        ((1, 2), [1, 2]),
        ({"a"}, ["a"]),
        (frozenset([3]), [3]),
        ((each for each in (1, 2)), [1, 2]),
        (range(2), [0, 1]),
        ({1: "x"}.keys(), [1]),
        (np.array([1, 2]), [1, 2]),
        (np.array(["a", "b"]), ["a", "b"]),
        (np.int64(5), [5]),
        (torch.tensor([1, 2]), [1, 2]),
        (torch.tensor(1), [1]),
        ([torch.tensor(1), np.int8(2), Shelf.TOP], [1, 2, 7]),
        ([], []),
        (np.array([], np.int64), []),
    ],
    ids=_name,
)
def test_ids_come_one_by_one_or_in_anything_that_holds_several(given: Any, expected: list[Any]) -> None:
    found = ids_of(given)
    assert found == expected
    assert {type(each) for each in found} <= {int, str}


@pytest.mark.parametrize(
    "given",
    [
        b"7",
        bytearray(b"7"),
        memoryview(b"7"),
        None,
        5.0,
        True,
        np.array([1.0]),
        np.array([[1, 2]]),
        torch.tensor([True]),
        {1: 2},
        [b"7"],
    ],
    ids=_name,
)
def test_a_value_that_is_not_a_list_of_ids_is_refused_and_not_taken_apart(given: Any) -> None:
    with pytest.raises(Mismatch, match=r"An id is a whole number or a text|Ids come one by one or in a list"):
        ids_of(given)


def test_ids_are_taken_as_the_collection_keeps_them() -> None:
    assert (checked_id(np.int64(3), NUMBERS), type(checked_id(np.int32(3), NUMBERS))) == (3, int)
    assert (checked_id(np.str_("a"), TEXTS), type(checked_id(np.str_("a"), TEXTS))) == ("a", str)
    for id, schema in ((1, TEXTS), ("1", NUMBERS), (True, NUMBERS), (1.0, NUMBERS), (None, TEXTS)):
        with pytest.raises(Mismatch, match=f"'c' has ids of type {schema.id_type.value}"):
            checked_id(id, schema)
    for edge in INT64_BOUNDS:
        with pytest.raises(Mismatch, match=f"The id {edge} cannot be served"):
            checked_id(edge, NUMBERS)


def test_a_text_that_cannot_be_written_down_is_no_id() -> None:
    with pytest.raises(Mismatch, match="lone surrogate"):
        id_of("a\ud800")


def test_one_name_is_one_field() -> None:
    assert names_of("label") == ("label",)
    assert names_of(["a", "b"]) == ("a", "b")
    assert names_of({"a"}) == ("a",)
    with pytest.raises(UsageError, match=r"output_fields is a list of names.* not b'text'"):
        names_of(b"text")
    assert names_of(()) == ()
    assert names_of("*") is None
    assert names_of(["a", "*"]) is None
    for wrong in (5, None, {"a": 1}, [5], [None]):
        with pytest.raises(UsageError, match="output_fields"):
            names_of(wrong)


def test_a_limit_is_a_whole_number() -> None:
    assert whole("limit", np.int16(3), least=1) == 3
    for wrong in ("3", 3.0, True, None, np.True_, torch.tensor(3.0), [3]):
        with pytest.raises(UsageError, match="limit is a whole number, not "):
            whole("limit", wrong, least=1)
    with pytest.raises(UsageError, match="offset must be at least 0, not -1"):
        whole("offset", -1, least=0)


@pytest.mark.parametrize("metric", Metric)
def test_a_vector_that_a_metric_cannot_rank_is_named_by_its_row(metric: Metric) -> None:
    rows = np.array([[1, 0], [0, 0], [1e-25, 0], [3e19, 0], [np.nan, 0], [np.inf, 0], [1e-18, 0], [1e18, 0]], np.float32)
    odd = unrankable(rows, metric)
    assert set(odd) == ({1, 2, 3, 4, 5} if metric is Metric.COSINE else {3, 4, 5})
    assert odd[3] == "has the length 3.0e+19, whose square is too large for a distance"
    assert odd[4] == odd[5] == "has values that are not finite"
    if metric is Metric.COSINE:
        assert odd[1] == "has the length 0, and so no direction that COSINE could compare"
    assert unrankable(np.empty((0, 2), np.float32), metric) == {}


def test_a_query_that_cannot_be_ranked_by_is_named() -> None:
    with pytest.raises(Mismatch, match="The query has a vector that has the length 0"):
        queries_of(NUMBERS, np.zeros((1, 2), np.float32))
    with pytest.raises(Mismatch, match="Query 1 of 2 has a vector that has values that are not finite"):
        queries_of(NUMBERS, np.array([[1, 0], [1e300, 0]]))  # type: ignore[arg-type]
