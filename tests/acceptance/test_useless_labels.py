"""A text gallery whose `category` says nothing about what searches want, judged by true queries through the client."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.bench.curves.cases import CASES, Case, Sizes
from tests.bench.curves.run import Way, ends, upgrade

CATEGORIES = 8


@pytest.fixture
def case(tmp_path: Path) -> Case:
    """Made sentences of thirty topics. The category of each was drawn, whatever it is about."""
    made = CASES["m"](0, tmp_path, tmp_path, Sizes(texts=600))
    drawn = np.random.default_rng(5).integers(CATEGORIES, size=len(made.records))
    records = [{**record, "category": f"c{category}"} for record, category in zip(made.records, drawn, strict=True)]
    return replace(made, records=records)


def test_labels_that_say_nothing_cost_searches_nothing_from_the_start_to_the_end(case: Case, tmp_path: Path) -> None:
    alone = ends(case, tmp_path / "alone")
    told = upgrade(case, Way(labels="category"), 0, tmp_path / "upgrade", ts=(0.0, 0.5, 1.0))
    of_new = alone.quality(told["measured"])["M_new"]
    assert of_new > told["start"] + 0.1  # a better model
    at = [value for _, value in told["points"]]
    assert at[0] >= told["start"]
    assert at[1] >= told["start"]
    assert at[2] == pytest.approx(of_new, abs=1e-9)


def test_a_method_that_learns_from_such_labels_comes_with_a_warning_and_ends_where_v2_alone_does(
    case: Case, tmp_path: Path
) -> None:
    alone = ends(case, tmp_path / "alone")
    told = upgrade(case, Way(method="rm", labels="category", rescore=0), 0, tmp_path / "rm", ts=(0.0, 1.0))  # accepts the risk
    assert told["about"]["verdict"] == "warn"
    assert told["points"][-1][1] == pytest.approx(alone.quality(told["measured"])["M_new"], abs=1e-9)
