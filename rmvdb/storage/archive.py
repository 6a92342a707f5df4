"""Old vectors kept as Parquet until clean-up, for rolling back; and embeddings kept from the plan's sample.

A file holds one batch: a column of ids, one of float32 vectors, bit for bit, one with each record's scalar fields as JSON,
because dynamic fields have no common type, and one with the digest of the vector that the batch made of it. Any program that
reads Parquet can read it; its name ends in its SHA-256, so that it can be believed without the registry.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow
import pyarrow.parquet

from rmvdb.errors import ArtifactError
from rmvdb.storage import files
from rmvdb.types import Id, Record, Vectors

# pyarrow comes without types: checked strictly, every call would be refused.
pa: Any = pyarrow
pq: Any = pyarrow.parquet

_log = logging.getLogger(__name__)
#: Bytes of the digest of a vector.
_DIGEST = 16
#: In a file of embeddings: what making them took.
_SECONDS = b"seconds"
#: Embeddings in one file of the cache.
_A_FILE = 8192
#: Where an embedding is: the id, and the digest of the old vector and of the item that its record had.
_Key: TypeAlias = tuple[Id, bytes]


@dataclass(frozen=True, kw_only=True, slots=True)
class ArchiveFile:
    """One file of the archive, as the registry remembers it."""

    #: Relative to the archive's folder, with forward slashes.
    path: str
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """A record as a batch read it in the old collection, and what the batch made of it."""

    record: Record
    #: Digest of the vector for the new collection; None where none could be made.
    made: bytes | None

    def is_copied_to(self, record: Record) -> bool:
        """Whether this is what the batch wrote, bit by bit, and not what somebody wrote there since."""
        return self._made(record) and same_fields(record.fields, self.record.fields)

    def put_back_for(self, record: Record) -> Record:
        """This record in the place of what the batch made of it: as it was read, but for fields that were written since."""
        return self.record if self._made(record) else replace(self.record, fields=record.fields)

    def _made(self, record: Record) -> bool:
        return record.vector is not None and self.made == _digest(record.vector)


def same_fields(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether fields agree: where they are not equal, as JSON writes them, so that a number that is none (NaN) is itself."""
    return dict(one) == dict(other) or json.dumps(dict(one), sort_keys=True) == json.dumps(dict(other), sort_keys=True)


