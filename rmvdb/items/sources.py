"""Sources: where the item of a record comes from.

folder:photos/{id}.jpg              a file, its name made from the record's id and fields
field:caption                       a field of the record itself
call:package.module:function        function(ids) → {id: item}, or an object with load(records)
sql:URL#SELECT id, item FROM … WHERE id IN :ids     two columns of a query; ${NAME} in the URL is read from the environment
"""

from __future__ import annotations

import errno
import inspect
import json
import os
import re
import string
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from rmvdb.errors import SourceError, SourceUnavailable, UsageError
from rmvdb.items.objects import Allowed, load_object
from rmvdb.protocols import Source
from rmvdb.text import database_url, has_password, parsed, without_password
from rmvdb.types import Id, Item, Query, Record

if TYPE_CHECKING:
    from sqlalchemy import URL, Engine

#: Ids in one query: far below what any database allows, large enough to be few.
_IDS_A_QUERY = 500
#: What is read from the environment, and the parts of a URL in which it is escaped: the user with the password, and what a
#: parameter is set to.
_NAME, _ESCAPED = re.compile(r"\$\{(\w+)\}"), re.compile(r"(?<=://)[^/]*@|(?<==)\$\{\w+\}")
_BEGINS = re.compile(r"\s*(select|with)\b", re.IGNORECASE)
_QUERY = "SELECT id, item FROM … WHERE id IN :ids"


def load(spec: str, *, base: Path | None = None, allowed: Allowed | None = None) -> Source:
    """The source that a spec means; relative folders start at `base`, else at the current folder.

    Raises UsageError for a spec of none of the forms above, SourceError where what it names cannot be loaded, ConfigError if that
    is of a module that is not `allowed`.
    """
    kind, _, rest = spec.partition(":")
    makers: dict[str, Callable[[str], Source]] = {
        "folder": lambda pattern: ImageFolder(pattern, base=base),
        "field": FieldSource,
        "call": lambda name: CallableSource(name, allowed=allowed),
        "sql": _sql_source,
    }
    if kind not in makers or not rest:
        raise UsageError(
            f"{without_password(spec)!r} is no source; write folder:photos/{{id}}.jpg, field:NAME, call:package.module:function "
            f"or sql:URL#{_QUERY}"
        )
    return makers[kind](rest)


def refuse_password(spec: str) -> None:
    """UsageError for a spec that would be kept, and shown, with a password in it."""
    if shown(spec) != spec:
        raise UsageError(
            f"The source {shown(spec)!r} has its password in it, and it would be kept so; put it into the environment and write "
            "${NAME} in its place, such as postgresql://user:${PASSWORD}@host/db"
        )


def shown(spec: str) -> str:
    """The spec as it may be shown: one of before `refuse_password` may have a password in it."""
    if not spec.startswith("sql:"):
        return spec
    url, query = _split(rest := spec.removeprefix("sql:"))
    if not _BEGINS.match(query):  # what is behind the last # may be the end of a password
        url, query = rest, ""
    return f"sql:{without_password(url)}{'#' if query else ''}{query}" if has_password(url) else spec


def _split(spec: str) -> tuple[str, str]:
    """The URL and the query of an sql: source; a # may be in the URL, too."""
    marks = (mark.start() for mark in re.finditer("#", spec))
    at = next((mark for mark in marks if _BEGINS.match(spec, mark + 1)), spec.rfind("#"))
    return (spec[:at], spec[at + 1 :]) if at >= 0 else (spec, "")


#: How many records in a row a source fails for, each alone, before the source counts as broken and not they.
_BROKEN = 10


