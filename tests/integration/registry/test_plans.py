"""Serving plans: how the next one comes into force, and what it waits for."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from rmvdb.errors import WrongPhase
from rmvdb.registry import plans
from rmvdb.registry.registry import Registry
from rmvdb.registry.tables import GalleryRow, UpgradeRow
from rmvdb.types import BatchState
from tests.support.photos import NEW, OLD, TIMES, add_gallery, claim, claimed, opened
from tests.support.waiting import fall_silent, grow_old, run_out


def test_a_plan_is_announced_then_put_in_force(registry: Registry, gallery: GalleryRow) -> None:
    epoch = registry.announce("photos", [NEW, OLD], TIMES)
    serving = registry.refresh("photos", client="c1", ready=epoch, trouble="")
    waiting = registry.activate("photos", epoch)

    assert (serving.plan.epoch, serving.plan.legs) == (1, (OLD,))
    assert serving.next is not None
    assert (serving.next.epoch, serving.next.legs) == (2, (NEW, OLD))
    assert waiting == []
    assert registry.plan("photos") == serving.next
    assert registry.refresh("photos", client="c1", ready=2, trouble="").next is None


def test_the_same_plan_announced_again_is_the_same_epoch(registry: Registry, gallery: GalleryRow) -> None:
    first = registry.announce("photos", [NEW, OLD], TIMES)
    again = registry.announce("photos", [NEW, OLD], TIMES)
    registry.activate("photos", first)

    assert again == first
    assert registry.announce("photos", [NEW, OLD], TIMES) == first


def test_the_same_legs_with_other_times_are_another_plan(registry: Registry, gallery: GalleryRow) -> None:
    longer = TIMES | {"longest_search": 9.0}
    assert registry.announce("photos", [OLD], longer) == 2
    assert registry.announce("photos", [OLD], longer) == 2
    assert registry.announce("photos", [OLD], TIMES | {"max_age": 9.0}) == 3
    assert registry.activate("photos", 3) == []
    assert (registry.plan("photos").max_age, registry.plan("photos").legs) == (9.0, (OLD,))


def test_other_times_do_not_wait_for_who_is_at_a_batch(registry: Registry, upgrade: UpgradeRow) -> None:
    registry.add_batches(upgrade.id, [([1], None)], first=1)
    assert claim(registry, upgrade, "w1") is not None
    plan = registry.plan("photos")
    epoch = registry.announce("photos", [*plan.legs, *plan.mirrors], TIMES | {"longest_search": 9.0})
    assert registry.activate("photos", epoch) == []
    assert registry.plan("photos").longest_search == 9.0


def test_an_epoch_is_never_used_again(registry: Registry, gallery: GalleryRow) -> None:
    for expected, legs in enumerate(([NEW, OLD], [NEW], [NEW, OLD], [OLD]), start=2):
        assert registry.announce("photos", legs, TIMES) == expected
        assert registry.activate("photos", expected) == []

    assert registry.plan("photos").legs == (OLD,)


def test_an_announcement_is_taken_back_by_announcing_the_plan_in_force(registry: Registry, gallery: GalleryRow) -> None:
    registry.announce("photos", [NEW, OLD], TIMES)

    epoch = registry.announce("photos", [OLD], TIMES)

    assert epoch == 1
    assert registry.activate("photos", epoch) == []
    assert registry.refresh("photos", client="c1", ready=1, trouble="").next is None


@pytest.mark.parametrize("stale", [1, 2, 9])
def test_only_the_announced_plan_comes_into_force(registry: Registry, gallery: GalleryRow, stale: int) -> None:
    registry.activate("photos", registry.announce("photos", [NEW, OLD], TIMES))
    registry.activate("photos", registry.announce("photos", [NEW], TIMES))
    registry.announce("photos", [OLD], TIMES)

    with pytest.raises(WrongPhase, match=f"epoch {stale} of gallery 'photos' is not the announced one, which is 4"):
        registry.activate("photos", stale)
    assert registry.plan("photos").epoch == 3


def test_an_epoch_waits_for_clients_that_cannot_serve_it(registry: Registry, gallery: GalleryRow) -> None:
    epoch = registry.announce("photos", [NEW, OLD], TIMES)
    registry.refresh("photos", client="ready", ready=epoch, trouble="")
    registry.refresh("photos", client="broken", ready=1, trouble="no module 'clip'")

    assert registry.activate("photos", epoch) == ["client broken cannot serve epoch 2 yet: no module 'clip'"]
    assert registry.plan("photos").epoch == 1
    assert registry.open_intents("photos", "upsert", [1], client="c1", lasting=1.0) is not None


def test_an_epoch_can_be_forced_on_clients(registry: Registry, gallery: GalleryRow) -> None:
    epoch = registry.announce("photos", [NEW, OLD], TIMES)
    registry.refresh("photos", client="broken", ready=1, trouble="")

    assert registry.activate("photos", epoch, force=True) == []


def test_an_epoch_does_not_wait_for_clients_that_left_or_fell_silent(registry: Registry) -> None:
    add_gallery(registry)
    epoch = registry.announce("photos", [NEW, OLD], TIMES)
    registry.refresh("photos", client="left", ready=1, trouble="")
    registry.leave("left")
    registry.refresh("photos", client="silent", ready=1, trouble="")
    before = registry.activate("photos", epoch)
    fall_silent(registry, "silent", seconds=TIMES["max_age"] + 1)

    assert before == ["client silent cannot serve epoch 2 yet"]
    assert registry.activate("photos", epoch) == []
    assert registry.clients(registry.gallery("photos").id) == []


@pytest.fixture
def _unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long this machine stands still, no write lasts long and no epoch gives up."""
    monkeypatch.setattr(plans, "LONG", 60.0)
    monkeypatch.setattr(plans, "CLOSING", 60.0)


