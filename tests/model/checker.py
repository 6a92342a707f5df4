"""An explicit-state model checker: every state that any order of steps leads to, breadth first, so that a trace is short."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol


class Step(NamedTuple):
    """A step: its name, the state that it leads to, and whether it is a fault, which no process may rely on."""

    name: str
    then: Hashable
    fault: bool = False


class Model(Protocol):
    """The model to check."""

    def initial(self) -> Hashable:
        """Return the first state."""

    def steps(self, state: Hashable) -> Iterable[Step]:
        """Yield everything that may happen next."""

    def broken(self, state: Hashable) -> str:
        """Return which promise this state breaks, in words; "" for none."""

    def ended(self, state: Hashable) -> bool:
        """Return whether this is an allowed end."""


@dataclass(frozen=True)
class Found:
    """The result of a check. `trace` leads from the beginning to the state that is `broken`."""

    states: int
    broken: str = ""
    trace: tuple[str, ...] = ()

    def __str__(self) -> str:
        steps = "".join(f"\n{number:4}. {name}" for number, name in enumerate(self.trace, start=1))
        return f"{self.broken or 'nothing is broken'} ({self.states:,} states){steps}"


#: How each state was reached first: from where, by what.
_Reached = dict[Hashable, tuple[Hashable, str]]


def check(model: Model) -> Found:
    """Look at every reachable state: none is broken, and from each the end can be reached without a further fault."""
    first = model.initial()
    reached: _Reached = {first: (None, "")}
    towards: dict[Hashable, list[Hashable]] = {}  # the steps without a fault, backwards
    ends, queue = [], deque([first])
    while queue:
        state = queue.popleft()
        if broken := model.broken(state):
            return Found(len(reached), broken, _trace(reached, state))
        if model.ended(state):
            ends.append(state)
        for name, then, fault in model.steps(state):
            if then not in reached:
                reached[then] = (state, name)
                queue.append(then)
            if not fault:
                towards.setdefault(then, []).append(state)
    good = _backwards(towards, ends)
    stuck = next((state for state in reached if state not in good), None)
    return Found(len(reached), *(("from here it never ends", _trace(reached, stuck)) if stuck is not None else ()))


def _backwards(towards: dict[Hashable, list[Hashable]], ends: list[Hashable]) -> set[Hashable]:
    """Return the states from which one of these can be reached."""
    good, queue = set(ends), list(ends)
    while queue:
        more = [state for state in towards.get(queue.pop(), ()) if state not in good]
        good.update(more)
        queue += more
    return good


def _trace(reached: _Reached, state: Hashable) -> tuple[str, ...]:
    steps: list[str] = []
    while (step := reached[state])[1]:
        state = step[0]
        steps.append(step[1])
    return tuple(reversed(steps))
