"""The objects that specs name, `package.module:object`, and the modules whose code may run."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from rmvdb.errors import ConfigError, RmvdbError, UsageError
from rmvdb.timing import ProcessLock

_OBJECT = re.compile(r"(?P<module>\w+(\.\w+)*):(?P<name>\w+(\.\w+)*)")
#: If two threads empty the importers' caches at the same time, one fails (KeyError).
_importing = ProcessLock()
#: Folders to find modules in, besides the current one.
_folders: list[str] = []
#: Folders in which no modules are found, since other users can put files there.
_left_out: set[str] = set()


@dataclass(frozen=True, kw_only=True, slots=True)
class Allowed:
    """The modules whose code may run if the registry names it. A database alone does not choose code."""

    modules: tuple[str, ...]
    #: The file or environment variable that lists them.
    where: str

    def has(self, module: str) -> bool:
        """Tell whether a module is one of them, or inside one that is a package."""
        return any(f"{module}.".startswith(f"{each}.") for each in self.modules)

    def expect(self, module: str, spec: str) -> None:
        """Raise ConfigError, with the line to write, if that module may not run."""
        if not self.has(module):
            raise ConfigError(
                f"{spec!r} in the registry names code of the module {module!r}, which {self.where} does not allow; if you trust "
                f"it, write {line([*self.modules, module])} there, below [models]"
            )


def line(modules: Iterable[str]) -> str:
    """Return the setting that allows these modules."""
    return f"allow = {json.dumps(list(modules), ensure_ascii=False)}"


def look_in(folder: Path) -> None:
    """Find modules in this folder, too, if the current one does not have them."""
    if str(folder) not in _folders:
        _folders.append(str(folder))


def leave_out(folder: Path) -> None:
    """Find no modules in this folder, because other users can put files there."""
    _left_out.add(str(folder))


def load_object(spec: str, *, error: type[RmvdbError] = UsageError, allowed: Allowed | None = None) -> Any:
    """Load the object that `package.module:object` names. Modules of the current folder count, as with `python -m`.

    Without `allowed` every module may run: the user names the object on the command line.

    Raises: UsageError for a spec of another form, `error` if the module or the object is missing or fails to load, and
    ConfigError, before the import, for a module that is not `allowed`.
    """
    module, *names = _parts(spec)
    if allowed:
        allowed.expect(module, spec)
    named: Any = _load_module(module, error)
    for name in names:
        if not hasattr(named, name):
            raise error(f"{spec!r} cannot be loaded: {_without(named, name)}")
        named = getattr(named, name)
        if allowed and (home := _home(named)):
            allowed.expect(home, spec)
    return named


def modules_of(spec: str) -> list[str]:
    """Return the modules to allow for this spec: the one that it names, and the one that defines the named object."""
    module, *names = _parts(spec)
    named: Any = _load_module(module, UsageError)
    homes = [home for name in names if (home := _home(named := getattr(named, name)))]
    return list(dict.fromkeys((module, *homes)))


def _parts(spec: str) -> list[str]:
    """Return the module, then each name after the colon."""
    match = _OBJECT.fullmatch(spec)
    if match is None:
        raise UsageError(f"{spec!r} does not name an object; write package.module:object, such as 'models:clip'")
    return [match["module"], *match["name"].split(".")]


def _home(named: object) -> str:
    """Return the module that defines a class or function, which the named module may only import; empty for a value."""
    if isinstance(named, ModuleType):
        return named.__name__
    return str(named.__module__) if inspect.isclass(named) or inspect.isroutine(named) else ""


def _load_module(name: str, error: type[RmvdbError]) -> ModuleType:
    folders = [each for each in dict.fromkeys((str(Path.cwd()), *_folders)) if each not in _left_out]
    with _importing.now:
        # The folder stays on the path: the module may import its neighbours later.
        for folder in reversed([each for each in folders if each not in sys.path]):
            sys.path.insert(0, folder)
        importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as exc:
        raise error(_missing_module(name, exc.name or "", folders)) from exc
    except (Exception, SystemExit) as exc:
        raise error(f"Module {name!r} fails to load: {type(exc).__name__}: {exc}; fix it and try again") from exc


def _missing_module(name: str, missing: str, folders: Sequence[str]) -> str:
    if missing and f"{name}.".startswith(f"{missing}."):
        places = f"in {', '.join(folders)} or among" if folders else "among"
        hint = ""
        if _left_out:
            named = ", ".join(sorted(_left_out))
            hint = f" (other users can put files in {named}: rmvdb looks there only with --trust, or if RMVDB_TRUST names it)"
        return f"There is no module {missing!r} {places} the installed packages{hint}; run from its folder or install it"
    return f"Module {name!r} fails to load: it needs {missing!r}, which is not installed; install it"


def _without(named: object, name: str) -> str:
    """Say that a module or an object has no such name, and what to do."""
    if isinstance(named, ModuleType) and name in _written_in(named):
        return f"this process loaded {named.__file__} before {name!r} was added to it; restart this process"
    return f"{_place(named)} has no {name!r}; check the name after the colon"


def _written_in(module: ModuleType) -> set[str]:
    """Return the names that the module's file defines now, whenever it was loaded."""
    try:
        tree = ast.parse(Path(str(module.__file__)).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return set()
    defined = {each.name for each in tree.body if isinstance(each, ast.FunctionDef | ast.ClassDef)}
    assigned = (target for each in tree.body if isinstance(each, ast.Assign) for target in each.targets)
    return defined | {each.id for each in assigned if isinstance(each, ast.Name)}


def _place(named: object) -> str:
    if isinstance(named, ModuleType):
        return f"{named.__name__} ({named.__file__})" if getattr(named, "__file__", None) else named.__name__
    return repr(getattr(named, "__name__", type(named).__name__))
