"""Commands that set up and check an installation: `init`, `doctor`, `db`, `registry`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from rmvdb import errors
from rmvdb.cli import output, progress
from rmvdb.cli.context import open_app
from rmvdb.cli.options import json_option

if TYPE_CHECKING:
    from rmvdb.app.wiring import App


@click.command()
@click.option("--here", "folder", type=click.Path(file_okay=False, path_type=Path), default=Path(), help="Folder of rmvdb.toml.")
@click.option("--milvus", "uri", metavar="URI", help="Your Milvus, such as http://localhost:19530 [default: Milvus Lite].")
@click.pass_context
def init(ctx: click.Context, folder: Path, uri: str | None) -> None:
    """Write a commented rmvdb.toml and make the registry. If they are there, it changes nothing.

    \b
    Example:
      rmvdb init
      rmvdb init --milvus http://localhost:19530
    """
    from rmvdb.app import config_file, wiring
    from rmvdb.storage import files

    named, trust = ctx.find_root().obj, ctx.find_root().params["trust"]
    if named and ctx.get_parameter_source("folder") is ParameterSource.COMMANDLINE:
        raise errors.UsageError("--config and --here both say where rmvdb.toml lies; leave one of them out")
    file = named or folder / config_file.NAME
    try:
        if file.is_dir():
            file /= config_file.NAME
        new = not file.exists()
        if not new:
            output.echo(f"{file} is there already and stays as it is")
            if uri:
                wiring.load(file, trust=trust, how="--trust")  # what is read next is valid
                if (there := config_file.read(file).get("milvus", {}).get("uri", "")) != uri:
                    raise errors.ConfigError(f"{file} has milvus.uri = {there!r}; write the other one there, below [milvus]")
        else:
            file.parent.mkdir(parents=True, exist_ok=True)
            files.durable_write(file, config_file.template(uri=uri).encode(), mode=0o600)  # a token may be written into it
            output.echo(f"wrote {file}")
    except OSError as exc:
        raise errors.ConfigError(f"{file} cannot be written: {exc.strerror}; make it writable, or name another folder") from exc
    try:
        app = wiring.load(file, trust=trust, how="--trust")
    except errors.ConfigError:
        if new:  # or the same command with another address would find it
            file.unlink()
        raise
    ctx.find_root().call_on_close(app.close)
    _bring_up(app)
    if not app.registry.galleries():
        try:
            app.manifest.check_forgotten()
        except errors.RegistryError as exc:
            output.echo(str(exc))


@click.command()
@json_option
def doctor(as_json: bool) -> None:
    """Check every part and say how to correct each failure. The exit code is 1 if a part fails.

    \b
    Example:
      rmvdb doctor
    """
    from rmvdb.app.doctor import examine

    findings = []
    for finding in examine(open_app()):
        findings.append(finding)
        if not as_json:
            output.echo(f"{'ok  ' if finding.ok else 'FAIL'}  {finding.part}: {finding.detail}")
    if as_json:
        output.print_json([finding.to_json() for finding in findings])
    click.get_current_context().exit(0 if all(finding.ok for finding in findings) else 1)


@click.group()
def db() -> None:
    """The registry's schema."""


@db.command("upgrade")
def db_upgrade() -> None:
    """Bring the registry to this version's schema, and mark the collections of its galleries as its own.

    \b
    Example:
      rmvdb db upgrade
    """
    from rmvdb.registry.mark import Owner

    app = open_app()
    _bring_up(app)
    if new := app.allow_registered():
        output.echo(f"{app.file} allows code of {', '.join(new)} now, which the registry names: look whether it is yours")
    app.share_artifacts()
    galleries = app.registry.galleries()
    if galleries:
        app.registry.hand_over()  # by the identity in the manifest a lost registry is known again
    for row in galleries:
        try:
            Owner(app.registry, app.store).settle(row.name)
        except errors.EngineError as exc:
            output.echo(f"gallery {row.name} is marked as this registry's by the next worker: {exc}")


def _bring_up(app: App) -> None:
    from rmvdb.registry import schema

    app.close_to_others()
    registry = app.registry
    schema.upgrade(registry.url.render_as_string(hide_password=False))
    output.echo(f"registry {registry.shown_url} is at schema {schema.head()}")


@db.command("check")
@json_option
def db_check(as_json: bool) -> None:
    """Check that the registry is at this version's schema.

    \b
    Example:
      rmvdb db check
    """
    from rmvdb.registry import schema

    app = open_app()
    app.refuse_nowhere()
    registry = app.registry
    schema.check(registry.url.render_as_string(hide_password=False))
    if as_json:
        output.print_json({"registry": registry.shown_url, "schema": schema.head()})
        return
    output.echo(f"registry {registry.shown_url} is at schema {schema.head()}")


@click.group()
def registry() -> None:
    """The registry's contents."""


@registry.command("rebuild")
def registry_rebuild() -> None:
    """Rebuild a lost registry from the manifest in home, the collections and the archive.

    If it was stopped, run it again. It continues.

    \b
    Example:
      rmvdb registry rebuild
    """
    app = open_app()
    app.refuse_nowhere()
    with progress.stoppable() as stop, progress.reporting() as report:
        try:
            app.rebuild(say=report.say, report=report, stop=stop).run()
        except errors.AlreadyExists:
            app.share_artifacts()  # a run that was killed after all else has left this
            raise
        app.share_artifacts()
    for row in app.registry.galleries():
        upgrade = app.registry.active_upgrade(row.id)
        if upgrade is not None:
            versions = (app.registry.version(name) for name in (upgrade.from_version, upgrade.to_version))
            old, new = (version.base or version.name for version in versions)
            on = "rmvdb rollback" if upgrade.undoes else f"rmvdb upgrade --from {old} --to {new}"
            output.echo(f"gallery {row.name}: continue with {on}")
