"""What settings and specs point at: `package.module:object` and the URLs of databases."""

from __future__ import annotations

import importlib
import re
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rmvdb.errors import RmvdbError, UsageError

if TYPE_CHECKING:
    from sqlalchemy import URL

_OBJECT = re.compile(r"(?P<module>\w+(\.\w+)*):(?P<name>\w+(\.\w+)*)")
#: Of two threads that empty the importers' caches at a time one fails (KeyError).
_importing = threading.Lock()

#: The names of parameters that hold a secret.
_TELLING = r"(?:\w*passw(?:or)?d|\w*passphrase|\w*token|\w*secret|pwd)"
#: What leads to one in a URL, whose value reaches to the next &, and in an ODBC string, which is such a value itself, escaped or
#: not: there braces hold what divides parameters elsewhere.
_GAP = r"(?:\s|\+|%(?:20|09|0A|0D))*"
_PLAIN, _ODBC = rf"[?&]{_TELLING}=", rf"(?:;|%3B|=){_GAP}{_TELLING}{_GAP}(?:=|%3D)"
_IN_ODBC = r"(?:\{(?:[^}]|\}\})*\}|%7B(?:(?!%7D).|%7D%7D)*%7D|(?:(?!%3B)[^&;])*)"


def load_object(spec: str, *, error: type[RmvdbError] = UsageError) -> Any:
    """The object that `package.module:object` names; modules of the current folder are found as with `python -m`.

    Raises UsageError for a spec of another form, and `error` where the module or the object is missing or fails to load.
    """
    match = _OBJECT.fullmatch(spec)
    if match is None:
        raise UsageError(f"{spec!r} names no object; write package.module:object, such as 'models:clip'")
    found: Any = _load_module(match["module"], error)
    for name in match["name"].split("."):
        if not hasattr(found, name):
            raise error(f"{spec!r} cannot be loaded: {_place(found)} has no {name!r}; check the name after the colon")
        found = getattr(found, name)
    return found


def _load_module(name: str, error: type[RmvdbError]) -> ModuleType:
    folder = str(Path.cwd())
    with _importing:
        if folder not in sys.path:
            # For good, not just for this import: the module may import its neighbours later.
            sys.path.insert(0, folder)
        importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as exc:
        raise error(_missing_module(name, exc.name or "", folder)) from exc
    except Exception as exc:
        raise error(f"Module {name!r} fails to load: {type(exc).__name__}: {exc}; mend it and try again") from exc


def _missing_module(name: str, missing: str, folder: str) -> str:
    if missing and f"{name}.".startswith(f"{missing}."):
        return f"There is no module {missing!r} in {folder} or among the installed packages; run from its folder or install it"
    return f"Module {name!r} fails to load: it needs {missing!r}, which is not installed; install it"


def _place(found: object) -> str:
    if isinstance(found, ModuleType):
        return f"{found.__name__} ({found.__file__})" if getattr(found, "__file__", None) else found.__name__
    return repr(getattr(found, "__name__", type(found).__name__))


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
