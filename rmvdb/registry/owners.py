"""Which registry this is, and a number of each gallery that only rises; `rmvdb.registry.mark` writes both beside the data."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session

from rmvdb.registry import shared_queries
from rmvdb.registry.session import Database, transaction
from rmvdb.registry.tables import CollectionRow, GalleryRow, IdentityRow, TraceRow


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """How far a gallery is by its registry."""

    number: int
    epoch: int
    #: The largest epoch that a client served by and this registry did not know, 0 for none.
    reported: int
    #: How it was found that this registry has gone back; empty while it has not.
    trouble: str
    #: The oldest collection of the gallery: every plan since the last clean-up has it, whichever of them a registry goes back to.
    oldest: str


class Owners(Database):
    """The identity of this registry, and the trace of each gallery."""

    @transaction
    def identity(self, s: Session, /) -> str:
        """The name by which this registry marks what it owns."""
        return s.scalars(select(IdentityRow.name)).one()

    @transaction
    def trace(self, s: Session, /, gallery: str) -> Trace:
        """How far a gallery is."""
        row = shared_queries.named(s, GalleryRow, "gallery", gallery)
        found = s.get(TraceRow, row.id) or TraceRow(number=0, reported=0, trouble="")
        mine = (CollectionRow.gallery_id == row.id, CollectionRow.dropped_at.is_(None))
        oldest = s.scalar(select(CollectionRow.name).where(*mine).order_by(CollectionRow.id).limit(1)) or ""
        return Trace(number=found.number, epoch=row.epoch, reported=found.reported, trouble=found.trouble, oldest=oldest)

    @transaction
    def raise_trace(self, s: Session, /, gallery: str) -> int:
        """One more; the number, which is given once."""
        return shared_queries.raise_trace(s, shared_queries.named(s, GalleryRow, "gallery", gallery).id)

    @transaction
    def note_trouble(self, s: Session, /, gallery: str, trouble: str) -> None:
        """Note how it was found that this registry has gone back: without it, its next steps would hide that."""
        row = shared_queries.named(s, GalleryRow, "gallery", gallery)
        found = s.get(TraceRow, row.id)
        if found is None:
            s.add(TraceRow(gallery_id=row.id, trouble=trouble))
        else:
            found.trouble = trouble

    @transaction
    def catch_up(self, s: Session, /, gallery: str, *, number: int, epoch: int) -> None:
        """Go on with a gallery after that number and that epoch, by which others may have served it."""
        row = shared_queries.named(s, GalleryRow, "gallery", gallery, lock=shared_queries.FOR_CHANGE)
        found = s.get(TraceRow, row.id)
        if found is None:
            s.add(found := TraceRow(gallery_id=row.id, number=0, reported=0))
        found.number, found.trouble = max(found.number, number), ""
        if max(epoch, found.reported) >= row.epoch:
            shared_queries.serve_after(
                s, row, shared_queries.row_of_plan(s, row, row.epoch).legs, after=max(epoch, found.reported)
            )

    @transaction
    def hand_over(self, s: Session, /) -> None:
        """Let the manifest hold what there is, though nothing was changed."""
        s.changed = True  # type: ignore[attr-defined]
