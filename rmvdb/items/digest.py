"""Digests that tell one item from another."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from rmvdb.items.pictures import decodable
from rmvdb.types import Item

#: Bytes of an item's digest.
DIGEST = 16


def item_digest(item: Item) -> bytes | None:
    """Return the digest of a file's name, size and time, or of the item's content; None if the content cannot be told."""
    try:
        return hashlib.blake2b(_content(item), digest_size=DIGEST).digest()
    except Exception:  # noqa: BLE001 (a broken picture raises nearly anything; the embedder gives the reason)
        return None


def _content(item: Any) -> bytes:
    from PIL import Image  # here, so that commands that embed nothing do not wait for it

    if isinstance(item, Path):
        file = item.stat()
        return f"{item} {file.st_size} {file.st_mtime_ns}".encode()
    if isinstance(item, bytes | bytearray):
        return b"bytes " + item
    if isinstance(item, np.ndarray) and item.dtype != np.dtype(object):
        return f"{item.dtype} {item.shape} ".encode() + item.tobytes()
    if isinstance(item, Image.Image):
        decodable(item)
        return f"{item.mode} {item.size} {item.getpalette()} ".encode() + item.tobytes()

    def part(one: Any) -> str:
        if not isinstance(one, Path | bytes | bytearray | np.ndarray | Image.Image):
            raise TypeError(type(one).__name__)
        return hashlib.blake2b(_content(one), digest_size=DIGEST).hexdigest()

    return json.dumps(item, sort_keys=True, default=part).encode()
