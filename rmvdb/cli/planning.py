"""Commands that look ahead and change nothing: `simulate`, `plan`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from rmvdb import errors
from rmvdb.cli import output, progress, show_plan
from rmvdb.cli.context import open_app
from rmvdb.cli.options import json_option, make_question, plan_options, sample_options
from rmvdb.learning.method import METHODS, Method
from rmvdb.planning.orders.table import ORDERS


def _some(kind: str, known: tuple[str, ...], every: tuple[str, ...]) -> Callable[..., tuple[str, ...]]:
    """Return a reader of an option with names, separated by commas. `all` stands for `every`."""

    def read(_ctx: click.Context, _param: click.Parameter, value: str | None) -> tuple[str, ...]:
        if value is None:
            return ()
        names = every if value == "all" else tuple(dict.fromkeys(part.strip() for part in value.split(",")))
        if unknown := [name for name in names if name not in known]:
            raise errors.UnknownName(kind, unknown[0], known)
        return names

    return read


@click.command()
@sample_options(2000)
@click.option(
    "--methods",
    metavar="NAMES",
    callback=_some("method", tuple(map(str, METHODS)), tuple(map(str, METHODS))),
    default="all",
    show_default=True,
    help=f"Names from {','.join(METHODS)}, or all.",
)
@click.option(
    "--orders",
    metavar="NAMES",
    callback=_some("order", tuple(ORDERS), ()),
    help=f"Names from {','.join(ORDERS)} [default: every order that the version can give].",
)
@click.option("--png", type=click.Path(dir_okay=False, path_type=Path), help="Also draw the curves into this file.")
@json_option
def simulate(
    gallery: str | None,
    methods: tuple[str, ...],
    orders: tuple[str, ...],
    png: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Compare every method and order on a sample, and recommend one. It changes nothing.

    The right answers of a query are the records of the same class with --labels, and the answers in the file with --queries
    (an item is the file of that name, else a text). Without both, they are the nearest records by the new model.

    \b
    Example:
      rmvdb simulate --from v1 --to v2 --labels category --png curves.png
      rmvdb simulate --from v1 --to v2 --queries judged.jsonl --methods naive,rqt,rm
    """
    if png is not None:
        from rmvdb.cli import plot

        plot.check(png)
    app = open_app()
    name = app.gallery_name(gallery)
    with progress.reporting(quiet=as_json) as report:
        conductor = app.conductor(name, report=report)
        comparison = conductor.simulate(
            conductor.resolve(make_question(name, options)),
            methods=[Method(method) for method in methods],
            orders=orders,
        ).to_json()
    if as_json:
        output.print_json(comparison)
    else:
        show_plan.print_comparison(comparison)
    if png is not None:
        plot.draw(comparison, png)


@click.command()
@plan_options
@json_option
def plan(gallery: str | None, as_json: bool, again: bool, method: str, **options: Any) -> None:
    """Train into a cache and show what an upgrade does: held-out quality, curve and cost. It changes nothing else.

    \b
    Example:
      rmvdb plan --from v1 --to v2 --labels category
    """
    app = open_app()
    name = app.gallery_name(gallery)
    with progress.reporting(quiet=as_json) as report:
        conductor = app.conductor(name, report=report)
        found = conductor.plan(conductor.resolve(make_question(name, options, method=method)), again=again)
    if as_json:
        from dataclasses import asdict

        output.print_json(asdict(found))
    else:
        show_plan.print_plan(found)
