"""Writes of clients, announced record by record."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import event, insert

from rmvdb.errors import Mismatch
from rmvdb.registry.registry import Registry
from rmvdb.registry.tables import GalleryRow, IntentRow, UpgradeRow
from rmvdb.types import BatchState, Phase
from tests.support.migrated import migrate
from tests.support.photos import NEW, NEWEST, OLD, OLD_AGAIN, TIMES, add_gallery, add_upgrade, at_once, claimed, opened, supersede
from tests.support.waiting import fall_silent, grow_old, run_out


def test_a_write_waits_while_its_record_is_being_written(registry: Registry, upgrade: UpgradeRow) -> None:
    registry.add_batches(upgrade.id, [([1, 2], None)], first=1)
    batch = claimed(registry, upgrade)
    mine, other = opened(registry, [2]), opened(registry, [3])
    read = registry.blocked(mine, [2])
    registry.advance(batch, BatchState.WRITING)
    writing = registry.blocked(mine, [2]), registry.blocked(other, [3])
    registry.copied(batch, requeue=[], aside={})

    assert not read
    assert writing == (True, False)
    assert not registry.blocked(mine, [2])


def test_a_write_does_not_wait_for_a_worker_that_died(registry: Registry, upgrade: UpgradeRow) -> None:
    registry.add_batches(upgrade.id, [([1], None)], first=1)
    registry.advance(claimed(registry, upgrade), BatchState.WRITING)
    run_out(registry)

    assert not registry.blocked(opened(registry, [1]), [1])


def test_of_two_writes_of_one_record_the_later_waits(registry: Registry, gallery: GalleryRow) -> None:
    first, second = opened(registry, [1, 2], client="c1#1"), opened(registry, [2, 3], client="c1#2")
    before = registry.blocked(first, [1, 2]), registry.blocked(second, [2, 3])
    registry.close_intents(first)

    assert before == (False, True)
    assert not registry.blocked(second, [2, 3])


@pytest.mark.parametrize("end", ["withdrawn", "expired"])
def test_a_write_that_was_given_up_delays_no_other(registry: Registry, upgrade: UpgradeRow, end: str) -> None:
    first = opened(registry, [1], lasting=60 if end == "withdrawn" else 0.1)
    if end == "withdrawn":
        registry.withdraw_intents(first)
    time.sleep(0.2)

    second = opened(registry, [1], client="c2")

    assert not registry.blocked(second, [1])
    assert registry.open_writes(upgrade.gallery_id) == set(second.intents)


@pytest.mark.parametrize("planned", [False, True])
def test_intents_of_writes_that_never_ended_go_with_the_next_write_outside_an_upgrade(
    registry: Registry, gallery: GalleryRow, *, planned: bool
) -> None:
    """While one is, a copy may be being made, which has to be asked for these."""
    under_way = opened(registry, [3], client="c2", lasting=200)
    opened(registry, [1, 2], client="killed")
    if planned:
        add_upgrade(registry, gallery, phase=Phase.PLANNED)
    grow_old(registry, seconds=61)
    opened(registry, [4], client="c3")

    assert sorted(registry.expired_writes("photos")) == ([1, 2] if planned else [])
    assert set(under_way.intents) < registry.open_writes(gallery.id)


def test_a_write_that_was_forgotten_marks_no_other_one_as_done(registry: Registry, gallery: GalleryRow) -> None:
    forgotten = opened(registry, [1])
    registry.withdraw_intents(forgotten)
    later = opened(registry, [1])
    registry.close_intents(forgotten)
    assert registry.open_writes(gallery.id) == set(later.intents)


def test_of_two_writes_announced_at_once_just_one_goes_first(registry: Registry, gallery: GalleryRow) -> None:
    slow = Registry(registry.url.render_as_string(hide_password=False))
    slow.now()  # it has set its clock before the race begins
    event.listen(slow.engine, "commit", lambda _: time.sleep(0.5))
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(opened, slow, [1], client="slow")
        time.sleep(0.2)
        second = opened(registry, [1])
        blocked = [registry.blocked(second, [1]), registry.blocked(first.result(), [1])]
    slow.close()

    assert sorted(blocked) == [False, True]


def test_two_clients_never_write_one_record_at_the_same_time(registry: Registry, upgrade: UpgradeRow) -> None:
    busy: Counter[int] = Counter()
    clashes: list[int] = []
    guard = threading.Lock()

    def write(number: int) -> None:
        for turn in range(12):
            ids = [1, 2] if (number + turn) % 2 else [2, 1]
            mine = opened(registry, ids, client=f"c{number}")
            while registry.blocked(mine, ids):
                time.sleep(0.001)
            with guard:
                busy.update(ids)
                clashes.extend(id for id in ids if busy[id] > 1)
            time.sleep(0.001)
            with guard:
                busy.subtract(ids)
            registry.close_intents(mine)

    at_once(6, write)

    assert clashes == []


def test_a_worker_sees_open_writes_and_the_last_done_one(registry: Registry, upgrade: UpgradeRow) -> None:
    registry.close_intents(opened(registry, [1]))
    removal = registry.open_intents("photos", "delete", [1], client="c1", lasting=60)
    assert removal is not None
    registry.close_intents(removal)
    registry.close_intents(opened(registry, [2]))
    opened(registry, [2])
    opened(registry, [3], lasting=0.05)
    time.sleep(0.1)
    found = registry.intents(upgrade.id, [1, 2, 3, 4])

    assert {record: (row.kind, row.done) for record, row in found.items()} == {"1": ("delete", True), "2": ("upsert", False)}


def test_writes_are_read_a_page_at_a_time(registry: Registry, upgrade: UpgradeRow) -> None:
    registry.close_intents(opened(registry, [1, 2, 3]))
    opened(registry, [4])
    page = registry.written(upgrade.id, limit=2)
    rest = registry.written(upgrade.id, after=page[-1].id)

    assert [(row.record, row.done) for row in [*page, *rest]] == [("1", True), ("2", True), ("3", True), ("4", False)]


def test_a_write_past_its_deadline_is_not_done(registry: Registry, upgrade: UpgradeRow) -> None:
    late, done = opened(registry, [1], lasting=0.1), opened(registry, [2])
    time.sleep(0.2)
    ended = registry.close_intents(late), registry.close_intents(done)

    assert ended == (False, True)
    assert registry.close_intents(done), "repeated, because the answer was lost"
    assert registry.intents(upgrade.id, [1, 2]).keys() == {"2"}


def test_a_write_past_its_deadline_is_not_done_outside_an_upgrade_either(registry: Registry, gallery: GalleryRow) -> None:
    late, done = opened(registry, [1]), opened(registry, [2], lasting=200)
    grow_old(registry, seconds=61)

    assert not registry.close_intents(late)
    assert registry.close_intents(done)
    assert registry.close_intents(done)


def test_a_write_that_was_given_up_half_way_is_returned_to_a_caller_that_asks_for_it(
    registry: Registry, upgrade: UpgradeRow
) -> None:
    registry.close_intents(opened(registry, [1, 2]))
    opened(registry, [2, 3], client="c2", lasting=0.1)
    time.sleep(0.2)
    found = registry.announced(upgrade.id, [1, 2, 3, 4])

    assert {record: row.done for record, row in found.items()} == {"1": True, "2": False, "3": False}


def test_a_write_waits_for_clients_that_serve_by_the_plan_before(registry: Registry, gallery: GalleryRow) -> None:
    def refresh(client: str, *, holds: int) -> None:
        registry.refresh("photos", client=client, holds=holds, ready=2, trouble="")

    refresh("new", holds=0)
    refresh("slow", holds=1)
    registry.activate("photos", registry.announce("photos", [NEW, OLD], TIMES))
    refused = [registry.open_intents("photos", "upsert", [1], client="c1", lasting=60)]
    for client in ("new", "slow"):
        refresh(client, holds=1)  # it hears of the new plan now, and may search by the plan before until it says so
        refresh(client, holds=2)
        refused += [registry.open_intents("photos", "upsert", [1], client="c1", lasting=60)]

    assert [made and made.plan.epoch for made in refused] == [None, None, 2]


def test_a_write_does_not_wait_for_a_client_that_fell_silent(registry: Registry) -> None:
    add_gallery(registry)
    registry.refresh("photos", client="silent", ready=2, trouble="")
    registry.activate("photos", registry.announce("photos", [NEW, OLD], TIMES))
    before = registry.open_intents("photos", "upsert", [1], client="c1", lasting=60)
    fall_silent(registry, "silent", seconds=TIMES["max_age"] + 1)

    assert before is None
    assert opened(registry, [1]).plan.epoch == 2


def test_a_write_under_the_old_plan_is_not_the_planned_upgrades(registry: Registry, gallery: GalleryRow) -> None:
    planned = add_upgrade(registry, gallery, phase=Phase.PLANNED)
    before = opened(registry, [1])
    registry.close_intents(before)
    registry.activate("photos", registry.announce("photos", [NEW, OLD], TIMES))

    assert before.upgrade is None
    assert opened(registry, [1]).upgrade == planned.id


def test_a_write_while_a_roll_back_is_planned_belongs_to_what_is_undone(
    registry: Registry, gallery: GalleryRow, upgrade: UpgradeRow
) -> None:
    registry.set_upgrade(upgrade.id, phase=Phase.ENDED)
    back = add_upgrade(
        registry, gallery, undoes=upgrade.id, old_collections=["photos_2"], new_collection="photos_3", phase=Phase.PLANNED
    )
    during = opened(registry, [1])
    registry.close_intents(during)
    registry.activate("photos", registry.announce("photos", [OLD_AGAIN, NEW], TIMES))

    assert during.upgrade == upgrade.id
    assert opened(registry, [2]).upgrade == back.id


def test_a_write_while_a_third_version_is_planned_belongs_to_what_it_supersedes(registry: Registry, upgrade: UpgradeRow) -> None:
    heir = supersede(registry, upgrade)
    during = opened(registry, [1])
    registry.close_intents(during)
    registry.activate("photos", registry.announce("photos", [NEWEST, NEW, OLD], TIMES, upgrade=heir.id))

    assert during.upgrade == upgrade.id
    assert opened(registry, [2]).upgrade == heir.id


def test_a_write_outside_an_upgrade_leaves_nothing_behind(registry: Registry, gallery: GalleryRow) -> None:
    write = opened(registry, [1])
    during = registry.open_writes(gallery.id)
    registry.close_intents(write)

    assert write.upgrade is None
    assert (during, registry.open_writes(gallery.id)) == (set(write.intents), set())


def test_thousands_of_records_are_one_write(registry: Registry, upgrade: UpgradeRow) -> None:
    many = list(range(5000))
    registry.add_batches(upgrade.id, [([4999], None)], first=1)
    batch = claimed(registry, upgrade)
    write = opened(registry, many)
    registry.advance(batch, BatchState.WRITING)
    blocked = registry.blocked(write, many)
    registry.close_intents(write)

    assert blocked
    assert len(registry.intents(upgrade.id, many)) == 5000


def test_thousands_of_records_can_be_given_up(registry: Registry, gallery: GalleryRow) -> None:
    registry.withdraw_intents(opened(registry, list(range(5000))))

    assert registry.open_writes(gallery.id) == set()


def test_a_write_announced_twice_because_its_answer_was_lost_waits_only_for_others(
    registry: Registry, gallery: GalleryRow
) -> None:
    opened(registry, [1, 2], client="c1#1")
    again = opened(registry, [1, 2], client="c1#1")

    assert registry.open_writes(gallery.id) == set(again.intents)
    assert not registry.blocked(again, [1, 2])
    assert registry.blocked(opened(registry, [2], client="c1#2"), [2])


def test_an_id_that_postgresql_could_not_keep_is_refused_by_name(registry: Registry, gallery: GalleryRow) -> None:
    opened(registry, ["ü" * 1250])  # type: ignore[list-item]
    for id, saying in (("a\0b", "contains NUL"), ("ü" * 1251, r"The id 'ü{59}… has more than 2,500 bytes")):
        with pytest.raises(Mismatch, match=saying):
            opened(registry, [id])  # type: ignore[list-item]


def test_done_writes_are_forgotten_up_to_a_number(registry: Registry, upgrade: UpgradeRow) -> None:
    for id, client in ((1, "c1#0"), (2, "c1#1"), (1, "upgrade 1:a")):  # a conductor's write leaves a client's where it is
        registry.close_intents(opened(registry, [id], client=client))
    opened(registry, [1], client="c2")
    numbers = [row.id for row in registry.written(upgrade.id)]
    registry.forget_done(upgrade.id, [1, 3], upto=numbers[1])
    assert [row.id for row in registry.written(upgrade.id)] == numbers[1:]
    registry.forget_done(upgrade.id, [1, 3], upto=numbers[3])
    assert [row.id for row in registry.written(upgrade.id)] == [numbers[1], numbers[3]]


def test_no_call_reads_all_that_clients_wrote_during_an_upgrade(sqlite_url: str) -> None:
    """SQLite counts the instructions of its statements: a row that is read takes some."""
    migrate(sqlite_url)
    registry = Registry(sqlite_url)
    gallery = add_gallery(registry)
    upgrade = add_upgrade(registry, gallery)
    epoch = registry.announce("photos", [NEW, OLD], TIMES)
    made, steps = 5_000, Counter[str]()
    done = {
        "gallery_id": gallery.id, "upgrade_id": upgrade.id, "kind": "upsert", "done": True, "epoch": 1, "client": "c0",
        "opened_at": 0.0, "deadline": 0.0,
    }  # fmt: skip
    with registry.engine.begin() as connection:
        connection.execute(insert(IntentRow), [done | {"record": str(number)} for number in range(made)])

    def count(name: str, call: Callable[[], object]) -> None:
        def note(connection: object, cursor: sqlite3.Cursor, *_: object) -> None:
            cursor.connection.set_progress_handler(lambda: steps.update([name]), 1)

        event.listen(registry.engine, "before_cursor_execute", note)
        call()
        event.remove(registry.engine, "before_cursor_execute", note)

    count("open during it", lambda: opened(registry, [1, 2]))
    count("writes under way", lambda: registry.open_writes(gallery.id))
    registry.withdraw_intents(opened(registry, [1, 2]))  # the same write again
    count("activate", lambda: registry.activate("photos", epoch))
    count("decide", lambda: registry.intents(upgrade.id, [1, 2]))
    count("announced", lambda: registry.announced(upgrade.id, [1, 2]))
    count("last done", lambda: registry.last_done(upgrade.id, [1, 2]))
    count("forget", lambda: registry.forget_done(upgrade.id, [3, 4], upto=made))
    count("page", lambda: registry.written(upgrade.id, after=made - 10, limit=5))
    registry.set_upgrade(upgrade.id, phase=Phase.ENDED)
    count("open after it", lambda: opened(registry, [1, 2]))
    registry.close()

    assert {name for name, number in steps.items() if number > made} == set()
    assert len(steps) == 9


def test_of_many_writes_of_one_record_the_last_is_kept(registry: Registry, upgrade: UpgradeRow) -> None:
    """A record that an application writes every minute for a week would be read ten thousand times by each look."""
    for number in range(5):
        write = opened(registry, [1, 2], client=f"c1#{number}")
        registry.close_intents(write, {write.intents[0]: bytes([number])})
    by_conductor = opened(registry, [1], client="upgrade 1:a")
    registry.close_intents(by_conductor)
    killed = opened(registry, [2], client="c2#1", lasting=-1.0)
    rows = {(row.record, row.client) for row in registry.written(upgrade.id)}
    assert rows == {("1", "c1#4"), ("2", "c1#4"), ("1", "upgrade 1:a"), ("2", "c2#1")}
    assert registry.announced(upgrade.id, [1])["1"].client == "upgrade 1:a"
    assert registry.announced(upgrade.id, [2])["2"].id == killed.intents[0]
    assert registry.last_done(upgrade.id, [1, 2]) == {"1": "upsert", "2": "upsert"}
    late = opened(registry, [1], client="upgrade 1:b")
    registry.close_intents(late)
    assert {row.client for row in registry.written(upgrade.id) if row.record == "1"} == {"c1#4", "upgrade 1:b"}
