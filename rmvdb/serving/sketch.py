"""A sketch: a few bytes that tell a vector from others, even if an engine rounded it or gave it unit length."""

from __future__ import annotations

import functools

import numpy as np

from rmvdb.types import Vectors

#: The largest difference between the products of one vector.
NEAR = 2e-2
#: Bytes of the four products.
_SIZE = 16


def of(vector: Vectors, *, item: bytes | None = None) -> bytes:
    """Return the products of its direction with four fixed directions, 16 bytes, and the digest of its `item`, if known.

    The products of two vectors of random directions differ by some tenths each.
    """
    unit = np.asarray(vector, dtype=np.float64)
    unit = unit / (np.linalg.norm(unit) or 1.0)
    return (_directions(len(unit)) @ unit).astype(np.float32).tobytes() + (item or b"")


def item_of(one: bytes) -> bytes:
    """Return the digest of the item that the vector was made from, empty if it is not known."""
    return one[_SIZE:]


def near(one: bytes, other: bytes) -> bool:
    """Return whether both may be sketches of one vector."""
    first, second = (np.frombuffer(each[:_SIZE], dtype=np.float32) for each in (one, other))
    return bool(np.allclose(first, second, rtol=0.0, atol=NEAR))


@functools.cache
def _directions(dim: int) -> Vectors:
    """Return the four directions (4, dim). They are not random: a generator may give other numbers in another version."""
    return np.cos(np.sqrt([[2.0], [3.0], [5.0], [7.0]]) * np.arange(1, dim + 1))
