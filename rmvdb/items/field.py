"""The source `field:`: a field of the record itself, such as its text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rmvdb.types import Id, Item, Record


class FieldSource:
    """A field of the record itself, such as its text."""

    def __init__(self, field: str) -> None:
        self.field = field

    def load(self, records: Sequence[Record]) -> Mapping[Id, Item]:
        """Return the field's values by id. Leave out records without it."""
        return {record.id: record.fields[self.field] for record in records if record.fields.get(self.field) is not None}
