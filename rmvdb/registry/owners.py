"""The registry's identity, and each gallery's trace, a number that only rises. `mark` writes both beside the data."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session

from rmvdb.registry import shared_queries
from rmvdb.registry.session import Database, transaction
from rmvdb.registry.tables import CollectionRow, GalleryRow, IdentityRow, TraceRow


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """The state of a gallery's trace in its registry."""

    number: int
    epoch: int
    #: The largest epoch that a client served by and this registry doesn't know, 0 for none.
    reported: int
    #: The evidence that this registry has gone back, empty if there is none.
    trouble: str
    #: The oldest collection of the gallery. Every plan since the last clean-up has it, so a registry that goes back has it, too.
    oldest: str


class Owners(Database):
    """The identity of this registry, and the trace of each gallery."""

    @transaction
    def identity(self, s: Session, /) -> str:
        """Return the name by which this registry marks its collections."""
        return s.scalars(select(IdentityRow.name)).one()

    @transaction
    def trace(self, s: Session, /, gallery: str) -> Trace:
        """Return the trace of a gallery."""
        mine = (CollectionRow.gallery_id == GalleryRow.id, CollectionRow.dropped_at.is_(None))
        oldest = select(CollectionRow.name).where(*mine).order_by(CollectionRow.id).limit(1).scalar_subquery()
        known = TraceRow.number, TraceRow.reported, TraceRow.trouble
        beside = select(GalleryRow.epoch, oldest.label("oldest"), *known).outerjoin(
            TraceRow, TraceRow.gallery_id == GalleryRow.id
        )
        row = s.execute(beside.where(GalleryRow.name == gallery)).one_or_none()
        if row is None:
            shared_queries.named(s, GalleryRow, "gallery", gallery)  # raises UnknownName
            raise AssertionError(gallery)
        return Trace(
            number=row.number or 0,
            epoch=row.epoch,
            reported=row.reported or 0,
            trouble=row.trouble or "",
            oldest=row.oldest or "",
        )

    @transaction
    def raise_trace(self, s: Session, /, gallery: str) -> int:
        """Raise the trace by one and return the number. Each number is given once."""
        row = shared_queries.named(s, GalleryRow, "gallery", gallery)
        return shared_queries.raise_trace(s, select(GalleryRow.id).where(GalleryRow.id == row.id))

    @transaction
    def note_trouble(self, s: Session, /, gallery: str, trouble: str) -> None:
        """Record the evidence that this registry has gone back. Otherwise its next steps would hide it."""
        row = shared_queries.named(s, GalleryRow, "gallery", gallery)
        trace = s.get(TraceRow, row.id)
        if trace is None:
            s.add(TraceRow(gallery_id=row.id, trouble=trouble))
        else:
            trace.trouble = trouble

    @transaction
    def catch_up(self, s: Session, /, gallery: str, *, number: int, epoch: int) -> None:
        """Continue a gallery after that number and that epoch, which another registry may have reached."""
        row = shared_queries.named(s, GalleryRow, "gallery", gallery, lock=shared_queries.FOR_CHANGE)
        trace = s.get(TraceRow, row.id)
        if trace is None:
            s.add(trace := TraceRow(gallery_id=row.id, number=0, reported=0))
        trace.number, trace.trouble = max(trace.number, number), ""
        if (seen := max(epoch, trace.reported)) >= row.epoch:
            shared_queries.serve_after(s, row, shared_queries.row_of_plan(s, row, row.epoch).legs, after=seen)

    @transaction
    def hand_over(self, s: Session, /) -> None:
        """Write the manifest, though no row was changed."""
        s.changed = True  # type: ignore[attr-defined]
