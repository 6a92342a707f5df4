"""Probing a model: its vectors of fixed items, and whether they come from the same model as before."""

from __future__ import annotations

import numpy as np

from rmvdb.errors import ModelError
from rmvdb.items.check import TOLERANCE, confirm_rows, distances, embed_checked
from rmvdb.items.kinds import KINDS, REQUIRED, Kind
from rmvdb.protocols import Embedder
from rmvdb.types import Item, Vectors


def probe_vectors(embedder: Embedder, *, dim: int, kind: Kind) -> Vectors:
    """Embed the probes of a kind, (probes, dim). A row is NaN if the embedder does not take that further probe.

    Raises: ModelError if the embedder fails for one of the four that it must take.
    """
    vectors, failed = embed_checked(embedder, KINDS[kind].probes(), dim)
    if failed:
        raise ModelError(
            f"The embedder fails for {len(failed)} of {REQUIRED} {kind} probes: {next(iter(failed.values()))}; fix the embedder"
        )
    return np.concatenate([vectors, *(_embed_alone(embedder, item, dim) for item in KINDS[kind].more())])


def _embed_alone(embedder: Embedder, item: Item, dim: int) -> Vectors:
    """Embed one item alone, (1, dim), since it may not fit into a batch with others. NaN if that fails."""
    for _ in range(2):  # the embedder may be away for a moment
        try:
            vectors, failed = embed_checked(embedder, [item], dim)
        except ModelError:
            break
        if not failed:
            return vectors
    return np.full((1, dim), np.nan, np.float32)


def check_steady(embedder: Embedder, vectors: Vectors, *, kind: Kind) -> None:
    """Raise ModelError if an item's vector depends on its batch or on chance. `vectors` are the embedder's probe vectors."""
    # Half of the tolerance that counts later: a gallery has more items than there are probes, and the worst one counts.
    confirm_rows(embedder, KINDS[kind].probes(), vectors[:REQUIRED], range(REQUIRED), TOLERANCE / 2)


def same_model(old: Vectors, new: Vectors, *, tolerance: float = TOLERANCE) -> bool:
    """Tell whether two sets of probe vectors (n, dim) come from one model, on whatever device.

    Each pair may differ by `tolerance` in cosine distance and by its square root in length. An older version of rmvdb kept fewer
    probes. A row of NaN stands for a probe that the embedder did not take.
    """
    known = np.isfinite(old).all(axis=1)  # (n,)
    if old.shape[1:] != new.shape[1:] or len(old) > len(new):
        return False
    return bool((distances(old[known], new[: len(old)][known]) <= tolerance).all())
