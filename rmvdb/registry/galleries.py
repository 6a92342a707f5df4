"""Galleries and their collections."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import and_, delete, select, update
from sqlalchemy.orm import Session

from rmvdb import errors
from rmvdb.registry import shared_queries
from rmvdb.registry.clock import day, now
from rmvdb.registry.codec import schema_to_json
from rmvdb.registry.session import Database, transaction
from rmvdb.registry.tables import (
    ClientRow,
    CollectionRow,
    GalleryRow,
    IntentRow,
    KeptQueryRow,
    PhaseRow,
    PlanRow,
    TraceRow,
    UpgradeRow,
    VersionRow,
)
from rmvdb.types import Leg, Metric, Phase, Schema


class Galleries(Database):
    """Galleries and their collections."""

    @transaction
    def add_gallery(
        self,
        s: Session,
        /,
        *,
        name: str,
        model: str,
        schema: Schema,
        adopted: bool,
        source: str | None,
        search: Mapping[str, Any],
        times: Mapping[str, float],
    ) -> GalleryRow:
        """Register a gallery of one collection, which alone serves it at epoch 1.

        Raises:
            AlreadyExists: the gallery's name or the collection is taken.
        """
        if s.scalar(select(GalleryRow).where(GalleryRow.name == name)):
            raise errors.AlreadyExists(f"Gallery {name!r} exists; see it with: rmvdb gallery show {name}")
        holder = s.scalar(select(CollectionRow).where(CollectionRow.name == schema.collection))
        if holder is not None and holder.dropped_at is not None:
            raise errors.AlreadyExists(
                f"A collection {schema.collection!r} belonged to gallery {s.get_one(GalleryRow, holder.gallery_id).name!r} until "
                "rmvdb dropped it; run rmvdb gc an hour after that and then this command again, or give yours another name"
            )
        if holder is not None:
            raise errors.AlreadyExists(
                f"Collection {schema.collection!r} belongs to gallery {s.get_one(GalleryRow, holder.gallery_id).name!r} already"
            )
        version = shared_queries.named(s, VersionRow, "model version", model)
        gallery = GalleryRow(name=name, id_type=schema.id_type, source=source, epoch=1, created_at=day(s))
        s.add(gallery)
        s.flush()
        s.add(_collection(gallery, model, schema, search, adopted=adopted, at=day(s)))
        leg = Leg(
            collection=schema.collection,
            model=model,
            metric=Metric(version.metric),
            embedder=version.base or model,
            transforms=(version.head,) if version.head else (),
        )
        s.add(shared_queries.new_plan(gallery, gallery.epoch, [leg], times, at=now(s)))
        return gallery

    @transaction
    def gallery(self, s: Session, /, name: str) -> GalleryRow:
        """Return one gallery.

        Raises:
            UnknownName: there is none. The message offers the nearest name.
        """
        return shared_queries.named(s, GalleryRow, "gallery", name, hint="make one: rmvdb gallery add NAME --model VERSION")

    @transaction
    def holder(self, s: Session, /, collection: str) -> str | None:
        """Return the name of the gallery that has this collection, if one has."""
        has = and_(CollectionRow.name == collection, CollectionRow.dropped_at.is_(None))
        return s.scalar(select(GalleryRow.name).join(CollectionRow, CollectionRow.gallery_id == GalleryRow.id).where(has))

    @transaction
    def set_source(self, s: Session, /, gallery: str, source: str) -> None:
        """Change the source of a gallery's items."""
        shared_queries.named(s, GalleryRow, "gallery", gallery).source = source

    @transaction
    def galleries(self, s: Session, /) -> Sequence[GalleryRow]:
        """Return all galleries, oldest first."""
        return s.scalars(select(GalleryRow).order_by(GalleryRow.id)).all()

    @transaction
    def refuse_used(self, s: Session, /, gallery: str) -> None:
        """Refuse a gallery that is in use.

        Raises:
            UpgradeRunning: it has an upgrade that has not ended.
            UsageError: a client serves it.
        """
        _refuse_used(s, shared_queries.named(s, GalleryRow, "gallery", gallery))

    @transaction
    def remove_gallery(self, s: Session, /, gallery: str) -> None:
        """Delete a gallery with its plans, upgrades, history and kept queries. Raises the errors of `refuse_used`."""
        row = shared_queries.named(s, GalleryRow, "gallery", gallery, lock=shared_queries.FOR_CHANGE)
        _refuse_used(s, row)
        upgrades = s.scalars(select(UpgradeRow.id).where(UpgradeRow.gallery_id == row.id)).all()
        shared_queries.forget_work(s, upgrades)
        s.execute(delete(PhaseRow).where(PhaseRow.upgrade_id.in_(upgrades)))
        for table in (UpgradeRow, IntentRow, PlanRow, CollectionRow, ClientRow, TraceRow, KeptQueryRow):
            s.execute(delete(table).where(table.gallery_id == row.id))
        s.delete(row)

    @transaction
    def add_collection(self, s: Session, /, gallery_id: int, *, model: str, schema: Schema, search: Mapping[str, Any]) -> None:
        """Register a collection that rmvdb made. A repeated call changes nothing.

        Raises:
            AlreadyExists: another gallery has it.
        """
        row = s.scalar(select(CollectionRow).where(CollectionRow.name == schema.collection))
        if row is not None and row.gallery_id != gallery_id:
            raise errors.AlreadyExists(
                f"Another gallery has collection {schema.collection!r} by now; give this upgrade up with rmvdb rollback, and "
                "name another collection"
            )
        if row is None:
            s.add(_collection(s.get_one(GalleryRow, gallery_id), model, schema, search, adopted=False, at=day(s)))

    @transaction
    def collection(self, s: Session, /, name: str) -> CollectionRow:
        """Return one collection's row."""
        return shared_queries.named(s, CollectionRow, "collection", name)

    @transaction
    def collections(self, s: Session, /, gallery_id: int) -> Sequence[CollectionRow]:
        """Return the collections of a gallery, oldest first, including dropped ones."""
        return s.scalars(select(CollectionRow).where(CollectionRow.gallery_id == gallery_id).order_by(CollectionRow.id)).all()

    @transaction
    def allow_removal(self, s: Session, /, name: str) -> None:
        """Record that you agreed to removals from an adopted collection."""
        s.execute(update(CollectionRow).where(CollectionRow.name == name).values(removal_allowed=True))

    @transaction
    def mark_dropped(self, s: Session, /, name: str) -> None:
        """Record that a collection was dropped."""
        s.execute(update(CollectionRow).where(CollectionRow.name == name).values(dropped_at=day(s)))


def _collection(
    gallery: GalleryRow, model: str, schema: Schema, search: Mapping[str, Any], *, adopted: bool, at: float
) -> CollectionRow:
    return CollectionRow(
        gallery_id=gallery.id,
        name=schema.collection,
        model=model,
        schema=schema_to_json(schema),
        search=dict(search),
        adopted=adopted,
        created_at=at,
    )


def _refuse_used(s: Session, gallery: GalleryRow) -> None:
    on = and_(UpgradeRow.gallery_id == gallery.id, UpgradeRow.phase != Phase.ENDED)
    if upgrade := s.scalar(select(UpgradeRow).where(on)):
        raise errors.UpgradeRunning(
            f"Gallery {gallery.name!r} is in upgrade {upgrade.id} from {upgrade.from_version} to {upgrade.to_version} "
            f"({upgrade.phase}); end it first: rmvdb cleanup, or rmvdb rollback"
        )
    if client := s.scalar(shared_queries.live_clients(s, gallery).limit(1)):
        raise errors.UsageError(f"Gallery {gallery.name!r} is served by client {client.id}; close it first, then try again")
