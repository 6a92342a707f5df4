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
from dataclasses import dataclass

from tests.model.checker import Step
from tests.model.conductors import ConductorSteps
from tests.model.state import ABSENT, DEPLOYED, SERVED, Batch, Conductor, Reader, State, Worker, Writer, legs
from tests.model.workers import WorkerSteps
from tests.model.writers import WriterSteps

#: Where a worker has asked the engine a moment ago and acts on the answer: one that goes back is away for longer than that.
ASKED = ("decide", "removing", "leave_note", "remove", "again")


def _forgotten(intent: str) -> str:
    """Return an intent as it is in a registry that has gone back."""
    return "expired" if intent == "open" else intent


@dataclass(frozen=True)
class Protocol(WorkerSteps, WriterSteps, ConductorSteps):
    """The model; `without` names the steps that are left out."""

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

    # --- what must hold -------------------------------------------------------------------------------------------------

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

    # --- what may happen ------------------------------------------------------------------------------------------------

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

    def _killed(self, s: State, kind: str, number: int, me: Worker | Writer) -> State:
        whose = ("batch", me.batch) if isinstance(me, Worker) else ("writer", number)
        then = s._replace(late=(*s.late, (*me.call, whose))) if me.call else s
        if isinstance(me, Writer):
            return then.put("writers", number, at="end", call=())
        then = then.put("workers", number, Worker())
        return then.put("batches", me.batch, token=-1) if s.batches[me.batch].token == number else then

    def _engine(self, s: State) -> Iterator[Step]:
        for at, (collection, value, whose) in enumerate(s.late):
            then = s._replace(late=s.late[:at] + s.late[at + 1 :])
            yield Step(f"a late call of {whose[0]} {whose[1]} arrives", then.stored(collection, value))

    # --- a reader, and other programs -----------------------------------------------------------------------------------

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
