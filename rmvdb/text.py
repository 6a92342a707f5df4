"""Sentences for people: how many of something, what can be kept of a text, and the URL of a database without its password."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sqlalchemy import URL

#: What a command says that was stopped.
RESUMABLE = "Stopped. Run the same command to resume."
#: The names of parameters that hold a secret.
_TELLING = r"(?:\w*passw(?:or)?d|\w*passphrase|\w*token|\w*secret|pwd)"
#: What leads to one in a URL, whose value reaches to the next &, and in an ODBC string, which is such a value itself, escaped or
#: not: there braces hold what divides parameters elsewhere.
_GAP = r"(?:\s|\+|%(?:20|09|0A|0D))*"
_PLAIN, _ODBC = rf"[?&]{_TELLING}=", rf"(?:;|%3B|=){_GAP}{_TELLING}{_GAP}(?:=|%3D)"
_IN_ODBC = r"(?:\{(?:[^}]|\}\})*\}|%7B(?:(?!%7D).|%7D%7D)*%7D|(?:(?!%3B)[^&;])*)"


def counted(count: int, one: str, many: str = "") -> str:
    """`1 record`, `2 records`; `many` where an s does not make it: `counted(2, "batch is", "batches are")`."""
    return f"{count} {one if count == 1 else many or f'{one}s'}"


def storable(text: str) -> str:
    """The text without what no database and no log keeps in it: NUL, and half a surrogate pair."""
    return text.replace("\0", "\ufffd").encode(errors="replace").decode()


def database_url(url: str) -> str:
    """The URL with the driver that rmvdb uses: plain `postgresql://` and `postgres://` become `postgresql+psycopg://`."""
    return re.sub(r"^postgres(ql)?://", "postgresql+psycopg://", url)


def parsed(url: str) -> URL | None:
    """The URL of a database in its parts, or None; none, too, where an @ ends the password before its end: what comes after it
    would be read, and told by whoever looks for it, as the host or the database."""
    from sqlalchemy import make_url
    from sqlalchemy.exc import ArgumentError

    if re.search(r"://[^:/]*:[^@?]*@[^?]*(\?[^=]*)?@", url):
        return None
    try:
        found = make_url(url)
    except (ArgumentError, ValueError):
        return None
    return None if "@" in (found.host or "") else found


def has_password(url: str) -> bool:
    """Whether a password stands in the URL itself, not as ${NAME}."""
    literal = re.sub(r"\$\{\w+\}", "", url)
    literal = re.sub(r"(?i)(=|%3D)(?:\{\}|%7B%7D)", r"\1", literal)
    return bool(re.search(rf"(?i)://[^:/@]*:[^@]+@|://[^:/]*:[^@/?]+@|{_PLAIN}[^&]|{_ODBC}(?!%3B)[^&;]", literal))


def without_password(url: str) -> str:
    """The URL as it may be shown: passwords before the host and among the parameters are replaced by ***."""
    hidden = re.sub(r"(://[^:/]*):.*@", r"\1:***@", url, flags=re.DOTALL)
    hidden = re.sub(rf"(?i)({_PLAIN}|[?&]sslkey=)[^&]*", r"\1***", hidden)
    return re.sub(rf"(?i)({_ODBC}){_IN_ODBC}", r"\1***", hidden)
