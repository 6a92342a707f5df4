"""The clients of a gallery, and the plans that they serve by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import delete, func, insert, select, update
from sqlalchemy.orm import Session

from rmvdb.registry import shared_queries
from rmvdb.registry.clock import clock
from rmvdb.registry.session import Database, transaction
from rmvdb.registry.tables import ClientRow, GalleryRow, PlanRow, TraceRow
from rmvdb.types import ServingPlan

#: Seconds for which a call counts a client as one of those that ask for the plan.
RECENT = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Serving:
    """The answer to a client that asks: the plan in force, and the announced one."""

    plan: ServingPlan
    next: ServingPlan | None
    #: How many clients of this gallery ask.
    clients: int = 1
    #: The gallery's trace, a number that only rises.
    trace: int = 0


class Clients(Database):
    """Clients: the epoch that each serves by, the newest that it can serve, and how long its searches take."""

    @transaction
    def refresh(
        self,
        s: Session,
        /,
        gallery: str,
        *,
        client: str,
        ready: int,
        trouble: str,
        holds: int = 0,
        searches: int = 0,
        p99_ms: float = 0.0,
        rescoring: Mapping[str, float] | None = None,
    ) -> Serving:
        """Record a client's heartbeat and return the plan in force and the announced one.

        `holds`: the epoch that it serves by, 0 for none yet. `ready`: the newest epoch that it can serve. `trouble`: why it can't
        serve the announced one. `searches`, `p99_ms`: how many searches count, and how long they take.
        `rescoring`: the figures of rescoring in them.
        """
        # Locked, so that no epoch changes before every reader sees the epoch that this client gets.
        row = shared_queries.named(s, GalleryRow, "gallery", gallery, lock={"read": True})
        reported = {"epoch": holds or row.epoch, "ready": ready, "trouble": trouble, "searches": searches, "p99_ms": p99_ms}
        reported["rescoring"] = rescoring and dict(rescoring)
        values = {"gallery_id": row.id, "seen_at": clock(), **reported}
        if not s.execute(update(ClientRow).where(ClientRow.id == client).values(**values)).rowcount:  # type: ignore[attr-defined]
            mine = PlanRow.gallery_id == row.id
            longest_age = select(func.max(PlanRow.max_age)).where(mine).scalar_subquery()  # an epoch waits no longer than that
            shared_queries.forget_silent(s, ClientRow, ClientRow.gallery_id == row.id, longer=longest_age)
            s.execute(insert(ClientRow).values(id=client, **values))
        trace = s.get(TraceRow, row.id)
        if holds > max(row.epoch, trace.reported if trace else 0):  # this registry has gone back: it doesn't know that epoch
            s.add(trace := trace or TraceRow(gallery_id=row.id, number=0))
            trace.reported = holds
        upcoming = shared_queries.plan(s, row, row.next_epoch) if row.next_epoch else None
        asking = select(func.count()).where(ClientRow.gallery_id == row.id, ClientRow.seen_at > clock() - RECENT)
        number = trace.number if trace else 0
        return Serving(plan=shared_queries.plan(s, row, row.epoch), next=upcoming, clients=s.scalar(asking) or 1, trace=number)

    @transaction
    def leave(self, s: Session, /, client: str) -> None:
        """Forget a client that ends well, so that no epoch waits for it."""
        s.execute(delete(ClientRow).where(ClientRow.id == client))

    @transaction
    def clients(self, s: Session, /, gallery_id: int) -> Sequence[ClientRow]:
        """Return the clients that asked within their plan's maximum age."""
        return s.scalars(shared_queries.live_clients(s, s.get_one(GalleryRow, gallery_id))).all()

    @transaction
    def slowest_client(self, s: Session, /, gallery: str, *, enough: int, within: float) -> ClientRow | None:
        """Return the client with the worst p99 of those that asked in the last `within` seconds and have `enough` searches."""
        mine = ClientRow.gallery_id == shared_queries.named(s, GalleryRow, "gallery", gallery).id
        # The plan's maximum age doesn't count here: if searches are slow, heartbeats are late, too.
        judged = select(ClientRow).where(mine, ClientRow.searches >= enough, ClientRow.seen_at > clock() - within)
        return s.scalar(judged.order_by(ClientRow.p99_ms.desc()).limit(1))
