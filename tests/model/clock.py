"""The registry's time, which leases, deadlines and graces are measured by, while the database's clock is set forward and back.

A wait begins at some moment. No process may find that more of the registry's time passed than seconds did. Two processes look.
Each may be killed and started again, and its machine may stand still for a second that its own clock does not count.

| step | code |
|---|---|
| a process looks | Timekeeper.begin: the clocks are compared, and the anchor is set again |
| a process begins a wait | what a transaction then writes by Registry.now |
| a client looks | Timekeeper.confirm: the clocks are compared, and no anchor is set |
| a client sets an anchor | Timekeeper.moved_on: by what it has counted since its last look |

A process that starts after a jump counts a tick that may not have passed: so much is allowed for each jump. A machine that stands
still while the clock is set back, and forward again before another process looks, is not guarded against: docs/limits.md says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from tests.model.checker import Step

TICK, SECONDS, FORWARD, BACK = 1, 2, 6, 3


class Last(NamedTuple):
    """The reading that a process compares the next one with."""

    shown: int
    own: int
    back: int
    #: The registry's time that it gave.
    time: int
    #: The other process has started afresh since.
    fresh: bool = False
    #: Another anchor has been set since.
    moved: bool = False


class State(NamedTuple):
    """Seconds from the beginning. -1: not begun."""

    seconds: int = 0
    shown: int = 0
    #: The anchor.
    time: int = 0
    anchored: int = 0
    back: int = 0
    #: The count of each process's own clock, and its last reading.
    own: tuple[int, int] = (0, 0)
    last: tuple[Last | None, Last | None] = (None, None)
    jumps: int = 0
    #: The registry's time, and the seconds, at which the wait began; how much of it the last look found over.
    began: int = -1
    begun: int = -1
    over: int = 0


@dataclass(frozen=True)
class Time:
    """The model; `without` names the steps that are left out."""

    without: frozenset[str] = frozenset()
    jumps: int = 2
    #: Whether the first process's machine may stand still for seconds that its own clock does not count.
    stands: bool = False

    def has(self, step: str) -> bool:
        """Return whether the mechanism still has this step."""
        return step not in self.without

    def initial(self) -> State:
        """No process has looked."""
        return State()

    def broken(self, s: State) -> str:
        """Return a wait that ends early."""
        early = s.over - (s.seconds - s.begun) if s.begun >= 0 else 0
        return f"a wait was over {early} s early" if early > TICK * s.jumps else ""

    def ended(self, _: State) -> bool:
        """Anywhere."""
        return True

    def steps(self, s: State) -> Iterator[Step]:
        """Yield these steps: a second passes, the clock is set, a process looks, begins a wait, or starts again."""
        if s.seconds < SECONDS:
            later = s._replace(seconds=s.seconds + 1, shown=s.shown + 1)
            yield Step("a second passes", later._replace(own=(s.own[0] + 1, s.own[1] + 1)))
            if self.stands:
                name = "a second passes, in which the first process's machine stands still"
                yield Step(name, later._replace(own=(s.own[0], s.own[1] + 1)))
        if s.jumps < self.jumps:
            for seconds in (FORWARD, -BACK):
                yield Step(f"the clock is set by {seconds}", s._replace(shown=s.shown + seconds, jumps=s.jumps + 1), True)
        for process in (0, 1):
            now, then = self._look(s, process)
            yield Step(f"process {process} looks", then._replace(over=max(now - s.began, s.over) if s.begun >= 0 else 0))
            if s.begun < 0:
                yield Step(f"process {process} begins a wait", then._replace(began=now, begun=s.seconds))
            if last := s.last[process]:
                yield Step(f"process {process} starts afresh", s._replace(last=_put(s.last, process, None)), True)
                yield Step(f"process {process}, a client, looks", self._confirm(s, process, last))
                if self._may_move_on(s, process, last):
                    yield Step(f"process {process}, a client, sets an anchor", self._move_on(s, process, last))

    def _confirm(self, s: State, process: int, last: Last) -> State:
        """If the clocks agree, the process counts on from this reading."""
        ahead = s.shown - last.shown + (s.back - last.back) - (s.own[process] - last.own)
        if last.fresh or ahead or s.shown < s.anchored:
            return s
        now = s.time + s.shown - s.anchored
        return s._replace(last=_put(s.last, process, Last(s.shown, s.own[process], s.back, now)))

    def _may_move_on(self, s: State, process: int, last: Last) -> bool:
        ahead = s.shown - last.shown - (s.own[process] - last.own)
        return not (last.moved and self.has("a client sets an anchor in place of the one that it read")) and not (
            ahead and self.has("a client sets an anchor while the clock shows what it has counted")
        )

    def _move_on(self, s: State, process: int, last: Last) -> State:
        """The anchor is the time that the process has counted since it last looked."""
        s = s._replace(time=last.time + s.own[process] - last.own, anchored=s.shown)
        return s._replace(last=tuple(each and each._replace(moved=True) for each in s.last))  # type: ignore[arg-type]

    def _look(self, s: State, process: int) -> tuple[int, State]:
        """Return the registry's time, and the new anchor."""
        since, last, ahead = max(s.shown - s.anchored, 0), s.last[process], 0
        fresh = last is None or (last.fresh and self.has("another that started afresh makes a reading worth a tick"))
        if last is not None:
            by_own = s.own[process] - last.own
            ahead = s.shown - last.shown + (s.back - last.back) - by_own
            ahead = ahead if ahead < 0 or self.has("what the clock is ahead by does not count") else 0
        passed = max(since - max(ahead, 0), 0)
        if fresh and self.has("who has not compared the clocks counts a tick"):
            passed = min(passed, TICK)
        now = s.time + passed
        if last is None or not 0 <= s.shown - s.anchored <= TICK or ahead:
            back = s.back + (max(-ahead, 0) if self.has("what the clock was set back by is known") else 0)
            if self.has("a jump sets the anchor anew") or not ahead:
                s = s._replace(time=now, anchored=s.shown, back=back)
                if other := s.last[1 - process]:
                    s = s._replace(last=_put(s.last, 1 - process, other._replace(moved=True)))
        if last is None and (other := s.last[1 - process]):
            s = s._replace(last=_put(s.last, 1 - process, other._replace(fresh=True)))
        return now, s._replace(last=_put(s.last, process, Last(s.shown, s.own[process], s.back, now)))


def _put(lasts: tuple[Last | None, Last | None], process: int, last: Last | None) -> tuple[Last | None, Last | None]:
    return (last, lasts[1]) if process == 0 else (lasts[0], last)
