"""Batches are moved while the rest of the work list is still being made."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rmvdb import errors
from rmvdb.types import BatchState, Record
from rmvdb.upgrade import sorted_ids, work_list
from tests.support.inprocess import Crash, Gallery, make


@pytest.fixture
def gallery(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gallery]:
    """Forty texts, both collections served, nothing listed; ten records are sorted, and a batch of ten is added, at a time."""
    made = make(tmp_path)
    made.registry.discard_list(made.upgrade.id)
    made.registry.set_upgrade(made.upgrade.id, listed=False)
    monkeypatch.setattr(sorted_ids, "RUN", 10)
    monkeypatch.setattr(work_list, "BATCHES_AT_ONCE", 1)
    yield made
    made.registry.close()


def after_each_page(gallery: Gallery, monkeypatch: pytest.MonkeyPatch, act: Callable[[int], None]) -> None:
    """Call `act` with the number of records that were read of the old collection, after each ten."""
    real = gallery.store.scan

    def scan(collection: str, **options: Any) -> Iterator[list[Record]]:
        if collection != "texts_v1" or "ahead" not in options:
            yield from real(collection, **options)
            return
        read = 0
        for page in real(collection, **options | {"page": 10}):
            yield page
            act(read := read + len(page))

    monkeypatch.setattr(gallery.store, "scan", scan)


def wait_for(gallery: Gallery, state: BatchState) -> None:
    """Wait until a batch is in that state."""
    end = time.monotonic() + 60.0
    while state not in gallery.registry.counts(gallery.upgrade.id):
        assert time.monotonic() < end, f"no batch is {state}"
        time.sleep(0.01)


def advance(gallery: Gallery) -> None:
    """As another process leads the upgrade to its end."""
    gallery.conductor().advance(gallery.registry.upgrade(gallery.upgrade.id), gallery.worker())


def test_the_first_batch_is_moved_while_the_rest_is_still_listed(gallery: Gallery, monkeypatch: pytest.MonkeyPatch) -> None:
    moved_before: list[bool] = []

    def act(read: int) -> None:
        if read == 20:  # the first ten are a batch by now
            wait_for(gallery, BatchState.RETIRED)
            moved_before.append(not gallery.registry.upgrade(gallery.upgrade.id).listed)

    after_each_page(gallery, monkeypatch, act)
    advance(gallery)
    assert moved_before == [True]
    gallery.expect_moved()


@pytest.mark.parametrize("until", [0.5, 1.0])
def test_a_list_that_is_complete_when_the_worker_asks_is_worked_on(gallery: Gallery, until: float) -> None:
    def grows() -> bool:
        work_list.list_work(gallery.conductor(), gallery.registry.upgrade(gallery.upgrade.id))
        return False

    gallery.worker().run(gallery.task, gallery.backfill, until=until, grows=grows)
    assert until <= gallery.registry.progress(gallery.upgrade.id).t < until + 0.26  # by batches of ten


def test_a_listing_that_dies_half_way_is_made_again_of_what_is_left(gallery: Gallery, monkeypatch: pytest.MonkeyPatch) -> None:
    died: list[int] = []

    def act(read: int) -> None:
        if read == 30 and not died:
            wait_for(gallery, BatchState.RETIRED)
            died.append(read)
            raise Crash("while it lists")

    after_each_page(gallery, monkeypatch, act)
    with pytest.raises(Crash):
        advance(gallery)
    held = gallery.held()
    assert set(held["old"]) | set(held["new"]) == set(gallery.source.of)
    advance(gallery)
    gallery.expect_moved()
    assert gallery.registry.progress(gallery.upgrade.id).total == 40


def test_a_quarantined_record_is_not_listed_again(gallery: Gallery, monkeypatch: pytest.MonkeyPatch) -> None:
    gallery.source.of[5], died = "broken", list[int]()

    def act(read: int) -> None:
        if read == 40 and not died:
            died.append(read)
            wait_for(gallery, BatchState.COPIED)
            while not gallery.registry.quarantined(gallery.upgrade.id):
                time.sleep(0.01)
            raise Crash("once a record is quarantined")

    after_each_page(gallery, monkeypatch, act)
    with pytest.raises(Crash):
        advance(gallery)
    gallery.conductor().list_work(gallery.registry.upgrade(gallery.upgrade.id))
    assert 5 not in gallery.registry.listed_ids(gallery.upgrade.id)
    assert [row.record for row in gallery.registry.quarantined(gallery.upgrade.id)] == ["5"]


def test_what_ends_the_listing_ends_the_upgrade_with_it(gallery: Gallery, monkeypatch: pytest.MonkeyPatch) -> None:
    def act(read: int) -> None:
        if read == 20:
            raise errors.EngineUnavailable("it is away")

    after_each_page(gallery, monkeypatch, act)
    with pytest.raises(errors.EngineUnavailable, match="it is away"):
        advance(gallery)


def test_a_batch_that_fails_ends_the_listing(gallery: Gallery, monkeypatch: pytest.MonkeyPatch) -> None:
    pages: list[int] = []

    def act(read: int) -> None:
        pages.append(read)
        if read == 20:
            end = time.monotonic() + 60.0
            while not failed and time.monotonic() < end:
                time.sleep(0.01)
            time.sleep(1.0)  # until the worker has told

    failed: list[str] = []

    def fails(call: str, collection: str) -> None:
        failed.append(call)
        raise Crash(call)

    gallery.store.before = fails
    after_each_page(gallery, monkeypatch, act)
    with pytest.raises(Crash):
        advance(gallery)
    assert pages[-1] < 40
    assert not gallery.registry.upgrade(gallery.upgrade.id).listed
