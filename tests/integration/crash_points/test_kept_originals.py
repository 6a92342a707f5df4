"""A process that keeps the original dies once before and once after each call that changes something."""

from __future__ import annotations

from pathlib import Path

import pytest

from rmvdb.backfill.batches import Backfill
from rmvdb.upgrade.run import Conductor
from tests.support.stories import (
    IN_PLACE,
    Case,
    Outcomes,
    Story,
    cases,
    clean_up,
    copy_and_die,
    cut_over,
    expect_calls,
    expect_clean,
    expect_kept,
    expect_kept_and_clean,
    expect_lifted,
    expect_untouched,
    give_up,
    keep_and_deploy,
    keep_and_upgrade,
    keep_move_and_be_changed,
    lift_and_deploy,
    list_and_move,
    world,
)

#: The threads of a process that is killed end by SystemExit.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")

STORIES = {
    "give up the copy": Story(Conductor.CALLS["give up the copy"], copy_and_die, give_up, expect_untouched),
    "cut over, the original kept": Story(
        tuple({*Conductor.CALLS["agree"], *Conductor.CALLS["late"], *Backfill.CALLS, *Conductor.CALLS["cut over"]}),
        keep_move_and_be_changed,
        cut_over,
        expect_kept_and_clean,
        deaths=(*Conductor.CALLS["agree"], "registry.activate"),
    ),
    "copy": Story(
        (*Conductor.CALLS["begin"], *Conductor.CALLS["copy"], *Conductor.CALLS["deploy"]),
        lambda process: None,
        keep_and_deploy,
        expect_kept,
        deaths=(*Conductor.CALLS["copy"], "registry.activate"),
    ),
    "in place": Story((*Conductor.CALLS["list"], *IN_PLACE), lift_and_deploy, list_and_move, expect_lifted, deaths=IN_PLACE),
    "clean up of a kept original": Story(
        (*Conductor.CALLS["clean up"], "registry.announce", "registry.activate"),
        keep_and_upgrade,
        clean_up,
        expect_clean,
        deaths=("registry.begin_clean_up", "registry.activate", "store.drop old"),
    ),
}
CASES = cases(STORIES)


@pytest.mark.parametrize("name", STORIES)
def test_the_calls_in_the_code_are_the_calls_that_are_made(template: Path, tmp_path: Path, name: str) -> None:
    expect_calls(world(template, tmp_path / "world"), STORIES[name])


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_a_death_changes_nothing_of_the_end(outcomes: Outcomes, case: Case) -> None:
    assert outcomes[case].result(timeout=200), "the process never came to that call"
