"""An upgrade takes the place of another one."""

from __future__ import annotations

import contextlib
import copy
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session

from rmvdb import errors
from rmvdb.errors import WrongPhase
from rmvdb.protocols import Source
from rmvdb.registry import upgrades
from rmvdb.registry.codec import unpack_ids
from rmvdb.registry.tables import TAKES_ITS_PLACE, BatchRow, UpgradeRow, WorkerRow
from rmvdb.registry.upgrades import COUNTS_AS_KILLED
from rmvdb.types import BatchState, Id, Item, Phase, Record
from rmvdb.upgrade import register, verify
from rmvdb.upgrade.context import UpgradeContext
from rmvdb.upgrade.report import VerifyReport
from tests.support.at_work import at_work
from tests.support.inprocess import Crash, Gallery, drive, vector
from tests.support.third_version import V1, V2, searching
from tests.support.waiting import run_out, wait_until


def copied(gallery: Gallery) -> BatchRow:
    """Return a batch of v1 → v2 that is copied, by a worker that is gone."""
    batch = gallery.registry.claim(gallery.upgrade.id, "gone", lease=60, grace=60, copy=True)
    assert batch is not None
    gallery.backfill.copy(gallery.task, batch, lambda: None)
    return batch


def in_hand(gallery: Gallery, upgrade: int) -> set[str]:
    return {state.value for state in gallery.registry.counts(upgrade)} - {BatchState.PENDING, BatchState.RETIRED}


def test_batches_in_hand_end_before_another_upgrade_takes_the_place(gallery: Gallery) -> None:
    first = gallery.upgrade.id
    ids = unpack_ids(copied(gallery).ids)
    # Another program's changes are honoured up to the last comparison, which comes all the same.
    gallery.store.delete(V1, [ids[0]])
    gallery.store.upsert(V1, [Record(id=ids[1], vector=vector("v1", "changed"), fields={"n": 7})])
    gallery.source.of[ids[1]] = "changed"
    del gallery.source.of[ids[0]]
    gallery.supersede()
    assert in_hand(gallery, first) == set()
    assert len(gallery.registry.batches(first, state=BatchState.PENDING)) == 1
    held = gallery.records(V2)
    assert ids[0] not in held
    assert held[ids[1]].fields == {"n": 7}
    assert not gallery.records(V1).keys() & set(ids)
    drive(gallery)
    gallery.expect_moved()


def test_nothing_takes_the_place_of_an_upgrade_of_which_a_batch_is_in_hand_again(gallery: Gallery) -> None:
    """`rmvdb resume` came between the last look and the change, or a claim was on its way."""
    first, real, taken = gallery.upgrade, gallery.registry.supersede, list[Id]()

    def supersede(*args: Any, **options: Any) -> UpgradeRow:
        if not taken:
            gallery.registry.set_upgrade(first.id, paused=False)
            taken.extend(unpack_ids(copied(gallery).ids))
        return real(*args, **options)

    gallery.registry.supersede = supersede  # type: ignore[method-assign]
    with pytest.raises(WrongPhase, match=f"Batch .* of upgrade {first.id} is in hand again; run the same command again"):
        gallery.supersede()
    gallery.supersede()
    assert not gallery.records(V1).keys() & set(taken)
    drive(gallery)
    gallery.expect_moved()


def test_a_batch_that_a_dead_worker_was_writing_is_finished_first(gallery: Gallery) -> None:
    first = gallery.upgrade.id
    batch = gallery.registry.claim(first, "dead", lease=60.0, grace=60, copy=True)
    assert batch is not None

    def die(call: str, collection: str) -> None:
        raise Crash

    gallery.store.before = die
    with pytest.raises(Crash):
        gallery.backfill.copy(gallery.task, batch, lambda: None)
    gallery.store.before = lambda call, collection: None
    run_out(gallery.registry)
    gallery.supersede()
    assert in_hand(gallery, first) == set()
    drive(gallery)
    gallery.expect_moved()


def test_an_older_copy_of_a_record_is_not_what_a_roll_back_leaves_in_place(gallery: Gallery) -> None:
    """25 was written into v2, and lies in v1 as it was; a worker dies once it has taken it out of v2 alone."""
    first = gallery.upgrade
    gallery.supersede()

    def die(call: str, collection: str) -> None:
        rows = gallery.registry.batches(gallery.upgrade.id, state=BatchState.REMOVING)
        if call == "delete" and collection == V1 and any(25 in unpack_ids(row.remove) for row in rows):
            raise Crash

    gallery.store.before = die
    with pytest.raises(Crash):
        drive(gallery, width=1)
    gallery.store.before = lambda *_: None
    assert (25 in gallery.records(V1), 25 in gallery.records(V2)) == (True, False)
    conductor = gallery.conductor()
    back = conductor.roll_back(gallery.registry.upgrade(gallery.upgrade.id))
    assert back is not None
    assert conductor.advance(back, gallery.worker()).phase == Phase.CUT_OVER
    conductor.clean_up(gallery.registry.upgrade(back.id))
    assert gallery.records(V2)[25].fields["n"] == 1
    assert conductor.advance(gallery.registry.upgrade(first.id), gallery.worker()).phase == Phase.CUT_OVER
    assert gallery.records(V2).keys() == gallery.source.of.keys()
    gallery.registry.close()


