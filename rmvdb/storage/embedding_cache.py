"""Embeddings of the plan's sample, and of records that searches rescored, kept for the backfill."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np

from rmvdb.errors import ArtifactError, HomeUnreachable
from rmvdb.storage import files, parquet
from rmvdb.storage.folders import Folder
from rmvdb.storage.parquet import pa
from rmvdb.types import Id, Vectors

_log = logging.getLogger(__name__)
#: The metadata of a file: the seconds that embedding its records took.
_SECONDS = b"seconds"
#: Embeddings in one file.
_A_FILE = 8192
#: The id of a record, and the digest of its old vector and of its item.
_Key: TypeAlias = tuple[Id, bytes]


class EmbeddingCache:
    """New vectors by id, each valid only while the record's old vector and its item stay the same.

    The old vector alone does not tell: a model that reads the beginning of a text gives the same vector for another text. Many
    threads may use one cache. It reads what other processes wrote, too, each file once. An altered file is ignored, with a
    warning, and its records are embedded again.
    """

    def __init__(self, folder: Folder, *, model: str, dim: int | None = None) -> None:
        """Keep the embeddings of one model, of dimension `dim`."""
        self.folder, self._dim = folder.folder(files.file_name(model)), dim
        self._lock = threading.Lock()
        self._embeddings: dict[_Key, Vectors] | None = None
        #: The names of the files that it has read.
        self._read: set[str] = set()
        #: The records whose seconds are known, and those seconds.
        self._timed, self._seconds = 0, 0.0

    def put(
        self,
        ids: Sequence[Id],
        old: Vectors | Sequence[Vectors],
        items: Sequence[bytes | None],
        new: Vectors | Sequence[Vectors],
        *,
        seconds: float | None = None,
    ) -> None:
        """Keep `new` (n, dim), the embeddings of records with the vectors `old`, of any dimension, and items of these digests.

        Take `item_digest` before you embed. `seconds` is the time that all of them took. Raises DiskFull if there is no space.
        """
        if not len(ids) == len(old) == len(items) == len(new):
            raise ArtifactError(f"{len(ids)} ids, {len(old)} old and {len(new)} new vectors cannot be kept together")
        for start in range(0, len(ids), _A_FILE):
            part = slice(start, start + _A_FILE)
            took = None if seconds is None else seconds * len(ids[part]) / len(ids)
            digests = [parquet.digest(vector, item or b"") for vector, item in zip(old[part], items[part], strict=True)]
            self._put_file(ids[part], digests, new[part], took)

    def get(self, ids: Sequence[Id], old: Iterable[Vectors], items: Sequence[bytes | None]) -> dict[Id, Vectors]:
        """Return the embeddings (dim,) of the ids whose record still has that old vector and an item of that digest."""
        embeddings = self._load()
        keys = [(id, parquet.digest(vector, item)) for id, vector, item in zip(ids, old, items, strict=True) if item is not None]
        return {key[0]: embeddings[key] for key in keys if key in embeddings}

    def knows(self, ids: Iterable[Id]) -> set[Id]:
        """Return which of these ids have an embedding, even if the record or its item has changed since."""
        return {id for id, _ in self._load()}.intersection(ids)

    def some(self, most: int) -> list[Id]:
        """Return at most so many ids that have an embedding, spread over all of them."""
        ids = list(dict.fromkeys(id for id, _ in self._load()))
        return ids[:: max(1, len(ids) // most)][:most]

    @property
    def size(self) -> int:
        """The bytes of its files. Reading that reads none of them."""
        return sum(entry.bytes for entry in self.folder.entries())

    @property
    def per_second(self) -> float | None:
        """Return how many records a second were embedded, over all that are kept; None if that is unknown."""
        self._load()
        return self._timed / self._seconds if self._seconds else None

    def clear(self) -> None:
        """Forget every embedding of this model."""
        with self._lock:
            self.folder.clear()
            self._embeddings, self._timed, self._seconds = None, 0, 0.0
            self._read.clear()

    def _put_file(
        self, ids: Sequence[Id], digests: Sequence[bytes], new: Vectors | Sequence[Vectors], seconds: float | None
    ) -> None:
        of = pa.array(digests, pa.binary(parquet.DIGEST))
        table = pa.table({"id": parquet.id_column(ids), "of": of, "vector": parquet.vector_column(list(new))})
        if seconds is not None:
            table = table.replace_schema_metadata({_SECONDS: str(seconds)})
        data = parquet.write(table)
        digest = files.sha256(data)
        self.folder.write(f"{digest}.parquet", data)
        with self._lock:
            if self._embeddings is not None and digest not in self._read:
                embeddings = dict(self._embeddings)  # another one: a thread may be reading this one
                self._add(embeddings, data)
                self._read.add(digest)
                self._embeddings = embeddings

    def _load(self) -> dict[_Key, Vectors]:
        with self._lock:
            names = dict.fromkeys(entry.path.partition("/")[0] for entry in self.folder.entries())
            digests = [name.removesuffix(".parquet") for name in names if name.endswith(".parquet")]
            new = [digest for digest in digests if digest not in self._read]
            if new or self._embeddings is None:
                embeddings = dict(self._embeddings or {})  # another one: a thread may be reading this one
                for digest in new:
                    self._add_file(embeddings, digest)
                self._read.update(new)  # after all: if the bucket does not answer for one, they are read again
                self._embeddings = embeddings
            return self._embeddings

    def _add_file(self, embeddings: dict[_Key, Vectors], digest: str) -> None:
        path = f"{digest}.parquet"
        try:
            self._add(embeddings, self.folder.verified(path, digest))
        except HomeUnreachable:
            raise
        except Exception as exc:  # noqa: BLE001 (a file of that name may hold anything, and Arrow raises as much)
            where = self.folder.where(path)
            _log.warning("Embeddings are computed again: %s", exc, extra={"action": "cache-skip", "file": where})

    def _add(self, embeddings: dict[_Key, Vectors], data: bytes) -> None:
        table = parquet.read(data)
        if "of" not in table.column_names:  # an old file, without digests of items
            return
        keys = zip(table["id"].to_pylist(), table["of"].to_pylist(), strict=True)
        read = {key: vector for key, vector in zip(keys, parquet.vectors_of(table), strict=True) if vector is not None}
        if not all(map(self._is_embedding, read.values())):
            raise ArtifactError("a file of embeddings holds rows that are not vectors of this model")
        embeddings.update(read)
        if seconds := (table.schema.metadata or {}).get(_SECONDS):
            self._timed, self._seconds = self._timed + len(table), self._seconds + float(seconds)

    def _is_embedding(self, vector: Vectors) -> bool:
        return vector.dtype == np.float32 and self._dim in (None, vector.size) and bool(np.isfinite(vector).all())