@pytest.mark.usefixtures("_unhurried")
def test_an_epoch_waits_for_open_writes_and_new_writes_wait_for_it(registry: Registry, gallery: GalleryRow) -> None:
    write = opened(registry, [7])
    epoch = registry.announce("photos", [NEW, OLD], TIMES)
    waiting = registry.activate("photos", epoch)
    refused = registry.open_intents("photos", "upsert", [8], client="c2", lasting=60)
    registry.close_intents(write)

    assert waiting == ["c1 is writing record 7"]
    assert refused is None
    assert registry.activate("photos", epoch) == []
    assert opened(registry, [8]).plan.epoch == epoch


def test_a_forced_epoch_waits_for_open_writes_all_the_same(registry: Registry, gallery: GalleryRow) -> None:
    opened(registry, [7])
    epoch = registry.announce("photos", [NEW, OLD], TIMES)

    assert registry.activate("photos", epoch, force=True) == ["c1 is writing record 7"]


def test_an_epoch_does_not_wait_for_a_writer_that_died(registry: Registry, gallery: GalleryRow) -> None:
    opened(registry, [7], lasting=0.1)
    epoch = registry.announce("photos", [NEW, OLD], TIMES)
    time.sleep(0.2)

    assert registry.activate("photos", epoch) == []


@pytest.mark.usefixtures("_unhurried")
def test_an_epoch_waits_for_claims_and_then_new_ones_wait_for_it(
    registry: Registry, gallery: GalleryRow, upgrade: UpgradeRow
) -> None:
    registry.add_batches(upgrade.id, [([1, 2], None), ([3], None)], first=1)
    batch = claimed(registry, upgrade)
    epoch = registry.announce("photos", [NEW], TIMES)
    for_claims = registry.activate("photos", epoch)
    write = opened(registry, [7])  # a batch may take long: writes go on meanwhile
    registry.copied(batch, requeue=[], aside={})
    for_writes = registry.activate("photos", epoch)
    refused = claim(registry, upgrade, "w2")
    registry.close_intents(write)

    assert for_claims == [f"worker w1 is at batch {batch.id}"]
    assert for_writes == ["c1 is writing record 7"]
    assert refused is None
    assert registry.activate("photos", epoch) == []
    assert claim(registry, upgrade, "w2") is not None


def test_other_writes_do_not_wait_for_a_write_that_takes_long(registry: Registry, gallery: GalleryRow) -> None:
    opened(registry, [7], client="killed", lasting=60)
    grow_old(registry, seconds=plans.LONG + 0.1)
    epoch = registry.announce("photos", [NEW, OLD], TIMES)
    waiting = registry.activate("photos", epoch)
    registry.close_intents(opened(registry, [8], client="alive"))
    grow_old(registry, seconds=60)

    assert waiting == ["killed is writing record 7"]
    assert registry.activate("photos", epoch) == []


def test_an_epoch_waits_for_a_claim_that_compares(registry: Registry, upgrade: UpgradeRow) -> None:
    registry.add_batches(upgrade.id, [([1], None)], first=1)
    registry.copied(claimed(registry, upgrade), requeue=[], aside={})
    batch = claimed(registry, upgrade)
    waiting = registry.activate("photos", registry.announce("photos", [OLD], TIMES))

    assert batch.state == BatchState.COPIED
    assert waiting == [f"worker w1 is at batch {batch.id}"]


def test_an_epoch_waits_for_what_a_worker_left_half_written(registry: Registry, upgrade: UpgradeRow) -> None:
    registry.add_batches(upgrade.id, [([1], None)], first=1)
    batch = claimed(registry, upgrade)
    registry.advance(batch, BatchState.WRITING)
    registry.retire_worker("w1")
    epoch = registry.announce("photos", [OLD], TIMES)
    waiting = registry.activate("photos", epoch)
    run_out(registry)

    assert waiting == [f"a call that failed may still arrive for batch {batch.id}"]
    assert registry.activate("photos", epoch) == []


def test_no_write_slips_through_while_epochs_change(registry: Registry, gallery: GalleryRow) -> None:
    """Every write is made under the plan that is in force when it is opened and when it is closed."""
    wrong: list[str] = []
    opened: list[int] = []
    stop = threading.Event()

    def write(number: int) -> None:
        while not stop.is_set():
            made = registry.open_intents("photos", "upsert", [number], client=f"c{number}", lasting=30)
            if made is not None:
                opened.append(number)
                if registry.plan("photos").epoch != made.plan.epoch:
                    wrong.append(f"opened under {made.plan.epoch}")
                registry.close_intents(made)
            time.sleep(0.001)

    with ThreadPoolExecutor(3) as pool:
        writers = [pool.submit(write, number) for number in range(3)]
        try:
            for legs in ([NEW, OLD], [NEW], [NEW, OLD], [OLD], [NEW, OLD]):
                epoch = registry.announce("photos", legs, TIMES)
                while registry.activate("photos", epoch):
                    time.sleep(0.002)
        finally:
            stop.set()
        for writer in writers:
            writer.result()

    assert wrong == []
    assert set(opened) == {0, 1, 2}
    assert registry.plan("photos").epoch == 6
    assert registry.open_writes(gallery.id) == set()
