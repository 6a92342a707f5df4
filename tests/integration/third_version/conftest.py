"""A gallery half way from v1 to v2, to which a third version comes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.inprocess import Gallery, make
from tests.support.third_version import go_half_way


@pytest.fixture
def gallery(tmp_path: Path) -> Iterator[Gallery]:
    """A gallery half way."""
    made = make(tmp_path)
    go_half_way(made)
    yield made
    made.registry.close()
