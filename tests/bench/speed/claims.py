"""A claim and its end by 16 workers on PostgreSQL, against two bare statements that do the same, in short and long work lists."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import psycopg

from rmvdb.registry.codec import pack_ids
from rmvdb.registry.registry import Registry
from tests.bench.speed.row import Options, Row, compared
from tests.support.migrated import migrate
from tests.support.photos import add_gallery, add_upgrade
from tests.support.postgres import Postgres

WORKERS = 16
#: Batches that each worker claims and ends, each time.
EACH = 4
CLAIM = """UPDATE batches SET state = 'claimed', worker = %s, token = token + 1 WHERE id = (SELECT id FROM batches
WHERE upgrade_id = %s AND state = 'pending' ORDER BY priority LIMIT 1 FOR UPDATE SKIP LOCKED) RETURNING id, token, ids"""
END = "UPDATE batches SET state = 'copied', copied_at = 1 WHERE id = %s AND token = %s RETURNING id"


def measure(options: Options) -> Iterator[Row]:
    """Measure work lists of few batches and of `records`."""
    postgres = Postgres()
    try:
        taken = list[float]()
        for batches in (WORKERS * EACH, max(options.records, WORKERS * EACH)):
            url = postgres.database()
            migrate(url)
            registry = Registry(url, patience=60.0)
            upgrade = add_upgrade(registry, add_gallery(registry)).id
            ours, theirs = _times(registry, url.replace("+psycopg", ""), upgrade, batches, rounds=max(2, options.calls // 40))
            registry.close()
            name = f"claim and end of a batch, {WORKERS} workers, {batches:,} batches"
            yield compared(name, ours, theirs, against="two bare statements", target=3.0)
            taken = taken or ours
        name = f"the same, {batches:,} batches against {WORKERS * EACH}"
        yield compared(name, ours, taken, against="few batches", target=1.2)
    finally:
        postgres.remove()


def _times(registry: Registry, address: str, upgrade: int, batches: int, *, rounds: int) -> tuple[list[float], list[float]]:
    """Let all workers claim and end batches at once, each side in turns. Return milliseconds of each claim and its end."""
    local, opened = threading.local(), contextlib.ExitStack()

    def bare() -> None:
        if not hasattr(local, "connection"):
            local.connection = opened.enter_context(psycopg.connect(address, autocommit=True))
        found = local.connection.execute(CLAIM, ("w", upgrade)).fetchone()
        assert local.connection.execute(END, found[:2]).fetchone()

    def ours() -> None:
        batch = registry.claim(upgrade, "w", lease=60.0, grace=3600.0, copy=True)
        assert batch is not None
        registry.copied(batch, requeue=[], aside={})

    times: tuple[list[float], list[float]] = ([], [])
    with opened, psycopg.connect(address, autocommit=True) as admin, ThreadPoolExecutor(WORKERS) as workers:
        _list(admin, upgrade, batches)
        for number in range(-1, rounds):
            for side, act in enumerate((ours, bare)):
                each = list(workers.map(lambda _, act=act: _timed(act), range(WORKERS)))
                if number >= 0:
                    times[side].extend(took for some in each for took in some)
                admin.execute("UPDATE batches SET state = 'pending', worker = NULL, lease_until = NULL WHERE state = 'copied'")
    return times


def _timed(act: Callable[[], None]) -> list[float]:
    took = []
    for _ in range(EACH):
        began = time.perf_counter()
        act()
        took.append(1000 * (time.perf_counter() - began))
    return took


def _list(admin: psycopg.Connection[tuple[object, ...]], upgrade: int, batches: int) -> None:
    admin.execute(
        "INSERT INTO batches (upgrade_id, priority, ids, count, state, token) "
        "SELECT %s, number, %s, 3, 'pending', 0 FROM generate_series(1, %s) AS number",
        (upgrade, pack_ids([1, 2, 3]), batches),
    )
    admin.execute("ANALYZE batches")
