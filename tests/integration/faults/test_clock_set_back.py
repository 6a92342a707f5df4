"""The database's clock is set back."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from rmvdb.types import Phase
from tests.support.clocks import DatabaseClock
from tests.support.faults import copied, drive
from tests.support.inprocess import Gallery


def test_no_epoch_waits_for_a_client_that_was_seen_before_the_clock_was_set_back(gallery: Gallery) -> None:
    clock, epoch = DatabaseClock(gallery.registry), gallery.registry.plan("texts").epoch
    gallery.registry.refresh("texts", client="killed", holds=epoch - 1, ready=epoch - 1, trouble="")
    clock.set(-600)
    with gallery.client() as client, ThreadPoolExecutor(1) as pool:
        pool.submit(client.upsert, [{"id": 3, "item": "newer", "n": 1}]).result(timeout=60)


def test_a_batch_that_was_copied_before_the_clock_was_set_back_waits_for_one_more_grace(gallery: Gallery) -> None:
    clock = DatabaseClock(gallery.registry)
    copied(gallery)
    clock.set(-3600)
    began = time.monotonic()
    drive(gallery, seconds=60.0)
    assert time.monotonic() - began >= gallery.task.grace
    gallery.expect_moved()


def test_a_conductor_that_was_killed_before_the_clock_was_set_back_is_waited_for_no_longer(
    gallery: Gallery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rmvdb.upgrade.leadership.LEADER_LEASE", 1.0)
    clock = DatabaseClock(gallery.registry)
    gallery.registry.lead(gallery.upgrade.id, "killed", 1.0)
    clock.set(-3600)
    conductor = gallery.conductor()
    timer = threading.Timer(60.0, conductor.stop.set)
    timer.start()
    row = conductor.advance(gallery.registry.upgrade(gallery.upgrade.id), gallery.worker())
    assert row.phase == Phase.CUT_OVER
