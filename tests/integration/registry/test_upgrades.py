"""Upgrades: one at a time, one in another's place, one conductor."""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import event

from rmvdb.errors import UpgradeRunning, WrongPhase
from rmvdb.registry import shared_queries, upgrades
from rmvdb.registry.codec import unpack_ids
from rmvdb.registry.registry import Registry
from rmvdb.registry.tables import GalleryRow, UpgradeRow
from rmvdb.registry.upgrade_plan import UpgradePlan
from rmvdb.types import Leg, Phase
from tests.support.photos import NEW, NEWEST, OLD, TIMES, add_gallery, add_upgrade, at_once, opened, set_aside, supersede


def test_a_gallery_has_one_upgrade_at_a_time(registry: Registry, gallery: GalleryRow, upgrade: UpgradeRow) -> None:
    with pytest.raises(UpgradeRunning, match="Another upgrade of this gallery has not ended"):
        add_upgrade(registry, gallery)
    active = registry.active_upgrade(gallery.id)

    assert active is not None
    assert active.id == upgrade.id


def test_columns_that_depend_on_the_number_of_an_upgrade_are_registered_with_it_or_not_at_all(
    registry: Registry, gallery: GalleryRow
) -> None:
    def crash(number: int) -> dict[str, Any]:
        raise ZeroDivisionError(number)

    registry.add_version(name="v2", embedder="models:new", dim=8, metric="COSINE")
    with pytest.raises(ZeroDivisionError):
        add_upgrade(registry, gallery, details=crash)
    none = registry.upgrades()
    row = add_upgrade(
        registry,
        gallery,
        details=lambda number: {"new_collection": f"u{number}", "plan": UpgradePlan(question={"number": number})},
    )
    found = registry.upgrade(row.id)

    assert none == []
    assert (found.new_collection, found.plan.question) == (f"u{row.id}", {"number": row.id})


def test_an_upgrade_can_skip_numbers_and_the_next_one_goes_on_from_there(registry: Registry, gallery: GalleryRow) -> None:
    registry.add_version(name="v2", embedder="models:new", dim=8, metric="COSINE")
    numbers = []
    for above in (7, 7, 0, 41, 3):
        row = add_upgrade(registry, gallery, above=above)
        if above == 3:
            row = supersede(registry, row, above=60)
            assert row.id == 61
        registry.end(row.id, note="given up")
        numbers.append(row.id)
    assert (numbers[0], numbers[3]) == (8, 42)
    assert numbers == sorted(set(numbers))


def test_of_eight_that_begin_an_upgrade_at_once_one_does(registry: Registry, gallery: GalleryRow) -> None:
    registry.add_version(name="v2", embedder="models:new", dim=8, metric="COSINE")

    def begin(_: int) -> str:
        try:
            add_upgrade(registry, gallery)
        except UpgradeRunning:
            return "refused"
        return "begun"

    assert Counter(at_once(8, begin)) == {"begun": 1, "refused": 7}


def test_the_next_upgrade_begins_when_the_last_has_ended(registry: Registry, gallery: GalleryRow, upgrade: UpgradeRow) -> None:
    registry.set_upgrade(upgrade.id, phase=Phase.ENDED)
    none = registry.active_upgrade(gallery.id)
    second = add_upgrade(registry, gallery, undoes=upgrade.id)
    other = add_gallery(registry, "pictures")
    third = add_upgrade(registry, other)

    assert none is None
    assert registry.upgrade(upgrade.id).ended_at is not None
    assert registry.upgrade(second.id).undoes == upgrade.id
    assert [row.id for row in registry.upgrades(gallery.id)] == [upgrade.id, second.id]
    assert [row.id for row in registry.upgrades()] == [upgrade.id, second.id, third.id]


def test_an_upgrade_takes_the_place_of_another_at_one_stroke(
    registry: Registry, gallery: GalleryRow, upgrade: UpgradeRow
) -> None:
    heir = supersede(registry, upgrade)
    again = supersede(registry, upgrade)  # the answer of the first was lost
    active = registry.active_upgrade(gallery.id)

    assert active is not None
    assert active.id == heir.id == again.id
    assert (heir.supersedes, heir.old_collections) == (upgrade.id, ["photos_2", "photos_1"])
    assert registry.history(upgrade.id)[-1].note == "superseded"
    assert [each.note for each in registry.history(heir.id)] == [f"takes the place of upgrade {upgrade.id}"]


