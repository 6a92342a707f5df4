"""Vectors that searches made, kept within a bound of bytes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import TypeAlias

from rmvdb.types import Id, Vectors

#: The collection that the vector is made for, the record's id, and the digest of its item.
Key: TypeAlias = tuple[str, Id, bytes]
#: Bytes of an entry besides its vector, about.
_ENTRY = 400


class VectorCache:
    """Vectors (dim,) by collection, id and digest of the item. The oldest use makes room. Safe to share between threads.

    A vector never outlives a write of its record. Each search loads the item itself, and asks by its digest. After a
    write the digest is another one, so no search asks for the old key, and its vector ages out. It does not matter who wrote, or
    when. A collection has one model for good, and its name is never used again.
    """

    def __init__(self, most: int) -> None:
        """Keep `most` bytes at most."""
        self._most, self._bytes = most, 0
        self._kept: OrderedDict[Key, Vectors] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def bytes(self) -> int:
        """The bytes that it takes, about."""
        return self._bytes

    def get(self, keys: Iterable[Key]) -> dict[Key, Vectors]:
        """Return what is kept under these keys."""
        with self._lock:
            found = {key: self._kept[key] for key in keys if key in self._kept}
            for key in found:
                self._kept.move_to_end(key)
        return found

    def put(self, vectors: Mapping[Key, Vectors]) -> None:
        """Keep these vectors, and forget the entries of the oldest use that have no room."""
        with self._lock:
            for key, vector in vectors.items():
                if key in self._kept:
                    self._bytes -= _size(self._kept.pop(key))
                # A copy: a row of a batch would keep the whole batch.
                self._kept[key] = vector.copy()
                self._bytes += _size(vector)
            while self._bytes > self._most:
                self._bytes -= _size(self._kept.popitem(last=False)[1])


def _size(vector: Vectors) -> int:
    return _ENTRY + vector.nbytes
