"""An hour of the model: scenarios too big to look at each state of, searched at random until the time is over.

The scenarios grow: each round draws larger ones and looks at twice as many states of each. A search goes deep, and now and then
goes on from anywhere else that it has not been, so that it spreads. It never looks at a state twice. From some of the states it
looks for the end by steps without a fault, as `checker.check` does from every one.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field, replace

from tests.model.checker import Found
from tests.model.in_place import InPlace
from tests.model.mirror import Mirrored
from tests.model.older_copy import OlderCopy
from tests.model.protocol import ABSENT, Protocol

#: States of each scenario of the first round.
STATES = 5_000
#: How often a search goes on from anywhere, and how often it looks for the end.
JUMPS, ENDS = 0.1, 0.02
#: The most states on the way to an end; a search for it that takes more is given up and counted.
FAR = 20_000


@dataclass(kw_only=True, slots=True)
class Explored:
    """What was looked at."""

    seed: int
    scenarios: int = 0
    states: int = 0
    #: Scenarios of which every state was looked at.
    whole: int = 0
    #: States from which the end was looked for, and those of which it is not known because that took too many states.
    ends: int = 0
    far: int = 0
    deepest: int = 0
    violations: list[tuple[Protocol, Found]] = field(default_factory=list)

    def __str__(self) -> str:
        return ", ".join(f"{number:,} {what}" for what, number in self.summary().items() if what != "seed")

    def summary(self) -> dict[str, int]:
        """The figures, in words; `violations` must be 0."""
        return {
            "seed": self.seed,
            "scenarios": self.scenarios,
            "of them whole": self.whole,
            "states": self.states,
            "steps deep": self.deepest,
            "ends looked for": self.ends,
            "of them given up": self.far,
            "violations": len(self.violations),
        }


def explore(
    seed: int,
    *,
    seconds: float,
    states: float = math.inf,
    without: frozenset[str] = frozenset(),
    report: Callable[[Explored, Protocol], None] = lambda *_: None,
) -> Explored:
    """Search scenarios until the time is over, so many states were looked at, or one breaks. A seed draws the same ones again."""
    rng, ends_at, seen = random.Random(seed), time.monotonic() + seconds, Explored(seed=seed)
    for size, scenario in _scenarios(rng):
        model = replace(scenario, without=without)
        found = _Search(model, rng, seen).run(STATES * 2**size, ends_at)
        seen.scenarios += 1
        report(seen, model)
        if found.broken:
            seen.violations.append((model, found))
        if found.broken or seen.states >= states or time.monotonic() > ends_at:
            return seen
    raise AssertionError("there is always another scenario")


def _scenarios(rng: random.Random) -> Iterator[tuple[int, Protocol]]:
    """Rounds of scenarios, each round larger than the one before: writers, workers, faults."""
    size = 0
    while True:
        for draw in rng.sample(_KINDS, k=len(_KINDS)):
            yield size, draw(rng, size)
        size += 1


def _some(rng: random.Random, size: int) -> dict[str, object]:
    """Who is there, and what goes wrong."""
    upserts = iter((2, 3))
    writes = tuple(next(upserts) if rng.random() < 0.6 else ABSENT for _ in range(rng.randint(1, min(1 + size, 2))))
    return {
        "writes": writes,
        "workers": rng.randint(1, min(2 + size // 3, 3)),
        "faults": rng.randint(1, min(2 + size // 2, 4)),
        "first": ABSENT if rng.random() < 0.1 else 1,
    }


def _moved(rng: random.Random, size: int) -> Protocol:
    return Protocol(**_some(rng, size) | {"rows": rng.randint(1, 2)})


def _there_and_back(rng: random.Random, size: int) -> Protocol:
    ways = {name: rng.random() < 0.6 for name in ("deploy", "schedule", "roll_back")}
    return Protocol(**_some(rng, size) | ways | {"cut_over": True, "rows": 2 if rng.random() < 0.3 else 1})


def _beside_others(rng: random.Random, size: int) -> Protocol:
    some = _some(rng, size)
    others = rng.choice([(4,), (0,), (4, 0)]) if some["first"] else (4,)
    return Protocol(**some | {"others": others, "cut_over": rng.random() < 0.5})


def _asked_for(rng: random.Random, size: int) -> Protocol:
    return Protocol(**_some(rng, size) | {"asked": True, "rows": 2, "cut_over": rng.random() < 0.3})


def _cleaned_up(rng: random.Random, size: int) -> Protocol:
    return Protocol(**_some(rng, size) | {"deploy": True, "cut_over": True, "clean_up": True})


def _kept(rng: random.Random, size: int) -> Protocol:
    return rng.choice((Mirrored, InPlace))(**_some(rng, size))


def _went_back(rng: random.Random, size: int) -> Protocol:
    some, cut_over = _some(rng, size), rng.random() < 0.5
    # Who does not search asks for no plan, so that only one plan may be served.
    some |= {"cut_over": cut_over, "searches": cut_over or rng.random() < 0.3}
    return Protocol(**some | {"registry_goes_back": True, "writes": some["writes"] if rng.random() < 0.5 else ()})


def _engine_went_back(rng: random.Random, size: int) -> Protocol:
    return Protocol(**_some(rng, size) | {"writes": (), "engine_goes_back": True, "rows": 2, "first": 1})


def _older_copy(rng: random.Random, size: int) -> Protocol:
    some = _some(rng, size)
    ways = {name: rng.random() < 0.5 for name in ("asked", "sick", "deploy", "cut_over")}
    return OlderCopy(**some | ways | {"writes": (), "first": 1, "faults": min(int(str(some["faults"])), 3)})


_KINDS = [_moved, _there_and_back, _beside_others, _asked_for, _cleaned_up, _kept, _went_back, _engine_went_back, _older_copy]


class _Search:
    """One scenario: depth first, in a random order, never twice at a state."""

    def __init__(self, model: Protocol, rng: random.Random, seen: Explored) -> None:
        self._model, self._rng, self._seen = model, rng, seen
        #: How each state was reached: the number of the state before it in `_names`, and the step's name.
        self._numbers: dict[Hashable, int] = {}
        self._came: list[tuple[int, str, int]] = []
        #: States from which the end is known to be reached.
        self._good: set[Hashable] = set()

    def run(self, most: int, ends_at: float) -> Found:
        """Look at so many states, or until the time is over."""
        model, rng = self._model, self._rng
        first = model.initial()
        waiting: list[tuple[Hashable, int]] = [(first, self._reach(first, -1, "", 0))]
        while waiting and len(self._came) < most and (len(self._came) % 256 or time.monotonic() < ends_at):
            if rng.random() < JUMPS:
                at = rng.randrange(len(waiting))
                waiting[at], waiting[-1] = waiting[-1], waiting[at]
            state, number = waiting.pop()
            if broken := model.broken(state):  # type: ignore[arg-type]
                return self._found(broken, number)
            if rng.random() < ENDS and not self._ends(state):
                return self._found("from here it never ends", number)
            steps = list(model.steps(state))  # type: ignore[arg-type]
            rng.shuffle(steps)
            depth = self._came[number][2] + 1
            for name, then, _ in steps:
                if then not in self._numbers:
                    waiting.append((then, self._reach(then, number, name, depth)))
        self._seen.states += len(self._came)
        self._seen.whole += not waiting
        return Found(len(self._came))

    def _reach(self, state: Hashable, before: int, name: str, depth: int) -> int:
        self._numbers[state] = number = len(self._came)
        self._came.append((before, name, depth))
        self._seen.deepest = max(self._seen.deepest, depth)
        return number

    def _ends(self, state: Hashable) -> bool:
        """Whether the end can be reached without a further fault, as far as that is known after `FAR` states."""
        self._seen.ends += 1
        came: dict[Hashable, Hashable] = {state: None}
        waiting = [state]
        while waiting and len(came) < FAR:
            here = waiting.pop()
            if here in self._good or self._model.ended(here):  # type: ignore[arg-type]
                while here is not None:
                    self._good.add(here)
                    here = came[here]
                return True
            new = [then for _, then, fault in self._model.steps(here) if not fault and then not in came]  # type: ignore[arg-type]
            self._rng.shuffle(new)
            came |= dict.fromkeys(new, here)
            waiting += new
        self._seen.far += bool(waiting)
        return bool(waiting)

    def _found(self, broken: str, number: int) -> Found:
        self._seen.states += len(self._came)
        steps: list[str] = []
        while number >= 0:
            number, name, _ = self._came[number]
            steps.append(name)
        return Found(len(self._came), broken, tuple(reversed(steps[:-1])))