def test_an_upgrades_columns_may_depend_on_its_number(registry: Registry, upgrade: UpgradeRow) -> None:
    heir = supersede(registry, upgrade, details=lambda number: {"new_collection": f"photos_u{number}"})

    assert registry.upgrade(heir.id).new_collection == f"photos_u{heir.id}"


def test_of_eight_that_take_the_place_of_one_upgrade_one_does(registry: Registry, upgrade: UpgradeRow) -> None:
    for number in range(8):
        registry.add_version(name=f"w{number}", embedder="models:w", dim=8, metric="COSINE")

    def begin(number: int) -> str:
        try:
            return supersede(registry, upgrade, to_version=f"w{number}").to_version
        except WrongPhase:
            return "refused"

    assert Counter(at_once(8, begin)).most_common(1) == [("refused", 7)]


def test_no_upgrade_takes_the_place_of_one_that_is_just_changing_what_is_served(registry: Registry, upgrade: UpgradeRow) -> None:
    seen = registry.plan("photos").epoch
    registry.activate("photos", registry.announce("photos", [NEW], TIMES, upgrade=upgrade.id))

    with pytest.raises(WrongPhase, match="'photos' is served differently since; run the same command again"):
        supersede(registry, upgrade, epoch=seen)
    assert registry.upgrade(upgrade.id).phase == Phase.SERVING_BOTH


def test_an_upgrade_that_has_ended_changes_nothing_more(registry: Registry, upgrade: UpgradeRow) -> None:
    """Its conductor may be in the middle of a step when another upgrade takes its place."""
    announced = registry.announce("photos", [NEW], TIMES, upgrade=upgrade.id)
    supersede(registry, upgrade)

    with pytest.raises(WrongPhase, match=f"Plan epoch {announced} of gallery 'photos' is not the announced one; none is"):
        registry.activate("photos", announced)
    ended = f"Upgrade {upgrade.id} has ended; see what took its place: rmvdb history"
    with pytest.raises(WrongPhase, match=ended):
        registry.announce("photos", [NEW], TIMES, upgrade=upgrade.id)
    with pytest.raises(WrongPhase, match=ended):
        registry.set_upgrade(upgrade.id, phase=Phase.CUT_OVER)
    with pytest.raises(WrongPhase, match=ended):
        registry.add_batches(upgrade.id, [([1], None)], first=1)
    with pytest.raises(WrongPhase, match=ended):
        registry.add_late(upgrade.id, [1])
    assert [leg.collection for leg in registry.plan("photos").legs] == ["photos_2", "photos_1"]


@pytest.mark.parametrize("served", [[NEW, OLD], [NEW, replace(OLD, searched=False)]])
def test_no_clean_up_begins_that_would_drop_what_is_in_service(
    registry: Registry, upgrade: UpgradeRow, served: list[Leg]
) -> None:
    registry.activate("photos", registry.announce("photos", served, TIMES))
    registry.set_upgrade(upgrade.id, phase=Phase.CUT_OVER)

    with pytest.raises(WrongPhase, match="Collection 'photos_1' is in service and cannot be dropped"):
        registry.begin_clean_up(upgrade.id)
    assert registry.upgrade(upgrade.id).phase == Phase.CUT_OVER


def test_of_eight_that_give_up_an_upgrade_at_once_all_did_and_one_wrote_it_down(registry: Registry, gallery: GalleryRow) -> None:
    registry.add_version(name="v2", embedder="models:new", dim=8, metric="COSINE")
    row = add_upgrade(registry, gallery, phase=Phase.PLANNED)
    before = registry.plan("photos").epoch

    assert at_once(8, lambda _: registry.abandon(row.id, note="given up")) == [True] * 8
    assert registry.abandon(row.id, note="given up")  # the answer of the first was lost
    assert [each.note for each in registry.history(row.id) if each.phase == Phase.ENDED] == ["given up"]
    assert registry.active_upgrade(gallery.id) is None
    assert registry.plan("photos").epoch == before


def test_a_conductor_that_asks_for_a_plan_in_a_past_phase_is_refused(registry: Registry, upgrade: UpgradeRow) -> None:
    asks: dict[str, Any] = {"upgrade": upgrade.id, "phase": Phase.SERVING_BOTH}
    epoch = registry.announce("photos", [NEW], TIMES, **asks)
    registry.set_upgrade(upgrade.id, phase=Phase.CUT_OVER)

    over = f"Upgrade {upgrade.id} is cut over by now, not serving both; run the same command again"
    with pytest.raises(WrongPhase, match=over):
        registry.activate("photos", epoch, **asks)
    with pytest.raises(WrongPhase, match=over):
        registry.announce("photos", [NEW, OLD], TIMES, **asks)


