"""Ids as hashes of eight bytes, so that millions of them are compared as sets in little memory."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from rmvdb.registry.codec import key
from rmvdb.types import Id


def hashes(ids: Sequence[Id]) -> npt.NDArray[np.uint64]:
    """Return eight bytes of each id."""
    digests = (hashlib.blake2b(key(id).encode(), digest_size=8).digest() for id in ids)
    return np.frombuffer(b"".join(digests), dtype=np.uint64)


def outside(known: npt.NDArray[np.uint64], ids: Sequence[Id]) -> list[Id]:
    """Return the ids whose hash is not among the known ones."""
    return [id for id, is_known in zip(ids, np.isin(hashes(ids), known), strict=True) if not is_known]


def share(id: Id) -> float:
    """Return a fixed number in [0, 1) for an id, by which a sample is drawn."""
    return int(hashes([id])[0]) / 2**64
