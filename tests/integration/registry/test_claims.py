"""Workers and their claims."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import text

from rmvdb.errors import LeaseLost
from rmvdb.registry.claims import Claim
from rmvdb.registry.codec import pack_ids, unpack_ids
from rmvdb.registry.registry import Registry
from rmvdb.registry.tables import UpgradeRow
from rmvdb.types import BatchState
from tests.support.photos import at_once, claim, claimed, opened
from tests.support.waiting import run_out


def test_nothing_is_claimed_of_an_upgrade_that_ends_meanwhile(registry: Registry, upgrade: UpgradeRow) -> None:
    registry.add_batches(upgrade.id, [([1], None)], first=1)
    with ThreadPoolExecutor(1) as pool:
        with registry.engine.begin() as connection:
            locked = "" if registry.url.get_backend_name() == "sqlite" else "FOR UPDATE"
            connection.execute(text(f"SELECT id FROM galleries {locked}"))
            claiming = pool.submit(claim, registry, upgrade)
            time.sleep(0.3)
            connection.execute(text("UPDATE upgrades SET phase = 'ended'"))
        claimed_ = claiming.result()

    assert claimed_ is None


def test_batches_are_claimed_in_order_each_once(registry: Registry, upgrade: UpgradeRow) -> None:
    registry.add_batches(upgrade.id, [([5, 6], None), ([7], {"path": "a.parquet"})], first=1)
    registry.add_batches(upgrade.id, [([1], None)], first=0)
    order = [claimed(registry, upgrade) for _ in range(3)]

    assert [unpack_ids(batch.ids) for batch in order] == [[1], [5, 6], [7]]
    assert [batch.origin for batch in order] == [None, None, {"path": "a.parquet"}]
    assert {(batch.state, batch.worker, batch.token > 0) for batch in order} == {("claimed", "w1", True)}
    assert claim(registry, upgrade) is None


def test_a_worker_claims_only_what_it_has_room_for(registry: Registry, upgrade: UpgradeRow) -> None:
    registry.add_batches(upgrade.id, [([1], None), ([2], None)], first=1)
    registry.copied(claimed(registry, upgrade), requeue=[], aside={})

    def found(*room: BatchState) -> str | None:
        batch = claim(registry, upgrade, room=room)
        return batch and batch.state

    assert found() is None
    assert (found(BatchState.COPIED), found(BatchState.COPIED)) == ("copied", None)
    assert (found(BatchState.CLAIMED), found(BatchState.CLAIMED)) == ("claimed", None)


def test_the_grace_of_the_plan_in_force_counts_if_it_is_longer(registry: Registry, upgrade: UpgradeRow) -> None:
    registry.add_batches(upgrade.id, [([1], None)], first=1)
    registry.copied(claimed(registry, upgrade), requeue=[], aside={})
    assert registry.plan("photos").grace > 60.0
    assert claim(registry, upgrade, by_plan=True) is None
    assert claim(registry, upgrade) is not None


def test_many_workers_claim_each_batch_once(registry: Registry, upgrade: UpgradeRow) -> None:
    registry.add_batches(upgrade.id, [([number], None) for number in range(60)], first=1)

    def work(number: int) -> list[int]:
        mine = []
        while batch := claim(registry, upgrade, f"w{number}"):
            mine.append(batch.id)
        return mine

    taken = [batch for mine in at_once(6, work) for batch in mine]

    assert sorted(taken) == [batch.id for batch in registry.batches(upgrade.id)]


def test_a_worker_that_was_killed_is_forgotten_when_another_comes(registry: Registry, upgrade: UpgradeRow) -> None:
    for worker in ("killed", "late", "silent"):
        registry.renew(worker, upgrade.id, lease=60)
    with registry.engine.begin() as connection:
        connection.execute(text("UPDATE workers SET seen_at = seen_at - 86500 WHERE id <> 'silent'"))
        connection.execute(text("UPDATE workers SET seen_at = seen_at - 86000 WHERE id = 'silent'"))
    registry.renew("late", upgrade.id, lease=60)
    before = {row.id for row in registry.workers(upgrade.id, within=1e6)}
    registry.renew("new", upgrade.id, lease=60)

    assert before == {"killed", "late", "silent"}
    assert {row.id for row in registry.workers(upgrade.id, within=1e6)} == {"late", "silent", "new"}


def test_a_batch_goes_its_way(registry: Registry, upgrade: UpgradeRow) -> None:
    registry.add_batches(upgrade.id, [([1, 2, 3], None)], first=1)
    batch = claimed(registry, upgrade)
    registry.advance(batch, BatchState.CLAIMED, archive={"path": "a.parquet"})
    registry.advance(batch, BatchState.WRITING)
    registry.copied(batch, requeue=[], aside={})
    waiting = claim(registry, upgrade, "w2", grace=60.0)
    due = claimed(registry, upgrade, "w2")
    registry.advance(due, BatchState.REMOVING, remove=pack_ids([1, 2]), requeue=pack_ids([3]))
    registry.retire(due, moved=2, requeue=[3])
    first, requeued = registry.batches(upgrade.id)

    assert waiting is None
    assert due.id == batch.id
    assert (first.state, first.count, first.worker, first.archive) == ("retired", 2, None, {"path": "a.parquet"})
    assert unpack_ids(first.remove) == [1, 2]
    assert (requeued.state, requeued.priority, unpack_ids(requeued.ids)) == ("claimed", first.priority, [3])


def test_a_batch_whose_grace_is_over_comes_before_a_fresh_one(registry: Registry, upgrade: UpgradeRow) -> None:
    registry.add_batches(upgrade.id, [([1], None), ([2], None)], first=1)
    first = claimed(registry, upgrade)
    registry.advance(first, BatchState.WRITING)
    registry.copied(first, requeue=[], aside={})

    assert claimed(registry, upgrade).id == first.id


def test_a_worker_that_may_not_copy_only_ends_what_is_copied(registry: Registry, upgrade: UpgradeRow) -> None:
    registry.add_batches(upgrade.id, [([1], None), ([2], None)], first=1)
    first = claimed(registry, upgrade)
    registry.copied(first, requeue=[], aside={})
    due = claimed(registry, upgrade, copy=False)
    none = claim(registry, upgrade, copy=False)

    assert due.id == first.id
    assert none is None


@pytest.mark.parametrize("held_up", ["until", "pause"])
def test_begun_batches_are_finished_though_no_other_may_begin(registry: Registry, upgrade: UpgradeRow, held_up: str) -> None:
    registry.add_batches(upgrade.id, [([1, 2], None), ([3], None), ([4], None), ([5], None)], first=1)
    copied = claimed(registry, upgrade)
    written, _ = (claimed(registry, upgrade, "dead") for _ in range(2))
    registry.advance(written, BatchState.WRITING, archive={"photos_1": {"path": "a.parquet"}})
    registry.copied(copied, requeue=[], aside={})
    registry.retire(claimed(registry, upgrade), moved=1, requeue=[2])  # changed in the old collection after it was copied
    run_out(registry)
    registry.set_upgrade(upgrade.id, paused=held_up == "pause")
    begun = [unpack_ids(claimed(registry, upgrade, copy=held_up == "pause").ids) for _ in range(3)]
    none = claim(registry, upgrade, copy=held_up == "pause")
    registry.retire_worker("w1")
    still = [unpack_ids(claimed(registry, upgrade, copy=held_up == "pause").ids) for _ in range(2)]

    assert (begun, none) == ([[2], [3], [4]], None)
    assert still == [[2], [3]]  # of the third nothing was written
    assert claim(registry, upgrade, copy=held_up == "pause") is None


@pytest.mark.parametrize("state", [BatchState.CLAIMED, BatchState.WRITING, BatchState.COPIED, BatchState.REMOVING])
def test_a_dead_workers_batch_is_taken_over_and_its_token_is_worthless(
    registry: Registry, upgrade: UpgradeRow, state: BatchState
) -> None:
    registry.add_batches(upgrade.id, [([1], None)], first=1)
    batch = claimed(registry, upgrade, "dead")
    if state == BatchState.COPIED:
        registry.copied(batch, requeue=[], aside={})
        batch = claimed(registry, upgrade, "dead")
    else:
        registry.advance(batch, state)
    early = claim(registry, upgrade, "w2")
    run_out(registry)
    taken = claimed(registry, upgrade, "w2")

    assert early is None
    assert (taken.id, taken.worker, taken.token > batch.token) == (batch.id, "w2", True)
    lost = f"The lease on batch {batch.id} ran out, or another worker has taken it over"
    with pytest.raises(LeaseLost, match=lost):
        registry.advance(batch, BatchState.WRITING)
    with pytest.raises(LeaseLost, match=lost):
        registry.retire(batch, moved=1, requeue=[])


def test_a_claim_whose_lease_has_run_out_changes_nothing_though_no_other_worker_has_it(
    registry: Registry, upgrade: UpgradeRow
) -> None:
    registry.add_batches(upgrade.id, [([1], None)], first=1)
    batch = claimed(registry, upgrade, "suspended")
    run_out(registry)
    for late in (
        lambda: registry.advance(batch, BatchState.WRITING),
        lambda: registry.copied(batch, requeue=[], aside={}),
        lambda: registry.retire(batch, moved=1, requeue=[]),
    ):
        with pytest.raises(LeaseLost):
            late()
    assert registry.counts(upgrade.id).keys() == {BatchState.CLAIMED}


def test_a_copied_batch_is_said_to_be_copied_twice_where_the_first_answer_was_lost(
    registry: Registry, upgrade: UpgradeRow
) -> None:
    registry.add_batches(upgrade.id, [([1, 2], None)], first=1)
    batch = claimed(registry, upgrade, "w")
    for _ in range(2):
        registry.copied(batch, requeue=[1], aside={2: "bad"})
    (row,) = registry.batches(upgrade.id)
    assert (row.state, row.count, unpack_ids(row.requeue)) == (BatchState.COPIED, 1, [1])


def test_a_batch_that_was_being_written_is_begun_again(registry: Registry, upgrade: UpgradeRow) -> None:
    registry.add_batches(upgrade.id, [([1], None)], first=1)
    registry.advance(claimed(registry, upgrade, "dead"), BatchState.WRITING)
    run_out(registry)

    assert claimed(registry, upgrade, "w2").state == BatchState.CLAIMED


def test_a_heartbeat_keeps_claims_alive(registry: Registry, upgrade: UpgradeRow) -> None:
    registry.add_batches(upgrade.id, [([1], None)], first=1)
    batch = claimed(registry, upgrade, "w1", lease=60)
    for _ in range(4):
        run_out(registry, seconds=40)
        assert registry.renew("w1", upgrade.id, {(batch.id, batch.token)}, lease=60) == {(batch.id, batch.token)}

    assert claim(registry, upgrade, "w2") is None
    assert [row.id for row in registry.workers(upgrade.id, within=60)] == ["w1"]
    assert registry.workers(upgrade.id, within=0) == []


def test_a_heartbeat_does_not_revive_a_lease_that_has_run_out(registry: Registry, upgrade: UpgradeRow) -> None:
    """From then on clients write without asking that worker: what it would write could be older than theirs."""
    registry.add_batches(upgrade.id, [([1], None)], first=1)
    batch = claimed(registry, upgrade, "suspended")
    registry.advance(batch, BatchState.WRITING)
    run_out(registry)
    held = registry.renew("suspended", upgrade.id, {(batch.id, batch.token)}, lease=60)

    assert held == set()
    assert not registry.blocked(opened(registry, [1]), [1])
    assert claim(registry, upgrade, "w2") is not None


def test_a_batch_that_a_worker_leaves_unwritten_is_free_at_once(registry: Registry, upgrade: UpgradeRow) -> None:
    registry.add_batches(upgrade.id, [([1], None), ([2], None)], first=1)
    registry.copied(claimed(registry, upgrade), requeue=[], aside={})
    compared, fresh = claimed(registry, upgrade), claimed(registry, upgrade)
    registry.renew("w1", upgrade.id, {(each.id, each.token) for each in (compared, fresh)}, lease=60)
    registry.retire_worker("w1")
    free = {claimed(registry, upgrade, "w2").id for _ in range(2)}

    assert free == {fresh.id, compared.id}
    assert registry.workers(upgrade.id, within=60) == []


def test_a_worker_that_ends_frees_at_once_what_it_wrote_nothing_of(registry: Registry, upgrade: UpgradeRow) -> None:
    """A call of the others, which failed, may still arrive: they are free when their lease has run out."""
    registry.add_batches(upgrade.id, [([1], None), ([2], None), ([3], None)], first=1)
    fresh, written, copied = (claimed(registry, upgrade, lease=60) for _ in range(3))
    registry.advance(written, BatchState.WRITING)
    registry.advance(copied, BatchState.REMOVING)
    registry.renew("w1", upgrade.id, {(each.id, each.token) for each in (fresh, written, copied)}, lease=60)
    registry.retire_worker("w1")
    free = claimed(registry, upgrade, "w2", lease=600).id
    early = claim(registry, upgrade, "w2")
    run_out(registry, seconds=61)
    late = [claimed(registry, upgrade, "w2").id for _ in range(2)]

    assert (free, early, late) == (fresh.id, None, [copied.id, written.id])
    assert registry.workers(upgrade.id, within=60) == []


@pytest.mark.parametrize("state", [BatchState.WRITING, BatchState.REMOVING])
@pytest.mark.parametrize("leaves", ["worker", "batch"])
def test_a_batch_that_a_worker_leaves_half_written_is_free_once_its_lease_has_run_out(
    registry: Registry, upgrade: UpgradeRow, state: BatchState, leaves: str
) -> None:
    """A call of it that failed may still arrive; until then clients wait, and its own heartbeat does not hold it."""
    registry.add_batches(upgrade.id, [([1], None)], first=1)
    batch = claimed(registry, upgrade)
    registry.advance(batch, state, remove_from_new=pack_ids([1]))
    write = opened(registry, [1])

    def renewed() -> set[Claim]:
        return registry.renew("w1", upgrade.id, {(batch.id, batch.token)}, lease=60)

    registry.retire_worker("w1") if leaves == "worker" else registry.hand_back(batch)
    during = registry.blocked(write, [1]), claim(registry, upgrade, "w2"), renewed()
    run_out(registry)

    assert during == (True, None, set())
    assert not registry.blocked(write, [1])
    assert claimed(registry, upgrade, "w2").id == batch.id


def test_a_worker_whose_clock_is_wrong_takes_nothing_over(
    registry: Registry, upgrade: UpgradeRow, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry.add_batches(upgrade.id, [([1], None)], first=1)
    claimed(registry, upgrade, "w1", lease=60)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 86400)
    ahead = claim(registry, upgrade, "w2")
    monkeypatch.setattr(time, "time", lambda: now - 86400)
    behind = claim(registry, upgrade, "w2")

    assert (ahead, behind) == (None, None)


def test_a_batch_ended_twice_because_its_answer_was_lost_lists_its_rest_once(registry: Registry, upgrade: UpgradeRow) -> None:
    registry.add_batches(upgrade.id, [([1, 2], None)], first=1)
    batch = claimed(registry, upgrade)
    for _ in range(2):
        registry.retire(batch, moved=1, requeue=[2])

    assert [row.count for row in registry.batches(upgrade.id)] == [1, 1]


def test_a_worker_cannot_continue_a_batch_that_it_released(registry: Registry, upgrade: UpgradeRow) -> None:
    """A thread of it may still run when its process was told to end, and told again."""
    registry.add_batches(upgrade.id, [([1], None)], first=1)
    batch = claimed(registry, upgrade)
    registry.retire_worker("w1")
    with pytest.raises(LeaseLost):
        registry.advance(batch, BatchState.WRITING)


def test_a_copied_batch_is_not_claimed_before_searches_find_its_records(registry: Registry, upgrade: UpgradeRow) -> None:
    registry.add_batches(upgrade.id, [([1], None)], first=1)
    registry.copied(claimed(registry, upgrade), requeue=[], aside={})
    (copied,) = registry.batches(upgrade.id)
    assert copied.copied_at is not None

    assert claim(registry, upgrade, settled=copied.copied_at - 0.001) is None
    assert claim(registry, upgrade, settled=copied.copied_at + 0.001) is not None
