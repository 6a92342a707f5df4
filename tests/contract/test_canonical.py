"""The values of a record: every engine stores the same ones unchanged, and refuses the same ones before it writes anything."""

from __future__ import annotations

import contextlib
import enum
import math
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rmvdb.errors import EngineError, Mismatch, Unwritable
from rmvdb.protocols import VectorStore
from rmvdb.types import Field, IdType, Index, Metric, Record, Schema

FLAT = Index(type="FLAT")
FIELDS = (
    Field(name="flag", type="BOOL"),
    Field(name="tiny", type="INT8"),
    Field(name="small", type="INT16"),
    Field(name="middle", type="INT32"),
    Field(name="large", type="INT64"),
    Field(name="single", type="FLOAT"),
    Field(name="double", type="DOUBLE"),
    Field(name="text", type="VARCHAR", params={"max_length": 6}),
    Field(name="doc", type="JSON"),
    Field(name="numbers", type="ARRAY", params={"element_type": "INT64", "max_capacity": 3}),
    Field(name="tinies", type="ARRAY", params={"element_type": "INT8", "max_capacity": 3}),
    Field(name="words", type="ARRAY", params={"element_type": "VARCHAR", "max_capacity": 3, "max_length": 4}),
    Field(name="reals", type="ARRAY", params={"element_type": "FLOAT", "max_capacity": 3}),
    Field(name="flags", type="ARRAY", params={"element_type": "BOOL", "max_capacity": 3}),
)
SCHEMA = Schema(
    collection="", dim=2, metric=Metric.COSINE, id_type=IdType.INT64, id_field="pk", vector_field="emb", fields=FIELDS
)
WHOLE: Mapping[str, Any] = {
    "flag": True, "tiny": 1, "small": 2, "middle": 3, "large": 4, "single": 0.5, "double": 0.25, "text": "a", "doc": {},
    "numbers": [], "tinies": [], "words": [], "reals": [], "flags": [],
}  # fmt: skip


class Colour(enum.StrEnum):
    RED = "red"


class Shelf(enum.IntEnum):
    TOP = 7


