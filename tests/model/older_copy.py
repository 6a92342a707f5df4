"""A registry that goes back by any number of steps: protocol.py with the mark, and with the numbers of batches.

A copy of all that the registry knows is put back: batches, taken apart or not, quarantine, epochs. If the mark beside the data is
ahead of it, everybody refuses it, and its work list is made again from the collections and the archive. Else it goes on as it is.

| step | code |
|---|---|
| mark | Backfill.retire: Owner.note |
| served | change_epoch.serve: Owner.note |
| is made again | Rebuild.take, Rebuild.run: ArchiveMatcher.at |

Numbers of batches are given again once the registry has gone back. Writers are left out: see protocol.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tests.model.checker import Step
from tests.model.protocol import Protocol
from tests.model.state import ABSENT, DEPLOYED, SERVED, Batch, Conductor, State, Worker


@dataclass(frozen=True)
class OlderCopy(Protocol):
    """The model of a step forward, with the older copy put back at any time."""

    registry_goes_back: bool = True
    rows: int = 2

    def _moments(self, s: State) -> Iterator[Step]:
        if s.registry is None and s.faults:
            copy = (s.batches, s.number, s.moved, s.aside, s.plan)
            yield Step("a copy of the registry is made", s._replace(registry=copy, behind=False))
        elif s.registry is not None and not s.late and not any(each.call for each in s.workers):
            yield self._fault(self._put_back(s), "the registry goes back, and all processes are started again")

    def _put_back(self, s: State) -> State:
        assert s.registry is not None
        batches, number, moved, aside, plan = s.registry
        then = s._replace(
            batches=tuple(b._replace(token=-1, lease="over" if b.lease else "") for b in batches), number=number, moved=moved,
            aside=aside, plan=plan, workers=(Worker(),) * self.workers, registry=None, behind=False,
            conductors=(Conductor("deploy" if plan == SERVED else "work"),) * self.conductors,
        )  # fmt: skip
        return self._made_again(then) if s.behind and self.has("a registry behind the mark is made again") else then

    def _made_again(self, s: State) -> State:
        """The fate of the record as its collections show it."""
        old, new = s.held[s.old], s.held[s.new]
        if s.plan == SERVED and new:
            s = s._replace(plan=DEPLOYED, conductors=(Conductor("work"),) * self.conductors)
        made = Batch(upgrade=s.upgrade, root=s.number + 1)
        row = made._replace(state="copied", archive=s.archived) if old and new else made
        then = s._replace(
            batches=(row, *[Batch(upgrade=s.upgrade)] * (self.rows - 1)), number=s.number + 1, aside=False,
            moved=ABSENT if old else new,
        )  # fmt: skip
        return self._grace(then, ("copied", 0)) if old and new else then

    def _removal(self, decided: str) -> str:
        return "mark"

    def _mark(self, s: State, w: int, _: Worker) -> Iterator[State]:
        me = s.workers[w]
        yield s._replace(behind=s.registry is not None).put("workers", w, at=super()._removal(me.decided))

    def _served(self, before: State, then: State) -> State:
        return then._replace(behind=then.registry is not None) if then.plan != before.plan else then

    def _deploy(self, s: State, c: int, me: Conductor) -> Iterator[State]:
        for then in super()._deploy(s, c, me):
            yield self._served(s, then)

    def _serve(self, s: State, c: int, me: Conductor) -> Iterator[State]:
        for then in super()._serve(s, c, me):
            yield self._served(s, then)

    # --- the numbers of batches ---------------------------------------------------------------------------------------

    def _listed(self, s: State) -> Iterator[State]:
        for then in super()._listed(s):
            yield self._numbered(s, then)

    def _moved_first(self, s: State) -> Iterator[Step]:
        for name, then, fault in super()._moved_first(s):
            yield Step(name, self._numbered(s, then), fault)  # type: ignore[arg-type]

    def _numbered(self, s: State, then: State) -> State:
        """With a number for the row that is new."""
        for at, b in enumerate(then.batches):
            if b.state == "pending" and s.batches[at].state != "pending":
                then = then._replace(number=s.number + 1).put("batches", at, root=s.number + 1)
        return then
