"""Collections that other programs made are read, or refused with the reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from pymilvus import DataType, MilvusClient

from rmvdb.engines.milvus import MilvusStore
from rmvdb.errors import AlreadyExists, CannotAdopt
from rmvdb.types import Field, IdType, Metric, Record, Schema
from tests.support.engines import lite_only, not_lite3, server_only
from tests.support.records import (
    FLAT,
    scanned,
    schema_of,
    vectors_of,
)

Change = Callable[[Any], Any]


def foreign(
    client: MilvusClient, name: str, change: Change, *, metric: str = "COSINE", dtype: DataType = DataType.FLOAT_VECTOR
) -> None:
    schema = client.create_schema(auto_id=False, enable_dynamic_field=True)
    schema.add_field("id", DataType.INT64, is_primary=True)
    schema.add_field("vector", dtype, dim=DIM_OF[dtype])
    schema = change(schema) or schema
    client.create_collection(name, schema=schema, consistency_level="Bounded")
    params = client.prepare_index_params()
    kind = "BIN_FLAT" if dtype is DataType.BINARY_VECTOR else "FLAT"
    params.add_index("vector", index_type=kind, metric_type=metric, params={})
    client.create_index(name, params)


DIM_OF = {DataType.FLOAT_VECTOR: 8, DataType.BINARY_VECTOR: 16, DataType.FLOAT16_VECTOR: 8}


def with_auto_id(schema: Any) -> Any:
    schema = MilvusClient.create_schema(auto_id=True)
    schema.add_field("id", DataType.INT64, is_primary=True)
    schema.add_field("vector", DataType.FLOAT_VECTOR, dim=8)
    return schema


def test_a_collection_of_another_program_is_read(milvus_store: MilvusStore, client: MilvusClient, collection: str) -> None:
    def change(schema: Any) -> None:
        schema.add_field("title", DataType.VARCHAR, max_length=99)
        schema.add_field("tags", DataType.ARRAY, element_type=DataType.INT64, max_capacity=7)
        schema.add_field("doc", DataType.JSON)
        schema.add_field("price", DataType.DOUBLE)

    foreign(client, collection, change, metric="IP")

    found = milvus_store.describe(collection)

    assert (found.dim, found.metric, found.id_type, found.id_field) == (8, Metric.IP, IdType.INT64, "id")
    assert [(field.name, field.type) for field in found.fields] == [
        ("title", "VARCHAR"),
        ("tags", "ARRAY"),
        ("doc", "JSON"),
        ("price", "DOUBLE"),
    ]
    assert found.fields[0].params == {"max_length": 99}
    assert found.fields[1].params == {"element_type": "INT64", "max_capacity": 7}


def test_a_collection_that_makes_its_ids_is_not_adopted(milvus_store: MilvusStore, client: MilvusClient, collection: str) -> None:
    foreign(client, collection, with_auto_id)
    with pytest.raises(CannotAdopt, match=f"'{collection}' makes its ids itself.*auto_id.*copy it"):
        milvus_store.describe(collection)


def test_a_collection_without_an_index_is_not_adopted(milvus_store: MilvusStore, client: MilvusClient, collection: str) -> None:
    schema = client.create_schema(auto_id=False)
    schema.add_field("id", DataType.INT64, is_primary=True)
    schema.add_field("vector", DataType.FLOAT_VECTOR, dim=8)
    client.create_collection(collection, schema=schema)
    with pytest.raises(CannotAdopt, match=r"has no index with a metric on 'vector'.*create one"):
        milvus_store.describe(collection)


@not_lite3
def test_binary_vectors_are_not_adopted(milvus_store: MilvusStore, client: MilvusClient, collection: str) -> None:
    foreign(client, collection, lambda schema: None, metric="HAMMING", dtype=DataType.BINARY_VECTOR)
    with pytest.raises(CannotAdopt, match=r"has vectors of type BINARY_VECTOR.*FLOAT_VECTOR"):
        milvus_store.describe(collection)


@lite_only
@pytest.mark.parametrize(("kind", "dim"), [(DataType.FLOAT16_VECTOR, {"dim": 8}), (DataType.SPARSE_FLOAT_VECTOR, {})])
def test_half_precision_and_sparse_vectors_are_not_adopted(
    milvus_store: MilvusStore, client: MilvusClient, collection: str, kind: DataType, dim: dict[str, int]
) -> None:
    schema = client.create_schema(auto_id=False)
    schema.add_field("id", DataType.INT64, is_primary=True)
    schema.add_field("vector", kind, **dim)
    client.create_collection(collection, schema=schema)
    with pytest.raises(CannotAdopt, match=f"has vectors of type {kind.name}"):
        milvus_store.describe(collection)


@lite_only
def test_two_vector_fields_are_not_adopted(milvus_store: MilvusStore, client: MilvusClient, collection: str) -> None:
    foreign(client, collection, lambda schema: schema.add_field("other", DataType.FLOAT_VECTOR, dim=4) and None)
    with pytest.raises(CannotAdopt, match=r"has 2 vector fields.*one vector field"):
        milvus_store.describe(collection)


@server_only
def test_partitions_that_a_user_made_are_not_adopted(milvus_store: MilvusStore, client: MilvusClient, collection: str) -> None:
    foreign(client, collection, lambda schema: None)
    client.create_partition(collection, "summer")
    with pytest.raises(CannotAdopt, match=r"has the partition 'summer'.*without partitions"):
        milvus_store.describe(collection)


@server_only
def test_a_partition_of_later_keeps_no_new_process_from_searching(
    milvus_store: MilvusStore, client: MilvusClient, collection: str
) -> None:
    foreign(client, collection, lambda schema: None)
    client.create_partition(collection, "summer")
    client.insert(collection, [{"id": 1, "vector": [1.0] * DIM_OF[DataType.FLOAT_VECTOR]}], partition_name="summer")
    client.load_collection(collection)
    (hits,) = milvus_store.search(collection, np.ones((1, DIM_OF[DataType.FLOAT_VECTOR]), np.float32), limit=3, strong=True)
    assert [hit.id for hit in hits] == [1]


@server_only
def test_a_collection_that_forgets_is_not_adopted(milvus_store: MilvusStore, client: MilvusClient, collection: str) -> None:
    foreign(client, collection, lambda schema: None)
    client.alter_collection_properties(collection, {"collection.ttl.seconds": 0})
    assert milvus_store.describe(collection).dim == 8
    client.alter_collection_properties(collection, {"collection.ttl.seconds": 3600})
    with pytest.raises(CannotAdopt, match=r"forgets records by itself \(collection.ttl.seconds\).*drop that property"):
        milvus_store.describe(collection)


@server_only
def test_an_alias_is_read_as_the_collection_behind_it(milvus_store: MilvusStore, client: MilvusClient, collection: str) -> None:
    foreign(client, collection, lambda schema: None)
    client.create_alias(collection, f"{collection}_alias")
    try:
        assert milvus_store.describe(f"{collection}_alias").collection == collection
    finally:
        client.drop_alias(f"{collection}_alias")


def test_a_partition_key_is_made_only_where_records_are_found_by_it(milvus_store: MilvusStore, collection: str) -> None:
    key = Field(name="tenant", type="VARCHAR", params={"max_length": 20, "is_partition_key": True})
    milvus_store.create(schema_of(collection, fields=(key,)), FLAT)
    kept = milvus_store.describe(collection).fields[0].params.get("is_partition_key", False)
    assert kept is not milvus_store.version().startswith(("milvus-lite 2", "milvus 2.3"))
    for turn in (1, 2):
        records = [Record(id=at, vector=vectors_of(1)[0], fields={"tenant": f"t{at * turn % 3}"}) for at in range(9)]
        milvus_store.upsert(collection, records)
    assert scanned(milvus_store, collection, filter="tenant == 't2'") == [1, 4, 7]
    assert scanned(milvus_store, collection, page=2) == list(range(9))
    assert milvus_store.count(collection) == 9


@server_only
def test_a_partition_key_that_loses_records_is_not_adopted(
    milvus_store: MilvusStore, client: MilvusClient, collection: str
) -> None:
    foreign(client, collection, lambda schema: schema.add_field("key", DataType.INT64, is_partition_key=True) and None)
    with pytest.raises(CannotAdopt, match=r"has a partition key, in which milvus 2\.3\.5 loses records.*use Milvus 2\.4"):
        milvus_store.describe(collection)


def test_a_collection_that_changed_its_metric_is_not_reused(
    milvus_store: MilvusStore, client: MilvusClient, collection: str
) -> None:
    foreign(client, collection, lambda schema: None, metric="L2")
    wanted = Schema(collection=collection, dim=8, metric=Metric.COSINE, id_type=IdType.INT64)
    with pytest.raises(AlreadyExists, match="exists with metric L2"):
        milvus_store.create(wanted, FLAT)
    assert milvus_store.exists(collection)
