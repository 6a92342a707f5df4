"""A few bytes of a vector, by which it is told from others though an engine has rounded it, or made it a unit long."""

from __future__ import annotations

import functools

import numpy as np

from rmvdb.types import Vectors

#: How far the products of one vector may lie apart.
NEAR = 2e-2
#: Bytes of the four products.
_SIZE = 16


def of(vector: Vectors, *, item: bytes | None = None) -> bytes:
    """The products of its direction with four fixed ones, 16 bytes; those of two vectors of random directions are some tenths
    apart, each. Behind them the digest of the `item` that it was made from, if that is known."""
    unit = np.asarray(vector, dtype=np.float64)
    unit = unit / (np.linalg.norm(unit) or 1.0)
    return (_directions(len(unit)) @ unit).astype(np.float32).tobytes() + (item or b"")


def item_of(one: bytes) -> bytes:
    """The digest of the item that the vector was made from; empty if it is not known."""
    return one[_SIZE:]


def near(one: bytes, other: bytes) -> bool:
    """Whether both may be of one vector."""
    first, second = (np.frombuffer(each[:_SIZE], dtype=np.float32) for each in (one, other))
    return bool(np.allclose(first, second, rtol=0.0, atol=NEAR))


@functools.cache
def _directions(dim: int) -> Vectors:
    """(4, dim), without a generator of random numbers, which may give others in another version."""
    return np.cos(np.sqrt([[2.0], [3.0], [5.0], [7.0]]) * np.arange(1, dim + 1))
