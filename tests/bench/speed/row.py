"""A row of `make bench`: a ratio beside its target, and what was measured on both sides."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """How large and how long to measure."""

    #: Records of the gallery, dimension of both models, and the share that is re-embedded.
    records: int = 100_000
    dim: int = 128
    t: float = 0.5
    #: How often each side is called. A few rows take a fixed part or multiple of it.
    calls: int = 400
    #: Seconds for which statements are counted: a client sends one in six.
    seconds: float = 60.0

    @classmethod
    def small(cls) -> Options:
        """Return what the tests run: every row, with figures that say nothing."""
        return cls(records=300, dim=16, calls=6, seconds=0.3)


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One figure of `make bench`."""

    name: str
    #: Of rmvdb's side to the other one. Without another side: rmvdb's figure itself, in `unit`.
    ratio: float
    target: float
    better: Literal["lower", "higher"]
    unit: str
    #: The median of each side, and its spread: the first and the last quartile. None without another side.
    ours: float
    ours_spread: tuple[float, float]
    against: str = ""
    theirs: float | None = None
    theirs_spread: tuple[float, float] | None = None

    @property
    def is_met(self) -> bool:
        """Tell whether the target is reached."""
        return self.ratio <= self.target if self.better == "lower" else self.ratio >= self.target

    def to_json(self) -> str:
        """Return the row as a line of JSON."""
        found: dict[str, Any] = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return json.dumps({**found, "met": self.is_met})


def compared(
    name: str,
    ours: Sequence[float],
    theirs: Sequence[float],
    *,
    against: str,
    target: float,
    unit: str = "ms",
    share: float = 0.5,
    better: Literal["lower", "higher"] = "lower",
) -> Row:
    """Make the row of two sides' times, or of their rates: the ratio of the times in which that share of the calls ended, 0.5 for
    the median."""
    return Row(
        name=name,
        ratio=quantile(ours, share) / quantile(theirs, share),
        target=target,
        better=better,
        unit=unit,
        ours=quantile(ours, share),
        ours_spread=spread(ours),
        against=against,
        theirs=quantile(theirs, share),
        theirs_spread=spread(theirs),
    )


def counted(name: str, ours: Sequence[float], *, target: float, unit: str, share: float = 0.5) -> Row:
    """Make the row of a figure that is compared with its target alone."""
    found = quantile(ours, share)
    return Row(name=name, ratio=found, target=target, better="lower", unit=unit, ours=found, ours_spread=spread(ours))


def in_turns(ours: Callable[[], object], theirs: Callable[[], object], *, calls: int) -> tuple[list[float], list[float]]:
    """Call both sides in turns, each first every other time, after a few calls that do not count. Return milliseconds."""
    sides, times = [ours, theirs], ([], [])  # type: tuple[list[Callable[[], object]], tuple[list[float], list[float]]]
    for number in range(-3, calls):
        for side in (0, 1) if number % 2 else (1, 0):
            began = time.perf_counter()
            sides[side]()
            if number >= 0:
                times[side].append(1000 * (time.perf_counter() - began))
    return times


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value below which that share of the values lies."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if share != 0.5 else statistics.median(values)


def spread(values: Sequence[float]) -> tuple[float, float]:
    """Return the first and the last quartile."""
    return quantile(values, 0.25), quantile(values, 0.75)
