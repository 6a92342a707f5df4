"""The `rmvdb queries` commands: the sample of real queries that clients keep."""

from __future__ import annotations

from pathlib import Path

import click

from rmvdb.cli import output
from rmvdb.cli.context import open_app
from rmvdb.cli.options import gallery_option, json_option
from rmvdb.text import counted


@click.group()
def queries() -> None:
    """Show and empty the sample of real queries that clients keep ([search] keep_queries)."""


@queries.command("export")
@gallery_option
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the queries to this file instead of the terminal. Only you can read it.",
)
def queries_export(gallery: str | None, out: Path | None) -> None:
    """Print the kept queries as JSON lines, which plan and simulate read with --queries.

    Queries older than search.keep_queries_days are left out.

    \b
    Example:
      rmvdb queries export --out kept.jsonl
    """
    from rmvdb.items.queries import line_of
    from rmvdb.storage.files import durable_write

    app = open_app()
    name, search = app.gallery_name(gallery), app.settings.search
    kept = app.registry.kept_queries(name, max_age_days=search.keep_queries_days, limit=None)
    lines = [line_of(query.item) for query in kept]
    if out is None:
        for line in lines:
            output.echo(line)
        return
    durable_write(out, "".join(f"{line}\n" for line in lines).encode(), mode=0o600)
    output.echo(f"{counted(len(lines), 'query', 'queries')} of {name} written to {out}")


@queries.command("clear")
@gallery_option
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
def queries_clear(gallery: str | None, yes: bool, as_json: bool) -> None:
    """Remove every kept query of a gallery from the registry. It asks first.

    \b
    Example:
      rmvdb queries clear --yes
    """
    app = open_app()
    name = app.gallery_name(gallery)
    count = app.registry.count_queries(name).count
    if count and not yes:
        question = f"Remove {counted(count, 'kept query', 'kept queries')} of {name}?"
        output.agree(question, "removed", err=as_json)
    removed = app.registry.clear_queries(name)
    if as_json:
        output.print_json({"gallery": name, "removed": removed})
    else:
        output.echo(f"{counted(removed, 'kept query', 'kept queries')} of {name} removed")
