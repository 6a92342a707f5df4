"""Stories of a process that is killed: the state before, the action, and the state after another process has done it again."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from rmvdb.backfill.batches import Backfill
from rmvdb.registry.mark import Owner, is_mark, mark_of
from rmvdb.registry.registry import Registry
from rmvdb.registry.upgrade_plan import EpochName
from rmvdb.storage.folders import Folder, LocalFolder
from rmvdb.types import Id, IdType, Index, Metric, Phase, Record, Schema
from rmvdb.upgrade import backfill_step
from rmvdb.upgrade.run import Conductor
from tests.support.inprocess import DIMS, vector
from tests.support.mortal import Killed, Process, World, version_of

TEXTS = {id: f"t{id}" for id in range(1, 16)}
#: Calls of every process, at moments of their own: heartbeats, good-byes that a killed process does not say, and what brings the
#: marks beside the collections up to date.
EVERYWHERE = frozenset(
    f"registry.{name}"
    for name in (
        "renew",
        "lead",
        "keep_leading",
        "refresh",
        "retire_worker",
        "leave",
        "set_upgrade reason",
        "set_upgrade listing",
        "raise_trace",
        "forget_ended",
        "end_making_way",
    )
) | {"store.upsert mark"}


@dataclass(frozen=True)
class Story:
    """The state before, the action of the process that dies, and the check once another one has done it again."""

    calls: tuple[str, ...]
    before: Callable[[Process], None]
    act: Callable[[Process], None]
    then: Callable[[World], None]
    #: The version whose collection is filled.
    filled: str = "v2"
    #: Where it dies, if not at every call: the others are those of another story.
    deaths: tuple[str, ...] = ()


def deploy(process: Process) -> None:
    """Plan to both served, as `rmvdb upgrade --detach` does."""
    process.conductor().deploy(process.begin())


def move(process: Process, until: float = 1.0) -> None:
    """Do all of the backfill, or a share of it, without a cut-over."""
    deploy(process)
    process.registry.set_upgrade(process.begin().id, plan=replace(process.begin().plan, until=until, cutover=False))
    process.conductor().advance(process.begin(), process.worker())


def move_half(process: Process) -> None:
    """Move some records, and leave the others."""
    move(process, 0.4)


def list_and_move(process: Process) -> None:
    """Backfill a deployed upgrade."""
    conductor, row = process.conductor(), process.begin()
    conductor.list_work(row)
    conductor.backfill(process.begin(), process.worker())


def ask(process: Process) -> None:
    """Make the work list. Let searches ask for two of its records, in two batches."""
    deploy(process)
    process.conductor().list_work(process.begin())
    process.registry.ask_for("texts", [3, 14])


def move_asked_first(process: Process) -> None:
    """Backfill by that list."""
    process.conductor().backfill(process.begin(), process.worker())


def move_and_be_late(process: Process) -> None:
    """Move everything. Then insert into the old collection as another program does."""
    move(process)
    process.world.source.of[50] = "late"
    process.world.store.upsert("texts_v1", [Record(id=50, vector=vector("v1", "late"), fields={"n": 0})])


def cut_over(process: Process) -> None:
    """Cut over."""
    process.conductor().cut_over(process.begin(), process.worker())


def at_the_switch(process: Process) -> None:
    """Reach the share from which on the old collection is searched in another way."""
    move_half(process)
    row = process.begin()
    newest, old = row.plan.legs(EpochName.SERVING)
    later = row.plan.with_epoch(EpochName.LATER, [newest, replace(old, write_with="v1")])
    process.registry.set_upgrade(row.id, plan=replace(later, switch=0.3))


def switch(process: Process) -> None:
    """Go on from there."""
    process.conductor().advance(process.begin(), process.worker())


def keep_and_deploy(process: Process) -> None:
    """Deploy as `rmvdb upgrade --instant-rollback --detach` does."""
    process.conductor().deploy(process.begin(keep=True))


def keep_and_move_half(process: Process) -> None:
    """Move some records, leave the others in the copy, and keep all in the original."""
    keep_and_deploy(process)
    move_half(process)


def lift_and_deploy(process: Process) -> None:
    """Deploy as `rmvdb upgrade --method fct --detach` does."""
    process.conductor().deploy(process.begin(lift=True))


def keep_and_upgrade(process: Process) -> None:
    """Upgrade up to the clean-up, with the original kept."""
    keep_and_deploy(process)
    upgraded(process)


def keep_move_and_be_changed(process: Process) -> None:
    """Move everything. Then insert into the original, and delete from it, as another program does."""
    keep_and_deploy(process)
    move(process)
    store, source = process.world.store, process.world.source
    source.of[50] = "late"
    store.upsert("texts_v1", [Record(id=50, vector=vector("v1", "late"), fields={"n": 0})])
    del source.of[3]
    store.delete("texts_v1", [3])


def expect_kept_and_clean(world: World) -> None:
    """Expect that the new collection is searched alone, and goes on without the original."""
    clean_up(world.process())
    expect_clean(world)


def third_deployed(process: Process) -> None:
    """Bring v1 → v2 half way, and supersede it by v3: records are in two collections, and a third one is searched with them."""
    move_half(process)
    supersede(process)


def expect_switched(world: World) -> None:
    """Expect that the old collection is searched in that way, and the rest goes on."""
    process = world.process()
    row = process.begin()
    assert (row.plan.switch, row.plan.legs(EpochName.SERVING)) == (None, row.plan.legs(EpochName.LATER))
    assert process.registry.plan("texts").legs[1].write_with == "v1"
    expect_moved(world)


def upgraded(process: Process) -> None:
    """Upgrade up to the clean-up."""
    move(process)
    cut_over(process)


def clean_up(process: Process) -> None:
    """Clean up as `rmvdb cleanup` does. A second call does nothing."""
    if (row := process.active()) and row.phase != Phase.SERVING_BOTH:
        process.conductor().clean_up(row)


def move_half_and_leave_a_batch(process: Process) -> None:
    """Move some records, leave others, and leave some in both collections: their worker is gone."""
    move_half(process)
    row = process.begin()
    batch, end = None, time.monotonic() + 60
    while batch is None:  # as long as an epoch is still changing
        assert time.monotonic() < end, "no batch is left to claim"
        time.sleep(0.05)
        batch = process.registry.claim(row.id, "gone", lease=30.0, grace=60.0, copy=True)
    conductor = process.conductor()
    backfill_step.each_batch(conductor, row).copy(conductor.task(row), batch, lambda: None)


def supersede(process: Process) -> None:
    """Supersede the upgrade to v2 by one to v3, as `rmvdb upgrade --detach` does."""
    process.conductor().deploy(process.begin(to="v3"))


def third_rolled_back(process: Process) -> None:
    """Upgrade v1 → v2 → v3, the last one half way, and roll back. Do not clean up."""
    move_half(process)
    supersede(process)
    conductor, row = process.conductor(), process.begin(to="v3")
    process.registry.set_upgrade(row.id, plan=replace(row.plan, until=0.5, cutover=False))
    conductor.advance(process.begin(to="v3"), process.worker())
    roll_back(process)


def roll_back(process: Process) -> None:
    """Roll back as `rmvdb rollback` does."""
    conductor, row = process.conductor(), process.active()
    assert row is not None
    back = row if row.undoes else conductor.roll_back(row)
    if back is not None and back.phase != Phase.CUT_OVER:
        conductor.advance(back, process.worker())


def make_and_die(process: Process) -> None:
    """Make the new collection, and die before it is searched."""
    with suppress(Killed):
        deploy(process.world.process(end=("registry.add_collection", "after")))


def copy_and_die(process: Process) -> None:
    """Copy a part of a kept original, and die before the copy is searched."""
    with suppress(Killed):
        keep_and_deploy(process.world.process(end=("registry.set_upgrade copying", "after")))


def give_up(process: Process) -> None:
    """Give up as `rmvdb rollback` does of an upgrade that is not deployed, or was given up."""
    conductor, row = process.conductor(), process.active()
    conductor.drop_given_up()
    if row is not None:
        assert conductor.roll_back(row) is None


def upsert(process: Process) -> None:
    """Change records wherever they are, and add one, as an application does."""
    process.world.source.of |= {2: "newer", 14: "newer", 99: "newer"}
    with process.client() as client:
        client.upsert([{"id": id, "item": "newer", "n": 1} for id in (2, 14, 99)])


def delete(process: Process) -> None:
    """Delete records wherever they are, as an application does."""
    with process.client() as client:
        client.delete([2, 14])


def held(world: World, version: str) -> dict[Id, Record]:
    """Return the records in the collection of a version."""
    names = [name for name in world.store._collections if version_of(name) == version and not is_mark(name)]
    return {record.id: record for name in names for page in world.store.scan(name, fields=None, vector=True) for record in page}


def expect(world: World, version: str, other: str) -> None:
    """Expect every text, and nothing else, in one collection as that version embeds it."""
    now = held(world, version)
    assert held(world, other) == {}
    assert set(now) == set(world.source.of)
    for id, record in now.items():
        assert np.allclose(record.vector, vector(version, world.source.of[id]), atol=1e-6), id  # type: ignore[arg-type]


def expect_moved(world: World) -> None:
    """Expect that the rest of the upgrade ends as if nothing had happened."""
    process = world.process()
    move(process)
    if process.begin().phase != Phase.CUT_OVER:
        cut_over(process)
    (leg,) = process.registry.plan("texts").legs
    assert (leg.model, process.registry.collection(leg.collection).model) == ("v2", "v2")  # else no client could search it
    expect(world, "v2", "v1")


def expect_third(world: World) -> None:
    """Expect that the superseding upgrade ends, with every record of both collections."""
    process = world.process()
    process.conductor().advance(process.begin(to="v3"), process.worker())
    assert [leg.model for leg in process.registry.plan("texts").legs] == ["v3"]
    expect(world, "v3", "v1")
    expect(world, "v3", "v2")


def expect_second(world: World) -> None:
    """Expect that nothing is left of the third version, and the upgrade before it ends as if that had never been."""
    assert held(world, "v3") == {}
    assert world.process().begin().to_version == "v2"
    expect_moved(world)


def expect_clean(world: World) -> None:
    """Expect the new collection alone, and no file of the archive."""
    expect(world, "v2", "v1")
    assert world.process().active() is None
    assert [name for name in world.store._collections if version_of(name) == "v1"] == []
    assert not [entry for entry in world.archive.entries() if entry.path.endswith(".parquet")]


def expect_back(world: World) -> None:
    """Expect the old collection as it was."""
    expect(world, "v1", "v2")
    assert [leg.model for leg in world.process().registry.plan("texts").legs] == ["v1"]
    assert {record.fields["n"] for record in held(world, "v1").values()} == {0}


def expect_untouched(world: World) -> None:
    """Expect that nothing is left of the upgrade, so that another one of the same gallery can begin."""
    assert list(world.store._collections) == ["texts_v1", mark_of("texts_v1")]
    process = world.process()
    rows = process.registry.collections(process.registry.gallery("texts").id)
    assert [row.name for row in rows if row.dropped_at is None] == ["texts_v1"]
    plan = process.registry.plan("texts")
    assert ([leg.collection for leg in plan.legs], plan.mirrors) == (["texts_v1"], ())
    expect_back(world)


def expect_kept(world: World) -> None:
    """Expect that the rest of the upgrade ends as if nothing had happened: the copy is empty, the original whole."""
    process = world.process()
    move(process)
    cut_over(process)
    assert world.store.count(process.begin().old_collections[0]) == 0
    expect_whole(world)
    clean_up(process)
    expect_clean(world)


def expect_whole(world: World) -> None:
    """Expect every text in the original, as v1 embeds it, and nothing else."""
    original = world.store.get("texts_v1", range(100), vector=True)
    assert {record.id for record in original} == set(world.source.of)
    for record in original:
        np.testing.assert_allclose(record.vector, vector("v1", world.source.of[record.id]), atol=1e-6)  # type: ignore[arg-type]


def expect_lifted(world: World) -> None:
    """Expect that the rest of the upgrade ends as if nothing had happened: every vector is the new model's own."""
    process = world.process()
    move(process)
    cut_over(process)
    clean_up(process)
    expect_clean(world)


