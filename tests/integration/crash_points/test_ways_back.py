"""A process that supersedes or rolls back dies once before and once after each call that changes something."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest

from rmvdb.errors import WrongPhase
from rmvdb.types import Phase
from rmvdb.upgrade.run import Conductor
from tests.support.mortal import Killed, version_of
from tests.support.stories import (
    BACK,
    RETIRED,
    Case,
    Outcomes,
    Story,
    cases,
    clean_up,
    cut_over,
    deploy,
    expect_back,
    expect_calls,
    expect_clean,
    expect_original,
    expect_second,
    expect_third,
    give_up,
    keep_and_move_half,
    move,
    move_half,
    move_half_and_leave_a_batch,
    roll_back,
    supersede,
    third_rolled_back,
    upgraded,
    world,
)

#: The threads of a process that is killed end by SystemExit.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")

STORIES = {
    "third": Story(
        (*Conductor.CALLS["supersede"], *RETIRED, "archive.leave", *Conductor.CALLS["deploy"]),
        move_half_and_leave_a_batch,
        supersede,
        expect_third,
        filled="v3",
    ),
    "clean up of a third that was rolled back": Story(Conductor.CALLS["clean up"], third_rolled_back, clean_up, expect_second),
    "roll back": Story(BACK, move_half, roll_back, expect_back, filled="v1"),
    "back to the original": Story(
        Conductor.CALLS["back to the original"], keep_and_move_half, roll_back, expect_original, filled="v1"
    ),
}
CASES = cases(STORIES)


@pytest.mark.parametrize("name", STORIES)
def test_the_calls_in_the_code_are_the_calls_that_are_made(template: Path, tmp_path: Path, name: str) -> None:
    expect_calls(world(template, tmp_path / "world"), STORIES[name])


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_a_death_changes_nothing_of_the_end(outcomes: Outcomes, case: Case) -> None:
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


def test_an_upgrade_that_was_rolled_back_meanwhile_is_not_cut_over(template: Path, tmp_path: Path) -> None:
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


def test_a_late_cut_over_does_not_undo_a_clean_up(template: Path, tmp_path: Path) -> None:
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


def test_the_rest_of_a_third_that_was_given_up_goes_when_the_second_is_cleaned_up(template: Path, tmp_path: Path) -> None:
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


def test_a_worker_lets_go_of_an_upgrade_that_another_one_took_the_place_of(template: Path, tmp_path: Path) -> None:
    made = world(template, tmp_path / "world")
    move_half(made.process())
    process, row = made.process(), made.process().begin()
    made.process().conductor().roll_back(row)
    progress = process.conductor().backfill(row, process.worker())
    assert progress.t < 1.0
