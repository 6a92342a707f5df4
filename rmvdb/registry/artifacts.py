"""The artifacts that rmvdb made: what they are, and their contents, for machines that do not share a home."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from rmvdb.registry.clock import day
from rmvdb.registry.session import Database, transaction
from rmvdb.registry.tables import ArtifactPartRow, ArtifactRow

#: Bytes in one row, and so in one statement.
PART = 1 << 22


class Artifacts(Database):
    """Artifacts and their contents."""

    @transaction
    def add_artifact(self, s: Session, /, *, sha256: str, kind: str, suffix: str, size: int) -> None:
        """Register a file. A repeated call changes its time alone, so that no `gc` takes it for an old one."""
        if (row := s.get(ArtifactRow, sha256)) is not None:
            row.created_at = day(s)
        else:
            s.add(ArtifactRow(sha256=sha256, kind=kind, suffix=suffix, size=size, created_at=day(s)))

    @transaction
    def artifacts(self, s: Session, /) -> Sequence[ArtifactRow]:
        """Return every registered artifact."""
        return s.scalars(select(ArtifactRow)).all()

    @transaction
    def artifacts_without_contents(self, s: Session, /) -> Sequence[str]:
        """Return the SHA-256 of each artifact of which a part, or all, is missing here."""
        stored = func.coalesce(func.sum(func.length(ArtifactPartRow.data)), 0)
        rows = select(ArtifactRow.sha256).outerjoin(ArtifactPartRow, ArtifactPartRow.sha256 == ArtifactRow.sha256)
        return s.scalars(rows.group_by(ArtifactRow.sha256, ArtifactRow.size).having(stored < ArtifactRow.size)).all()

    def add_contents(self, sha256: str, data: bytes) -> None:
        """Keep the contents of a registered artifact, in parts. A repeated call changes nothing."""
        for number, start in enumerate(range(0, len(data), PART)):
            self.add_part(sha256, number, data[start : start + PART])

    @transaction
    def add_part(self, s: Session, /, sha256: str, number: int, data: bytes) -> None:
        """Keep one part of an artifact. A repeated call changes nothing."""
        if s.get(ArtifactPartRow, (sha256, number)) is None:
            s.add(ArtifactPartRow(sha256=sha256, number=number, data=data))

    def contents_of(self, sha256: str) -> bytes | None:
        """Return the contents of an artifact, None if a part is missing. The caller compares the SHA-256."""
        size, parts = self._size(sha256), list[bytes]()
        while size is not None and sum(map(len, parts)) < size:
            part = self._part(sha256, len(parts))
            if not part:
                return None
            parts.append(part)
        return None if size is None else b"".join(parts)

    @transaction
    def _size(self, s: Session, /, sha256: str) -> int | None:
        return s.scalar(select(ArtifactRow.size).where(ArtifactRow.sha256 == sha256))

    @transaction
    def _part(self, s: Session, /, sha256: str, number: int) -> bytes | None:
        return s.scalar(select(ArtifactPartRow.data).where(ArtifactPartRow.sha256 == sha256, ArtifactPartRow.number == number))
