"""`python -m tests.model`: how many states each scenario has.

`python -m tests.model --seconds 3600 --seed 7` searches bigger ones at random for an hour. The last line is JSON. The exit status
is 1 if something breaks.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time

from tests.model.checker import check
from tests.model.explore import Explored, explore
from tests.model.protocol import Protocol
from tests.model.scenarios import SCENARIOS

#: Seconds between two lines of progress.
EVERY = 10.0


def main(*args: str) -> int:
    """Count the states, or search for so many seconds."""
    parser = argparse.ArgumentParser(prog="python -m tests.model", description=__doc__)
    parser.add_argument("--seconds", type=float, help="Search bigger scenarios at random for so long.")
    parser.add_argument("--seed", type=int, help="Draw the same scenarios again [default: another one each time].")
    parser.add_argument("--without", action="append", default=[], metavar="STEP", help="Leave out a step: something must break.")
    asked = parser.parse_args(args)
    if asked.seconds is None:
        for name, scenario in SCENARIOS.items():
            print(f"{check(scenario).states:9,}  {name}", flush=True)
        return 0
    seed = random.randrange(10**6) if asked.seed is None else asked.seed
    explored = explore(seed, seconds=asked.seconds, without=frozenset(asked.without), report=_Progress())
    for scenario, found in explored.violations:
        print(f"{scenario}: {found}")
    print(json.dumps(explored.summary()))
    return int(bool(explored.violations))


class _Progress:
    """A line now and then."""

    def __init__(self) -> None:
        self._began = self._said = time.monotonic()

    def __call__(self, explored: Explored, _: Protocol) -> None:
        now = time.monotonic()
        if now - self._said > EVERY:
            self._said = now
            print(f"{now - self._began:6.0f} s  {explored}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
