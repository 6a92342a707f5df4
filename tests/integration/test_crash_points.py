"""Every process dies once before and once after each call by which it changes something; the next one ends in the same state.

The calls stand in the code: Backfill.CALLS, Client.CALLS, Conductor.CALLS. A call that is made and not listed, or listed and
not made, fails here. All deaths happen at the same time in threads of their own, since most of each is waiting for a lease.
"""

from __future__ import annotations

import ast
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

import rmvdb
from rmvdb.backfill.asked_for import MovedFirst
from rmvdb.backfill.batches import Backfill
from rmvdb.errors import WrongPhase
from rmvdb.registry import plans, schema
from rmvdb.registry.mark import Owner, is_mark, mark_of
from rmvdb.registry.registry import Registry
from rmvdb.registry.upgrade_plan import EpochName
from rmvdb.serving import announced_writes as writing_room
from rmvdb.serving.client import Client
from rmvdb.types import Id, IdType, Index, Metric, Phase, Record, Schema
from rmvdb.upgrade import backfill_step, leadership
from rmvdb.upgrade.run import Conductor
from tests.support.inprocess import DIMS, TIMES, vector
from tests.support.mortal import READS, Killed, Process, World, version_of

#: The threads of a process that is killed end by SystemExit.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")

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
    )
) | {"store.upsert mark"}


@dataclass(frozen=True)
class Story:
    """What comes before, what the process does that dies, and what must be true when another one has done it again."""

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
    """All of the backfill, or a share of it; no cut-over."""
    deploy(process)
    process.registry.set_upgrade(process.begin().id, plan=replace(process.begin().plan, until=until, cutover=False))
    process.conductor().advance(process.begin(), process.worker())


def move_half(process: Process) -> None:
    """Some records in one collection, some in the other."""
    move(process, 0.4)


def list_and_move(process: Process) -> None:
    """The backfill of an upgrade that is deployed."""
    conductor, row = process.conductor(), process.begin()
    conductor.list_work(row)
    conductor.backfill(process.begin(), process.worker())


def ask(process: Process) -> None:
    """The work list is made, and searches ask for two of its records, in two batches."""
    deploy(process)
    process.conductor().list_work(process.begin())
    process.registry.ask_for("texts", [3, 14])


def move_asked_first(process: Process) -> None:
    """The backfill of that list."""
    process.conductor().backfill(process.begin(), process.worker())


def move_and_be_late(process: Process) -> None:
    """All is moved, and then another program inserts into the old collection."""
    move(process)
    process.world.source.of[50] = "late"
    process.world.store.upsert("texts_v1", [Record(id=50, vector=vector("v1", "late"), fields={"n": 0})])


def cut_over(process: Process) -> None:
    """The end of an upgrade."""
    process.conductor().cut_over(process.begin(), process.worker())


def at_the_switch(process: Process) -> None:
    """The share is reached from which on the old collection is searched in another way."""
    move_half(process)
    row = process.begin()
    newest, old = row.plan.legs(EpochName.SERVING)
    later = row.plan.with_epoch(EpochName.LATER, [newest, replace(old, write_with="v1")])
    process.registry.set_upgrade(row.id, plan=replace(later, switch=0.3))


def switch(process: Process) -> None:
    """Go on from there."""
    process.conductor().advance(process.begin(), process.worker())


def keep_and_deploy(process: Process) -> None:
    """As `rmvdb upgrade --instant-rollback --detach`."""
    process.conductor().deploy(process.begin(keep=True))


def keep_and_move_half(process: Process) -> None:
    """Some records in one collection, some in the copy, all of them in the original."""
    keep_and_deploy(process)
    move_half(process)


def lift_and_deploy(process: Process) -> None:
    """As `rmvdb upgrade --method fct --detach`."""
    process.conductor().deploy(process.begin(lift=True))


def keep_and_upgrade(process: Process) -> None:
    """An upgrade that waits for its clean-up, its original beside it."""
    keep_and_deploy(process)
    upgraded(process)


def keep_move_and_be_changed(process: Process) -> None:
    """All is moved, and then another program inserts into the original, and deletes from it."""
    keep_and_deploy(process)
    move(process)
    store, source = process.world.store, process.world.source
    source.of[50] = "late"
    store.upsert("texts_v1", [Record(id=50, vector=vector("v1", "late"), fields={"n": 0})])
    del source.of[3]
    store.delete("texts_v1", [3])


