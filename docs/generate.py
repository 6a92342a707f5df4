"""Writes docs/reference: every command, setting and error and the Python API, from click, pydantic and docstrings.

`make docs` runs it before it builds the site. A page that mkdocs.yml does not name, or names without a file, ends it.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from pydantic import BaseModel, SecretStr

import rmvdb
import rmvdb.aio
import rmvdb.compatible
import rmvdb.metrics
from rmvdb import errors
from rmvdb.app import settings as app_settings
from rmvdb.cli import main as cli

DOCS = Path(__file__).parent
REFERENCE = DOCS / "reference"


def pages() -> dict[str, str]:
    """The text of each page by the name of its file."""
    return {"commands.md": commands(), "settings.md": settings(), "errors.md": errors_page(), "python.md": python()}


# --- commands ---------------------------------------------------------------------------------------------------------


def leaves(group: click.Group, name: str = "rmvdb") -> Iterator[tuple[str, click.Command]]:
    """Every command below a group, by the words that a user types."""
    for each, command in group.commands.items():
        typed = f"{name} {each}"
        if isinstance(command, click.Group):
            yield from leaves(command, typed)
        else:
            yield typed, command


def commands() -> str:
    """Every command with its arguments, options and examples."""
    lines = [
        "# Commands",
        "",
        "[Commands at a glance](../commands.md) has one line for each, and the exit codes.",
        "",
        "## rmvdb",
        "",
        "Options of `rmvdb` itself stand before the command.",
        "",
        *_options(cli.main),
    ]
    for typed, command in leaves(cli.main):
        text, _, examples = inspect.cleandoc(command.help or "").partition("Example:")
        arguments = " ".join(_argument(each) for each in command.params if isinstance(each, click.Argument))
        lines += ["", f"## {typed}", "", text.replace("\b", "").strip(), ""]
        lines += ["```text", f"{typed} [OPTIONS] {arguments}".rstrip(), "```", "", *_options(command), "", "Example:", ""]
        lines += ["<!-- not run: every name in it is yours; a test parses it -->"]
        lines += ["```sh", *(line.strip() for line in examples.strip().splitlines()), "```"]
    return "\n".join([*lines, ""])


def _argument(argument: click.Argument) -> str:
    return argument.make_metavar(click.Context(click.Command("rmvdb")))


def _options(command: click.Command) -> list[str]:
    """A table of a command's options."""
    rows = []
    for option in command.params:
        if isinstance(option, click.Option):
            kind = "" if option.is_flag else f" {option.make_metavar(click.Context(command))}"
            names = ", ".join(f"`{name}{kind}`" for name in option.opts)
            rows.append(f"| {_cell(names)} | {_cell(option.help or '')} | {_cell(_default(option))} |")
    return ["| option | meaning | default |", "|---|---|---|", *rows] if rows else ["It has no options."]


def _default(option: click.Option) -> str:
    if option.required:
        return "required"
    if option.is_flag or not option.show_default:
        return ""
    return f"`{option.default}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


# --- settings ---------------------------------------------------------------------------------------------------------


def settings() -> str:
    """Every setting with its variable, its type and its default."""
    lines = ["# Settings", "", "[Configuration](../configuration.md) says where rmvdb finds them, and which files it trusts.", ""]
    lines += ["## Top level", "", *_table(_at_the_top(), ())]
    for name, field in app_settings.ProjectSettings.model_fields.items():
        section: Any = app_settings.IndexSection if name == "indexes" else field.annotation
        if isinstance(section, type) and issubclass(section, BaseModel):
            keys = (name, "<gallery>") if name == "indexes" else (name,)
            about = field.description or section.__doc__ or ""
            lines += ["", f"## [{'.'.join(keys)}]", "", f"{about[0].upper()}{about[1:].rstrip('.')}.", ""]
            lines += _table(section.model_fields, keys)
    return "\n".join([*lines, ""])


def _at_the_top() -> dict[str, Any]:
    fields = app_settings.ProjectSettings.model_fields
    return {name: field for name, field in fields.items() if field.annotation is Path}


def _table(fields: dict[str, Any], keys: tuple[str, ...]) -> list[str]:
    rows = ["| key | variable | type | default | meaning |", "|---|---|---|---|---|"]
    for name, field in fields.items():
        path = (*keys, name)
        variable = "RMVDB_" + "__".join(path).upper().replace("<GALLERY>", "GALLERY")
        cells = (f"`{'.'.join(path)}`", f"`{variable}`", _kind(field), _setting_default(field), field.description or "")
        rows.append(f"| {' | '.join(_cell(each) for each in cells)} |")
    return rows


