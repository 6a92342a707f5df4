"""Old vectors kept as Parquet until clean-up, for rolling back.

A file holds one batch: a column of ids, one of float32 vectors, bit for bit, one with each record's scalar fields as JSON,
because dynamic fields have no common type, and one with the digest of the vector that the batch made from it. The file's name
ends in its SHA-256, so that rmvdb can check it without the registry.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any, TypeVar

import numpy as np

from rmvdb.errors import ArtifactError, HomeUnreachable
from rmvdb.storage import files, parquet
from rmvdb.storage.folders import Entry, Folder, parent
from rmvdb.storage.parquet import pa
from rmvdb.types import Id, Record

_log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class ArchiveFile:
    """One file of the archive, as the registry keeps it."""

    #: Relative to the archive's folder, with forward slashes.
    path: str
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """A record as a batch read it from the old collection, and what the batch made from it."""

    record: Record
    #: Digest of the vector for the new collection; None if the batch could not make one.
    made: bytes | None

    def is_copied_to(self, record: Record) -> bool:
        """Tell whether the batch wrote this record, bit by bit, and no one has written it since."""
        return self._made(record) and same_fields(record.fields, self.record.fields)

    def put_back_for(self, record: Record) -> Record:
        """Return the record to put back for this one: as the batch read it, but with fields that were written since.

        The batch's own copy counts as unwritten, even if the engine returns a text in it as the number that it looks like.
        """
        copy = self._made(record) and same_fields(_texts_kept(record.fields, self.record.fields), self.record.fields)
        return self.record if copy else replace(self.record, fields=record.fields)

    def has_another_vector(self, record: Record) -> bool:
        """Tell whether this record has another vector than the batch made for it: it was written since."""
        return record.vector is not None and self.made is not None and not self._made(record)

    def _made(self, record: Record) -> bool:
        return record.vector is not None and self.made == parquet.digest(record.vector)


def same_fields(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Tell whether fields are equal, or equal as JSON, so that NaN equals NaN."""
    return dict(one) == dict(other) or json.dumps(dict(one), sort_keys=True) == json.dumps(dict(other), sort_keys=True)


def _is_away(exc: ArtifactError) -> bool:
    """Tell whether this machine cannot reach a file or may not read it, so that it may be whole."""
    return isinstance(exc, HomeUnreachable) or not isinstance(exc.__cause__, FileNotFoundError | None)