def expect_kept_and_clean(world: World) -> None:
    """The new collection is searched alone, and goes on without the original."""
    clean_up(world.process())
    expect_clean(world)


def third_deployed(process: Process) -> None:
    """v1 → v2 half way, and v3 in its place: records in two collections, a third one searched with them."""
    move_half(process)
    supersede(process)


def expect_switched(world: World) -> None:
    """The old collection is searched in that way, and the rest goes on."""
    process = world.process()
    row = process.begin()
    assert (row.plan.switch, row.plan.legs(EpochName.SERVING)) == (None, row.plan.legs(EpochName.LATER))
    assert process.registry.plan("texts").legs[1].write_with == "v1"
    expect_moved(world)


def upgraded(process: Process) -> None:
    """An upgrade that waits for its clean-up."""
    move(process)
    cut_over(process)


def clean_up(process: Process) -> None:
    """As `rmvdb cleanup`, which has nothing to do after it was done."""
    if (row := process.active()) and row.phase != Phase.SERVING_BOTH:
        process.conductor().clean_up(row)


def move_half_and_leave_a_batch(process: Process) -> None:
    """Some records in one collection, some in the other, and some in both: their worker is gone."""
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
    """An upgrade to v3 takes the place of the one to v2, as `rmvdb upgrade --detach` has it."""
    process.conductor().deploy(process.begin(to="v3"))


def third_rolled_back(process: Process) -> None:
    """v1 → v2 → v3, the last one half way, and back; not cleaned up yet."""
    move_half(process)
    supersede(process)
    conductor, row = process.conductor(), process.begin(to="v3")
    process.registry.set_upgrade(row.id, plan=replace(row.plan, until=0.5, cutover=False))
    conductor.advance(process.begin(to="v3"), process.worker())
    roll_back(process)


def roll_back(process: Process) -> None:
    """As `rmvdb rollback`."""
    conductor, row = process.conductor(), process.active()
    assert row is not None
    back = row if row.undoes else conductor.roll_back(row)
    if back is not None and back.phase != Phase.CUT_OVER:
        conductor.advance(back, process.worker())


def make_and_die(process: Process) -> None:
    """The new collection is made, and nothing is searched in it yet."""
    with suppress(Killed):
        deploy(process.world.process(end=("registry.add_collection", "after")))


def copy_and_die(process: Process) -> None:
    """Part of a kept original is copied, and nothing is searched in the copy yet."""
    with suppress(Killed):
        keep_and_deploy(process.world.process(end=("registry.set_upgrade copying", "after")))


def give_up(process: Process) -> None:
    """As `rmvdb rollback` of an upgrade that is not deployed, and of one that was given up."""
    conductor, row = process.conductor(), process.active()
    conductor.drop_given_up()
    if row is not None:
        assert conductor.roll_back(row) is None


def upsert(process: Process) -> None:
    """An application changes records wherever they are, and adds one."""
    process.world.source.of |= {2: "newer", 14: "newer", 99: "newer"}
    with process.client() as client:
        client.upsert([{"id": id, "item": "newer", "n": 1} for id in (2, 14, 99)])


def delete(process: Process) -> None:
    """An application deletes records wherever they are."""
    with process.client() as client:
        client.delete([2, 14])


def held(world: World, version: str) -> dict[Id, Record]:
    """What the collection of a version holds."""
    names = [name for name in world.store._collections if version_of(name) == version and not is_mark(name)]
    return {record.id: record for name in names for page in world.store.scan(name, fields=None, vector=True) for record in page}


def expect(world: World, version: str, other: str) -> None:
    """Every text, and nothing else, is in one collection as that version embeds it."""
    now = held(world, version)
    assert held(world, other) == {}
    assert set(now) == set(world.source.of)
    for id, record in now.items():
        assert np.allclose(record.vector, vector(version, world.source.of[id]), atol=1e-6), id  # type: ignore[arg-type]


def expect_moved(world: World) -> None:
    """The rest of the upgrade ends as if nothing had happened."""
    process = world.process()
    move(process)
    if process.begin().phase != Phase.CUT_OVER:
        cut_over(process)
    (leg,) = process.registry.plan("texts").legs
    assert (leg.model, process.registry.collection(leg.collection).model) == ("v2", "v2")  # else no client could search it
    expect(world, "v2", "v1")


