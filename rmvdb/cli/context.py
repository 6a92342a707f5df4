"""The objects that a command works on: the app of this call, a gallery's upgrade, and the conductor that runs it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from rmvdb import errors
from rmvdb.cli import output, progress
from rmvdb.text import RESUMABLE, counted

if TYPE_CHECKING:
    from rmvdb.app.wiring import App
    from rmvdb.registry.tables import UpgradeRow
    from rmvdb.upgrade.run import Conductor


def open_app() -> App:
    """Return the app of this call's configuration. It closes when the command ends. Raise ConfigError if there is none."""
    from rmvdb.app import wiring

    root = click.get_current_context().find_root()
    opened = wiring.load(root.obj, trust=root.params["trust"], how="--trust")
    root.call_on_close(opened.close)
    if root.invoked_subcommand not in ("db", "registry", "doctor"):
        opened.refuse_nowhere()
    return opened


def allow(app: App, *specs: str | None) -> None:
    """Allow the code that the command names from now on, and say so."""
    from rmvdb.items.objects import modules_of

    if new := app.allow(module for spec in specs if spec for module in modules_of(spec)):
        output.echo(f"{app.file} allows code of {', '.join(new)} now")


def active_upgrade(gallery: str | None) -> tuple[App, UpgradeRow]:
    """Return the app and the gallery's upgrade. Raise WrongPhase if the gallery has none in progress."""
    app = open_app()
    return app, upgrade_of(app, gallery)


def upgrade_of(app: App, gallery: str | None) -> UpgradeRow:
    """Return the gallery's upgrade. Raise WrongPhase if the gallery has none in progress."""
    name = app.gallery_name(gallery)
    row = app.registry.active_upgrade(app.registry.gallery(name).id)
    if row is None:
        raise errors.WrongPhase(f"Gallery {name!r} has no upgrade in progress{_last(app, name)}")
    return row


def _last(app: App, name: str) -> str:
    """Say how the last upgrade ended, and which command begins another."""
    from rmvdb.upgrade.status import latest

    past = latest(app.registry.upgrades(app.registry.gallery(name).id))
    if past and app.registry.plan(name).legs[0].collection == past.new_collection:
        back = f"--from {past.to_version} --to {past.from_version}"
        return f", and the last one is cleaned up; to go back, begin another: rmvdb upgrade {back}"
    return "; begin one: rmvdb upgrade --from OLD --to NEW"


@contextmanager
def conducting(app: App, gallery: str | None, *, err: bool = False) -> Iterator[tuple[Conductor, progress.Reporter]]:
    """Give a conductor that Ctrl-C stops, and its reporter. With `err`, nothing goes to stdout."""
    with progress.stoppable() as stop, progress.reporting(err=err) as report:
        yield app.conductor(gallery, say=report.say, announce=report.announce, report=report, stop=stop), report


def go_on(app: App, conductor: Conductor, row: UpgradeRow, report: progress.Reporter, *, detach: bool, force: bool) -> None:
    """Run an upgrade, or leave it to workers, and say how far it is.

    Raises Stopped if Ctrl-C came meanwhile, Quarantined if the upgrade stopped short of its cut-over with records aside.
    """
    from rmvdb.upgrade.status import searched

    if detach:
        conductor.launch(row, app.worker(), force=force)
        row = app.registry.upgrade(row.id)
        if row.phase == "serving both":
            report.say("deployed; the backfill waits for a worker: rmvdb worker")
            return
    else:
        row = conductor.advance(row, app.worker(), force=force)
    if conductor.stop.is_set():
        raise errors.Stopped(RESUMABLE)
    if row.phase == "ended":
        raise errors.WrongPhase(f"Upgrade {row.id} has ended; see what took its place: rmvdb history")
    if row.phase == "cut over":
        report.say(what_now(row))
    elif row.phase == "cleaning up":
        report.say("the clean-up has begun; finish it with rmvdb cleanup")
    elif row.phase == "serving both":
        now, served = app.registry.progress(row.id), searched(app.registry.plan(conductor.gallery.name))
        report.say(f"{now.done} of {counted(now.total, 'record is', 'records are')} re-embedded (t = {now.t:.2f}); {served}")
        if now.quarantined:
            raise errors.Quarantined(
                f"{counted(now.quarantined, 'record is', 'records are')} quarantined, and findable in the old collection: "
                "rmvdb quarantine list, then retry or drop"
            )


def what_now(row: UpgradeRow) -> str:
    """Say what is left to do after the cut-over."""
    back = "; until then rmvdb rollback leads back" if row.undoes is None else ""
    return f"rmvdb cleanup drops {' and '.join(row.leaving)}{back}"
