"""The client for asyncio: it answers as the other one does, holds up no event loop, and can be cancelled at any moment."""

from __future__ import annotations

import asyncio
import contextvars
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import rmvdb
import rmvdb.aio
from rmvdb import errors
from tests.support.inprocess import TIMES, Gallery, make, vector
from tests.support.spawned import run_spawned
from tests.support.waiting import wait_until

#: Seconds of a slow call, and those of a processor for which the event loop may be held up.
SLOW, BLOCKED = 0.3, 0.005


@pytest.fixture(params=[False, True], ids=["one collection", "two collections"])
def gallery(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Gallery]:
    """Eight texts, before an upgrade and during one."""
    made = make(tmp_path, records=8, deployed=request.param)
    yield made
    made.registry.close()


@asynccontextmanager
async def connected(gallery: Gallery) -> AsyncIterator[rmvdb.aio.Client]:
    async with rmvdb.aio.Client(await asyncio.to_thread(gallery.client)) as client:
        yield client


class Awaited:
    """The client for asyncio, for tests that call a client."""

    def __init__(self, gallery: Gallery) -> None:
        self._loop = asyncio.new_event_loop()
        self._client = rmvdb.aio.Client(gallery.client())

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._client, name)
        return lambda *arguments, **options: self._loop.run_until_complete(method(*arguments, **options))

    def __enter__(self) -> Awaited:
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.run_until_complete(self._client.close())
        self._loop.close()


@pytest.fixture(params=["client", "aio"])
def client(gallery: Gallery, request: pytest.FixtureRequest) -> Iterator[Any]:
    """Either client."""
    with gallery.client() if request.param == "client" else Awaited(gallery) as client:
        yield client


# --- both clients ---------------------------------------------------------------------------------------------------------


def test_an_item_and_a_list_find_their_records_and_a_vector_where_its_model_reaches(client: Any, gallery: Gallery) -> None:
    assert client.search("t3", limit=1)[0].id == 3
    assert [hits[0].id for hits in client.search(["t1", "t5"], limit=2)] == [1, 5]
    assert {hit.id for hit in client.search("t3", limit=8, filter="id < 3")} == {1, 2}
    if len(gallery.registry.plan("texts").legs) == 1:
        assert client.search(vector=vector("v1", "t2"), model="v1", limit=3)[0].id == 2
    else:
        with pytest.raises(errors.Mismatch, match="No transform leads"):
            client.search(vector=vector("v1", "t2"), model="v1")


