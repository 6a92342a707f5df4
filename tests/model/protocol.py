"""The protocol of batches, writes and epochs as a model: one record, its two collections, and everybody who touches them.

A step is one call that leaves the process, in the order of the code; between two steps anything may happen elsewhere.

| step | code |
|---|---|
| worker: claim | Registry.claim |
| read, vectors | Backfill.copy: store.get(old); Backfill._left, Backfill._from_archive: Registry.announced |
| writing, look, copy, copied | Backfill.copy: Registry.advance, Registry.intents, store.upsert(new), Registry.copied |
| compare, decide, removing | Backfill._decide: store.get(old), Registry.intents, store.get(new); Registry.advance |
| moved first | MovedFirst.step: Registry.asked_for, Registry.pending_batches, Registry.move_first |
| leave_note | Backfill.retire: Archive.leave |
| look_again, gone, remove, again | Backfill.retire: Registry.intents, store.delete(new), store.delete(old), Registry.retire |
| lost, leave | Worker._work: Registry.hand_back; Worker.run: Registry.retire_worker |
| writer: open, wait | Writes._announce: Registry.open_intents; Writes._alone_at: Registry.blocked, Registry.withdraw_intents |
| write, there, older | Writer._upsert: store.upsert(new), Reader.held, store.upsert(old); Writer._delete: both |
| mirror | Writer._upsert, Writer._delete: store.upsert(original) or store.delete(original); see mirror.py |
| close | Writes.announced: Registry.close_intents |
| reader: asks, looks, ends | CurrentPlan.refresh: Registry.refresh; Reader._merged: store.search of each leg; Reader._timely |
| conductor: deploy, serve | Conductor.deploy, Conductor.cut_over: Registry.activate |
| work, where it switches | Conductor._switch: Registry.activate |
| work, found, quiet | Conductor.complete: complete._list_late: Registry.add_late; complete._outwait_writes |
| verify | Conductor.verify |
| drop | Conductor.clean_up: store.drop(old) |
| order, back | Conductor.roll_back: Registry.supersede; Registry.activate, Conductor.list_work |

Time is order only, and a clock that is set changes nothing (clock.py). A call that was permitted arrives before its lease or its
deadline runs out, since none is permitted that might not (lease.py). A grace is over when no search is on its way that began
before it, and no plan is held from before it. The engine's staleness is a search that began that much earlier.

A write's value is a number, 0 for a record that is not there. Of a search only what can go wrong is kept: it shows a value that
was replaced, or it looked at each leg when the record was not there. Faults are a kill, a call that fails at its sender and
arrives later, and a suspension until the lease or the deadline is over; they happen at any step, `faults` of them, or any number.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tests.model.checker import Step
from tests.model.state import (
    ABSENT,
    DEPLOYED,
    FIRST,
    MIXED,
    SERVED,
    SWITCHED,
    UNREAD,
    Batch,
    Conductor,
    Reader,
    State,
    Worker,
    Writer,
    legs,
    mirrors,
)

#: Where a worker has asked the engine a moment ago and acts on the answer: one that goes back is away for longer than that.
ASKED = ("decide", "removing", "leave_note", "remove", "again")


def _forgotten(intent: str) -> str:
    """Return an intent as it is in a registry that has gone back."""
    return "expired" if intent == "open" else intent


@dataclass(frozen=True)
class Protocol:
    """The model; `without` names the steps that are left out."""

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

    def leaving_out(self, step: str) -> Protocol:
        """Return the same without a step, and with as few faults as show it: without one the states may be without end."""
        return replace(self, without=frozenset({step}), faults=2 if self.faults < 0 else self.faults)

    def initial(self) -> State:
        """Listed and deployed, or neither."""
        listed = Batch(state="pending") if self.first and not self.deploy else Batch()
        plan = SERVED if self.deploy else DEPLOYED
        return State(
            held=(self.first, ABSENT),
            plan=plan,
            batches=(listed, *[Batch()] * (self.rows - 1)),
            workers=(Worker(),) * self.workers,
            writers=tuple(Writer(value) for value in self.writes),
            reader=Reader(plan),
            conductors=(Conductor("deploy" if self.deploy else "work"),) * self.conductors,
            truth=self.first,
            replaced=frozenset(),
            others=self.others,
            faults=self.faults,
            sick=self.sick,
        )

    # --- what must hold -----------------------------------------------------------------------------------------------

    def broken(self, s: State) -> str:
        """Promises 1 and 2; MIXED is promise 5."""
        right, missed = s.right, s.reader.missed
        for plan in {s.plan, s.reader.plan}:
            for leg in legs(plan):
                if s.held[leg] and s.held[leg] not in right:
                    return f"a search by {plan} shows {s.held[leg]} in {leg}, which is not what was written last"
            if ABSENT not in right and not any(s.held[leg] for leg in legs(plan)):
                return f"a search by {plan} finds nothing"
        if missed >= 0 and not s.held[1 - missed]:
            return f"a search that looked at {missed} and then at {1 - missed} finds nothing"
        if self.clean_up and s.conductors[0].at == "done" and not set(legs(s.reader.plan)) <= set(legs(s.plan)):
            return f"a search by {s.reader.plan} asks for a collection that was dropped"
        return ""

    def ended(self, s: State) -> bool:
        """Promise 4: the new collection holds what was written last, the old one nothing, no process is at work."""
        return (
            all(each.state == "retired" for each in s.batches)
            and s.held[s.old] == ABSENT
            and s.held[s.new] in s.right - (s.replaced - {s.truth})
            and s.plan == ((s.new,) if self.cut_over else (s.new, s.old))
            and all(each.at == "end" for each in s.writers)
            and all(each.at in ("work", "done") for each in s.conductors)
            and not (s.late or s.aside)
        )

    # --- what may happen ----------------------------------------------------------------------------------------------

    def steps(self, s: State) -> Iterator[Step]:
        """Everybody's next step, and every fault; which worker is which is no difference."""
        for name, then, fault in self._everything(s):
            yield Step(name, then.ordered(), fault)

    def _everything(self, s: State) -> Iterator[Step]:
        for number, worker in enumerate(s.workers):
            yield from self._process(s, "worker", number, worker)
            if worker.call and s.faults:
                failed = s._replace(late=(*s.late, (*worker.call, ("batch", worker.batch)))).put("workers", number, call=())
                name = f"a worker is told that its {worker.at} failed, which is still on its way"
                yield self._fault(failed.put("workers", number, at="leave"), f"{name}, and leaves")
                if self.repeats:
                    yield self._fault(failed, f"{name}, and repeats it")
        for number, writer in enumerate(s.writers):
            yield from self._process(s, "writer", number, writer)
        for number, conductor in enumerate(s.conductors):
            for then in getattr(self, f"_{conductor.at}")(s, number, conductor):
                yield Step(f"conductor {number}: {conductor.at}", then)
        yield from self._engine(s)
        yield from self._clock(s)
        yield from self._reader(s) if self.searches else ()
        yield from self._others(s)
        yield from self._moved_first(s) if self.asked else ()
        yield from self._orders(s)
        yield from self._moments(s)

    def _moments(self, s: State) -> Iterator[Step]:
        """Copy the registry, or the engine, at any moment, and put the copy back at any later one."""
        if self.registry_goes_back:
            # Beside a writer, of what waits for its grace only: with every moment there are too many states to look at.
            waits = s.batches[0].state == "copied" and all(each.at == "claim" for each in s.workers)
            if s.registry is None and s.faults and (waits or not self.writes):
                intents = tuple(each.intent for each in s.writers)
                yield Step("a copy of the registry is made", s._replace(registry=(s.batches, s.moved, intents)))
            elif s.registry is not None:
                batches, moved, intents = s.registry
                writers = tuple(each._replace(intent=_forgotten(was)) for each, was in zip(s.writers, intents, strict=True))
                then = s._replace(
                    batches=tuple(b._replace(token=-1, lease="over" if b.lease else "") for b in batches), moved=moved,
                    workers=(Worker(),) * self.workers, writers=writers, registry=None,
                    forgot=bool(self.writes), conductors=(Conductor("work"),) * self.conductors,
                )  # fmt: skip
                quiet = not s.late and not any(each.call for each in s.workers)
                if quiet and all(each.at in ("open", "end") for each in s.writers):
                    yield self._fault(then, "the registry goes back, and all processes are started again")
        if self.engine_goes_back:
            if not s.engine:
                yield Step("a copy of the engine is made", s._replace(engine=s.held))
            elif s.faults and not s.late and not any(each.call or each.at in ASKED for each in s.workers):
                yield self._fault(s.searched()._replace(held=s.engine, engine=()), "the engine goes back")

    def _process(self, s: State, kind: str, number: int, me: Worker | Writer) -> Iterator[Step]:
        name = f"{kind}: {me.at}" if isinstance(me, Worker) else f"{kind} {number}: {me.at}"
        if me.call:
            yield Step(f"{name} arrives", s.stored(*me.call).put(f"{kind}s", number, call=(), at=self._after(me)))
        elif me.at != "end":
            for then in getattr(self, f"_{me.at}")(s, number, me):
                yield Step(name, then)
        if s.faults and me.at not in ("claim", "open", "end"):
            yield self._fault(self._killed(s, kind, number, me), f"{name}, where it is killed")

    def _after(self, me: Worker | Writer) -> str:
        if isinstance(me, Worker):
            return {"copy": "copied", "gone": "again", "remove": "again"}[me.at]
        if me.at == "mirror":
            return "write" if self.has("a write reaches mirrors first") else "close"
        if me.at == "write" and len(legs(me.plan)) > 1:
            return "there" if me.value else "older"
        return self._last(me)

    def _last(self, me: Writer) -> str:
        return "mirror" if self._mirrored(me) and not self.has("a write reaches mirrors first") else "close"

    def _mirrored(self, me: Writer) -> bool:
        return bool(mirrors(me.plan)) and self.has("a write reaches mirrors")

    def _killed(self, s: State, kind: str, number: int, me: Worker | Writer) -> State:
        whose = ("batch", me.batch) if isinstance(me, Worker) else ("writer", number)
        then = s._replace(late=(*s.late, (*me.call, whose))) if me.call else s
        if isinstance(me, Writer):
            return then.put("writers", number, at="end", call=())
        then = then.put("workers", number, Worker())
        return then.put("batches", me.batch, token=-1) if s.batches[me.batch].token == number else then

    def _fault(self, then: State, name: str) -> Step:
        left = max(then.faults - 1, -1)
        return Step(
            name, then._replace(faults=left, registry=then.registry if left else None), True
        )  # a copy is of no use any more

    # --- a worker -----------------------------------------------------------------------------------------------------

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

    # --- the registry, and time ---------------------------------------------------------------------------------------

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

    def _engine(self, s: State) -> Iterator[Step]:
        for at, (collection, value, whose) in enumerate(s.late):
            then = s._replace(late=s.late[:at] + s.late[at + 1 :])
            yield Step(f"a late call of {whose[0]} {whose[1]} arrives", then.stored(collection, value))

    # --- a writer -----------------------------------------------------------------------------------------------------

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

    # --- a reader, and other programs ---------------------------------------------------------------------------------

    def _reader(self, s: State) -> Iterator[Step]:
        reader = s.reader
        if reader.plan != s.plan:
            older = reader.older if reader.missed >= 0 else frozenset[tuple[str, int]]()
            yield Step("the reader asks for the plan", s._replace(reader=reader._replace(plan=s.plan, older=older)))
        if reader.missed >= 0:
            yield Step("the search ends, or is given up", s.searched())
        elif len(legs(reader.plan)) == 2 and ABSENT not in s.right:
            for leg in legs(reader.plan):
                if not s.held[leg]:
                    yield Step(f"a search looks at {leg}", s._replace(reader=reader._replace(missed=leg)))

    def _others(self, s: State) -> Iterator[Step]:
        """The steps of other programs that docs/how-to/other-programs.md allows: up to the last comparison of a record that no
        client has written."""
        late = any(b.state == "removing" for b in s.batches) or any(
            each.at in ("decide", "removing", "look_again", "gone", "remove", "again") for each in s.workers
        )
        written = any(each.at != "open" for each in s.writers)
        if s.others and not s.upgrade and not late and not written and (s.held[0] or not s.truth):
            then = s.stored(0, s.others[0])._replace(
                truth=s.others[0], replaced=s.replaced | {s.truth} - {ABSENT}, others=s.others[1:]
            )
            yield Step(f"another program writes {s.others[0]} into 0", then.judged(), True)

    # --- the conductor ------------------------------------------------------------------------------------------------

    def _deploy(self, s: State, c: int, _: Conductor) -> Iterator[State]:
        if self._may_change(s):
            yield s.put("conductors", c, at="work")._replace(plan=DEPLOYED)

    def _may_change(self, s: State) -> bool:
        """Registry.activate: no older write is open, no older claim lives."""
        writes = any(each.intent == "open" for each in s.writers) and self.has("an epoch waits for open writes")
        comparing = self.has("an epoch waits for a claim that compares")
        claims = any(b.lease == "live" and (comparing or b.state != "copied") for b in s.batches)
        return not writes and not (claims and self.has("an epoch waits for claims"))

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
