"""Records that could not be moved."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import select
from sqlalchemy.orm import Session

from rmvdb.registry import shared_queries
from rmvdb.registry.codec import key
from rmvdb.registry.session import Database, transaction
from rmvdb.registry.tables import QuarantineRow
from rmvdb.types import Id


class Quarantine(Database):
    """Records in quarantine."""

    @transaction
    def quarantined(self, s: Session, /, upgrade_id: int) -> Sequence[QuarantineRow]:
        """Return the quarantined records, oldest first."""
        return s.scalars(select(QuarantineRow).where(QuarantineRow.upgrade_id == upgrade_id).order_by(QuarantineRow.id)).all()

    @transaction
    def release(self, s: Session, /, upgrade_id: int, ids: Sequence[Id], *, requeue: bool) -> None:
        """Take records out of quarantine.

        With `requeue`, each becomes a batch in the same transaction, unless a batch that is not retired has it (see
        `Batches.add_late`).
        """
        shared_queries.lock_list(s, upgrade_id)
        removed = shared_queries.take_out(s, upgrade_id, ids)
        if requeue:
            first = shared_queries.last_priority(s, upgrade_id) + 1
            # One batch each: a batch that fails as a whole stops the upgrade, and these records may fail again.
            listed = shared_queries.listed_among(s, upgrade_id, ids)
            released = [id for id in ids if key(id) in removed and id not in listed]
            s.add_all([shared_queries.new_batch(upgrade_id, first + at, [id], None) for at, id in enumerate(released)])
