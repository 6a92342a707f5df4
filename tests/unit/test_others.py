"""`make others`: its table and its smaller gallery. It needs none of the other programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.bench.curves.cases import CASES, Sizes
from tests.bench.others import measure, report
from tests.bench.others.__main__ import SYSTEMS, TS, some
from tests.bench.page import marks

ROOT = Path(__file__).parents[2]
FOUND: dict[str, Any] = {
    "title": "texts",
    "metric": "nDCG@10",
    "records": 1400,
    "queries": 2,
    "ts": [0.0, 0.5],
    "systems": {
        "one": {
            "moments": [
                {"t": 0.0, "quality": 0.25, "ms": 1.0, "extractions": 1.0},
                {"t": 0.5, "quality": 0.5, "ms": 7.4, "extractions": 2.5, "written": 10, "found_at_once": 9, "found_after": 8},
            ]
        },
        "two": {"moments": [{"t": 0.0, "quality": 0.25, "ms": 1.0, "extractions": 1.0, "records_per_s": 99.6}]},
        "three": {"error": "it fell over", "moments": []},
    },
}


class Exact:
    """A system that knows the row of each text, and forgets what is written."""

    def __init__(self, rows: dict[str, int]) -> None:
        self.rows, self.written, self.t = rows, 0, 0.0

    def search(self, query: str) -> list[int]:
        return [self.rows[query]]

    def write(self, row: int, text: str) -> None:
        self.written += 1
        self.rows[text] = row

    def go(self, t: float) -> int:
        self.rows = dict.fromkeys(self.rows, -1)
        self.t = t
        return 0


def test_the_table_has_a_dash_for_what_was_not_measured_and_the_error_of_what_failed() -> None:
    lines = report.markdown(FOUND).splitlines()
    assert "| one | 0.250 | 0.500 | 7 | 2.5 | — | 9, 8 of 10 |" in lines
    assert "| two | 0.250 | — | — | — | 100 | — |" in lines
    assert "| three | it fell over | | | | | |" in lines
    assert len({line.count("|") for line in lines if line.startswith("|")}) == 1


def test_fewer_records_leave_their_own_answers() -> None:
    case = CASES["m"](0, Path(), Path(), Sizes(texts=40))
    few = some(case, 10)
    assert (len(few.records), few.relevant.shape) == (10, (len(case.queries), 10))
    assert np.array_equal(few.relevant, case.relevant[:, :10])
    assert some(case, None) is case


def test_a_write_that_the_backfill_loses_is_found_at_once_and_not_after() -> None:
    case = CASES["m"](0, Path(), Path(), Sizes(texts=40))
    system = Exact({})
    assert measure.writes(case, system) == {"written": 10, "found_at_once": 10, "found_after": 0}
    assert (system.written, system.t) == (10, 1.0)


def test_the_page_shows_the_results() -> None:
    found = json.loads((ROOT / "results" / "others.json").read_text(encoding="utf-8"))
    page = (ROOT / "docs" / "research" / "others.md").read_text(encoding="utf-8")
    assert (found["ts"], list(found["systems"])) == (TS, list(SYSTEMS))
    begin, end = marks("others")
    assert f"{begin}\n{report.markdown(found)}\n{end}" in page
