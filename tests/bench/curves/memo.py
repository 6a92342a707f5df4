"""Embeddings that are kept, by the SHA-256 of the model and of the item, so that a second run is fast."""

from __future__ import annotations

import hashlib
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from tests.bench.curves.files import place

#: Items that were asked for since the last look, and whether kept vectors are used. Both are of this process.
asked: Counter[str] = Counter()
state = {"kept": True}


@contextmanager
def live() -> Iterator[None]:
    """Embed every item anew, for times."""
    state["kept"] = False
    try:
        yield
    finally:
        state["kept"] = True


class Memo:
    """An embedder in front of another one: it embeds each item once, in whatever process. Queries are items of their own."""

    def __init__(self, name: str, embedder: Any) -> None:
        """Without a name nothing is kept."""
        self.embedder = embedder
        self._store = Store(place() / f"{name}.sqlite", _weights(embedder)) if name else None
        if hasattr(embedder, "embed_queries"):
            self.embed_queries = self._queries

    def embed(self, items: Sequence[Any]) -> np.ndarray:
        """(n, dim), kept or new."""
        return self._kept(items, self.embedder.embed, b"item")

    def _queries(self, items: Sequence[Any]) -> np.ndarray:
        return self._kept(items, self.embedder.embed_queries, b"query")

    def _kept(self, items: Sequence[Any], embed: Callable[[Sequence[Any]], np.ndarray], kind: bytes) -> np.ndarray:
        asked["items"] += len(items)
        # Kept are texts and files. rmvdb probes a model with pictures in memory, too.
        if self._store is None or not state["kept"] or not items or not all(isinstance(item, str | Path) for item in items):
            return embed(items)
        keys = [_digest(item, kind) for item in items]
        kept = self._store.read(keys)
        new = {key: item for key, item in zip(keys, items, strict=True) if key not in kept}
        if new:
            made = dict(zip(new, embed(list(new.values())), strict=True))
            self._store.write(made)
            kept.update(made)
        return np.stack([kept[key] for key in keys])


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


def _weights(embedder: Any) -> str:
    state = getattr(embedder, "module", embedder).state_dict()
    digest = hashlib.sha256()
    for name, value in sorted(state.items()):
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(value).tobytes())
    return digest.hexdigest()


def _digest(item: str | Path, kind: bytes) -> bytes:
    content = item.read_bytes() if isinstance(item, Path) else item.encode()
    return hashlib.sha256(kind + b"\0" + content).digest()
