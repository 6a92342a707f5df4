"""The source `folder:`: files whose names are made from records."""

from __future__ import annotations

import errno
import os
import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rmvdb.errors import SourceError, SourceUnavailable, UsageError

if TYPE_CHECKING:
    from rmvdb.types import Id, Item, Record


class ImageFolder:
    """Files whose names are made from records: `photos/{id}.jpg`, `{split}/{id:06d}.png`. Items are paths."""

    def __init__(self, pattern: str, *, base: Path | None = None) -> None:
        """Raise UsageError if the pattern is malformed. A relative folder starts at `base`, or else at the current folder."""
        self.pattern = pattern
        try:
            parts = list(string.Formatter().parse(pattern))
        except ValueError as exc:
            raise UsageError(f"{pattern!r} is not a pattern of files: {exc}; write one such as photos/{{id}}.jpg") from exc
        names = [name for _, name, _, _ in parts if name is not None]
        # Plain names only: str.format would look into attributes too.
        plain = all(map(str.isidentifier, names)) and not any(
            conversion or "{" in (form or "") for _, _, form, conversion in parts
        )
        if not names or not plain or "{{" in pattern or "}}" in pattern:
            raise UsageError(f"{pattern!r} is not a pattern of files; name fields of the record, as in photos/{{id}}.jpg")
        # The folder is all that comes before the first field, so a record's values cannot lead out of it.
        fixed, slash, _ = pattern[: pattern.index("{")].rpartition("/")
        try:
            self.folder = (base or Path.cwd()) / Path(fixed + slash).expanduser()
        except RuntimeError as exc:
            raise UsageError(
                f"The folder of {pattern!r} cannot be found, because the home of its user is unknown; write its whole path"
            ) from exc
        #: The fields that the names are made from, besides the id.
        self.fields = tuple(dict.fromkeys(name for name in names if name != "id"))
        self._template = pattern[len(fixed + slash) :]

    def load(self, records: Sequence[Record]) -> Mapping[Id, Item]:
        """Return paths by id. Leave out records without that file or without one of the fields."""
        if not os.path.isdir(self.folder):  # noqa: PTH112 (Path.is_dir raises if a folder above is closed)
            raise SourceUnavailable(
                f"Folder {self.folder} does not exist; mount it, or correct the source 'folder:{self.pattern}'"
            )
        paths = ((record.id, self._file(record)) for record in records)
        return {id: path for id, path in paths if path is not None}

    def _file(self, record: Record) -> Path | None:
        name = self._name(record)
        if name is None or "\0" in name:
            return None
        relative = Path(name)
        if relative.is_absolute() or relative.drive or ".." in relative.parts:
            return None
        path = self.folder / relative
        try:
            return path if path.is_file() else None
        except OSError as exc:
            if exc.errno == errno.ENAMETOOLONG:
                return None
            raise SourceError(f"{path} cannot be looked at ({exc.strerror}); correct its rights and run the step again") from exc

    def _name(self, record: Record) -> str | None:
        values = {**record.fields, "id": record.id}
        try:
            return self._template.format_map({name: value for name, value in values.items() if value is not None})
        except KeyError:
            return None
        except (ValueError, TypeError, OverflowError) as exc:  # a text or a list, and the pattern wants a number
            raise SourceError(
                f"The pattern {self.pattern!r} does not fit record {record.id!r}: {exc}; correct the pattern, or that record"
            ) from exc
