"""Embedders whose queries are embedded otherwise than their records: E5, BGE, Nomic, Cohere, texts that search pictures."""

from __future__ import annotations

from collections.abc import Sequence

from rmvdb.errors import ModelError
from rmvdb.items.check import as_array
from rmvdb.protocols import Embedder
from rmvdb.types import Item, Vectors


def has_own_queries(embedder: Embedder) -> bool:
    """Return whether the embedder has `embed_queries`."""
    return callable(getattr(embedder, "embed_queries", None))


class QueryEmbedder:
    """An embedder that embeds by the `embed_queries` of another. Everything that takes an embedder takes it."""

    def __init__(self, embedder: Embedder, *, dim: int) -> None:
        """`dim`: the dimension of the vectors that `embed` gives."""
        self.embedder, self.dim = embedder, dim

    def embed(self, items: Sequence[Item]) -> Vectors:
        """Return vectors (n, dim) of n queries, in order. Errors of `embed_queries` pass through.

        Raises:
            ModelError: its vectors have another dimension than those of `embed`.
        """
        rows = self.embedder.embed_queries(items)  # type: ignore[attr-defined]
        try:
            made = as_array(rows)
        except ModelError:
            return rows  # type: ignore[no-any-return]  # rows of several shapes: `embed_checked` tells whose they are
        if made.ndim == 2 and made.shape[1] != self.dim:
            raise ModelError(
                f"embed_queries gives vectors of dimension {made.shape[1]}, and embed gives {self.dim}; let both give vectors of "
                "one space"
            )
        return made
