"""Sources: where the item of a record comes from. To add one, write a class in a file of its own and its row in `SOURCES`.

The command line reads the forms, so this file imports neither numpy nor a database.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from rmvdb.errors import SourceError, SourceUnavailable, UsageError
from rmvdb.items import sql
from rmvdb.items.callable import CallableSource
from rmvdb.items.field import FieldSource
from rmvdb.items.folder import ImageFolder
from rmvdb.items.objects import Allowed
from rmvdb.text import without_password

if TYPE_CHECKING:
    from rmvdb.protocols import Source
    from rmvdb.types import Id, Item, Record

#: Takes the part of a spec after the colon, the folder that relative paths start at, and the modules whose code may run.
Make: TypeAlias = "Callable[[str, Path | None, Allowed | None], Source]"


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceSpec:
    """One form of spec. Each function takes the part of the spec after the colon."""

    #: How the spec is written.
    form: str
    make: Make
    #: Return that part without its password.
    shown: Callable[[str], str] = lambda rest: rest
    #: Return the record's field that is its item; "" if its items come from elsewhere.
    field: Callable[[str], str] = lambda rest: ""
    #: Return the `package.module:object` whose code runs; "" if none does.
    code: Callable[[str], str] = lambda rest: ""


#: Each form of spec, by the word before its colon.
SOURCES: Mapping[str, SourceSpec] = {
    "folder": SourceSpec(form="folder:photos/{id}.jpg", make=lambda rest, base, allowed: ImageFolder(rest, base=base)),
    "field": SourceSpec(form="field:NAME", make=lambda rest, base, allowed: FieldSource(rest), field=lambda rest: rest),
    "call": SourceSpec(
        form="call:package.module:function",
        make=lambda rest, base, allowed: CallableSource(rest, allowed=allowed),
        code=lambda rest: rest,
    ),
    "sql": SourceSpec(
        form=f"sql:URL#{sql.QUERY}",
        make=lambda rest, base, allowed: sql.SQLSource(*sql.split(rest)),
        shown=sql.shown,
    ),
}


def forms() -> str:
    """Return how specs are written, in words."""
    *others, last = (each.form for each in SOURCES.values())
    return f"{', '.join(others)} or {last}"


def load(spec: str, *, base: Path | None = None, allowed: Allowed | None = None) -> Source:
    """Return the source that a spec means. Relative folders start at `base`, or else at the current folder.

    Raises: UsageError for a spec of another form, SourceError if what it names cannot be loaded, ConfigError if that is in a
    module that is not `allowed`.
    """
    source, rest = _parsed(spec)
    if source is None or not rest:
        raise UsageError(f"{without_password(spec)!r} is not a source; write {forms()}")
    return source.make(rest, base, allowed)


def refuse_password(spec: str) -> None:
    """Raise UsageError for a spec with a password in it, which would be kept and shown."""
    if shown(spec) != spec:
        raise UsageError(
            f"The source {shown(spec)!r} contains its password, and rmvdb would keep it; put it into the environment and write "
            "${NAME} in its place, such as postgresql://user:${PASSWORD}@host/db"
        )


def shown(spec: str) -> str:
    """Return the spec without a password. One that was kept before `refuse_password` may have one."""
    source, rest = _parsed(spec)
    return f"{spec.removesuffix(rest)}{source.shown(rest)}" if source else spec


def field_of(spec: str | None) -> str:
    """Return the field that holds a record's item; "" if its items come from elsewhere."""
    source, rest = _parsed(spec or "")
    return source.field(rest) if source else ""


def code_of(spec: str | None) -> str:
    """Return the `package.module:object` whose code a source runs; "" if it runs none."""
    source, rest = _parsed(spec or "")
    return source.code(rest) if source else ""


def _parsed(spec: str) -> tuple[SourceSpec | None, str]:
    name, _, rest = spec.partition(":")
    return SOURCES.get(name), rest


def fields_read(source: Source) -> tuple[str, ...] | None:
    """Return the fields of a record that the source reads besides its id; None if it may read any of them."""
    match source:
        case FieldSource():
            return (source.field,)
        case ImageFolder():
            return source.fields
        case sql.SQLSource():
            return ()
        case CallableSource(reads_fields=False):
            return ()
    return None


#: If a source fails for this many records in a row, each alone, the source counts as broken and not the records.
_BROKEN = 10


def given(
    source: Source, records: Sequence[Record], *, known_good: Callable[[], Sequence[Record]] = tuple
) -> tuple[dict[Id, Item], dict[Id, str]]:
    """Return items by id, in the order of the records, and by id why the source fails for a record.

    A record without an item has neither. A call that fails is halved until the records that it fails for stand alone.

    Raises: SourceError if the source answers for none of the records, nor for those of `known_good`; at once if it cannot be
    reached. MemoryError if the items do not fit into memory together.
    """
    items: dict[Id, Item] = {}
    failed: dict[Id, SourceError] = {}
    waiting, answers = [list(records)] if records else [], False
    while waiting:
        part = waiting.pop()
        try:
            items |= source.load(part)
            answers = True
        except MemoryError:
            if len(part) == 1:
                raise
            waiting += [part[len(part) // 2 :], part[: len(part) // 2]]
        except SourceError as exc:
            if _is_away(exc):
                raise
            if len(part) > 1:
                waiting += [part[len(part) // 2 :], part[: len(part) // 2]]
                continue
            failed[part[0].id] = exc
            if not answers and (len(failed) == _BROKEN or not waiting) and not (answers := _answers(source, known_good())):
                raise next(iter(failed.values())) from exc.__cause__
    reasons = {record.id: why for record in records if record.id in failed and (why := _try_again(source, record, items))}
    return {record.id: items[record.id] for record in records if record.id in items}, reasons


def too_large(id: Id) -> SourceError:
    """Return the error for a record whose item alone does not fit into memory."""
    return SourceError(
        f"The item of record {id!r} does not fit into memory; give this process more of it, or make backfill.batch smaller"
    )


def _answers(source: Source, records: Sequence[Record]) -> bool:
    """Tell whether the source answers for one of these records."""
    return bool(records) and bool(given(source, records)[0])


def _try_again(source: Source, record: Record, items: dict[Id, Item]) -> str:
    """Ask once more, since the source may have been away for a moment. Return why it fails; empty if it does not."""
    try:
        items |= source.load([record])
    except SourceError as exc:
        return str(exc)
    return ""


def _is_away(exc: SourceError) -> bool:
    """Tell whether the source cannot be reached, so that no record is to blame."""
    cause = exc.__cause__
    if isinstance(exc, SourceUnavailable) or isinstance(cause, ConnectionError | TimeoutError | ImportError):
        return True
    # SQLite is never away. It raises these errors for a text that is not UTF-8, too.
    from_sqlite = type(getattr(cause, "orig", None)).__module__ == "sqlite3"
    return type(cause).__name__ in ("OperationalError", "InterfaceError") and not from_sqlite
