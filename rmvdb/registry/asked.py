"""Records that searches asked for: clients name them, and workers move them first."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from sqlalchemy import delete, func, insert, select
from sqlalchemy.orm import Session

from rmvdb.registry import shared_queries
from rmvdb.registry.codec import key, pack_ids, unpack_ids
from rmvdb.registry.session import Database, transaction
from rmvdb.registry.tables import AskedForRow, BatchRow, GalleryRow
from rmvdb.types import BatchState, Id, Phase

#: The most records that wait to be moved first. Others move in their turn.
MOST = 5_000


class AskedFor(Database):
    """Which records searches embedded, because they are not re-embedded yet."""

    @transaction
    def ask_for(self, s: Session, /, gallery: str, ids: Sequence[Id]) -> None:
        """Note that searches asked for these records. Does nothing if no work list is there, or too many records wait already."""
        row = shared_queries.named(s, GalleryRow, "gallery", gallery)
        upgrade = shared_queries.active_upgrade(s, row.id)
        if upgrade is None or not upgrade.listed or upgrade.phase != Phase.SERVING_BOTH or upgrade.undoes is not None:
            return
        waiting = s.scalar(select(func.count()).where(AskedForRow.upgrade_id == upgrade.id)) or 0
        if some := ids[: max(0, MOST - waiting)]:
            s.execute(insert(AskedForRow), [{"upgrade_id": upgrade.id, "record": key(id)} for id in some])

    @transaction
    def asked_for(self, s: Session, /, upgrade_id: int, *, most: int) -> dict[int, str]:
        """Return the keys of records that searches asked for, the earliest first, by the number of their row."""
        mine = select(AskedForRow.id, AskedForRow.record).where(AskedForRow.upgrade_id == upgrade_id)
        return {row.id: row.record for row in s.execute(mine.order_by(AskedForRow.id).limit(most))}

    @transaction
    def pending_batches(self, s: Session, /, upgrade_id: int, *, after: int, most: int) -> dict[int, list[Id]]:
        """Return the ids of batches that no worker has begun, by number, in the order of the numbers."""
        mine = (BatchRow.upgrade_id == upgrade_id, BatchRow.state == BatchState.PENDING, BatchRow.id > after)
        page = s.execute(select(BatchRow.id, BatchRow.ids).where(*mine).order_by(BatchRow.id).limit(most))
        return {number: unpack_ids(packed) for number, packed in page}

    @transaction
    def move_first(
        self, s: Session, /, upgrade_id: int, records: Collection[str], *, batches: Sequence[int], rows: Sequence[int]
    ) -> int:
        """Take records out of these batches into others that come before all. Return how many were taken.

        A new batch is no larger than the largest of these: a batch bounds a worker's memory, and how far `--until` is overshot.

        Only batches that are still pending change, in one transaction: a record is on the work list once at every moment, and a
        repeated call changes nothing. `rows`: the rows of `asked_for` that this call answers. They are deleted.
        """
        shared_queries.lock_list(s, upgrade_id)
        mine = (BatchRow.upgrade_id == upgrade_id, BatchRow.state == BatchState.PENDING)
        first = s.scalar(select(func.min(BatchRow.priority)).where(BatchRow.upgrade_id == upgrade_id)) or 0
        taken: list[Id] = []
        size = 1
        for some in shared_queries.chunks(batches, 500):
            # A batch that is being claimed at this moment is moved anyway.
            locked = select(BatchRow).where(*mine, BatchRow.id.in_(some)).with_for_update(skip_locked=True)
            for batch in s.scalars(locked).all():
                if batch.origin is None:  # else its files belong to all its records
                    size = max(size, batch.count)
                    taken += _take_out(s, batch, records)
        made = list(shared_queries.chunks(taken, size))
        for place, ids in enumerate(made, start=first - len(made)):
            s.add(shared_queries.new_batch(upgrade_id, place, ids, None))
        for some in shared_queries.chunks(rows, 500):
            s.execute(delete(AskedForRow).where(AskedForRow.id.in_(some)))
        return len(taken)


def _take_out(s: Session, batch: BatchRow, records: Collection[str]) -> list[Id]:
    """Take these records out of a pending batch, and delete it if none is left. Return their ids."""
    ids = unpack_ids(batch.ids)
    rest = [id for id in ids if key(id) not in records]
    if rest and len(rest) < len(ids):
        batch.ids, batch.count = pack_ids(rest), len(rest)
    elif not rest:
        s.delete(batch)
    return [id for id in ids if key(id) in records]
