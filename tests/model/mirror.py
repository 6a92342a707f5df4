"""An upgrade that keeps the original: protocol.py with a third collection, a mirror while 0, its copy, is emptied.

| step | code |
|---|---|
| writer: mirror | Writer._upsert, Writer._delete: plan.mirrors |
| conductor: deploy, copying, rest | deploy._copy_original: Registry.activate, Mirror.copy, one grace |
| served, expired_writes | Conductor.deploy: Registry.activate; Registry.expired_writes, Mirror.finish |
| agree | Conductor.complete: Mirror.agree |
| back, drop | deploy._serve_original: Registry.activate; Conductor.clean_up |
| alone, drop | Conductor.clean_up: Registry.begin_clean_up, Registry.activate |
| hand: announce, hold | Writes.alone_at, Writes.announced: Registry.open_intents, Registry.blocked |
| differ, repair, withdraw | Mirror._repair, Mirror._take_in: store.get of both, store.upsert(copy), Registry.withdraw_intents |
| look_in_original, out_new, out_copy | Mirror._take_out: store.get(original), store.delete of each |
| taken_out | Writes.announced: Registry.close_intents |

The conductor's own writes are those of one more writer, its hand. Where only one collection is searched, what a search has shown
of a write that was cut off is not taken back, by a roll back neither.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tests.model.checker import Step
from tests.model.protocol import Protocol
from tests.model.state import ABSENT, UNREAD, Batch, Conductor, Reader, State, Worker, Writer, legs

COPY, NEW, ORIGINAL = 0, 1, 2
#: The plans, in their order; the last one follows a clean-up or, where the original is searched again, a roll back.
BEFORE, COPYING, SERVING, FINAL, ALONE = (ORIGINAL,), (ORIGINAL, ~COPY), (NEW, COPY, ~ORIGINAL), (NEW, ~ORIGINAL), (NEW,)


@dataclass(frozen=True)
class Mirrored(Protocol):
    """The model, from before the deployment to the clean-up, with a roll back at any time between."""

    cut_over: bool = True
    roll_back: bool = True
    clean_up: bool = True

    def initial(self) -> State:
        """Nothing is registered."""
        return State(
            held=(ABSENT, ABSENT, self.first),
            plan=BEFORE,
            batches=(Batch(),) * self.rows,
            workers=(Worker(),) * self.workers,
            writers=(*(Writer(value) for value in self.writes), Writer(UNREAD, at="end")),
            reader=Reader(BEFORE),
            conductors=(Conductor("deploy"),),
            truth=self.first,
            replaced=frozenset(),
            others=self.others,
            faults=self.faults,
        )

    def broken(self, s: State) -> str:
        """Besides: what has just been put into the copy may not be seen."""
        if s.unseen and legs(s.plan)[-1] == COPY and not s.held[NEW] and ABSENT not in s.right:
            return "a search that sees what was there a moment ago finds nothing"
        return super().broken(s)

    def ended(self, s: State) -> bool:
        """One collection is left, and holds what was written last."""
        left = s.held[legs(s.plan)[0]]
        return (
            s.conductors[0].at == "done"
            and all(each.at == "end" for each in s.writers)
            and left in s.right - (s.replaced - {s.truth})
            and not s.late
        )

    def _everything(self, s: State) -> Iterator[Step]:
        yield from super()._everything(s)
        if s.unseen:
            yield Step("what was put into the copy is seen", s._replace(unseen=False))
        shown = [each.number for each in s.writers if each.counts and s.held[NEW] == each.value]
        if s.plan == FINAL and s.held[NEW] != s.truth and shown:
            writers = tuple(each._replace(counts=each.counts and each.number >= min(shown)) for each in s.writers)
            then = s._replace(writers=writers, truth=s.held[NEW], replaced=frozenset())
            yield Step(f"a search shows {s.held[NEW]}", then.judged())

    # --- the conductor ------------------------------------------------------------------------------------------------

    def _deploy(self, s: State, c: int, _: Conductor) -> Iterator[State]:
        if self._may_change(s):
            plan = COPYING if self.has("the copy is a mirror while it is made") else BEFORE
            yield s.put("conductors", c, at="copying")._replace(plan=plan)

    def _copying(self, s: State, c: int, _: Conductor) -> Iterator[State]:
        if self._idle(s):
            equal = s.held[COPY] == s.held[ORIGINAL]
            yield s.put("conductors", c, at="rest") if equal else self._by_hand(s, UNREAD)

    def _rest(self, s: State, c: int, _: Conductor) -> Iterator[State]:
        if not s.unseen or not self.has("a grace lies between the copy and its service"):
            yield s.put("conductors", c, at="served")

    def _served(self, s: State, c: int, _: Conductor) -> Iterator[State]:
        if self._may_change(s):
            again = self.has("what was cut off while the copy was made is copied again")
            yield s.put("conductors", c, at="expired_writes" if again else "work")._replace(plan=SERVING)

    def _expired_writes(self, s: State, c: int, _: Conductor) -> Iterator[State]:
        if self._idle(s):
            differs = s.held[COPY] != s.held[ORIGINAL] and any(each.plan == COPYING for each in s.writers)
            yield self._by_hand(s, UNREAD) if differs else s.put("conductors", c, at="work")

    def _quiet(self, s: State, c: int, me: Conductor) -> Iterator[State]:
        for then in super()._quiet(s, c, me):
            yield then.put("conductors", c, at="agree") if then.conductors[c].at == "verify" else then

    def _agree(self, s: State, c: int, _: Conductor) -> Iterator[State]:
        searched, kept = s.held[COPY] or s.held[NEW], s.held[ORIGINAL]
        if not self._idle(s):
            return
        if kept and not searched and not self._deleted(s) and self.has("what others inserted into the original is taken in"):
            yield self._by_hand(s, UNREAD)
        elif searched and not kept and self.has("what others deleted from the original is taken out"):
            yield self._by_hand(s, ABSENT)
        else:
            yield s.put("conductors", c, at="found" if self._unmade(s) else "verify")

    @staticmethod
    def _deleted(s: State) -> bool:
        """Registry.last_done: a client has deleted the record since, so whatever is in the original stays out."""
        done = [each for each in s.writers[:-1] if each.upgrade == s.upgrade and each.intent == "done"]
        return bool(done) and max(done, key=lambda each: each.number).value == ABSENT

    def _unmade(self, s: State) -> bool:
        """Something is left to be embedded."""
        return s.held[COPY] != ABSENT

    def _serve(self, s: State, c: int, _: Conductor) -> Iterator[State]:
        if self._may_change(s):
            yield self._grace(s.put("conductors", c, at="alone")._replace(plan=FINAL), ("served", c))

    def _alone(self, s: State, c: int, _: Conductor) -> Iterator[State]:
        if ("served", c) not in s.reader.older and self._may_change(s):
            yield s.put("conductors", c, at="drop")._replace(plan=ALONE, superseded=True)

    def _drop(self, s: State, c: int, _: Conductor) -> Iterator[State]:
        if ("served", c) not in s.reader.older or not self.has("a grace lies between a roll back and the clean-up"):
            held = tuple(value if at in s.plan else ABSENT for at, value in enumerate(s.held))
            yield s._replace(held=held).put("conductors", c, at="done")

    def _orders(self, s: State) -> Iterator[Step]:
        if not s.superseded and s.plan != BEFORE:
            yield Step("a roll back is ordered", s._replace(superseded=True).put("conductors", 0, at="back", waits=()), True)

    def _back(self, s: State, c: int, _: Conductor) -> Iterator[State]:
        if self._may_change(s):
            yield self._grace(s.put("conductors", c, at="drop")._replace(plan=BEFORE), ("served", c))

    def _open(self, s: State, i: int, me: Writer) -> Iterator[State]:
        if s.reader.missed >= 0:  # no epoch waits for a client suspended in mid-search; it asks again before the next one
            s = s._replace(reader=s.reader._replace(plan=s.plan))
        yield from super()._open(s, i, me)

    # --- its hand -----------------------------------------------------------------------------------------------------

    @staticmethod
    def _idle(s: State) -> bool:
        """Wait, as every writer does, for the writes of a killed conductor."""
        return s.writers[-1].at == "end" and s.writers[-1].intent != "open"

    def _by_hand(self, s: State, value: int) -> State:
        return s.put("writers", len(s.writers) - 1, Writer(value, at="announce"))

    def _announce(self, s: State, i: int, me: Writer) -> Iterator[State]:
        if me.value == UNREAD and not self.has("a copy is made under an announcement"):
            yield s.put("writers", i, at="differ")
            return
        for opened in self._open(s, i, me):
            yield opened.put("writers", i, at="hold", counts=False, plan=())

    def _hold(self, s: State, i: int, me: Writer) -> Iterator[State]:
        if self._blocked(s, me):
            yield s.put("writers", i, Writer(UNREAD, at="end"))
        else:
            yield s.put("writers", i, at="differ" if me.value == UNREAD else "look_in_original")

    def _differ(self, s: State, i: int, _: Writer) -> Iterator[State]:
        found, copying = s.held[ORIGINAL], s.conductors[0].at in ("copying", "expired_writes")
        done = s.held[COPY] == found if copying else not found or s.held[COPY] or s.held[NEW] or self._deleted(s)
        yield s.put("writers", i, at="withdraw" if done else "repair", value=found)

    def _repair(self, s: State, i: int, me: Writer) -> Iterator[State]:
        if me.intent == "open" or not self.has("a copy is made under an announcement"):
            yield s.put("writers", i, call=(COPY, me.value))
        else:
            yield s.put("writers", i, Writer(UNREAD, at="end"))

    def _withdraw(self, s: State, i: int, _: Writer) -> Iterator[State]:
        yield s.put("writers", i, Writer(UNREAD, at="end"))

    def _look_in_original(self, s: State, i: int, _: Writer) -> Iterator[State]:
        if s.held[ORIGINAL] and self.has("taking out looks again once it is announced"):
            yield s.put("writers", i, Writer(UNREAD, at="end"))
        else:
            yield s.put("writers", i, at="out_new")

    def _out_new(self, s: State, i: int, _: Writer) -> Iterator[State]:
        yield self._put(s, i, NEW, ABSENT)

    def _out_copy(self, s: State, i: int, _: Writer) -> Iterator[State]:
        yield self._put(s, i, COPY, ABSENT)

    def _taken_out(self, s: State, i: int, me: Writer) -> Iterator[State]:
        done = me.intent == "open"
        yield self._grace(s.put("writers", i, at="end", intent="done" if done else me.intent), ("done", i))

    def _after(self, me: Worker | Writer) -> str:
        own = {"repair": "withdraw", "out_new": "out_copy", "out_copy": "taken_out"}
        return own[me.at] if me.at in own else super()._after(me)

    # --- other programs -----------------------------------------------------------------------------------------------

    def _others(self, s: State) -> Iterator[Step]:
        """They know the original alone, and insert into it or delete from it: seen at the latest when the upgrade ends."""
        agreed = s.conductors[0].at in ("verify", "serve", "alone", "drop", "done", "back") or s.superseded
        written = any(each.at != "open" for each in s.writers[:-1])
        if s.others and not agreed and not written:
            then = s.stored(ORIGINAL, s.others[0])._replace(
                truth=s.others[0], replaced=s.replaced | {s.truth}, others=s.others[1:]
            )
            yield Step(f"another program writes {s.others[0]} into the original", then.judged(), True)
