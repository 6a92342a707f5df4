"""Texts for people: counted nouns, storable texts, and the URL of a database without its password."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sqlalchemy import URL

#: The last line of a command that was stopped.
RESUMABLE = "Stopped. Run the same command to resume."
#: The names of parameters that hold a secret.
_TELLING = r"(?:\w*passw(?:or)?d|\w*passphrase|\w*token|\w*secret|pwd)"
#: The text before a secret in a URL, where its value ends at the next &, and in an ODBC string, which may be such a value itself,
#: escaped or not. In an ODBC string, braces may hold the characters that separate parameters elsewhere.
_GAP = r"(?:\s|\+|%(?:20|09|0A|0D))*"
_PLAIN, _ODBC = rf"[?&]{_TELLING}=", rf"(?:;|%3B|=){_GAP}{_TELLING}{_GAP}(?:=|%3D)"
_IN_ODBC = r"(?:\{(?:[^}]|\}\})*\}|%7B(?:(?!%7D).|%7D%7D)*%7D|(?:(?!%3B)[^&;])*)"


def counted(count: int, one: str, many: str = "") -> str:
    """Return `1 record` or `2 records`. `many` is the plural that an s does not make: `counted(2, "batch is", "batches are")`."""
    return f"{count} {one if count == 1 else many or f'{one}s'}"


def storable(text: str) -> str:
    """Replace the characters that no database and no log stores: NUL, and half a surrogate pair."""
    return text.replace("\0", "\ufffd").encode(errors="replace").decode()


def database_url(url: str) -> str:
    """Add the driver that rmvdb uses: plain `postgresql://` and `postgres://` become `postgresql+psycopg://`."""
    return re.sub(r"^postgres(ql)?://", "postgresql+psycopg://", url)


def parsed(url: str) -> URL | None:
    """Parse the URL of a database. Return None if it cannot be parsed.

    Return None, too, if the password holds an @ that is not escaped: the rest of the password would be taken for the host or the
    database, and would appear in messages.
    """
    from sqlalchemy import make_url
    from sqlalchemy.exc import ArgumentError

    if re.search(r"://[^:/]*:[^@?]*@[^?]*(\?[^=]*)?@", url):
        return None
    try:
        result = make_url(url)
    except (ArgumentError, ValueError):
        return None
    return None if "@" in (result.host or "") else result


def has_password(url: str) -> bool:
    """Return whether the URL holds a password itself, not as ${NAME}."""
    literal = re.sub(r"\$\{\w+\}", "", url)
    literal = re.sub(r"(?i)(=|%3D)(?:\{\}|%7B%7D)", r"\1", literal)
    return bool(re.search(rf"(?i)://[^:/@]*:[^@]+@|://[^:/]*:[^@/?]+@|{_PLAIN}[^&]|{_ODBC}(?!%3B)[^&;]", literal))


def without_password(url: str) -> str:
    """Return the URL to show: *** replaces passwords before the host and among the parameters."""
    hidden = re.sub(r"(://[^:/]*):.*@", r"\1:***@", url, flags=re.DOTALL)
    hidden = re.sub(rf"(?i)({_PLAIN}|[?&]sslkey=)[^&]*", r"\1***", hidden)
    return re.sub(rf"(?i)({_ODBC}){_IN_ODBC}", r"\1***", hidden)
