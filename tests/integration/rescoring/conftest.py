"""Forty texts in the middle of an upgrade, whose searches rescore, and embedders that count."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.inprocess import Gallery, make
from tests.support.rescoring import Counting, write_fields


@pytest.fixture(autouse=True)
def _count_from_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Counting, "calls", {})
    monkeypatch.setattr(Counting, "before", staticmethod(lambda items: None))


@pytest.fixture
def gallery(tmp_path: Path) -> Iterator[Gallery]:
    """Forty texts in the middle of an upgrade, nothing moved yet. Each record has its text in a field, too."""
    made = make(tmp_path)
    write_fields(made)
    yield made
    made.registry.close()
