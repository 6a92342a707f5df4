"""Whose a collection is, in a small collection of rmvdb's own beside it: the mark.

No engine makes a collection under a name that another one with other fields has. The owner stands in the name of a field of the
mark, so that making it is the comparison: of two registries that take a collection at once the engine refuses one. This holds for
Lite 2.5, Lite 3 and every server; properties of collections would not (Lite 2.5 has none).

The ids of a mark's records are numbers of the gallery's trace, which only rises. A number is given once, by a transaction of the
registry that changes something, and is written here before anything leaves a collection because of it. So:

- A mark that is behind its registry is fine: the process died between the two. The next one raises and writes again.
- A mark that is ahead of its registry, or holds a number that the registry has given only now, shows that the registry has gone
  back by at least one batch or epoch. Nothing has been removed by what it then knows: the comparison comes first.
- A mark never goes back. Records are only added; whoever prunes them leaves the largest.

What this does not show: a registry that goes back by less than one number (a batch that was copied and has removed nothing, a
client's intent). In that case nothing had left the old collection because of what was lost.
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

#: How the name of the field begins that names the owner.
FIELD = "owner_"
#: Milvus takes so many characters of a name.
LONGEST_NAME = 255
#: Numbers that a mark keeps: some more than batches are in hand at once.
KEPT = 128
#: Seconds between two looks of a process that works on and on.
LOOK = 60.0
#: Seconds for which another registry that took a collection a moment ago has time to say where it is.
INTRODUCED = 20.0
#: Numbers that a registry which takes the place of another goes beyond: more than that one may have given and not written here.
BEYOND = 1_000_000
#: In the sentence on each mismatch.
TAKE = "rmvdb gallery take {gallery} --from-lost-registry"


def mark_of(collection: str) -> str:
    """The name of the mark of a collection."""
    name = MARK_PREFIX + collection
    if len(name) <= LONGEST_NAME:
        return name
    return f"{name[: LONGEST_NAME - 17]}_{hashlib.sha256(name.encode()).hexdigest()[:16]}"


def is_mark(collection: str) -> bool:
    """Whether it is a mark, and no collection of records."""
    return collection.startswith(MARK_PREFIX)


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """What stands beside a collection."""

    collection: str
    #: The identity of the registry that owns it.
    owner: str
    numbers: frozenset[int]
    #: What was written last: gallery, epoch, registry, host, at.
    said: Mapping[str, Any] = field(default_factory=dict)

    @property
    def number(self) -> int:
        """The largest, -1 for a mark that is only half made."""
        return max(self.numbers, default=-1)

    @property
    def epoch(self) -> int:
        """The epoch in which that was written."""
        return int(self.said.get("epoch", 0))

    @property
    def where(self) -> str:
        """Who wrote last, in words."""
        if not self.said:
            return f"number {self.owner[:8]}…, which has not said where it is"
        at = dt.datetime.fromtimestamp(float(self.said["at"]), tz=dt.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        return f"{self.said['registry']}, last written by host {self.said['host']} at {at}"


class Owner:
    """The marks of this registry's galleries in one engine."""

    def __init__(self, registry: Registry, store: VectorStore) -> None:
        self._registry, self._store = registry, store
        self._looked: dict[str, float] = {}

    @functools.cached_property
    def _mine(self) -> str:
        return self._registry.identity()

    def take(self, gallery: str, collection: str, *, epoch: int = 1) -> None:
        """Mark a collection as this registry's, again where the mark is half made; NotOwner where another has it."""
        try:
            self._store.create(_shape(collection, self._mine), Index(type="FLAT"))
        except errors.AlreadyExists:
            if (there := self._introduced(collection)) is not None and there.owner != self._mine:
                raise self._theirs(there, gallery) from None
            raise
        if (there := self.read(collection)) is None or there.number < 0:
            self._write(collection, 0, gallery=gallery, epoch=epoch)

    def expect(self, gallery: str) -> None:
        """NotOwner where another registry has a collection that the gallery is served from, or where this one has gone back.

        Changes nothing. A gallery without a mark, as an older rmvdb leaves it, is believed.
        """
        trace = self._registry.trace(gallery)
        _refuse_trouble(trace)
        for collection in self._collections(gallery):
            owner = self._owner(collection)
            if owner is not None and (owner != self._mine or self._from(collection, trace.number + 1)):
                self._expect(gallery, {collection: self.read(collection)})  # or it has risen since

    def settle(self, gallery: str) -> None:
        """As `expect`; then marks what has no mark, and brings up to date what a process that died has left behind."""
        self._looked[gallery] = uptime()
        marks = self._marks(gallery)
        trace = self._expect(gallery, marks)
        for collection, mark in marks.items():
            if mark is None or mark.number < 0:
                self.take(gallery, collection, epoch=trace.epoch)
        if any(mark is None or mark.number < trace.number for mark in marks.values()):
            number = self._registry.raise_trace(gallery)  # a number of its own: one that another process may write is a clash
            for collection in marks:
                self._add(collection, number, gallery=gallery, epoch=trace.epoch)
        for mark in filter(None, marks.values()):
            self._prune(mark)

    def settle_now_and_then(self, gallery: str) -> None:
        """As `settle`, once a minute."""
        if uptime() - self._looked.get(gallery, float("-inf")) > LOOK:
            self.settle(gallery)

    def note(self, gallery: str, number: int) -> None:
        """Write a number that the registry has just given, before anything is removed because of what it gave it for.

        NotOwner where it stands there already, or a larger one that the registry does not know: the registry has gone back.
        """
        trace = self._registry.trace(gallery)
        _refuse_trouble(trace)
        self._add(trace.oldest, number, gallery=gallery, epoch=trace.epoch)
        if number % KEPT == 0:
            self._store.delete(mark_of(trace.oldest), list(range(max(number - 2 * KEPT, 0), number - KEPT)))

    def release(self, collection: str) -> None:
        """Take the mark away, where it is this registry's."""
        if self._owner(collection) == self._mine:
            self._store.drop(mark_of(collection))

    def named(self, gallery: str) -> list[str]:
        """The collections in the engine that another registry's marks say to be this gallery's."""
        found = [name.removeprefix(MARK_PREFIX) for name in self._store.collection_names() if is_mark(name)]
        marks = filter(None, map(self.read, found))
        return [mark.collection for mark in marks if mark.owner != self._mine and mark.said.get("gallery") == gallery]

    def take_over(self, gallery: str, collections: Iterable[str], wait: Callable[[], None]) -> tuple[int, int]:
        """Put marks of this registry in the place of those that a lost one has left; the largest number and epoch of those.

        `wait` returns once no lease or write of the other can be alive. UsageError where it has done something meanwhile.
        """
        before = {name: self.read(name) for name in collections}
        wait()
        for name, mark in before.items():
            if mark is not None and (now := self.read(name)) is not None and now.numbers != mark.numbers:
                raise errors.UsageError(f"That registry is not lost: {now.where}, while this one waited; use that registry")
        for name, mark in before.items():
            if mark is not None and mark.owner != self._mine:
                self._store.drop(mark_of(name))
            self.take(gallery, name)
        found = [mark for mark in before.values() if mark is not None]
        return max((mark.number for mark in found), default=0), max((mark.epoch for mark in found), default=0)

    # --- reading ------------------------------------------------------------------------------------------------------

    def read(self, collection: str) -> Mark | None:
        """The mark of a collection; None where it has none."""
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
            self._store.describe(mark_of(collection))  # anew: the mark of that name may have been another registry's
        except errors.CannotAdopt as exc:
            raise errors.EngineError(str(exc)) from exc
        return [record for page in self._store.scan(mark_of(collection), fields=None) for record in page]

    def _owner(self, collection: str) -> str | None:
        try:
            names = self._store.field_names(mark_of(collection))
        except errors.CollectionMissing:
            return None
        return next((name.removeprefix(FIELD) for name in names if name.startswith(FIELD)), "")

    def _from(self, collection: str, number: int) -> bool:
        """Whether that number, or a larger one, is written, or the mark is not whole."""
        try:
            return any(self._store.scan(mark_of(collection), after=number - 1, page=KEPT))
        except errors.EngineUnavailable:
            raise
        except errors.EngineError:
            return True

    def _marks(self, gallery: str) -> dict[str, Mark | None]:
        return {collection: self.read(collection) for collection in self._collections(gallery)}

    def _collections(self, gallery: str) -> list[str]:
        return [leg.collection for leg in self._registry.plan(gallery).write_targets]

    def _introduced(self, collection: str) -> Mark | None:
        """The mark, once its owner has said where it is, for which it may need a moment."""
        began = time.monotonic()
        while (mark := self.read(collection)) is not None and mark.number < 0 and time.monotonic() < began + INTRODUCED:
            time.sleep(0.05)
        return mark

    # --- comparing ----------------------------------------------------------------------------------------------------

    def _expect(self, gallery: str, marks: Mapping[str, Mark | None]) -> Trace:
        """The trace, asked for after the marks were read: the registry rises before they do."""
        trace = self._registry.trace(gallery)
        _refuse_trouble(trace)
        for mark in filter(None, marks.values()):
            if mark.owner != self._mine:
                raise self._theirs(mark, gallery)
            if mark.number > trace.number:
                raise self._gone_back(gallery, mark, trace.number)
        return trace

    def _theirs(self, mark: Mark, gallery: str) -> errors.NotOwner:
        theirs = str(mark.said.get("gallery", gallery))
        return errors.NotOwner(
            f"Collection {mark.collection!r} belongs to gallery {theirs!r} of another registry, {mark.where}; use that registry, "
            "bring it back by rmvdb registry rebuild if it is lost, or take the gallery from it for good: "
            f"{TAKE.format(gallery=gallery)}"
        )

    def _gone_back(self, gallery: str, mark: Mark, number: int) -> errors.NotOwner:
        """What to say, noted as well: the next steps of this registry would hide it."""
        found = errors.NotOwner(
            f"The registry at {self._registry.shown_url} has gone back, or is a copy: it knows of step {number} of gallery "
            f"{gallery!r}, and step {mark.number} was written beside the data by {mark.where}; put the newer database back, "
            f"empty this one and run rmvdb registry rebuild, or go on with this one for good: {TAKE.format(gallery=gallery)}"
        )
        with contextlib.suppress(errors.RegistryError):
            self._registry.note_trouble(gallery, str(found))
        return found

    # --- writing ------------------------------------------------------------------------------------------------------

    def _add(self, collection: str, number: int, *, gallery: str, epoch: int) -> None:
        """Write a number that the registry has given just now; NotOwner where it stands there, or one that is not known."""
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
        if len(mark.numbers) > 2 * KEPT:
            self._store.delete(mark_of(mark.collection), sorted(mark.numbers)[:-KEPT])


def _refuse_trouble(trace: Trace) -> None:
    if trace.trouble:
        raise errors.NotOwner(trace.trouble)


def _shape(collection: str, owner: str) -> Schema:
    said = Field(name=FIELD + owner, type="VARCHAR", params={"max_length": 8192})
    return Schema(collection=mark_of(collection), dim=2, metric=Metric.L2, id_type=IdType.INT64, fields=(said,), dynamic=False)
