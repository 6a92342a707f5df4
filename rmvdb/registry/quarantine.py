"""Records that could not be moved."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import and_, delete, select
from sqlalchemy.orm import Session

from rmvdb.registry import shared_queries
from rmvdb.registry.codec import key
from rmvdb.registry.session import Database, transaction
from rmvdb.registry.tables import QuarantineRow
from rmvdb.types import Id


class Quarantine(Database):
    """Records that were set aside."""

    @transaction
    def quarantined(self, s: Session, /, upgrade_id: int) -> Sequence[QuarantineRow]:
        """The records set aside, oldest first."""
        return s.scalars(select(QuarantineRow).where(QuarantineRow.upgrade_id == upgrade_id).order_by(QuarantineRow.id)).all()

    @transaction
    def release(self, s: Session, /, upgrade_id: int, ids: Sequence[Id], *, requeue: bool) -> None:
        """Take records out of quarantine; with `requeue` those that were there become a batch each in the same transaction,
        except those that an unretired batch holds: see `add_late`."""
        shared_queries.lock_list(s, upgrade_id)
        there: set[str] = set()
        for some in shared_queries.chunks(list(ids), 500):
            mine = and_(QuarantineRow.upgrade_id == upgrade_id, QuarantineRow.record.in_([key(id) for id in some]))
            there.update(s.scalars(delete(QuarantineRow).where(mine).returning(QuarantineRow.record)))
        if requeue:
            first = shared_queries.last_priority(s, upgrade_id) + 1
            # One batch each: a batch that fails as a whole stops the upgrade, and these may well fail again.
            held = set(ids).intersection(shared_queries.listed(s, upgrade_id))
            released = [id for id in ids if key(id) in there and id not in held]
            s.add_all([shared_queries.new_batch(upgrade_id, first + at, [id], None) for at, id in enumerate(released)])
