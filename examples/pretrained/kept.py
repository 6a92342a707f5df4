"""Vectors that are kept, by the SHA-256 of the model and of what it saw, so that a second run is fast."""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np


class Store:
    """Vectors by digest, in a file that processes share."""

    def __init__(self, file: Path, weights: str) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        self._file, self._weights = file, weights
        with self._open() as rows:
            rows.execute("CREATE TABLE IF NOT EXISTS kept (weights TEXT, item BLOB, vector BLOB, PRIMARY KEY (weights, item))")

    def read(self, keys: Sequence[bytes]) -> dict[bytes, np.ndarray]:
        """Return the vectors of those keys that are kept."""
        found: dict[bytes, np.ndarray] = {}
        with self._open() as rows:
            for start in range(0, len(keys), 500):
                part = list(dict.fromkeys(keys[start : start + 500]))
                marks = ",".join("?" * len(part))
                query = f"SELECT item, vector FROM kept WHERE weights = ? AND item IN ({marks})"
                found.update((key, np.frombuffer(raw, np.float32)) for key, raw in rows.execute(query, [self._weights, *part]))
        return found

    def write(self, vectors: dict[bytes, np.ndarray]) -> None:
        """Keep these."""
        with self._open() as rows:
            rows.executemany(
                "INSERT OR REPLACE INTO kept VALUES (?, ?, ?)",
                [(self._weights, key, np.asarray(vector, np.float32).tobytes()) for key, vector in vectors.items()],
            )

    def _open(self) -> _Closing:
        return _Closing(self._file)


class _Closing:
    """A connection for one call: threads and processes share none."""

    def __init__(self, file: Path) -> None:
        self._connection = sqlite3.connect(file, timeout=60)

    def __enter__(self) -> sqlite3.Connection:
        return self._connection

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self._connection.commit()
        self._connection.close()


def digest(weights: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a model's weights, by name."""
    found = hashlib.sha256()
    for name, value in sorted(weights.items()):
        found.update(name.encode())
        found.update(np.ascontiguousarray(value).tobytes())
    return found.hexdigest()
