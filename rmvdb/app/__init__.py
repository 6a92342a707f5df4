"""From settings to objects: `wiring` alone chooses classes, `config` reads rmvdb.toml, `daemon` runs schedules; and `doctor`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rmvdb.app.wiring import App


def load(path: Path | None = None, *, trust: bool = False) -> App:
    """The app of the configuration at `path`, of RMVDB_CONFIG, or of the nearest rmvdb.toml; `trust` takes one that other users
    may change."""
    from rmvdb.app import wiring

    return wiring.load(path, trust=trust)
