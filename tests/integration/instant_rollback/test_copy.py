"""The copy of a kept original is made once, at the rate that is allowed, and by one conductor at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rmvdb import errors
from rmvdb.backfill.throttle import Limits
from rmvdb.registry.tables import UpgradeRow
from rmvdb.types import Id, Phase, Record
from rmvdb.upgrade import change_epoch, deploy, keep_original
from rmvdb.upgrade.copy_collection import PASSES
from rmvdb.upgrade.status import status
from tests.support.inprocess import UNLIMITED, Gallery
from tests.support.kept_original import ORIGINAL, begin, die_in_the_copy, expect_holds, expect_original, foreign, go_on, put
from tests.support.waiting import wait_until


def test_a_copy_that_was_interrupted_is_finished(gallery: Gallery) -> None:
    row = begin(gallery)
    die_in_the_copy(gallery, row)
    with gallery.client() as client:
        put(gallery, client, 15, "written into both")
    assert go_on(gallery, row).phase == Phase.CUT_OVER
    expect_holds(gallery, row.new_collection, "v2")
    expect_original(gallery)


def stop_after(gallery: Gallery, row: UpgradeRow, pages: int) -> bool:
    """Let a conductor deploy, and end it after so many pages of the copy. Return whether it deployed before."""
    left, conductor = iter(range(pages)), gallery.conductor()

    def report(*_: object) -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt

    conductor.report = report
    try:
        conductor.deploy(row)
    except KeyboardInterrupt:
        return False
    return True


@pytest.mark.usefixtures("_small_pages")
def test_of_a_copy_that_was_interrupted_only_what_is_left_is_read_and_then_all_is_compared(gallery: Gallery) -> None:
    row = begin(gallery)
    assert not stop_after(gallery, row, 1)
    doing = status(gallery.registry, gallery.registry.gallery("texts")).doing
    assert doing == f"planned; searches are as before; {ORIGINAL} is being copied, 20 of 40 records"
    real, conductor, read, shown = gallery.store.get, gallery.conductor(), set[Id](), list[tuple[int, set[Id]]]()

    def get(collection: str, ids: Sequence[Id], **options: Any) -> list[Record]:
        read.update(ids)
        return real(collection, ids, **options)

    gallery.store.get = get  # type: ignore[method-assign]
    conductor.report = lambda _, done, __: shown.append((done, set(read)))
    conductor.deploy(row)
    assert [done for done, _ in shown] == [30, 40, *[40] * 4, 10, 20, 30, 40, *[40] * 4]
    assert shown[1][1] == set(range(21, 41))


@pytest.mark.usefixtures("_small_pages")
def test_a_copy_that_is_interrupted_again_and_again_comes_to_its_end_with_what_changed_behind_it(gallery: Gallery) -> None:
    row = begin(gallery)
    assert not stop_after(gallery, row, 2)
    foreign(gallery, 3)
    foreign(gallery, 60)
    with gallery.client() as client:
        put(gallery, client, 15, "written into both")
    lives = iter(range(PASSES * 9))  # pages at the most: of five passes over 41 records twice, and some more
    while not stop_after(gallery, row, 1):
        assert next(lives, None) is not None, "the copy does not come to its end"
    copied, original = gallery.records(*row.old_collections), gallery.records(ORIGINAL)
    assert {id: each.fields for id, each in copied.items()} == {id: each.fields for id, each in original.items()}
    assert go_on(gallery, row).phase == Phase.CUT_OVER
    expect_holds(gallery, row.new_collection, "v2")
    expect_original(gallery)


@pytest.mark.usefixtures("_small_pages")
def test_an_interruption_of_a_pass_that_finds_nothing_costs_no_other_pass(gallery: Gallery) -> None:
    row = begin(gallery)
    assert not stop_after(gallery, row, 10)  # the first pass has eight pages
    shown: list[int] = []
    conductor = gallery.conductor()
    conductor.report = lambda _, done, __: shown.append(done)
    conductor.deploy(row)
    assert shown == [40, *[40] * 4]


@contextmanager
def copying(gallery: Gallery, row: UpgradeRow, *, limits: Limits = UNLIMITED) -> Iterator[list[float]]:
    """Let a worker with these limits deploy, ten records at a time. Give the times at which pages of the copy were written."""
    pages: list[float] = []

    def count(call: str, collection: str) -> None:
        if (call, collection) == ("upsert", row.old_collections[0]):
            pages.append(time.monotonic())

    gallery.store.after = count
    with ThreadPoolExecutor(1) as pool:
        deployed = pool.submit(gallery.conductor().launch, row, gallery.worker(limits=limits))
        yield pages
        deployed.result(timeout=60)


@pytest.fixture
def _small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keep_original, "COPIED_AT_ONCE", 10)


@pytest.mark.usefixtures("_small_pages")
@pytest.mark.parametrize("whose", ["the worker's", "asked for"])
def test_the_copy_is_made_no_faster_than_the_rate(gallery: Gallery, whose: str) -> None:
    row = begin(gallery)
    if whose == "asked for":
        gallery.registry.set_upgrade(row.id, rate=20.0)
    began = time.monotonic()
    with copying(gallery, row, limits=UNLIMITED if whose == "asked for" else Limits(rate=20)) as pages:
        pass
    assert len(pages) == 4
    assert pages[-1] - began > 30 / 20
    assert gallery.registry.workers(row.id, within=60) == []


@pytest.mark.usefixtures("_small_pages")
@pytest.mark.parametrize("way", ["flag", "pause"])
def test_nothing_is_copied_while_the_flag_file_exists_or_it_is_paused(gallery: Gallery, tmp_path: Path, way: str) -> None:
    row, flag = begin(gallery), tmp_path / "hold"
    why = f"flag file {flag} exists" if way == "flag" else "paused; to continue, run rmvdb resume"
    flag.touch()
    if way == "pause":
        gallery.registry.pause(row.id)
    with copying(gallery, row, limits=Limits(flag=flag if way == "flag" else None)) as pages:
        wait_until(lambda: status(gallery.registry, gallery.registry.gallery("texts")).held_back == why)
        time.sleep(1.0)
        held = list(pages)
        flag.unlink()
        gallery.registry.resume(row.id)
    assert (held, len(pages)) == ([], 4)


def test_given_up_while_it_is_copied_nothing_is_left_of_it(gallery: Gallery) -> None:
    row, before = begin(gallery), gallery.registry.plan("texts").legs
    die_in_the_copy(gallery, row)
    with gallery.client() as client:
        assert len(client.plan.mirrors) == 1
        assert gallery.conductor().roll_back(gallery.registry.upgrade(row.id)) is None
        put(gallery, client, 1, "nothing to mirror")
    plan = gallery.registry.plan("texts")
    assert (plan.legs, plan.mirrors) == (before, ())
    assert not gallery.store.exists(row.old_collections[0])
    expect_original(gallery)


def test_two_may_give_it_up_at_once(gallery: Gallery, monkeypatch: pytest.MonkeyPatch) -> None:
    row = begin(gallery)
    die_in_the_copy(gallery, row)
    row, real = gallery.registry.upgrade(row.id), change_epoch.serve

    def serve(*args: Any, **options: Any) -> int:
        monkeypatch.setattr(change_epoch, "serve", real)
        assert gallery.conductor().roll_back(row) is None
        return real(*args, **options)

    monkeypatch.setattr(change_epoch, "serve", serve)
    assert gallery.conductor().roll_back(row) is None
    assert [each.phase for each in gallery.registry.history(row.id)].count(Phase.ENDED) == 1
    assert not gallery.store.exists(row.old_collections[0])
    expect_original(gallery)


def test_a_copy_that_was_given_up_for_a_moment_is_not_served(gallery: Gallery) -> None:
    """The process that gives it up dies before it records that. Writes until then do not reach the copy."""
    row, conductor, other = begin(gallery), gallery.conductor(), gallery.conductor()
    real = other.registry.abandon

    def die(*_: object, **__: object) -> bool:
        raise KeyboardInterrupt

    def give_up(words: str) -> None:
        if "until every search would see it" in words:
            other.registry.abandon = die  # type: ignore[method-assign]
            with pytest.raises(KeyboardInterrupt):
                other.roll_back(gallery.registry.upgrade(row.id))
            other.registry.abandon = real  # type: ignore[method-assign]
            with gallery.client() as client:
                put(gallery, client, 3, "into the original alone")

    conductor.say = give_up
    with pytest.raises(errors.WrongPhase, match="is served differently since; run the same command again"):
        conductor.deploy(row)
    said: list[str] = []
    conductor.say = said.append
    conductor.deploy(row)
    assert [each for each in said if "from where it stood" in each] == []
    row = go_on(gallery, row)
    expect_holds(gallery, row.new_collection, "v2")
    expect_original(gallery)


def test_a_grace_lies_between_the_copy_and_its_service(gallery: Gallery, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then a search may read what was before the copy's last write."""
    row, conductor, times = begin(gallery), gallery.conductor(), list[float]()
    real = change_epoch.serve

    def note(words: str) -> None:
        if "until every search would see it" in words:
            times.append(time.monotonic())

    def serve(*args: Any, **options: Any) -> Any:
        if times:
            times.append(time.monotonic())
        return real(*args, **options)

    conductor.say = note
    monkeypatch.setattr(change_epoch, "serve", serve)
    conductor.deploy(row)
    assert times[1] - times[0] >= gallery.registry.plan("texts").grace


