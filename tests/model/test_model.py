"""The protocol checked by exhaustion, and that each step of it is needed: with any one left out something breaks.

`python -m pytest tests/model -m bench -o faulthandler_timeout=0` looks at more faults at once; `Found` prints the shortest way to
what is broken.
"""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
import re
from dataclasses import replace

import pytest

from rmvdb import upgrade
from tests.model import clock, conductors, in_place, lease, mirror, older_copy, protocol, registry, workers, writers
from tests.model.__main__ import main
from tests.model.checker import check
from tests.model.clock import Time
from tests.model.explore import explore
from tests.model.lease import Lease
from tests.model.mirror import Mirrored
from tests.model.protocol import ABSENT, Protocol
from tests.model.scenarios import SCENARIOS

MODELS = (protocol, registry, workers, writers, conductors, lease, mirror, in_place, older_copy, clock)


#: Each step of the protocol, and the scenario that breaks without it.
STEPS = {
    # a worker
    "a worker announces that it writes": "an upsert",
    "a worker announces, then looks": "an upsert",
    "a worker looks at the intents": "an upsert",
    "what was left to a client is kept": "an upsert",
    "a grace lies between copied and removed": "two workers",
    "the grace of a write counts from the write": "an upsert",
    "the old record is compared before it is removed": "others change it",
    "a decision is written down before it is carried out": "two workers",
    "what changed comes again": "others change and delete it",
    "the archive keeps what an earlier try read": "others delete it",
    "a batch that comes again keeps its archive": "others change and delete it",
    "what others deleted is taken from new": "others delete it",
    "a worker looks at the intents before it takes from new": "others delete what is upserted",
    "what was not taken from new comes again": "others delete what is upserted",
    "a quarantined record leaves its batch": "a quarantined record",
    # registry and engine are not of one moment
    "what leaves is noted in the archive first": "the registry goes back",
    "the archive is asked for what the registry forgot": "the registry goes back",
    "a registry behind the mark is made again": "the registry goes back across a quarantine",
    "new is asked before the record leaves old": "the engine goes back",
    # what searches ask for
    "what searches asked for is moved in one transaction": "a search asks for it",
    "only pending batches are taken apart": "a search asks for it",
    # its claim
    "a claim has a token": "two workers",
    "a takeover waits for the end of a lease": "an upsert and two workers",
    "a worker's call asks for its lease": "an upsert",
    "a call leaves the longest call before its lease ends": "an upsert",
    "what a worker leaves half-done keeps its lease": "an upsert",
    "no heartbeat holds what was left": "two workers",
    "a clock that is set ends no lease, deadline or grace": "an upsert",
    # a writer
    "a write waits for who is writing its record": "an upsert",
    "a write waits for who takes its record from new": "others delete what is upserted",
    "a write waits for an earlier one of its record": "two upserts",
    "a write replaces what old holds": "an upsert",
    "a writer's call asks for its deadline": "two upserts",
    "a write past its deadline is not done": "an upsert",
    # a reader, and epochs
    "a search that took too long is repeated": "two workers",
    "a plan past its maximum age is not used": "to the cut-over",
    "the plan is read in the transaction that announces": "to the cut-over",
    "a write waits for clients of the plan before": "an insertion to the cut-over",
    "an epoch waits for open writes": "to the cut-over",
    "an epoch waits for claims": "a roll back",
    "a grace lies between the cut-over and the clean-up": "an upsert to the clean-up",
    "an epoch waits for a claim that compares": "a roll back",
    # the original kept
    "a write reaches mirrors": "an upsert, the original kept",
    "a write reaches mirrors first": "an upsert, the original kept",
    "the copy is a mirror while it is made": "an upsert, the original kept",
    "a copy is made under an announcement": "an upsert, the original kept",
    "what was cut off while the copy was made is copied again": "an upsert, the original kept",
    "a grace lies between the copy and its service": "the original kept",
    "what others inserted into the original is taken in": "others insert into the original",
    "what others deleted from the original is taken out": "others delete from the original",
    "taking out looks again once it is announced": "others delete from the original",
    "a grace lies between a roll back and the clean-up": "the original kept",
    # a copy that is lifted, and re-embedded in place
    "what was written since the copy is served is left alone": "an upsert and a deletion, lifted",
    # a conductor
    "late records are listed": "others insert it",
    "a record is on the work list once": "two conductors",
    "what came late is looked for again": "to the cut-over",
    "the second look waits for open writes": "to the cut-over",
    "verify knows of half-made writes": "to the cut-over",
    "half-made writes override the archive": "an upsert and a roll back",
    "a roll back leaves what had not left": "others delete it, and a roll back",
}

