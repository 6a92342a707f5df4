"""Each engine searches and filters alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rmvdb.engines.faiss import FaissStore
from rmvdb.engines.finding import not_found
from rmvdb.errors import EngineError, FilterError, Mismatch
from rmvdb.learning import hyperbolic
from rmvdb.protocols import VectorStore
from rmvdb.types import Field, Metric, Record, Vectors
from tests.support.records import DIM, FLAT, METRICS, bare, filled, in_threads, plain, records_of, scanned, stacked, vectors_of


def distances(metric: Metric, query: Vectors, gallery: Vectors) -> Any:
    """Return the obvious formula, in double precision, (q, n)."""
    q, g = query.astype(np.float64), gallery.astype(np.float64)
    if metric is Metric.L2:
        return ((q[:, None] - g[None]) ** 2).sum(-1)
    if metric is Metric.IP:
        return -(q @ g.T)
    return 1.0 - (q / np.linalg.norm(q, axis=1, keepdims=True)) @ (g / np.linalg.norm(g, axis=1, keepdims=True)).T


@pytest.mark.parametrize("metric", METRICS)
def test_distances_are_smaller_the_closer_and_exact(store: VectorStore, collection: str, metric: Metric) -> None:
    records = filled(store, collection, metric=metric)
    queries = vectors_of(5, seed=1)

    found = store.search(collection, queries, limit=7, strong=True)

    expected = distances(metric, queries, stacked(records))
    for hits, line in zip(found, expected, strict=True):
        order = np.argsort(line)[:7]
        assert [hit.id for hit in hits] == [records[at].id for at in order]
        assert [hit.distance for hit in hits] == pytest.approx(line[order], abs=2e-6, rel=2e-6)
        assert all(hit.raw == hit.distance and hit.leg == collection and hit.fields == {} for hit in hits)


@pytest.mark.parametrize("curvature", [1.0, 0.25])
def test_an_inner_product_collection_is_searched_by_distance_on_the_hyperboloid(
    store: VectorStore, collection: str, curvature: float
) -> None:
    space = np.random.default_rng(3).normal(size=(80, DIM - 1)) * np.linspace(0.05, 2, 80)[:, None]
    points = np.concatenate([np.sqrt(1 / curvature + np.square(space).sum(1, keepdims=True)), space], axis=1).astype(np.float32)
    gallery, queries = points[::2], points[1::2]
    store.create(plain(collection, metric=Metric.LORENTZ.stored), FLAT)
    store.upsert(collection, [Record(id=at, vector=each) for at, each in enumerate(gallery)])

    answers = hyperbolic.measured(store.search(collection, hyperbolic.as_queries(queries), limit=40, strong=True), queries)

    q, g = queries.astype(np.float64), gallery.astype(np.float64)
    products = q[:, 1:] @ g[:, 1:].T - np.outer(q[:, 0], g[:, 0])
    geodesic = np.arccosh(np.maximum(-curvature * products, 1)) / np.sqrt(curvature)
    for hits, line in zip(answers, geodesic, strict=True):
        assert sorted(hit.id for hit in hits) == list(range(40))
        found = np.array([hit.distance for hit in hits])
        assert (np.diff(found) >= 0).all()
        np.testing.assert_allclose(found, line[[int(hit.id) for hit in hits]], atol=2e-3, rtol=2e-4)
        np.testing.assert_allclose(found, np.sort(line), atol=2e-3, rtol=2e-4)


def test_hits_carry_the_fields_asked_for(store: VectorStore, collection: str) -> None:
    records = filled(store, collection)
    by_id = {record.id: record for record in records}
    query = vectors_of(1, seed=2)

    everything = store.search(collection, query, limit=60, fields=None, strong=True)[0]
    some = store.search(collection, query, limit=60, fields=["city", "color"], strong=True)[0]

    assert {hit.id: hit.fields for hit in everything} == {id: record.fields for id, record in by_id.items()}
    assert {hit.id: hit.fields for hit in some} == {
        id: {name: record.fields[name] for name in ("city", "color") if name in record.fields} for id, record in by_id.items()
    }


def test_a_search_finds_fewer_where_there_are_fewer(store: VectorStore, collection: str) -> None:
    store.create(plain(collection), FLAT)
    assert store.search(collection, vectors_of(2), limit=5, strong=True) == [[], []]
    assert store.search(collection, vectors_of(1), limit=5, fields=["color"], filter="color == 'red'", strong=True) == [[]]
    store.upsert(collection, bare([1, 2, 3]))
    assert [len(hits) for hits in store.search(collection, vectors_of(2), limit=5, strong=True)] == [3, 3]
    assert store.search(collection, np.empty((0, DIM), np.float32), limit=5, strong=True) == []


@pytest.mark.parametrize("limit", [0, -1, 16_385])
def test_a_limit_out_of_range_is_refused(store: VectorStore, collection: str, limit: int) -> None:
    store.create(plain(collection), FLAT)
    with pytest.raises(Mismatch, match=f"limit is {limit}.* 16384"):
        store.search(collection, vectors_of(1), limit=limit)


def test_queries_of_another_dimension_are_refused(store: VectorStore, collection: str) -> None:
    store.create(plain(collection), FLAT)
    for wrong in (np.ones((1, DIM + 1), np.float32), np.ones(DIM, np.float32)):
        with pytest.raises(Mismatch, match=f"dimension {DIM}; the queries have shape"):
            store.search(collection, wrong, limit=1)


def test_a_field_that_is_not_there_is_refused_where_none_can_be_added(store: VectorStore, collection: str) -> None:
    store.create(plain(collection, dynamic=False), FLAT)
    with pytest.raises(Mismatch, match="has no field 'colour'"):
        store.search(collection, vectors_of(1), limit=1, fields=["colour"])
    with pytest.raises(EngineError, match="colour"):
        store.upsert(collection, [Record(id=1, vector=vectors_of(1)[0], fields={"colour": "red"})])


FILTERS: dict[str, Callable[[int, Mapping[str, Any]], bool]] = {
    "n >= 10 and n < 20": lambda n, f: 10 <= n < 20,
    "n == 3 or city == 'Bern'": lambda n, f: n == 3 or f["city"] == "Bern",
    "n in [1, 2, 500]": lambda n, f: n in (1, 2),
    "n not in [1, 2]": lambda n, f: n not in (1, 2),
    "n != 5": lambda n, f: n != 5,
    'city == "Sankt \\"Gallen\\""': lambda n, f: f["city"] == 'Sankt "Gallen"',
    "city == 'Biel\\\\Bienne'": lambda n, f: f["city"] == "Biel\\Bienne",
    "city in ['Zürich', '']": lambda n, f: f["city"] in ("Zürich", ""),
    "city > 'B' && city < 'C'": lambda n, f: "B" < f["city"] < "C",
    "good == true": lambda n, f: f["good"],
    "good == false || n <= 2": lambda n, f: not f["good"] or n <= 2,
    "share > 1.5": lambda n, f: f["share"] > 1.5,
    "share <= 2": lambda n, f: f["share"] <= 2,
    "pk < -10": lambda n, f: n - 20 < -10,
    "pk in [-20, 0, 7]": lambda n, f: n - 20 in (-20, 0, 7),
    "(n < 5 or n > 50) and (n != 1 and n != 55)": lambda n, f: (n < 5 or n > 50) and n not in (1, 55),
    "10 <= n": lambda n, f: n >= 10,
    "color == 'c2'": lambda n, f: f.get("color") == "c2",
    "color in ['c2', 'c4']": lambda n, f: f.get("color") in ("c2", "c4"),
    "size < 3": lambda n, f: f.get("size", 9) < 3,
    "size >= 3 and color != 'c0'": lambda n, f: f.get("size", 0) >= 3 and f.get("color") != "c0",
    "nothing == 1": lambda n, f: False,
    "": lambda n, f: True,
    "  ": lambda n, f: True,
}


def test_filters_mean_the_same_everywhere(store: VectorStore, collection: str) -> None:
    records = filled(store, collection)
    for filter, holds in FILTERS.items():
        expected = [record.id for record in records if holds(record.fields["n"], record.fields)]
        hits = store.search(collection, vectors_of(1, seed=3), limit=100, filter=filter, strong=True)[0]
        assert sorted(hit.id for hit in hits) == expected, filter
        assert scanned(store, collection, filter=filter) == expected, filter
        assert store.count(collection, filter=filter) == len(expected), filter


NEGATIONS: dict[str, Callable[[int, Mapping[str, Any]], bool]] = {
    "not (n < 3)": lambda n, f: n >= 3,
    "!(n == 3) and not (good == true)": lambda n, f: n != 3 and not f["good"],
    "not (n < 30 and (good == true or city in ['Bern', '']))": lambda n, f: (
        n >= 30 or (not f["good"] and f["city"] not in ("Bern", ""))
    ),
    "not (not (n == 3 or 50 <= n))": lambda n, f: n == 3 or n >= 50,
    "not (city not in ['Bern']) or pk < -18": lambda n, f: f["city"] == "Bern" or n - 20 < -18,
    "not (city > 'B') and city != 'not (n == 3)'": lambda n, f: f["city"] <= "B",
}
#: Half of the records have no such field.
NEGATIONS |= {
    "not (color == 'c2')": lambda n, f: f.get("color") != "c2",
    "not (color != 'c2' or n < 20)": lambda n, f: f.get("color") == "c2" and n >= 20,
    "not (color in ['c2', 'c4'] or size == 1)": lambda n, f: f.get("color") not in ("c2", "c4") and f.get("size") != 1,
    "not (size not in [1, 2])": lambda n, f: f.get("size") in (1, 2),
    "n == 1 or not (size < 3)": lambda n, f: n == 1 or not f.get("size", 9) < 3,
    "not (share < 0.5)": lambda n, f: f["share"] >= 0.5,
    "not (size < 3)": lambda n, f: not f.get("size", 9) < 3,
}


def test_negations_mean_the_same_everywhere(store: VectorStore, collection: str) -> None:
    records = filled(store, collection)
    for filter, holds in NEGATIONS.items():
        expected = [record.id for record in records if holds(record.fields["n"], record.fields)]
        hits = store.search(collection, vectors_of(1, seed=3), limit=100, filter=filter, strong=True)[0]
        assert sorted(hit.id for hit in hits) == expected, filter
        assert scanned(store, collection, filter=filter) == expected, filter
        assert store.count(collection, filter=filter) == len(expected), filter


@pytest.mark.parametrize("filter", ["n ==", "n == 1 and", "(n == 1", "n == 'a' 'b'", "n ** 2 == = 4", "== 3"])
def test_a_filter_that_makes_no_sense_is_refused(store: VectorStore, collection: str, filter: str) -> None:
    filled(store, collection, 3)
    for call in (
        lambda: store.search(collection, vectors_of(1), limit=1, filter=filter),
        lambda: store.count(collection, filter=filter),
        lambda: list(store.scan(collection, filter=filter)),
    ):
        with pytest.raises(FilterError, match="filter"):
            call()


# Not Milvus Lite 2.5: there an upsert is a deletion and an insertion, and a search between the two misses the record.
@pytest.mark.parametrize("store", ["faiss_store", pytest.param("server_store", marks=pytest.mark.server)], indirect=True)
def test_a_record_is_found_while_it_is_replaced(store: VectorStore, collection: str) -> None:
    records = filled(store, collection)
    missed: list[int] = []

    def work(thread: int) -> None:
        for _ in range(25):
            if thread:
                hits = store.search(collection, vectors_of(1), limit=100, strong=thread == 1)[0]
                missed.append(len(records) - len(hits))
            else:
                store.upsert(collection, records)

    store.search(collection, vectors_of(1), limit=1, strong=True)
    in_threads(work, 4)
    assert set(missed) == {0}


def test_a_call_after_a_moment_shows_every_write_before_it_in_every_collection(store: VectorStore, collection: str) -> None:
    other = f"{collection}_other"
    filled(store, other)
    filled(store, collection)
    try:
        for turn in range(6):
            records = records_of([100 + turn], seed=100 + turn)
            store.delete(other, [turn])
            store.upsert(other, records)
            moment = store.moment()  # one for both: the next write into the other collection is nothing that it must show
            hits = store.search(other, stacked(records), limit=100, after=moment)[0]
            assert hits[0].id == 100 + turn
            assert turn not in [hit.id for hit in hits]
            assert store.get(other, [turn, 100 + turn], fields=(), strong=False, after=moment) == [Record(id=100 + turn)]
            store.delete(collection, [turn])
            found = store.search(collection, stacked(records), limit=100, after=store.moment())[0]
            assert turn not in [hit.id for hit in found]
    finally:
        store.drop(other)


@pytest.mark.parametrize("fields", [{"größe": 42}, {"like": 1, "in": 2, "or": "a", "and": 4, "not": 5}, {"id": 7}], ids=str)
def test_records_are_found_though_no_filter_can_name_their_fields(
    store: VectorStore, collection: str, fields: Mapping[str, Any]
) -> None:
    schema = plain(collection, id_field="pk")
    store.create(schema, FLAT)
    store.upsert(collection, [Record(id=1, vector=vectors_of(1)[0], fields=fields)])
    assert not any(not_found(store, schema, store.get(collection, [1], vector=True)))


@pytest.mark.parametrize("value", [5, "a"])
def test_records_are_found_though_their_json_is_a_number_or_a_text(faiss_store: FaissStore, collection: str, value: Any) -> None:
    schema = replace(plain(collection), fields=(Field(name="note", type="JSON"),))
    faiss_store.create(schema, FLAT)
    faiss_store.upsert(collection, [Record(id=1, vector=vectors_of(1)[0], fields={"note": value})])
    assert not any(not_found(faiss_store, schema, faiss_store.get(collection, [1], vector=True)))
