"""Commands while an upgrade runs: `pause`, `resume`, `throttle`, `status`, `history`, `worker`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from rmvdb import errors
from rmvdb.cli import output, progress, show_status
from rmvdb.cli.context import active_upgrade, open_app
from rmvdb.cli.options import Finite, gallery_option, json_option
from rmvdb.text import counted

if TYPE_CHECKING:
    from rmvdb.app.ray_workers import Job, Places
    from rmvdb.app.wiring import App
    from rmvdb.registry.tables import UpgradeRow

#: Where `rmvdb worker` works.
PROCESS, RAY = "process", "ray"


@click.command()
@gallery_option
def pause(gallery: str | None) -> None:
    """Stop the upgrade and its cut-over until rmvdb resume.

    Workers finish the batches that they have begun. Searches and writes continue.

    \b
    Example:
      rmvdb pause
    """
    app, row = _in_progress(gallery)
    app.registry.pause(row.id)
    _say_set(row, "paused")


@click.command()
@gallery_option
def resume(gallery: str | None) -> None:
    """Continue a paused upgrade.

    \b
    Example:
      rmvdb resume
    """
    app, row = _in_progress(gallery)
    app.registry.resume(row.id)
    _say_set(row, "no longer paused")


class AtLeastZero(Finite):
    """A limit or a share."""

    refusal = "is not a limit; give 0 or more, and 0 lifts the limit"

    def __init__(self, *, max: float | None = None) -> None:
        super().__init__(min=0, max=max)


class Processors(AtLeastZero):
    """A number of processors for each actor. Ray counts ten-thousandths."""

    refusal = "is not a number of processors; give one with at most four digits after the point, such as 0.5"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = super().convert(value, param, ctx)
        if not self.is_possible(number):
            self.fail(f"{value!r} {self.refusal}", param, ctx)
        return number

    def is_possible(self, number: float) -> bool:
        """Return whether Ray takes the number."""
        return round(number, 4) == number


class Gpus(Processors):
    """A number of GPUs for each actor: a share of one, or whole ones."""

    refusal = "is not a number of GPUs; give a share of one, such as 0.5, or a whole number"

    def is_possible(self, number: float) -> bool:
        return super().is_possible(number) and (number < 1 or number.is_integer())


@click.command()
@gallery_option
@click.option("--rate", type=AtLeastZero(), help="The most records a second for each worker.")
@click.option("--nice", type=AtLeastZero(max=1), help="The share of its time, 0 to 1, in which each worker copies.")
@click.option(
    "--p99-ms", type=AtLeastZero(), help="Milliseconds. No batch begins while the p99 of a client's searches is higher."
)
def throttle(gallery: str | None, rate: float | None, nice: float | None, p99_ms: float | None) -> None:
    """Limit the backfill of every worker, at once. 0 lifts a limit. A limit that you do not name stays.

    A limit delays only the start of a copy. Workers finish the batches that they have begun. Records that they have
    copied leave the old collection.

    \b
    Example:
      rmvdb throttle --rate 200
      rmvdb throttle --nice 0.5 --p99-ms 80
      rmvdb throttle --rate 0
    """
    limits: dict[str, Any] = {
        name: value for name, value in (("rate", rate), ("nice", nice), ("p99_ms", p99_ms)) if value is not None
    }
    if not limits:
        raise errors.UsageError("No limit was given; give --rate, --nice or --p99-ms, where 0 lifts the limit")
    words = ", ".join(f"{name} {f'{value:g}' if value else 'lifted'}" for name, value in limits.items())
    app, row = _in_progress(gallery)
    app.registry.set_upgrade(row.id, note=words, **limits)
    _say_set(row, words)


def _in_progress(gallery: str | None) -> tuple[App, UpgradeRow]:
    app, row = active_upgrade(gallery)
    if row.phase in ("cut over", "cleaning up") and not row.paused:  # a pause may have come just before the cut-over was noted
        raise errors.WrongPhase(f"The upgrade is {row.phase}: no batch is left to hold back")
    return app, row


def _say_set(row: UpgradeRow, words: str) -> None:
    output.echo(f"upgrade {row.from_version} → {row.to_version}: {words}")


@click.command()
@gallery_option
@click.option("--watch", is_flag=True, help="Repeat every second until the cut-over or Ctrl-C.")
@json_option
def status(gallery: str | None, watch: bool, as_json: bool) -> None:
    """Show the progress of each gallery's upgrade, its workers, and what slows it down. --gallery shows one gallery alone.

    With --json, each gallery is one line.

    \b
    Example:
      rmvdb status --watch
      rmvdb status --json
    """
    import time

    from rmvdb.upgrade.status import status as read

    app = open_app()
    names = [row.name for row in app.registry.galleries()]
    if gallery is not None or watch or len(names) < 2:
        names = [app.gallery_name(gallery)]
    while True:
        for at, name in enumerate(names):
            now = read(app.registry, app.registry.gallery(name))
            if as_json:
                output.print_json(now.to_json(), indent=None)
                continue
            if watch and sys.stdout.isatty():
                click.clear()
            if at:
                output.echo("")
            show_status.print_status(now)
        if not watch or now.phase in ("", "cut over", "cleaning up", "ended"):
            return
        time.sleep(1)


@click.command()
@gallery_option
@json_option
def history(gallery: str | None, as_json: bool) -> None:
    """Show the events of the gallery's upgrades, with their times.

    \b
    Example:
      rmvdb history
    """
    import datetime as dt

    app = open_app()
    rows = [
        {
            "at": dt.datetime.fromtimestamp(event.at, tz=dt.UTC).isoformat(timespec="seconds"),
            "upgrade": upgrade.id,
            "from": upgrade.from_version,
            "to": upgrade.to_version,
            "phase": event.phase,
            "note": event.note,
        }
        for upgrade in app.registry.upgrades(app.registry.gallery(app.gallery_name(gallery)).id)
        for event in app.registry.history(upgrade.id)
    ]
    output.print_rows(rows, as_json)


@click.command()
@click.option("--gallery", "-g", "galleries", multiple=True, help="Which galleries [default: all].")
@click.option(
    "--window", metavar="CRON", help="Work for one hour from each time that CRON names: '0 1-6 * * *' is 01:00 to 07:00."
)
@click.option(
    "--engine",
    type=click.Choice((PROCESS, RAY)),
    default=PROCESS,
    show_default=True,
    help="Work in this process, or in actors on Ray.",
)
@click.option(
    "--actors", type=click.IntRange(min=1), default=1, show_default=True, help="With ray: how many actors, each a worker."
)
@click.option(
    "--num-cpus",
    type=Processors(),
    default=1.0,
    show_default=True,
    help="With ray: the processors that Ray keeps for each actor.",
)
@click.option(
    "--num-gpus",
    type=Gpus(),
    default=0.0,
    show_default=True,
    help="With ray: the GPUs that Ray keeps for each actor, such as 0.5.",
)
@click.option(
    "--address",
    metavar="HOST:PORT|auto",
    help="With ray: the Ray to work on [default: that of RAY_ADDRESS, else one that starts here and ends with the command].",
)
@click.pass_context
def worker(
    ctx: click.Context,
    galleries: tuple[str, ...],
    window: str | None,
    engine: str,
    actors: int,
    num_cpus: float,
    num_gpus: float,
    address: str | None,
) -> None:
    """Work on every upgrade until you stop the command: backfill, complete, verify, cut over.

    Ctrl-C lets the worker finish the batches that it has begun. Then the command ends.

    \b
    Example:
      rmvdb worker --window "0 1-6 * * *"
      rmvdb worker --engine ray --actors 4 --num-gpus 0.5
    """
    from rmvdb.app.daemon import Scheduler
    from rmvdb.app.window import Window

    for name in ("actors", "num_cpus", "num_gpus", "address"):
        if engine != RAY and ctx.get_parameter_source(name) is not ParameterSource.DEFAULT:
            raise errors.UsageError(f"--{name.replace('_', '-')} needs --engine {RAY}")
    app = open_app()
    for name in galleries:
        app.registry.gallery(name)
    hours = Window(window)
    if engine == RAY:
        from rmvdb.app.ray_workers import Job, Places

        job = Job(settings=app.settings, file=app.file, galleries=galleries, window=window, make_log=progress.log_to_stdout)
        _work_on_ray(job, Places(actors=actors, num_cpus=num_cpus, num_gpus=num_gpus), address)
        return
    log = progress.log_to_stdout()
    scheduler = Scheduler(app, galleries=galleries, window=hours, say=log.info, warn=log.error)
    with progress.stoppable() as stop:
        log.info("worker started; Ctrl-C ends it")
        scheduler.run(stop)
    log.info("worker ended")


def _work_on_ray(job: Job, places: Places, address: str | None) -> None:
    from rmvdb.app.ray_workers import RayWorkers, connected

    # Ray sets a handler for SIGTERM, so ours comes after.
    with connected(address, job.settings), progress.stoppable() as stop:
        log, workers = progress.log_to_stdout(), counted(places.actors, "worker")
        running = RayWorkers(job, places, log=log)
        log.info("%s started on Ray; Ctrl-C ends %s", workers, "it" if places.actors == 1 else "them")
        running.run(stop)
        log.info("%s ended", workers)