def test_two_that_would_deploy_it_take_turns(gallery: Gallery) -> None:
    """`rmvdb upgrade --detach` beside a worker that sees the upgrade first."""
    row = begin(gallery)
    worker = threading.Thread(target=go_on, args=(gallery, row))
    worker.start()
    wait_until(lambda: gallery.registry.upgrade(row.id).conductor is not None)
    conductor = gallery.conductor()
    conductor.launch(row, gallery.worker())
    assert gallery.registry.upgrade(row.id).phase != Phase.PLANNED
    worker.join()
    assert gallery.registry.upgrade(row.id).phase == Phase.CUT_OVER
    copies = [note for note in gallery.registry.history(row.id) if note.phase == Phase.SERVING_BOTH]
    assert len(copies) == 2  # served, and the work list made
    expect_holds(gallery, row.new_collection, "v2")
    expect_original(gallery)


@pytest.mark.parametrize("served", [False, True])
def test_a_conductor_that_was_suspended_while_it_copied_stops(gallery: Gallery, served: bool) -> None:
    """Another has taken over, and may have begun to empty the copy."""
    row, first = begin(gallery, until=0.5), gallery.conductor()

    def taken_over(*_: object) -> None:
        first.report = lambda *_: None
        gallery.registry.keep_leading(row.id, leader_token, 0)
        if served:
            go_on(gallery, row)
        else:
            gallery.registry.lead(row.id, "second", 10.0)

    first.leader_token = leader_token = gallery.registry.lead(row.id, "first", 10.0)
    first.report = taken_over
    assert leader_token is not None
    with pytest.raises(errors.UpgradeRunning, match=f"took upgrade {row.id} over"):
        first.deploy(row)
    assert gallery.registry.upgrade(row.id).phase == (Phase.SERVING_BOTH if served else Phase.PLANNED)
    with pytest.raises(errors.UpgradeRunning):
        deploy._copy_original(first, row, force=False)