def given(
    source: Source, records: Sequence[Record], *, known_good: Callable[[], Sequence[Record]] = tuple
) -> tuple[dict[Id, Item], dict[Id, str]]:
    """Items by id, in the order of the records, and by id why the source fails for a record; a record without item has neither.

    A call that fails is halved until the records that it fails for stand alone. Raises SourceError if the source answers for
    none of them, nor for those that `known_good` gives; at once if what it reads cannot be reached.
    """
    found: dict[Id, Item] = {}
    failed: dict[Id, SourceError] = {}
    waiting, answers = [list(records)] if records else [], False
    while waiting:
        part = waiting.pop()
        try:
            found |= source.load(part)
            answers = True
        except SourceError as exc:
            if _is_away(exc):
                raise
            if len(part) > 1:
                waiting += [part[len(part) // 2 :], part[: len(part) // 2]]
                continue
            failed[part[0].id] = exc
            if not answers and (len(failed) == _BROKEN or not waiting) and not (answers := _answers(source, known_good())):
                raise next(iter(failed.values())) from exc.__cause__
    reasons = {record.id: why for record in records if record.id in failed and (why := _again(source, record, found))}
    return {record.id: found[record.id] for record in records if record.id in found}, reasons


def _answers(source: Source, records: Sequence[Record]) -> bool:
    """Whether the source answers for one of these records."""
    return bool(records) and bool(given(source, records)[0])


def _again(source: Source, record: Record, found: dict[Id, Item]) -> str:
    """Why a source fails for one record, tried once more since it may have been away for a moment; empty if it doesn't."""
    try:
        found |= source.load([record])
    except SourceError as exc:
        return str(exc)
    return ""


def _is_away(exc: SourceError) -> bool:
    """Whether what a source reads cannot be reached, which no record is to blame for."""
    cause = exc.__cause__
    if isinstance(exc, SourceUnavailable) or isinstance(cause, ConnectionError | TimeoutError | ImportError):
        return True
    # SQLite says so of a text that is no UTF-8, too, and is never far.
    from_sqlite = type(getattr(cause, "orig", None)).__module__ == "sqlite3"
    return type(cause).__name__ in ("OperationalError", "InterfaceError") and not from_sqlite


def queries(file: Path) -> list[Query]:
    """Queries, a JSON object a line: {"item": "a text or the path of a file", "answers": [7, 42]}, or without answers where
    nobody knows any.

    Raises UsageError, with the line, for a file that is none.
    """
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")  # JSON has other ends of lines inside its texts
    except (OSError, UnicodeDecodeError) as exc:
        raise UsageError(f"The queries in {str(file)!r} cannot be read ({exc}); name a text file of JSON lines") from exc
    if not (found := [_query(line, f"Line {number} of {file}") for number, line in enumerate(lines, start=1) if line.strip()]):
        raise UsageError(f'{str(file)!r} holds no query; write a line each: {{"item": "a text or a file"}}')
    return found


def _query(line: str, where: str) -> Query:
    try:
        told = json.loads(line)
        item, answers = told["item"], told.get("answers", [])
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as exc:
        raise UsageError(
            f'{where} is no query; write {{"item": "a text or a file"}}, and beside it "answers": [ids] where they are known'
        ) from exc
    if not isinstance(answers, list) or not all(isinstance(id, int | str) and not isinstance(id, bool) for id in answers):
        raise UsageError(f"{where} has answers {answers!r}; write a list of ids")
    return Query(item=item_of(item) if isinstance(item, str) else item, answers=tuple(answers))


def item_of(text: str) -> Path | str:
    """The file of that name, else the text itself."""
    return Path(text) if os.path.isfile(text) else text  # noqa: PTH113 (Path.is_file raises for a text longer than any name)


def _sql_source(rest: str) -> Source:
    return SQLSource(*_split(rest))


class ImageFolder:
    """Files whose names are made from records: `photos/{id}.jpg`, `{split}/{id:06d}.png`. Items are paths."""

    def __init__(self, pattern: str, *, base: Path | None = None) -> None:
        self.pattern = pattern
        try:
            parts = list(string.Formatter().parse(pattern))
        except ValueError as exc:
            raise UsageError(f"{pattern!r} is no pattern of files: {exc}; write one such as photos/{{id}}.jpg") from exc
        names = [name for _, name, _, _ in parts if name is not None]
        # Plain names only: str.format would look into attributes too.
        plain = all(map(str.isidentifier, names)) and not any(
            conversion or "{" in (form or "") for _, _, form, conversion in parts
        )
        if not names or not plain or "{{" in pattern or "}}" in pattern:
            raise UsageError(f"{pattern!r} is no pattern of files; name fields of the record, as in photos/{{id}}.jpg")
        # The folder is all that comes before the first field: nothing that a record holds leads out of it.
        fixed, slash, _ = pattern[: pattern.index("{")].rpartition("/")
        self.folder = (base or Path.cwd()) / Path(fixed + slash).expanduser()
        self._template = pattern[len(fixed + slash) :]

    def load(self, records: Sequence[Record]) -> Mapping[Id, Item]:
        """Paths by id; records without that file or without one of the fields are left out."""
        if not os.path.isdir(self.folder):  # noqa: PTH112 (Path.is_dir raises where a folder above is closed)
            raise SourceUnavailable(f"Folder {self.folder} is not there; mount it, or correct the source 'folder:{self.pattern}'")
        found = ((record.id, self._file(record)) for record in records)
        return {id: path for id, path in found if path is not None}

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
        except (ValueError, TypeError, OverflowError) as exc:  # a text, or a list, where the pattern wants a number
            raise SourceError(
                f"The pattern {self.pattern!r} does not fit record {record.id!r}: {exc}; correct the pattern, or that record"
            ) from exc


def field_of(spec: str | None) -> str:
    """The field that holds a record's item, by the spec of its source; "" if its items come from elsewhere."""
    return spec.removeprefix("field:") if spec and spec.startswith("field:") else ""


class FieldSource:
    """A field of the record itself, such as its text."""

    def __init__(self, field: str) -> None:
        self.field = field

    def load(self, records: Sequence[Record]) -> Mapping[Id, Item]:
        """The field's values by id; records without it are left out."""
        return {record.id: record.fields[self.field] for record in records if record.fields.get(self.field) is not None}


class CallableSource:
    """A function(ids) → {id: item}, or a source of one's own: an object, or a class without arguments, with load(records)."""

    def __init__(self, spec: str, *, allowed: Allowed | None = None) -> None:
        self.spec = spec
        found = load_object(spec, error=SourceError, allowed=allowed)
        if inspect.isclass(found):
            found = self._guarded(found)
        self._load: Callable[[Sequence[Record]], object]
        if callable(getattr(found, "load", None)):
            self._load = found.load
        elif callable(found):
            self._load = lambda records: found([record.id for record in records])
        else:
            raise SourceError(f"{spec!r} is a {type(found).__name__}; name a function(ids) or an object with load(records)")

    def load(self, records: Sequence[Record]) -> Mapping[Id, Item]:
        """Items by id, as the function gives them; ids that were not asked for and items that are None are left out."""
        items = self._guarded(lambda: self._load(records))
        if not isinstance(items, Mapping):
            raise SourceError(f"{self.spec!r} gives a {type(items).__name__}; it must give a mapping of ids to items")
        asked = self._guarded(lambda: {record.id: items.get(record.id) for record in records})
        return {id: item for id, item in asked.items() if item is not None}

    def _guarded(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except SourceError:
            raise
        except Exception as exc:
            raise SourceError(f"{self.spec!r} fails: {type(exc).__name__}: {exc}; mend it and run the step again") from exc


class SQLSource:
    """A table: the first two columns of a query over `:ids` are id and item."""

    def __init__(self, url: str, query: str) -> None:
        self.url = url
        self.query = query.strip()
        begins = _BEGINS.match(self.query)
        if not begins or not re.search(r"(?<!:):ids\b", self.query):
            told = repr(query) if begins else "What comes after the URL's #"  # it may be the end of a password
            raise UsageError(f"{told} is no query for items; write one such as {_QUERY}")
        self._lock = threading.Lock()
        self._made: Engine | None = None

    def __repr__(self) -> str:
        return f"SQLSource({without_password(self.url)!r}, {self.query!r})"

    def load(self, records: Sequence[Record]) -> Mapping[Id, Item]:
        """Items by id; rows of other ids and items that are NULL are left out."""
        from sqlalchemy.exc import SQLAlchemyError

        wanted = {record.id for record in records}
        try:
            return {id: item for id, item in self._rows(list(wanted)) if id in wanted and item is not None}
        except (SQLAlchemyError, ImportError, ValueError, TypeError, OverflowError) as exc:
            cause = getattr(exc, "orig", None) or exc
            # A ValueError repeats the value, and that may be a secret.
            words = "" if isinstance(cause, ValueError) else without_password(str(cause))
            said = (words or type(cause).__name__).splitlines()[0]
            raise SourceError(
                f"{without_password(self.url)} does not answer {self.query!r}: {said}; "
                "check the address, the query and the database"
            ) from exc

    def _rows(self, ids: list[Id]) -> Iterator[tuple[Id, Item]]:
        from sqlalchemy import bindparam, text

        query = text(self.query).bindparams(bindparam("ids", expanding=True))
        with self._engine().connect() as connection:
            for start in range(0, len(ids), _IDS_A_QUERY):
                for row in connection.execute(query, {"ids": ids[start : start + _IDS_A_QUERY]}):
                    if len(row) < 2:
                        raise SourceError(f"{self.query!r} gives one column; it must give two, id and item")
                    yield row[0], bytes(row[1]) if isinstance(row[1], memoryview) else row[1]

    def _engine(self) -> Engine:
        from sqlalchemy import NullPool, create_engine

        with self._lock:
            if self._made is None:
                # No pool: one query a batch is rare, and a connection kept for hours is one that may be gone.
                self._made = create_engine(_filled_in(self.url), poolclass=NullPool)
            return self._made


def _filled_in(url: str) -> URL:
    """The URL with each ${NAME} from the environment, so that a password need not be kept with the gallery, nor escaped."""

    def value(match: re.Match[str]) -> str:
        if match[1] not in os.environ:
            raise SourceError(f"The environment variable {match[1]} is not set; {without_password(url)} needs it")
        return os.environ[match[1]]

    def escaped(part: re.Match[str]) -> str:  # not the colon: a name may stand for user:password
        return _NAME.sub(lambda match: quote(value(match), safe=":"), part[0])

    if (found := parsed(database_url(_NAME.sub(value, _ESCAPED.sub(escaped, url))))) is None:
        raise SourceError(
            f"{without_password(url)!r} is no address of a database; write one such as postgresql://user:${{PASSWORD}}@host/db, "
            "with %40 for @ in a password that is no ${NAME} of its own"
        )
    return found
