"""Each engine makes, reads and writes collections alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rmvdb.errors import AlreadyExists, CollectionMissing, EngineError, LeaseLost, Mismatch
from rmvdb.protocols import VectorStore
from rmvdb.types import IdType, Metric, Record
from tests.support.records import (
    DIM,
    FIELDS,
    FLAT,
    METRICS,
    bare,
    fields_of,
    filled,
    in_threads,
    plain,
    records_of,
    scanned,
    schema_of,
    vectors_of,
)


def test_the_engine_says_its_version_and_how_late_it_may_be(store: VectorStore) -> None:
    name, number = store.version().split()
    assert name in ("faiss", "milvus", "milvus-lite")
    assert number[0].isdigit()
    assert store.staleness in (0.0, 5.0)


@pytest.mark.parametrize("id_type", IdType)
@pytest.mark.parametrize("metric", METRICS)
def test_a_collection_is_described_as_it_was_made(store: VectorStore, collection: str, metric: Metric, id_type: IdType) -> None:
    schema = schema_of(collection, metric=metric, id_type=id_type)
    store.create(schema, FLAT)

    found = store.describe(collection)

    assert replace(found, fields=()) == replace(schema, fields=())
    assert [(field.name, field.type) for field in found.fields] == [(field.name, field.type) for field in FIELDS]
    assert found.fields[1].params["max_length"] == 64
    assert found.fields[4].params["element_type"] == "VARCHAR"


def test_a_described_collection_can_be_made_again_under_another_name(store: VectorStore, collection: str) -> None:
    store.create(schema_of(collection), FLAT)
    twin = replace(store.describe(collection), collection=f"{collection}_twin")
    try:
        store.create(twin, FLAT)
        store.upsert(twin.collection, records_of([1, 2]))
        assert store.count(twin.collection) == 2
    finally:
        store.drop(twin.collection)


def test_making_a_collection_again_changes_nothing(store: VectorStore, collection: str) -> None:
    filled(store, collection, 3)
    store.create(schema_of(collection), FLAT)
    assert store.count(collection) == 3


@pytest.mark.parametrize(
    "other",
    [
        {"dim": 9},
        {"metric": Metric.IP},
        {"id_type": IdType.VARCHAR},
        {"fields": FIELDS[:2]},
        {"dynamic": False},
        {"id_field": "id"},
    ],
    ids=str,
)
def test_a_name_that_is_taken_by_another_schema_is_refused(store: VectorStore, collection: str, other: dict[str, Any]) -> None:
    store.create(schema_of(collection), FLAT)
    with pytest.raises(AlreadyExists, match=f"{collection}.*drop it or take"):
        store.create(schema_of(collection, **other), FLAT)


def test_dropping_twice_is_as_good_as_once(store: VectorStore, collection: str) -> None:
    assert not store.exists(collection)
    store.create(plain(collection), FLAT)
    assert store.exists(collection)
    store.drop(collection)
    store.drop(collection)
    assert not store.exists(collection)


def test_a_dropped_collection_comes_back_empty_and_may_differ(store: VectorStore, collection: str) -> None:
    filled(store, collection, 5)
    store.drop(collection)
    store.create(plain(collection, id_type=IdType.VARCHAR, metric=Metric.L2), FLAT)
    assert store.count(collection) == 0
    store.upsert(collection, bare(["a"]))
    assert scanned(store, collection) == ["a"]


def test_every_call_on_a_missing_collection_says_so(store: VectorStore, collection: str) -> None:
    calls: list[Callable[[], object]] = [
        lambda: store.describe(collection),
        lambda: store.search(collection, vectors_of(1), limit=1),
        lambda: store.get(collection, [1]),
        lambda: list(store.scan(collection)),
        lambda: store.upsert(collection, bare([1])),
        lambda: store.delete(collection, [1]),
        lambda: store.count(collection),
    ]
    for call in calls:
        with pytest.raises(CollectionMissing, match=f"no collection '{collection}'"):
            call()


def test_records_come_in_the_order_asked_each_once(store: VectorStore, collection: str) -> None:
    records = {record.id: record for record in filled(store, collection)}

    found = store.get(collection, [7, 999, -20, 7, 3], vector=True)

    assert [record.id for record in found] == [7, -20, 3]
    for record in found:
        assert record.fields == records[record.id].fields
        assert record.vector is not None
        assert record.vector.dtype == np.float32
        np.testing.assert_array_equal(record.vector, records[record.id].vector)
    assert store.get(collection, []) == []


def test_get_leaves_out_what_does_not_match(store: VectorStore, collection: str) -> None:
    filled(store, collection)
    found = store.get(collection, [7, -20, 3, 999], filter="n >= 23 and n < 27", fields=())
    assert found == [Record(id=3)]


def test_get_gives_the_fields_asked_for_and_no_vector_unasked(store: VectorStore, collection: str) -> None:
    filled(store, collection)
    assert store.get(collection, [0], fields=()) == [Record(id=0)]
    assert store.get(collection, [0], fields=["n", "color", "pk", "emb"]) == [Record(id=0, fields={"n": 20, "color": "c0"})]


@pytest.mark.parametrize("id_type", IdType)
def test_a_scan_gives_every_record_once_in_ascending_order(store: VectorStore, collection: str, id_type: IdType) -> None:
    records = filled(store, collection, id_type=id_type)
    ids = sorted(record.id for record in records)

    pages = list(store.scan(collection, page=7, vector=True, fields=["n"]))

    assert [len(page) for page in pages] == [7] * 8 + [4]
    found = [record for page in pages for record in page]
    assert [record.id for record in found] == ids
    by_id = {record.id: record for record in records}
    for record in found:
        assert record.fields == {"n": by_id[record.id].fields["n"]}
        np.testing.assert_array_equal(record.vector, by_id[record.id].vector)


@pytest.mark.parametrize("id_type", IdType)
def test_a_scan_keeps_within_its_bounds(store: VectorStore, collection: str, id_type: IdType) -> None:
    ids = sorted(record.id for record in filled(store, collection, id_type=id_type))
    assert scanned(store, collection, after=ids[9]) == ids[10:]
    assert scanned(store, collection, upto=ids[9]) == ids[:10]
    assert scanned(store, collection, after=ids[9], upto=ids[20], page=4) == ids[10:21]
    assert scanned(store, collection, after=ids[-1]) == []
    assert scanned(store, collection, after=ids[9], upto=ids[20], filter="n >= 0 and good == true") == [
        id for id in ids[10:21] if store.get(collection, [id])[0].fields["good"]
    ]


def test_a_scan_leaves_out_what_is_removed_while_it_runs(store: VectorStore, collection: str) -> None:
    filled(store, collection)
    pages = store.scan(collection, page=10, fields=["n"])
    next(pages)
    store.delete(collection, list(range(-10, 10)))
    assert [record.id for page in pages for record in page] == list(range(10, 40))


def test_an_upsert_replaces_the_whole_record(store: VectorStore, collection: str) -> None:
    filled(store, collection, 4)
    new = Record(id=-20, vector=vectors_of(1, seed=9)[0], fields={**fields_of(1), "city": "Uster"})

    for _ in range(3):
        store.upsert(collection, [new])

    [found] = store.get(collection, [-20], vector=True)
    assert found.fields == new.fields  # the undeclared fields of the old record are gone
    np.testing.assert_array_equal(found.vector, new.vector)
    assert store.count(collection) == 4
    hits = store.search(collection, new.vector[None], limit=4, strong=True)[0]  # type: ignore[index]
    assert hits[0].id == -20
    assert len({hit.id for hit in hits}) == 4


def test_an_id_that_stands_twice_in_one_upsert_counts_once_as_it_stands_last(store: VectorStore, collection: str) -> None:
    store.create(plain(collection), FLAT)
    first, last = (Record(id=1, vector=vectors_of(1, seed=at)[0], fields={"at": at}) for at in (1, 2))
    store.upsert(collection, [first, *bare([2]), last])
    assert store.get(collection, [1])[0].fields == {"at": 2}
    assert store.count(collection) == 2
    assert scanned(store, collection) == [1, 2]


def test_writing_or_removing_nothing_is_no_error(store: VectorStore, collection: str) -> None:
    store.create(plain(collection), FLAT)
    store.upsert(collection, [])
    store.delete(collection, [])
    store.delete(collection, [1, 2, 2])
    assert store.count(collection) == 0


def test_a_bad_record_is_refused_with_its_id_and_nothing_is_written(store: VectorStore, collection: str) -> None:
    store.create(plain(collection), FLAT)
    good = bare([1])
    for vector in (None, np.ones(DIM + 1, np.float32), np.full(DIM, np.nan, np.float32), np.full(DIM, np.inf, np.float32)):
        with pytest.raises(Mismatch, match="Record 77 has a vector with"):
            store.upsert(collection, [*good, Record(id=77, vector=vector)])
    for id in ("a", 1.5, None, True):
        with pytest.raises(Mismatch, match="has ids of type INT64"):
            store.upsert(collection, [Record(id=id, vector=vectors_of(1)[0])])  # type: ignore[arg-type]
        with pytest.raises(Mismatch, match="has ids of type INT64"):
            store.delete(collection, [id])  # type: ignore[list-item]
        with pytest.raises(Mismatch, match="has ids of type INT64"):
            store.get(collection, [id])  # type: ignore[list-item]
    assert store.count(collection) == 0


def test_a_record_without_a_declared_field_is_refused(store: VectorStore, collection: str) -> None:
    store.create(schema_of(collection), FLAT)
    fields = {name: value for name, value in fields_of(1).items() if name != "city"}
    with pytest.raises(EngineError, match="city"):
        store.upsert(collection, [Record(id=1, vector=vectors_of(1)[0], fields=fields)])


def test_the_largest_ids_are_kept_apart(store: VectorStore, collection: str) -> None:
    store.create(plain(collection), FLAT)
    ids = [-(2**63) + 1, -(2**53) - 1, -(2**53), -1, 0, 1, 2**53, 2**53 + 1, 2**63 - 2]
    store.upsert(collection, bare(ids))
    assert scanned(store, collection, page=2) == ids
    assert [record.id for record in store.get(collection, ids)] == ids
    assert {hit.id for hit in store.search(collection, vectors_of(1), limit=20, strong=True)[0]} == set(ids)
    store.delete(collection, [2**53])
    assert scanned(store, collection) == [id for id in ids if id != 2**53]
    for edge in (-(2**63), 2**63 - 1):
        with pytest.raises(Mismatch, match=f"The id {edge} cannot be served"):
            store.upsert(collection, bare([edge]))


def test_more_records_than_one_answer_holds(store: VectorStore, collection: str) -> None:
    store.create(plain(collection, dim=2, metric=Metric.L2), FLAT)
    count = 40_000
    ids = np.random.default_rng(5).permutation(np.arange(-count // 2, count // 2)).tolist()
    vectors = np.random.default_rng(6).normal(size=(count, 2)).astype(np.float32)
    for start in range(0, count, 10_000):
        some = slice(start, start + 10_000)
        store.upsert(collection, [Record(id=id, vector=v) for id, v in zip(ids[some], vectors[some], strict=True)])

    assert store.count(collection) == count
    assert scanned(store, collection, page=999) == sorted(ids)
    assert len(store.get(collection, ids[:12_000])) == 12_000

    gone = set(ids[::2])
    store.delete(collection, ids[::2])
    assert store.count(collection) == count // 2
    assert scanned(store, collection) == sorted(set(ids) - gone)
    assert store.count(collection, filter="pk < 0") == len([id for id in ids if id < 0 and id not in gone])
    assert len(store.search(collection, vectors[:1], limit=10_000, strong=True)[0]) == 10_000


def test_many_threads_share_one_store(store: VectorStore, collection: str) -> None:
    records = filled(store, collection)
    queries = vectors_of(8, seed=4)
    expected = [[hit.id for hit in hits] for hits in store.search(collection, queries, limit=5, strong=True)]
    failures: list[object] = []

    def work(thread: int) -> None:
        for turn in range(20):
            hits = store.search(collection, queries[thread : thread + 1], limit=5, filter="n >= 0", strong=turn == 0)[0]
            if [hit.id for hit in hits] != expected[thread]:
                failures.append((thread, turn, hits))
            other = 1000 + 100 * thread + turn
            store.upsert(collection, [Record(id=other, vector=vectors_of(1, seed=other)[0], fields={**fields_of(0), "n": -1})])

    in_threads(work, 8)
    assert failures == []
    assert store.count(collection) == len(records) + 160


def test_a_write_that_is_not_permitted_never_leaves(store: VectorStore, collection: str) -> None:
    def refuse() -> None:
        raise LeaseLost("the lease is over")

    store.create(plain(collection), FLAT)
    store.upsert(collection, bare([1, 2]))
    with pytest.raises(LeaseLost):
        store.upsert(collection, bare([3]), permit=refuse)
    with pytest.raises(LeaseLost):
        store.delete(collection, [1], permit=refuse)
    assert scanned(store, collection) == [1, 2]
