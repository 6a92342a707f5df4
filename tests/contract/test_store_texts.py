"""Any text is an id, and any order of calls ends alike, on each engine."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rmvdb.protocols import VectorStore
from rmvdb.types import IdType, Metric, Record
from tests.support.records import DIM, FLAT, HOSTILE, NOT_FOR_LITE_2, bare, plain, scanned, vectors_of

SLOW = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
#: Ids that Milvus Lite 2.5 cannot remove again are refused there (test_milvus.py).
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="'\0\n\r"), min_size=0, max_size=12) | st.sampled_from(
    ['"', "\\", '\\"', '"] or pk != "', "\\n", "%", "a b", "{x}", "\u2028", "😀", "é", "e\u0301", "pk", "\t", "//", "--", "/*"]
)


@SLOW
@given(ids=st.lists(TEXT, min_size=1, max_size=8, unique=True))
def test_any_text_is_an_id(store: VectorStore, ids: list[str]) -> None:
    collection = "any_text"
    store.create(plain(collection, id_type=IdType.VARCHAR), FLAT)
    store.delete(collection, scanned(store, collection))

    store.upsert(collection, bare(ids))
    assert scanned(store, collection) == sorted(ids)
    assert [record.id for record in store.get(collection, ids)] == ids
    for at, id in enumerate(sorted(ids)):
        assert scanned(store, collection, after=id) == sorted(ids)[at + 1 :]
        assert scanned(store, collection, upto=id) == sorted(ids)[: at + 1]
    store.delete(collection, ids[:1])
    assert scanned(store, collection) == sorted(ids[1:])


def test_a_thousand_hostile_ids_are_ids_and_nothing_else(store: VectorStore, collection: str) -> None:
    random = Random(20)
    refused = NOT_FOR_LITE_2 if store.version().startswith("milvus-lite 2") else set()
    quotable = [each for each in HOSTILE if each not in refused]
    ids = sorted({"".join(random.choices(quotable, k=random.randint(1, 12))) for _ in range(1100)})[:1000]
    random.shuffle(ids)
    store.create(plain(collection, id_type=IdType.VARCHAR), FLAT)
    store.upsert(collection, bare(ids))
    kept, gone = ids[:500], ids[500:]

    assert len(ids) == 1000
    assert scanned(store, collection) == sorted(ids)
    assert [record.id for record in store.get(collection, ids)] == ids
    for start in range(0, 500, 50):
        store.delete(collection, gone[start : start + 50])
    assert scanned(store, collection) == sorted(kept)
    assert [record.id for record in store.get(collection, ids)] == kept
    found = store.search(collection, vectors_of(1), limit=1000, strong=True)[0]
    assert {hit.id for hit in found} == set(kept)


STEPS = st.lists(
    st.tuples(st.sampled_from(["upsert", "delete"]), st.lists(st.integers(-8, 8), min_size=1, max_size=6), st.integers(0, 99)),
    min_size=1,
    max_size=8,
)


@SLOW
@given(steps=STEPS)
def test_any_order_of_writes_ends_as_a_dictionary_would(store: VectorStore, steps: list[tuple[str, list[int], int]]) -> None:
    collection = "any_order"
    store.create(plain(collection, metric=Metric.L2), FLAT)
    store.delete(collection, list(range(-8, 9)))
    expected: dict[int, int] = {}
    for verb, ids, value in steps:
        if verb == "upsert":
            vector = np.full(DIM, value, np.float32)
            store.upsert(collection, [Record(id=id, vector=vector, fields={"v": value}) for id in ids])
            expected |= dict.fromkeys(ids, value)
        else:
            store.delete(collection, ids)
            expected = {id: value for id, value in expected.items() if id not in ids}

    found = [record for page in store.scan(collection, page=3, fields=None, vector=True) for record in page]
    assert {record.id: record.fields["v"] for record in found} == expected
    assert [record.id for record in found] == sorted(expected)
    assert store.count(collection) == len(expected)
    hits = store.search(collection, np.zeros((1, DIM), np.float32), limit=30, strong=True)[0]
    assert {hit.id: hit.distance for hit in hits} == {id: pytest.approx(DIM * value**2) for id, value in expected.items()}
