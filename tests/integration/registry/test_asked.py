"""Records that searches asked for come first on the work list, and are on it once."""

from __future__ import annotations

import pytest

from rmvdb.backfill.asked_for import MovedFirst
from rmvdb.registry import asked
from rmvdb.registry.codec import unpack_ids
from rmvdb.registry.registry import Registry
from rmvdb.registry.tables import UpgradeRow
from rmvdb.types import BatchState, Id, Phase
from tests.support.photos import at_once, claimed


@pytest.fixture
def listed(registry: Registry, upgrade: UpgradeRow) -> UpgradeRow:
    """Four batches of three records, and the upgrade serves both collections."""
    registry.add_batches(upgrade.id, [([at, at + 1, at + 2], None) for at in (1, 4, 7, 10)], first=1)
    registry.set_upgrade(upgrade.id, listed=True, phase=Phase.SERVING_BOTH, note="")
    return registry.upgrade(upgrade.id)


def pending(registry: Registry, upgrade: UpgradeRow) -> list[list[Id]]:
    """Return the pending batches in the order in which they are claimed."""
    rows = registry.batches(upgrade.id, state=BatchState.PENDING)
    return [unpack_ids(row.ids) for row in sorted(rows, key=lambda row: row.priority)]


def test_records_that_searches_asked_for_come_first_and_the_others_keep_their_order(
    registry: Registry, listed: UpgradeRow
) -> None:
    registry.ask_for("photos", [11, 5, 6, 99])
    MovedFirst(registry, listed.id).step()

    assert pending(registry, listed) == [[5, 6, 11], [1, 2, 3], [4], [7, 8, 9], [10, 12]]
    assert registry.asked_for(listed.id, most=10) == {}
    assert registry.progress(listed.id).total == 12
    assert unpack_ids(claimed(registry, listed).ids) == [5, 6, 11]


def test_the_last_requests_come_before_earlier_ones(registry: Registry, listed: UpgradeRow) -> None:
    for ids in ([11], [2], [4, 5, 6]):
        registry.ask_for("photos", ids)
        MovedFirst(registry, listed.id).step()

    assert pending(registry, listed) == [[4, 5, 6], [2], [11], [1, 3], [7, 8, 9], [10, 12]]
    assert registry.next_priority(listed.id) == 5


def test_no_batch_grows_however_many_records_are_asked_for(registry: Registry, listed: UpgradeRow) -> None:
    registry.ask_for("photos", [1, 2, 4, 5, 7, 8, 10])
    MovedFirst(registry, listed.id).step()

    assert pending(registry, listed) == [[1, 2, 4], [5, 7, 8], [10], [3], [6], [9], [11, 12]]


def test_a_batch_that_has_begun_is_left_alone(registry: Registry, listed: UpgradeRow) -> None:
    begun = claimed(registry, listed)
    retired = claimed(registry, listed)
    registry.retire(retired, moved=3, requeue=[])
    registry.ask_for("photos", [2, 5, 8])
    MovedFirst(registry, listed.id).step()

    assert pending(registry, listed) == [[8], [7, 9], [10, 11, 12]]
    assert {row.id: unpack_ids(row.ids) for row in registry.batches(listed.id)}[begun.id] == [1, 2, 3]
    registry.advance(begun, BatchState.WRITING)  # its claim holds


def test_a_repeated_call_and_many_workers_at_once_change_nothing_more(registry: Registry, listed: UpgradeRow) -> None:
    registry.ask_for("photos", [2, 5, 8])
    at_once(4, lambda _: MovedFirst(registry, listed.id).step())
    rows = list(registry.asked_for(listed.id, most=10))
    registry.move_first(listed.id, {"2", "5", "8"}, batches=[row.id for row in registry.batches(listed.id)][:4], rows=rows)

    ids = [id for batch in pending(registry, listed) for id in batch]
    assert sorted(ids) == list(range(1, 13))
    assert ids[:3] == [2, 5, 8]


def test_the_work_list_is_read_a_page_at_a_time(registry: Registry, listed: UpgradeRow, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rmvdb.backfill.asked_for.BATCHES", 1)
    registry.ask_for("photos", [12, 1])
    moving = MovedFirst(registry, listed.id)
    moving.step()
    assert pending(registry, listed)[0] == [1, 2, 3]
    for _ in range(5):
        moving.step()
    assert pending(registry, listed)[0] == [1, 12]


def test_only_so_many_records_wait_to_be_moved_first(
    registry: Registry, listed: UpgradeRow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asked, "MOST", 3)
    registry.ask_for("photos", [1, 2])
    registry.ask_for("photos", [3, 4, 5])
    registry.ask_for("photos", [6])

    assert list(registry.asked_for(listed.id, most=10).values()) == ["1", "2", "3"]


def test_without_a_work_list_nothing_is_noted(registry: Registry, upgrade: UpgradeRow) -> None:
    registry.ask_for("photos", [1, 2])

    assert registry.asked_for(upgrade.id, most=10) == {}


def test_requests_of_searches_go_with_their_upgrade(registry: Registry, listed: UpgradeRow) -> None:
    registry.ask_for("photos", [1, 2])
    registry.forget_work(listed.id)

    assert registry.asked_for(listed.id, most=10) == {}
