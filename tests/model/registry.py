"""The registry's rules of the protocol: which writes decide, what a grace waits for, and time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tests.model.checker import Step
from tests.model.options import Options
from tests.model.state import UNREAD, Batch, State


@dataclass(frozen=True)
class RegistryRules(Options):
    """Which writes decide, what a grace waits for, and the end of leases and deadlines."""

    def _deciding(self, s: State, upgrade: int, *, expired: bool = False) -> int:
        """Registry.intents: the writer whose intent decides, one that is open or else the last that is done; -1 for none."""
        mine = [(each.number, at) for at, each in enumerate(s.writers) if each.upgrade == upgrade and each.intent]
        open_ = [at for _, at in mine if s.writers[at].intent == "open" or (expired and s.writers[at].intent == "expired")]
        done = sorted(each for each in mine if s.writers[each[1]].intent == "done")
        return open_[0] if open_ else done[-1][1] if done else -1

    def _grace(self, s: State, event: tuple[str, int]) -> State:
        """Begin a grace. It ends when no search is left that may have begun before."""
        searches = s.reader.missed >= 0 and self.has("a search that took too long is repeated")
        plans = s.reader.plan != s.plan and self.has("a plan past its maximum age is not used")
        older = s.reader.older | {event} if searches or plans else s.reader.older - {event}
        return s._replace(reader=s.reader._replace(older=older))

    def _on_their_way(self, s: State, batch: int) -> bool:
        mine = any(each.call and each.batch == batch for each in s.workers)
        return mine or any(whose == ("batch", batch) for *_, whose in s.late)

    def _clock(self, s: State) -> Iterator[Step]:
        for at, b in enumerate(s.batches):
            late = self.has("a call leaves the longest call before its lease ends") and self._on_their_way(s, at)
            if b.lease == "live" and not late:
                over = s.put("batches", at, lease="over")
                if b.token < 0:
                    yield Step(f"the lease of batch {at} is over", over)
                elif s.faults:
                    yield self._fault(over, f"a worker is suspended until the lease of batch {at} is over")
        for at, each in enumerate(s.writers):
            late = any(whose == ("writer", at) for *_, whose in s.late) or each.call
            if each.intent == "open" and not (late and self.has("a writer's call asks for its deadline")):
                expired = s.put("writers", at, intent="expired")
                if each.at == "end":
                    yield Step(f"the deadline of writer {at} is over", expired)
                elif s.faults:
                    yield self._fault(expired, f"writer {at} is suspended until its deadline is over")

        if s.faults and not self.has("a clock that is set ends no lease, deadline or grace"):
            yield self._fault(self._set_forward(s), "the database's clock is set forward")

    def _set_forward(self, s: State) -> State:
        """Set the registry's time forward, which clock.py rules out: every wait is over."""
        for at, b in enumerate(s.batches):
            s = s.put("batches", at, lease="over") if b.lease == "live" else s
        for at, each in enumerate(s.writers):
            s = s.put("writers", at, intent="expired") if each.intent == "open" else s
        return s._replace(reader=s.reader._replace(older=frozenset()))

    def _moved_first(self, s: State) -> Iterator[Step]:
        """Move the record from a pending batch into one that comes before all others, in one transaction."""
        first = s.batches[0]
        if s.superseded or first.upgrade != s.upgrade or s.batches[1].state != "retired":
            return
        pending = first.state == "pending" and first.archive == UNREAD
        begun = first.state != "retired" and not self.has("only pending batches are taken apart")
        if pending or begun:
            then = s.put("batches", 1, Batch(upgrade=s.upgrade, state="pending"))
            if self.has("what searches asked for is moved in one transaction"):
                then = then.put("batches", 0, Batch(upgrade=s.upgrade))
            yield Step("what searches asked for comes first", then, True)

    def _may_change(self, s: State) -> bool:
        """Registry.activate: no older write is open, no older claim lives."""
        writes = any(each.intent == "open" for each in s.writers) and self.has("an epoch waits for open writes")
        comparing = self.has("an epoch waits for a claim that compares")
        claims = any(b.lease == "live" and (comparing or b.state != "copied") for b in s.batches)
        return not writes and not (claims and self.has("an epoch waits for claims"))

    def _fault(self, then: State, name: str) -> Step:
        left = max(then.faults - 1, -1)
        return Step(
            name, then._replace(faults=left, registry=then.registry if left else None), True
        )  # a copy is of no use any more
