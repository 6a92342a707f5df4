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
    """Return whether a password stands in the URL itself, not as ${NAME}; of a URL that cannot be parsed, whether one may."""
    literal = re.sub(r":?\$\{\w+\}", "", url)
    if (found := parsed(literal)) is None:
        return bool(re.search(rf"(?is)://.*@|{_TELLING}(?:\s|\+|%\w\w)*(?:=|%3D)", literal))
    return bool(found.password) or any(_tells(name, str(value)) for name, value in found.query.items())


def _tells(name: str, value: str) -> bool:
    """Return whether a parameter of a URL holds a secret. The value of `odbc_connect` has parameters of its own."""
    if name == "odbc_connect":
        return bool(re.search(rf"(?i){_TELLING}\s*=\s*(?!\{{\}}|[\s;]|$)", value))
    return bool(value and re.fullmatch(f"(?i){_TELLING}", name))


def without_password(url: str) -> str:
    """Return the URL as it may be shown, with *** for each password. If it cannot be parsed, return its scheme alone."""
    if not has_password(url):
        return url
    if (found := parsed(url)) is None:
        scheme = re.search(r"[\w+.:-]*://", url)
        return f"{scheme[0] if scheme else ''}***"
    query = {name: "***" if _tells(name, str(value)) else value for name, value in found.query.items()}
    return found.set(query=query).render_as_string(hide_password=True).replace("%2A%2A%2A", "***")
