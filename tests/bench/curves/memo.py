"""Embeddings that are kept, by the SHA-256 of the model and of the item, so that a second run is fast."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from examples.pretrained.files import place
from examples.pretrained.kept import Store, digest

#: Items that were asked for since the last look, and whether kept vectors are used. Both are of this process.
asked: Counter[str] = Counter()
state = {"kept": True}


@contextmanager
def live() -> Iterator[None]:
    """Embed every item each time, to measure times."""
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
        self._store: Store | None = None
        if name:
            self._store = Store(place() / f"{name}.sqlite", digest(getattr(embedder, "module", embedder).state_dict()))
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


def _digest(item: str | Path, kind: bytes) -> bytes:
    content = item.read_bytes() if isinstance(item, Path) else item.encode()
    return hashlib.sha256(kind + b"\0" + content).digest()
