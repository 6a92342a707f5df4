"""The work list, and how far it is."""

from __future__ import annotations

import time

import pytest
from sqlalchemy import event, update

from rmvdb.registry.codec import unpack_ids
from rmvdb.registry.registry import Registry
from rmvdb.registry.tables import BatchRow, UpgradeRow
from rmvdb.types import BatchState, Progress
from tests.support.photos import at_once, claim, claimed


def test_a_list_made_again_after_a_crash_has_every_batch_once(registry: Registry, upgrade: UpgradeRow) -> None:
    registry.add_batches(upgrade.id, [([1], None), ([2], None)], first=1)
    registry.add_batches(upgrade.id, [([1], None), ([2], None), ([3], None)], first=1)

    assert [unpack_ids(batch.ids) for batch in registry.batches(upgrade.id)] == [[1], [2], [3]]
    assert registry.next_priority(upgrade.id) == 4


def test_a_list_can_be_made_again_without_what_has_begun(registry: Registry, upgrade: UpgradeRow) -> None:
    registry.add_batches(upgrade.id, [([1], None), ([2], None), ([3, 4], None)], first=1)
    registry.retire(claimed(registry, upgrade), moved=1, requeue=[])
    claimed(registry, upgrade)
    before = registry.listed_ids(upgrade.id)
    registry.discard_list(upgrade.id)

    assert before == {2, 3, 4}
    assert registry.listed_ids(upgrade.id) == {2}
    assert registry.next_priority(upgrade.id) == 3


def test_late_records_are_listed_once_behind_everything(registry: Registry, upgrade: UpgradeRow) -> None:
    registry.add_batches(upgrade.id, [([1], None), ([2], None)], first=1)
    registry.retire(claimed(registry, upgrade), moved=1, requeue=[])
    at_once(6, lambda _: registry.add_late(upgrade.id, [1, 2, 3]))

    assert [(row.priority, unpack_ids(row.ids)) for row in registry.batches(upgrade.id, state=BatchState.PENDING)] == [
        (2, [2]),
        (3, [1, 3]),
    ]


def test_batches_are_read_a_page_at_a_time(registry: Registry, upgrade: UpgradeRow) -> None:
    registry.add_batches(upgrade.id, [([number], None) for number in range(5)], first=1)
    claimed(registry, upgrade)
    page = registry.batches(upgrade.id, limit=2)
    rest = registry.batches(upgrade.id, after=page[-1].id)
    pending = registry.batches(upgrade.id, state=BatchState.PENDING)

    assert [unpack_ids(batch.ids) for batch in [*page, *rest]] == [[0], [1], [2], [3], [4]]
    assert len(pending) == 4


def test_progress_counts_what_is_in_the_new_collection(registry: Registry, upgrade: UpgradeRow) -> None:
    registry.add_batches(upgrade.id, [([1, 2, 3, 4], None), ([5, 6], None), ([7, 8, 9, 10], None)], first=1)
    empty = registry.progress(upgrade.id)
    registry.advance(claimed(registry, upgrade), BatchState.WRITING)
    writing = registry.progress(upgrade.id)
    registry.copied(claimed(registry, upgrade), requeue=[], aside={})
    copied = registry.progress(upgrade.id)

    assert (empty.done, empty.total, empty.rate, empty.t) == (0, 10, None, 0.0)
    assert writing.done == 0
    assert (copied.done, copied.total, copied.t) == (2, 10, 0.2)
    assert copied.rate is not None
    assert 0 < copied.rate <= 2
    assert copied.eta is not None
    assert registry.counts(upgrade.id) == {
        BatchState.WRITING: (1, 4),
        BatchState.COPIED: (1, 2),
        BatchState.PENDING: (1, 4),
    }


