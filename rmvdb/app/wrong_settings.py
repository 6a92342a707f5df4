"""Sentences about settings that are unknown or wrong, each with the way out."""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path
from typing import Any, TypeAlias

from pydantic import SecretStr, ValidationError
from pydantic.fields import FieldInfo

from rmvdb.app.config_file import as_toml
from rmvdb.app.settings import PREFIX, IndexSection, ProjectSettings, Section
from rmvdb.errors import ConfigError
from rmvdb.storage import ownership
from rmvdb.text import parsed, without_password

#: The names of one setting, from the outermost section on.
Keys: TypeAlias = tuple[str, ...]
_HINT = (
    "; parameters of Milvus' index, such as ef or nlist, go into index.params or index.search, and the index of one gallery "
    "into [indexes.<gallery>]"
)

#: The variables that Kubernetes puts into each pod for a Service.
_OF_A_SERVICE = re.compile(r"_SERVICE_(HOST|PORT)(_\w+)?$|_PORT_\d+_(TCP|UDP|SCTP)(_\w+)?$")


def known(gallery: str = "<gallery>") -> list[Keys]:
    """Return the keys of every section and setting, with `gallery` as the one that has an index of its own."""
    keys: list[Keys] = []
    for name, field in ProjectSettings.model_fields.items():
        section: Any = IndexSection if name == "indexes" else field.annotation
        within = (name, gallery) if name == "indexes" else (name,)
        keys += [(name,), within] if name == "indexes" else [within]
        if issubclass(section, Section):
            keys += [(*within, key) for key in section.model_fields]
    return keys


def refuse_unknown_variables() -> None:
    """Raise ConfigError for a variable of ours that sets nothing. pydantic-settings would ignore it."""
    for variable, value in os.environ.items():
        if _OF_A_SERVICE.search(variable) or (variable.endswith("_PORT") and value.startswith(("tcp://", "udp://"))):
            continue  # Kubernetes sets these for each Service whose name begins with rmvdb-
        if not (keys := _keys_of(variable)) or keys in _known_beside(keys):
            continue
        parent = _field(keys[:-1])
        if parent is not None and parent.annotation == dict[str, Any]:
            # Names in the environment are upper case. Milvus' own names, such as efConstruction, are not.
            way_out = f"write {_as_variable(keys[:-1])} as JSON, such as '{{\"M\": 16}}'"
        else:
            way_out = _offer(keys, as_variable=True)
        raise ConfigError(f"Environment: there is no setting {variable}; {way_out}")


def sentence(exc: ValidationError, file: Path | None) -> str:
    """Return the first of pydantic's errors as one sentence. The others show once it is corrected."""
    error = exc.errors(include_url=False)[0]
    keys = tuple(str(part) for part in error["loc"] if not isinstance(part, int))  # not the place in a list
    where, dotted = _origin(keys, file), ".".join(keys)
    match error["type"]:
        case "extra_forbidden":
            return f"{where}: there is no setting {dotted!r}; {_offer(keys)}"
        case "model_type":
            return f"{where}: {dotted} must be a section; write [{dotted}] and its keys below"
    problem = re.sub(r"^(Input|String) should", "must", error["msg"].removeprefix("Value error, "))
    problem = problem.replace("dictionary", "table").replace("valid tuple", "list")
    problem = problem.replace("Input is not a valid path for <class 'pathlib.Path'>", "must be a path").split(", unable")[0]
    field = _field(keys)
    if field is None or not field.description:
        return f"{where}: {dotted + ': ' if dotted else ''}{problem}; change one of them"
    return f"{where}: {dotted}{_value(keys, error['input'])} {problem}{_meaning(field, error['type'])}"


def _offer(keys: Keys, *, as_variable: bool = False) -> str:
    """Return the remedy for an unknown setting: the nearest known one, else every setting of its section."""
    show = _as_variable if as_variable else lambda each: repr(".".join(each))
    everywhere = _known_beside(keys)
    beside = [each for each in everywhere if each[:-1] == keys[:-1]]
    # In turn: a name nearly the same as a whole, in the same section, or the same name in another section.
    whole, name = slice(None), slice(-1, None)
    for part, among, cutoff in ((whole, everywhere, 0.9), (name, beside, 0.65), (name, everywhere, 0.8)):
        names = {".".join(each[part]): each for each in reversed(among)}
        if near := difflib.get_close_matches(".".join(keys[part]), names, n=1, cutoff=cutoff):
            return f"did you mean {show(names[near[0]])}?"
    return f"there are: {', '.join(map(show, beside))}{_HINT if keys[0] in ('index', 'indexes', 'search') else ''}"


def _known_beside(keys: Keys) -> list[Keys]:
    return known(keys[1]) if keys[0] == "indexes" and len(keys) > 1 else known()


def _keys_of(variable: str) -> Keys:
    """Return the keys that an environment variable sets, none if it is not rmvdb's."""
    if not variable.upper().startswith(PREFIX) or variable.upper() in ("RMVDB_CONFIG", ownership.VARIABLE):
        return ()
    return tuple(variable[len(PREFIX) :].lower().split("__"))


def _as_variable(keys: Keys) -> str:
    return PREFIX + "__".join(keys).upper()


def _origin(keys: Keys, file: Path | None) -> str:
    """Return the environment variable that set these keys, else the file."""
    for variable in os.environ:
        found = _keys_of(variable)
        if found and keys[: len(found)] == found:
            return variable
    return str(file) if file else "Settings"


def _field(keys: Keys) -> FieldInfo | None:
    if keys[:1] == ("indexes",):
        return IndexSection.model_fields.get(keys[2]) if len(keys) > 2 else ProjectSettings.model_fields["indexes"]
    section: Any = ProjectSettings
    for key in keys[:-1]:
        section = getattr(section.model_fields.get(key), "annotation", None)
        if not isinstance(section, type) or not issubclass(section, Section):
            return None
    return section.model_fields.get(keys[-1]) if keys else None


def _value(keys: Keys, value: object) -> str:
    """Return the wrong value as it may be shown."""
    if keys[-1] == "token" or isinstance(value, SecretStr) or (keys[-1] in ("uri", "home") and "@" in str(value)):
        return ""
    if keys[-1] == "url" and "@" in str(value) and parsed(str(value)) is None:
        return ""
    return f" = {without_password(value)!r}" if isinstance(value, str) else f" = {value!r}"


def _meaning(field: FieldInfo, problem: str) -> str:
    """Return an example and the first sentence of what the setting means. rmvdb's own errors say enough."""
    if problem == "value_error":
        return ""
    shown = field.examples[0] if field.examples else field.default
    first = re.split(r"(?<=\w)\.(?= |$)", field.description or "")[0]
    return f"{f', such as {as_toml(shown)}' if shown else ''}: {first[:1].lower()}{first[1:]}"