def expect_third(world: World) -> None:
    """The upgrade that took the place ends, with every record of both collections."""
    process = world.process()
    process.conductor().advance(process.begin(to="v3"), process.worker())
    assert [leg.model for leg in process.registry.plan("texts").legs] == ["v3"]
    expect(world, "v3", "v1")
    expect(world, "v3", "v2")


def expect_second(world: World) -> None:
    """Of the third version nothing is left, and the upgrade before it ends as if that had never been."""
    assert held(world, "v3") == {}
    assert world.process().begin().to_version == "v2"
    expect_moved(world)


def expect_clean(world: World) -> None:
    """Only the new collection is left, and no file of the archive."""
    expect(world, "v2", "v1")
    assert world.process().active() is None
    assert [name for name in world.store._collections if version_of(name) == "v1"] == []
    assert not list((world.folder / "archive").rglob("*.parquet"))


def expect_back(world: World) -> None:
    """The old collection is what it was."""
    expect(world, "v1", "v2")
    assert [leg.model for leg in world.process().registry.plan("texts").legs] == ["v1"]
    assert {record.fields["n"] for record in held(world, "v1").values()} == {0}


def expect_untouched(world: World) -> None:
    """Nothing is left of the upgrade, and another one of the same gallery ends as if it had never been."""
    assert list(world.store._collections) == ["texts_v1", mark_of("texts_v1")]
    process = world.process()
    rows = process.registry.collections(process.registry.gallery("texts").id)
    assert [row.name for row in rows if row.dropped_at is None] == ["texts_v1"]
    plan = process.registry.plan("texts")
    assert ([leg.collection for leg in plan.legs], plan.mirrors) == (["texts_v1"], ())
    expect_back(world)


def expect_kept(world: World) -> None:
    """The rest of the upgrade ends as if nothing had happened; the copy is empty, the original whole."""
    process = world.process()
    move(process)
    cut_over(process)
    assert world.store.count(process.begin().old_collections[0]) == 0
    clean_up(process)
    expect_clean(world)


def expect_lifted(world: World) -> None:
    """The rest of the upgrade ends as if nothing had happened: every vector is the new model's own."""
    process = world.process()
    move(process)
    cut_over(process)
    clean_up(process)
    expect_clean(world)


def expect_original(world: World) -> None:
    """The original is searched, alone, and holds every text; it never held anything else."""
    plan = world.process().registry.plan("texts")
    assert ([leg.collection for leg in plan.legs], plan.mirrors) == (["texts_v1"], ())
    clean_up(world.process())
    expect_back(world)


def expect_deleted(world: World) -> None:
    """Deleted records do not come back."""
    for id in (2, 14):
        del world.source.of[id]
    expect_moved(world)


def expect_kept_without(world: World) -> None:
    """Deleted records do not come back, in the original neither."""
    for id in (2, 14):
        del world.source.of[id]
    assert set(held(world, "v1")) >= set(world.source.of)
    expect_kept(world)


def expect_third_without(world: World) -> None:
    """Deleted records do not come back from any of the three."""
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

#: What is in hand of an upgrade that is superseded; both of its collections are old ones of the next.
RETIRED = ("registry.claim", "registry.advance removing", "store.delete old", "registry.retire")

#: Where the records of a lifted copy are re-embedded, and stay.
IN_PLACE = tuple(call for call in Backfill.CALLS if call not in ("store.delete old", "archive.leave"))

