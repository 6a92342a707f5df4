"""The sample that clients keep of their queries: bounded, uniform, forgotten in time, however many clients write it."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from sqlalchemy import event, text

from rmvdb.errors import UnknownName
from rmvdb.registry.codec import LARGEST_ITEM, item_to_row
from rmvdb.registry.kept_queries import AskedQuery
from rmvdb.registry.registry import Registry
from rmvdb.registry.tables import GalleryRow
from rmvdb.serving.query_keeper import HELD, QueryKeeper
from tests.support.photos import add_gallery, at_once
from tests.support.waiting import wait_until

CLIENTS, EACH, MOST = 8, 400, 320
#: A chi-square of 7 degrees of freedom is above this once in a thousand times.
ONCE_IN_A_THOUSAND = 24.3


def asked(item: object, *, priority: float = 0.5, days: float = 0.0) -> AskedQuery:
    """Return a query as a client writes it, asked so many days ago."""
    row = item_to_row(item)
    assert row is not None
    return AskedQuery(priority=priority, kind=row[0], payload=row[1], age=days * 86_400)


def kept(registry: Registry, *, days: float = 30.0, limit: int | None = None) -> list[Any]:
    return [query.item for query in registry.kept_queries("photos", max_age_days=days, limit=limit)]


def chi_square(counts: np.ndarray[Any, Any]) -> float:
    expected = counts.sum() / len(counts)
    return float(((counts - expected) ** 2 / expected).sum())


def test_many_clients_keep_a_bounded_sample_in_which_each_query_has_the_same_chance(
    registry: Registry, gallery: GalleryRow
) -> None:
    """Eight clients write at once, one of them three times as often. Neither it nor the beginning nor the end weighs more."""

    def ask(client: int) -> None:
        keeper = QueryKeeper("photos", registry=registry, most=MOST, days=30.0, draws=random.Random(client))
        times = 3 if client == 0 else 1
        for part in range(4):
            for number in range(part * EACH * times // 4, (part + 1) * EACH * times // 4):
                keeper.offer([{"client": client, "when": number / (EACH * times)}])
            keeper._write()
            assert registry.count_queries("photos").count <= MOST
        keeper.close()

    at_once(CLIENTS, ask)
    found = kept(registry)
    assert len(found) == MOST
    when = np.histogram([each["when"] for each in found], bins=8, range=(0, 1))[0]
    clients = np.bincount([each["client"] for each in found], minlength=CLIENTS)
    assert chi_square(when) < ONCE_IN_A_THOUSAND
    fair = MOST * np.array([3, *[1] * (CLIENTS - 1)]) / (CLIENTS + 2)
    assert ((clients - fair) ** 2 / fair).sum() < ONCE_IN_A_THOUSAND


def test_fewer_queries_are_a_uniform_sample_too(registry: Registry, gallery: GalleryRow) -> None:
    draws = random.Random(5)
    registry.keep_queries("photos", [asked(n, priority=draws.random()) for n in range(2000)], most=1600, days=30)
    some = np.array(kept(registry, limit=200))
    assert len(some) == 200
    assert chi_square(np.histogram(some, bins=8, range=(0, 2000))[0]) < ONCE_IN_A_THOUSAND


def test_a_client_learns_which_queries_would_not_be_kept(registry: Registry, gallery: GalleryRow) -> None:
    queries = [asked(f"q{n}", priority=n / 10) for n in range(1, 6)]
    assert registry.keep_queries("photos", queries[:2], most=3, days=30) == 1.0
    assert registry.keep_queries("photos", queries[2:], most=3, days=30) == 0.3
    assert kept(registry) == ["q1", "q2", "q3"]
    assert registry.keep_queries("photos", [], most=2, days=30) == 0.2  # a smaller bound counts at once
    assert registry.count_queries("photos").count == 2


def test_a_query_that_is_too_old_is_neither_read_nor_kept(registry: Registry, gallery: GalleryRow) -> None:
    registry.keep_queries("photos", [asked("old", priority=0.1, days=8), asked("new", days=6)], most=10, days=30)
    assert kept(registry, days=7) == ["new"]
    assert round(registry.count_queries("photos").oldest_days or 0, 2) == 8
    counts = registry.collect(older=3600, spared=set(), queries_days=7, remove=False)
    assert counts["kept queries that are too old"] == 1
    assert kept(registry) == ["old", "new"]
    registry.keep_queries("photos", [asked("newest", priority=0.9)], most=10, days=7)
    assert kept(registry) == ["new", "newest"]
    registry.collect(older=3600, spared=set(), queries_days=5, remove=True)
    assert kept(registry) == ["newest"]


def test_a_gallery_takes_its_own_queries_along_and_leaves_all_others(registry: Registry, gallery: GalleryRow) -> None:
    add_gallery(registry, "pictures")
    for name in ("photos", "pictures"):
        registry.keep_queries(name, [asked(name)], most=10, days=30)
    assert registry.clear_queries("photos") == 1
    assert (kept(registry), registry.count_queries("photos").oldest_days) == ([], None)
    registry.keep_queries("photos", [asked("again")], most=10, days=30)
    registry.remove_gallery("pictures")
    assert kept(registry) == ["again"]
    with pytest.raises(UnknownName):
        registry.keep_queries("pictures", [asked("late")], most=10, days=30)


@pytest.mark.parametrize(
    "item", ["red shoes", "a\0b \udce9 \u202e", b"\x00\xff", Path("/photos/1.jpg"), {"id": 7, "z": [0.5]}, 7]
)
def test_an_item_comes_back_as_it_was(registry: Registry, gallery: GalleryRow, item: object) -> None:
    registry.keep_queries("photos", [asked(item)], most=10, days=30)
    assert kept(registry) == [item]
    assert type(kept(registry)[0]) is type(item) or isinstance(item, Path)


def test_a_path_is_kept_so_that_a_process_in_another_folder_finds_it() -> None:
    assert item_to_row(Path("query.jpg")) == ("path", str(Path("query.jpg").absolute()).encode())


@pytest.mark.parametrize(
    "item",
    [
        "", "x" * (LARGEST_ITEM + 1), "é" * (LARGEST_ITEM - 1), b"x" * (LARGEST_ITEM + 1), np.zeros(3), (1, 2),
        {"z": np.zeros(3)}, {1: 2}, float("nan"), True, object(), Image.new("RGB", (2, 2)),
    ],
)  # fmt: skip
def test_an_item_that_a_row_cannot_hold_is_not_kept(item: object) -> None:
    assert item_to_row(item) is None


WRITES = """
import random, sys
from rmvdb.registry.registry import Registry
from rmvdb.registry.kept_queries import AskedQuery
registry = Registry(sys.argv[1])
while True:
    batch = [AskedQuery(priority=random.random(), kind="text", payload=b"words", age=0.0) for _ in range(40)]
    registry.keep_queries("photos", batch, most=10_000, days=30)
    print("wrote", flush=True)
