"""The mark: a small collection of rmvdb's own beside each collection that says which registry owns it.

Every engine refuses to create a collection if one with that name and other fields exists. The owner is part of the name of a
field of the mark, so creating the mark is the comparison: if two registries take a collection at once, the engine refuses one.
This holds for Lite 2.5, Lite 3 and every server. Properties of collections would not do: Lite 2.5 has none.

The ids of a mark's records are numbers of the gallery's trace, which only rises. The registry gives each number once, in a
transaction that changes something. rmvdb writes it here before any record leaves a collection because of that change. So:

- If a mark is behind its registry, a process died between the two steps. The next process raises the trace and writes again.
- If a mark is ahead of its registry, or holds a number that the registry gives only now, the registry has gone back by at least
  one batch or epoch. Nothing was removed by that older state, because the comparison comes first.
- A mark never goes back. Records are only added, and pruning leaves the largest.

The mark cannot show that a registry went back by less than one number (a batch that was copied and has removed nothing, a
client's intent). Then no record had left the old collection because of the lost changes.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import functools
import hashlib
import json
import logging
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rmvdb import errors
from rmvdb.protocols import VectorStore
from rmvdb.registry.owners import Trace
from rmvdb.registry.registry import Registry
from rmvdb.timing import uptime
from rmvdb.types import MARK_PREFIX, Field, IdType, Index, Metric, Record, Schema

log = logging.getLogger(__name__)

#: The prefix of the field name that holds the owner.
FIELD = "owner_"
#: The most characters of a name in Milvus.
LONGEST_NAME = 255
#: Numbers that a mark keeps: some more than batches are in work at once.
NUMBERS = 128
#: Seconds between two comparisons of a process that runs for long.
COMPARE_EVERY = 60.0
#: Seconds that another registry, which took a collection a moment ago, has to write where it is.
INTRODUCED = 20.0
#: The step by which a registry that replaces another raises the trace: more numbers than the other may have left unwritten.
BEYOND = 1_000_000
#: The command that each message of a mismatch names.
TAKE = "rmvdb gallery take {gallery} --from-lost-registry"


def mark_of(collection: str) -> str:
    """Return the name of a collection's mark."""
    name = MARK_PREFIX + collection
    if len(name) <= LONGEST_NAME:
        return name
    return f"{name[: LONGEST_NAME - 17]}_{hashlib.sha256(name.encode()).hexdigest()[:16]}"


