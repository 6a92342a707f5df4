"""A lease, the heartbeat that renews it and a thread that works under it, in whole seconds that may pass between any two steps.

protocol.py takes from here that no permitted call is on its way once others rely on the end of its lease. A write's deadline is
the same without the heartbeat. The worker's clock may be slow by as much as the longest call.

| step | code |
|---|---|
| heartbeat: asks, is answered; the database renews | Worker._renew; Registry.renew |
| thread: begins, claims | Worker._drive: Worker._in_time, Registry.claim |
| a call leaves, is refused; arrives | the check of Worker._in_time; the engine |
| others rely on the end of the lease | Registry.claim, Registry.blocked, and epochs; by the registry's time (clock.py) |
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from tests.model.checker import Step

LEASE, LONGEST_CALL = 10, 3


class State(NamedTuple):
    """Seconds are counted to nothing, or from nothing up to the lease; -1 if nothing is under way."""

    #: The rest of the lease in the database, and whether others have relied on its end.
    lease: int = 0
    relied: bool = False
    #: The rest that the worker believes in, and by how much its clock may yet be slow.
    alive: int = 0
    drift: int = LONGEST_CALL
    #: Since the heartbeat asked; whether it asks for the claim that the thread has; whether the database has answered, and so.
    asked: int = -1
    mine: bool = False
    renewed: bool = False
    found: bool = False
    thread: str = "begins"
    #: Since the call left.
    call: int = -1


@dataclass(frozen=True)
class Lease:
    """The model; `without` names the steps that are left out."""

    without: frozenset[str] = frozenset()

    def has(self, step: str) -> bool:
        """Return whether the protocol still has this step."""
        return step not in self.without

    def initial(self) -> State:
        """Return a worker without a claim."""
        return State()

    def broken(self, s: State) -> str:
        """Return whether the assumption of protocol.py fails."""
        return "a call is on its way and others rely on the end of its lease" if s.call >= 0 and s.relied else ""

    def ended(self, _: State) -> bool:
        """Anywhere."""
        return True

    def steps(self, s: State) -> Iterator[Step]:
        """Yield these steps: a second passes, others rely on the end of the lease, the heartbeat, the thread."""
        if s.call + 1 < LONGEST_CALL:  # or else it arrives within this second
            later = s._replace(lease=max(s.lease - 1, 0), call=s.call + 1 if s.call >= 0 else -1)
            if s.drift:
                yield Step("a second passes, which the worker's clock does not count", later._replace(drift=s.drift - 1))
            asked = min(s.asked + 1, LEASE) if s.asked >= 0 else -1
            yield Step("a second passes", later._replace(alive=max(s.alive - 1, 0), asked=asked))
        if s.thread in ("claimed", "works") and not s.lease:
            yield Step("others rely on the end of the lease", s._replace(relied=True))
        if s.lease and not self.has("a clock that is set ends no lease"):
            yield Step("the database's clock is set forward", s._replace(lease=0), True)
        yield from self._heartbeat(s)
        yield from self._thread(s)

    @property
    def _known(self) -> int:
        """Seconds that a worker counts on."""
        slow = LONGEST_CALL if self.has("a worker counts on less than its lease, by what its clock may be slow") else 0
        return LEASE - slow

    def _heartbeat(self, s: State) -> Iterator[Step]:
        if s.asked < 0:
            yield Step("the heartbeat asks", s._replace(asked=0, mine=s.thread == "works"))
        elif not s.renewed:
            revived = not self.has("a lease that has run out is not renewed") and s.thread in ("claimed", "works")
            lease = LEASE if s.lease or revived else 0
            yield Step("the database renews the lease", s._replace(renewed=True, lease=lease, found=bool(lease)))
        else:
            alive = s.alive
            if s.mine:
                since = s.asked if self.has("a heartbeat counts from its question") else 0
                lost = not s.found and self.has("what the database has lost is lost")
                alive = 0 if lost else self._known - since
            yield Step("the heartbeat is answered", s._replace(alive=alive, asked=-1, mine=False, renewed=False, found=False))

    def _thread(self, s: State) -> Iterator[Step]:
        if s.thread == "begins":
            yield Step("the thread begins", s._replace(thread="claims", alive=self._known))
        elif s.thread == "claims":
            yield Step("the database gives it a claim", s._replace(thread="claimed", lease=LEASE))
        elif s.thread == "claimed":
            alive = s.alive if self.has("a lease counts from before the claim") else self._known
            yield Step("the claim is known", s._replace(thread="works", alive=alive))
        elif s.call >= 0:
            yield Step("the call arrives", s._replace(call=-1))
        elif s.alive >= (LONGEST_CALL if self.has("a call leaves the longest call before the lease ends") else 1):
            yield Step("a call leaves", s._replace(call=0))
        else:
            ended = s._replace(thread="begins", lease=0, relied=False, alive=0, mine=False)
            yield Step("the call is refused", ended)
