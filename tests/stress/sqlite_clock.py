"""SQLite's clock, which is the machine's, as if an administrator had set it.

Every process of a run imports this file as its `sitecustomize`: it lies in the project's folder, which is on PYTHONPATH.
"""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path
from typing import Any

#: The file of a folder that says how many seconds its clock is ahead by.
AHEAD = "clock-ahead.txt"


def install(folder: Path) -> None:
    """Let every connection that this process makes from now on show the folder's clock."""
    connect, ahead = sqlite3.connect, folder / AHEAD

    def shown(_: object) -> float:
        seconds = float(ahead.read_text()) if ahead.exists() else 0.0
        return (time.time() + seconds) / 86400.0 + 2440587.5

    def connected(*args: Any, **kwargs: Any) -> sqlite3.Connection:
        made = connect(*args, **kwargs)
        made.create_function("julianday", 1, shown)
        return made

    sqlite3.connect = sqlite3.dbapi2.connect = connected  # type: ignore[assignment,attr-defined]


def set_ahead(folder: Path, seconds: float) -> None:
    """Set the clock for all processes of that folder, which read it at every statement."""
    half = folder / f"{AHEAD}.half"
    half.write_text(repr(seconds))
    half.replace(folder / AHEAD)


if __name__ == "sitecustomize":
    install(Path(__file__).parent)