"""


def test_a_client_that_is_killed_while_it_writes_leaves_whole_writes_only(
    registry: Registry, gallery: GalleryRow, database_url: str
) -> None:
    with subprocess.Popen([sys.executable, "-c", WRITES, database_url], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        for _ in range(5):
            assert process.stdout.readline()
        process.kill()
    held = registry.count_queries("photos").count
    assert held >= 200
    assert held % 40 == 0
    assert registry.keep_queries("photos", [asked("next", priority=0.0)], most=100, days=30) < 1.0
    assert (len(kept(registry)), kept(registry)[0]) == (100, "next")


def test_a_client_makes_no_statement_for_most_of_its_queries(registry: Registry, gallery: GalleryRow) -> None:
    statements: list[str] = []

    def note(*args: Any) -> None:
        if not args[2].startswith(("BEGIN", "SELECT clock", "UPDATE clock")):  # these depend on how long ago the last call was
            statements.append(args[2])

    event.listen(registry.engine, "before_cursor_execute", note)
    each = 4 if registry.engine.dialect.name == "sqlite" else 5  # PostgreSQL: the lock, too
    keeper = QueryKeeper("photos", registry=registry, most=20, days=30.0, draws=random.Random(3))
    for number in range(200):
        keeper.offer([f"q{number}"])
    assert statements == []  # it writes once a minute
    keeper._write()
    assert len(statements) == each, statements
    statements.clear()
    before = keeper._bar
    keeper.offer([f"r{number}" for number in range(100)])
    assert len(keeper._held) < 30  # the rest would not be kept
    keeper.close()
    assert len(statements) == each, statements
    assert keeper._bar < before
    assert registry.count_queries("photos").count == 20


def test_many_queries_are_written_before_the_minute_is_over_and_the_memory_is_bounded(
    registry: Registry, gallery: GalleryRow
) -> None:
    keeper = QueryKeeper("photos", registry=registry, most=10_000, days=30.0)
    keeper.offer([f"q{number}" for number in range(HELD // 2)])
    wait_until(lambda: registry.count_queries("photos").count == HELD // 2, seconds=30)
    keeper.offer([f"r{number}" for number in range(10 * HELD)])
    keeper.offer(["x" * LARGEST_ITEM] * 100)
    assert len(keeper._held) <= HELD
    assert keeper._bytes <= 4 * 1024 * 1024
    keeper.close()


def test_queries_outlast_a_registry_that_is_away_for_a_while(registry: Registry, gallery: GalleryRow) -> None:
    keeper = QueryKeeper("photos", registry=registry, most=100, days=30.0)
    keeper.offer(["asked before"])
    with registry.engine.connect() as other:
        other.execute(text("SELECT 1"))
        if registry.engine.dialect.name == "postgresql":
            other.execute(text("LOCK TABLE kept_queries"))
        keeper._write()  # in vain
        keeper.offer(["asked meanwhile"])
        other.rollback()
    keeper.close()
    assert sorted(kept(registry)) == ["asked before", "asked meanwhile"]
