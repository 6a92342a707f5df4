"""Forty texts at v1. Their upgrade keeps the original, and searches a copy: as it is (`naive`), or in the new space (`fct`)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rmvdb.learning.method import Method
from tests.support.inprocess import Gallery, make


@pytest.fixture(params=[Method.NAIVE, Method.FCT])
def method(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Method:
    """How the copy is searched: as the original is, or lifted, by few records."""
    monkeypatch.setattr("rmvdb.planning.trial.LEAST_PAIRS", 20)
    monkeypatch.setattr("tests.support.kept_original.METHOD", request.param)
    found: Method = request.param
    return found


@pytest.fixture
def gallery(tmp_path: Path, method: Method) -> Iterator[Gallery]:
    """Forty texts at v1 and no upgrade."""
    made = make(tmp_path, deployed=False)
    assert made.conductor().roll_back(made.upgrade) is None
    yield made
    made.registry.close()