def test_an_upgrade_goes_on_with_the_writes_made_while_another_had_its_place(
    registry: Registry, gallery: GalleryRow, upgrade: UpgradeRow
) -> None:
    registry.set_upgrade(upgrade.id, paused=True)
    registry.add_batches(upgrade.id, [([1, 2], None)], first=1)
    registry.close_intents(opened(registry, [1]))
    heir = supersede(registry, upgrade)
    registry.set_upgrade(heir.id, phase=Phase.SERVING_BOTH)
    registry.activate("photos", registry.announce("photos", [NEWEST, NEW, OLD], TIMES, upgrade=heir.id))
    registry.add_batches(heir.id, [([1, 2], None)], first=1)
    registry.close_intents(opened(registry, [2]))
    registry.end(heir.id, note="given up", resume=upgrade.id)
    registry.end(heir.id, note="given up", resume=upgrade.id)  # the answer of the first was lost
    active = registry.active_upgrade(gallery.id)

    assert active is not None
    assert (active.id, active.phase, active.paused, active.ended_at) == (upgrade.id, Phase.SERVING_BOTH, False, None)
    assert [row.record for row in registry.written(upgrade.id)] == ["1", "2"]
    assert registry.listed_ids(upgrade.id) == {1, 2}
    assert forgotten(registry, gallery) == [1]
    assert registry.batches(heir.id) == []
    assert [each.note for each in registry.history(upgrade.id)][1:] == ["superseded", f"goes on after upgrade {heir.id}"]
    assert registry.history(heir.id)[-1].note == "given up"