#: The same for records that stay in their collection.
STEPS_IN_PLACE = {
    "a worker announces that it writes": "an upsert, lifted",
    "a worker announces, then looks": "a deletion, lifted",
    "a worker looks at the intents": "a deletion, lifted",
    "a claim has a token": "lifted",
    "a worker's call asks for its lease": "an upsert, lifted",
    "a write waits for who is writing its record": "an upsert, lifted",
    "a write reaches mirrors first": "an upsert, lifted",
    "what was cut off while the copy was made is copied again": "an upsert, lifted",
    "what others inserted into the original is taken in": "others insert into the original, lifted",
    "what others deleted from the original is taken out": "others delete from the original, lifted",
    "late records are listed": "an upsert, lifted",
}

#: Nothing breaks without this one, which spares a round: what a write under way puts back into old would be found there later.
NOT_NEEDED = "a record whose write is open stays in old"
#: Where that is looked at each time; the other scenarios are looked at with the benchmarks.
WRITTEN = (
    "an upsert",
    "a deletion",
    "others change what is upserted",
    "an upsert and a roll back",
    "an upsert, the original kept",
)

#: Needed only once the registry has gone back beside a writer: see the test that leaves it out.
FORGOTTEN = "what left before a batch came again has left for it, too"
#: The same, of a write that the registry forgot.
SPARED = "what no batch copied is not taken from new"

CLOCK_STEPS = (
    "who has not compared the clocks counts a tick",
    "what the clock is ahead by does not count",
    "what the clock was set back by is known",
    "a jump sets the anchor anew",
    "another that started afresh makes a reading worth a tick",
    "a client sets an anchor in place of the one that it read",
    "a client sets an anchor while the clock shows what it has counted",
)

LEASE_STEPS = (
    "a call leaves the longest call before the lease ends",
    "a heartbeat counts from its question",
    "a lease counts from before the claim",
    "a lease that has run out is not renewed",
    "what the database has lost is lost",
    "a worker counts on less than its lease, by what its clock may be slow",
    "a clock that is set ends no lease",
)


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_protocol_keeps_its_promises(name: str) -> None:
    found = check(SCENARIOS[name])
    assert not found.broken, found


@pytest.mark.parametrize(("step", "scenario"), [*STEPS.items(), *STEPS_IN_PLACE.items()])
def test_without_any_one_step_a_promise_is_broken(step: str, scenario: str) -> None:
    found = check(SCENARIOS[scenario].leaving_out(step))
    assert found.broken, found
    assert found.trace


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in WRITTEN else pytest.mark.bench) for name in SCENARIOS])
def test_a_step_that_is_not_needed_is_known(name: str) -> None:
    found = check(SCENARIOS[name].leaving_out(NOT_NEEDED))
    assert not found.broken, found


def test_no_permitted_call_is_on_its_way_when_others_rely_on_the_end_of_its_lease() -> None:
    found = check(Lease())
    assert not found.broken, found


@pytest.mark.parametrize("step", LEASE_STEPS)
def test_without_any_one_step_a_call_outlives_its_lease(step: str) -> None:
    assert check(Lease(without=frozenset({step}))).broken


@pytest.mark.parametrize("time", [Time(), Time(jumps=1, stands=True)], ids=["set twice", "set while a machine stands still"])
def test_no_wait_ends_early_though_the_databases_clock_is_set_forward_and_back(time: Time) -> None:
    found = check(time)
    assert not found.broken, found


@pytest.mark.parametrize("step", CLOCK_STEPS)
def test_without_any_one_step_a_clock_that_is_set_ends_a_wait_early(step: str) -> None:
    assert any(check(replace(time, without=frozenset({step}))).broken for time in (Time(), Time(jumps=1, stands=True)))


def test_every_step_of_the_models_is_left_out_once() -> None:
    named = {name for module in MODELS for name in re.findall(r'\.has\("([^"]+)"\)', inspect.getsource(module))}
    assert named == {*STEPS, *LEASE_STEPS, *CLOCK_STEPS, NOT_NEEDED, FORGOTTEN, SPARED}


