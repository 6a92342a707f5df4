"""A call that ends the engine: what it was given stays, what came with it is written, and it is not sent for ever."""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rmvdb.engines import lite
from rmvdb.engines.lite import lease
from rmvdb.engines.milvus import MilvusStore, writing
from rmvdb.errors import EngineError, EngineKilled
from rmvdb.protocols import always
from rmvdb.types import Field, Id, IdType, Index, Metric, Record, Schema
from tests.support.lite_processes import processes

CAPTION = Field(name="caption", type="VARCHAR", params={"max_length": 20})
SCHEMA = Schema(collection="c", dim=4, metric=Metric.COSINE, id_type=IdType.INT64, fields=(CAPTION,), dynamic=True)
#: Ends Lite 2.5, and a Milvus server before 2.4, whatever is in the collection.
FATAL = "id % 0 == 1"


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    file = tmp_path / "x.db"
    yield file
    lite.release(file)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A line for each owner of a file that is started from here on."""
    started, real = list[str](), lease._start_owner

    def start(*args: Any, **options: Any) -> str:
        started.append(real(*args, **options))
        return started[-1]

    monkeypatch.setattr(lease, "_start_owner", start)
    return started


@pytest.fixture
def store(path: Path, started: list[str]) -> Iterator[MilvusStore]:
    """A store on Lite 2.5 as an application has one, with 101 records of edition 0."""
    store = MilvusStore(functools.partial(lite.address, path, idle=2.0), gate=functools.partial(lite.gate, path), patience=30.0)
    store.create(SCHEMA, Index())
    store.upsert("c", [record(id) for id in [*range(100), 1000]])
    yield store
    store.close()


def record(id: Id, edition: int = 0, caption: str = "a") -> Record:
    return Record(id=id, vector=np.array([1, 2, 3, id], np.float32), fields={"caption": caption, "edition": edition})


def editions(store: MilvusStore) -> dict[Id, int]:
    return {each.id: each.fields["edition"] for page in store.scan("c", fields=None, vector=True) for each in page}


Poison = Callable[[set[Id]], None]


@pytest.fixture
def poison(path: Path, monkeypatch: pytest.MonkeyPatch) -> Poison:
    """Lets these records end the engine as Lite 2.5's upsert does: once it has deleted what was there, and before it inserts.

    (What a missing value does to it hangs on what lies in its memory.)
    """
    real, ids = writing._write, set[Id]()

    def write(client: Any, *, collection: str, rows: list[dict[str, Any]], engine: Any) -> None:
        if ids & {row["id"] for row in rows if row["edition"]}:
            client.delete(collection, ids=[row["id"] for row in rows], retry_times=0)
            client.query(collection, filter=FATAL, output_fields=["id"], retry_times=0)
        real(client, collection=collection, rows=rows, engine=engine)

    monkeypatch.setattr(writing, "_write", write)
    return ids.update


@pytest.mark.parametrize("bad", [{57}, {0}, {99}, {12, 13, 80}], ids=["one", "first", "last", "some"])
def test_records_that_end_the_engine_are_refused_by_name_and_the_others_written(
    store: MilvusStore, poison: Poison, bad: set[Id]
) -> None:
    poison(bad)
    with pytest.raises(EngineKilled, match=r"2\.5\.1 ended 2 times at the write of . records? of 'c'") as refused:
        store.upsert("c", [record(id, 1) for id in range(-10, 100)])
    assert set(refused.value.ids) == bad
    assert all(repr(id) in str(refused.value) for id in bad)
    assert editions(store) == {id: int(id not in bad) for id in range(-10, 100)} | {1000: 0}
    hits = store.search("c", record(57).vector[None], limit=200, strong=True)[0]  # type: ignore[index]
    assert {hit.id for hit in hits} == {*range(-10, 100), 1000}


def test_a_value_that_no_check_foresaw_costs_no_record(store: MilvusStore) -> None:
    """Lite 2.5 reads texts that are not there."""
    rows = [writing.row_of(SCHEMA, record(id, 1)) | {"caption": None} for id in range(3)]
    refused = writing._Refused()
    writing._replace(store, SCHEMA, rows, always, refused)
    with pytest.raises(EngineKilled) as told:
        refused.tell(store, SCHEMA, 3)
    assert told.value.ids == (0, 1, 2)
    assert editions(store) == dict.fromkeys([*range(100), 1000], 0)


def test_records_that_a_fatal_call_has_deleted_are_put_back_before_anything_else_is_tried(
    store: MilvusStore, poison: Poison
) -> None:
    """Its lease ends meanwhile, say: one attempt, and what puts back."""
    poison({7})
    permits = iter([None, None])

    def permit() -> None:
        if next(permits, "over"):
            raise TimeoutError("over")

    with pytest.raises(TimeoutError):
        store.upsert("c", [record(id, 1) for id in range(100)], permit=permit)
    assert editions(store) == dict.fromkeys([*range(100), 1000], 0)


def fatal(store: MilvusStore, kind: str) -> Any:
    """Return a search or a query whose filter ends the engine."""

    def ask(client: Any) -> Any:
        if kind == "query":
            return client.query("c", filter=FATAL, output_fields=["id"], retry_times=0)
        return client.search("c", data=[[1.0, 2, 3, 4]], anns_field="vector", filter=FATAL, limit=3, retry_times=0)

    return store.run("c", ask, filter=FATAL, gated=True)


@pytest.mark.parametrize("kind", ["query", "search"])
def test_a_filter_that_ends_the_engine_twice_is_not_sent_again(store: MilvusStore, started: list[str], kind: str) -> None:
    before = len(started)
    with pytest.raises(EngineKilled, match=r"ended 2 times during a call on 'c' with the filter 'id % 0 == 1', which is not"):
        fatal(store, kind)
    assert len(editions(store)) == 101
    assert len(started) - before == 2


def test_a_call_that_finds_the_engine_dead_has_not_ended_it(store: MilvusStore, path: Path) -> None:
    for _ in range(3):
        os.kill(processes(path)["server"], signal.SIGKILL)
        time.sleep(0.3)
        assert store.count("c") == 101


def test_others_search_on_while_one_client_sends_a_call_that_ends_the_engine(store: MilvusStore) -> None:
    over, asked = threading.Event(), list[int]()

    def search() -> None:
        while not over.is_set():
            asked.append(len(store.search("c", record(1).vector[None], limit=10)[0]))  # type: ignore[index]

    with ThreadPoolExecutor() as pool:
        others = [pool.submit(search) for _ in range(3)]
        for _ in range(4):
            with pytest.raises(EngineKilled):
                fatal(store, "query")
        over.set()
        for other in others:
            other.result()
    assert set(asked) == {10}


def test_a_call_that_stored_a_part_and_says_that_all_is_well_fails_and_loses_nothing(
    store: MilvusStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lite 2.5 deletes first, and stops at a row that it has no memory for."""
    client, rows = store._connection.get(), list[int]()
    real = client.upsert

    def half(collection: str, data: list[dict[str, Any]], **options: Any) -> Any:
        if rows:
            return real(collection, data, **options)
        rows.append(len(data))
        client.delete(collection, ids=[row["id"] for row in data], retry_times=0)
        return real(collection, data[:2], **options)

    monkeypatch.setattr(client, "upsert", half)
    with pytest.raises(EngineError, match="wrote 2 of 5 records of 'c'; look at its memory and disk"):
        store.upsert("c", [record(id, edition=1) for id in range(5)])
    assert [each.id for each in store.get("c", list(range(5)))] == list(range(5))


def test_a_record_that_was_written_before_the_engine_ended_is_not_named_as_unwritten(
    store: MilvusStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = writing._write

    def write(client: Any, **options: Any) -> None:
        real(client, **options)
        raise EngineKilled("it ended")

    monkeypatch.setattr(writing, "_write", write)
    store.upsert("c", [record(3, edition=1)])
    assert store.get("c", [3])[0].fields == record(3, edition=1).fields
