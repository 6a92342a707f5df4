"""Ids and vectors as Parquet files in memory. Any program that reads Parquet can read them."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet

from rmvdb.errors import ArtifactError
from rmvdb.types import Id, Vectors

# pyarrow has no types, so strict checks would refuse every call.
pa: Any = pyarrow
pq: Any = pyarrow.parquet

#: Bytes of the digest of a vector.
DIGEST = 16


def write(table: Any) -> bytes:
    """Return the table as one file. It is made in memory, because a batch is small and its SHA-256 is part of its name."""
    out = io.BytesIO()
    # Splitting floats into their bytes puts the exponents together, which zstd compresses well.
    split = ["vector.list.element"]
    pq.write_table(table, out, compression="zstd", use_dictionary=False, use_byte_stream_split=split)
    return out.getvalue()


def id_column(ids: Sequence[Id]) -> Any:
    """Return a column of ids. Raise ArtifactError if they are neither all INT64 nor all VARCHAR."""
    if all(isinstance(id, str) for id in ids):
        return pa.array(ids, pa.string())
    try:
        return pa.array(ids, pa.int64())
    except (pa.ArrowInvalid, pa.ArrowTypeError, TypeError, OverflowError) as exc:
        raise ArtifactError(f"Ids {list(ids[:3])!r} … cannot be kept: they are neither all INT64 nor all VARCHAR") from exc


def vector_column(vectors: Sequence[Vectors | None]) -> Any:
    """Return a column of lists of one length, with null for a record without its vector."""
    known = [np.asarray(vector, dtype=np.float32) for vector in vectors if vector is not None]
    shapes = {vector.shape for vector in known}
    if len(shapes) > 1 or any(len(shape) != 1 for shape in shapes):
        raise ArtifactError(f"Vectors of shapes {sorted(shapes)} cannot be kept together; a collection has one dimension")
    present = np.array([vector is not None for vector in vectors], dtype=np.int64)
    dim = known[0].size if known else 0
    offsets = np.concatenate([[0], np.cumsum(present * dim)])
    values = pa.array(np.concatenate(known) if known else np.empty(0, np.float32), pa.float32())
    kind = pa.list_(pa.field("element", pa.float32()))
    missing = pa.array(present == 0)
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), values, mask=missing).cast(kind)


def vectors_of(table: Any) -> list[Vectors | None]:
    """Return the vectors (dim,) of the column `vector`."""
    column = table["vector"].combine_chunks()
    values = column.values.to_numpy(zero_copy_only=False)
    offsets = column.offsets.to_numpy()
    # Each is a copy: a slice would keep the whole batch in memory as long as one record lives.
    return [
        values[start:end].copy() if valid else None
        for start, end, valid in zip(offsets[:-1], offsets[1:], column.is_valid().to_pylist(), strict=True)
    ]


def read(data: bytes, *, columns: list[str] | None = None) -> Any:
    """Return the table of a file."""
    # Arrow starts no thread here: one that is still at work when the process ends aborts it (arrow issue 34314).
    return pq.ParquetFile(pa.BufferReader(data)).read(columns=columns, use_threads=False)


def digest(vector: Vectors, item: bytes = b"") -> bytes:
    """Return the digest of a vector, and of an item's digest."""
    return hashlib.blake2b(np.asarray(vector, dtype=np.float32).tobytes() + item, digest_size=DIGEST).digest()
