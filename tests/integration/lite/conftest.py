"""A Milvus Lite file of the test's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rmvdb.engines import lite
from tests.support.lite_processes import eventually, processes


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    """A file that is not there yet."""
    file = tmp_path / "x.db"
    yield file
    lite.release(file)
    eventually(lambda: processes(file) == {}, "its processes have ended")
