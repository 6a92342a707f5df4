"""Commands around an installation: `init`, `doctor`, `db`, `registry`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from rmvdb import errors, terminal
from rmvdb.cli.context import open_app
from rmvdb.cli.options import json_option

if TYPE_CHECKING:
    from rmvdb.registry import Registry


@click.command()
@click.option("--here", "folder", type=click.Path(file_okay=False, path_type=Path), default=Path(), help="Where rmvdb.toml goes.")
@click.pass_context
def init(ctx: click.Context, folder: Path) -> None:
    """Write a commented rmvdb.toml and make the registry. Run again, it changes nothing.

    \b
    Example:
      rmvdb init
    """
    from rmvdb import app, config

    file = ctx.find_root().obj or folder / config.NAME
    try:
        if file.exists():
            click.echo(f"{file} is there already and stays as it is")
        else:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(config.template(), encoding="utf-8")
            click.echo(f"wrote {file}")
    except OSError as exc:
        raise errors.ConfigError(f"{file} cannot be written: {exc.strerror}; mend that, or name another folder") from exc
    _bring_up(app.load(file).registry)


@click.command()
@json_option
def doctor(as_json: bool) -> None:
    """Check every part and say what to do about each failure; exits with 1 if there is one.

    \b
    Example:
      rmvdb doctor
    """
    from rmvdb.doctor import examine

    findings = []
    for finding in examine(open_app()):
        findings.append(finding)
        if not as_json:
            click.echo(f"{'ok  ' if finding.ok else 'FAIL'}  {finding.part}: {finding.detail}")
    if as_json:
        terminal.print_json([finding.to_json() for finding in findings])
    click.get_current_context().exit(0 if all(finding.ok for finding in findings) else 1)


@click.group()
def db() -> None:
    """The registry's schema."""


@db.command("upgrade")
def db_upgrade() -> None:
    """Bring the registry to this version's schema.

    \b
    Example:
      rmvdb db upgrade
    """
    _bring_up(open_app().registry)


def _bring_up(registry: Registry) -> None:
    from rmvdb import schema

    schema.upgrade(registry.url.render_as_string(hide_password=False))
    click.echo(f"registry {registry.shown_url} is at schema {schema.head()}")


@db.command("check")
@json_option
def db_check(as_json: bool) -> None:
    """Say whether the registry is at this version's schema.

    \b
    Example:
      rmvdb db check
    """
    from rmvdb import schema

    registry = open_app().registry
    schema.check(registry.url.render_as_string(hide_password=False))
    if as_json:
        terminal.print_json({"registry": registry.shown_url, "schema": schema.head()})
        return
    click.echo(f"registry {registry.shown_url} is at schema {schema.head()}")


@click.group()
def registry() -> None:
    """The registry's contents."""


@registry.command("rebuild")
def registry_rebuild() -> None:
    """Bring back a registry that was lost: from the manifest in home, the collections and the archive. Run again, it goes on.

    \b
    Example:
      rmvdb registry rebuild
    """
    app = open_app()
    with terminal.stoppable() as stop, terminal.progress() as report:
        app.rebuild(say=report.say, report=report, stop=stop).run()
    for row in app.registry.galleries():
        upgrade = app.registry.active_upgrade(row.id)
        if upgrade is not None:
            versions = (app.registry.version(name) for name in (upgrade.from_version, upgrade.to_version))
            old, new = (version.base or version.name for version in versions)
            on = "rmvdb rollback" if upgrade.undoes else f"rmvdb upgrade --from {old} --to {new}"
            click.echo(f"gallery {row.name}: go on with {on}")
