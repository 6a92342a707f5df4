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


def counted(count: int, one: str, many: str = "") -> str:
    """Return `1 record` or `2 records`. `many` is the plural that an s does not make: `counted(2, "batch is", "batches are")`."""
    return f"{count} {one if count == 1 else many or f'{one}s'}"


def size(count: float) -> str:
    """Return bytes as people write them: `6.14 GB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


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
    """Return whether a password stands in the URL itself, not as ${NAME}; of a URL that cannot be parsed, whether one may."""
    literal = re.sub(r":?\$\{\w+\}", "", url)
    if (url_parts := parsed(literal)) is None:
        return bool(re.search(rf"(?is)://.*@|{_TELLING}(?:\s|\+|%\w\w)*(?:=|%3D)", literal))
    return bool(url_parts.password) or any(_tells(name, str(value)) for name, value in url_parts.query.items())


def _tells(name: str, value: str) -> bool:
    """Return whether a parameter of a URL holds a secret. The value of `odbc_connect` has parameters of its own."""
    if name == "odbc_connect":
        return bool(re.search(rf"(?i){_TELLING}\s*=\s*(?!\{{\}}|[\s;]|$)", value))
    return bool(value and re.fullmatch(f"(?i){_TELLING}", name))


def without_password(url: str) -> str:
    """Return the URL as it may be shown, with *** for each password. If it cannot be parsed, return its scheme alone."""
    if not has_password(url):
        return url
    if (url_parts := parsed(url)) is None:
        scheme = re.search(r"[\w+.:-]*://", url)
        return f"{scheme[0] if scheme else ''}***"
    query = {name: "***" if _tells(name, str(value)) else value for name, value in url_parts.query.items()}
    return url_parts.set(query=query).render_as_string(hide_password=True).replace("%2A%2A%2A", "***")
