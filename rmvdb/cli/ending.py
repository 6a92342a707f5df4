"""Commands that end an upgrade: `verify`, `cutover`, `cleanup`, `rollback`."""

from __future__ import annotations

import click

from rmvdb import errors, terminal
from rmvdb.cli.context import active_upgrade, conducting, go_on, open_app, upgrade_of, what_now
from rmvdb.cli.options import force_option, gallery_option, json_option
from rmvdb.plural import counted


@click.command()
@gallery_option
@click.option("--sample", type=click.IntRange(min=0), default=200, show_default=True, help="Records to embed again.")
@json_option
def verify(gallery: str | None, sample: int, as_json: bool) -> None:
    """Compare the new collection with what it was filled from; exits with 1 if anything differs.

    \b
    Example:
      rmvdb verify --sample 1000
    """
    app, row = active_upgrade(gallery)
    with terminal.progress(quiet=as_json) as report:
        found = app.conductor(gallery, report=report).verify(row, sample=sample)
    if as_json:
        terminal.print_json(found.to_json())
    else:
        for example in found.examples:
            click.echo(f"differs: {example}")
        for sentence in found.unread:
            click.echo(f"left out: {sentence}")
        click.echo(
            f"{counted(found.records, 'record')}, {found.fields_compared} compared, {found.embedded_again} embedded again: "
            f"{counted(found.problems, 'difference')}"
        )
    click.get_current_context().exit(0 if found.ok else 1)


@click.command()
@gallery_option
@force_option
def cutover(gallery: str | None, force: bool) -> None:
    """Verify, then search the new collection alone.

    \b
    Example:
      rmvdb cutover
    """
    app, row = active_upgrade(gallery)
    with conducting(app, gallery) as (conductor, report):
        conductor.finish(row, app.worker(), force=force)
        report.say(what_now(app.registry.upgrade(row.id)))


@click.command()
@gallery_option
@click.option("--yes", is_flag=True, help="Do not ask.")
def cleanup(gallery: str | None, yes: bool) -> None:
    """Drop the old collections, the archive and the work list. There is no way back from here; it asks.

    \b
    Example:
      rmvdb cleanup --yes
    """
    app, row = active_upgrade(gallery)
    if row.phase not in ("cut over", "cleaning up"):
        raise errors.WrongPhase(f"The upgrade is {row.phase}; clean up comes after cut-over: rmvdb cutover")
    old, begun = " and ".join(row.leaving), row.phase == "cleaning up"
    if not (yes or begun):
        terminal.agree(f"Drop {old} and the archive? rmvdb rollback is impossible afterwards", "dropped", "rmvdb cleanup --yes")
    with conducting(app, gallery) as (conductor, _):
        conductor.clean_up(row)


@click.command()
@gallery_option
@force_option
def rollback(gallery: str | None, force: bool) -> None:
    """Go back to the old model: an upgrade whose vectors come from the archive. Ctrl-C stops it, the same command goes on.

    Back from an upgrade that took the place of another, that other one goes on after rmvdb cleanup.

    \b
    Example:
      rmvdb rollback
    """
    app = open_app()
    with conducting(app, gallery) as (conductor, report):
        if conductor.drop_given_up() and not app.registry.since_given_up(conductor.gallery.id):
            return  # what a roll back that was killed had left to do: an upgrade that goes on since is another one
        row = upgrade_of(app, gallery)
        back = row if row.undoes is not None else conductor.roll_back(row)
        if back is not None:
            go_on(app, conductor, back, report, detach=False, force=force)
