"""The meaning of a failed call, by its code. The engines have the index of `rmvdb init`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from pymilvus import MilvusException

from rmvdb.engines import lite
from rmvdb.engines.milvus import MilvusStore
from rmvdb.engines.milvus.failures import Failure, classify, text_of
from rmvdb.errors import EngineError, UsageError
from rmvdb.types import IdType, Index, Metric, Record, Schema
from tests.support import lite3

WORDS = [
    "recovering",
    "not ready",
    "closed channel",
    "no available shard",
    "node offline",
    "context canceled",
    "mmap manager has not been init",
]


#: Of a server that was asked while its parts were starting.
TRACED = (
    "attempt #0: stack trace: /milvus/pkg/tracer/stack_trace.go:51 github.com/milvus-io/milvus/pkg/tracer.StackTrace "
    "/milvus/internal/util/grpcclient/client.go:550 github.com/milvus-io/milvus/internal/util/grpcclient.(*ClientBase[...]).Call "
    "/milvus/internal/distributed/querycoord/client/client.go:102 "
    "github.com/milvus-io/milvus/internal/distributed/querycoord/client.wrapGrpcCall[...] : empty grpc client"
)


def schema(collection: str) -> Schema:
    return Schema(collection=collection, dim=4, metric=Metric.COSINE, id_type=IdType.INT64, dynamic=True)


@pytest.mark.parametrize("words", WORDS)
def test_words_of_a_filter_do_not_make_a_refusal_be_asked_again(milvus_store: MilvusStore, collection: str, words: str) -> None:
    milvus_store.create(schema(collection), Index())
    milvus_store.upsert(collection, [Record(id=1, vector=np.ones(4, np.float32))])
    bad = f'category == "{words}" and ("{words}"'

    def ask(client: Any) -> Any:
        return client.query(collection, filter=bad, output_fields=["id"], retry_times=0)

    began = time.monotonic()
    with pytest.raises((EngineError, UsageError)):
        milvus_store.run(collection, ask, filter=bad)
    assert time.monotonic() - began < 10.0


@pytest.mark.parametrize(
    ("code", "message", "failure"),
    [
        (2, "service unavailable", Failure.BUSY),
        (503, "channel not available", Failure.BUSY),
        (10_000, "context canceled", Failure.BUSY),
        (10_001, "context deadline exceeded", Failure.SILENT),
        (65535, "no available shard delegator found", Failure.BUSY),
        (65535, "cannot parse expression: a == recovering", Failure.FAILED),
        (65535, TRACED, Failure.BUSY),
        (600, "segment not found[segment=470701484018121019]", Failure.BUSY),
        (65535, "fail to search: segment not found[segment=470701484018121019]", Failure.BUSY),
        (65535, "empty grpc client: find no available querycoord, check querycoord state", Failure.BUSY),
        (65535, "fail to Search, QueryNode ID=1, reason=worker(1) query failed: context canceled", Failure.BUSY),
        (65535, "fail to Query, QueryNode ID=1, reason=context deadline exceeded", Failure.BUSY),
        (1100, "invalid parameter: recovering", Failure.REFUSED),
        (100, "collection not found[collection=recovering]", Failure.REFUSED),
        (2000, "Assert => Mmap manager has not been init. at", Failure.BUSY),
        (2000, "segcore error: recovering", Failure.FAILED),
        (1, "The Input data type is inconsistent, {closed channel} field", Failure.FAILED),
        (1, "Unexpected error, message=<Cannot invoke RPC on closed channel!>", Failure.BUSY),
        (
            1,
            "[get] Retry run out of 0 retry times, message=Unexpected error, message=<Cannot invoke RPC on closed channel!>",
            Failure.BUSY,
        ),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "late", Failure.SILENT),
        (grpc.StatusCode.UNAUTHENTICATED, "recovering", Failure.REFUSED),
    ],
)
def test_a_failure_means_what_its_code_says(code: Any, message: str, failure: Failure) -> None:
    assert classify(MilvusException(code=code, message=message), sent=True, quoted='a == "recovering"') is failure


def test_the_places_in_its_source_are_no_words_of_milvus() -> None:
    assert text_of(MilvusException(code=65535, message=TRACED)) == "attempt #0: empty grpc client"


def test_a_client_that_another_thread_closed_while_it_connected_is_tried_again() -> None:
    closed = MilvusException(message="Unexpected error, message=<Cannot invoke RPC on closed channel!>")
    assert classify(closed, sent=False) is Failure.BUSY


@pytest.mark.parametrize("again", [False, True], ids=["new", "emptied and opened again"])
def test_an_empty_collection_with_the_default_index_has_no_vectors(
    milvus_store: MilvusStore, collection: str, again: bool
) -> None:
    milvus_store.create(schema(collection), Index())
    if again:
        milvus_store.upsert(collection, [Record(id=id, vector=np.ones(4, np.float32)) for id in (1, 2)])
        milvus_store.delete(collection, [1, 2])
    assert milvus_store.get(collection, [1, 2], vector=True) == []
    assert list(milvus_store.scan(collection, fields=None, vector=True)) == []


@pytest.fixture
def lite3_file(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "x.db"
    lite.release(tmp_path / "x.db")


def test_lite_3_loads_what_it_let_go(lite3_file: Path) -> None:
    with lite3.served(lite3_file) as place:
        store = MilvusStore(lambda: place)
        store.create(schema("c"), Index())
        store.upsert("c", [Record(id=1, vector=np.ones(4, np.float32))])
        store._connection.get().release_collection("c")
        assert [hit.id for hit in store.search("c", np.ones((1, 4), np.float32), limit=3)[0]] == [1]
        store._connection.get().release_collection("c")
        assert store.count("c") == 1
        store.close()
