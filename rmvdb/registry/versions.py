"""Model versions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Select, or_, select
from sqlalchemy.orm import Session

from rmvdb import errors
from rmvdb.registry import shared_queries
from rmvdb.registry.clock import day
from rmvdb.registry.session import Database, transaction
from rmvdb.registry.tables import CollectionRow, GalleryRow, UpgradeRow, VersionRow

#: Columns of measured vectors: each device rounds them otherwise.
_PROBED = ("probes", "query_probes")


class Versions(Database):
    """Model versions."""

    @transaction
    def add_version(self, s: Session, /, **values: Any) -> VersionRow:
        """Register a model version. A repeated call changes nothing.

        Raises:
            AlreadyExists: another version has that name.
        """
        row = s.scalar(select(VersionRow).where(VersionRow.name == values["name"]))
        if row is None:
            row = VersionRow(**values, created_at=day(s))
            s.add(row)
            s.flush()
        elif differing := [name for name in values if name not in _PROBED and getattr(row, name) != values[name]]:
            raise errors.AlreadyExists(
                f"Model version {row.name!r} is registered with another {differing[0]}; choose another name, or "
                f"forget the registered one first: rmvdb model remove {row.name}"
            )
        elif row.has_own_queries != (values.get("query_probes") is not None):
            raise errors.AlreadyExists(
                f"Model version {row.name!r} is registered {'with' if row.has_own_queries else 'without'} embed_queries; "
                "choose another name"
            )
        return row

    @transaction
    def version(self, s: Session, /, name: str) -> VersionRow:
        """Return one model version.

        Raises:
            UnknownName: there is none. The message offers the nearest name.
        """
        return shared_queries.named(
            s, VersionRow, "model version", name, hint="register one: rmvdb model add NAME --embedder package.module:object"
        )

    @transaction
    def versions(self, s: Session, /) -> Sequence[VersionRow]:
        """Return all model versions, oldest first."""
        return s.scalars(select(VersionRow).order_by(VersionRow.id)).all()

    @transaction
    def remove_version(self, s: Session, /, name: str) -> None:
        """Delete a model version.

        Raises:
            UsageError: a gallery, its history or another version needs it.
        """
        row = shared_queries.named(s, VersionRow, "model version", name)
        if gallery := s.scalar(_galleries_with(name)):
            raise errors.UsageError(
                f"Model version {name!r} is part of gallery {gallery!r} or its history; forget that first: "
                f"rmvdb gallery remove {gallery}"
            )
        needs = or_(VersionRow.base == name, VersionRow.compatible_with == name)
        if other := s.scalar(select(VersionRow.name).where(needs)):
            raise errors.UsageError(f"Model version {other!r} refers to {name!r}; forget that first: rmvdb model remove {other}")
        s.delete(row)


def _galleries_with(version: str) -> Select[str]:
    owning = select(CollectionRow.gallery_id).where(CollectionRow.model == version)
    upgraded = select(UpgradeRow.gallery_id).where(or_(UpgradeRow.from_version == version, UpgradeRow.to_version == version))
    return select(GalleryRow.name).where(or_(GalleryRow.id.in_(owning), GalleryRow.id.in_(upgraded))).limit(1)