#: Field, what is given, what is kept.
UNCHANGED: list[tuple[str, Any, Any]] = [
    ("flag", np.True_, True),
    ("flag", torch.tensor(False), False),
    ("tiny", 127, 127),
    ("tiny", -128, -128),
    ("tiny", np.int64(5), 5),
    ("tiny", Shelf.TOP, 7),
    ("small", -(2**15), -(2**15)),
    ("small", 2**15 - 1, 2**15 - 1),
    ("middle", 2**31 - 1, 2**31 - 1),
    ("middle", torch.tensor(5), 5),
    ("large", 2**63 - 1, 2**63 - 1),
    ("large", -(2**63), -(2**63)),
    ("single", 1, 1.0),
    ("single", 1.1, float(np.float32(1.1))),
    ("single", 3.4e38, float(np.float32(3.4e38))),
    ("single", -math.inf, -math.inf),
    ("single", 1e-45, float(np.float32(1e-45))),
    ("double", np.float32(1.1), float(np.float32(1.1))),
    ("double", 1.7e308, 1.7e308),
    ("double", math.inf, math.inf),
    ("double", 2**53, float(2**53)),
    ("text", "", ""),
    ("text", "ééé", "ééé"),
    ("text", "a\0'\"\\\n", "a\0'\"\\\n"),
    ("text", Colour.RED, "red"),
    ("text", np.str_("abc"), "abc"),
    ("doc", {"a": {"b": [1, "2", None, True, 1.5, {}]}}, {"a": {"b": [1, "2", None, True, 1.5, {}]}}),
    ("doc", {"text": "123", "quoted": '"a"', "null": "null"}, {"text": "123", "quoted": '"a"', "null": "null"}),
    ("doc", {"": 1, "a.b": 2, "é\0'\"\\": 3}, {"": 1, "a.b": 2, "é\0'\"\\": 3}),
    (
        "doc",
        {"n": [2**64 - 1, -(2**63), 2**53 + 1, 1e22, 5e-324, -0.0]},
        {"n": [2**64 - 1, -(2**63), 2**53 + 1, 1e22, 5e-324, -0.0]},
    ),
    ("doc", {"n": np.float32(0.5), "m": np.int8(3), "v": np.arange(3)}, {"n": 0.5, "m": 3, "v": [0, 1, 2]}),
    ("doc", {"t": torch.tensor([[1, 2]]), "s": (1, 2), Colour.RED: Colour.RED}, {"t": [[1, 2]], "s": [1, 2], "red": "red"}),
    ("numbers", (1, 2, 3), [1, 2, 3]),
    ("numbers", np.array([1, 2]), [1, 2]),
    ("numbers", [2**63 - 1, np.int8(1)], [2**63 - 1, 1]),
    ("tinies", [127, -128], [127, -128]),
    ("words", ["abcd", "éé", ""], ["abcd", "éé", ""]),
    ("reals", [1, 1.5, math.inf], [1.0, 1.5, math.inf]),
    ("flags", [True, False], [True, False]),
    ("more", {"deep": [[[]]], "text": "123"}, {"deep": [[[]]], "text": "123"}),
    ("more", None, None),
    ("more", "null", "null"),
    ("more", np.array([[1.5]]), [[1.5]]),
    ("é 'x' \"y\" z.w", 1, 1),
]
#: Field, what is given, what the refusal says of it.
REFUSED: list[tuple[str, Any, str]] = [
    ("flag", 1, "is 1, and takes True or False"),
    ("flag", "true", "takes True or False"),
    ("flag", None, "is None, and takes no null"),
    ("tiny", 128, r"is 128, and INT8 goes from -128 to 127"),
    ("tiny", -129, "INT8 goes from"),
    ("tiny", True, "is True, and takes whole numbers"),
    ("small", 2**15, "INT16 goes from"),
    ("middle", 2**31, "INT32 goes from"),
    ("large", 2**63, "INT64 goes from"),
    ("large", 1.0, r"is 1.0, and takes whole numbers \(INT64\)"),
    ("large", "1", "takes whole numbers"),
    ("large", None, "is None"),
    ("single", "1.0", "takes numbers"),
    ("single", True, "takes numbers"),
    ("single", 3.5e38, r"is 3.5e\+38, which is too large for FLOAT"),
    ("single", 10**400, "too large for FLOAT"),
    ("single", Decimal(1), "takes numbers"),
    ("double", 10**400, "too large for DOUBLE"),
    ("text", 5, "is 5, and takes a text"),
    ("text", b"a", "takes a text"),
    ("text", "éééé", "is 'éééé', 8 bytes long, and takes 6; shorten it"),
    ("text", "\ud800", "lone surrogate"),
    ("text", None, "is None"),
    ("numbers", [1, 2, 3, 4], "has 4 elements, and takes 3"),
    ("numbers", [1.5], "has an element that is 1.5"),
    ("numbers", [None], "has an element that is None"),
    ("numbers", [True], "has an element that is True"),
    ("numbers", {1, 2}, "takes a list"),
    ("numbers", None, "is None"),
    ("tinies", [128], "has an element that is 128, and INT8 goes from"),
    ("words", ["abcde"], "has an element that is 'abcde', 5 bytes long, and takes 4"),
    ("words", "ab", "is 'ab', and takes a list"),
    ("reals", [1e39], "has an element that is 1e\\+39, which is too large for FLOAT"),
    ("flags", [1], "has an element that is 1"),
    ("doc", {"a": math.nan}, "holds nan, which JSON cannot express"),
    ("doc", {"a": [{"b": -math.inf}]}, "holds -inf"),
    ("doc", {"a": np.float32("nan")}, "holds nan"),
    ("doc", {"a": 2**64}, "more than 64 bits"),
    ("doc", {"a": -(2**63) - 1}, "more than 64 bits"),
    ("doc", {1: 2}, "has the key 1, and JSON has texts as keys"),
    ("doc", {"a": b"x"}, "JSON has no bytes"),
    ("doc", {"a": {1}}, "JSON has no set"),
    ("doc", {"a": datetime(2026, 1, 1)}, "JSON has no datetime"),
    ("doc", {"a": np.datetime64("2026-01-01")}, "JSON has no date"),
    ("doc", {"a": "\udfff"}, "lone surrogate"),
    ("doc", {"a": 1j}, "JSON has no complex"),
    ("more", math.nan, "holds nan"),
    ("more", [math.inf], "holds inf"),
    ("more", {"deep": [torch.tensor(math.nan)]}, "holds nan"),
    ("more", b"x", "JSON has no bytes"),
    ("more", object(), "JSON has no object"),
    ("more", 2**64, "more than 64 bits"),
    ("pk", 1, "has a field 'pk', by which name collection .* has its key; leave it out"),
    ("emb", [1.0, 0.0], "has a field 'emb', by which name collection .* has its vector; leave it out"),
    ("$meta", {}, r"has a field '\$meta'"),
    (5, 1, "has a field by the name 5"),  # type: ignore[list-item]
    ("a\ud800", 1, "has a field by the name"),
]
UNIT = np.array([0.6, 0.8], np.float32)


