"""rmvdb.toml: finds it, reads it, and writes it."""

from __future__ import annotations

import json
import os
import re
import stat
import textwrap
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from rmvdb.app.settings import ProjectSettings, Section
from rmvdb.errors import ConfigError, RmvdbError
from rmvdb.items.objects import line
from rmvdb.storage import files

NAME = "rmvdb.toml"
#: Defaults that depend on home, as a new file shows them.
_IN_HOME = {"uri": ".rmvdb/milvus.db"}


def find(path: Path | None) -> Path | None:
    """Return the file that is named, else the nearest one upwards. Return None if there is none.

    Raises ConfigError if the file that the argument or RMVDB_CONFIG names is missing, or cannot be looked at.
    """
    try:
        return _find(path)
    except OSError as exc:
        where = exc.filename or path or "the current folder"
        raise ConfigError(f"{where} cannot be looked at: {exc.strerror}; correct the rights, or go to another folder") from exc


def _find(path: Path | None) -> Path | None:
    chosen = path or (Path(os.environ["RMVDB_CONFIG"]) if os.environ.get("RMVDB_CONFIG") else None)
    if chosen is None:
        here = Path.cwd()
        found = next((folder / NAME for folder in (here, *here.parents) if os.path.lexists(folder / NAME)), None)
        if found is not None and not found.is_file():
            raise ConfigError(f"{found} is not a file that can be read: a folder, or a link to nothing; mount it, or remove it")
        return found
    chosen = files.expanded(chosen).absolute()
    file = chosen / NAME if chosen.is_dir() else chosen
    if not file.is_file():
        whose = "" if path else " (named by RMVDB_CONFIG)"
        raise ConfigError(f"{file}{whose} is not there; run `rmvdb init` in its folder or name another file")
    return file


def read(file: Path) -> dict[str, Any]:
    """Return the contents of the file. Raises ConfigError if it cannot be read or is not TOML."""
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as exc:
        raise ConfigError(
            f"{file} is not valid TOML: {exc}; correct that line, `rmvdb init` in an empty folder shows the form"
        ) from exc
    except UnicodeDecodeError as exc:
        raise ConfigError(f"{file} is not UTF-8 text; save it as UTF-8") from exc
    except OSError as exc:
        raise ConfigError(f"{file} cannot be read ({exc.strerror}); check its permissions") from exc


def template(*, uri: str | None = None) -> str:
    """Return a commented rmvdb.toml with every setting and its default. `uri`, if given, is the Milvus to use."""
    lines = [
        "# Settings of rmvdb. Remove the # to change one. Relative paths start at this file's folder.",
        "# The environment wins over this file: RMVDB_MILVUS__URI is uri in [milvus].",
        "",
        *_settings_of(ProjectSettings),
    ]
    for name, field in ProjectSettings.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, Section):
            lines += ["", *_comment(section.__doc__), f"[{name}]", *_settings_of(section)]
    lines += ["", *_comment(ProjectSettings.model_fields["indexes"].description), "# [indexes.photos]", '# type = "HNSW"']
    if uri is not None:
        at = next(number for number, each in enumerate(lines) if each.startswith("# uri = "))
        lines[at] = f"uri = {as_toml(uri)}"
    return "\n".join([*lines, "# params = { M = 16, efConstruction = 200 }", "# search = { ef = 128 }", ""])


def _settings_of(section: type[BaseModel]) -> Iterator[str]:
    for name, field in section.model_fields.items():
        if field.description and name != "indexes":
            shown = field.examples[0] if field.examples else field.default
            yield from _comment(field.description)
            yield f"# {name} = {as_toml(_IN_HOME.get(name, shown))}"


def _comment(text: str | None) -> list[str]:
    return textwrap.wrap(text or "", 110, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)


def as_toml(value: object) -> str:
    """Return a setting's value as rmvdb.toml has it."""
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {as_toml(part)}" for key, part in value.items()) + " }"
    return json.dumps(value if isinstance(value, int | float | str | list) else str(value))


def allow(file: Path, modules: Sequence[str]) -> None:
    """Write these modules into `[models] allow` of the file, and leave all else in it as it is.

    Raises ConfigError, with the line to write by hand, if rmvdb cannot do that.
    """
    data, text = read(file), file.read_text(encoding="utf-8")
    wanted = data | {"models": data.get("models", {}) | {"allow": list(modules)}}
    section = re.search(r"(?m)^[ \t]*\[[ \t]*models[ \t]*\][^\n]*(?:\n|\Z)", text)
    if section is None:
        changed = f"{text.rstrip()}\n\n[models]\n{line(modules)}\n".lstrip()
    else:
        head, rest = text[: section.end()], text[section.end() :]
        there = re.match(r"(?s)((?:(?!\n[ \t]*\[).)*?(?:^|\n))[ \t]*allow[ \t]*=[ \t]*\[[^\]]*\]", f"\n{rest}")
        body = f"{there[1][1:]}{line(modules)}{rest[there.end() - 1 :]}" if there else f"{line(modules)}\n{rest}"
        changed = (head if head.endswith("\n") else f"{head}\n") + body
    try:
        if tomllib.loads(changed) != wanted:
            raise ValueError("it is written in another way")
        # If rmvdb.toml is a link, replace its target, and keep the target's rights.
        files.durable_write(file.resolve(), changed.encode(), mode=stat.S_IMODE(file.stat().st_mode))
    except (ValueError, RmvdbError) as exc:
        raise ConfigError(f"{file} could not be changed ({exc}); write {line(modules)} there, below [models]") from exc
