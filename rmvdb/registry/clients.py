"""Who searches a gallery, and by which plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import delete, func, insert, select, update
from sqlalchemy.orm import Session

from rmvdb.registry import shared_queries
from rmvdb.registry.clock import clock
from rmvdb.registry.session import Database, transaction
from rmvdb.registry.tables import ClientRow, GalleryRow, PlanRow, TraceRow
from rmvdb.types import ServingPlan

#: Seconds within which a client counts as one of those that ask.
RECENT = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Serving:
    """What a client learns when it asks: the plan in force, and the one that is announced."""

    plan: ServingPlan
    next: ServingPlan | None
    #: How many clients ask as this one does.
    clients: int = 1
    #: The gallery's number that only rises, by this registry.
    trace: int = 0


class Clients(Database):
    """Clients: what they serve by and can serve, and how their searches fare."""

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
    ) -> Serving:
        """Tell which epoch this client serves by (0 for none yet) and can serve, and how its searches fare; learn the plan in
        force and the one that is announced."""
        # Locked, so that no epoch changes before everybody can read what this client was told.
        row = shared_queries.named(s, GalleryRow, "gallery", gallery, lock={"read": True})
        told = {"epoch": holds or row.epoch, "ready": ready, "trouble": trouble, "searches": searches, "p99_ms": p99_ms}
        values = {"gallery_id": row.id, "seen_at": clock(), **told}
        if not s.execute(update(ClientRow).where(ClientRow.id == client).values(**values)).rowcount:  # type: ignore[attr-defined]
            mine = PlanRow.gallery_id == row.id
            longest_age = select(func.max(PlanRow.max_age)).where(mine).scalar_subquery()  # nobody waits for one after that
            shared_queries.forget_silent(s, ClientRow, ClientRow.gallery_id == row.id, longer=longest_age)
            s.execute(insert(ClientRow).values(id=client, **values))
        trace = s.get(TraceRow, row.id)
        if holds > max(row.epoch, trace.reported if trace else 0):  # of that one this registry, which went back, knows nothing
            s.add(trace := trace or TraceRow(gallery_id=row.id, number=0))
            trace.reported = holds
        upcoming = shared_queries.plan(s, row, row.next_epoch) if row.next_epoch else None
        asking = select(func.count()).where(ClientRow.gallery_id == row.id, ClientRow.seen_at > clock() - RECENT)
        number = trace.number if trace else 0
        return Serving(plan=shared_queries.plan(s, row, row.epoch), next=upcoming, clients=s.scalar(asking) or 1, trace=number)

    @transaction
    def leave(self, s: Session, /, client: str) -> None:
        """A client that ends well says so, and nobody waits for it."""
        s.execute(delete(ClientRow).where(ClientRow.id == client))

    @transaction
    def clients(self, s: Session, /, gallery_id: int) -> Sequence[ClientRow]:
        """The clients seen within their plan's maximum age."""
        return s.scalars(shared_queries.live_clients(s, s.get_one(GalleryRow, gallery_id))).all()

    @transaction
    def slowest_client(self, s: Session, /, gallery: str, *, enough: int, within: float) -> ClientRow | None:
        """The client with the worst p99, of those seen within so many seconds whose p99 is one of `enough` searches."""
        mine = ClientRow.gallery_id == shared_queries.named(s, GalleryRow, "gallery", gallery).id
        # Not only those seen within their plan's maximum age: where searches are slow, heartbeats come late, too.
        judged = select(ClientRow).where(mine, ClientRow.searches >= enough, ClientRow.seen_at > clock() - within)
        return s.scalar(judged.order_by(ClientRow.p99_ms.desc()).limit(1))