def test_a_conductor_that_was_suspended_while_it_wrote_a_page_does_not_record_the_position_of_the_copy(gallery: Gallery) -> None:
    row, first = begin(gallery), gallery.conductor()
    first.leader_token = leader_token = gallery.registry.lead(row.id, "first", 10.0)
    assert leader_token is not None

    def taken_over(*_: object) -> None:
        gallery.registry.keep_leading(row.id, leader_token, 0)
        gallery.registry.lead(row.id, "second", 10.0)

    gallery.store.after = taken_over
    with pytest.raises(errors.UpgradeRunning, match=f"took upgrade {row.id} over"):
        first.deploy(row)
    assert gallery.registry.upgrade(row.id).copying is None


def test_a_conductor_that_dies_once_the_new_collection_is_served_does_not_copy_again(gallery: Gallery) -> None:
    row, conductor = begin(gallery, until=0.0), gallery.conductor()
    real = conductor.registry.set_upgrade

    def die(*args: object, **values: object) -> None:
        if values.get("phase") == Phase.SERVING_BOTH:
            raise KeyboardInterrupt
        real(*args, **values)  # type: ignore[arg-type]

    conductor.registry.set_upgrade = die  # type: ignore[method-assign, assignment]
    with pytest.raises(KeyboardInterrupt):
        conductor.deploy(row)
    conductor.registry.set_upgrade = real  # type: ignore[method-assign]
    with gallery.client() as client:
        put(gallery, client, 3, "under the new plan")
    row = go_on(gallery, row)
    with gallery.client() as client:
        assert client.plan.legs[0].collection == row.new_collection
        assert [record.fields["n"] for record in client.get([3])] == [1]
    gallery.registry.set_upgrade(row.id, plan=replace(row.plan, until=1.0, cutover=True))
    go_on(gallery, row)
    expect_holds(gallery, row.new_collection, "v2")
    expect_original(gallery)


def test_a_conductor_that_was_suspended_before_it_finished_the_copy_changes_no_moved_record(gallery: Gallery) -> None:
    row, first = begin(gallery), gallery.conductor()
    real = first.registry.expired_writes
    first.leader_token = leader_token = gallery.registry.lead(row.id, "first", 10.0)
    assert leader_token is not None

    def expired_writes(name: str) -> list[Id]:
        first.registry.expired_writes = real  # type: ignore[method-assign]
        gallery.registry.keep_leading(row.id, leader_token, 0)
        assert go_on(gallery, row).phase == Phase.CUT_OVER
        return [2, *real(name)]

    first.registry.expired_writes = expired_writes  # type: ignore[method-assign]
    with pytest.raises(errors.UpgradeRunning, match=f"took upgrade {row.id} over"):
        first.deploy(row)
    expect_holds(gallery, row.new_collection, "v2")


@pytest.mark.usefixtures("_small_pages")
def test_a_worker_with_other_galleries_leaves_a_copy_that_is_paused(gallery: Gallery) -> None:
    """Paused in mid-copy, while the rate holds it up: it would wait there for ever."""
    row, conductor, worker = begin(gallery), gallery.conductor(), gallery.worker(limits=Limits(rate=20))
    worker.patient = False

    def pause(*_: object) -> None:
        gallery.registry.pause(row.id)

    conductor.report, ended = pause, list[BaseException]()

    def deploy() -> None:
        try:
            conductor.advance(row, worker)
        except errors.Paused as exc:
            ended.append(exc)

    thread = threading.Thread(target=deploy)
    thread.start()
    thread.join(10.0)
    left = [str(each) for each in ended]
    gallery.registry.resume(row.id)
    conductor.stop.set()
    thread.join()
    assert left == [f"Upgrade {row.id} is paused; to continue, run rmvdb resume"]