def record(id: int, **fields: Any) -> Record:
    return Record(id=id, vector=UNIT, fields={**WHOLE, **fields})


def made(store: VectorStore, collection: str, **changes: Any) -> Schema:
    schema = replace(SCHEMA, collection=collection, **changes)
    store.create(schema, FLAT)
    return schema


def same(one: Any, other: Any) -> bool:
    """Return whether two values are equal, types too."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and repr(one) == repr(other)


def held(store: VectorStore, collection: str) -> dict[Any, Any]:
    pages = store.scan(collection, fields=None, vector=True)
    return {each.id: (each.fields, None if each.vector is None else each.vector.tolist()) for page in pages for each in page}


def test_a_stored_value_is_returned_unchanged(store: VectorStore, collection: str) -> None:
    made(store, collection)
    store.upsert(collection, [record(at, **{name: value}) for at, (name, value, _) in enumerate(UNCHANGED)])
    found = {each.id: each.fields for each in store.get(collection, range(len(UNCHANGED)))}
    hits = store.search(collection, UNIT[None], limit=len(UNCHANGED), fields=None, strong=True)[0]
    for shown in (found, {hit.id: hit.fields for hit in hits}):
        for at, (name, value, expected) in enumerate(UNCHANGED):
            assert same(dict(shown[at]), {**WHOLE, name: expected}), (name, value)
    store.upsert(collection, [record(0), *(Record(id=id, vector=UNIT, fields=fields) for id, fields in found.items() if id)])
    again = {each.id: each.fields for each in store.get(collection, range(len(UNCHANGED)))}
    assert all(same(dict(again[id]), dict(found[id])) for id in found if id)  # what was read can be written


def test_nan_is_a_value_of_a_float(store: VectorStore, collection: str) -> None:
    made(store, collection)
    store.upsert(collection, [record(1, single=math.nan, double=np.float32("nan"), reals=[math.nan])])
    [found] = store.get(collection, [1])
    assert math.isnan(found.fields["single"])
    assert math.isnan(found.fields["double"])
    assert math.isnan(found.fields["reals"][0])


def test_a_value_that_cannot_be_stored_is_refused_by_name_and_nothing_is_written(store: VectorStore, collection: str) -> None:
    made(store, collection)
    store.upsert(collection, [record(id) for id in range(1, 4)])
    before = held(store, collection)
    longest = {field.name: field.params.get("max_length") for field in store.describe(collection).fields}
    for name, value, said in REFUSED:
        if name == "words" and "bytes long" in said and longest["words"] is None:
            continue  # Milvus Lite 3 forgets how long the elements of a list may be
        bad = Record(id=77, vector=UNIT, fields={**WHOLE, name: value})
        for call in (store.upsert, store.fields_of):
            with pytest.raises(Unwritable, match=said) as refusal:
                call(collection, [record(1, text="b"), bad, record(2, text="b")])
            assert "77" in str(refusal.value)
            assert str(name) in str(refusal.value) or not isinstance(name, str) or "\ud800" in name
    assert held(store, collection) == before


def test_a_null_among_numbers_shifts_no_other_record(store: VectorStore, collection: str) -> None:
    made(store, collection, fields=(Field(name="price", type="INT64"),))
    prices = [100, None, 300, 400, 500]
    with pytest.raises(Unwritable, match="Record 2 cannot be written: its field 'price' is None, and takes no null"):
        store.upsert(
            collection, [Record(id=id, vector=UNIT, fields={"price": price}) for id, price in enumerate(prices, start=1)]
        )
    assert held(store, collection) == {}
    with pytest.raises(Unwritable, match=r"its field 'price' is missing; collection .* needs an INT64 in every record"):
        store.upsert(collection, [Record(id=1, vector=UNIT)])
    assert held(store, collection) == {}


def test_a_value_that_is_left_out_is_the_default_and_no_neighbours(store: VectorStore, collection: str) -> None:
    fields = (
        Field(name="price", type="INT64", params={"default_value": 5}),
        Field(name="text", type="VARCHAR", params={"max_length": 9, "default_value": "none"}),
        Field(name="good", type="BOOL", params={"default_value": True}),
    )
    made(store, collection, fields=fields)
    assert [field.params.get("default_value") for field in store.describe(collection).fields] == [5, "none", True]
    given: list[dict[str, Any]] = [
        {"price": 100, "text": "a", "good": False},
        {},
        {"price": None, "text": None, "good": None},
        {"price": 300, "good": False},
        {"text": "b"},
    ]
    store.upsert(collection, [Record(id=id, vector=UNIT, fields=each) for id, each in enumerate(given)])
    default = {"price": 5, "text": "none", "good": True}
    kept = [{**default, **{name: value for name, value in each.items() if value is not None}} for each in given]
    assert [dict(each.fields) for each in store.get(collection, range(5))] == kept


def test_a_null_is_kept_where_the_collection_takes_it_and_refused_elsewhere(store: VectorStore, collection: str) -> None:
    nullable = {"nullable": True}
    fields = (
        Field(name="n", type="INT64", params=nullable),
        Field(name="text", type="VARCHAR", params={"max_length": 9, **nullable}),
        Field(name="doc", type="JSON", params=nullable),
        Field(name="list", type="ARRAY", params={"element_type": "INT64", "max_capacity": 3, **nullable}),
    )
    with contextlib.suppress(EngineError):  # Milvus Lite 2.5 has no such field
        made(store, collection, fields=fields)
    if not store.exists(collection):
        assert "lite 2.5" in store.version().lower()
        return
    whole = {"n": 1, "text": "a", "doc": {"a": 1}, "list": [1]}
    if all(field.params.get("nullable") for field in store.describe(collection).fields):
        given: list[dict[str, Any]] = [whole, {}, {**whole, "text": None, "list": None}, whole]
        store.upsert(collection, [Record(id=id, vector=UNIT, fields=each) for id, each in enumerate(given)])
        kept = [{name: each.get(name) for name in whole} for each in given]
        assert [dict(each.fields) for each in store.get(collection, range(4))] == kept
    else:  # Milvus 2.3 forgets it
        for name in ("n", "text", "list"):
            with pytest.raises(Unwritable, match=f"its field '{name}' is None"):
                store.upsert(collection, [Record(id=1, vector=UNIT, fields={**whole, name: None})])
        assert held(store, collection) == {}


#: The values of a whole JSON field. Milvus 2.3 takes objects and null, Milvus Lite 3 objects and lists.
JSONS: list[Any] = [
    "123",
    '"text"',
    "text",
    "null",
    "",
    '{"a": 1}',
    None,
    0,
    1.5,
    True,
    2**63,
    [],
    [1, "2", None],
    {},
    {"a": "1"},
]


def test_a_json_field_that_holds_a_text_arrives_as_it_was_or_is_refused(store: VectorStore, collection: str) -> None:
    made(store, collection, fields=(Field(name="doc", type="JSON"),))
    version = store.version()
    takes: Any = (dict, list, str, bool, int, float, type(None))
    if version.startswith("milvus 2.3"):
        takes = (dict, type(None))
    elif version.startswith("milvus-lite 3"):
        takes = (dict, list)
    for at, value in enumerate(JSONS):
        one = Record(id=at, vector=UNIT, fields={"doc": value})
        if isinstance(value, takes):
            store.upsert(collection, [one])
            [found] = store.get(collection, [at])
            assert same(dict(found.fields), {"doc": value}), value
            store.upsert(collection, [Record(id=100 + at, vector=UNIT, fields=found.fields)], as_read=True)
            [copy] = store.get(collection, [100 + at])
            assert same(dict(copy.fields), {"doc": value}), value
        else:
            with pytest.raises(Unwritable, match=f"Record {at} cannot be written: its field 'doc' is "):
                store.upsert(collection, [one])
            assert store.get(collection, [at]) == []


def test_a_value_that_only_a_server_has_no_room_for_is_refused_there(store: VectorStore, collection: str) -> None:
    made(store, collection, fields=(Field(name="doc", type="JSON"),))
    long = "x" * 65_536
    for fields in ({"doc": {}, "note": long}, {"doc": {"note": long}}):
        one = Record(id=1, vector=UNIT, fields=fields)
        if store.version().startswith("milvus 2.3"):
            with pytest.raises(
                Unwritable, match=r"Record 1 cannot be written: .* have|has 65,5\d\d bytes as JSON, and Milvus 2.3"
            ):
                store.upsert(collection, [one])
        else:
            store.upsert(collection, [one])
            assert same(dict(store.get(collection, [1])[0].fields), dict(fields))


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = {"d": value}
    return value


def test_a_value_may_be_nested_deeply_but_not_without_end(store: VectorStore, collection: str) -> None:
    made(store, collection, fields=())
    store.upsert(collection, [Record(id=1, vector=UNIT, fields={"note": nested(100)})])
    assert store.get(collection, [1])[0].fields == {"note": nested(100)}
    endless: list[Any] = []
    endless.append(endless)
    for value in (nested(101), nested(5000), endless):
        with pytest.raises(Unwritable, match="Record 2 cannot be written: its field 'note' is nested deeper than 100 levels"):
            store.upsert(collection, [Record(id=2, vector=UNIT, fields={"note": value})])


ODD = {
    "zero": np.zeros(2),
    "subnormal": np.full(2, 1e-45),
    "tiny": np.full(2, 1e-22),
    "huge": np.full(2, 1e19),
    "overflow": np.full(2, 1e39),
}


@pytest.mark.parametrize("metric", [Metric.COSINE, Metric.L2, Metric.IP])
def test_a_vector_that_the_metric_cannot_rank_is_neither_written_nor_searched_with(
    store: VectorStore, collection: str, metric: Metric
) -> None:
    made(store, collection, fields=(), metric=metric)
    store.upsert(collection, [Record(id=1, vector=UNIT)])
    before = held(store, collection)
    for name, vector in ODD.items():
        if metric is Metric.COSINE or name in ("huge", "overflow"):
            with pytest.raises(Mismatch, match=r"Record 77 has a vector (that has the length|with values that are not finite)"):
                store.upsert(collection, [Record(id=2, vector=UNIT), Record(id=77, vector=vector)])  # type: ignore[arg-type]
            with pytest.raises(Mismatch, match="The query has a vector that has "):
                store.search(collection, vector[None], limit=1)  # type: ignore[arg-type]
    assert held(store, collection) == before
    good = {"short": np.array([3e-19, 0]), "long": np.array([0, 1e18])}
    store.upsert(collection, [Record(id=id, vector=vector) for id, vector in enumerate(good.values(), start=2)])  # type: ignore[arg-type]
    for at, vector in enumerate(good.values(), start=2):
        hits = store.search(collection, vector[None], limit=3, strong=True)[0]  # type: ignore[arg-type]
        assert at in {hit.id for hit in hits}
        assert all(math.isfinite(hit.distance) for hit in hits)


def test_a_record_that_a_collection_held_is_written_unchanged(store: VectorStore, collection: str) -> None:
    """A copy of what another program wrote there: longer than the schema says, and with a vector that no search finds."""
    made(store, collection, fields=(Field(name="numbers", type="ARRAY", params={"element_type": "INT64", "max_capacity": 2}),))
    longer = not store.version().startswith("milvus-lite 3")  # the only one that counts
    numbers = [1, 2, 3] if longer else [1]
    odd = Record(id=1, vector=np.zeros(2, np.float32), fields={"numbers": numbers, "note": nested(120)})
    store.upsert(collection, [odd], as_read=True)
    [found] = store.get(collection, [1], vector=True)
    assert found.fields == odd.fields
    assert found.vector is not None
    assert found.vector.tolist() == [0, 0]
    for bad in ({"numbers": None}, {}):
        with pytest.raises(Unwritable, match="its field 'numbers' is "):
            store.upsert(collection, [Record(id=2, vector=UNIT, fields=bad)], as_read=True)
    with pytest.raises(Mismatch, match="not finite"):
        store.upsert(collection, [Record(id=2, vector=np.full(2, np.nan, np.float32), fields={"numbers": []})], as_read=True)


def test_an_id_that_is_too_long_is_refused_and_what_was_there_is_written_as_it_was(store: VectorStore, collection: str) -> None:
    """Lite 2.5 does not count at all, Lite 3 counts characters and 2.3.5 bytes."""
    shape = Schema(collection=collection, dim=2, metric=Metric.COSINE, id_type=IdType.VARCHAR, id_max_length=8)
    store.create(shape, FLAT)
    store.upsert(collection, [Record(id="12345678", vector=UNIT, fields={})])
    with pytest.raises(Unwritable, match=r"The id 'ääääx' has 9 bytes, and collection .* takes 8; shorten it"):
        store.upsert(collection, [Record(id="b", vector=UNIT, fields={}), Record(id="ääääx", vector=UNIT, fields={})])
    assert store.get(collection, ["ääääx", "b"], fields=()) == []
    assert store.count(collection) == 1


SCALARS = st.none() | st.booleans() | st.integers(-(2**64), 2**65) | st.floats() | st.text(max_size=8) | st.binary(max_size=2)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
NAMES = st.sampled_from([*WHOLE, "more", "note", "pk"])


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    changes=st.lists(st.tuples(NAMES, VALUES | st.integers(-200, 200) | st.lists(st.integers(-200, 200), max_size=4)), max_size=3)
)
def test_an_accepted_record_is_returned_and_a_refused_one_changes_nothing(
    store: VectorStore, changes: list[tuple[str, Any]]
) -> None:
    collection = "anything"
    made(store, collection)
    store.delete(collection, [1, 2, 3])
    store.upsert(collection, [record(1), record(2, text="b")])
    before = held(store, collection)
    new = record(2, **dict(changes))
    refused = ""
    try:
        store.upsert(collection, [new, record(3)])
    except Unwritable as exc:
        refused = str(exc)
    if refused:
        assert "Record 2 " in refused
        assert held(store, collection) == before
        return
    found = held(store, collection)
    assert found[1] == before[1]
    assert same(found[3][0], dict(WHOLE))
    [kept] = store.fields_of(collection, [new])
    assert same(dict(found[2][0]), dict(kept.fields))
    for name, value in dict(changes).items():
        if name in ("doc", "more", "note"):
            assert same(found[2][0][name], value)
        elif name in ("single", "reals"):
            assert np.array_equal(found[2][0][name], np.array(value, np.float32), equal_nan=True)
        else:
            assert found[2][0][name] == value or value != value
