"""`make bench`, small: the rows that need a server, or processes of their own."""

from __future__ import annotations

import math

import pytest

from tests.bench.speed.__main__ import main
from tests.support.milvus_server import unavailable


@pytest.mark.server
@pytest.mark.skipif(bool(unavailable()), reason=unavailable())
def test_a_merged_search_is_compared_with_both_legs_at_once() -> None:
    rows = main(["--small", "--rows", "search"])
    *compared, held_up = rows
    names = [row.name.split(",")[0] for row in compared]
    assert names == ["search p50", "search p99", "64 queries a call p50", "16 threads", "aio"]
    assert all(row.theirs and math.isfinite(row.ratio) for row in compared)
    assert 0 < held_up.ratio < 1000


def test_connecting_is_compared_with_importing_pymilvus() -> None:
    rows = main(["--small", "--rows", "importing"])
    assert [row.name for row in rows] == ["import rmvdb and connect", "rmvdb status"]
    assert all(row.theirs and row.ratio > 0 for row in rows)


@pytest.mark.server
@pytest.mark.skipif(bool(unavailable()), reason=unavailable())
@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("listing", ["listing", "listing", "part of a listing until its first batch"]),
        ("copying", ["copying", "copying"]),
        ("verify", ["verify"]),
    ],
)
def test_what_a_worker_does_is_compared_with_its_parts(family: str, names: list[str]) -> None:
    rows = main(["--small", "--rows", family])
    assert [row.name.split(",")[0] for row in rows] == names
    assert all(math.isfinite(row.ratio) and row.ratio > 0 for row in rows)


@pytest.mark.postgres
def test_a_claim_is_compared_with_bare_statements_in_a_short_and_a_long_work_list() -> None:
    rows = main(["--small", "--rows", "claims"])
    assert [row.against for row in rows] == ["two bare statements", "two bare statements", "few batches"]
    assert all(row.theirs and math.isfinite(row.ratio) for row in rows)


def test_a_worker_takes_no_more_memory_for_a_larger_gallery_and_a_few_statements_a_batch() -> None:
    sizes = main(["--records", "60000", "--dim", "16", "--rows", "memory"])
    assert all(row.is_met for row in sizes), sizes
    [statements] = main(["--small", "--rows", "statements_per_batch"])
    assert 9 < statements.ratio < 50
