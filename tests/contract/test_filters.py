"""Filters over faiss, Milvus Lite and a Milvus server: one meaning, or a refusal before anything is sent."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from rmvdb.engines import filters
from rmvdb.engines.milvus import MilvusStore
from rmvdb.errors import EngineError, FilterError, UsageError
from rmvdb.protocols import VectorStore
from rmvdb.serving.client import Client
from rmvdb.types import Id, IdType, Index, Metric, Record, Schema, Vectors
from tests.support import filtering
from tests.support.inprocess import DIMS, make

ONE: Vectors = np.ones((1, 4), np.float32)
#: The values of the undeclared field `x` and of `note["x"]` in JSON. The first record has neither.
VALUES: list[Any] = [
    *[..., None, 1, 1.0, 2.5, True, False, "1", "a", "ab%c_d", "", [1, 2], ["a", "b"], [], {"a": 1}],
    *[2**53 + 1, 2**53, 2**62, -7, 0, 7, 8, {"a": {"b": [1, "z", None]}}, [[1, 2], [3]], [1, "a", True, None]],
    *['O"q\\x', "it's", {"0": 1, "k y": 2}, "line\nend"],
]
CITIES = ["Bern", "Zürich", 'Sankt "G"', "B\\b", "it's", "", "a%b", "a_b", "axb", "aüb", "line\nend", "tab\tx"]


def record_of(number: int) -> Record:
    value = VALUES[number % len(VALUES)]
    fields = {
        "n": number - 5,
        "small": number - 5,
        "city": CITIES[number % len(CITIES)],
        "share": float(np.float32(number / 10 - 1)),
        "exact": number / 10,
        "good": number % 3 == 0,
        "tags": [f"t{at}" for at in range(number % 4)],
        "nums": list(range(number % 5)),
        "note": {"k": number, "deep": [number, None, "é"]} | ({} if value is ... else {"x": value}),
    }
    return Record(id=number, vector=np.full(4, number, np.float32), fields=fields if value is ... else {**fields, "x": value})


#: Seconds that no machine is too busy for.
TIMES = {"max_age": 60.0, "longest_search": 60.0, "staleness": 0.0}
RECORDS = [record_of(number) for number in range(60)]
#: Collections by what they hold and whose they are: of this file, made once for each engine.
_made: dict[tuple[str, str], tuple[VectorStore, str]] = {}


def made(store: VectorStore, request: pytest.FixtureRequest, what: str, records: Sequence[Record]) -> str:
    """Return the name of a collection."""
    key = what, request.node.callspec.params["store"]
    if key not in _made:
        name = f"c_{uuid.uuid4().hex}"
        store.create(replace(filtering.SCHEMA, collection=name), Index(type="FLAT"))
        store.upsert(name, records)
        _made[key] = store, name
    return _made[key][1]


@pytest.fixture
def wide(store: VectorStore, request: pytest.FixtureRequest) -> str:
    """A collection of `RECORDS`, never changed."""
    return made(store, request, "wide", RECORDS)


@pytest.fixture
def changing(store: VectorStore, request: pytest.FixtureRequest) -> str:
    """A collection for records at random."""
    return made(store, request, "changing", [])


@pytest.fixture(scope="module", autouse=True)
def _drop_what_was_made() -> Iterator[None]:
    yield
    for (_, engine), (store, name) in _made.items():
        if engine != "server_store":  # it has ended
            store.drop(name)
    _made.clear()


def found(store: VectorStore, collection: str, filter: str | None) -> list[Id]:
    """Return the records that match, by each way of asking. All ways must agree."""
    scanned = [record.id for page in store.scan(collection, filter=filter, page=25) for record in page]
    assert [record.id for record in store.get(collection, range(len(RECORDS)), filter=filter, fields=("n",))] == scanned, filter
    assert sorted(hit.id for hit in store.search(collection, ONE, limit=1000, filter=filter, strong=True)[0]) == scanned, filter
    nearest = store.search(collection, ONE, limit=3, filter=filter, strong=True)[0]
    assert [round(hit.distance) for hit in nearest] == sorted(4 * (id - 1) ** 2 for id in scanned if isinstance(id, int))[:3], (
        filter
    )
    assert store.count(collection, filter=filter) == len(scanned), filter
    return scanned


def of(value: Any, kind: type | tuple[type, ...]) -> bool:
    return isinstance(value, kind) and (isinstance(value, bool) is (kind is bool))


NUMBER = (int, float)
Holds = Callable[[Mapping[str, Any]], Any]
#: Every form of the grammar, with what it means in Python, written by hand.
TABLE: dict[str, Holds] = {
    # and, or, not, in every spelling
    "n > 3 and id < 12": lambda f: f["n"] > 3 and f["id"] < 12,
    "n > 3 AND id < 12": lambda f: f["n"] > 3 and f["id"] < 12,
    "n > 3 && id < 12": lambda f: f["n"] > 3 and f["id"] < 12,
    "n == 3 or id == 1": lambda f: f["n"] == 3 or f["id"] == 1,
    "n == 3 OR id == 1": lambda f: f["n"] == 3 or f["id"] == 1,
    "n == 3 || id == 1": lambda f: f["n"] == 3 or f["id"] == 1,
    "id == 2 OR n == 3 AND id == 9": lambda f: f["id"] == 2,
    "(id == 2 OR n == 3) AND id == 8": lambda f: f["id"] == 8,
    "not (n > 3)": lambda f: f["n"] <= 3,
    "NOT (n > 3)": lambda f: f["n"] <= 3,
    "!(n > 3)": lambda f: f["n"] <= 3,
    "not (n > 3 or city == 'Bern')": lambda f: f["n"] <= 3 and f["city"] != "Bern",
    # comparisons both ways, and chains
    "3 == n": lambda f: f["n"] == 3,
    "3 != n": lambda f: f["n"] != 3,
    "3 < n": lambda f: f["n"] > 3,
    "1 < n < 5": lambda f: 1 < f["n"] < 5,
    "5 > n >= 1": lambda f: 1 <= f["n"] < 5,
    "'B' < city < 'Z'": lambda f: "B" < f["city"] < "Z",
    "n > -3 and n < +3": lambda f: -3 < f["n"] < 3,
    "small < 300 and small != -200": lambda f: True,
    "n == small": lambda f: True,
    "n < id": lambda f: True,
    "exact > share": lambda f: True,
    "good < true": lambda f: not f["good"],
    "good == TRUE": lambda f: f["good"],
    "False == good": lambda f: not f["good"],
    # lists
    "n in [1, 2, 500]": lambda f: f["n"] in (1, 2),
    "n IN [1, 2,]": lambda f: f["n"] in (1, 2),
    "n NOT IN [1, 2]": lambda f: f["n"] not in (1, 2),
    "n in []": lambda f: False,
    "n not in [ ]": lambda f: True,
    "not (n not in [1])": lambda f: f["n"] == 1,
    "good in [true]": lambda f: f["good"],
    "share in [0.1, 1]": lambda f: f["id"] in (11, 20),
    "exact not in [0.1, 1, 2.5]": lambda f: f["id"] not in (1, 10, 25),
    f"n in [{', '.join(map(str, range(10, 20_000)))}]": lambda f: f["n"] >= 10,
    # numbers
    "share == 0.1": lambda f: f["id"] == 11,
    "share <= 0.1": lambda f: f["id"] <= 11,
    "share > 0.1": lambda f: f["id"] > 11,
    "not (share < 0.5)": lambda f: f["id"] >= 15,
    "exact == 3e-1": lambda f: f["id"] == 3,
    "exact == .1 or exact == 1.": lambda f: f["id"] in (1, 10),
    "exact == 2": lambda f: f["id"] == 20,
    "n == 0x3 or n == 0b100": lambda f: f["n"] in (3, 4),
    "n < 9223372036854775806": lambda f: True,
    "n == 1 + 2 * 3 - 14 / 2 % 4": lambda f: f["n"] == 4,
    # arithmetic
    "n + 1 == 3": lambda f: f["n"] == 2,
    "1 + n == 3": lambda f: f["n"] == 2,
    "n - 1 != 3": lambda f: f["n"] != 4,
    "n - -1 == 3": lambda f: f["n"] == 2,
    "n * 2 == 4": lambda f: f["n"] == 2,
    "n / 2 == 1": lambda f: f["n"] in (2, 3),
    "n / 2 == -1": lambda f: f["n"] in (-2, -3),
    "n / -1 == 4": lambda f: f["n"] == -4,
    "n % 2 == 1": lambda f: f["n"] > 0 and f["n"] % 2 == 1,
    "n % 2 == -1": lambda f: f["n"] < 0 and f["n"] % 2 == 1,
    "n % -2 == -1": lambda f: f["n"] < 0 and f["n"] % 2 == 1,
    "small * 100 == 4000": lambda f: f["n"] == 40,
    "n + 1 > 3": lambda f: f["n"] > 2,
    "3 < n + 1": lambda f: f["n"] > 2,
    "not (n % 2 == 0)": lambda f: f["n"] % 2 == 1,
    "exact * 10 == 3": lambda f: f["id"] == 3,
    "share + 1 == 1.1": lambda f: f["id"] == 11,
    "x + 1 == 2": lambda f: f.get("x") == 1 and of(f["x"], NUMBER),
    'note["k"] % 7 == 1': lambda f: f["id"] % 7 == 1,
    "nums[1] + 1 == 2": lambda f: len(f["nums"]) > 1,
    # texts
    r'city == "Sankt \"G\""': lambda f: f["city"] == 'Sankt "G"',
    r"city == 'it\'s'": lambda f: f["city"] == "it's",
    r'city == "B\\b"': lambda f: f["city"] == "B\\b",
    r'city == "line\nend"': lambda f: f["city"] == "line\nend",
    r'city != "line\nend"': lambda f: f["city"] != "line\nend",
    r'city in ["tab\tx", "\x42ern", "Z\u00fcrich", "line\nend"]': lambda f: (
        f["city"] in ("tab\tx", "Bern", "Zürich", "line\nend")
    ),
    "city == 'and (or] not in'": lambda f: False,
    "city >= 'B' and city < 'C'": lambda f: "B" <= f["city"] < "C",
    "city == ''": lambda f: f["city"] == "",
    # like
    "city like 'B%'": lambda f: f["city"].startswith("B"),
    "city LIKE '%b'": lambda f: f["city"].endswith("b"),
    "city like '%b%'": lambda f: "b" in f["city"],
    "city like 'a%b'": lambda f: f["city"].startswith("a") and f["city"].endswith("b"),
    "city like 'a_b'": lambda f: f["city"] in ("a%b", "a_b", "axb", "aüb"),
    r"city like 'a\\_b'": lambda f: f["city"] == "a_b",
    r"city like 'a\\%%'": lambda f: f["city"] == "a%b",
    r"city like '%\\\\%'": lambda f: "\\" in f["city"],
    "city like '%'": lambda f: True,
    "city like ''": lambda f: f["city"] == "",
    "city like 'Bern'": lambda f: f["city"] == "Bern",
    "not (city like 'B%')": lambda f: not f["city"].startswith("B"),
    "not (city like '%b')": lambda f: not f["city"].endswith("b"),
    "x like 'a%'": lambda f: of(f.get("x"), str) and f["x"].startswith("a"),
    "not (x like 'a%')": lambda f: not (of(f.get("x"), str) and f["x"].startswith("a")),
    "x like 'li%end'": lambda f: f.get("x") == "line\nend",
    "tags[0] like 't%'": lambda f: f["tags"] != [],
    # fields that are not declared, and JSON: true is not 1, and 1 is 1.0
    "x == 1": lambda f: f.get("x") == 1 and of(f["x"], NUMBER),
    "x == 1.0": lambda f: f.get("x") == 1 and of(f["x"], NUMBER),
    "x == true": lambda f: f.get("x") is True,
    "x == '1'": lambda f: f.get("x") == "1",
    "x != 1": lambda f: not (f.get("x") == 1 and of(f["x"], NUMBER)),
    "x != 'a'": lambda f: f.get("x") != "a",
    "not (x == 1)": lambda f: not (f.get("x") == 1 and of(f["x"], NUMBER)),
    "x < 3": lambda f: of(f.get("x"), NUMBER) and f["x"] < 3,
    "1 <= x": lambda f: of(f.get("x"), NUMBER) and f["x"] >= 1,
    "1 < x < 8": lambda f: of(f.get("x"), NUMBER) and 1 < f["x"] < 8,
    "not (x < 3)": lambda f: not (of(f.get("x"), NUMBER) and f["x"] < 3),
    "x > 'a'": lambda f: of(f.get("x"), str) and f["x"] > "a",
    "x in [1, 'a', true]": lambda f: (f.get("x") in (1, "a") and not of(f["x"], bool)) or f.get("x") is True,
    "x in [1, 2.5]": lambda f: of(f.get("x"), NUMBER) and f["x"] in (1, 2.5),
    "x not in [1, 'a']": lambda f: not (f.get("x") in (1, "a") and not of(f["x"], bool)),
    "x in []": lambda f: False,
    "x == 9007199254740993": lambda f: of(f.get("x"), int) and f["x"] == 2**53 + 1,
    "x == 9007199254740992.0": lambda f: of(f.get("x"), int) and f["x"] in (2**53, 2**53 + 1),
    "x > 9007199254740992": lambda f: of(f.get("x"), int) and f["x"] > 2**53,
    "x == 4611686018427387904": lambda f: of(f.get("x"), int) and f["x"] == 2**62,
    "zzz == 1": lambda f: False,
    "zzz != 1": lambda f: True,
    "zzz not in [1]": lambda f: True,
    '$meta["x"] == "a"': lambda f: f.get("x") == "a",
    '$meta["n"] == 1': lambda f: False,
    'note["x"] == 1': lambda f: f.get("x") == 1 and of(f["x"], NUMBER),
    'note["deep"][0] == 3': lambda f: f["id"] == 3,
    "note['deep'][2] == 'é'": lambda f: True,
    'note["deep"][9] != 3': lambda f: True,
    'x["a"] == 1': lambda f: f.get("x") == {"a": 1},
    'x["a"]["b"][0] == 1': lambda f: f["id"] % len(VALUES) == 22,
    "x[0] == 1": lambda f: f.get("x") in ([1, 2], [1, "a", True, None], {"0": 1, "k y": 2}),
    'x["k y"] in [2, 3]': lambda f: f.get("x") == {"0": 1, "k y": 2},
    "exists x": lambda f: f.get("x") is not None,
    "not (exists x)": lambda f: f.get("x") is None,
    'EXISTS note["x"] and exists note["deep"][0]': lambda f: f.get("x") is not None,
    'exists note["deep"][1]': lambda f: False,
    "x is null": lambda f: f.get("x") is None,
    'note["x"] IS NOT NULL': lambda f: f.get("x") is not None,
    "n is null": lambda f: False,
    "city is not null": lambda f: True,
    # ARRAY
    "tags[0] == 't0'": lambda f: f["tags"] != [],
    "tags[1] != 't0'": lambda f: len(f["tags"]) > 1,
    "not (tags[1] == 't0')": lambda f: len(f["tags"]) > 1,
    "nums[1] not in [1]": lambda f: False,
    "nums[3] > 0": lambda f: len(f["nums"]) > 3,
    "nums[3] is null": lambda f: len(f["nums"]) < 4,
    "array_contains(nums, 1)": lambda f: 1 in f["nums"],
    "ARRAY_CONTAINS(tags, 't2')": lambda f: "t2" in f["tags"],
    "array_contains_all(nums, [1, 3])": lambda f: 3 in f["nums"],
    "ARRAY_CONTAINS_ANY(nums, [3, 9])": lambda f: 3 in f["nums"],
    "not (array_contains(nums, 1))": lambda f: 1 not in f["nums"],
    "array_length(nums) == 2": lambda f: len(f["nums"]) == 2,
    "2 < array_length(nums)": lambda f: len(f["nums"]) > 2,
    "not (ARRAY_LENGTH(tags) == 2)": lambda f: len(f["tags"]) != 2,
    "array_length(x) == 2": lambda f: of(f.get("x"), list) and len(f["x"]) == 2,
    'json_contains(note["x"], 1)': lambda f: f.get("x") in ([1, 2], [1, "a", True, None]),
    "json_contains(x, true)": lambda f: f.get("x") == [1, "a", True, None],
    'json_contains_all($meta["x"], [1, "a"])': lambda f: f.get("x") == [1, "a", True, None],
    "JSON_CONTAINS_ANY(x, [2, 'b'])": lambda f: f.get("x") in ([1, 2], ["a", "b"]),
    'not (json_contains(note["x"], 1))': lambda f: f.get("x") not in ([1, 2], [1, "a", True, None]),
    # many parts
    " AND ".join(f"n != {number}" for number in range(100, 3100)): lambda f: True,
    " or ".join(f"(n == {number})" for number in range(20, 1020)): lambda f: f["n"] >= 20,
}


@pytest.mark.parametrize(
    "filter", [None, *TABLE], ids=lambda filter: "None" if filter is None else filter[:40].encode("ascii", "replace").decode()
)
def test_a_filter_means_the_same_everywhere(store: VectorStore, wide: str, filter: str | None) -> None:
    holds = TABLE[filter] if filter else lambda f: True
    assert found(store, wide, filter) == [record.id for record in RECORDS if holds({**record.fields, "id": record.id})]


@pytest.mark.parametrize(
    "filter",
    [
        "id > 0; label == 4",
        "n > 0 AND",
        "n == 3 and (id == 1",
        "n == 3) or (id == 1",
        "n == 'x'",
        "n / 0 == 1",
        "n % 0 == 1",
        "x % 0 == 1",
        "nums[0] % (1 - 1) == 1",
        "id in [1] -- all of them",
        "n == 9223372036854775808",
        "(" * 10_000 + "n == 1" + ")" * 10_000,
    ],
    ids=range(12),
)
def test_a_filter_that_cannot_be_understood_is_refused_before_anything_is_sent(
    store: VectorStore, wide: str, filter: str
) -> None:
    before = store.version()
    for ask in (
        lambda: store.search(wide, ONE, limit=1, filter=filter),
        lambda: store.count(wide, filter=filter),
        lambda: store.get(wide, [1], filter=filter),
        lambda: list(store.scan(wide, filter=filter)),
    ):
        with pytest.raises(FilterError, match="cannot be understood at position"):
            ask()
    assert (store.version(), store.count(wide)) == (before, len(RECORDS))


def test_a_filter_is_a_text(store: VectorStore, wide: str) -> None:
    for wrong in (3, ["n == 1"], b"n == 1"):
        with pytest.raises(UsageError, match="filter takes a text"):
            store.count(wide, filter=wrong)  # type: ignore[arg-type]


@seed(16)
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(records=st.lists(filtering.RECORDS, min_size=30, max_size=30), texts=st.lists(filtering.FILTERS, min_size=4, max_size=4))
def test_any_filter_finds_what_the_slow_evaluation_finds(
    store: VectorStore, changing: str, records: list[Any], texts: list[str]
) -> None:
    store.upsert(changing, [Record(id=at, vector=np.full(4, at, np.float32), fields=each) for at, each in enumerate(records)])
    for text in texts:
        test = filters.holds(filters.read(text, filtering.SCHEMA))
        assert found(store, changing, text) == [at for at, record in enumerate(records) if test({**record, "id": at})], text


@pytest.fixture(params=[False, True], ids=["one collection", "two collections"])
def gallery(request: pytest.FixtureRequest, store: VectorStore, tmp_path: Path) -> Iterator[Client]:
    """A client of 1,100 records, of which 6 are in two collections during an upgrade."""
    served = make(tmp_path, records=1, deployed=request.param, times=TIMES)
    shapes = [
        Schema(collection=f"texts_{name}", dim=DIMS[name], metric=Metric.COSINE, id_type=IdType.INT64) for name in ("v1", "v2")
    ]
    for shape in shapes:
        store.drop(shape.collection)
        store.create(shape, Index(type="FLAT"))
        ids = range(1100) if shape is shapes[0] else range(40, 46) if request.param else ()
        vector = np.ones(shape.dim, np.float32)
        store.upsert(shape.collection, [Record(id=id, vector=vector, fields={"label": id % 10}) for id in ids])
    with Client("texts", registry=served.registry, store=store, loaded_models=served.loaded_models, engine_timeout=8.0) as client:
        yield client
    for shape in shapes:
        store.drop(shape.collection)
    served.registry.close()


def test_a_deletion_by_filter_takes_what_matches_and_nothing_else(gallery: Client) -> None:
    for wrong in ("id > 0; label == 4", "label == 3 and", "label = 3", "id > 0 or 1", "label == 3) or (id >= 0"):
        with pytest.raises(FilterError, match="cannot be understood at position"):
            gallery.delete(filter=wrong)
    for none in (None, "", " "):
        with pytest.raises(UsageError, match="give one of them"):
            gallery.delete(filter=none)
    assert gallery.count() == gallery.count(None) == 1100
    assert gallery.delete(filter="label == 3 AND id < 50") == 5
    assert gallery.delete(filter="label == 4 AND (id < 10 OR id == 44)") == 2
    left = [record.id for record in gallery.query(limit=2000)]
    assert left == [id for id in range(1100) if id not in (3, 13, 23, 33, 43, 4, 44)]


def test_a_query_pages_through_what_matches_and_ends(gallery: Client) -> None:
    assert [record.id for record in gallery.query("id > 0 AND label != 3", limit=2500)] == [
        id for id in range(1, 1100) if id % 10 != 3
    ]
    assert gallery.count("id >= 0 AND label == 3") == 110
    assert [record.id for record in gallery.query(None, limit=2, offset=1099)] == [1099]


def test_an_engine_that_gives_other_ids_than_were_asked_for_is_not_asked_for_ever(
    lite_store: MilvusStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"c_{uuid.uuid4().hex}"
    lite_store.create(replace(filtering.SCHEMA, collection=name), Index(type="FLAT"))
    lite_store.upsert(name, RECORDS)
    monkeypatch.setattr("rmvdb.engines.milvus.reading.between", lambda *range: "")
    for bounds in ({"after": 5}, {"upto": 5}):
        with pytest.raises(EngineError, match=r"was asked for the ids of .* and gave 0 to 59"):
            list(lite_store.scan(name, **bounds))  # type: ignore[arg-type]
    lite_store.drop(name)


def test_a_filter_that_an_engine_lacks_is_applied_to_the_nearest_or_refused(lite_store: MilvusStore) -> None:
    name, many = f"c_{uuid.uuid4().hex}", 17_000
    schema = Schema(collection=name, dim=4, metric=Metric.L2, id_type=IdType.INT64)
    lite_store.create(schema, Index(type="FLAT"))
    far = {many - 1: {"x": 1}, 5_000: {"y": 1}}
    lite_store.upsert(
        name, [Record(id=id, vector=np.full(4, id, np.float32), fields={"n": id} | far.get(id, {})) for id in range(many)]
    )
    try:
        assert [hit.id for hit in lite_store.search(name, 0 * ONE, limit=1, filter="exists y")[0]] == [5_000]
        assert [hit.id for hit in lite_store.search(name, 0 * ONE, limit=9, filter="exists x and n > 16000")[0]] == [many - 1]
        for filter, limit, matching in (("exists x", 1, 0), ("exists y", 2, 1)):
            with pytest.raises(
                FilterError, match=f"of the 16,384 nearest records that it gave {matching} match; ask for fewer than {limit}"
            ):
                lite_store.search(name, 0 * ONE, limit=limit, filter=filter)
        assert lite_store.count(name, filter="exists x or exists y") == 2
    finally:
        lite_store.drop(name)
