"""The manifest's contents, and a lost registry restored from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import delete, insert, select
from sqlalchemy.orm import Session

from rmvdb import errors
from rmvdb.registry import manifest_rows, shared_queries
from rmvdb.registry.clock import day, now
from rmvdb.registry.codec import key, leg_to_json, pack_ids
from rmvdb.registry.manifest_rows import Contents
from rmvdb.registry.session import Database, transaction
from rmvdb.registry.tables import MANIFEST_TABLES, BatchRow, GalleryRow, IdentityRow, IntentRow, PhaseRow, UpgradeRow
from rmvdb.registry.upgrade_plan import EpochName
from rmvdb.types import BatchState, Id, Phase


class Restoring(Database):
    """The manifest's contents, and how a lost registry is restored from them."""

    @transaction
    def contents(self, s: Session, /) -> Contents:
        """Return the manifest's contents, which `restore` takes."""
        return manifest_rows.contents(s)

    @transaction
    def restore(self, s: Session, /, contents: Contents) -> None:
        """Fill an empty registry. Every gallery is `rebuilding` until `rebuilt` is called.

        Each gallery is served by the plan that was in force, at an epoch above every epoch that a client may have seen.

        Raises:
            AlreadyExists: the registry is not empty.
        """
        if any(s.execute(select(table).limit(1)).first() for table in MANIFEST_TABLES if table is not IdentityRow):
            raise errors.AlreadyExists(
                f"The registry at {self.shown_url} is not empty; remove its file, or drop its tables, to have it rebuilt"
            )
        if contents.get(IdentityRow.__tablename__):  # the lost registry's identity, which marks its collections
            s.execute(delete(IdentityRow))
        for table in MANIFEST_TABLES:
            manifest_rows.put_back(s, table, contents.get(table.__tablename__, ()))
        for gallery in s.scalars(select(GalleryRow)):
            shared_queries.serve_after(s, gallery, shared_queries.row_of_plan(s, gallery, gallery.epoch).legs)
            _begin_rebuild(s, gallery, shared_queries.BROUGHT_BACK)

    @transaction
    def begin_rebuild(self, s: Session, /, gallery_id: int) -> None:
        """Let writes, claims and conductors of a gallery wait until `rebuilt`, and its work list be made again."""
        _begin_rebuild(s, s.get_one(GalleryRow, gallery_id), shared_queries.TAKEN)

    @transaction
    def put_forward(self, s: Session, /, upgrade_id: int, phase: Phase, which: EpochName, *, note: str) -> None:
        """Set an upgrade to a later phase than the manifest has, and serve by its plan `which`, as its collections show."""
        upgrade, gallery = s.get_one(UpgradeRow, upgrade_id), s.scalars(shared_queries.gallery_of(upgrade_id)).one()
        shared_queries.serve_after(s, gallery, [leg_to_json(leg) for leg in upgrade.plan.legs(which)])
        upgrade.phase, upgrade.listed = phase, phase == Phase.CUT_OVER
        s.add(PhaseRow(upgrade_id=upgrade_id, at=day(s), phase=phase, note=note))

    @transaction
    def add_copied(
        self,
        s: Session,
        /,
        upgrade_id: int,
        ids: Sequence[Id],
        archive: Mapping[str, Any],
        *,
        retired: bool,
        priority: int,
        left: Sequence[Id] = (),
    ) -> None:
        """Add a batch that was copied, or `retired`, with the archive of its old records. A repeated call adds nothing.

        `left`: ids that a roll back left as they are.
        """
        existing = select(BatchRow.id).where(*shared_queries.at_priority(upgrade_id, priority))
        if s.scalar(existing) is None:
            row = shared_queries.new_batch(upgrade_id, priority, ids, None)
            row.archive, row.copied_at, row.left = dict(archive), None if retired else now(s), pack_ids(left)
            row.state, row.remove = (BatchState.RETIRED, row.ids) if retired else (BatchState.COPIED, None)
            s.add(row)

    @transaction
    def add_written(
        self, s: Session, /, upgrade_id: int, ids: Sequence[Id], *, kind: str = "upsert", upto: int | None = None
    ) -> list[Id]:
        """Add a done intent for each record that clients wrote or deleted during the upgrade. Return the ids of these records.

        `upto`: leave out the records with an intent of a larger number. Their clients have written them since.
        """
        # Locked, as a client that announces a write locks it: the intents of both have the order of their numbers.
        gallery, at = (
            s.scalars(shared_queries.gallery_of(upgrade_id).with_for_update(of=GalleryRow, **shared_queries.FOR_CHANGE)).one(),
            now(s),
        )
        since = set[str]() if upto is None else _written_after(s, gallery, ids, upto)
        ids = [id for id in ids if key(id) not in since]
        same = {"gallery_id": gallery.id, "upgrade_id": upgrade_id, "kind": kind, "done": True, "epoch": gallery.epoch}
        same |= {"client": "rebuilt", "opened_at": at, "deadline": at, "done_at": at}
        if ids:
            s.execute(insert(IntentRow), [same | {"record": key(id)} for id in ids])
        return ids

    @transaction
    def forget_work(self, s: Session, /, upgrade_id: int) -> None:
        """Delete the work list, intents and quarantine of an upgrade, so that they can be made again."""
        shared_queries.forget_work(s, [upgrade_id])

    @transaction
    def rebuilt(self, s: Session, /, gallery_id: int) -> None:
        """Let writes, claims and conductors of a gallery continue, since its work is whole again."""
        s.get_one(GalleryRow, gallery_id).rebuilding = False


def _written_after(s: Session, gallery: GalleryRow, ids: Sequence[Id], upto: int) -> set[str]:
    """Return the keys of the records that have an intent with a larger number."""
    later = select(IntentRow.record).where(IntentRow.gallery_id == gallery.id, IntentRow.id > upto)
    return set(s.scalars(later)).intersection(map(key, ids))


def _begin_rebuild(s: Session, gallery: GalleryRow, note: str) -> None:
    gallery.rebuilding = True
    for upgrade in s.scalars(select(UpgradeRow).where(UpgradeRow.gallery_id == gallery.id, UpgradeRow.phase != Phase.ENDED)):
        upgrade.listed = upgrade.phase == Phase.CUT_OVER
        s.add(PhaseRow(upgrade_id=upgrade.id, at=day(s), phase=upgrade.phase, note=note))
