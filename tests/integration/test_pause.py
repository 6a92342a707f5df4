"""A pause: once `rmvdb pause` has returned, no batch begins and no epoch changes, wherever the upgrade is."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rmvdb import errors
from rmvdb.registry.registry import Registry
from rmvdb.registry.tables import BatchRow
from rmvdb.types import BatchState, Phase
from rmvdb.upgrade.run import Conductor
from rmvdb.upgrade.status import status
from rmvdb.upgrade.work_list import made_beside
from tests.support.inprocess import TIMES, Gallery, make
from tests.support.waiting import wait_until

#: The calls of an upgrade to registry and engine, in about this order. A pause comes before and after each.
STEPS = (
    "registry.announce 1", "registry.activate 1", "registry.discard_list 1", "registry.add_batches 1", "registry.claim 1",
    "registry.claim 3", "store.upsert 1", "store.delete 1", "store.scan 2", "registry.open_writes 1", "registry.written 1",
    "registry.announce 2",
)  # fmt: skip


class Watched:
    """A registry or an engine that calls `at` with the name and number of each call, before and after it."""

    def __init__(self, inner: Any, name: str, at: Callable[[str], None]) -> None:
        self._inner, self._name, self._at, self._calls = inner, name, at, dict[str, int]()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if not callable(found):
            return found

        def call(*args: Any, **options: Any) -> Any:
            self._calls[name] = number = self._calls.get(name, 0) + 1
            self._at(f"before {self._name}.{name} {number}")
            result = found(*args, **options)
            self._at(f"after {self._name}.{name} {number}")
            return result

        return call


@pytest.fixture
def gallery(tmp_path: Path) -> Iterator[Gallery]:
    made = make(tmp_path, deployed=False)
    made.registry.discard_list(made.upgrade.id)
    made.registry.set_upgrade(made.upgrade.id, listed=False)
    yield made
    made.registry.close()


@contextmanager
def advancing(gallery: Gallery, conductor: Conductor) -> Iterator[threading.Thread]:
    """Give an `rmvdb upgrade` beside the test."""
    row, worker = gallery.registry.upgrade(gallery.upgrade.id), gallery.worker()
    thread = threading.Thread(target=conductor.advance, args=(row, worker))
    thread.start()
    try:
        yield thread
    finally:
        conductor.stop.set()
        thread.join(30.0)
        assert not thread.is_alive()


def watched(gallery: Gallery, at: Callable[[str], None]) -> Conductor:
    real = gallery.registry
    gallery.registry = Watched(real, "registry", at)  # type: ignore[assignment]
    gallery.store = Watched(gallery.store, "store", at)  # type: ignore[assignment]
    gallery.backfill = type(gallery.backfill)(
        registry=gallery.registry, store=gallery.store, loaded_models=gallery.loaded_models, source=gallery.source,
        archive=gallery.archive, cache=None,
    )  # fmt: skip
    return gallery.conductor()


def begun(registry: Registry, upgrade: int) -> set[int]:
    """Return the begun batches."""
    return {row.id for row in registry.batches(upgrade) if row.state != BatchState.PENDING}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("step", STEPS)
def test_once_paused_no_batch_begins_and_no_epoch_changes_at_whatever_step(gallery: Gallery, step: str, when: str) -> None:
    registry, upgrade = gallery.registry, gallery.upgrade.id
    seen, paused, said = dict[str, Any](), threading.Event(), list[str]()

    def at(call: str) -> None:
        if call == f"{when} {step}" and not paused.is_set():
            registry.pause(upgrade)
            seen.update(epoch=registry.plan("texts").epoch, begun=begun(registry, upgrade))
            paused.set()

    conductor = watched(gallery, at)
    conductor.say = said.append
    with advancing(gallery, conductor) as thread:
        assert paused.wait(30.0), step
        time.sleep(0.7)  # two graces
        row = registry.upgrade(upgrade)
        assert thread.is_alive()
        assert registry.plan("texts").epoch == seen["epoch"]
        assert begun(registry, upgrade) - seen["begun"] == set()
        assert row.phase != Phase.CUT_OVER
        wait_until(lambda: "paused; waiting for rmvdb resume" in said)  # once what was in hand has ended
        registry.resume(upgrade)
        thread.join(60.0)
        assert not thread.is_alive()
    assert registry.upgrade(upgrade).phase == Phase.CUT_OVER
    assert [leg.collection for leg in registry.plan("texts").legs] == ["texts_v2"]
    gallery.expect_moved()


def test_a_pause_after_the_last_change_of_epoch_lets_the_cut_over_be_noted_and_can_be_ended(gallery: Gallery) -> None:
    registry, upgrade = gallery.registry, gallery.upgrade.id
    conductor = watched(gallery, lambda call: registry.pause(upgrade) if call == "after registry.activate 2" else None)
    row = conductor.advance(registry.upgrade(upgrade), gallery.worker())
    assert (row.phase, row.paused) == (Phase.CUT_OVER, True)
    with pytest.raises(errors.Paused):
        conductor.clean_up(row)
    registry.resume(upgrade)
    conductor.clean_up(registry.upgrade(upgrade))


def test_a_pause_and_a_claim_at_once_are_one_after_the_other(gallery: Gallery) -> None:
    registry, upgrade = gallery.registry, gallery.upgrade.id
    registry.add_batches(upgrade, [([id], None) for id in range(1, 400)], first=1)
    late, soon, stop, other = list[BatchRow](), list[BatchRow](), threading.Event(), Registry(str(registry.url))
    returned = threading.Event()

    def claim() -> None:
        while not stop.is_set():
            was = returned.is_set()
            row = other.claim(upgrade, "w", lease=9.0, grace=0.0, copy=True)
            if row is not None and row.state == BatchState.CLAIMED:
                (late if was else soon).append(row)

    thread = threading.Thread(target=claim)
    thread.start()
    time.sleep(0.2)
    registry.pause(upgrade)
    returned.set()
    time.sleep(0.3)
    stop.set()
    thread.join(10.0)
    other.close()
    assert soon
    assert late == []


def test_verification_stops_at_its_next_page_and_goes_on_from_there(gallery: Gallery, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rmvdb.upgrade.compare.AT_ONCE", 10)
    registry, upgrade, kept = gallery.registry, gallery.upgrade.id, list[int]()
    real = registry.set_upgrade

    def keep(number: int, **values: Any) -> None:
        real(number, **values)
        if values.get("verifying"):
            kept.append(values["verifying"]["fields_compared"])
            if len(kept) == 2:
                registry.pause(upgrade)

    monkeypatch.setattr(registry, "set_upgrade", keep)
    with advancing(gallery, gallery.conductor()) as thread:
        wait_until(lambda: registry.upgrade(upgrade).paused)
        time.sleep(1.0)
        assert kept == [10, 20]
        registry.resume(upgrade)
        thread.join(30.0)
    assert kept == [10, 20, 30, 40]
    assert registry.upgrade(upgrade).phase == Phase.CUT_OVER


def test_a_long_pause_makes_no_worker_verify_again_from_the_start(gallery: Gallery) -> None:
    registry, upgrade = gallery.registry, gallery.upgrade.id
    registry.set_upgrade(upgrade, verifying={"batch": 1, "at": registry.now() - 500.0})
    registry.pause(upgrade)
    registry.set_upgrade(upgrade, paused_at=registry.now() - 100.0)
    registry.resume(upgrade)
    verifying = registry.upgrade(upgrade).verifying
    assert verifying is not None
    assert registry.now() - verifying["at"] == pytest.approx(400.0, abs=5.0)


@pytest.mark.parametrize("command", ["finish", "roll_back", "clean_up", "supersede"])
def test_by_hand_nothing_goes_on_in_a_pause_and_the_way_out_is_said(tmp_path: Path, command: str) -> None:
    gallery = make(tmp_path)
    registry, conductor = gallery.registry, gallery.conductor()
    gallery.worker().run(gallery.task, gallery.backfill, until=0.5)
    if command == "clean_up":
        conductor.advance(gallery.upgrade, gallery.worker())
    registry.pause(gallery.upgrade.id)
    epoch, row = registry.plan("texts").epoch, registry.upgrade(gallery.upgrade.id)
    commands: dict[str, Callable[[], Any]] = {
        "finish": lambda: conductor.finish(row, gallery.worker()),
        "roll_back": lambda: conductor.roll_back(registry.upgrade(row.id)),
        "clean_up": lambda: conductor.clean_up(row),
        "supersede": gallery.supersede,
    }
    with pytest.raises(errors.Paused, match=f"^Upgrade {row.id} is paused; run rmvdb resume, then the same command again$"):
        commands[command]()
    assert registry.plan("texts").epoch == epoch
    assert registry.active_upgrade(row.gallery_id).id == row.id  # type: ignore[union-attr]
    registry.resume(row.id)
    commands[command]()
    registry.close()


def test_a_pause_while_another_takes_its_place_holds_that_one_up(tmp_path: Path) -> None:
    """A user who paused the upgrade must not find another one at work a moment later."""
    gallery = make(tmp_path)
    gallery.worker().run(gallery.task, gallery.backfill, until=0.5)
    registry, first = gallery.registry, gallery.upgrade.id
    real = registry.supersede

    def supersede(*args: Any, **options: Any) -> Any:
        registry.pause(first)
        return real(*args, **options)

    registry.supersede = supersede  # type: ignore[method-assign]
    with pytest.raises(errors.Paused):
        gallery.supersede()
    row = registry.upgrade(first)
    assert (row.paused, row.makes_way, row.phase) == (True, False, Phase.SERVING_BOTH)
    registry.close()


def test_an_upgrade_that_has_ended_is_not_paused(tmp_path: Path) -> None:
    gallery = make(tmp_path)
    gallery.worker().run(gallery.task, gallery.backfill, until=0.5)
    first = gallery.upgrade.id
    gallery.supersede()
    with pytest.raises(errors.WrongPhase, match=f"Upgrade {first} has ended"):
        gallery.registry.pause(first)
    gallery.registry.close()


def test_a_third_version_takes_the_place_of_an_upgrade_that_is_being_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rmvdb.upgrade.compare.AT_ONCE", 10)
    gallery = make(tmp_path, times=TIMES)
    registry, first = gallery.registry, gallery.upgrade.id
    verifying, real = threading.Event(), registry.set_upgrade

    def slow(number: int, **values: Any) -> None:
        real(number, **values)
        if values.get("verifying"):
            verifying.set()
            time.sleep(0.5)

    monkeypatch.setattr(registry, "set_upgrade", slow)
    conductor, ended = gallery.conductor(), list[BaseException]()

    def advance() -> None:
        try:
            conductor.advance(registry.upgrade(first), gallery.worker())
        except errors.WrongPhase as exc:
            ended.append(exc)

    thread = threading.Thread(target=advance)
    thread.start()
    assert verifying.wait(30.0)
    gallery.supersede()
    thread.join(30.0)
    assert "has ended" in str(ended[0])
    assert registry.upgrade(first).phase == Phase.ENDED
    assert [leg.model for leg in registry.plan("texts").legs] == ["v3", "v2"] or len(registry.plan("texts").legs) == 3
    gallery.worker().run(gallery.task, gallery.backfill)
    assert gallery.conductor().advance(registry.upgrade(gallery.upgrade.id), gallery.worker()).phase == Phase.CUT_OVER
    gallery.expect_moved()
    registry.close()


def test_no_time_is_left_once_it_is_as_far_as_was_asked(tmp_path: Path) -> None:
    gallery = make(tmp_path)
    gallery.registry.set_upgrade(gallery.upgrade.id, plan=replace(gallery.upgrade.plan, until=0.5, cutover=False))
    gallery.worker().run(gallery.task, gallery.backfill, until=0.5)
    gallery.registry.renew("another", gallery.upgrade.id, lease=60.0)
    now = status(gallery.registry, gallery.registry.gallery("texts"))
    assert ([each.split()[0] for each in now.workers or []], now.done, now.total, now.eta) == (["another"], 20, 40, None)
    assert now.doing.endswith("20 of 40 records are re-embedded, as far as --until says; to continue, run rmvdb upgrade")
    gallery.registry.close()


def test_a_batch_that_fails_while_the_listing_is_paused_ends_the_command(
    gallery: Gallery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its listing thread waits for the end of the pause, and the error for that thread."""
    registry, upgrade = gallery.registry, gallery.upgrade.id
    monkeypatch.setattr("rmvdb.upgrade.work_list.BATCHES_AT_ONCE", 1)
    real = registry.add_batches

    def add(*args: Any, **options: Any) -> None:
        real(*args, **options)
        registry.pause(upgrade)

    def fail(*_: object, **__: object) -> None:
        wait_until(lambda: registry.upgrade(upgrade).paused)
        raise errors.DiskFull("No space left")

    monkeypatch.setattr(registry, "add_batches", add)
    conductor = gallery.conductor()
    ended = list[BaseException]()

    def advance() -> None:
        try:
            with made_beside(conductor, registry.upgrade(upgrade)):
                fail()
        except errors.DiskFull as exc:
            ended.append(exc)

    conductor.leads = upgrade
    thread = threading.Thread(target=advance)
    thread.start()
    thread.join(10.0)
    hung = thread.is_alive()
    conductor.stop.set()
    thread.join()
    assert not hung
    assert len(ended) == 1
