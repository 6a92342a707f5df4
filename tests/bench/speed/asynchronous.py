"""Searches of `rmvdb.aio`, 64 at once, against as many threads of the other client; and how long the event loop is held up."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import rmvdb.aio
from tests.bench.speed.row import Options, Row, counted, quantile, spread
from tests.bench.speed.world import World

AT_ONCE = 64
#: Rounds of each side, and the share of the calls that each of the searchers makes in one.
ROUNDS, FEWER = 6, 32


def rows(made: World, options: Options, size: str) -> Iterator[Row]:
    """Measure both sides in turns."""
    rates: tuple[list[float], list[float]] = ([], [])
    longest: list[float] = []
    each, starts = max(1, options.calls // FEWER), itertools.cycle(range(len(made.queries)))
    with ThreadPoolExecutor(rmvdb.aio.THREADS) as pool, ThreadPoolExecutor(AT_ONCE) as callers:
        client = rmvdb.aio.Client(made.client, pool=pool)

        def search(_: int) -> None:
            for _ in range(each):
                made.client.search(vector=made.queries[next(starts)], model="v2", limit=10)

        async def searching() -> None:
            for _ in range(each):
                await client.search(vector=made.queries[next(starts)], model="v2", limit=10)

        async def all_of_them() -> None:
            await asyncio.gather(*(searching() for _ in range(AT_ONCE)))

        def asynchronous() -> None:
            longest.append(_longest_callback(lambda: asyncio.run(all_of_them())))

        for _ in range(ROUNDS):
            for side, call in enumerate((asynchronous, lambda: list(callers.map(search, range(AT_ONCE))))):
                began = time.perf_counter()
                call()
                rates[side].append(AT_ONCE * each / (time.perf_counter() - began))
    ours, theirs = (quantile(side, 0.5) for side in rates)
    yield Row(
        name=f"aio, {AT_ONCE} searches at once, {size}, {os.cpu_count()} cores",
        ratio=ours / theirs,
        target=1.0,
        better="higher",
        unit="searches/s",
        ours=ours,
        ours_spread=spread(rates[0]),
        against=f"{AT_ONCE} threads",
        theirs=theirs,
        theirs_spread=spread(rates[1]),
    )
    yield counted("aio, longest time that the event loop is held up", longest, target=5.0, unit="ms of a processor", share=1.0)


def _longest_callback(run: Callable[[], None]) -> float:
    """Return the most milliseconds of a processor that one callback of an event loop takes meanwhile.

    Of a processor: on a busy machine a callback waits for a core. The tests show that none waits for anything else.
    """
    longest, real = 0.0, asyncio.Handle._run

    def timed(handle: asyncio.Handle) -> None:
        nonlocal longest
        began = time.thread_time()
        real(handle)
        longest = max(longest, time.thread_time() - began)

    asyncio.Handle._run = timed  # type: ignore[method-assign]
    try:
        run()
    finally:
        asyncio.Handle._run = real  # type: ignore[method-assign]
    return 1000 * longest
