"""What a new collection takes over from another."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from pymilvus import DataType, MilvusClient

from rmvdb.engines.milvus import MilvusStore
from rmvdb.types import Index
from tests.support.engines import server_only


@server_only
def test_a_collection_gets_the_layout_of_another(
    milvus_store: MilvusStore, collection: str, client: MilvusClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise filters would be slower, searches would have one replica, and other programs would read at another level."""
    made = client.create_schema(auto_id=False, enable_dynamic_field=True)
    made.add_field("id", DataType.INT64, is_primary=True)
    made.add_field("vector", DataType.FLOAT_VECTOR, dim=4)
    made.add_field("n", DataType.INT64)
    made.add_field("word", DataType.VARCHAR, max_length=50)
    indexes = client.prepare_index_params()
    indexes.add_index("vector", index_type="HNSW", metric_type="COSINE", params={"M": 8, "efConstruction": 32})
    indexes.add_index("n", index_type="STL_SORT")
    indexes.add_index("word", index_type="Trie", index_name="words")
    old, new = f"{collection}_old", f"{collection}_new"
    layout: dict[str, Any] = {"num_shards": 2, "consistency_level": "Strong", "properties": {"mmap.enabled": "true"}}
    client.create_collection(old, schema=made, index_params=indexes, **layout)
    loaded: list[int] = []
    load = MilvusClient.load_collection

    def noted(self: MilvusClient, name: str, *, replica_number: int = 1, **options: Any) -> None:
        loaded.append(replica_number)  # this server has one node, and room for one replica
        load(self, name, **options)

    monkeypatch.setattr(MilvusClient, "load_collection", noted)
    monkeypatch.setattr(MilvusClient, "describe_replica", lambda self, name, **options: [object()] * 3)
    for _ in range(2):  # a creation that was interrupted is run again
        milvus_store.create(replace(milvus_store.describe(old), collection=new), Index(), like=old)
    found = client.describe_collection(new)
    assert (found["num_shards"], found["consistency_level_name"], found["properties"]) == (2, "Strong", layout["properties"])
    described = {name: client.describe_index(new, name) for name in client.list_indexes(new)}
    kinds = {name: (each["field_name"], each["index_type"]) for name, each in described.items()}
    assert kinds == {"vector": ("vector", "AUTOINDEX"), "n": ("n", "STL_SORT"), "words": ("word", "Trie")}
    assert set(loaded) == {3}
    for name in (old, new):
        client.drop_collection(name)


@pytest.mark.parametrize("level", ["Strong", "Bounded"])
def test_other_programs_read_a_collection_at_the_level_of_the_one_it_follows(
    milvus_store: MilvusStore, collection: str, client: MilvusClient, level: str
) -> None:
    old = f"{collection}_old"
    made = client.create_schema(auto_id=False)
    made.add_field("id", DataType.INT64, is_primary=True)
    made.add_field("vector", DataType.FLOAT_VECTOR, dim=4)
    indexes = client.prepare_index_params()
    indexes.add_index("vector", index_type="FLAT", metric_type="COSINE")
    client.create_collection(old, schema=made, index_params=indexes, consistency_level=level)
    milvus_store.create(replace(milvus_store.describe(old), collection=collection), Index(type="FLAT"), like=old)
    told = client.describe_collection(collection).get("consistency_level_name")
    assert told == client.describe_collection(old).get("consistency_level_name")
    milvus_store.drop(old)
