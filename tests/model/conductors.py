"""The steps of whoever conducts the upgrade: see protocol.py."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tests.model.checker import Step
from tests.model.registry import RegistryRules
from tests.model.state import ABSENT, DEPLOYED, SERVED, SWITCHED, Batch, Conductor, State


@dataclass(frozen=True)
class ConductorSteps(RegistryRules):
    """From the deployment to the clean-up, or back."""

    def _deploy(self, s: State, c: int, _: Conductor) -> Iterator[State]:
        if self._may_change(s):
            yield s.put("conductors", c, at="work")._replace(plan=DEPLOYED)

    def _work(self, s: State, c: int, _: Conductor) -> Iterator[State]:
        if self.schedule and s.plan == DEPLOYED:
            if self._may_change(s):
                yield s._replace(plan=SWITCHED)
        elif s.aside:
            yield from (listed._replace(aside=False, sick=False) for listed in self._listed(s))
        elif s.held[s.old]:
            if all(b.state == "retired" for b in s.batches) or self.conductors > 1:
                yield s.put("conductors", c, at="found")
        elif self.cut_over and all(b.state == "retired" for b in s.batches):
            waits = tuple(at for at, each in enumerate(s.writers) if each.intent == "open")
            yield s.put("conductors", c, at="quiet", waits=waits)

    def _listed(self, s: State) -> Iterator[State]:
        """Put the record on the work list, once there is room for it."""
        for at, b in enumerate(s.batches):
            if b.state == "retired":
                yield s.put("batches", at, Batch(upgrade=s.upgrade, state="pending"))
                return

    def _found(self, s: State, c: int, _: Conductor) -> Iterator[State]:
        there = s.put("conductors", c, at="work")
        twice = any(b.state != "retired" for b in s.batches) and self.has("a record is on the work list once")
        yield from [there] if twice or not self.has("late records are listed") else self._listed(there)

    def _quiet(self, s: State, c: int, me: Conductor) -> Iterator[State]:
        if s.held[s.old] and self.has("what came late is looked for again"):
            yield s.put("conductors", c, at="found", waits=())
        elif not any(s.writers[at].intent == "open" for at in me.waits) or not self.has("the second look waits for open writes"):
            yield s.put("conductors", c, at="verify", waits=())

    def _verify(self, s: State, c: int, _: Conductor) -> Iterator[State]:
        decides = self._deciding(s, s.upgrade, expired=self.has("verify knows of half-made writes"))
        held, archived = s.held[s.new], s.moved
        if decides >= 0:
            kept = s.writers[decides].intent != "done" or not s.writers[decides].value or held
        else:
            kept = held == archived or (s.upgrade and not archived)  # a roll back fills a collection that was not empty
        # If the registry has forgotten a write, an administrator lets `verify --repair` keep the record as it is.
        if kept or s.forgot:
            yield s.put("conductors", c, at="serve")

    def _serve(self, s: State, c: int, _: Conductor) -> Iterator[State]:
        if self._may_change(s):
            then = s.put("conductors", c, at="drop" if self.clean_up else "done")._replace(plan=(s.new,))
            yield self._grace(then, ("served", c)) if self.clean_up else then

    def _drop(self, s: State, c: int, _: Conductor) -> Iterator[State]:
        if ("served", c) not in s.reader.older or not self.has("a grace lies between the cut-over and the clean-up"):
            yield s.put("conductors", c, at="done")

    def _done(self, s: State, c: int, _: Conductor) -> Iterator[State]:
        yield from ()

    def _orders(self, s: State) -> Iterator[Step]:
        """Registry.supersede: a roll back may be asked for at any time."""
        if self.roll_back and not s.upgrade and not s.superseded and s.plan != SERVED:
            yield Step("a roll back is ordered", s._replace(superseded=True).put("conductors", 0, at="back", waits=()), True)

    def _back(self, s: State, c: int, _: Conductor) -> Iterator[State]:
        if not self._may_change(s):
            return
        first = s.batches[0]
        origin = s.moved if first.state == "retired" else max(first.archive, ABSENT)
        rows = [b if b.lease == "live" else Batch(upgrade=1) for b in s.batches]
        free = [at for at, b in enumerate(rows) if b.upgrade]
        if origin and free:
            undecided = first.state not in ("retired", "removing") or (first.state, first.decided) == ("removing", "gone")
            left = undecided and self.has("a roll back leaves what had not left")
            rows[free[0]] = Batch(upgrade=1, state="pending", origin=origin, left=left)
        decides = self._deciding(s, 0, expired=True)
        undone = s.writers[decides].intent if decides >= 0 else ""
        served = {"plan": (0, 1), "upgrade": 1, "superseded": False, "moved": ABSENT, "undone": undone}
        yield s._replace(batches=tuple(rows), **served).put("conductors", c, at="work")
