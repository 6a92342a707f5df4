"""The steps of a writer: see protocol.py."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tests.model.registry import RegistryRules
from tests.model.state import ABSENT, State, Writer, legs, mirrors


@dataclass(frozen=True)
class WriterSteps(RegistryRules):
    """From the announcement of a write to its end."""

    def _open(self, s: State, i: int, _: Writer) -> Iterator[State]:
        fresh = self.has("the plan is read in the transaction that announces")
        if fresh and s.reader.plan != s.plan and s.reader.missed < 0 and self.has("a write waits for clients of the plan before"):
            return
        plan = s.plan if fresh else s.reader.plan
        upgrade = s.upgrade if s.plan[0] == s.new else -1
        number = 1 + max(each.number for each in s.writers)
        opened = {"plan": plan, "upgrade": upgrade, "number": number, "intent": "open", "counts": True}
        yield s.put("writers", i, at="wait", **opened).judged()

    def _wait(self, s: State, i: int, me: Writer) -> Iterator[State]:
        if self._blocked(s, me):
            yield s.put("writers", i, at="end", intent="", counts=False)
        else:
            at = "mirror" if self._mirrored(me) and self.has("a write reaches mirrors first") else "write"
            looks = me.value and len(legs(me.plan)) > 1
            yield s.put("writers", i, at=at, alone_with=bool(looks and s.held[me.plan[1]]))

    def _blocked(self, s: State, me: Writer) -> bool:
        earlier = any(each.intent == "open" and each.number < me.number for each in s.writers)
        live = {(b.state, b.decided) for b in s.batches if b.lease == "live" and b.upgrade == me.upgrade}
        return (
            (earlier and self.has("a write waits for an earlier one of its record"))
            or (("writing", "") in live and self.has("a write waits for who is writing its record"))
            or (("removing", "gone") in live and self.has("a write waits for who takes its record from new"))
        )

    def _write(self, s: State, i: int, me: Writer) -> Iterator[State]:
        yield self._put(s, i, me.plan[0], me.value)

    def _mirror(self, s: State, i: int, me: Writer) -> Iterator[State]:
        yield self._put(s, i, mirrors(me.plan)[0], me.value)

    def _there(self, s: State, i: int, me: Writer) -> Iterator[State]:
        # The engine may show the state of any moment since the write had the record to itself.
        for there in {s.held[me.plan[1]] != ABSENT, me.alone_with}:
            at = "older" if there and self.has("a write replaces what old holds") else self._last(me)
            yield s.put("writers", i, at=at, alone_with=False)

    def _older(self, s: State, i: int, me: Writer) -> Iterator[State]:
        yield self._put(s, i, me.plan[1], me.value)

    def _put(self, s: State, i: int, collection: int, value: int) -> State:
        """Return the permit of Writes._alone_at."""
        if s.writers[i].intent == "open" or not self.has("a writer's call asks for its deadline"):
            return s.put("writers", i, call=(collection, value))
        return s.put("writers", i, at="end")

    def _close(self, s: State, i: int, me: Writer) -> Iterator[State]:
        if me.intent != "open" and self.has("a write past its deadline is not done"):
            yield s.put("writers", i, at="end")
            return
        ended = {"at": "end", "intent": "done" if me.upgrade >= 0 else "", "plan": ()}
        writers = tuple(each._replace(counts=False) if each.number <= me.number else each for each in s.writers)
        then = s._replace(writers=writers, truth=me.value, replaced=frozenset()).put("writers", i, **ended)
        yield self._grace(then, ("done", i)).judged()

    def _last(self, me: Writer) -> str:
        return "mirror" if self._mirrored(me) and not self.has("a write reaches mirrors first") else "close"

    def _mirrored(self, me: Writer) -> bool:
        return bool(mirrors(me.plan)) and self.has("a write reaches mirrors")
