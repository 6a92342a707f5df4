"""The queries that clients keep of what they are asked: a bounded, uniform sample of each gallery's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import and_, delete, func, insert, or_, select
from sqlalchemy.orm import Session

from rmvdb.registry import shared_queries
from rmvdb.registry.clock import DAY, day
from rmvdb.registry.codec import item_from_row
from rmvdb.registry.session import Database, transaction
from rmvdb.registry.tables import GalleryRow, KeptQueryRow
from rmvdb.types import Query

#: The advisory lock of PostgreSQL, with the gallery's number, under which a client adds queries: together they keep the bound.
ADDING = 0x726D71


@dataclass(frozen=True, kw_only=True, slots=True)
class AskedQuery:
    """One query that a client was asked, as a row holds it."""

    #: A random number from 0 to 1. The smallest ones of all clients stay, so each query has the same chance.
    priority: float
    kind: str
    payload: bytes
    #: Seconds since it was asked.
    age: float


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptCount:
    """How many queries of a gallery are kept."""

    count: int
    #: Days since the oldest of them was asked, None if there is none.
    oldest_days: float | None = None


class KeptQueries(Database):
    """A sample of each gallery's queries. People wrote them: they are in no log, in no manifest, and end with their gallery."""

    @transaction
    def keep_queries(self, s: Session, /, gallery: str, asked: Sequence[AskedQuery], *, most: int, days: float) -> float:
        """Add queries, then remove what is over `days` days old and all but the `most` smallest priorities.

        Return the priority from which on a query would not be kept now. Any number of clients may call this at once.

        The sample is uniform over everything that was asked. Once queries grow too old and traffic falls, recent ones may weigh
        more: an old query that gave way to others does not come back when these are too old.
        """
        row = shared_queries.named(s, GalleryRow, "gallery", gallery)
        if s.get_bind().dialect.name == "postgresql":  # in SQLite, BEGIN IMMEDIATE is the lock
            s.execute(select(func.pg_advisory_xact_lock(ADDING, row.id)))
        at = day(s)
        if asked:
            values = [{"priority": q.priority, "asked_at": at - q.age, "kind": q.kind, "payload": q.payload} for q in asked]
            s.execute(insert(KeptQueryRow), [{"gallery_id": row.id, **each} for each in values])
        mine, expired = KeptQueryRow.gallery_id == row.id, KeptQueryRow.asked_at < at - days * DAY
        by_priority = select(KeptQueryRow.id).where(mine, ~expired).order_by(KeptQueryRow.priority)
        surplus = or_(expired, KeptQueryRow.id.in_(by_priority.offset(most)))
        s.execute(delete(KeptQueryRow).where(mine, surplus).execution_options(synchronize_session=False))
        last = select(KeptQueryRow.priority).where(mine).order_by(KeptQueryRow.priority).offset(most - 1).limit(1)
        return 1.0 if (highest := s.scalar(last)) is None else highest

    def kept_queries(self, gallery: str, *, max_age_days: float, limit: int | None) -> list[Query]:
        """Return `limit` kept queries or fewer, without answers, the smallest priorities first: a uniform sample, too."""
        return list(self.numbered_queries(gallery, max_age_days=max_age_days, limit=limit).values())

    @transaction
    def numbered_queries(
        self, s: Session, /, gallery: str, *, max_age_days: float, limit: int | None, numbers: Sequence[int] | None = None
    ) -> dict[int, Query]:
        """Return such queries by number. With `numbers`, return the numbered ones that are still kept. No number comes twice."""
        row = shared_queries.named(s, GalleryRow, "gallery", gallery)
        young = and_(KeptQueryRow.gallery_id == row.id, KeptQueryRow.asked_at >= day(s) - max_age_days * DAY)
        wanted = young if numbers is None else and_(young, KeptQueryRow.id.in_(numbers))
        columns = select(KeptQueryRow.id, KeptQueryRow.kind, KeptQueryRow.payload).where(wanted)
        rows = s.execute(columns.order_by(KeptQueryRow.priority, KeptQueryRow.id).limit(limit))
        return {number: Query(item=item_from_row(kind, payload)) for number, kind, payload in rows}

    @transaction
    def count_queries(self, s: Session, /, gallery: str) -> KeptCount:
        """Return how many queries are kept, and the age of the oldest."""
        mine = KeptQueryRow.gallery_id == shared_queries.named(s, GalleryRow, "gallery", gallery).id
        count, oldest = s.execute(select(func.count(), func.min(KeptQueryRow.asked_at)).where(mine)).one()
        return KeptCount(count=count, oldest_days=max(day(s) - oldest, 0.0) / DAY if count else None)

    @transaction
    def clear_queries(self, s: Session, /, gallery: str) -> int:
        """Remove every kept query of a gallery. Return how many there were."""
        mine = KeptQueryRow.gallery_id == shared_queries.named(s, GalleryRow, "gallery", gallery).id
        return s.execute(delete(KeptQueryRow).where(mine)).rowcount  # type: ignore[attr-defined,no-any-return]
