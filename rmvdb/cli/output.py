"""Sentences, tables, JSON and questions of the command line."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import sys
from typing import Any

import click

from rmvdb import errors

#: Characters that a terminal obeys or reorders, and characters that cannot be written.
_UNSEEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def shown(text: str) -> str:
    """Write out escape sequences and other control characters: ids and reasons come from other programs."""
    return _UNSEEN.sub(lambda match: ascii(match[0])[1:-1], text)


class Lines(logging.Formatter):
    """Log lines with time and level, each a line: messages quote ids and reasons, too. A traceback keeps its own lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (logging's name)
        """One line."""
        return shown(super().formatMessage(record)).replace("\n", "\\n")

    def formatException(self, ei: Any) -> str:  # noqa: N802 (logging's name)
        """Its lines, written out."""
        return shown(super().formatException(ei))


def echo(words: str, *, err: bool = False) -> None:
    """Print words for people."""
    click.echo(shown(words), err=err)


def agree(question: str, done: str, *, err: bool = False) -> None:
    """Ask, on stderr if `err`. Raises NeedsConsent if the answer is no, or if there is no terminal to ask on."""
    try:
        agreed = click.confirm(shown(question), err=err)
    except click.Abort:
        click.echo(err=err)
        agreed = False
    if not agreed:
        raise errors.NeedsConsent(f"Nothing was {done}; run the same command with --yes to agree")


#: The width of a table outside a terminal, so that every cell is whole.
_UNBOUNDED = 10_000


#: The key of the true stdout in the context of a command that prints JSON.
_STDOUT = "rmvdb.stdout"


def only_json(ctx: click.Context, _param: click.Parameter, value: bool) -> bool:
    """Keep stdout for JSON: what else is printed, such as by a user's module, goes to stderr."""
    if value:
        ctx.meta[_STDOUT] = sys.stdout
        ctx.with_resource(contextlib.redirect_stdout(sys.stderr))
    return value


def print_json(value: Any, *, indent: int | None = 2) -> None:
    """Print a value as JSON, on one line without `indent`."""
    text = json.dumps(value, indent=indent, ensure_ascii=False, default=str)
    context = click.get_current_context(silent=True)
    file = context.meta.get(_STDOUT) if context else None
    click.echo(_UNSEEN.sub(lambda match: f"\\u{ord(match[0]):04x}", text), file=file)


def print_rows(rows: list[dict[str, Any]], as_json: bool) -> None:
    """Print rows of the same keys, as a table or as JSON."""
    if as_json:
        print_json(rows)
        return
    if not rows:
        echo("none")
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in rows[0]:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*map(_cell, row.values()))
    Console(width=None if sys.stdout and sys.stdout.isatty() else _UNBOUNDED, emoji=False).print(table, markup=False)


def _cell(value: Any) -> str:
    match value:
        case None:
            return ""
        case bool():
            return "yes" if value else "no"
        case list():
            text = ", ".join(map(str, value))
        case dict():
            text = ", ".join(f"{name}: {each}" for name, each in value.items())
        case _:
            text = str(value)
    return shown(text).replace("\n", "\\n")


def duration(seconds: float) -> str:
    """Return a length of time in the unit that people would choose."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