def test_other_workers_leave_the_upgrade_that_is_superseded(gallery: Gallery) -> None:
    slow = copy.copy(gallery.backfill)
    slow._source = SlowTexts(gallery.source)
    other = threading.Thread(target=gallery.worker(width=1).run, args=(gallery.task, slow))
    with searching(gallery) as wrong:
        other.start()
        time.sleep(0.1)
        gallery.supersede()
        other.join(timeout=20)
        assert not other.is_alive()
        drive(gallery)
    assert wrong == []
    gallery.expect_moved()


class SlowTexts:
    """A source that takes its time."""

    def __init__(self, source: Source) -> None:
        self.source = source

    def load(self, records: Sequence[Record]) -> Mapping[Id, Item]:
        """As that source does."""
        time.sleep(2)
        return self.source.load(records)


def test_a_conductor_of_the_superseded_upgrade_changes_nothing_more(gallery: Gallery, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is about to cut over when the other one takes its place."""
    conductor, first = gallery.conductor(), gallery.upgrade
    drive(gallery)
    gallery.registry.set_upgrade(first.id, listed=True)
    monkeypatch.setattr(verify, "expect_verified", lambda *_: gallery.supersede() or Agreed())  # type: ignore[func-returns-value]
    with pytest.raises(errors.WrongPhase, match=f"Upgrade {first.id} has ended; see what took its place: rmvdb history"):
        conductor.cut_over(gallery.registry.upgrade(first.id), gallery.worker())
    assert [leg.model for leg in gallery.registry.plan("texts").legs] == ["v3", "v2", "v1"]
    drive(gallery)
    gallery.expect_moved()


class Agreed:
    """A verification that found no difference."""

    ok, records = True, 0


def test_a_step_that_fails_because_another_upgrade_took_the_place_says_so(
    gallery: Gallery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It compares what the other one moves meanwhile, and finds differences."""
    conductor, first, real = gallery.conductor(), gallery.upgrade, verify.expect_verified

    def meanwhile(context: UpgradeContext, upgrade: UpgradeRow, *more: Any) -> VerifyReport:
        gallery.supersede()
        drive(gallery)
        return real(context, upgrade, *more)

    monkeypatch.setattr(verify, "expect_verified", meanwhile)
    with pytest.raises(errors.WrongPhase, match=f"Upgrade {first.id} has ended; see what took its place: rmvdb history"):
        conductor.advance(first, gallery.worker())
    assert not gallery.registry.upgrade(first.id).reason
    gallery.expect_moved()


def test_an_upgrade_that_could_not_be_superseded_goes_on(gallery: Gallery) -> None:
    def supersede(*_: object, **__: object) -> None:
        raise errors.WrongPhase("served differently since")

    real, gallery.registry.supersede = gallery.registry.supersede, supersede  # type: ignore[method-assign, assignment]
    with pytest.raises(errors.WrongPhase):
        gallery.supersede()
    gallery.registry.supersede = real  # type: ignore[method-assign]
    assert not gallery.registry.upgrade(gallery.upgrade.id).paused
    drive(gallery)
    gallery.expect_moved()


def taken(gallery: Gallery, *commands: str) -> int:
    """Let these commands make an upgrade's way for another. Return the upgrade."""
    upgrade = gallery.upgrade.id
    for each in commands:
        gallery.registry.renew(f"{TAKES_ITS_PLACE}{each}", upgrade, lease=COUNTS_AS_KILLED)
        gallery.registry.make_way(upgrade, note="paused")
    return upgrade


@pytest.mark.parametrize("who", ["a command", "a worker"])
def test_an_upgrade_goes_on_if_the_command_that_takes_its_place_is_killed(
    gallery: Gallery, monkeypatch: pytest.MonkeyPatch, who: str
) -> None:
    upgrade = taken(gallery, "killed")
    assert not gallery.registry.end_making_way(upgrade)  # it lived a moment ago
    monkeypatch.setattr(upgrades, "COUNTS_AS_KILLED", 1.0)
    with at_work(gallery) if who == "a worker" else contextlib.nullcontext():
        if who == "a command":
            gallery.conductor().advance(gallery.registry.upgrade(upgrade), gallery.worker())
        wait_until(lambda: gallery.registry.upgrade(upgrade).phase == Phase.CUT_OVER)
    assert "the command that took its place was killed" in [row.note for row in gallery.registry.history(upgrade)]
    gallery.expect_moved()


def test_an_upgrade_stays_paused_while_one_of_two_commands_takes_its_place(gallery: Gallery) -> None:
    upgrade = taken(gallery, "one", "other")
    gallery.registry.retire_worker(f"{TAKES_ITS_PLACE}one")
    assert not gallery.registry.end_making_way(upgrade, note="one failed")
    assert gallery.registry.upgrade(upgrade).makes_way
    gallery.registry.retire_worker(f"{TAKES_ITS_PLACE}other")
    assert gallery.registry.end_making_way(upgrade, note="the other failed, too")
    assert not gallery.registry.upgrade(upgrade).paused


def test_a_pause_by_command_outlasts_the_one_to_make_way(gallery: Gallery) -> None:
    upgrade = taken(gallery, "killed")
    gallery.registry.pause(upgrade)
    gallery.registry.retire_worker(f"{TAKES_ITS_PLACE}killed")
    assert not gallery.registry.end_making_way(upgrade)
    assert gallery.registry.upgrade(upgrade).paused


def signs_of_life(gallery: Gallery) -> list[float]:
    """Return when each command that takes an upgrade's place was last heard of."""
    with Session(gallery.registry.engine) as s:
        return list(s.scalars(select(WorkerRow.seen_at).where(WorkerRow.id.startswith(TAKES_ITS_PLACE))))


def test_a_command_that_takes_the_place_shows_that_it_lives(gallery: Gallery, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it waits for a batch in hand, too."""
    monkeypatch.setattr(register, "COUNTS_AS_KILLED", 0.6)
    batch = gallery.registry.claim(gallery.upgrade.id, "slow", lease=60, grace=60, copy=True)
    assert batch is not None
    taking, seen = threading.Thread(target=gallery.supersede), list[float]()
    taking.start()
    wait_until(lambda: signs_of_life(gallery) and gallery.registry.workers(gallery.upgrade.id, within=60.0))
    while len(set(seen)) < 4:
        seen += signs_of_life(gallery)
        assert gallery.registry.workers(gallery.upgrade.id, within=60.0) != []  # the command's own worker
        time.sleep(0.1)
    gallery.registry.hand_back(batch)
    taking.join(60.0)
    assert not signs_of_life(gallery)
    assert [leg.model for leg in gallery.registry.plan("texts").legs] == ["v3", "v2", "v1"]


def test_a_command_that_counted_as_killed_notices_that_the_upgrade_continues(
    gallery: Gallery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(register, "COUNTS_AS_KILLED", 0.6)
    first = gallery.upgrade.id
    assert gallery.registry.claim(first, "slow", lease=60, grace=60, copy=True) is not None
    resumed = threading.Thread(
        target=lambda: (wait_until(lambda: gallery.registry.upgrade(first).makes_way), gallery.registry.resume(first))
    )
    resumed.start()
    with pytest.raises(errors.WrongPhase, match=f"Upgrade {first} continues by now; run the same command again"):
        gallery.supersede()
    resumed.join(60.0)
    assert not gallery.registry.upgrade(first).paused
    assert not signs_of_life(gallery)


@pytest.mark.parametrize("command", ["finish", "roll_back"])
def test_a_command_goes_on_with_an_upgrade_whose_successor_was_killed(
    gallery: Gallery, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    drive(gallery)
    gallery.registry.set_upgrade(gallery.upgrade.id, listed=True)
    upgrade = taken(gallery, "killed")
    monkeypatch.setattr(upgrades, "COUNTS_AS_KILLED", 0.0)
    conductor = gallery.conductor()
    if command == "finish":
        conductor.finish(gallery.registry.upgrade(upgrade), gallery.worker())
        assert gallery.registry.upgrade(upgrade).phase == Phase.CUT_OVER
    else:
        assert conductor.roll_back(gallery.registry.upgrade(upgrade)) is not None
    assert not signs_of_life(gallery)


def test_only_a_running_upgrade_can_be_superseded(gallery: Gallery) -> None:
    conductor = gallery.conductor()
    back = conductor.roll_back(gallery.upgrade)
    assert back is not None
    with pytest.raises(errors.UpgradeRunning, match=r"is in a roll back from v2 to v1 \(planned\); end it first"):
        gallery.supersede()
    conductor.deploy(back)
    with pytest.raises(errors.UpgradeRunning, match=r"is in a roll back from v2 to v1 \(serving both\); end it first"):
        gallery.supersede()