def test_a_write_that_is_announced_while_an_upgrade_ends_belongs_to_the_one_that_continues(
    registry: Registry, upgrade: UpgradeRow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If its intent were lost, a deletion would be forgotten, and a later roll back would bring the record back."""
    if registry.engine.dialect.name == "sqlite":
        return  # its transactions follow one another
    registry.set_upgrade(upgrade.id, paused=True)
    heir = supersede(registry, upgrade)
    registry.set_upgrade(heir.id, phase=Phase.SERVING_BOTH)
    registry.activate("photos", registry.announce("photos", [NEWEST, NEW, OLD], TIMES, upgrade=heir.id))
    real, threads = upgrades._hand_over_writes, list[threading.Thread]()

    def hand_over(*values: Any) -> None:
        real(*values)
        if not threads:
            threads.append(threading.Thread(target=opened, args=[registry, [7]]))
            threads[0].start()
            threads[0].join(2.0)

    monkeypatch.setattr(upgrades, "_hand_over_writes", hand_over)
    registry.end(heir.id, note="given up", resume=upgrade.id)
    threads[0].join()
    assert [row.record for row in registry.written(upgrade.id)] == ["7"]
    assert registry.written(heir.id) == []


def test_intents_go_some_at_a_time_because_a_server_ends_a_statement_of_30_seconds(
    registry: Registry, gallery: GalleryRow, upgrade: UpgradeRow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_queries, "MANY", 2)
    changed: list[int] = []

    def note(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        if statement.startswith(("DELETE FROM intents", "UPDATE intents")):
            changed.append(cursor.rowcount)

    registry.close_intents(opened(registry, [1, 2, 3, 4, 5]))
    heir = supersede(registry, upgrade)
    registry.set_upgrade(heir.id, phase=Phase.SERVING_BOTH)
    registry.activate("photos", registry.announce("photos", [NEWEST, NEW, OLD], TIMES, upgrade=heir.id))
    later = opened(registry, [6, 7, 8])
    registry.close_intents(later, dict.fromkeys(later.intents, b"sketch"))
    event.listen(registry.engine, "after_cursor_execute", note)
    registry.end(heir.id, note="given up", resume=upgrade.id)
    resumed = registry.written(upgrade.id)
    registry.end(upgrade.id, note="cleaned up")
    event.remove(registry.engine, "after_cursor_execute", note)

    assert [(row.record, row.sketch) for row in resumed] == [(str(id), None) for id in range(1, 9)]
    assert changed == [2, 1, 0, 0]  # it looks twice, for writes that were announced meanwhile
    assert forgotten(registry, gallery, most=3) == [3, 3, 2]
    assert registry.written(upgrade.id) == []


def test_phases_and_notes_make_the_history(registry: Registry, upgrade: UpgradeRow) -> None:
    registry.set_upgrade(upgrade.id, paused=True, rate=50.0)
    registry.set_upgrade(upgrade.id, reason="the disk is full", note="stopped")
    registry.set_upgrade(upgrade.id, phase=Phase.CUT_OVER, plan=UpgradePlan(until=0.5))
    row = registry.upgrade(upgrade.id)

    assert [(each.phase, each.note) for each in registry.history(upgrade.id)] == [
        ("serving both", "registered"),
        ("serving both", "stopped"),
        ("cut over", ""),
    ]
    assert (row.phase, row.paused, row.rate, row.reason) == ("cut over", True, 50.0, "the disk is full")
    assert row.plan == UpgradePlan(until=0.5)


def test_one_process_conducts_until_it_hands_over_or_falls_silent(registry: Registry, upgrade: UpgradeRow) -> None:
    first = registry.lead(upgrade.id, "w1", 60)
    assert first is not None
    assert registry.keep_leading(upgrade.id, first, 60)
    assert registry.lead(upgrade.id, "w2", 60) is None
    assert registry.keep_leading(upgrade.id, first, 0)
    second = registry.lead(upgrade.id, "w2", 0.05)
    time.sleep(0.1)
    third = registry.lead(upgrade.id, "w3", 60)
    assert second is not None
    assert third is not None
    assert first < second < third
    assert not registry.keep_leading(upgrade.id, second, 60)


def test_of_eight_that_would_conduct_one_does(registry: Registry, upgrade: UpgradeRow) -> None:
    tokens = at_once(8, lambda number: registry.lead(upgrade.id, f"w{number}", 60))
    assert len([token for token in tokens if token is not None]) == 1


@pytest.mark.parametrize("still", [True, False])
def test_a_conductor_that_was_overtaken_makes_no_work_list(registry: Registry, gallery: GalleryRow, *, still: bool) -> None:
    """Not after the one that overtook it has ended, either, when the leadership is free again."""
    upgrade = add_upgrade(registry, gallery)
    first = registry.lead(upgrade.id, "first", 0.0001)
    time.sleep(0.01)
    second = registry.lead(upgrade.id, "second", 10.0)
    assert second is not None
    registry.add_batches(upgrade.id, [([1], None)], first=1, leader_token=second)
    if not still:
        registry.keep_leading(upgrade.id, second, 0)
    who = "second" if still else "Another process"
    for step in (
        lambda: registry.discard_list(upgrade.id, leader_token=first),
        lambda: registry.add_batches(upgrade.id, [([2], None)], first=2, leader_token=first),
        lambda: registry.set_upgrade(upgrade.id, listed=True, leader_token=first),
    ):
        with pytest.raises(UpgradeRunning, match=f"{who} took upgrade {upgrade.id} over while this one was suspended"):
            step()
    assert [unpack_ids(row.ids) for row in registry.batches(upgrade.id)] == [[1]]
    assert not registry.upgrade(upgrade.id).listed


def forgotten(registry: Registry, gallery: GalleryRow, **options: Any) -> list[int]:
    """Forget what ended upgrades left, as a clean-up does. Return the rows of each transaction."""
    return list(iter(lambda: registry.forget_ended(gallery.id, **options), 0))


def test_an_upgrade_that_a_roll_back_may_need_is_not_forgotten(
    registry: Registry, gallery: GalleryRow, upgrade: UpgradeRow
) -> None:
    registry.add_batches(upgrade.id, [([1], None), ([2], None)], first=1)
    registry.close_intents(opened(registry, [1, 2, 3]))
    heir = supersede(registry, upgrade)
    assert forgotten(registry, gallery) == []
    registry.end(heir.id, upgrade.id, note="cleaned up")
    assert forgotten(registry, gallery, most=2) == [2, 2, 1]
    assert registry.written(upgrade.id) == registry.batches(upgrade.id) == []


def test_clean_up_keeps_the_history_only(registry: Registry, gallery: GalleryRow, upgrade: UpgradeRow) -> None:
    registry.add_batches(upgrade.id, [([1], None)], first=1)
    registry.close_intents(opened(registry, [1]))
    set_aside(registry, upgrade, {1: "cannot be read"})
    registry.end(upgrade.id, note="cleaned up")
    assert sum(forgotten(registry, gallery)) == 4  # a record that is set aside has a batch of its own

    assert registry.batches(upgrade.id) == []
    assert registry.written(upgrade.id) == []
    assert registry.quarantined(upgrade.id) == []
    assert [each.note for each in registry.history(upgrade.id)] == ["registered", "cleaned up"]
