"""The behaviour of a store that only a Milvus shows: aliases, duplicated keys, indexes, half made collections, refused ids, big
records."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from pymilvus import DataType, MilvusClient
from pymilvus.client.types import LoadState

from rmvdb.engines import index_rules
from rmvdb.engines.milvus import MilvusStore, creating, reading
from rmvdb.errors import ConfigError, EngineError, EngineUnavailable, Mismatch, Unwritable
from rmvdb.types import Field, Id, IdType, Index, Metric, Record
from tests.support.engines import lite_only, not_lite3, server_only
from tests.support.records import (
    FLAT,
    bare,
    fields_of,
    filled,
    in_threads,
    plain,
    scanned,
    schema_of,
    vectors_of,
)


def test_a_collection_that_was_made_again_is_read_by_its_new_schema_once_it_is_described(
    milvus_store: MilvusStore, collection: str
) -> None:
    """By a store that is used for months, and hears nothing of what other processes do."""
    milvus_store.version()
    place = milvus_store.place()
    owner = MilvusStore(lambda: place)
    owner.create(plain(collection, dynamic=False), FLAT)
    milvus_store.upsert(collection, bare([1]))
    assert milvus_store.get(collection, [1])[0].fields == {}
    owner.drop(collection)
    owner.create(schema_of(collection, fields=(Field(name="n", type="INT64"),)), FLAT)
    owner.upsert(collection, [replace(bare([1])[0], fields={"n": 3, "color": "red"})])

    milvus_store.describe(collection)

    assert milvus_store.get(collection, [1])[0].fields == {"n": 3, "color": "red"}
    milvus_store.upsert(collection, [replace(bare([2])[0], fields={"n": 4, "color": "blue"})])
    assert [record.fields for page in owner.scan(collection, fields=None) for record in page][1] == {"n": 4, "color": "blue"}
    owner.close()


@server_only
def test_aliases_move_with_what_they_stand_for(milvus_store: MilvusStore, client: MilvusClient, collection: str) -> None:
    twin = f"{collection}_twin"
    for name in (collection, twin):
        milvus_store.create(plain(name, dim=2, metric=Metric.L2), FLAT)
    names = [f"{collection}_{which}" for which in ("shown", "live")]
    for name in names:
        client.create_alias(collection, name)
    assert milvus_store.move_aliases(collection, twin) == sorted(names)
    assert {client.describe_alias(name)["collection_name"] for name in names} == {twin}
    assert milvus_store.move_aliases(collection, twin) == []
    milvus_store.drop(collection)
    assert milvus_store.move_aliases(collection, twin) == []
    for name in names:
        client.drop_alias(name)
    milvus_store.drop(twin)


def test_without_aliases_none_are_moved(milvus_store: MilvusStore, collection: str) -> None:
    milvus_store.create(plain(collection, dim=2, metric=Metric.L2), FLAT)
    assert milvus_store.move_aliases(collection, collection) == []


# Duplicated keys: `insert` of a key that is there makes a second row


@not_lite3
def test_duplicated_keys_count_once(milvus_store: MilvusStore, client: MilvusClient, collection: str) -> None:
    records = filled(milvus_store, collection)
    ids = [record.id for record in records]
    for _ in range(4):
        client.insert(collection, [{"pk": record.id, "emb": record.vector, **fields_of(0)} for record in records[:10]])

    rows = client.query(collection, filter="n >= 0", output_fields=["count(*)"], consistency_level="Strong")
    assert rows[0]["count(*)"] == 100
    assert milvus_store.count(collection) == 60
    assert scanned(milvus_store, collection, page=7) == ids
    assert scanned(milvus_store, collection, upto=ids[4]) == ids[:5]
    assert [record.id for record in milvus_store.get(collection, ids)] == ids
    for limit in (1, 5, 12, 60):
        hits = milvus_store.search(collection, vectors_of(3), limit=limit, strong=True)
        assert [len({hit.id for hit in line}) for line in hits] == [limit] * 3

    milvus_store.upsert(collection, records[:5])
    assert [record.fields for record in milvus_store.get(collection, ids[:5])] == [record.fields for record in records[:5]]
    milvus_store.delete(collection, ids[5:10])
    assert milvus_store.count(collection) == 55
    assert scanned(milvus_store, collection) == ids[:5] + ids[10:]


def test_duplicated_keys_hide_no_record_from_a_long_scan(
    milvus_store: MilvusStore, client: MilvusClient, collection: str
) -> None:
    """More rows than one answer holds, the duplicates close together: a limited query gives fewer ids than there are."""
    milvus_store.create(plain(collection, dim=2, metric=Metric.L2), FLAT)
    ids = list(range(-9_000, 9_000))
    order = np.random.default_rng(0).permutation(ids).tolist()
    client.insert(collection, [{"pk": id, "emb": [0.0, 1.0]} for id in order])
    for _ in range(3):
        client.insert(collection, [{"pk": id, "emb": [0.0, 1.0]} for id in range(-8_000, -5_000)])
    client.flush(collection)

    assert milvus_store.count(collection) == len(ids)
    assert scanned(milvus_store, collection) == ids
    assert scanned(milvus_store, collection, vector=True, ahead=True) == ids
    assert scanned(milvus_store, collection, after=-7_500, upto=8_000) == list(range(-7_499, 8_001))


@lite_only
def test_a_page_is_short_only_at_the_end_though_records_leave_while_it_is_read(
    milvus_store: MilvusStore, collection: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    milvus_store.create(plain(collection), FLAT)
    milvus_store.upsert(collection, bare(list(range(1, 31))))
    real, left = reading._get, [2, 3, 5]

    def get(*args: Any, **options: Any) -> list[Record]:
        if left:
            milvus_store.delete(collection, [left.pop(), left.pop(), left.pop()])
        return real(*args, **options)

    monkeypatch.setattr(reading, "_get", get)
    pages = [[record.id for record in page] for page in milvus_store.scan(collection, fields=None, page=10)]
    assert [len(page) for page in pages] == [10, 10, 7]
    assert [id for page in pages for id in page] == [id for id in range(1, 31) if id not in (2, 3, 5)]


def test_a_search_that_once_came_short_is_asked_for_more_again(
    milvus_store: MilvusStore, client: MilvusClient, collection: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    milvus_store.create(plain(collection), FLAT)
    milvus_store.upsert(collection, bare([1, 2]))
    assert len(milvus_store.search(collection, vectors_of(1), limit=3, strong=True)[0]) == 2
    for id in (1, 2):
        client.insert(collection, [{"pk": id, "emb": vectors_of(2)[id - 1]}] * 200)
    milvus_store.upsert(collection, bare([3]))
    assert len(milvus_store.search(collection, vectors_of(1), limit=3, strong=True)[0]) == 3


@lite_only
def test_a_call_right_after_a_write_sees_it(milvus_store: MilvusStore, collection: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine whose calls take less than a millisecond one of sixteen deletions was lost, and as many searches missed."""
    answered = []

    def spied(name: str) -> None:
        real = getattr(MilvusClient, name)

        def call(*args: Any, **options: Any) -> Any:
            answer = real(*args, **options)
            answered.append(time.time_ns())
            return answer

        monkeypatch.setattr(MilvusClient, name, call)

    milvus_store.create(plain(collection), FLAT)
    spied("upsert")
    spied("delete")
    early, unseen, kept = [], [], []

    def write(call: Callable[..., None], what: list[Any]) -> None:
        call(collection, what)
        early.extend(answered[-1:] * (time.time_ns() // 10**6 == answered[-1] // 10**6))

    for id in range(200):
        write(milvus_store.upsert, bare([id]))
        unseen += [id] * (milvus_store.get(collection, [id]) == [])
        write(milvus_store.upsert, bare([id]))
        write(milvus_store.delete, [id])
        kept += [id] * (milvus_store.get(collection, [id]) != [])

    assert len(answered) == 600
    assert (early, unseen, kept) == ([], [], [])


@server_only
def test_a_collection_that_is_never_loaded_is_waited_for_no_longer_than_that(
    milvus_store: MilvusStore, collection: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(creating, "_LOADED_AFTER", 1.5)
    monkeypatch.setattr(MilvusClient, "get_load_state", lambda *_, **__: {"state": LoadState.Loading})
    began = time.monotonic()
    with pytest.raises(EngineUnavailable, match=f"has not loaded '{collection}' for 1.5 s; look at the memory"):
        milvus_store.create(plain(collection), FLAT)
    assert 1.5 < time.monotonic() - began < 30
    assert milvus_store.exists(collection)  # another process may have it by now
    monkeypatch.undo()
    milvus_store.create(plain(collection), FLAT)
    assert scanned(milvus_store, collection) == []


def test_a_collection_that_was_left_without_an_index_is_finished(
    milvus_store: MilvusStore, client: MilvusClient, collection: str
) -> None:
    schema = client.create_schema(auto_id=False, enable_dynamic_field=True)
    schema.add_field("pk", DataType.INT64, is_primary=True)
    schema.add_field("emb", DataType.FLOAT_VECTOR, dim=8)
    client.create_collection(collection, schema=schema)

    milvus_store.create(plain(collection), FLAT)

    milvus_store.upsert(collection, bare([1]))
    assert milvus_store.search(collection, vectors_of(1), limit=1, strong=True)[0][0].id == 1


@not_lite3
def test_a_collection_whose_index_fails_is_not_left_behind(milvus_store: MilvusStore, collection: str) -> None:
    with pytest.raises(EngineError, match=r"HNSW|out of range"):
        milvus_store.create(plain(collection), Index(type="HNSW", params={"M": 99_999, "efConstruction": 8}))
    assert not milvus_store.exists(collection)


def test_many_may_make_the_same_collection_at_once(milvus_store: MilvusStore, collection: str) -> None:
    failures: list[Exception] = []

    def make(_: int) -> None:
        try:
            milvus_store.create(plain(collection), FLAT)
        except EngineError as exc:
            failures.append(exc)

    in_threads(make, 4)
    assert failures == []
    milvus_store.upsert(collection, bare([1]))
    assert milvus_store.count(collection) == 1


@server_only
def test_a_released_collection_is_not_loaded_behind_its_owners_back(
    milvus_store: MilvusStore, client: MilvusClient, collection: str
) -> None:
    filled(milvus_store, collection, 3)
    client.release_collection(collection)
    started = time.monotonic()
    for call in (
        lambda: milvus_store.search(collection, vectors_of(1), limit=1),
        lambda: milvus_store.count(collection),
        lambda: milvus_store.get(collection, [1]),
    ):
        with pytest.raises(EngineError, match=rf"'{collection}' is not loaded.*load_collection\('{collection}'\)"):
            call()
    assert time.monotonic() - started < 40  # three times twenty seconds, if they were repeated


@server_only
@pytest.mark.parametrize(
    "index",
    [
        Index(),
        Index(type="IVF_FLAT", params={"nlist": 16}, search={"nprobe": 16}),
        Index(type="IVF_SQ8", params={"nlist": 16}, search={"nprobe": 16}),
        Index(type="HNSW", params={"M": 16, "efConstruction": 64}, search={"ef": 8}),
        Index(type="SCANN", params={"nlist": 16, "with_raw_data": True}, search={"nprobe": 16, "reorder_k": 10}),
        Index(type="DISKANN", search={"search_list": 16}),
    ],
    ids=lambda index: index.type,
)
def test_every_index_of_the_server_is_made_and_searched(milvus_store: MilvusStore, collection: str, index: Index) -> None:
    index_rules.check(index, dim=32, metric=Metric.COSINE, engine=milvus_store.version())
    milvus_store.create(plain(collection, dim=32), index)
    vectors = np.random.default_rng(0).normal(size=(300, 32)).astype(np.float32)
    milvus_store.upsert(collection, [Record(id=at, vector=vector) for at, vector in enumerate(vectors)])
    # More hits than ef, reorder_k and search_list say: they are raised to the limit.
    hits = milvus_store.search(collection, vectors[:2], limit=40, search=index.search, strong=True)
    assert [line[0].id for line in hits] == [0, 1]
    assert [len(line) for line in hits] == [40, 40]


@pytest.mark.parametrize("kind", sorted(index_rules._KINDS))
def test_the_index_types_that_pass_are_those_that_the_engine_has(milvus_store: MilvusStore, collection: str, kind: str) -> None:
    needed = {"nlist": 16, "m": 4, "M": 8, "efConstruction": 32}
    index = Index(type=kind, params={name: needed[name] for name in needed if name in index_rules._KINDS[kind].build})
    schema = plain(collection, metric=Metric.IP)
    try:
        index_rules.check(index, dim=schema.dim, metric=schema.metric, engine=milvus_store.version())
    except ConfigError:
        if milvus_store.version().startswith("milvus-lite 3"):
            return  # takes any name
        with pytest.raises(EngineError, match=kind):
            milvus_store.create(schema, index)
        assert not milvus_store.exists(collection)
    else:
        milvus_store.create(schema, index)


@pytest.mark.parametrize("index", [FLAT, Index(), Index(type="IVF_FLAT", params={"nlist": 16})], ids=lambda index: index.type)
def test_the_existing_index_is_returned(milvus_store: MilvusStore, collection: str, index: Index) -> None:
    milvus_store.create(plain(collection), index)
    found = milvus_store.index(collection)
    chosen = "FLAT" if milvus_store.version().startswith("milvus-lite 3") and index.type == "AUTOINDEX" else index.type
    assert (found.type, found.search) == (chosen, {})
    if index.params and not milvus_store.version().startswith("milvus-lite 3"):
        assert found.params == {"nlist": "16"}


@server_only
@pytest.mark.parametrize("kind", ["IVF_FLAT", "HNSW", "SCANN"])
def test_an_index_without_what_this_server_has_no_default_for_is_refused(
    milvus_store: MilvusStore, collection: str, kind: str
) -> None:
    with pytest.raises(ConfigError, match=r"params\.\w+ must be given"):
        index_rules.check(Index(type=kind), dim=8, metric=Metric.IP, engine=milvus_store.version())
    with pytest.raises(EngineError, match="out of range"):
        milvus_store.create(plain(collection), Index(type=kind))


@lite_only
@pytest.mark.parametrize("id", ["'", "O'Hara", "\0", "a\nb", "\r"])
def test_an_id_that_lite_cannot_remove_again_is_refused(milvus_store: MilvusStore, collection: str, id: str) -> None:
    milvus_store.create(plain(collection, id_type=IdType.VARCHAR), FLAT)
    for call in (lambda: milvus_store.upsert(collection, bare([id])), lambda: milvus_store.delete(collection, [id])):
        with pytest.raises(EngineError, match=r"Lite 2.5 cannot write or delete the id.*use a Milvus server"):
            call()


@lite_only
@pytest.mark.parametrize("id", ["O'Hara", "\0", "a\nb", 2**63 - 1, -(2**63)])
def test_an_id_of_another_program_that_could_not_be_moved_is_found(
    milvus_store: MilvusStore, client: MilvusClient, collection: str, id: Id
) -> None:
    kind, others = (IdType.VARCHAR, ["a", 'b"', "ü"]) if isinstance(id, str) else (IdType.INT64, [0, 2**63 - 2, 1 - 2**63])
    milvus_store.create(plain(collection, id_type=kind), FLAT)
    milvus_store.upsert(collection, bare(others))
    assert milvus_store.unservable(collection) is None
    schema = milvus_store.describe(collection)
    client.insert(collection, [{schema.id_field: id, schema.vector_field: [1.0] * schema.dim}])
    assert milvus_store.unservable(collection) == id


def test_ids_of_another_program_with_line_breaks_are_read_like_others(
    milvus_store: MilvusStore, client: MilvusClient, collection: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lite 2.5 reads no line break in an expression."""
    milvus_store.create(plain(collection, id_type=IdType.VARCHAR), FLAT)
    schema, ids = milvus_store.describe(collection), ["O'H", "a", "a\tb", "a\nb", "a\x0bb", "a\rb", "a\\nb", "b"]
    client.insert(collection, [{schema.id_field: id, schema.vector_field: [1.0] * schema.dim} for id in ids])
    assert [record.id for record in milvus_store.get(collection, ids, vector=True)] == ids
    assert [record.id for record in milvus_store.get(collection, ["a\nb"], fields=())] == ["a\nb"]
    assert milvus_store.get(collection, ["a\n", "a\r", "\n"]) == []
    for window in (5, 6, 100):  # one would end at each of them
        monkeypatch.setattr(reading, "WINDOW", window)
        assert [record.id for page in milvus_store.scan(collection, vector=True, page=2) for record in page] == sorted(ids)
        assert milvus_store.count(collection) == len(ids)


@server_only
@pytest.mark.parametrize("id", ["'", "O'Hara", "\0", "a\nb", "\r", "'] or pk != ['"])
def test_the_server_takes_any_text_as_an_id(milvus_store: MilvusStore, collection: str, id: str) -> None:
    milvus_store.create(plain(collection, id_type=IdType.VARCHAR), FLAT)
    milvus_store.upsert(collection, bare([id, "other"]))
    assert [record.id for record in milvus_store.get(collection, [id])] == [id]
    milvus_store.delete(collection, [id])
    assert scanned(milvus_store, collection) == ["other"]


def test_big_records_travel_in_several_requests(milvus_store: MilvusStore, collection: str) -> None:
    milvus_store.create(schema_of(collection, dim=2048, metric=Metric.IP, fields=(Field(name="doc", type="JSON"),)), FLAT)
    vectors = np.random.default_rng(0).normal(size=(3_000, 2048)).astype(np.float32)  # 24 MB
    text = "x" * 20_000  # 60 MB in all
    ids: list[Id] = list(range(3_000))
    milvus_store.upsert(
        collection, [Record(id=id, vector=v, fields={"doc": {"text": text}}) for id, v in zip(ids, vectors, strict=True)]
    )
    assert milvus_store.count(collection) == 3_000
    found = milvus_store.get(collection, ids, vector=True)
    assert len(found) == 3_000
    np.testing.assert_array_equal(found[2_999].vector, vectors[2_999])
    assert found[0].fields == {"doc": {"text": text}}


def test_records_of_very_unequal_size_are_read_and_replaced_by_smaller_ones(lite_store: MilvusStore, collection: str) -> None:
    """Lite takes each row of an answer for as large as the average row, and refuses an answer over 64 MiB."""
    texts = tuple(Field(name=name, type="VARCHAR", params={"max_length": 65_535}) for name in ("title", "text", "notes"))
    lite_store.create(schema_of(collection, dim=2, metric=Metric.L2, fields=texts), FLAT)
    ids, short = list(range(650)), 150

    def write(longest: int) -> None:
        sizes = [0 if id < short else longest for id in ids]
        lite_store.upsert(
            collection,
            [
                Record(id=id, vector=np.ones(2, np.float32), fields={field.name: "x" * size for field in texts})
                for id, size in zip(ids, sizes, strict=True)
            ],
        )

    write(60_000)  # 90 MB in all
    assert [record.id for record in lite_store.get(collection, ids, vector=True)] == ids
    assert [len(page) for page in lite_store.scan(collection, fields=None, vector=True, page=500)] == [500, 150]
    write(1)
    assert {record.fields["text"] for record in lite_store.get(collection, ids[short:])} == {"x"}


@pytest.mark.server
def test_an_index_changes_no_bit_of_a_vector(server_store: MilvusStore, collection: str) -> None:
    server_store.create(plain(collection), Index(type="HNSW", params={"M": 8, "efConstruction": 32}))
    vectors = 3 * vectors_of(2_000)  # not of length 1, which COSINE would make them
    server_store.upsert(collection, [Record(id=id, vector=vector) for id, vector in enumerate(vectors)])
    client = server_store._connection.get()
    client.flush(collection)
    (name,) = client.list_indexes(collection)
    end = time.monotonic() + 240
    while (built := client.describe_index(collection, name))["indexed_rows"] < 2_000 and time.monotonic() < end:
        time.sleep(0.2)
    client.release_collection(collection)
    client.load_collection(collection)

    found = server_store.get(collection, list(range(2_000)), vector=True)

    assert built["indexed_rows"] == 2_000
    np.testing.assert_array_equal([record.vector for record in found], vectors)


def test_a_query_of_many_vectors_is_split(milvus_store: MilvusStore, collection: str) -> None:
    milvus_store.create(plain(collection), FLAT)
    milvus_store.upsert(collection, bare(list(range(200))))
    found = milvus_store.search(collection, vectors_of(3_000), limit=100, strong=True)
    assert [len(hits) for hits in found] == [100] * 3_000
    assert [hits[0].id for hits in found[:200]] == list(range(200))


def test_more_queries_than_a_server_takes_at_once_are_split(milvus_store: MilvusStore, collection: str) -> None:
    milvus_store.create(plain(collection), FLAT)
    milvus_store.upsert(collection, bare([1]))
    assert [hit.id for hits in milvus_store.search(collection, vectors_of(16_385), limit=1, strong=True) for hit in hits] == [
        1
    ] * 16_385


@pytest.mark.parametrize("wrong", [{"n": "one"}, {"city": None}, {"extra": {1, 2}}], ids=["type", "missing", "set"])
def test_a_record_that_a_collection_cannot_hold_is_known_not_to_have_been_sent(
    milvus_store: MilvusStore, collection: str, wrong: dict[str, Any]
) -> None:
    milvus_store.create(schema_of(collection), FLAT)
    fields = {name: value for name, value in (fields_of(1) | wrong).items() if value is not None}
    with pytest.raises(Unwritable, match="Record 1 cannot be written"):
        milvus_store.upsert(collection, [Record(id=1, vector=vectors_of(1)[0], fields=fields)])


def test_a_field_that_a_lite_search_would_fail_on_is_asked_for_safely(milvus_store: MilvusStore, collection: str) -> None:
    milvus_store.create(plain(collection), FLAT)
    search = functools.partial(milvus_store.search, collection, vectors_of(1), limit=2, strong=True)
    assert search(fields=["nowhere"]) == [[]]
    with pytest.raises(Mismatch):
        milvus_store.search(collection, np.ones((1, 3), np.float32), limit=1)
