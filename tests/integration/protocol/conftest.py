"""Forty texts in four batches, both collections served."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.inprocess import Gallery, make


@pytest.fixture
def gallery(tmp_path: Path) -> Iterator[Gallery]:
    """Forty texts, both collections served, four batches listed."""
    made = make(tmp_path)
    yield made
    made.registry.close()