STORIES = {
    "deploy": Story((*Conductor.CALLS["begin"], *Conductor.CALLS["deploy"]), lambda process: None, deploy, expect_moved),
    "give up": Story(Conductor.CALLS["give up"], make_and_die, give_up, expect_untouched),
    "give up the copy": Story(Conductor.CALLS["give up the copy"], copy_and_die, give_up, expect_untouched),
    "backfill": Story((*Conductor.CALLS["list"], *Backfill.CALLS), deploy, list_and_move, expect_moved),
    "move first": Story((*MovedFirst.CALLS, *Backfill.CALLS), ask, move_asked_first, expect_moved, deaths=MovedFirst.CALLS),
    "switch": Story((*Conductor.CALLS["switch"], "registry.claim"), at_the_switch, switch, expect_switched),
    "upsert": Story(Client.CALLS["upsert"], move_half, upsert, expect_moved),
    "delete": Story(Client.CALLS["delete"], move_half, delete, expect_deleted),
    "upsert, the original kept": Story(Client.CALLS["upsert"], keep_and_move_half, upsert, expect_kept),
    "delete, the original kept": Story(Client.CALLS["delete"], keep_and_move_half, delete, expect_kept_without),
    "upsert under three legs": Story(Client.CALLS["upsert"], third_deployed, upsert, expect_third, filled="v3"),
    "delete under three legs": Story(Client.CALLS["delete"], third_deployed, delete, expect_third_without, filled="v3"),
    "cut over, the original kept": Story(
        tuple({*Conductor.CALLS["agree"], *Conductor.CALLS["late"], *Backfill.CALLS, *Conductor.CALLS["cut over"]}),
        keep_move_and_be_changed,
        cut_over,
        expect_kept_and_clean,
        deaths=(*Conductor.CALLS["agree"], "registry.activate"),
    ),
    "cut over": Story(
        (*Conductor.CALLS["late"], *Backfill.CALLS, *Conductor.CALLS["cut over"]), move_and_be_late, cut_over, expect_moved
    ),
    "clean up": Story(Conductor.CALLS["clean up"], upgraded, clean_up, expect_clean),
    "third": Story(
        (*Conductor.CALLS["supersede"], *RETIRED, "archive.leave", *Conductor.CALLS["deploy"]),
        move_half_and_leave_a_batch,
        supersede,
        expect_third,
        filled="v3",
    ),
    "clean up of a third that was rolled back": Story(Conductor.CALLS["clean up"], third_rolled_back, clean_up, expect_second),
    "copy": Story(
        (*Conductor.CALLS["begin"], *Conductor.CALLS["copy"], *Conductor.CALLS["deploy"]),
        lambda process: None,
        keep_and_deploy,
        expect_kept,
        deaths=(*Conductor.CALLS["copy"], "registry.activate"),
    ),
    "in place": Story((*Conductor.CALLS["list"], *IN_PLACE), lift_and_deploy, list_and_move, expect_lifted, deaths=IN_PLACE),
    "back to the original": Story(
        Conductor.CALLS["back to the original"], keep_and_move_half, roll_back, expect_original, filled="v1"
    ),
    "clean up of a kept original": Story(
        (*Conductor.CALLS["clean up"], "registry.announce", "registry.activate"),
        keep_and_upgrade,
        clean_up,
        expect_clean,
        deaths=("registry.begin_clean_up", "registry.activate", "store.drop old"),
    ),
    "roll back": Story(BACK, move_half, roll_back, expect_back, filled="v1"),
}
CASES = [
    (name, call, when) for name, story in STORIES.items() for call in story.deaths or story.calls for when in ("before", "after")
]


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A registry with both versions and no gallery."""
    file = tmp_path_factory.mktemp("template") / "registry.sqlite"
    url = f"sqlite:///{file}"
    schema.upgrade(url)
    registry = Registry(url)
    for name, dim in DIMS.items():
        registry.add_version(
            name=name, embedder=f"tests:{name}", options={}, classifier=None, dim=dim, metric="COSINE", fingerprint=None,
            probes=None, probe_kind=None, base=None, head=None,
        )  # fmt: skip
    old = Schema(collection="texts_v1", dim=DIMS["v1"], metric=Metric.COSINE, id_type=IdType.INT64)
    registry.add_gallery(name="texts", model="v1", schema=old, adopted=False, source="tests", search={}, times=TIMES)
    registry.engine.dispose()
    return file


@pytest.fixture(scope="module", autouse=True)
def _impatient() -> Iterator[None]:
    """Waits that are made for people, shortened; what they wait for is the same."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plans, "CLOSING", 0.3)
        patch.setattr(leadership, "LEADER_LEASE", 0.8)
        patch.setattr(writing_room, "WRITE_LASTS", 15.0)
        yield


def world(template: Path, folder: Path) -> World:
    """Fifteen texts at v1."""
    folder.mkdir(parents=True)
    file = shutil.copy(template, folder / "registry.sqlite")
    made = World(folder, f"sqlite:///{file}", TEXTS)
    made.store.create(Schema(collection="texts_v1", dim=DIMS["v1"], metric=Metric.COSINE, id_type=IdType.INT64), Index())
    made.store.upsert("texts_v1", [Record(id=id, vector=vector("v1", text), fields={"n": 0}) for id, text in TEXTS.items()])
    Owner(Registry(made.url), made.store).take("texts", "texts_v1")
    return made


