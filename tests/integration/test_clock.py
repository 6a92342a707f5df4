"""The database's clock is set, or a process is paused, while others rely on leases, deadlines and graces."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import event

from rmvdb.registry import schema
from rmvdb.registry.clock import TICK
from rmvdb.registry.registry import Registry
from tests.support.clocks import DatabaseClock
from tests.support.faults import copied, drive
from tests.support.inprocess import TIMES, Gallery, make, vector
from tests.support.photos import add_gallery, add_upgrade

HOUR = 3600.0


@pytest.fixture
def gallery(tmp_path: Path) -> Iterator[Gallery]:
    """Eight texts in one batch, both collections served; a search may take 3 s."""
    made = make(tmp_path, records=8, times=TIMES | {"longest_search": 3.0})
    yield made
    made.registry.close()


def test_a_change_that_was_acknowledged_is_not_overwritten_by_a_worker_whose_lease_a_clock_set_forward_ends(
    gallery: Gallery,
) -> None:
    """Its call is on its way when the clock is set; the client must not believe that the lease is over."""
    clock, sent, written = DatabaseClock(gallery.registry), threading.Event(), threading.Event()

    def before(call: str, collection: str) -> None:
        if (call, collection) == ("upsert", gallery.task.new[0]) and threading.current_thread().name.startswith("rmvdb-batch"):
            sent.set()
            written.wait(1.5)  # it takes a while, well within its lease

    gallery.store.before = before
    worker = threading.Thread(target=lambda: gallery.worker(lease=8.0).run(gallery.task, gallery.backfill))
    worker.start()
    assert sent.wait(60)
    clock.set(HOUR)
    with gallery.client() as client:
        gallery.source.of[3] = "newer"
        client.upsert([{"id": 3, "item": "newer", "n": 1}])
        written.set()
        worker.join(60)
        assert client.get([3])[0].fields == {"n": 1}
    assert gallery.records(*gallery.task.new)[3].vector == pytest.approx(vector("v2", "newer"), abs=1e-6)
    gallery.expect_moved()


def test_a_grace_is_waited_out_though_the_clock_is_set_forward(gallery: Gallery) -> None:
    """A search that looked at the new collection before the copy, and looks at the old one 3 s later, finds every record."""
    copied(gallery)
    began = time.monotonic()
    clock = DatabaseClock(gallery.registry)
    clock.set(HOUR)
    drive(gallery, seconds=60.0)
    assert time.monotonic() - began >= gallery.task.grace


def test_a_clock_that_was_set_back_delays_no_process(gallery: Gallery) -> None:
    clock = DatabaseClock(gallery.registry)
    copied(gallery)
    clock.set(-HOUR)
    drive(gallery, seconds=60.0)
    gallery.expect_moved()


def test_a_registry_whose_commits_take_longer_than_a_tick_is_slow_and_no_more(registry: Registry, database_url: str) -> None:
    slow = Registry(database_url)
    event.listen(slow.engine, "commit", lambda _: time.sleep(1.2 * TICK))
    began, before = time.monotonic(), slow.now()
    time.sleep(1.2 * TICK)
    after, passed = slow.now(), time.monotonic() - began
    slow.close()
    assert 0.5 * TICK < after - before <= passed + TICK


@pytest.mark.parametrize("seconds", [HOUR, -HOUR])
def test_the_time_of_a_registry_goes_on_as_the_clocks_of_its_processes_do(
    registry: Registry, database_url: str, seconds: float
) -> None:
    other = Registry(database_url)
    clock = DatabaseClock(registry, other)
    began, before = time.monotonic(), registry.now()
    assert -0.6 <= other.now() - before <= time.monotonic() - began + 0.5
    clock.set(seconds)
    time.sleep(1.0)
    after, passed = other.now(), time.monotonic() - began
    assert -0.6 <= after - before <= passed + 0.5
    assert after - before > (0.5 if seconds > 0 else -0.6)
    registry.now()  # it, too, has found the jump now, and counts on from here
    at, again = time.monotonic(), registry.now()
    time.sleep(1.0)
    assert 0.5 < other.now() - again <= time.monotonic() - at + 0.5
    other.close()


def test_a_process_that_starts_after_the_clock_was_set_forward_ends_nothing_that_others_wait_for(
    registry: Registry, database_url: str
) -> None:
    """It has no clock of its own to compare the database's with."""
    clock = DatabaseClock(registry)
    add_upgrade(registry, add_gallery(registry))
    (upgrade,) = registry.upgrades()
    registry.add_batches(upgrade.id, [([1, 2], None)], first=1)
    assert registry.claim(upgrade.id, "suspended", lease=5.0, grace=0.0, copy=True) is not None
    clock.set(HOUR)
    for _ in range(3):
        fresh = Registry(database_url)
        if fresh.engine.dialect.name == "sqlite":
            DatabaseClock(fresh).set(HOUR)
        assert fresh.claim(upgrade.id, "fresh", lease=5.0, grace=0.0, copy=True) is None
        fresh.close()


def test_a_lease_ends_for_a_process_that_watches_it_though_the_clock_was_set_forward(
    registry: Registry, database_url: str
) -> None:
    add_upgrade(registry, add_gallery(registry))
    (upgrade,) = registry.upgrades()
    registry.add_batches(upgrade.id, [([1, 2], None)], first=1)
    began = time.monotonic()
    assert registry.claim(upgrade.id, "killed", lease=2.0, grace=0.0, copy=True) is not None
    clock = DatabaseClock(registry)
    clock.set(HOUR)
    while registry.claim(upgrade.id, "heir", lease=2.0, grace=0.0, copy=True) is None:
        assert time.monotonic() - began < 60.0
        time.sleep(0.1)
    assert time.monotonic() - began > 2.0 - TICK


def test_a_jump_is_reported(registry: Registry, caplog: pytest.LogCaptureFixture) -> None:
    clock = DatabaseClock(registry)
    registry.now()
    clock.set(HOUR)
    registry.now()
    registry.now()
    (told,) = [record.message for record in caplog.records if "clock" in record.message]
    assert "3,600 s ahead" in told


def test_the_revision_that_calls_compare_is_that_of_the_newest_migration() -> None:
    from rmvdb.registry.tables import REVISION

    assert schema.head() == REVISION
