"""A lease, the heartbeat that renews it and a thread that works under it, in whole seconds that may pass between any two steps.

protocol.py takes from here that no permitted call is on its way when its lease runs out. A write's deadline is the same without
the heartbeat.

| step | code |
|---|---|
| heartbeat: asks, is answered; the database renews | Worker._renew; Registry.renew |
| thread: begins, claims | Worker._drive: Worker._in_time, Registry.claim |
| a call leaves, is refused; arrives | the check of Worker._in_time; the engine |
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from tests.model.checker import Step

LEASE, LONGEST_CALL = 7, 3


class State(NamedTuple):
    """Seconds are counted to nothing, or from nothing up to the lease; -1 where nothing is under way."""

    #: What is left of the lease in the database, and what the worker believes is left.
    lease: int = 0
    alive: int = LEASE
    #: Since the heartbeat asked; whether the worker's time was over then; whether the database has renewed.
    asked: int = -1
    was_over: bool = False
    renewed: bool = False
    #: No lapse was counted since the thread began.
    same: bool = False
    thread: str = "begins"
    #: Since the call left.
    call: int = -1


@dataclass(frozen=True)
class Lease:
    """The model; `without` names the steps that are left out."""

    without: frozenset[str] = frozenset()

    def has(self, step: str) -> bool:
        """Whether the protocol still has this step."""
        return step not in self.without

    def initial(self) -> State:
        """A worker that has just said that it lives."""
        return State()

    def broken(self, s: State) -> str:
        """What protocol.py relies on."""
        return "a call is on its way and its lease has run out" if s.call >= 0 and not s.lease else ""

    def ended(self, _: State) -> bool:
        """Anywhere."""
        return True

    def steps(self, s: State) -> Iterator[Step]:
        """A second passes; the heartbeat; the thread."""
        if s.call + 1 < LONGEST_CALL:  # or else it arrives within this second
            asked, call = (min(each + 1, LEASE) if each >= 0 else -1 for each in (s.asked, s.call))
            later = s._replace(lease=max(s.lease - 1, 0), alive=max(s.alive - 1, 0), asked=asked, call=call)
            yield Step("a second passes", later)
        yield from self._heartbeat(s)
        yield from self._thread(s)

    def _heartbeat(self, s: State) -> Iterator[Step]:
        if s.asked < 0:
            yield Step("the heartbeat asks", s._replace(asked=0, was_over=not s.alive, renewed=False))
        elif not s.renewed:
            revived = not self.has("a lease that has run out is not renewed")
            lease = LEASE if s.lease or (revived and s.thread == "works") else s.lease
            yield Step("the database renews the lease", s._replace(renewed=True, lease=lease))
        else:
            over = not s.alive if self.has("a lapse is looked for when the heartbeat is answered") else s.was_over
            same = s.same and not (over and self.has("a lapse is counted"))
            since = s.asked if self.has("a lease counts from the question") else 0
            yield Step("the heartbeat is answered", s._replace(asked=-1, was_over=False, same=same, alive=LEASE - since))

    def _thread(self, s: State) -> Iterator[Step]:
        early = self.has("lapses are counted from before the claim")
        if s.thread == "begins":
            yield Step("the thread begins", s._replace(thread="claims", same=True))
        elif s.thread == "claims":
            yield Step("the database gives it a claim", s._replace(thread="works" if early else "late", lease=LEASE))
        elif s.thread == "late":
            yield Step("the thread begins late", s._replace(thread="works", same=True))
        elif s.call >= 0:
            yield Step("the call arrives", s._replace(call=-1))
        elif s.same and s.alive >= (LONGEST_CALL if self.has("a call leaves the longest call before the lease ends") else 1):
            yield Step("a call leaves", s._replace(call=0))
        else:
            yield Step("the call is refused", s._replace(thread="begins", same=False, lease=0))