def expect_original(world: World) -> None:
    """Expect that the original is searched alone, and holds every text and nothing else."""
    plan = world.process().registry.plan("texts")
    assert ([leg.collection for leg in plan.legs], plan.mirrors) == (["texts_v1"], ())
    clean_up(world.process())
    expect_back(world)


def expect_deleted(world: World) -> None:
    """Expect that deleted records do not come back."""
    for id in (2, 14):
        del world.source.of[id]
    expect_moved(world)


def expect_kept_without(world: World) -> None:
    """Expect that deleted records do not come back, even in the original."""
    for id in (2, 14):
        del world.source.of[id]
    assert set(held(world, "v1")) >= set(world.source.of)
    expect_kept(world)


def expect_third_without(world: World) -> None:
    """Expect that deleted records do not come back from any of the three collections."""
    for id in (2, 14):
        del world.source.of[id]
    expect_third(world)


#: A roll back is an upgrade whose collection is there already.
BACK = (
    *Conductor.CALLS["roll back"],
    *(call for call in Conductor.CALLS["deploy"] if call.startswith("registry") and call != "registry.add_collection"),
    *Conductor.CALLS["list"],
    *Backfill.CALLS,
    "registry.set_upgrade verifying",
    "store.move_aliases new",
    "registry.set_upgrade cut over",
)

