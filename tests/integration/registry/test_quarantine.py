"""Records that could not be moved."""

from __future__ import annotations

from sqlalchemy import insert

from rmvdb.registry.codec import unpack_ids
from rmvdb.registry.registry import Registry
from rmvdb.registry.tables import QuarantineRow, UpgradeRow
from rmvdb.types import BatchState
from tests.support.photos import claimed, set_aside


def test_a_quarantined_record_counts_as_not_moved(registry: Registry, upgrade: UpgradeRow) -> None:
    registry.add_batches(upgrade.id, [([1, 2], None)], first=1)
    registry.copied(claimed(registry, upgrade), requeue=[], aside={2: "cannot be read"})
    due = claimed(registry, upgrade, grace=0.0)
    registry.copied(due, requeue=[], aside={2: "x" * 5000})
    registry.retire(claimed(registry, upgrade, grace=0.0), moved=1, requeue=[])
    progress = registry.progress(upgrade.id)

    assert [(row.record, len(row.reason)) for row in registry.quarantined(upgrade.id)] == [("2", 2000)]
    assert (progress.done, progress.total, progress.quarantined) == (1, 2, 1)


def test_a_released_record_is_tried_again_or_dropped(registry: Registry, upgrade: UpgradeRow) -> None:
    set_aside(registry, upgrade, dict.fromkeys((1, 2, 3), "cannot be read"))
    registry.retire(claimed(registry, upgrade, grace=0.0), moved=0, requeue=[])
    registry.release(upgrade.id, [1, 2], requeue=True)
    registry.release(upgrade.id, [3], requeue=False)

    assert registry.quarantined(upgrade.id) == []
    assert registry.listed_ids(upgrade.id) == {1, 2}


def test_no_record_is_on_the_list_twice(registry: Registry, upgrade: UpgradeRow) -> None:
    """Of two batches one would find it gone because of the other, and take it out of the new collection."""
    registry.add_late(upgrade.id, [1, 2, 3])
    held = claimed(registry, upgrade)
    registry.copied(held, requeue=[], aside={1: "cannot be read"})
    registry.add_late(upgrade.id, [1, 2, 4])  # by a conductor that looked before the record was set aside
    assert [unpack_ids(row.ids) for row in registry.batches(upgrade.id)] == [[2, 3], [4]]
    with registry.engine.begin() as connection:  # as by a registry of before
        connection.execute(insert(QuarantineRow).values(upgrade_id=upgrade.id, record="4", reason="cannot be read", at=0.0))
    registry.release(upgrade.id, [1, 4], requeue=True)
    assert [unpack_ids(row.ids) for row in registry.batches(upgrade.id)] == [[2, 3], [4], [1]]
    assert registry.quarantined(upgrade.id) == []


def test_a_quarantined_record_leaves_its_batch(registry: Registry, upgrade: UpgradeRow) -> None:
    registry.add_batches(upgrade.id, [([1, 2], None)], first=1)
    registry.copied(claimed(registry, upgrade), requeue=[], aside={2: "cannot be read"})

    assert unpack_ids(claimed(registry, upgrade).ids) == [1]
    assert registry.listed_ids(upgrade.id) == {1}


def test_a_record_released_twice_is_listed_once(registry: Registry, upgrade: UpgradeRow) -> None:
    set_aside(registry, upgrade, {1: "cannot be read"})
    registry.retire(claimed(registry, upgrade, grace=0.0), moved=0, requeue=[])
    for _ in range(2):
        registry.release(upgrade.id, [1], requeue=True)

    assert [unpack_ids(row.ids) for row in registry.batches(upgrade.id, state=BatchState.PENDING)] == [[1]]


def test_a_record_that_is_put_back_leaves_the_quarantine(registry: Registry, upgrade: UpgradeRow) -> None:
    """Else `rmvdb quarantine drop` would delete it, though it is whole by then."""
    registry.add_batches(upgrade.id, [([1, 2], None)], first=1)
    batch = claimed(registry, upgrade)
    registry.copied(batch, requeue=[], aside={2: "cannot be read"})
    registry.put_back(upgrade.id, {batch.id: [2]})
    assert registry.quarantined(upgrade.id) == []
    assert 2 in registry.listed_ids(upgrade.id)
