"""The state of the protocol's model: one record in two collections, the registry's rows, and every process at work."""

from __future__ import annotations

from typing import Any, NamedTuple

ABSENT, FIRST, MIXED, UNREAD = 0, 1, -1, -2
#: In a plan: the epoch of a schedule from which on the same collections are searched in another way.
LATER = 9
#: Collections are 0 and 1; a plan names its legs, newest first, then ~c for a mirror c. Upgrade 0 leads from 0 to 1, upgrade 1
#: back.
SERVED, DEPLOYED, SWITCHED = (0,), (1, 0), (1, 0, LATER)


def legs(plan: tuple[int, ...]) -> tuple[int, ...]:
    """Return the collections that are searched."""
    return tuple(each for each in plan if 0 <= each < LATER)


def mirrors(plan: tuple[int, ...]) -> tuple[int, ...]:
    """Return the collections that are written and not searched."""
    return tuple(~each for each in plan if each < 0)


class Batch(NamedTuple):
    """A row of the work list; `retired` is also a row that is not there."""

    upgrade: int = 0
    state: str = "retired"
    #: The worker whose token it has, while that one lives: its heartbeat keeps the lease.
    token: int = -1
    #: "", "live" or "over".
    lease: str = ""
    archive: int = UNREAD
    #: Left to a client, when it was copied.
    uncopied: bool = False
    decided: str = ""
    #: A roll back's archived record, and whether it is left as it is where it goes back to.
    origin: int = ABSENT
    left: bool = False
    #: Its record was set aside.
    empty: bool = False
    #: By how many others it came again; whether its last copy found the record in the old collection.
    again: int = 0
    found: bool = False
    #: Its number, or that of the batch that it comes from by requeues; see older_copy.py.
    root: int = 0


class Worker(NamedTuple):
    """A thread with a claim, and where it is in its work."""

    at: str = "claim"
    batch: int = 0
    upgrade: int = 0
    was: int = UNREAD
    #: Of the new collection, at the moment of the comparison.
    new: int = UNREAD
    vector: int = UNREAD
    announced: bool = False
    left: bool = False
    decided: str = ""
    #: The collection and the value that are on their way to the engine.
    call: tuple[int, ...] = ()


class Writer(NamedTuple):
    """One write and its intent: "", "open", "done", or "expired" for one past its deadline."""

    value: int
    at: str = "open"
    plan: tuple[int, ...] = ()
    upgrade: int = -1
    #: The order of announcement.
    number: int = -1
    intent: str = ""
    #: Whether the old collection held the record when no one else was at it any more.
    alone_with: bool = False
    #: It may be seen: announced, and not replaced by a later one.
    counts: bool = False
    call: tuple[int, ...] = ()


class Reader(NamedTuple):
    """A client's plan, and the collection that its search looked at when the record was not there."""

    plan: tuple[int, ...]
    missed: int = -1
    #: The graces that began after it did.
    older: frozenset[tuple[str, int]] = frozenset()


class Conductor(NamedTuple):
    """Who makes batches and changes epochs; `waits`: the writes that were open at its first look."""

    at: str
    waits: tuple[int, ...] = ()


class State(NamedTuple):
    """All of it at one moment."""

    held: tuple[int, ...]
    plan: tuple[int, ...]
    batches: tuple[Batch, ...]
    workers: tuple[Worker, ...]
    writers: tuple[Writer, ...]
    reader: Reader
    conductors: tuple[Conductor, ...]
    #: The last write that returned; what a search may show besides: writes under way, and what other programs replaced.
    truth: int
    replaced: frozenset[int]
    #: Other programs' writes into the old collection that are still to come.
    others: tuple[int, ...]
    #: Faults that may still come; -1 for any number.
    faults: int
    upgrade: int = 0
    #: Calls whose process is gone, or was told that they failed: collection, value, and whose they are.
    late: tuple[tuple[int, int, tuple[str, int]], ...] = ()
    #: The archived content of the record when it was removed.
    moved: int = ABSENT
    #: The upgrade has ended, its successor is not served yet; how the last write under it ended.
    superseded: bool = False
    undone: str = ""
    #: The record cannot be embedded; it is quarantined.
    sick: bool = False
    aside: bool = False
    #: Where registry or engine may go back: their copies; the last batch, by how often it came again, that noted in the archive
    #: that the record leaves; and what the archive holds.
    registry: tuple[Any, ...] | None = None
    engine: tuple[int, ...] = ()
    left: int = -1
    archived: int = ABSENT
    #: The last number of a batch, those under which the archive has its note and its reading, and whether the mark beside the
    #: data is ahead of the registry's copy; see older_copy.py.
    number: int = 0
    noted_by: int = 0
    archived_by: int = 0
    behind: bool = False
    #: Whether the registry went back beside a writer, and may have forgotten a write; what batches copied, as the archive has it.
    forgot: bool = False
    copies: frozenset[int] = frozenset()
    #: A record in a collection that is not searched yet may be so new that a search misses it.
    unseen: bool = False

    @property
    def old(self) -> int:
        """The collection that is emptied."""
        return self.upgrade

    @property
    def new(self) -> int:
        """The collection that is filled."""
        return 1 - self.upgrade

    @property
    def right(self) -> set[int]:
        """The contents that a search may find."""
        return {self.truth, *self.replaced, *(each.value for each in self.writers if each.counts)}

    def put(self, rows: str, at: int, row: NamedTuple | None = None, /, **changes: Any) -> State:
        """With another row, or a changed one, in one of its tuples."""
        there = getattr(self, rows)
        row = (row or there[at])._replace(**changes)  # type: ignore[union-attr]
        return self._replace(**{rows: (*there[:at], row, *there[at + 1 :])})

    def stored(self, collection: int, value: int) -> State:
        """Let a call reach the engine."""
        fresh = value and not self.held[collection] and collection not in self.plan and ABSENT not in self.right
        return self._replace(
            held=(*self.held[:collection], value, *self.held[collection + 1 :]), unseen=self.unseen or bool(fresh)
        )

    def ordered(self) -> State:
        """With its workers in an order that only what they do decides."""
        order = sorted(range(len(self.workers)), key=self.workers.__getitem__)
        if order == list(range(len(order))):
            return self
        batches = tuple(b._replace(token=order.index(b.token)) if b.token >= 0 else b for b in self.batches)
        return self._replace(workers=tuple(self.workers[w] for w in order), batches=batches)

    def judged(self) -> State:
        """End a search that may find nothing: it can miss nothing any more."""
        return self.searched() if self.reader.missed >= 0 and ABSENT in self.right else self

    def searched(self) -> State:
        """End the search."""
        older = self.reader.older if self.reader.plan != self.plan else frozenset[tuple[str, int]]()
        return self._replace(reader=self.reader._replace(missed=-1, older=older))
