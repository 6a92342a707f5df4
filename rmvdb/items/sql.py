"""The source `sql:`: a query of a database, with passwords from the environment."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING
from urllib.parse import quote

from rmvdb.errors import SourceError, UsageError
from rmvdb.text import database_url, has_password, parsed, without_password

if TYPE_CHECKING:
    from sqlalchemy import URL, Engine

    from rmvdb.types import Id, Item, Record

#: The form of a query.
QUERY = "SELECT id, item FROM … WHERE id IN :ids"
#: Ids in one query: far below the limit of any database, and large enough to need few queries.
_IDS_A_QUERY = 500
#: A name that is read from the environment, and the parts of a URL in which its value is escaped: user and password, and the
#: value of a parameter.
_NAME, _ESCAPED = re.compile(r"\$\{(\w+)\}"), re.compile(r"(?<=://)[^/]*@|(?<==)\$\{\w+\}")
_BEGINS = re.compile(r"\s*(select|with)\b", re.IGNORECASE)


def split(rest: str) -> tuple[str, str]:
    """Return the URL and the query of a spec. A # may be in the URL, too."""
    marks = (mark.start() for mark in re.finditer("#", rest))
    at = next((mark for mark in marks if _BEGINS.match(rest, mark + 1)), rest.rfind("#"))
    return (rest[:at], rest[at + 1 :]) if at >= 0 else (rest, "")


def shown(rest: str) -> str:
    """Return the spec without the password in its URL."""
    url, query = split(rest)
    if not _BEGINS.match(query):  # the text behind the last # may be the end of a password
        url, query = rest, ""
    return f"{without_password(url)}{'#' if query else ''}{query}" if has_password(url) else rest


class SQLSource:
    """A table: the first two columns of a query over `:ids` are id and item."""

    def __init__(self, url: str, query: str) -> None:
        """Raise UsageError if the query is malformed. The database is not asked yet."""
        self.url = url
        self.query = query.strip()
        begins = _BEGINS.match(self.query)
        if not begins or not re.search(r"(?<!:):ids\b", self.query):
            shown_query = repr(query) if begins else "What comes after the URL's #"  # it may be the end of a password
            raise UsageError(f"{shown_query} is not a query for items; write one such as {QUERY}")
        self._lock = threading.Lock()
        self._made: Engine | None = None

    def __repr__(self) -> str:
        return f"SQLSource({without_password(self.url)!r}, {self.query!r})"

    def load(self, records: Sequence[Record]) -> Mapping[Id, Item]:
        """Return items by id. Leave out rows of other ids and items that are NULL."""
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
                # No pool: one query a batch is rare, and a connection that is kept for hours may break.
                self._made = create_engine(_filled_in(self.url), poolclass=NullPool)
            return self._made


def _filled_in(url: str) -> URL:
    """Fill in each ${NAME} from the environment, so that the gallery keeps no password and you need not escape one."""

    def value(match: re.Match[str]) -> str:
        if match[1] not in os.environ:
            raise SourceError(f"The environment variable {match[1]} is not set; {without_password(url)} needs it")
        return os.environ[match[1]]

    def escaped(part: re.Match[str]) -> str:  # not the colon: a name may stand for user:password
        return _NAME.sub(lambda match: quote(value(match), safe=":"), part[0])

    if (filled := parsed(database_url(_NAME.sub(value, _ESCAPED.sub(escaped, url))))) is None:
        raise SourceError(
            f"{without_password(url)!r} is not the address of a database; write one such as "
            "postgresql://user:${PASSWORD}@host/db, with %40 for @ in a password that has no ${NAME} of its own"
        )
    return filled
