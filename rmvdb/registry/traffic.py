"""How often searches find each record."""

from __future__ import annotations

from collections.abc import Mapping

from sqlalchemy import delete, func, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from rmvdb.registry import shared_queries
from rmvdb.registry.clock import now
from rmvdb.registry.codec import key
from rmvdb.registry.session import Database, transaction
from rmvdb.registry.tables import GalleryRow, TrafficRow
from rmvdb.types import Id

#: The most records of a gallery with a count of finds. If there are more, rmvdb deletes those of the smallest weight.
MOST_FOUND = 100_000
#: Seconds in which the weight of a find halves, and the start of the count. A find weighs 2^(seconds since then / half-life). A
#: float holds that for 80 years. Forward decay: Cormode et al., ICDE 2009.
HALF_LIFE, FADING_SINCE = 30 * 86400.0, 1.76e9


class Traffic(Database):
    """Counts of how often searches find each record."""

    @transaction
    def add_traffic(self, s: Session, /, gallery: str, found: Mapping[Id, int]) -> None:
        """Add how often searches found these records lately. Keep at most `MOST_FOUND` records of a gallery."""
        mine = shared_queries.named(s, GalleryRow, "gallery", gallery).id
        one = 2 ** ((now(s) - FADING_SINCE) / HALF_LIFE)
        # Sorted, so that two clients never wait for each other.
        rows = [{"gallery_id": mine, "record": key(id), "weight": found[id] * one} for id in sorted(found, key=key)]
        kind = postgresql if s.get_bind().dialect.name == "postgresql" else sqlite
        upsert = kind.insert(TrafficRow.__table__)  # the table itself is twice as fast as its class
        sums = {"weight": TrafficRow.weight + upsert.excluded.weight}
        s.execute(upsert.on_conflict_do_update(index_elements=["gallery_id", "record"], set_=sums), rows)
        _forget_rarest(s, mine)

    @transaction
    def traffic(self, s: Session, /, gallery_id: int) -> dict[str, float]:
        """Return the weight of each record's finds, by key."""
        rows = s.execute(select(TrafficRow.record, TrafficRow.weight).where(TrafficRow.gallery_id == gallery_id))
        return {row.record: row.weight for row in rows}


def _forget_rarest(s: Session, gallery_id: int) -> None:
    mine = TrafficRow.gallery_id == gallery_id
    count = s.scalar(select(func.count()).select_from(TrafficRow).where(mine)) or 0
    if count > MOST_FOUND:  # delete more than needed, so that not every call deletes
        some = count - MOST_FOUND * 9 // 10
        rarest = select(TrafficRow.record).where(mine).order_by(TrafficRow.weight, TrafficRow.record).limit(some)
        s.execute(delete(TrafficRow).where(mine, TrafficRow.record.in_(rarest)).execution_options(synchronize_session=False))
