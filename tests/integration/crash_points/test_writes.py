"""An application that writes dies once before and once after each call that changes something."""

from __future__ import annotations

from pathlib import Path

import pytest

from rmvdb.serving.client import Client
from tests.support.stories import (
    Case,
    Outcomes,
    Story,
    cases,
    delete,
    expect_calls,
    expect_deleted,
    expect_kept,
    expect_kept_without,
    expect_moved,
    expect_third,
    expect_third_without,
    keep_and_move_half,
    move_half,
    third_deployed,
    upsert,
    world,
)

#: The threads of a process that is killed end by SystemExit.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")

STORIES = {
    "upsert": Story(Client.CALLS["upsert"], move_half, upsert, expect_moved),
    "delete": Story(Client.CALLS["delete"], move_half, delete, expect_deleted),
    "upsert, the original kept": Story(Client.CALLS["upsert"], keep_and_move_half, upsert, expect_kept),
    "delete, the original kept": Story(Client.CALLS["delete"], keep_and_move_half, delete, expect_kept_without),
    "upsert under three legs": Story(Client.CALLS["upsert"], third_deployed, upsert, expect_third, filled="v3"),
    "delete under three legs": Story(Client.CALLS["delete"], third_deployed, delete, expect_third_without, filled="v3"),
}
CASES = cases(STORIES)


@pytest.mark.parametrize("name", STORIES)
def test_the_calls_in_the_code_are_the_calls_that_are_made(template: Path, tmp_path: Path, name: str) -> None:
    expect_calls(world(template, tmp_path / "world"), STORIES[name])


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_a_death_changes_nothing_of_the_end(outcomes: Outcomes, case: Case) -> None:
    assert outcomes[case].result(timeout=200), "the process never came to that call"
