"""An upgrade whose copy is lifted and then re-embedded in place: mirror.py with one collection for 0, which stays empty, and 1.

| step | code |
|---|---|
| copying, differ, repair | Mirror.copy, Mirror.finish: what it lifts |
| read, compare, remove | Backfill.copy, Backfill.retire: nothing leaves |
| work, quiet: unmade | complete._list_late: late._late_in_place |

A value that is still lifted is the value and `LIFTED`; it shows the same record, further away.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tests.model.mirror import NEW, ORIGINAL, Mirrored
from tests.model.state import ABSENT, LATER, UNREAD, Batch, Conductor, State, Worker, Writer, legs

LIFTED = 10
#: Before and after the cut-over the same is searched; LATER tells the two apart.
COPYING, SERVING = (ORIGINAL, ~NEW), (NEW, ~ORIGINAL, LATER)


def lifted(value: int) -> int:
    """Return the vector that h makes of a record of the original."""
    return value + LIFTED if value else ABSENT


def own(value: int) -> int:
    """Return the vector that the new model makes of it."""
    return value % LIFTED if value > 0 else value


def shown(s: State) -> State:
    """As searches show it, who cannot tell one from the other."""
    return s._replace(held=tuple(map(own, s.held)))


@dataclass(frozen=True)
class InPlace(Mirrored):
    """The model, from before the deployment to the clean-up, with a roll back at any time between."""

    def broken(self, s: State) -> str:
        """As mirror.py, of what is searched once it is served."""
        if s.unseen and legs(s.plan) == (NEW,) and ABSENT not in s.right:
            return "a search that sees what was there a moment ago finds nothing"
        return super().broken(shown(s))

    def _unmade(self, s: State) -> bool:
        """No batch has done with the record, and no client's write of it was done."""
        return s.held[NEW] != ABSENT and not s.moved and self._done_write(s) is None

    def _done_write(self, s: State) -> Writer | None:
        """Registry.last_done."""
        done = [each for each in s.writers if each.upgrade == s.upgrade and each.intent == "done"]
        return max(done, key=lambda each: each.number, default=None)

    # --- a worker -----------------------------------------------------------------------------------------------------

    def _read(self, s: State, w: int, me: Worker) -> Iterator[State]:
        was, early = s.held[NEW], not self.has("a worker announces, then looks")
        announced = early and self._deciding(s, me.upgrade) >= 0
        yield s.put("workers", w, at="writing", was=was, vector=own(was), announced=announced)

    def _compare(self, s: State, w: int, me: Worker) -> Iterator[State]:
        yield s.put("workers", w, at="decide", was=s.held[NEW])

    def _record_fate(self, s: State, b: Batch, me: Worker) -> str:
        return super()._record_fate(s, b._replace(archive=own(b.archive)), me)

    def _remove(self, s: State, w: int, me: Worker) -> Iterator[State]:
        yield s.put("workers", w, at="again")

    # --- the conductor ------------------------------------------------------------------------------------------------

    def _deploy(self, s: State, c: int, me: Conductor) -> Iterator[State]:
        for then in super()._deploy(s, c, me):
            yield then._replace(plan=COPYING) if len(then.plan) > 1 else then

    def _copying(self, s: State, c: int, _: Conductor) -> Iterator[State]:
        if self._idle(s):
            equal = s.held[NEW] == lifted(s.held[ORIGINAL])
            yield s.put("conductors", c, at="rest") if equal else self._by_hand(s, UNREAD)

    def _served(self, s: State, c: int, me: Conductor) -> Iterator[State]:
        for then in super()._served(s, c, me):
            yield then._replace(plan=SERVING)

    def _expired_writes(self, s: State, c: int, _: Conductor) -> Iterator[State]:
        if self._idle(s):
            differs = s.held[NEW] != lifted(s.held[ORIGINAL]) and any(each.plan == COPYING for each in s.writers)
            repairs = differs and not self._done_write(s)
            yield self._by_hand(s, UNREAD) if repairs else s.put("conductors", c, at="work")

    def _work(self, s: State, c: int, me: Conductor) -> Iterator[State]:
        retired = all(b.state == "retired" for b in s.batches)
        if self._unmade(s) and retired:
            yield s.put("conductors", c, at="found")
        elif not self._unmade(s):
            yield from super()._work(s, c, me)

    def _quiet(self, s: State, c: int, me: Conductor) -> Iterator[State]:
        if self._unmade(s):
            yield s.put("conductors", c, at="found", waits=())
        else:
            yield from super()._quiet(s, c, me)

    def _verify(self, s: State, c: int, me: Conductor) -> Iterator[State]:
        for then in super()._verify(s._replace(moved=own(s.moved)), c, me):
            yield then._replace(moved=s.moved)

    # --- its hand -----------------------------------------------------------------------------------------------------

    def _differ(self, s: State, i: int, me: Writer) -> Iterator[State]:
        found, at = s.held[ORIGINAL], s.conductors[0].at
        copying = at in ("copying", "expired_writes")
        equal = s.held[NEW] == lifted(found) if copying else not found or s.held[NEW] or self._deleted(s)
        since = (
            at == "expired_writes" and self._done_write(s) and self.has("what was written since the copy is served is left alone")
        )
        yield s.put("writers", i, at="withdraw" if equal or since else "repair", value=lifted(found))

    def _repair(self, s: State, i: int, me: Writer) -> Iterator[State]:
        for then in super()._repair(s, i, me):
            call = then.writers[i].call
            yield then.put("writers", i, call=(NEW, call[1])) if call else then
