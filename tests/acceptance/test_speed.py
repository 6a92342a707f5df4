"""`make bench`, small: the rows that need a Milvus server, or processes of their own."""

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
