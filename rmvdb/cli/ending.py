"""Commands that end an upgrade: `verify`, `cutover`, `cleanup`, `gc`, `rollback`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from rmvdb import errors
from rmvdb.cli import output, progress
from rmvdb.cli.context import active_upgrade, conducting, go_on, open_app, upgrade_of, what_now
from rmvdb.cli.options import force_option, gallery_option, json_option, missing_option
from rmvdb.text import counted

if TYPE_CHECKING:
    from rmvdb.app.wiring import App
    from rmvdb.registry.tables import UpgradeRow
    from rmvdb.upgrade.garbage import Found
    from rmvdb.upgrade.lost import Lost


@click.command()
@gallery_option
@click.option("--sample", type=click.IntRange(min=0), default=200, show_default=True, help="Records to embed again.")
@click.option(
    "--repair",
    is_flag=True,
    help="Put back records that were lost after they moved. Move records that came into the old collection after the cut-over. "
    "Keep records that differ from the last known write. It asks first.",
)
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
def verify(gallery: str | None, sample: int, repair: bool, yes: bool, as_json: bool) -> None:
    """Compare the new collection with the records that filled it: each id, each field, and the vectors of a sample.

    The exit code is 1 if anything differs.

    \b
    Example:
      rmvdb verify --sample 1000
    """
    app, row = active_upgrade(gallery)
    if repair:
        _repair(app, gallery, row, yes=yes, as_json=as_json)
    with progress.reporting(quiet=as_json) as report:
        checked = app.conductor(gallery, report=report).verify(row, sample=sample)
    if as_json:
        output.print_json(checked.to_json())
    else:
        for example in checked.examples:
            output.echo(f"differs: {example}")
        for sentence in checked.unread:
            output.echo(f"left out: {sentence}")
        if checked.approximation:
            output.echo(checked.approximation)
        if checked.missing:
            some = ", ".join(map(repr, checked.gone))
            output.echo(f"gone without a known deletion: {counted(checked.missing, 'record')}, such as {some}")
        output.echo(
            f"{counted(checked.records, 'record')}, {checked.fields_compared} compared, {checked.embedded_again} embedded again: "
            f"{counted(checked.problems, 'difference')}"
        )
    click.get_current_context().exit(0 if checked.ok else 1)


def _repair(app: App, gallery: str | None, row: UpgradeRow, *, yes: bool, as_json: bool) -> None:
    # Each question comes between two blocks: within one, Ctrl-C asks the conductor to stop, and a bar covers the question.
    with conducting(app, gallery, err=as_json) as (conductor, _):
        missing = conductor.missing_collections(row)
    if missing and not yes:
        are, them = ("is", "it") if len(missing) == 1 else ("are", "them")
        question = f"{' and '.join(missing)} {are} gone. Create {them} again, empty, and look for the lost records?"
        output.agree(question, "created", err=as_json)
    with conducting(app, gallery, err=as_json) as (conductor, report):
        if missing:
            conductor.make_again(row)
        lost = conductor.lost(row)
        if lost.for_good:
            names = ", ".join(map(repr, lost.for_good[:20]))
            report.say(f"{counted(len(lost.for_good), 'record is', 'records are')} lost for good, such as {names}")
        what = _what_repair_does(lost)
        if not what:
            report.say("no lost record can be put back, and the fields of every other record match its last known write")
            return
    if not yes:
        output.agree(f"{' '.join(what)} Do this?", "changed", err=as_json)
    with conducting(app, gallery, err=as_json) as (conductor, _):
        conductor.repair(row, lost, app.worker())


def _what_repair_does(lost: Lost) -> list[str]:
    """Say what a repair would do, a sentence for each kind of record."""
    from rmvdb.upgrade.lost import count_of

    places = {
        "the old collection": count_of(lost.in_old),
        "the archive": count_of(lost.archived),
        "the original": len(lost.in_original),
    }
    what = [f"Put back {counted(number, 'record')} from {place}." for place, number in places.items() if number]
    if lost.in_source:
        what.append(
            f"Restore {counted(len(lost.in_source), 'record')} from the source alone, such as {lost.in_source[0]!r}, because "
            f"{'its' if len(lost.in_source) == 1 else 'their'} fields are lost."
        )
    if lost.late:
        late = counted(len(lost.late), "record")
        what.append(f"Move {late} that came into the old collection after the cut-over, such as {lost.late[0]!r}.")
    found = lost.unexplained
    if found.unknown:
        what.append(
            f"Keep {counted(len(found.unknown), 'record')} without a known write, such as {found.unknown[0]!r}: the registry "
            "may have gone back."
        )
    if found.changed:
        what.append(
            f"Keep {counted(len(found.changed), 'record')} as found, such as {found.changed[0]!r}, which differs from its last "
            "known write: write it again if no later write changed it."
        )
    if found.absent:
        what.append(
            f"Count {counted(len(found.absent), 'record')} as deleted, such as {found.absent[0]!r}, which has a known write: "
            "write it again unless it was deleted on purpose."
        )
    return what


@click.command()
@gallery_option
@missing_option
@force_option
def cutover(gallery: str | None, accept_missing: bool, force: bool) -> None:
    """Verify the new collection, then search it alone.

    \b
    Example:
      rmvdb cutover
    """
    app, row = active_upgrade(gallery)
    with conducting(app, gallery) as (conductor, report):
        conductor.finish(row, app.worker(), force=force, accept_missing=accept_missing)
        report.say(what_now(app.registry.upgrade(row.id)))


@click.command()
@gallery_option
@missing_option
@force_option
@click.option("--yes", is_flag=True, help="Do not ask.")
def cleanup(gallery: str | None, accept_missing: bool, force: bool, yes: bool) -> None:
    """Drop the old collections, the archive and the work list. You cannot roll back afterwards. It asks first.

    It refuses if the new collection has lost a moved record, because the archive may hold the only copy.

    \b
    Example:
      rmvdb cleanup --yes
    """
    app, row = active_upgrade(gallery)
    if row.phase not in ("cut over", "cleaning up"):
        raise errors.WrongPhase(f"The upgrade is {row.phase}; clean up comes after cut-over: rmvdb cutover")
    if not (yes or row.phase == "cleaning up"):
        old = " and ".join(_described(app, each) for each in row.leaving)
        output.agree(f"Drop {old} and the archive? You cannot roll back afterwards", "dropped")
    with conducting(app, gallery) as (conductor, _):
        conductor.clean_up(row, accept_missing=accept_missing, force=force)


def _described(app: App, collection: str) -> str:
    """Return a collection's name, owner and number of records, for the question before it is dropped."""
    whose = "yours, adopted" if app.registry.collection(collection).adopted else "made by rmvdb"
    records = counted(app.store.count(collection), "record") if app.store.exists(collection) else "dropped already"
    return f"{collection} ({whose}; {records})"