def is_mark(collection: str) -> bool:
    """Return whether that collection is a mark, not a collection of records."""
    return collection.startswith(MARK_PREFIX)


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """The mark beside a collection."""

    collection: str
    #: The identity of the registry that owns it.
    owner: str
    numbers: frozenset[int]
    #: The last record: gallery, epoch, registry, host, at.
    said: Mapping[str, Any] = field(default_factory=dict)

    @property
    def number(self) -> int:
        """The largest number, -1 for a mark that is only half made."""
        return max(self.numbers, default=-1)

    @property
    def epoch(self) -> int:
        """The epoch of the last record."""
        return int(self.said.get("epoch", 0))

    @property
    def where(self) -> str:
        """Who wrote last, as a phrase."""
        if not self.said:
            return f"number {self.owner[:8]}…, which has not written where it is"
        at = dt.datetime.fromtimestamp(float(self.said["at"]), tz=dt.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        return f"{self.said['registry']}, last written by host {self.said['host']} at {at}"


class Owner:
    """The marks of this registry's galleries in one engine."""

    def __init__(self, registry: Registry, store: VectorStore) -> None:
        self._registry, self._store = registry, store
        self._compared: dict[str, float] = {}

    @functools.cached_property
    def _mine(self) -> str:
        return self._registry.identity()

    def take(self, gallery: str, collection: str, *, epoch: int = 1) -> None:
        """Mark a collection as this registry's. Complete a mark that is half made.

        Raises:
            NotOwner: another registry owns it.
        """
        try:
            self._store.create(_shape(collection, self._mine), Index(type="FLAT"))
        except errors.AlreadyExists:
            if (mark := self._introduced(collection)) is not None and mark.owner != self._mine:
                raise self._theirs(mark, gallery) from None
            raise
        if (mark := self.read(collection)) is None or mark.number < 0:
            self._write(collection, 0, gallery=gallery, epoch=epoch)

    def expect(self, gallery: str) -> None:
        """Compare the marks of the gallery's collections with the registry. Change nothing.

        A gallery without a mark, as an older rmvdb leaves it, passes.

        Raises:
            NotOwner: another registry owns one of the collections, or this registry has gone back.
        """
        trace = self._registry.trace(gallery)
        _refuse_trouble(trace)
        for collection in self._collections(gallery):
            if self._differs(collection, trace.number):
                self._expect(gallery, {collection: self.read(collection)})  # or the trace has risen since

    def expect_since(self, gallery: str, collections: Iterable[str], number: int) -> None:
        """Call `expect` if a mark differs from the trace's last known number: only then is the registry asked."""
        if any(self._differs(collection, number) for collection in collections):
            self.expect(gallery)  # the trace may have risen since

    def settle(self, gallery: str) -> None:
        """Compare as `expect` does. Then write missing marks, and bring up to date those that a process left when it died."""
        self._compared[gallery] = uptime()
        marks = self._marks(gallery)
        trace = self._expect(gallery, marks)
        for collection, mark in marks.items():
            if mark is None or mark.number < 0:
                self.take(gallery, collection, epoch=trace.epoch)
        if any(mark is None or mark.number < trace.number for mark in marks.values()):
            number = self._registry.raise_trace(gallery)  # a new number: one that another process may write would clash
            for collection in marks:
                self._add(collection, number, gallery=gallery, epoch=trace.epoch)
        for mark in filter(None, marks.values()):
            self._prune(mark)

    def settle_now_and_then(self, gallery: str) -> None:
        """Call `settle` at most once a minute."""
        if uptime() - self._compared.get(gallery, float("-inf")) > COMPARE_EVERY:
            self.settle(gallery)

    def note(self, gallery: str, number: int) -> None:
        """Write a number that the registry has just given, before any record is removed because of that change.

        Raises:
            NotOwner: the registry has gone back: the mark holds this number already, or a larger one that it does not know.
        """
        trace = self._registry.trace(gallery)
        _refuse_trouble(trace)
        self._add(trace.oldest, number, gallery=gallery, epoch=trace.epoch)
        if number % NUMBERS == 0:
            self._store.delete(mark_of(trace.oldest), list(range(max(number - 2 * NUMBERS, 0), number - NUMBERS)))

    def owns(self, gallery: str, mark: Mark) -> bool:
        """Return whether this registry wrote the mark, for this gallery. A mark that is half made names no gallery yet."""
        return mark.owner == self._mine and mark.said.get("gallery", gallery) == gallery

    def release(self, collection: str) -> None:
        """Drop the mark if it is this registry's."""
        if self._owner(collection) == self._mine:
            self._store.drop(mark_of(collection))

    def named(self, gallery: str) -> list[str]:
        """Return the collections in the engine that another registry marked as this gallery's."""
        return [mark.collection for mark in self._marks_of(gallery) if mark.owner != self._mine]

    def marked(self, gallery: str) -> list[str]:
        """Return the collections in the engine that any registry marked as this gallery's."""
        return [mark.collection for mark in self._marks_of(gallery)]

    def take_over(self, gallery: str, collections: Iterable[str], wait: Callable[[], None]) -> tuple[int, int]:
        """Replace the marks of a lost registry by marks of this one. Return the largest number and epoch of the lost one's marks.

        `wait` returns once no lease or write of the other can be alive.

        Raises:
            UsageError: the other registry has written meanwhile.
        """
        before = self.refuse_at_work(collections, wait)
        for name, mark in before.items():
            if mark is not None and mark.owner != self._mine:
                self._store.drop(mark_of(name))
            self.take(gallery, name)
        marks = [mark for mark in before.values() if mark is not None]
        return max((mark.number for mark in marks), default=0), max((mark.epoch for mark in marks), default=0)

    def refuse_at_work(self, collections: Iterable[str], wait: Callable[[], None]) -> dict[str, Mark | None]:
        """Raise UsageError if another process writes these marks during the `wait`. Return the marks as they were before."""
        before = {name: self.read(name) for name in collections}
        wait()
        for name, mark in before.items():
            if mark is not None and (now := self.read(name)) is not None and now.numbers != mark.numbers:
                raise errors.UsageError(
                    f"That registry is not lost: it wrote while this one waited ({now.where}); use that registry"
                )
        return before

    # --- reading ------------------------------------------------------------------------------------------------------

    def read(self, collection: str) -> Mark | None:
        """Return the mark of a collection, or None."""
        if (owner := self._owner(collection)) is None:
            return None
        try:
            records = self._records(collection)
        except errors.EngineUnavailable:
            raise
        except errors.EngineError:  # half made, or not loaded
            self._store.create(_shape(collection, owner), Index(type="FLAT"))
            records = self._records(collection)
        newest = max(records, key=lambda record: record.id, default=None)
        said = json.loads(newest.fields[FIELD + owner]) if newest else {}
        return Mark(collection=collection, owner=owner, numbers=frozenset(int(record.id) for record in records), said=said)

    def _records(self, collection: str) -> list[Record]:
        try:
            self._store.describe(mark_of(collection))  # again: a mark of that name may have been another registry's
        except errors.CannotAdopt as exc:
            raise errors.EngineError(str(exc)) from exc
        return [record for page in self._store.scan(mark_of(collection), fields=None) for record in page]

    def _owner(self, collection: str) -> str | None:
        try:
            names = self._store.field_names(mark_of(collection))
        except errors.CollectionMissing:
            return None
        return next((name.removeprefix(FIELD) for name in names if name.startswith(FIELD)), "")

    def _differs(self, collection: str, number: int) -> bool:
        """Return whether the mark is another registry's, or holds a larger number than this one."""
        return self._owner(collection) != self._mine or self._from(collection, number + 1)

    def _from(self, collection: str, number: int) -> bool:
        """Return whether the mark holds that number or a larger one, or is not whole."""
        try:
            return any(self._store.scan(mark_of(collection), after=number - 1, page=NUMBERS))
        except errors.EngineUnavailable:
            raise
        except errors.EngineError:
            return True

    def _marks(self, gallery: str) -> dict[str, Mark | None]:
        return {collection: self.read(collection) for collection in self._collections(gallery)}

    def _marks_of(self, gallery: str) -> list[Mark]:
        """Return the marks in the engine, of any registry, that name this gallery."""
        marked = [name.removeprefix(MARK_PREFIX) for name in self._store.collection_names() if is_mark(name)]
        return [mark for mark in map(self.read, marked) if mark is not None and mark.said.get("gallery") == gallery]

    def _collections(self, gallery: str) -> list[str]:
        return [leg.collection for leg in self._registry.plan(gallery).write_targets]

    def _introduced(self, collection: str) -> Mark | None:
        """Return the mark. Wait a moment for its owner to write where it is."""
        began = time.monotonic()
        while (mark := self.read(collection)) is not None and mark.number < 0 and time.monotonic() < began + INTRODUCED:
            time.sleep(0.05)
        return mark

    # --- comparing ----------------------------------------------------------------------------------------------------

    def _expect(self, gallery: str, marks: Mapping[str, Mark | None]) -> Trace:
        """Compare marks with the registry. Return the trace, read after the marks, because the registry rises first.

        If a collection is gone, a clean-up may have dropped it with its mark. Then the gallery's other marks know of that step.
        """
        dropped = any(mark is None and not self._store.exists(collection) for collection, mark in marks.items())
        later = [mark for mark in self._marks_of(gallery) if mark.owner == self._mine] if dropped else []
        trace = self._registry.trace(gallery)
        _refuse_trouble(trace)
        for mark in (*filter(None, marks.values()), *later):
            if mark.owner != self._mine:
                raise self._theirs(mark, gallery)
            if mark.number > trace.number:
                raise self._gone_back(gallery, mark, trace.number)
        return trace

    def _theirs(self, mark: Mark, gallery: str) -> errors.NotOwner:
        theirs = str(mark.said.get("gallery", gallery))
        here = gallery if gallery in {row.name for row in self._registry.galleries()} else theirs
        return errors.NotOwner(
            f"Collection {mark.collection!r} belongs to gallery {theirs!r} of another registry, {mark.where}; use that registry, "
            "bring it back with rmvdb registry rebuild if it is lost, or take the gallery from it for good: "
            f"{TAKE.format(gallery=here)}"
        )

    def _gone_back(self, gallery: str, mark: Mark, number: int) -> errors.NotOwner:
        """Make the error, and record it: the next steps of this registry would hide that it has gone back."""
        error = errors.NotOwner(
            f"The registry at {self._registry.shown_url} has gone back, or is a copy: it knows of step {number} of gallery "
            f"{gallery!r}, and step {mark.number} was written beside the data by {mark.where}; put the newer database back, "
            f"empty this one and run rmvdb registry rebuild, or continue with this one for good: {TAKE.format(gallery=gallery)}"
        )
        with contextlib.suppress(errors.RegistryError):
            self._registry.note_trouble(gallery, str(error))
        return error

    # --- writing ------------------------------------------------------------------------------------------------------

    def _add(self, collection: str, number: int, *, gallery: str, epoch: int) -> None:
        """Write a number that the registry has just given.

        Raises:
            NotOwner: the mark holds this number already, or a larger one that the registry does not know.
        """
        if self._owner(collection) != self._mine or self._from(collection, number):
            mark = self.read(collection)
            self._expect(gallery, {collection: mark})
            if mark is None:
                self.take(gallery, collection, epoch=epoch)
            elif number in mark.numbers:
                raise self._gone_back(gallery, mark, number - 1)
        self._write(collection, number, gallery=gallery, epoch=epoch)

    def _write(self, collection: str, number: int, *, gallery: str, epoch: int) -> None:
        said = {"gallery": gallery, "epoch": epoch, "registry": self._registry.shown_url, "host": socket.gethostname()}
        said["at"] = time.time()
        fields = {FIELD + self._mine: json.dumps(said)}
        self._store.upsert(mark_of(collection), [Record(id=number, vector=np.ones(2, np.float32), fields=fields)])

    def _prune(self, mark: Mark) -> None:
        if len(mark.numbers) > 2 * NUMBERS:
            self._store.delete(mark_of(mark.collection), sorted(mark.numbers)[:-NUMBERS])


def _refuse_trouble(trace: Trace) -> None:
    if trace.trouble:
        raise errors.NotOwner(trace.trouble)


def _shape(collection: str, owner: str) -> Schema:
    said = Field(name=FIELD + owner, type="VARCHAR", params={"max_length": 8192})
    return Schema(collection=mark_of(collection), dim=2, metric=Metric.L2, id_type=IdType.INT64, fields=(said,), dynamic=False)
