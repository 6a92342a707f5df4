"""The steps of a worker: see protocol.py."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tests.model.registry import RegistryRules
from tests.model.state import ABSENT, MIXED, UNREAD, Batch, State, Worker


@dataclass(frozen=True)
class WorkerSteps(RegistryRules):
    """From the claim of a batch until it is retired, lost or left."""

    def _claim(self, s: State, w: int, _: Worker) -> Iterator[State]:
        for at, b in enumerate(s.batches):
            free = b.lease != "live" or not self.has("a takeover waits for the end of a lease")
            grace = ("copied", at) in s.reader.older and self.has("a grace lies between copied and removed")
            if s.superseded or b.upgrade != s.upgrade:
                continue
            mine = s.put("batches", at, token=w, lease="live")
            me = Worker(batch=at, upgrade=s.upgrade, decided=b.decided)
            if b.state == "pending" or (b.state in ("claimed", "writing") and free):
                yield mine.put("batches", at, state="claimed").put("workers", w, me, at="read")
            elif b.state == "copied" and free and not grace:
                yield mine.put("workers", w, me, at="compare")
            elif b.state == "removing" and free:
                lost = self.engine_goes_back and b.decided == "remove" and s.held[1 - me.upgrade] == ABSENT
                if lost and self.has("new is asked before the record leaves old"):  # Backfill._decide_again
                    me = me._replace(decided="again")
                yield mine.put("workers", w, me, at=self._removal(me.decided))

    def _removal(self, decided: str) -> str:
        remove = "leave_note" if self.registry_goes_back else "remove"
        return {"gone": "look_again", "remove": remove}.get(decided, "again")

    def _leave_note(self, s: State, w: int, me: Worker) -> Iterator[State]:
        b = s.batches[me.batch]
        left = max(b.again, s.left if s.noted_by == b.root else b.again)  # one that was suspended adds its note to the others
        yield s._replace(left=left, noted_by=b.root).put("workers", w, at="remove")

    def _read(self, s: State, w: int, me: Worker) -> Iterator[State]:
        was, early = s.held[me.upgrade], not self.has("a worker announces, then looks")
        at = "vectors" if was and s.batches[me.batch].origin else "writing"
        yield s.put("workers", w, at=at, was=was, vector=was, announced=early and self._deciding(s, me.upgrade) >= 0)

    def _vectors(self, s: State, w: int, me: Worker) -> Iterator[State]:
        half_made = self.has("half-made writes override the archive")
        written = s.undone == "done" or (half_made and (s.undone or self._deciding(s, me.upgrade, expired=True) >= 0))
        b = s.batches[me.batch]
        left = b.left or (b.archive == UNREAD and not written and s.held[1 - me.upgrade] != ABSENT)
        vector = ABSENT if left and not written else me.was if written or b.origin == me.was else MIXED
        yield s.put("workers", w, at="writing", vector=vector, left=left)

    def _writing(self, s: State, w: int, me: Worker) -> Iterator[State]:
        b = s.batches[me.batch]
        earlier = max(b.archive, ABSENT) if self.has("the archive keeps what an earlier try read") else ABSENT
        if self.registry_goes_back and self.has("the archive is asked for what the registry forgot"):
            earlier = earlier or (s.archived if s.archived_by == b.root else ABSENT)
        state = "writing" if self.has("a worker announces that it writes") else b.state
        moved = s.put("batches", me.batch, state=state, archive=me.was or earlier, left=me.left)
        if self.registry_goes_back:
            moved = moved.put("batches", me.batch, found=bool(me.was))
        moved = moved.put("workers", w, at="look", was=UNREAD)
        if self.registry_goes_back:
            moved = moved._replace(archived=me.was, archived_by=b.root, copies=s.copies | {me.was}) if me.was else moved
        yield self._if_mine(s, w, moved)

    def _look(self, s: State, w: int, me: Worker) -> Iterator[State]:
        announced = me.announced
        if self.has("a worker announces, then looks"):
            announced = self._deciding(s, me.upgrade) >= 0 and self.has("a worker looks at the intents")
        copy = me.vector and not announced and not s.sick
        yield s.put("workers", w, at="copy" if copy else "copied", announced=announced)

    def _copy(self, s: State, w: int, me: Worker) -> Iterator[State]:
        yield self._sent(s, w, 1 - me.upgrade, me.vector)

    def _copied(self, s: State, w: int, me: Worker) -> Iterator[State]:
        aside = s.sick and not me.announced and me.vector != ABSENT
        uncopied = me.announced and self.has("what was left to a client is kept")
        ended = {"state": "copied", "lease": "", "token": -1, "uncopied": uncopied}
        then = s.put("batches", me.batch, **ended, empty=aside and self.has("a quarantined record leaves its batch"))
        then = self._grace(then._replace(aside=s.aside or aside), ("copied", me.batch))
        yield self._if_mine(s, w, then.put("workers", w, Worker()))

    def _compare(self, s: State, w: int, me: Worker) -> Iterator[State]:
        new = s.held[1 - me.upgrade] if self.engine_goes_back else UNREAD
        yield s.put("workers", w, at="decide", was=s.held[me.upgrade], new=new)

    def _decide(self, s: State, w: int, me: Worker) -> Iterator[State]:
        # Both collections are read at one moment, that of the comparison: the new one may be shown as it was then, or as it is.
        for new in {me.new, s.held[1 - me.upgrade]} if self.engine_goes_back else (UNREAD,):
            decided = self._record_fate(s, s.batches[me.batch], me._replace(new=new))
            yield s.put("workers", w, at="removing", was=UNREAD, new=UNREAD, decided=decided)

    def _record_fate(self, s: State, b: Batch, me: Worker) -> str:
        decides = self._deciding(s, me.upgrade)
        if b.empty:
            return ""
        if decides >= 0:
            grace = ("done", decides) in s.reader.older and self.has("the grace of a write counts from the write")
            if s.writers[decides].intent == "open":
                if self.has("a record whose write is open stays in old"):
                    return "again"
            else:
                return "again" if grace else "remove"
        if b.uncopied:
            return "again"
        if b.archive == ABSENT:
            return "again" if me.was else ""
        if me.was == b.archive or not self.has("the old record is compared before it is removed"):
            asks = self.engine_goes_back and self.has("new is asked before the record leaves old")
            return "again" if asks and me.new == ABSENT else "remove"
        noted = s.noted_by == b.root and (
            s.left >= b.again
            or (s.left >= 0 and not b.found and self.has("what left before a batch came again has left for it, too"))
        )
        if noted and self.has("what leaves is noted in the archive first"):
            return "remove"
        if me.was:
            return "again"
        held = s.held[1 - me.upgrade]
        spared = held and held not in s.copies and self.has("what no batch copied is not taken from new")
        return "remove" if self.registry_goes_back and spared else "gone"

    def _removing(self, s: State, w: int, me: Worker) -> Iterator[State]:
        then = s
        if self.has("a decision is written down before it is carried out"):
            then = s.put("batches", me.batch, state="removing", decided=me.decided, uncopied=False)
        yield self._if_mine(s, w, then.put("workers", w, at=self._removal(me.decided)))

    def _look_again(self, s: State, w: int, me: Worker) -> Iterator[State]:
        if self._deciding(s, me.upgrade) < 0 or not self.has("a worker looks at the intents before it takes from new"):
            yield s.put("workers", w, at="gone")
        else:
            yield s.put("workers", w, at="again", decided="again" if self.has("what was not taken from new comes again") else "")

    def _gone(self, s: State, w: int, me: Worker) -> Iterator[State]:
        if self.has("what others deleted is taken from new"):
            yield self._sent(s, w, 1 - me.upgrade, ABSENT)
        else:
            yield s.put("workers", w, at="again")

    def _remove(self, s: State, w: int, me: Worker) -> Iterator[State]:
        yield self._sent(s, w, me.upgrade, ABSENT)

    def _again(self, s: State, w: int, me: Worker) -> Iterator[State]:
        b = s.batches[me.batch]
        row = Batch(upgrade=b.upgrade)
        if me.decided == "again" and self.has("what changed comes again"):
            archive = b.archive if self.has("a batch that comes again keeps its archive") else UNREAD
            again = b.again + 1 if self.registry_goes_back else 0
            row = row._replace(state="pending", archive=archive, origin=b.origin, left=b.left, again=again, root=b.root)
        moved = s.moved if me.decided != "remove" else ABSENT if b.left else b.archive
        yield self._if_mine(s, w, s._replace(moved=moved).put("batches", me.batch, row).put("workers", w, Worker()))

    def _lost(self, s: State, w: int, me: Worker) -> Iterator[State]:
        b = s.batches[me.batch]
        if b.token == w:
            keeps = b.state in ("writing", "removing") and self.has("what a worker leaves half-done keeps its lease")
            state = "pending" if b.state == "claimed" else b.state
            token = w if b.state == "writing" and not self.has("no heartbeat holds what was left") else -1
            s = s.put("batches", me.batch, state=state, lease=b.lease if keeps else "", token=token if keeps else -1)
        yield s.put("workers", w, Worker())

    _leave = _lost

    def _if_mine(self, s: State, w: int, then: State) -> State:
        """Registry._move: on the token, or LeaseLost."""
        mine = s.batches[s.workers[w].batch].token == w or not self.has("a claim has a token")
        return then if mine else s.put("workers", w, at="lost")

    def _sent(self, s: State, w: int, collection: int, value: int) -> State:
        """Worker._in_time, asked before a call leaves."""
        me = s.workers[w]
        b = s.batches[me.batch]
        mine = b.token == w and b.lease == "live"
        if mine or not self.has("a worker's call asks for its lease"):
            return s.put("workers", w, call=(collection, value))
        return s.put("workers", w, at="lost")