def _kind(field: Any) -> str:
    """A type and its bounds in words."""
    names = re.findall(r"float|int|str|Path|dict|tuple|Literal\[.*?\]|DatabaseUrl|SecretStr", str(field.annotation))
    words = {"str": "text", "float": "number", "int": "whole number", "Path": "path", "dict": "table", "tuple": "list of texts"}
    kind = words.get(names[0], "text") if not names[0].startswith("Literal") else re.sub(r"Literal|[\[\]']", "", names[0])
    bounds = []
    for each in [*field.metadata, *getattr(field.annotation, "__args__", ())]:
        for meta in getattr(each, "__metadata__", (each,)):
            for limit in getattr(meta, "metadata", (meta,)):
                bounds += [
                    f"{word} {value:,}"
                    for name, word in (("gt", "above"), ("ge", "from"), ("le", "to"))
                    if isinstance(value := getattr(limit, name, None), int | float)
                ]
    return ", ".join([kind, *dict.fromkeys(bounds)])


def _setting_default(field: Any) -> str:
    default = field.default
    if isinstance(default, SecretStr):
        default = default.get_secret_value()
    return "" if default in (None, "", (), {}) else f"`{default}`"


# --- errors -----------------------------------------------------------------------------------------------------------


def error_classes() -> list[type[errors.RmvdbError]]:
    """Every public error, in the order of the file."""
    return [each for each in vars(errors).values() if inspect.isclass(each) and issubclass(each, errors.RmvdbError)]


def remedy(error: type[errors.RmvdbError]) -> str:
    """The way out that a class's docstring names; empty if it names none."""
    found = re.search(r"^Remedy: (.+?)(?:\n\n|\Z)", inspect.cleandoc(error.__doc__ or ""), re.DOTALL | re.MULTILINE)
    return " ".join(found[1].split()) if found else ""


def errors_page() -> str:
    """Every error with its remedy."""
    lines = [
        "# Errors",
        "",
        "Each message names the thing, the value and the way out. All errors are in `rmvdb.errors`.",
        "A command that ends with an error has its exit code.",
    ]
    for each in error_classes():
        what = re.sub(r"(?ms)^Remedy: .+?(?:\n\n|\Z)", "", inspect.cleandoc(each.__doc__ or "")).strip()
        base = each.__bases__[0]
        kind = f"A kind of [`{base.__name__}`](#{base.__name__.lower()}). " if base is not Exception else ""
        lines += ["", f"## {each.__name__}", "", what, "", f"**Remedy:** {remedy(each)}", "", f"{kind}Exit code {_code(each)}."]
    return "\n".join([*lines, ""])


def _code(error: type[errors.RmvdbError]) -> int:
    return 130 if issubclass(error, errors.Stopped) else error.exit_code


# --- Python -----------------------------------------------------------------------------------------------------------


#: Members that application code does not use.
HIDDEN = {"rmvdb.Client": ["!^_", "!^CALLS$", "!^delete_those$"]}


def python() -> str:
    """Ask mkdocstrings for every public name."""
    lines = ["# Python", "", "Every public name. The errors of `rmvdb.errors` have [a page of their own](errors.md)."]
    for module, names in public().items():
        lines += ["", f"## {module}"]
        for name in names:
            path = f"{module}.{name}"
            lines += ["", f"::: {path}", "    options:", "      heading_level: 3"]
            if path in HIDDEN:
                lines += [f"      filters: {json.dumps(HIDDEN[path])}"]
    return "\n".join([*lines, ""])


def public() -> dict[str, list[str]]:
    """The public names by their module."""
    modules = (rmvdb, rmvdb.aio, rmvdb.compatible, rmvdb.metrics)
    return {each.__name__: sorted(set(each.__all__) - {"errors"}) for each in modules}


# --- all of it --------------------------------------------------------------------------------------------------------


def orphans() -> set[str]:
    """Pages that mkdocs.yml does not name, and names of it that are no pages."""
    named = set(re.findall(r"^ +- .+: (\S+\.md)$", (DOCS.parent / "mkdocs.yml").read_text(), re.MULTILINE))
    written = {f"reference/{name}" for name in pages()}
    there = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md") if REFERENCE not in path.parents}
    return named ^ (there | written)


def main() -> None:
    """Write the pages."""
    if odd := orphans():
        sys.exit(f"mkdocs.yml and docs differ: {', '.join(sorted(odd))}; name each page in nav once")
    REFERENCE.mkdir(exist_ok=True)
    for old in REFERENCE.glob("*.md"):
        old.unlink()
    for name, text in pages().items():
        (REFERENCE / name).write_text(text)


if __name__ == "__main__":
    main()
