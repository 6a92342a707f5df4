"""The client for asyncio applications: the names, arguments and answers of `rmvdb.connect` and of its client.

import rmvdb.aio

async with await rmvdb.aio.connect(gallery="photos") as client:
    hits = await client.search(Path("query.jpg"), limit=10)

Each call runs in a thread, so that the event loop goes on meanwhile. The code beneath is that of `rmvdb.Client`.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

import rmvdb
from rmvdb import errors
from rmvdb.canonical.arguments import whole

if TYPE_CHECKING:
    from rmvdb.types import Hit, Id, Item, Record, ServingPlan

__all__ = ["Client", "connect"]
R = TypeVar("R")

#: Calls of a client that run at the same time. A thread is made for a call that finds none free.
THREADS = 64


async def connect(
    config: str | Path | None = None, *, gallery: str | None = None, trust: bool = False, threads: int = THREADS
) -> Client:
    """Connect to a gallery as `rmvdb.connect` does. `threads`: how many calls run at the same time. More wait for their turn.

    Raises:
        ConfigError: a setting is wrong.
        UsageError: `threads` is not a whole number of at least 1.
        UnknownName: there is no such gallery.
        RegistryUnavailable: the database cannot be reached.
        EngineUnavailable: the vector engine cannot be reached.
    """
    pool = _pool(whole("threads", threads, least=1))
    connecting = pool.submit(rmvdb.connect, config, gallery=gallery, trust=trust)
    try:
        return Client(await asyncio.shield(asyncio.wrap_future(connecting)), pool=pool)
    except asyncio.CancelledError:
        pool.submit(_close, connecting)  # in a thread: it may have to wait until the client is there
        pool.shutdown(wait=False)
        raise
    except BaseException:
        pool.shutdown(wait=False)
        raise


def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=threads, thread_name_prefix="rmvdb-aio")


def _close(connecting: Future[rmvdb.Client]) -> None:
    if connecting.exception() is None:
        connecting.result().close()


class Client:
    """Search, read and write one gallery from an event loop. Make one with `rmvdb.aio.connect`.

    If a call is cancelled before it has begun, it does nothing. A call that has begun goes on in its thread, and its answer is
    dropped: a write may be done, or not. A repeated write changes nothing.
    """

    def __init__(self, client: rmvdb.Client, *, pool: ThreadPoolExecutor | None = None) -> None:
        """Take a client, and the threads that call it. `close` closes both."""
        self._client, self._pool = client, pool or _pool(THREADS)
        self._closed = False
        self.gallery, self.name = client.gallery, client.name

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Wait for the calls that have begun, and leave as `rmvdb.Client.close` does. The others raise UsageError."""
        self._closed = True
        await asyncio.to_thread(self._end)

    def _end(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._client.close()

    async def _call(self, method: Callable[..., R], *arguments: Any, **options: Any) -> R:
        closed = errors.UsageError(f"This client of {self.gallery!r} is closed; connect again")
        if self._closed:
            raise closed
        self._client.expect_usable()  # in a forked child the pool has no threads, and waits for them
        # With the caller's context, as asyncio.to_thread does: an embedder may look at it.
        call = self._pool.submit(functools.partial(contextvars.copy_context().run, method, *arguments, **options))
        try:
            return await asyncio.wrap_future(call)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._closed and call.cancelled() and not (task and task.cancelling()):
                raise closed from None  # `close` dropped the call: its task was not cancelled
            raise

    async def plan(self) -> ServingPlan:
        """Return the serving plan in force."""
        return await self._call(lambda: self._client.plan)

    @overload
    async def search(
        self,
        item: list[Item],
        *,
        vector: Any = ...,
        model: str | None = ...,
        limit: int = ...,
        offset: int = ...,
        filter: str | None = ...,
        output_fields: Sequence[str] = ...,
        consistency: Literal["", "Bounded", "Strong"] = ...,
        rescore: int | None = ...,
    ) -> list[list[Hit]]: ...
    @overload
    async def search(
        self,
        item: Item = ...,
        *,
        vector: Any = ...,
        model: str | None = ...,
        limit: int = ...,
        offset: int = ...,
        filter: str | None = ...,
        output_fields: Sequence[str] = ...,
        consistency: Literal["", "Bounded", "Strong"] = ...,
        rescore: int | None = ...,
    ) -> list[Hit]: ...

    async def search(
        self,
        item: Item = None,
        *,
        vector: Any = None,
        model: str | None = None,
        limit: int = 10,
        offset: int = 0,
        filter: str | None = "",
        output_fields: Sequence[str] = (),
        consistency: Literal["", "Bounded", "Strong"] = "",
        rescore: int | None = None,
    ) -> list[Hit] | list[list[Hit]]:
        """Return the nearest records of an item, nearest first, as `rmvdb.Client.search` does."""
        return await self._call(
            self._client.search,
            item,
            vector=vector,
            model=model,
            limit=limit,
            offset=offset,
            filter=filter,
            output_fields=output_fields,
            consistency=consistency,
            rescore=rescore,
        )

    async def get(self, ids: Id | Iterable[Id], *, output_fields: Sequence[str] = ("*",)) -> list[Record]:
        """Return the records of these ids that exist, as `rmvdb.Client.get` does."""
        return await self._call(self._client.get, ids, output_fields=output_fields)

    async def query(
        self, filter: str | None = "", *, limit: int = 100, offset: int = 0, output_fields: Sequence[str] = ("*",)
    ) -> list[Record]:
        """Return records that match a filter, in ascending id order, as `rmvdb.Client.query` does."""
        return await self._call(self._client.query, filter, limit=limit, offset=offset, output_fields=output_fields)

    async def count(self, filter: str | None = "") -> int:
        """Return how many records match. A record in several collections counts once."""
        return await self._call(self._client.count, filter)

    async def upsert(self, records: Mapping[str, Any] | Iterable[Mapping[str, Any]]) -> int:
        """Write a record, or several, as `rmvdb.Client.upsert` does. Return how many ids were written."""
        return await self._call(self._client.upsert, records)

    async def delete(self, ids: Id | Iterable[Id] | None = None, *, filter: str | None = "") -> int:
        """Remove records by id, or all that match a filter, as `rmvdb.Client.delete` does."""
        return await self._call(self._client.delete, ids, filter=filter)
