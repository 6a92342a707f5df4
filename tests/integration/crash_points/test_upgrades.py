"""A process that upgrades, cuts over or cleans up dies once before and once after each call that changes something."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from rmvdb.backfill.asked_for import MovedFirst
from rmvdb.backfill.batches import Backfill
from rmvdb.errors import WrongPhase
from rmvdb.upgrade.run import Conductor
from tests.support.mortal import Killed, Process
from tests.support.stories import (
    Case,
    Outcomes,
    Story,
    ask,
    at_the_switch,
    cases,
    clean_up,
    cut_over,
    deploy,
    expect_calls,
    expect_clean,
    expect_moved,
    expect_switched,
    expect_untouched,
    give_up,
    keep_and_deploy,
    keep_and_upgrade,
    list_and_move,
    make_and_die,
    move_and_be_late,
    move_asked_first,
    switch,
    upgraded,
    world,
)

#: The threads of a process that is killed end by SystemExit.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")

STORIES = {
    "deploy": Story((*Conductor.CALLS["begin"], *Conductor.CALLS["deploy"]), lambda process: None, deploy, expect_moved),
    "give up": Story(Conductor.CALLS["give up"], make_and_die, give_up, expect_untouched),
    "backfill": Story((*Conductor.CALLS["list"], *Backfill.CALLS), deploy, list_and_move, expect_moved),
    "move first": Story((*MovedFirst.CALLS, *Backfill.CALLS), ask, move_asked_first, expect_moved, deaths=MovedFirst.CALLS),
    "switch": Story((*Conductor.CALLS["switch"], "registry.claim"), at_the_switch, switch, expect_switched),
    "cut over": Story(
        (*Conductor.CALLS["late"], *Backfill.CALLS, *Conductor.CALLS["cut over"]), move_and_be_late, cut_over, expect_moved
    ),
    "clean up": Story(Conductor.CALLS["clean up"], upgraded, clean_up, expect_clean),
}
CASES = cases(STORIES)


@pytest.mark.parametrize("name", STORIES)
def test_the_calls_in_the_code_are_the_calls_that_are_made(template: Path, tmp_path: Path, name: str) -> None:
    expect_calls(world(template, tmp_path / "world"), STORIES[name])


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_a_death_changes_nothing_of_the_end(outcomes: Outcomes, case: Case) -> None:
    assert outcomes[case].result(timeout=200), "the process never came to that call"


@pytest.mark.parametrize("until", ["store.create old", "registry.add_collection", "registry.set_upgrade copying"])
@pytest.mark.parametrize("call", ["registry.abandon", "store.drop old"])
def test_the_rest_of_an_upgrade_that_was_given_up_goes_when_the_next_begins(
    template: Path, tmp_path: Path, until: str, call: str
) -> None:
    made = world(template, tmp_path / "world")
    with suppress(Killed):
        keep_and_deploy(made.process(end=(until, "after")))
    with suppress(Killed):
        give_up(made.process(end=(call, "after")))
    made.process().begin()
    expect_untouched(made)


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