#: The calls for batches in hand of a superseded upgrade. Both of its collections are old ones of the next.
RETIRED = ("registry.claim", "registry.advance removing", "store.delete old", "registry.retire")

#: Where the records of a lifted copy are re-embedded, and stay.
IN_PLACE = tuple(call for call in Backfill.CALLS if call not in ("store.delete old", "archive.leave"))


def world(template: Path, folder: Path, archive: Folder | None = None) -> World:
    """Fifteen texts at v1. The archive lies in `folder`, or elsewhere."""
    folder.mkdir(parents=True)
    file = shutil.copy(template, folder / "registry.sqlite")
    made = World(folder, f"sqlite:///{file}", TEXTS, archive or LocalFolder(folder / "archive"))
    made.store.create(Schema(collection="texts_v1", dim=DIMS["v1"], metric=Metric.COSINE, id_type=IdType.INT64), Index())
    made.store.upsert("texts_v1", [Record(id=id, vector=vector("v1", text), fields={"n": 0}) for id, text in TEXTS.items()])
    Owner(Registry(made.url), made.store).take("texts", "texts_v1")
    return made


def die_and_do_it_again(made: World, story: Story, end: tuple[str, str]) -> bool:
    """Return whether the process came to the call at which it was to die. Raise AssertionError if the end is wrong."""
    story.before(made.process())
    doomed = made.process(end=end, filled=story.filled)
    with suppress(Killed):
        story.act(doomed)
    again = made.process()
    story.act(again)
    story.then(made)
    return doomed.life.over.is_set()


Case = tuple[str, str, str]
#: Whether each process came to the call at which it was to die.
Outcomes = dict[Case, Future[bool]]


def cases(stories: Mapping[str, Story]) -> list[Case]:
    """Return each death of these stories: the story's name, the call, and whether the process dies before or after it."""
    return [
        (name, call, when)
        for name, story in stories.items()
        for call in story.deaths or story.calls
        for when in ("before", "after")
    ]


def expect_calls(made: World, story: Story) -> None:
    """Fail unless the story makes the calls that it lists, and no others."""
    made.lease = 30.0  # no worker dies, and on a busy machine none may seem to
    story.before(made.process())
    process = made.process(filled=story.filled)
    story.act(process)
    story.then(made)

    assert sorted(set(process.life.seen) - EVERYWHERE) == sorted(set(story.calls) - EVERYWHERE)
    assert "store.upsert mark" in process.life.seen or "store.upsert mark" not in story.calls
