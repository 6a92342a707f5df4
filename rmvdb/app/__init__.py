"""Settings in, wired objects out: `config` reads `settings`, `wiring` alone chooses classes. `doctor` and workers use them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rmvdb.app.wiring import App


def load(path: Path | None = None, *, trust: bool = False) -> App:
    """Return the app of the configuration at `path`, of RMVDB_CONFIG, or of the nearest rmvdb.toml.

    `trust` accepts one that other users may change.
    """
    from rmvdb.app import wiring

    return wiring.load(path, trust=trust)