@click.command()
@click.option("--dry-run", is_flag=True, help="Only list what would be removed.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
def gc(dry_run: bool, yes: bool, as_json: bool) -> None:
    """Remove registry rows and files in home that nothing needs. It asks first. Workers and clients may run meanwhile.

    \b
    Example:
      rmvdb gc --dry-run
    """
    collector = open_app().collector()
    garbage = collector.run(remove=False)
    asks = not (dry_run or yes or garbage.nothing)
    if asks or not as_json:
        _print_garbage(garbage, err=as_json)
    if not (dry_run or garbage.nothing):
        if asks:
            output.agree("Remove all this? You cannot undo it", "removed", err=as_json)
        garbage = collector.run(remove=True)
        if not as_json:
            output.echo("removed")
    if as_json:
        output.print_json(garbage.to_json())


def _print_garbage(garbage: Found, *, err: bool) -> None:
    for name, count in garbage.rows.items():
        if count:
            output.echo(f"registry: {count:,} {name}", err=err)
    if garbage.files:
        output.echo(
            f"home: {counted(garbage.files, 'file')}, {garbage.bytes / 1e6:,.1f} MB of archive, cache and artifacts", err=err
        )
    if garbage.nothing:
        output.echo("nothing to remove", err=err)
    for sentence in garbage.kept:
        output.echo(f"kept: {sentence}", err=err)


@click.command()
@gallery_option
@force_option
def rollback(gallery: str | None, force: bool) -> None:
    """Go back to the old model. The old vectors come from the archive.

    Ctrl-C stops it. Run the same command to resume. If the upgrade took the place of another one, that one continues after
    rmvdb cleanup.

    \b
    Example:
      rmvdb rollback
    """
    app = open_app()
    with conducting(app, gallery) as (conductor, report):
        if conductor.drop_given_up() and not app.registry.since_given_up(conductor.gallery.id):
            return  # it finished a roll back that was killed; another upgrade continues since
        row = upgrade_of(app, gallery)
        back = row if row.undoes is not None else conductor.roll_back(row, force=force)
        if back is not None:
            go_on(app, conductor, back, report, detach=False, force=force)