def _texts_kept(fields: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields, with the former text in place of a value that it looks like: Milvus Lite returns the text `"123"` of a
    JSON field as 123.
    """
    return {name: before[name] if _looks_like(before.get(name), value) else value for name, value in fields.items()}


def _looks_like(text: Any, value: Any) -> bool:
    if not isinstance(text, str) or isinstance(value, str):
        return False
    try:
        return bool(json.loads(text) == value)
    except (ValueError, RecursionError):
        return False


class Archive:
    """A folder of batches of old records. A file never changes."""

    def __init__(self, folder: Folder) -> None:
        self.folder = folder

    def write(self, *name: str, records: Sequence[Record], made: Sequence[Record] = ()) -> ArchiveFile:
        """Keep these records in a new file under that name: folders first, such as gallery, upgrade, batch.

        `made` are the records for the new collection; their vectors' digests are kept. A call with other records never overwrites
        the file: they get another one.

        Raises: DiskFull, with nothing left behind; ArtifactError for a field value that cannot be kept.
        """
        digests = {record.id: parquet.digest(record.vector) for record in made if record.vector is not None}
        data = parquet.write(_table(records, digests))
        digest = files.sha256(data)
        *folders, last = (files.file_name(part) for part in name)
        path = "/".join([*folders, f"{last}-{digest}.parquet"])
        self.folder.write(path, data)
        return ArchiveFile(path=path, sha256=digest)

    def readings(self, file: ArchiveFile) -> list[Reading]:
        """Return the records with their digests. Raise ArtifactError if the file is missing or altered."""
        table = self._open(file)
        ids, fields, made = (table[name].to_pylist() for name in ("id", "fields", "made"))
        return [
            Reading(record=Record(id=id, vector=vector, fields=json.loads(text)), made=digest)
            for id, vector, text, digest in zip(ids, parquet.vectors_of(table), fields, made, strict=True)
        ]

    def found(self, file: ArchiveFile, *, left_out: Callable[[str], None] = lambda _: None) -> list[Reading]:
        """Return `readings`; or none, and tell `left_out`, if this one file is missing or altered, which may be for good."""
        return self._whole(self.readings, file, left_out) or []

    def found_ids(self, file: ArchiveFile, *, left_out: Callable[[str], None]) -> list[Id] | None:
        """Return `ids`; or None, and tell `left_out`, as `found` does."""
        return self._whole(self.ids, file, left_out)

    def _whole(
        self, read: Callable[[ArchiveFile], list[T]], file: ArchiveFile, left_out: Callable[[str], None]
    ) -> list[T] | None:
        try:
            return read(file)
        except ArtifactError as exc:
            # If even its folder is missing, another archive may be mounted, or none.
            if _is_away(exc) or not self.folder.has(parent(file.path)):
                raise  # the archive is away, or this process may not read it; that can be repaired, and nothing is lost
            _log.warning("Left out: %s", exc, extra={"action": "archive-skip", "file": file.path})
            left_out(str(exc))
            return None

    def leave(self, *name: str, ids: Sequence[Id]) -> None:
        """Note that these records are about to leave their collection; the name begins with a batch's number.

        Whatever the registry forgets, `left` knows them until clean-up. Raises DiskFull if there is no space.
        """
        if not ids:
            return
        data = parquet.write(pa.table({"id": parquet.id_column(ids)}))
        *folders, last = (files.file_name(part) for part in name)
        self.folder.write("/".join([*folders, f"{last}-{files.sha256(data)}.left"]), data)

    def left(self, *folders: str) -> dict[Id, int]:
        """Return the ids that `leave` noted under these folders, each with the last batch that noted it. Skip damaged notes."""
        noted = dict[Id, int]()
        for entry in self._entries(folders, ".left"):
            batch = int(entry.name.partition("-")[0])
            try:
                data = self.folder.verified(entry.path, _digest_in(entry))
            except ArtifactError as exc:
                if _is_away(exc):
                    raise
                _log.warning("Left out: %s", exc, extra={"action": "archive-skip", "file": entry.path})
                continue
            noted |= {id: max(batch, noted.get(id, batch)) for id in parquet.read(data)["id"].to_pylist()}
        return noted

    def files(self, *folders: str, begins: str = "") -> list[ArchiveFile]:
        """List the files under these folders, such as gallery, upgrade, whose names begin so, the newest first, without opening
        them."""
        found = self._entries(folders, ".parquet", begins=begins)
        return [ArchiveFile(path=entry.path, sha256=_digest_in(entry)) for entry in sorted(found, key=_age, reverse=True)]

    def last_upgrade(self, gallery: str) -> int:
        """Return the largest number of an upgrade of this gallery that has files here. 0 without any."""
        folders = (PurePosixPath(entry.path).parts[1] for entry in self.folder.entries(files.file_name(gallery)))
        return max((int(name) for name in folders if name.isdecimal()), default=0)

    def ids(self, file: ArchiveFile) -> list[Id]:
        """Return the ids of its records, in order. Raise ArtifactError if the file is missing or altered."""
        ids: list[Id] = self._open(file, columns=["id"])["id"].to_pylist()
        return ids

    def clear(self, folder: str, *more: str) -> None:
        """Remove every file under these folders, such as gallery, upgrade. Do nothing if there is none."""
        self.folder.clear("/".join(map(files.file_name, (folder, *more))))

    def _entries(self, folders: Sequence[str], suffix: str, *, begins: str = "") -> Iterator[Entry]:
        """Yield the files below these folders whose names begin and end so, whole ones only."""
        below = self.folder.entries("/".join(map(files.file_name, folders)), begins=begins)
        return (entry for entry in below if entry.name.endswith(suffix) and not entry.name.startswith("."))

    def _open(self, file: ArchiveFile, *, columns: list[str] | None = None) -> Any:
        data = self.folder.verified(file.path, file.sha256)
        return parquet.read(data, columns=columns)


def _digest_in(entry: Entry) -> str:
    return PurePosixPath(entry.path).stem.rpartition("-")[2]


def _age(entry: Entry) -> tuple[float, int, str]:
    """Return what to sort files by, the oldest first. A bucket knows only the second, but later batches have higher numbers."""
    number = entry.name.partition("-")[0]
    return entry.written, int(number) if number.isdigit() else 0, entry.name


def _table(records: Sequence[Record], made: Mapping[Id, bytes]) -> Any:
    return pa.table(
        {
            "id": parquet.id_column([record.id for record in records]),
            "vector": parquet.vector_column([record.vector for record in records]),
            "fields": pa.array([_encoded(record) for record in records], pa.string()),
            "made": pa.array([made.get(record.id) for record in records], pa.binary(parquet.DIGEST)),
        }
    )


def _encoded(record: Record) -> str:
    try:
        # Python's JSON writes NaN and Infinity and reads them back. A float's shortest text is exactly that float.
        return json.dumps(_plain(record.fields))
    except (TypeError, ValueError) as exc:
        raise ArtifactError(f"The fields of record {record.id!r} cannot be kept: {exc}") from exc


def _plain(value: Any) -> Any:
    """Return the value in JSON's own types. Engines return numpy scalars and list-like containers of their own."""
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, (np.generic, np.ndarray)):
        return _plain(value.tolist())
    if isinstance(value, Mapping):
        return {_key(key): _plain(part) for key, part in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, (bytes, bytearray, memoryview)):
        return [_plain(part) for part in value]
    raise TypeError(f"a value of type {type(value).__name__} is not a number, text, list or JSON")


def _key(key: object) -> str:
    if not isinstance(key, str):
        raise TypeError(f"{key!r} is a key of a JSON object and not a text")
    return key