def test_the_tables_name_code_that_is_there() -> None:
    rooms = {
        "Registry": "registry.registry", "Backfill": "backfill.batches", "Worker": "backfill.worker",
        "Reader": "serving.search", "Writer": "serving.writes", "Writes": "serving.announced_writes",
        "CurrentPlan": "serving.current_plan",
        "Conductor": "upgrade.run", "Mirror": "upgrade.copy_collection", "Archive": "storage.archive",
        "Timekeeper": "registry.clock", "MovedFirst": "backfill.asked_for", "Owner": "registry.mark",
        "Rebuild": "upgrade.rebuild", "ArchiveMatcher": "upgrade.rebuild",
    }  # fmt: skip
    steps = [room.name for room in pkgutil.iter_modules(upgrade.__path__)]
    owners = "|".join(["[A-Z]\\w+", *steps])
    named = {name for module in MODELS for name in re.findall(rf"\b({owners})\.(\w+)", str(module.__doc__))}
    assert len(named) > 30
    for owner, name in named:
        room = importlib.import_module(f"rmvdb.upgrade.{owner}" if owner in steps else f"rmvdb.{rooms[owner]}")
        assert hasattr(room if owner in steps else getattr(room, owner), name), f"{owner}.{name}"


def test_a_repeated_call_whose_first_try_arrives_last_is_not_guarded_against() -> None:
    """docs/limits.md says so; if you change that, delete this test and make `repeats` the rule."""
    assert check(Protocol(writes=(2,), repeats=True, faults=1)).broken


def test_a_record_that_left_before_the_registry_went_back_is_not_taken_for_deleted() -> None:
    """Beside a writer, whose intent the registry has forgotten, there are too many states to look at each one."""
    assert check(Protocol(registry_goes_back=True, searches=False, writes=(2,), faults=1).leaving_out(FORGOTTEN)).broken


def test_a_write_that_the_registry_forgot_is_not_taken_from_the_new_collection() -> None:
    """Of a client that deleted the record before: it is in the new collection only."""
    assert check(Protocol(registry_goes_back=True, searches=False, writes=(ABSENT, 2), faults=1).leaving_out(SPARED)).broken


def test_a_search_at_random_through_bigger_scenarios_finds_nothing() -> None:
    explored = explore(7, seconds=10.0)
    assert explored.states > 1000
    assert explored.far < explored.ends / 2  # it does not give most of them up
    assert not explored.violations, explored.violations


#: Steps that a search at random misses soon: of a worker, a writer, an epoch, a conductor, a kept copy, an older registry.
MISSED_SOON = (
    "a grace lies between copied and removed",
    "a takeover waits for the end of a lease",
    "a write waits for who is writing its record",
    "an epoch waits for open writes",
    "what came late is looked for again",
    "a write reaches mirrors",
    "a registry behind the mark is made again",
)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("step", MISSED_SOON)
def test_a_search_at_random_finds_that_a_step_is_left_out(step: str, seed: int) -> None:
    explored = explore(seed, seconds=400.0, without=frozenset({step}), states=1_000_000)
    assert explored.violations, explored
    (scenario, found), *_ = explored.violations
    assert found.trace
    assert step in scenario.without


def test_the_command_searches_for_so_long_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("--seconds", "1", "--seed", "7") == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (last["seed"], last["violations"]) == (7, 0)
    assert last["states"] > 0
    assert main("--seconds", "400", "--seed", "7", "--without", "a worker announces that it writes") == 1
    out = capsys.readouterr().out
    assert "worker: " in out
    assert json.loads(out.splitlines()[-1])["violations"] == 1


@pytest.mark.bench
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    "deeper",
    [
        pytest.param(Protocol(writes=(2, 3), workers=2, faults=1), id="two upserts and two workers, one fault"),
        pytest.param(Protocol(writes=(2, 0), workers=2, faults=2), id="an upsert, a deletion and two workers, two faults"),
        pytest.param(Protocol(writes=(2,), workers=2), id="an upsert and two workers, any faults"),
        pytest.param(Protocol(writes=(2, 3)), id="two upserts, any faults"),
        pytest.param(Mirrored(writes=(2, 3), faults=1), id="two upserts, the original kept, one fault"),
        pytest.param(Mirrored(writes=(2,), workers=2), id="an upsert and two workers, the original kept, any faults"),
        pytest.param(
            Protocol(writes=(2, 0), deploy=True, cut_over=True, roll_back=True, faults=1), id="there and back, one fault"
        ),
    ],
)
def test_the_protocol_keeps_its_promises_under_more_faults(deeper: Protocol) -> None:
    found = check(deeper)
    assert not found.broken, found
