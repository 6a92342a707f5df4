"""The ids of a collection in a backfill order, sorted on disk."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import heapq
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from rmvdb.errors import ArtifactError, DiskFull
from rmvdb.protocols import Order, VectorStore
from rmvdb.types import Id, Record

#: Records that are sorted in memory at once, some 15 MB. A billion records make ten thousand such runs.
RUN = 100_000
#: Runs merged at once, well below the files that a process may hold open.
MOST_OPEN = 256
#: A folder younger than this many seconds may be new, and not locked yet.
YOUNG = 60.0


def batches_in_order(
    store: VectorStore,
    collection: str,
    order: Order,
    *,
    batch: int,
    folder: Path,
    leave_out: Callable[[Sequence[Id]], set[Id]],
    fields: Sequence[str] = (),
    vector: bool = True,
    whole: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[list[Id]]:
    """Yield the ids of a collection in ascending confidence, at most `batch` at a time, without those that `leave_out` names.

    One streaming pass. Memory holds RUN ids at most; the rest is in `folder` until the iterator ends or is closed. The order
    reads `fields` and, with `vector`, vectors. Unless it is to be `whole`, the first batches come after RUN records: of each RUN
    records by themselves.

    Raises DiskFull if the folder has no space, ArtifactError if a file in it was altered.
    """
    try:
        with _own_folder(folder) as work_folder:
            pages = store.scan(collection, vector=vector, fields=fields, ahead=True)
            rows = _rows(pages, order, leave_out, store.count(collection) if progress else 0, progress)
            ids = (id for _, id in (_sorted(rows, work_folder) if whole else _in_runs(rows)))
            while chunk := list(islice(ids, batch)):
                yield chunk
    except OSError as exc:
        if exc.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFull(
                f"No space left in {folder} to sort the records of {collection}; free some, then run it again"
            ) from exc
        raise ArtifactError(
            f"The records of {collection} cannot be sorted in {folder} ({exc.strerror}); fix that, then run it again"
        ) from exc


@contextmanager
def _own_folder(folder: Path) -> Iterator[Path]:
    """Make a folder in this one for the time of the sort. Remove those that killed processes left."""
    for left in folder.glob("order-*"):
        with suppress(OSError), _opened(left) as handle:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # its process holds this lock since it made it
            if time.time() - left.stat().st_mtime > YOUNG:
                shutil.rmtree(left)
    with tempfile.TemporaryDirectory(prefix="order-", dir=folder) as place, _opened(Path(place)) as handle:
        with suppress(OSError):  # without locks on this file system, no other process removes anything either
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield Path(place)


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    handle = os.open(folder, os.O_RDONLY)
    try:
        yield handle
    finally:
        os.close(handle)


#: Confidence and id.
_Row = tuple[float, Id]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Run:
    """A file of sorted rows, one line of JSON each."""

    path: Path
    sha256: str


def _rows(
    pages: Iterator[list[Record]],
    order: Order,
    leave_out: Callable[[Sequence[Id]], set[Id]],
    total: int,
    progress: Callable[[int, int], None] | None,
) -> Iterator[_Row]:
    done = 0
    for page in pages:
        out = leave_out([record.id for record in page])
        left = [record for record in page if record.id not in out]
        if left:
            # NaN cannot be sorted. A record without a confidence goes first.
            confidence = np.nan_to_num(order.confidence(left), nan=-np.inf, posinf=np.inf, neginf=-np.inf)
            yield from zip(confidence.tolist(), (record.id for record in left), strict=True)
        done += len(page)
        if progress:
            progress(done, max(total, done))


def _sorted(rows: Iterator[_Row], folder: Path) -> Iterator[_Row]:
    """Sort runs in memory, write them out and merge them. Equal confidences go by id."""
    runs: list[_Run] = []
    while run := sorted(islice(rows, RUN)):
        if len(run) < RUN and not runs:
            return iter(run)  # everything fits into memory
        runs.append(_written(iter(run), folder / f"{len(runs)}.jsonl"))
    level = 0
    while len(runs) > MOST_OPEN:
        level += 1
        groups = [runs[start : start + MOST_OPEN] for start in range(0, len(runs), MOST_OPEN)]
        runs = [_merged(group, folder / f"{level}-{number}.jsonl") for number, group in enumerate(groups)]
    return heapq.merge(*map(_read, runs))


def _in_runs(rows: Iterator[_Row]) -> Iterator[_Row]:
    while run := sorted(islice(rows, RUN)):
        yield from run


def _merged(runs: list[_Run], path: Path) -> _Run:
    merged = _written(heapq.merge(*map(_read, runs)), path)
    for run in runs:
        run.path.unlink()
    return merged


def _written(rows: Iterator[_Row], path: Path) -> _Run:
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for row in rows:
            line = json.dumps(row).encode() + b"\n"
            digest.update(line)
            file.write(line)
    return _Run(path=path, sha256=digest.hexdigest())


def _read(run: _Run) -> Iterator[_Row]:
    with run.path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != run.sha256:
            raise ArtifactError(f"{run.path} is not as it was written; look at its disk, then run the command again")
        file.seek(0)
        for line in file:
            confidence, id = json.loads(line)
            yield confidence, id
