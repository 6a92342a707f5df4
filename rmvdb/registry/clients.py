"""The clients of a gallery, and the plans that they serve by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import BigInteger, Connection, Update, delete, func, insert, literal_column, select, update
from sqlalchemy.orm import Session

from rmvdb.registry import shared_queries
from rmvdb.registry.clock import NOISE, clock
from rmvdb.registry.clock import columns as clock_columns
from rmvdb.registry.session import Database, one_statement, transaction
from rmvdb.registry.tables import ClientRow, GalleryRow, PlanRow, TraceRow
from rmvdb.timing import seconds_since_boot
from rmvdb.types import ServingPlan

#: In SQL: after RETURNING, SQLAlchemy leaves out the names of SQLite's tables.
_TRACE = literal_column("(SELECT number FROM traces WHERE traces.gallery_id = clients.gallery_id)", BigInteger)


@dataclass(frozen=True, kw_only=True, slots=True)
class Serving:
    """The answer to a client that asks: the plan in force, and the announced one."""

    plan: ServingPlan
    next: ServingPlan | None
    #: The gallery's trace, a number that only rises.
    trace: int = 0
    #: When the gallery was added. Another one may have got its name since.
    added: float = 0.0


class Clients(Database):
    """Clients: the epoch that each serves by, the newest that it can serve, and how long its searches take."""

    def refresh(
        self,
        gallery: str,
        *,
        client: str,
        ready: int,
        trouble: str,
        holds: int = 0,
        searches: int = 0,
        p99_ms: float = 0.0,
        rescoring: Mapping[str, float] | None = None,
        known: Serving | None = None,
        added: float | None = None,
    ) -> Serving:
        """Record a client's heartbeat and return the plan in force and the announced one.

        `holds`: the epoch that it serves by, 0 for none yet. `ready`: the newest epoch that it can serve. `trouble`: why it can't
        serve the announced one. `searches`, `p99_ms`: how many searches count, and how long they take.
        `rescoring`: the figures of rescoring in them. `known`: the last answer. If it still holds, this is a single statement.
        `added`: when the gallery was added that the client serves; None if it serves none yet.
        """
        report = {"ready": ready, "trouble": trouble, "searches": searches, "p99_ms": p99_ms}
        report["rescoring"] = rescoring and dict(rescoring)
        same = self._confirmed(gallery, client, known, report) if known and known.plan.epoch == holds else None
        if same is None:
            return self._refreshed(gallery, client, holds, report, added)
        self._keep_time()
        return same

    @one_statement
    def _confirmed(
        self, c: Connection, /, gallery: str, client: str, known: Serving, report: Mapping[str, Any]
    ) -> Serving | None:
        """Record the heartbeat, and return the answer. None if the plan in force or the announced one has changed."""
        if (seen_at := self._time.counting()) is None:
            return None
        asked = seconds_since_boot()
        row = GalleryRow.__table__.c
        upcoming = known.next.epoch if known.next else None
        same = (row.name == gallery, row.epoch == known.plan.epoch, row.next_epoch.is_not_distinct_from(upcoming))
        # Locked, so that no epoch changes before every reader sees this heartbeat.
        unchanged = select(row.id).where(*same).with_for_update(read=True).scalar_subquery()
        mine = (ClientRow.id == client, ClientRow.gallery_id == unchanged)
        # The noise of the clocks is added, so that the row is never older than the request.
        values = {"epoch": known.plan.epoch, "seen_at": seen_at + NOISE, **report}
        read = (_TRACE, *clock_columns(), *self._columns())
        found = c.execute(update(ClientRow).where(*mine).values(**values).returning(*read)).one_or_none()
        if found is None:
            return None
        number, clocks, server = found[0], found[1:6], found[6:]
        self._expect(*server)
        right = (number or 0) >= known.trace and self._time.confirm(clocks, asked=asked)
        return replace(known, trace=number or 0) if right else None

    def _keep_time(self) -> None:
        """Set the anchor of the registry's time if it is old."""
        if (statement := self._time.moved_on()) is not None:
            self._send(statement)

    @one_statement
    def _send(self, c: Connection, /, statement: Update) -> None:
        c.execute(statement)

    @transaction
    def _refreshed(
        self, s: Session, /, gallery: str, client: str, holds: int, report: Mapping[str, Any], added: float | None
    ) -> Serving:
        # Locked, so that no epoch changes before every reader sees the epoch that this client gets.
        row = shared_queries.named(s, GalleryRow, "gallery", gallery, lock={"read": True})
        values = {"gallery_id": row.id, "seen_at": clock(), "epoch": holds or row.epoch, **report}
        if not s.execute(update(ClientRow).where(ClientRow.id == client).values(**values)).rowcount:  # type: ignore[attr-defined]
            mine = PlanRow.gallery_id == row.id
            longest_age = select(func.max(PlanRow.max_age)).where(mine).scalar_subquery()  # an epoch waits no longer than that
            shared_queries.forget_silent(s, ClientRow, ClientRow.gallery_id == row.id, longer=longest_age)
            s.execute(insert(ClientRow).values(id=client, **values))
        trace = s.get(TraceRow, row.id)
        same = added is None or added == row.created_at  # the gallery may have been removed, and another one added
        if same and holds > max(row.epoch, trace.reported if trace else 0):  # this registry has gone back: it knows no such epoch
            s.add(trace := trace or TraceRow(gallery_id=row.id, number=0))
            trace.reported = holds
        upcoming = shared_queries.plan(s, row, row.next_epoch) if row.next_epoch else None
        now = shared_queries.plan(s, row, row.epoch)
        return Serving(plan=now, next=upcoming, trace=trace.number if trace else 0, added=row.created_at)

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
