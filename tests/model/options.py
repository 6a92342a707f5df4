"""What a scenario has, and which steps are left out of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from tests.model.state import FIRST


@dataclass(frozen=True)
class Options:
    """The scenario; `without` names the steps that are left out."""

    without: frozenset[str] = frozenset()
    workers: int = 1
    writes: tuple[int, ...] = ()
    others: tuple[int, ...] = ()
    first: int = FIRST
    conductors: int = 1
    #: Begin before the deployment, end with the cut-over, roll back at any time between.
    deploy: bool = False
    cut_over: bool = False
    roll_back: bool = False
    #: Then drop the old collection.
    clean_up: bool = False
    #: On the way the same collections are searched in another way, by a schedule over t.
    schedule: bool = False
    sick: bool = False
    #: Searches ask for the record, so that a worker moves it first; there is another row for that.
    asked: bool = False
    #: A call that failed at its sender may be repeated, too, while it is still on its way.
    repeats: bool = False
    #: The registry, or the engine, may go back to any moment.
    registry_goes_back: bool = False
    engine_goes_back: bool = False
    #: Rows that the work list has room for.
    rows: int = 1
    faults: int = -1
    #: Whether a client searches. Without one there are fewer states, and a record that no collection holds is lost all the same.
    searches: bool = True

    def has(self, step: str) -> bool:
        """Return whether the protocol still has this step."""
        return step not in self.without

    def leaving_out(self, step: str) -> Self:
        """Return the same without a step, and with as few faults as show it: without one the states may be without end."""
        return replace(self, without=frozenset({step}), faults=2 if self.faults < 0 else self.faults)
