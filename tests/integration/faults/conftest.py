"""A gallery of eight texts in one batch. tests/model finds these faults by exhaustion; here the real code goes through them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.inprocess import TIMES, Gallery, make


@pytest.fixture
def gallery(tmp_path: Path) -> Iterator[Gallery]:
    """Eight texts in one batch, both collections served."""
    made = make(tmp_path, records=8)
    yield made
    made.registry.close()


@pytest.fixture
def planned(tmp_path: Path) -> Iterator[Gallery]:
    """Eight texts in the old collection, which is served alone; its clients keep a plan for two seconds."""
    made = make(tmp_path, records=8, deployed=False, times=TIMES | {"max_age": 2.0})
    yield made
    made.registry.close()


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A write may last 6 s, and no call of it leaves after 5 s."""
    monkeypatch.setattr("rmvdb.serving.announced_writes.WRITE_LASTS", 6.0)