def die_and_do_it_again(made: World, story: Story, end: tuple[str, str]) -> bool:
    """Whether the process came to the call where it was to die; AssertionError where the end is not as it must be."""
    story.before(made.process())
    doomed = made.process(end=end, filled=story.filled)
    with suppress(Killed):
        story.act(doomed)
    again = made.process()
    story.act(again)
    story.then(made)
    return doomed.life.over.is_set()


@pytest.fixture(scope="module")
def outcomes(
    template: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[dict[tuple[str, str, str], Future[bool]]]:
    """Every death that is asked for, all under way."""
    folder = tmp_path_factory.mktemp("worlds")
    items = (getattr(item, "callspec", None) for item in request.session.items)
    asked = [item.params.get("case") for item in items if item]
    with ThreadPoolExecutor(max_workers=8) as pool:
        yield {
            case: pool.submit(die_and_do_it_again, world(template, folder / str(at)), STORIES[case[0]], case[1:])
            for at, case in enumerate(CASES)
            if case in asked
        }


@pytest.mark.parametrize("name", STORIES)
def test_the_calls_in_the_code_are_the_calls_that_are_made(template: Path, tmp_path: Path, name: str) -> None:
    story, made = STORIES[name], world(template, tmp_path / "world")
    made.lease = 30.0  # no worker dies, and on a busy machine none may seem to
    story.before(made.process())
    process = made.process(filled=story.filled)
    story.act(process)
    story.then(made)

    assert sorted(set(process.life.seen) - EVERYWHERE) == sorted(set(story.calls) - EVERYWHERE)
    assert "store.upsert mark" in process.life.seen or "store.upsert mark" not in story.calls


#: Calls that change something and are in no story, and why.
NOT_IN_A_STORY = {
    "registry.hand_back": "a claim that was lost; without it the claim runs out",
    "registry.extend_intents": "a write that waits for long; without it nobody waits for that write, which ends in an error",
    "registry.ask_for": "records that searches asked for; without it they move in their turn",
    "registry.keep_queries": "a sample of what was asked; without it a plan has fewer queries",
    "registry.release": "a quarantined record that somebody deleted; done again at the next look",
    "registry.add_artifact": "what was trained, before an upgrade that names it is registered; the same again changes nothing",
    "registry.add_contents": "the contents of that, before it as well; written in parts, and those that are there are left",
    "registry.add_version": "as that",
    "registry.allow_removal": "--execute, before the upgrade is registered",
    "registry.put_back": "rmvdb verify --repair; the same again finds nothing that is lost",
    "registry.add_written": "rmvdb verify --repair; the same again finds nothing that is unknown",
    "registry.note_trouble": "a registry that has gone back, after which nothing is done",
}


#: Files that no upgrade and no application calls: commands of their own.
APART = {"garbage", "rebuild", "status"}


def test_no_call_that_stands_in_the_code_is_forgotten() -> None:
    package, made = Path(rmvdb.__file__).parent, set()
    rooms = [file for room in ("backfill", "serving", "upgrade") for file in (package / room).glob("*.py")]
    for file in (*(file for file in rooms if file.stem not in APART), package / "registry" / "mark.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute | ast.Name):
                owner = node.value.attr if isinstance(node.value, ast.Attribute) else node.value.id
                # A batch's column `archive` names its files.
                if owner.strip("_") in ("registry", "store", "archive") and node.attr not in (*READS, "values"):
                    made.add(f"{owner.strip('_')}.{node.attr}")
    lists = (Backfill.CALLS, MovedFirst.CALLS, *Client.CALLS.values(), *Conductor.CALLS.values(), tuple(EVERYWHERE))
    listed = {call.split()[0] for calls in lists for call in calls}
    assert made - listed == NOT_IN_A_STORY.keys()
    assert listed - made == set()


@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(case))
def test_a_death_changes_nothing_of_the_end(
    outcomes: dict[tuple[str, str, str], Future[bool]], case: tuple[str, str, str]
) -> None:
    assert outcomes[case].result(timeout=200), "the process never came to that call"


def test_a_deploy_that_died_after_its_epoch_began_is_rolled_back_with_what_was_written(template: Path, tmp_path: Path) -> None:
    made = world(template, tmp_path / "world")
    with suppress(Killed):
        deploy(made.process(end=("registry.activate", "after")))
    assert made.process().begin().phase == Phase.PLANNED  # and yet both are served, and written to
    made.source.of[99] = "new"
    with made.process().client() as client:
        client.upsert([{"id": 99, "item": "new", "n": 0}])
    roll_back(made.process())
    expect_back(made)


def test_nobody_cuts_over_an_upgrade_that_was_rolled_back_meanwhile(template: Path, tmp_path: Path) -> None:
    made = world(template, tmp_path / "world")
    move(made.process())
    late, row = made.process().conductor(), made.process().begin()
    made.process().conductor().roll_back(row)
    with pytest.raises(WrongPhase, match="has ended"):
        late.cut_over(row, made.process().worker())
    assert len(made.process().registry.plan("texts").legs) == 2


def test_there_is_no_way_back_once_a_clean_up_has_begun(template: Path, tmp_path: Path) -> None:
    made = world(template, tmp_path / "world")
    upgraded(made.process())
    with suppress(Killed):
        clean_up(made.process(end=("store.drop old", "before")))
    with pytest.raises(WrongPhase, match="no way back"):
        roll_back(made.process())
    clean_up(made.process())
    expect_clean(made)


def test_who_cuts_over_late_leads_nobody_back_from_a_clean_up(template: Path, tmp_path: Path) -> None:
    made = world(template, tmp_path / "world")
    move(made.process())
    late = made.process()
    real = late.registry.set_upgrade

    def suspended(*args: object, **values: object) -> None:
        if values.get("phase") == Phase.CUT_OVER:
            cut_over(made.process())
            with suppress(Killed):
                clean_up(made.process(end=("store.drop old", "before")))
        real(*args, **values)

    late.registry.set_upgrade = suspended
    cut_over(late)
    assert made.process().begin().phase == Phase.CLEANING_UP
    clean_up(made.process())
    expect_clean(made)


@pytest.mark.parametrize("until", ["store.create old", "registry.add_collection", "registry.set_upgrade copying"])
@pytest.mark.parametrize("call", ["registry.abandon", "store.drop old"])
def test_what_is_left_of_an_upgrade_that_was_given_up_goes_when_the_next_begins(
    template: Path, tmp_path: Path, until: str, call: str
) -> None:
    made = world(template, tmp_path / "world")
    with suppress(Killed):
        keep_and_deploy(made.process(end=(until, "after")))
    with suppress(Killed):
        give_up(made.process(end=(call, "after")))
    made.process().begin()
    expect_untouched(made)


def test_what_is_left_of_a_third_that_was_given_up_goes_when_the_second_is_cleaned_up(template: Path, tmp_path: Path) -> None:
    made = world(template, tmp_path / "world")
    move_half(made.process())
    with suppress(Killed):
        supersede(made.process(end=("registry.add_collection", "after"), filled="v3"))
    with suppress(Killed):
        give_up(made.process(end=("registry.abandon", "after")))
    assert [name for name in made.store._collections if version_of(name) == "v3"] != []
    move(made.process())
    cut_over(made.process())
    clean_up(made.process())
    assert [name for name in made.store._collections if version_of(name) == "v3"] == []
    expect_clean(made)


@pytest.mark.parametrize("before", [upgraded, keep_and_upgrade])
def test_two_may_clean_up_at_once(template: Path, tmp_path: Path, before: Callable[[Process], None]) -> None:
    made = world(template, tmp_path / "world")
    before(made.process())
    late, row = made.process().conductor(), made.process().begin()
    with suppress(Killed):
        clean_up(made.process(end=("registry.mark_dropped", "before")))
    late.clean_up(row)
    expect_clean(made)
    with pytest.raises(WrongPhase, match="has ended"):
        late.clean_up(row)


def test_a_worker_lets_go_of_an_upgrade_that_another_one_took_the_place_of(template: Path, tmp_path: Path) -> None:
    made = world(template, tmp_path / "world")
    move_half(made.process())
    process, row = made.process(), made.process().begin()
    made.process().conductor().roll_back(row)
    progress = process.conductor().backfill(row, process.worker())
    assert progress.t < 1.0
