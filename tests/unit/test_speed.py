"""`make bench` measures every row that needs no server, and its table names machine, versions, medians and targets."""

from __future__ import annotations

import json
import math

import pytest

from tests.bench.speed.__main__ import main
from tests.bench.speed.row import compared


@pytest.mark.parametrize("family", ["own_time", "transforms", "statements"])
def test_a_small_bench_prints_a_line_for_each_row_and_a_table(family: str, capsys: pytest.CaptureFixture[str]) -> None:
    rows = main(["--small", "--rows", family])
    printed = capsys.readouterr()
    lines = [json.loads(line) for line in printed.out.splitlines()]
    assert [line["name"] for line in lines] == [row.name for row in rows]
    assert len(rows) >= 2
    assert all({"name", "ratio", "target", "better"} <= set(line) and math.isfinite(line["ratio"]) for line in lines)
    assert "cores" in printed.err
    assert "pymilvus" in printed.err
    assert all(f"| {row.name} |" in printed.err for row in rows)


def test_a_row_compares_the_medians_of_both_sides_or_the_times_in_which_most_calls_ended() -> None:
    ours, theirs = [float(each) for each in range(1, 102)], [10.0] * 100
    half = compared("a", ours, theirs, against="b", target=5.0)
    most = compared("a", ours, theirs, against="b", target=5.0, share=0.99)
    assert (half.ratio, half.is_met, half.ours_spread) == (5.1, False, (26.0, 76.0))
    assert most.ratio == 10.0