@pytest.mark.parametrize(
    ("ago", "rate"),
    [
        ((9.0, 8.0, 7.0), 2.0),  # 2 + 2 records in the 2 seconds in which records were copied
        ((9.2, 9.1, 9.0), 6.0),  # as many as in one second, however long ago
        ((50.0, 49.0, 40.0), 0.4),
        ((70.0, 9.0, 8.0), 2.0),
        ((30.0, 29.5, 29.0, 28.5, 28.0, 8.0, 7.5, 7.0), 4.0),  # the upgrade stood still for 20 seconds
    ],
)
def test_the_rate_is_that_of_copying_and_not_of_waiting(
    registry: Registry, upgrade: UpgradeRow, ago: tuple[float, ...], rate: float
) -> None:
    registry.add_batches(upgrade.id, [([2 * at, 2 * at + 1], None) for at in range(len(ago))], first=1)
    for _ in ago:
        registry.copied(claimed(registry, upgrade), requeue=[], aside={})
    now = registry.now()
    with registry.engine.begin() as connection:
        for priority, seconds in enumerate(ago, start=1):
            connection.execute(
                update(BatchRow).where(BatchRow.priority == priority).values(copied_at=now - seconds),
            )

    assert registry.progress(upgrade.id).rate == pytest.approx(rate, rel=0.01)


def test_the_time_left_is_unknown_below_one_percent() -> None:
    assert Progress(done=9, total=1000, rate=5.0).eta is None
    assert Progress(done=10, total=1000, rate=5.0).eta == 198.0
    assert Progress(done=500, total=1000, rate=None).eta is None


def test_progress_ends_at_one_when_the_last_record_is_moved(registry: Registry, upgrade: UpgradeRow) -> None:
    registry.add_batches(upgrade.id, [([1, 2], None), ([3, 4], None)], first=1)
    registry.retire(claimed(registry, upgrade), moved=1, requeue=[2])
    after_one = registry.progress(upgrade.id)
    while batch := claim(registry, upgrade):
        registry.retire(batch, moved=batch.count, requeue=[])
    end = registry.progress(upgrade.id)

    assert (after_one.done, after_one.total) == (1, 4)
    assert (end.done, end.total, end.t) == (4, 4, 1.0)


def test_progress_has_no_rate_when_nothing_moved_lately(registry: Registry, upgrade: UpgradeRow) -> None:
    registry.add_batches(upgrade.id, [([1], None), ([2], None)], first=1)
    registry.copied(claimed(registry, upgrade), requeue=[], aside={})
    time.sleep(0.2)

    assert registry.progress(upgrade.id, window=0.1).rate is None


def test_an_empty_gallery_is_done(registry: Registry, upgrade: UpgradeRow) -> None:
    assert registry.progress(upgrade.id).t == 1.0
    assert registry.counts(upgrade.id) == {}


def test_records_that_are_listed_late_take_no_place_in_a_list_that_is_still_made(registry: Registry, upgrade: UpgradeRow) -> None:
    registry.add_batches(upgrade.id, [([1], None)], first=1)
    registry.add_late(upgrade.id, [7, 8], batch=1)
    for _ in range(2):  # the first answer may be lost
        registry.add_batches(upgrade.id, [([2], None), ([3], None)], first=2)
    assert sorted(registry.listed_ids(upgrade.id)) == [1, 2, 3, 7, 8]
    assert len(registry.batches(upgrade.id)) == 5


def test_a_list_is_discarded_some_batches_at_a_time(
    registry: Registry, upgrade: UpgradeRow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PostgreSQL ends a statement after 30 seconds; a million batches take longer."""
    monkeypatch.setattr("rmvdb.registry.shared_queries.MANY", 2)
    sent = list[str]()
    registry.add_batches(upgrade.id, [([id], None) for id in range(5)], first=1)
    event.listen(registry.engine, "before_cursor_execute", lambda *values: sent.append(values[2]))
    registry.discard_list(upgrade.id)
    assert registry.batches(upgrade.id) == []
    assert sum(each.startswith("DELETE FROM batches") for each in sent) == 4  # the last finds none