def test_a_write_is_found_read_and_counted_by_its_writer_and_gone_once_deleted(client: Any) -> None:
    before = client.count()
    assert client.upsert([{"id": 100, "item": "kitty", "colour": "cat"}]) == 1
    assert client.search("kitty", limit=1)[0].id == 100
    assert client.get([100])[0].fields["colour"] == "cat"
    assert [record.id for record in client.query('colour == "cat"')] == [100]
    assert client.count() == before + 1
    assert client.delete([100]) == 1
    assert client.get([100]) == []


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda client: client.search(), errors.UsageError),
        (lambda client: client.search("t1", filter="id <"), errors.FilterError),
        (lambda client: client.search("t1", limit=0), errors.UsageError),
        (lambda client: client.upsert({"id": 1}), errors.UsageError),
        (lambda client: client.delete(), errors.UsageError),
    ],
)
def test_what_is_wrong_is_refused_by_the_same_error(client: Any, call: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        call(client)


def test_a_closed_client_says_so(client: Any) -> None:
    client.close()
    with pytest.raises(errors.UsageError, match="closed; connect again"):
        client.search("t1")


# --- the event loop -------------------------------------------------------------------------------------------------------


class Engine:
    """An engine whose calls wait until the event loop has gone on."""

    def __init__(self, gallery: Gallery) -> None:
        self.asked, self.go_on = threading.Event(), threading.Event()
        #: Whether each call could go on in time.
        self.went_on: list[bool] = []
        gallery.store.before = gallery.store.looked = self.wait

    def wait(self, *_: object) -> None:
        self.asked.set()
        self.went_on.append(self.go_on.wait(20.0))

    async def answered_beside_others(self, call: Awaitable[object]) -> float:
        """Answer the call only after the loop has run something else. Return the most seconds that the loop computed at once."""
        most, done = 0.0, asyncio.ensure_future(call)
        for _ in range(20):
            while not self.asked.is_set():
                await asyncio.sleep(0.001)
            began = time.thread_time()
            await asyncio.sleep(0)
            most = max(most, time.thread_time() - began)
        self.go_on.set()
        await done
        return most


@pytest.mark.parametrize("name", ["search", "upsert", "get", "delete", "count", "query", "plan", "close"])
def test_no_call_holds_up_the_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    gallery = make(tmp_path, records=8, deployed=True, times=TIMES | {"longest_search": 60.0})

    async def computed() -> float:
        client = rmvdb.aio.Client(await asyncio.to_thread(gallery.client))
        engine, real = Engine(gallery), gallery.store.scan

        def scan(*arguments: Any, **options: Any) -> Any:
            engine.wait()
            return real(*arguments, **options)

        calls = {
            "search": lambda: client.search("t1"),
            "upsert": lambda: client.upsert({"id": 1, "item": "t1"}),
            "get": lambda: client.get([1]),
            "delete": lambda: client.delete([77]),
            "count": lambda: client.count("id > 2"),
            "query": lambda: client.query("id > 2"),
            "plan": lambda: asyncio.gather(client.plan(), client._call(engine.wait)),
            "close": lambda: asyncio.gather(client._call(engine.wait), client.close()),
        }
        if name in ("count", "query"):
            monkeypatch.setattr(gallery.store, "scan", scan)
        try:
            return await engine.answered_beside_others(calls[name]())
        finally:
            await client.close()
            assert engine.went_on
            assert all(engine.went_on)

    assert asyncio.run(computed()) < BLOCKED
    gallery.registry.close()


def test_sixty_four_searches_at_once_are_answered_by_as_many_threads_as_one_allows(gallery: Gallery) -> None:
    threads = set[str]()

    def before(call: str, _: str) -> None:
        threads.add(threading.current_thread().name)

    async def found() -> list[Any]:
        async with rmvdb.aio.Client(await asyncio.to_thread(gallery.client), pool=rmvdb.aio._pool(8)) as client:
            gallery.store.before = before
            return [hits[0].id for hits in await asyncio.gather(*(client.search(f"t{1 + n % 8}", limit=1) for n in range(64)))]

    assert asyncio.run(found()) == [1 + n % 8 for n in range(64)]
    assert 0 < len({name for name in threads if name.startswith("rmvdb-aio")}) <= 8


def test_an_embedder_sees_the_context_of_the_call(gallery: Gallery) -> None:
    asked, seen = contextvars.ContextVar("asked", default=""), list[str]()

    async def found() -> None:
        async with connected(gallery) as client:
            gallery.store.before = lambda *_: seen.append(asked.get())
            asked.set("by the caller")
            await client.search("t1", limit=1)

    asyncio.run(found())
    assert "by the caller" in seen


# --- cancelled ------------------------------------------------------------------------------------------------------------


def test_a_call_that_is_cancelled_before_it_begins_does_nothing(gallery: Gallery) -> None:
    go_on = threading.Event()

    async def cancelled() -> int:
        client = rmvdb.aio.Client(await asyncio.to_thread(gallery.client), pool=rmvdb.aio._pool(2))
        first = [asyncio.ensure_future(client._call(go_on.wait, 60.0)) for _ in range(2)]
        await asyncio.sleep(0.1)
        write = asyncio.ensure_future(client.upsert({"id": 100, "item": "kitty"}))
        await asyncio.sleep(0.1)
        write.cancel()
        with pytest.raises(asyncio.CancelledError):
            await write
        go_on.set()
        await asyncio.gather(*first)
        found = await client.get([100])
        await client.close()
        return len(found)

    assert asyncio.run(cancelled()) == 0


def test_a_write_that_is_cancelled_on_its_way_goes_on_and_hinders_no_other(gallery: Gallery) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def before(call: str, _: str) -> None:
        if call == "upsert":
            begun.set()
            go_on.wait(60.0)

    async def cancelled() -> Any:
        async with connected(gallery) as client:
            gallery.store.before = before
            write = asyncio.ensure_future(client.upsert({"id": 100, "item": "kitty", "colour": "cat"}))
            assert await asyncio.to_thread(begun.wait, 60.0)
            write.cancel()
            with pytest.raises(asyncio.CancelledError):
                await write
            go_on.set()
            await client.upsert({"id": 100, "item": "doggy", "colour": "dog"})
            return (await client.get([100]))[0].fields["colour"], (await client.search("doggy", limit=1))[0].id

    assert asyncio.run(cancelled()) == ("dog", 100)


def test_to_close_waits_for_calls_that_have_begun(gallery: Gallery) -> None:
    begun, ended = threading.Event(), list[float]()

    def slow() -> None:
        begun.set()
        time.sleep(SLOW)
        ended.append(time.monotonic())

    async def closed() -> float:
        client = rmvdb.aio.Client(await asyncio.to_thread(gallery.client))
        call = asyncio.ensure_future(client._call(slow))
        assert await asyncio.to_thread(begun.wait, 60.0)
        await client.close()
        await call
        return time.monotonic()

    at = asyncio.run(closed())
    assert len(ended) == 1
    assert ended[0] <= at


def test_calls_that_wait_when_the_client_is_closed_say_so(gallery: Gallery) -> None:
    """They raised CancelledError, though nobody had cancelled their tasks: a TaskGroup takes no notice of that."""
    begun, go_on = threading.Event(), threading.Event()

    def slow() -> None:
        begun.set()
        go_on.wait(60.0)

    async def closed() -> list[Any]:
        client = rmvdb.aio.Client(await asyncio.to_thread(gallery.client), pool=rmvdb.aio._pool(1))
        first = asyncio.ensure_future(client._call(slow))
        assert await asyncio.to_thread(begun.wait, 60.0)
        waiting = asyncio.ensure_future(client.search("t1"))
        cancelled = asyncio.ensure_future(client.search("t1"))
        await asyncio.sleep(0)
        closing = asyncio.ensure_future(client.close())
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.wait([waiting], timeout=60.0)
        go_on.set()
        return await asyncio.gather(first, waiting, cancelled, closing, return_exceptions=True)

    first, waiting, cancelled, closing = asyncio.run(closed())
    assert (first, closing) == (None, None)
    assert isinstance(waiting, errors.UsageError)
    assert "closed; connect again" in str(waiting)
    assert isinstance(cancelled, asyncio.CancelledError)


@pytest.mark.parametrize("threads", [0, "x"])
def test_a_number_of_threads_that_cannot_be_is_refused(threads: Any) -> None:
    with pytest.raises(errors.UsageError, match=r"threads (is a whole|must be)"):
        asyncio.run(rmvdb.aio.connect(threads=threads))


def test_a_client_whose_connecting_is_cancelled_is_closed(gallery: Gallery, monkeypatch: pytest.MonkeyPatch) -> None:
    made, go_on = list[rmvdb.Client](), threading.Event()

    def connect(*_: Any, **__: Any) -> rmvdb.Client:
        go_on.wait(60.0)
        made.append(gallery.client())
        return made[0]

    monkeypatch.setattr(rmvdb, "connect", connect)

    async def cancelled() -> None:
        connecting = asyncio.ensure_future(rmvdb.aio.connect())
        await asyncio.sleep(0.1)
        connecting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await connecting

    asyncio.run(cancelled())
    go_on.set()
    wait_until(lambda: made and made[0]._current_plan._stop.is_set())


def _fork(folder: Path) -> None:
    gallery = make(folder, records=8)

    async def search(client: rmvdb.aio.Client) -> None:
        await client.search("t3")

    loop = asyncio.new_event_loop()
    client = rmvdb.aio.Client(gallery.client())
    loop.run_until_complete(search(client))  # from now on its pool has an idle thread
    child = os.fork()
    if not child:
        signal.alarm(30)  # ends it
        try:
            asyncio.new_event_loop().run_until_complete(search(client))
        except errors.UsageError as exc:
            os._exit(0 if "connect in each process" in str(exc) else 1)
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    loop.run_until_complete(client.close())


def test_a_client_does_not_outlive_a_fork(tmp_path: Path) -> None:
    """Its pool would wait for a thread that the child has not."""
    run_spawned(_fork, tmp_path, seconds=120)
