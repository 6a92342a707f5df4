"""The fixtures of tests of several parts in one process."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their searches may take a tenth of a second, since all graces count from that, and on a busy machine few take less."""
    monkeypatch.setattr("rmvdb.serving.search.ATTEMPTS", 1000)