class Archive:
    """A folder of batches of old records; a file is never changed once it is there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, *name: str, records: Sequence[Record], made: Sequence[Record] = ()) -> ArchiveFile:
        """Keep these records in a new file under that name: folders first, such as gallery, upgrade, batch.

        Of what was `made` of them for the new collection the digest is kept.

        A repeated call never overwrites another's file: what differs gets another file. Raises DiskFull, with nothing left
        behind, and ArtifactError for a field value that cannot be kept.
        """
        digests = {record.id: _digest(record.vector) for record in made if record.vector is not None}
        data = _parquet(_table(records, digests))
        digest = files.sha256(data)
        *folders, last = (files.file_name(part) for part in name)
        path = "/".join([*folders, f"{last}-{digest}.parquet"])
        files.durable_write(self.folder / path, data)
        return ArchiveFile(path=path, sha256=digest)

    def read(self, file: ArchiveFile) -> list[Record]:
        """The records as they were written; raises ArtifactError where the file is missing or altered."""
        return [reading.record for reading in self.readings(file)]

    def readings(self, file: ArchiveFile) -> list[Reading]:
        """The records with what was made of them; raises ArtifactError where the file is missing or altered."""
        table = self._open(file)
        ids, fields, made = (table[name].to_pylist() for name in ("id", "fields", "made"))
        return [
            Reading(record=Record(id=id, vector=vector, fields=json.loads(text)), made=digest)
            for id, vector, text, digest in zip(ids, _column_vectors(table), fields, made, strict=True)
        ]

    def found(self, file: ArchiveFile, *, left_out: Callable[[str], None] = lambda _: None) -> list[Reading]:
        """As `readings`; none, and `left_out` is told, where this one file is missing or altered, which may be for good."""
        try:
            return self.readings(file)
        except ArtifactError as exc:
            # Where not even its folder is there, another archive, or none, may be mounted.
            if not files.inside(self.folder, file.path).parent.is_dir() or not isinstance(
                exc.__cause__, FileNotFoundError | None
            ):
                raise  # the archive is away, or closed to this process: that can be mended, and nothing is lost
            _log.warning("Left out: %s", exc, extra={"action": "archive-skip", "file": file.path})
            left_out(str(exc))
            return []

    def leave(self, *name: str, ids: Sequence[Id]) -> None:
        """Note that these records are about to leave their collection; the name begins with a batch's number.

        Whatever the registry forgets, `left` knows it until clean-up. Raises DiskFull.
        """
        if not ids:
            return
        data = _parquet(pa.table({"id": _id_column(ids)}))
        *folders, last = (files.file_name(part) for part in name)
        files.durable_write(self.folder.joinpath(*folders, f"{last}-{files.sha256(data)}.left"), data)

    def left(self, *folders: str) -> dict[Id, int]:
        """The ids that `leave` noted under these folders, with the last batch that it noted each for; a damaged note tells
        nothing."""
        place, noted = self.folder.joinpath(*map(files.file_name, folders)), dict[Id, int]()
        for path in place.glob("*.left"):
            batch = int(path.name.partition("-")[0])
            try:
                data = files.verified_read(path, path.stem.rpartition("-")[2])
            except ArtifactError as exc:
                _log.warning("Left out: %s", exc, extra={"action": "archive-skip", "file": str(path)})
                continue
            noted |= {id: max(batch, noted.get(id, batch)) for id in _parsed(data)["id"].to_pylist()}
        return noted

    def files(self, *folders: str, begins: str = "") -> list[ArchiveFile]:
        """The files under these folders, such as gallery, upgrade, whose names begin so, the last one written first; none of them
        is looked into."""
        place = self.folder.joinpath(*map(files.file_name, folders))
        paths = sorted(place.rglob(f"{begins}*.parquet"), key=lambda path: (path.stat().st_mtime_ns, path.name), reverse=True)
        return [ArchiveFile(path=path.relative_to(self.folder).as_posix(), sha256=path.stem.rpartition("-")[2]) for path in paths]

    def ids(self, file: ArchiveFile) -> list[Id]:
        """The ids of its records, in order; raises ArtifactError where the file is missing or altered."""
        ids: list[Id] = self._open(file, columns=["id"])["id"].to_pylist()
        return ids

    def remove(self, file: ArchiveFile) -> None:
        """Remove one file; does nothing where it is gone already."""
        files.remove(files.inside(self.folder, file.path))

    def clear(self, folder: str, *more: str) -> None:
        """Remove every file under these folders, such as gallery, upgrade; does nothing where there is none."""
        files.remove(self.folder.joinpath(*map(files.file_name, (folder, *more))))

    def _open(self, file: ArchiveFile, *, columns: list[str] | None = None) -> Any:
        data = files.verified_read(files.inside(self.folder, file.path), file.sha256)
        return _parsed(data, columns=columns)


class EmbeddingCache:
    """New vectors by id, each good only as long as the record's old vector and its item are what they were: a model that reads
    the beginning of a text gives the same vector for another text.

    Many threads may use one; what another process adds is seen by those that open the cache later. An altered file counts
    as not there, with a warning: the records are embedded again.
    """

    def __init__(self, folder: Path, *, model: str, dim: int | None = None) -> None:
        """Keep the embeddings of one model; `model` names it, `dim` is their dimension."""
        self.folder, self._dim = folder / files.file_name(model), dim
        self._lock = threading.Lock()
        self._found: dict[_Key, Vectors] | None = None
        #: Of what was found: the records whose seconds are known, and these.
        self._timed, self._seconds = 0, 0.0

    def put(
        self,
        ids: Sequence[Id],
        old: Vectors | Sequence[Vectors],
        told: Sequence[bytes | None],
        new: Vectors,
        *,
        seconds: float | None = None,
    ) -> None:
        """Keep `new` (n, dim), the embeddings of records whose old vectors are `old`, of any dimension, and whose items are those
        that `told` tells (`item_digest`, from before they were embedded). Raises DiskFull.

        `seconds` is what all of them took.
        """
        if not len(ids) == len(old) == len(told) == len(new):
            raise ArtifactError(f"{len(ids)} ids, {len(old)} old and {len(new)} new vectors cannot be kept together")
        for start in range(0, len(ids), _A_FILE):
            part = slice(start, start + _A_FILE)
            took = None if seconds is None else seconds * len(ids[part]) / len(ids)
            digests = [_digest(vector, item or b"") for vector, item in zip(old[part], told[part], strict=True)]
            self._put_file(ids[part], digests, new[part], took)

    def get(self, ids: Sequence[Id], old: Iterable[Vectors], told: Sequence[bytes | None]) -> dict[Id, Vectors]:
        """The embeddings (dim,) of those ids whose record still has that old vector and the item of that digest."""
        found = self._load()
        keys = [(id, _digest(vector, item)) for id, vector, item in zip(ids, old, told, strict=True) if item is not None]
        return {key[0]: found[key] for key in keys if key in found}

    def knows(self, ids: Iterable[Id]) -> set[Id]:
        """Those of these ids that have an embedding, whatever became of the record and its item since."""
        return {id for id, _ in self._load()}.intersection(ids)

    def some(self, most: int) -> list[Id]:
        """Ids of records that have an embedding, at most so many, from all over."""
        ids = list(dict.fromkeys(id for id, _ in self._load()))
        return ids[:: max(1, len(ids) // most)][:most]

    @property
    def per_second(self) -> float | None:
        """How many records a second were embedded, over all that are kept; None where that is not known."""
        self._load()
        return self._timed / self._seconds if self._seconds else None

    def clear(self) -> None:
        """Forget every embedding of this model."""
        with self._lock:
            files.remove(self.folder)
            self._found, self._timed, self._seconds = None, 0, 0.0

    def _put_file(self, ids: Sequence[Id], digests: Sequence[bytes], new: Vectors, seconds: float | None) -> None:
        of = pa.array(digests, pa.binary(_DIGEST))
        table = pa.table({"id": _id_column(ids), "of": of, "vector": _vector_column(list(new))})
        if seconds is not None:
            table = table.replace_schema_metadata({_SECONDS: str(seconds)})
        data = _parquet(table)
        files.durable_write(self.folder / f"{files.sha256(data)}.parquet", data)
        with self._lock:
            if self._found is not None:
                self._add(self._found, data)

    def _load(self) -> dict[_Key, Vectors]:
        with self._lock:
            if self._found is None:
                found: dict[_Key, Vectors] = {}
                for path in sorted(self.folder.glob("*.parquet")):
                    try:
                        self._add(found, files.verified_read(path, path.stem))
                    except Exception as exc:  # noqa: BLE001 (a file of that name may hold anything, and Arrow raises as much)
                        log = {"action": "cache-skip", "file": str(path)}
                        _log.warning("Embeddings are computed again: %s", exc, extra=log)
                self._found = found
            return self._found

    def _add(self, found: dict[_Key, Vectors], data: bytes) -> None:
        table = _parsed(data)
        if "of" not in table.column_names:  # of a time when no item was told
            return
        keys = zip(table["id"].to_pylist(), table["of"].to_pylist(), strict=True)
        kept = {key: vector for key, vector in zip(keys, _column_vectors(table), strict=True) if vector is not None}
        if not all(map(self._is_embedding, kept.values())):
            raise ArtifactError("a file of embeddings holds what is no vector of this model")
        found.update(kept)
        if seconds := (table.schema.metadata or {}).get(_SECONDS):
            self._timed, self._seconds = self._timed + len(table), self._seconds + float(seconds)

    def _is_embedding(self, vector: Vectors) -> bool:
        return vector.dtype == np.float32 and self._dim in (None, vector.size) and bool(np.isfinite(vector).all())


def _parsed(data: bytes, *, columns: list[str] | None = None) -> Any:
    # No thread of Arrow's is ever started: one that is still at work when the process ends aborts it (arrow issue 34314).
    return pq.ParquetFile(pa.BufferReader(data)).read(columns=columns, use_threads=False)


def _digest(vector: Vectors, item: bytes = b"") -> bytes:
    return hashlib.blake2b(np.asarray(vector, dtype=np.float32).tobytes() + item, digest_size=_DIGEST).digest()


def _table(records: Sequence[Record], made: Mapping[Id, bytes]) -> Any:
    return pa.table(
        {
            "id": _id_column([record.id for record in records]),
            "vector": _vector_column([record.vector for record in records]),
            "fields": pa.array([_encoded(record) for record in records], pa.string()),
            "made": pa.array([made.get(record.id) for record in records], pa.binary(_DIGEST)),
        }
    )


def _parquet(table: Any) -> bytes:
    """The table as one file; in memory, because a batch is small and its SHA-256 is needed before it has a name."""
    out = io.BytesIO()
    # Splitting floats into their bytes lets zstd see the exponents together.
    split = ["vector.list.element"]
    pq.write_table(table, out, compression="zstd", use_dictionary=False, use_byte_stream_split=split)
    return out.getvalue()


def _id_column(ids: Sequence[Id]) -> Any:
    if all(isinstance(id, str) for id in ids):
        return pa.array(ids, pa.string())
    try:
        return pa.array(ids, pa.int64())
    except (pa.ArrowInvalid, pa.ArrowTypeError, TypeError, OverflowError) as exc:
        raise ArtifactError(f"Ids {list(ids[:3])!r} … cannot be kept: they are neither all INT64 nor all VARCHAR") from exc


def _vector_column(vectors: Sequence[Vectors | None]) -> Any:
    """A column of lists of one length, with null where a record came without its vector."""
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


def _column_vectors(table: Any) -> list[Vectors | None]:
    column = table["vector"].combine_chunks()
    values = column.values.to_numpy(zero_copy_only=False)
    offsets = column.offsets.to_numpy()
    # A copy each: a slice would keep the whole batch in memory as long as one record lives.
    return [
        values[start:end].copy() if valid else None
        for start, end, valid in zip(offsets[:-1], offsets[1:], column.is_valid().to_pylist(), strict=True)
    ]


def _encoded(record: Record) -> str:
    try:
        # Python's JSON writes NaN and Infinity and reads them back; a float's shortest text is exactly that float.
        return json.dumps(_plain(record.fields))
    except (TypeError, ValueError) as exc:
        raise ArtifactError(f"The fields of record {record.id!r} cannot be kept: {exc}") from exc


def _plain(value: Any) -> Any:
    """The value in JSON's own types; engines hand out numpy scalars and list-like containers of their own."""
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, (np.generic, np.ndarray)):
        return _plain(value.tolist())
    if isinstance(value, Mapping):
        return {_key(key): _plain(part) for key, part in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, (bytes, bytearray, memoryview)):
        return [_plain(part) for part in value]
    raise TypeError(f"a value of type {type(value).__name__} is no number, text, list or JSON")


def _key(key: object) -> str:
    if not isinstance(key, str):
        raise TypeError(f"{key!r} is a key of a JSON object and no text")
    return key
