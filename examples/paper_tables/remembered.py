"""Rows that are kept once they are measured, so that a stopped command goes on with the next one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import rmvdb
from examples.paper_tables.rows import Row


@dataclass(frozen=True, kw_only=True)
class Remembered:
    """Rows in a folder, by all that they depend on: the embeddings, the plan, and the code that learns."""

    folder: Path

    def row(self, name: str, parts: dict[str, Any], make: Callable[[], Row]) -> Row:
        """Return the row of these parts, kept or made now."""
        told = json.dumps([name, parts, _code()], sort_keys=True, default=str)
        path = self.folder / f"row-{name.replace(' ', '-')}-{hashlib.sha256(told.encode()).hexdigest()[:12]}.json"
        if path.is_file():
            return Row(**json.loads(path.read_text()))
        found = make()
        path.write_text(json.dumps(asdict(found)))
        return found


def _code() -> str:
    """The SHA-256 of what trains ψ, ρ and h."""
    found = hashlib.sha256()
    for path in sorted((Path(rmvdb.__file__).parent / "learning").rglob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()
