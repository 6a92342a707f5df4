"""What specs point at: `package.module:object`, and the modules whose code may run for one."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import sys
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from rmvdb.errors import ConfigError, RmvdbError, UsageError

_OBJECT = re.compile(r"(?P<module>\w+(\.\w+)*):(?P<name>\w+(\.\w+)*)")
#: Of two threads that empty the importers' caches at a time one fails (KeyError).
_importing = threading.Lock()
#: Folders where modules are looked for besides the current one.
_folders: list[str] = []


@dataclass(frozen=True, kw_only=True, slots=True)
class Allowed:
    """The modules whose code may run because the registry names it: what is in a database is not to choose code."""

    modules: tuple[str, ...]
    #: Where they are written: a file, or a variable of the environment.
    where: str

    def has(self, module: str) -> bool:
        """Whether it is one of them, or in one that is a package."""
        return any(f"{module}.".startswith(f"{each}.") for each in self.modules)

    def expect(self, module: str, spec: str) -> None:
        """ConfigError, with the line to write, if that module may not run."""
        if not self.has(module):
            raise ConfigError(
                f"{spec!r} in the registry names code of the module {module!r}, which {self.where} does not allow; if you trust "
                f"it, write {line([*self.modules, module])} there, below [models]"
            )


def line(modules: Iterable[str]) -> str:
    """The setting that allows these modules."""
    return f"allow = {json.dumps(list(modules), ensure_ascii=False)}"


def look_in(folder: Path) -> None:
    """Find the modules of this folder, too, if the current one does not have them."""
    if str(folder) not in _folders:
        _folders.append(str(folder))


def load_object(spec: str, *, error: type[RmvdbError] = UsageError, allowed: Allowed | None = None) -> Any:
    """The object that `package.module:object` names; modules of the current folder are found as with `python -m`.

    Raises UsageError for a spec of another form, `error` where the module or the object is missing or fails to load, and
    ConfigError, before it is imported, for a module that is not `allowed`; all are that are named by who runs the command.
    """
    module, *names = _parts(spec)
    if allowed:
        allowed.expect(module, spec)
    found: Any = _load_module(module, error)
    for name in names:
        if not hasattr(found, name):
            raise error(f"{spec!r} cannot be loaded: {_without(found, name)}")
        found = getattr(found, name)
        if allowed and (home := _home(found)):
            allowed.expect(home, spec)
    return found


def modules_of(spec: str) -> list[str]:
    """The modules that must be allowed for this spec: the one it names, and those where what it names was defined."""
    module, *names = _parts(spec)
    found: Any = _load_module(module, UsageError)
    homes = [home for name in names if (home := _home(found := getattr(found, name)))]
    return list(dict.fromkeys((module, *homes)))


def _parts(spec: str) -> list[str]:
    """The module, then each name behind the colon."""
    match = _OBJECT.fullmatch(spec)
    if match is None:
        raise UsageError(f"{spec!r} names no object; write package.module:object, such as 'models:clip'")
    return [match["module"], *match["name"].split(".")]


def _home(found: object) -> str:
    """The module of code that would be called, which may only be imported where the spec looks for it; empty for a value."""
    if isinstance(found, ModuleType):
        return found.__name__
    return str(found.__module__) if inspect.isclass(found) or inspect.isroutine(found) else ""


def _load_module(name: str, error: type[RmvdbError]) -> ModuleType:
    folders = list(dict.fromkeys((str(Path.cwd()), *_folders)))
    with _importing:
        # For good, not just for this import: the module may import its neighbours later.
        for folder in reversed([each for each in folders if each not in sys.path]):
            sys.path.insert(0, folder)
        importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as exc:
        raise error(_missing_module(name, exc.name or "", folders)) from exc
    except Exception as exc:
        raise error(f"Module {name!r} fails to load: {type(exc).__name__}: {exc}; mend it and try again") from exc


def _missing_module(name: str, missing: str, folders: Sequence[str]) -> str:
    if missing and f"{name}.".startswith(f"{missing}."):
        places = ", ".join(folders)
        return f"There is no module {missing!r} in {places} or among the installed packages; run from its folder or install it"
    return f"Module {name!r} fails to load: it needs {missing!r}, which is not installed; install it"


def _without(found: object, name: str) -> str:
    """That a module or an object has no such name, and what to do about it."""
    if isinstance(found, ModuleType) and name in _written_in(found):
        return f"this process loaded {found.__file__} before {name!r} was added to it; restart this process"
    return f"{_place(found)} has no {name!r}; check the name after the colon"


def _written_in(module: ModuleType) -> set[str]:
    """The names that the module's file defines now, whenever it was loaded."""
    try:
        tree = ast.parse(Path(str(module.__file__)).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return set()
    defined = {each.name for each in tree.body if isinstance(each, ast.FunctionDef | ast.ClassDef)}
    assigned = (target for each in tree.body if isinstance(each, ast.Assign) for target in each.targets)
    return defined | {each.id for each in assigned if isinstance(each, ast.Name)}


def _place(found: object) -> str:
    if isinstance(found, ModuleType):
        return f"{found.__name__} ({found.__file__})" if getattr(found, "__file__", None) else found.__name__
    return repr(getattr(found, "__name__", type(found).__name__))
