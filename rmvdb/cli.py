"""The command line: one command per step; parse, call one function, print."""

from __future__ import annotations

import functools
import json
import logging
import math
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rmvdb import __version__, errors, terminal
from rmvdb.plural import counted

if TYPE_CHECKING:
    from rmvdb.app import App
    from rmvdb.planning import Question
    from rmvdb.tables import CollectionRow, GalleryRow, UpgradeRow

METHODS = ("naive", "identity", "rqt", "cl-s", "cl-m", "mcl", "rm", "fct")
AUTO = "auto"
FIELDS = ("BOOL", "INT8", "INT16", "INT32", "INT64", "FLOAT", "DOUBLE", "VARCHAR", "JSON")
ORDERS = ("classification-score", "centroid", "uncertainty", "cluster", "random", "traffic")


class Commands(click.Group):
    """A group whose commands end with one sentence and the right exit code where something of ours fails."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except errors.RmvdbError as exc:
            click.echo(f"Error: {exc}", err=True)
            ctx.exit(130 if isinstance(exc, errors.Stopped) else exc.exit_code)


class AtLeastZero(click.FloatRange):
    """A number that is one: infinity and nan are no limit and no share."""

    def __init__(self, *, max: float | None = None) -> None:
        super().__init__(min=0, max=max)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is no number to limit by; 0 lifts the limit", param, ctx)
        return number


def _some(kind: str, known: tuple[str, ...]) -> Callable[..., tuple[str, ...]]:
    """What reads an option that takes some of these names, with commas between them, or `all`."""

    def read(_ctx: click.Context, _param: click.Parameter, value: str | None) -> tuple[str, ...]:
        if value is None:
            return ()
        names = known if value == "all" else tuple(dict.fromkeys(part.strip() for part in value.split(",")))
        if unknown := [name for name in names if name not in known]:
            raise errors.UnknownName(kind, unknown[0], known)
        return names

    return read


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON for machines.")
gallery_option = click.option("--gallery", "-g", help="Which gallery; may be left out where there is one.")
force_option = click.option("--force", is_flag=True, help="Do not wait for clients that cannot serve the next plan.")


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="rmvdb")
@click.option("--config", type=click.Path(path_type=Path), help="rmvdb.toml or its folder [default: the nearest one upwards].")
@click.option("-v", "--verbose", is_flag=True, help="Print what is logged, too.")
@click.pass_context
def main(ctx: click.Context, config: Path | None, verbose: bool) -> None:
    """Upgrade the embedding model behind a running vector search, with no downtime.

    \b
    Example:
      rmvdb init
      rmvdb model add v1 --embedder app.models:v1
      rmvdb gallery add photos --model v1 --source "folder:photos/{id}.jpg"
      rmvdb model add v2 --embedder app.models:v2
      rmvdb upgrade --from v1 --to v2
    """
    # Threads that spin while they wait made a training three times as long where cores are shared; read when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    logging.basicConfig(
        level=logging.INFO if verbose else logging.ERROR, format="%(asctime)s %(name)s %(message)s", stream=sys.stderr
    )
    ctx.obj = config


def _app(ctx: click.Context) -> App:
    from rmvdb import app

    root = ctx.find_root()
    opened = app.load(root.obj)
    root.call_on_close(opened.close)
    if root.invoked_subcommand not in ("db", "registry", "doctor"):
        opened.refuse_nowhere()
    return opened


# --- set up -----------------------------------------------------------------------------------------------------------


@main.command()
@click.option("--here", "folder", type=click.Path(file_okay=False, path_type=Path), default=Path(), help="Where rmvdb.toml goes.")
@click.pass_context
def init(ctx: click.Context, folder: Path) -> None:
    """Write a commented rmvdb.toml and make the registry. Run again, it changes nothing.

    \b
    Example:
      rmvdb init
    """
    from rmvdb import app, config, schema

    file = ctx.find_root().obj or folder / config.NAME
    if file.exists():
        click.echo(f"{file} is there already and stays as it is")
    else:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(config.template(), encoding="utf-8")
        click.echo(f"wrote {file}")
    registry = app.load(file).registry
    schema.upgrade(registry.url.render_as_string(hide_password=False))
    click.echo(f"registry {registry.shown_url} is at schema {schema.head()}")


@main.command()
@json_option
@click.pass_context
def doctor(ctx: click.Context, as_json: bool) -> None:
    """Check every part and say what to do about each failure; exits with 1 if there is one.

    \b
    Example:
      rmvdb doctor
    """
    from rmvdb.doctor import examine

    findings = []
    for finding in examine(_app(ctx)):
        findings.append(finding)
        if not as_json:
            click.echo(f"{'ok  ' if finding.ok else 'FAIL'}  {finding.part}: {finding.detail}")
    if as_json:
        terminal.print_json([finding.to_json() for finding in findings])
    ctx.exit(0 if all(finding.ok for finding in findings) else 1)


@main.group()
def db() -> None:
    """The registry's schema."""


@db.command("upgrade")
@click.pass_context
def db_upgrade(ctx: click.Context) -> None:
    """Bring the registry to this version's schema.

    \b
    Example:
      rmvdb db upgrade
    """
    from rmvdb import schema

    registry = _app(ctx).registry
    schema.upgrade(registry.url.render_as_string(hide_password=False))
    click.echo(f"registry {registry.shown_url} is at schema {schema.head()}")


@db.command("check")
@json_option
@click.pass_context
def db_check(ctx: click.Context, as_json: bool) -> None:
    """Say whether the registry is at this version's schema.

    \b
    Example:
      rmvdb db check
    """
    from rmvdb import schema

    registry = _app(ctx).registry
    schema.check(registry.url.render_as_string(hide_password=False))
    if as_json:
        terminal.print_json({"registry": registry.shown_url, "schema": schema.head()})
        return
    click.echo(f"registry {registry.shown_url} is at schema {schema.head()}")


@main.group()
def registry() -> None:
    """The registry's contents."""


@registry.command("rebuild")
@click.pass_context
def registry_rebuild(ctx: click.Context) -> None:
    """Bring back a registry that was lost: from the manifest in home, the collections and the archive. Run again, it goes on.

    \b
    Example:
      rmvdb registry rebuild
    """
    app = _app(ctx)
    with terminal.stoppable() as stop, terminal.progress() as report:
        app.rebuild(say=report.say, report=report, stop=stop).run()
    for row in app.registry.galleries():
        upgrade = app.registry.active_upgrade(row.id)
        if upgrade is not None:
            versions = (app.registry.version(name) for name in (upgrade.from_version, upgrade.to_version))
            old, new = (version.base or version.name for version in versions)
            on = "rmvdb rollback" if upgrade.undoes else f"rmvdb upgrade --from {old} --to {new}"
            click.echo(f"gallery {row.name}: go on with {on}")


# --- model versions and galleries -------------------------------------------------------------------------------------


@main.group()
def model() -> None:
    """Model versions."""


@model.command("add")
@click.argument("name")
@click.option(
    "--embedder", required=True, metavar="PACKAGE.MODULE:OBJECT", help="An object with embed(items), or what makes one."
)
@click.option("--options", default="{}", help="Keyword arguments for what makes it, as JSON.")
@click.option(
    "--classifier", metavar="PACKAGE.MODULE:OBJECT", help="An object with scores(vectors), for --order classification-score."
)
@click.option(
    "--metric",
    type=click.Choice(["COSINE", "IP", "L2", "LORENTZ"]),
    default="COSINE",
    show_default=True,
    help="How vectors compare; LORENTZ: points (time, space) of a hyperboloid, kept in an IP collection.",
)
@click.option("--dim", type=click.IntRange(min=1), help="Dimension [default: measured].")
@click.option("--kind", type=click.Choice(["image", "text"]), help="What its items are [default: found out].")
@click.option(
    "--compatible-with", metavar="VERSION", help="The version whose vectors its own were trained to be comparable with."
)
@click.pass_context
def model_add(
    ctx: click.Context,
    name: str,
    embedder: str,
    options: str,
    classifier: str | None,
    metric: str,
    dim: int | None,
    kind: Any,
    compatible_with: str | None,
) -> None:
    """Register a model version: it is loaded, probed and fingerprinted.

    \b
    Example:
      rmvdb model add v2 --embedder app.models:v2 --classifier app.models:v2_head
    """
    from rmvdb import catalog
    from rmvdb.types import Metric

    row = catalog.add_version(
        _app(ctx).registry,
        name=name,
        spec=embedder,
        options=_json_object(options, "--options"),
        classifier=classifier,
        metric=Metric(metric),
        dim=dim,
        kind=kind,
        compatible_with=compatible_with,
    )
    weights = f", weights {row.fingerprint[:12]}" if row.fingerprint else ""
    declared = f", compatible with {row.compatible_with}" if row.compatible_with else ""
    click.echo(f"model version {row.name}: {row.dim} dimensions, {row.metric}{weights}{declared}")


@model.command("list")
@json_option
@click.pass_context
def model_list(ctx: click.Context, as_json: bool) -> None:
    """List the model versions.

    \b
    Example:
      rmvdb model list --json
    """
    names = ("name", "dim", "metric", "embedder", "classifier", "base", "compatible_with", "fingerprint")
    rows = [{name: getattr(row, name) for name in names} for row in _app(ctx).registry.versions()]
    terminal.print_rows(rows, as_json)


@model.command("remove")
@click.argument("name")
@click.pass_context
def model_remove(ctx: click.Context, name: str) -> None:
    """Forget a model version that no gallery has, nor had.

    \b
    Example:
      rmvdb model remove v2
    """
    _app(ctx).registry.remove_version(name)
    click.echo(f"model version {name} is forgotten")


@main.group()
def gallery() -> None:
    """Galleries."""


@gallery.command("add")
@click.argument("name")
@click.option("--model", "version", required=True, help="The model version that makes, or made, its vectors.")
@click.option("--collection", help="Adopt this existing Milvus collection as it is [default: create one].")
@click.option(
    "--source", metavar="SPEC", help="Where items come from: folder:photos/{id}.jpg, field:NAME, call:MODULE:F, sql:URL#SELECT …"
)
@click.option("--id-type", type=click.Choice(["INT64", "VARCHAR"]), help="Of a created collection [default: INT64].")
@click.option(
    "--field",
    "fields",
    multiple=True,
    metavar="NAME:TYPE",
    help="A typed scalar field; others are dynamic. VARCHAR(200), INT64 …",
)
@click.pass_context
def gallery_add(
    ctx: click.Context,
    name: str,
    version: str,
    collection: str | None,
    source: str | None,
    id_type: str | None,
    fields: tuple[str, ...],
) -> None:
    """Create a gallery, or adopt an existing collection without rewriting it.

    \b
    Example:
      rmvdb gallery add photos --model v1 --source "folder:photos/{id}.jpg"
      rmvdb gallery add photos --model v1 --collection my_photos --source "folder:photos/{id}.jpg"
    """
    from rmvdb import catalog, sources
    from rmvdb.types import IdType

    app = _app(ctx)
    row = catalog.add_gallery(
        app.registry,
        app.store,
        app.encoder,
        name=name,
        model=version,
        collection=collection,
        id_type=IdType(id_type) if id_type else None,
        fields=[_field(each) for each in fields],
        source=source,
        loaded_source=sources.load(source, base=app.base) if source else None,
        chosen_index=app.settings.index_for(name),
        times=app.times,
    )
    held = app.registry.collections(row.id)[-1]
    whose = "adopted" if held.adopted else "made by rmvdb"
    click.echo(f"gallery {row.name}: collection {held.name} ({whose}), model version {held.model}")
    chosen = app.settings.index_for(name)
    if held.adopted and chosen.search and not held.search:
        click.echo(
            f"  its index is of type {app.store.index(held.name).type} and index.search for {chosen.type}: it is searched with "
            "Milvus' own search parameters"
        )


@gallery.command("list")
@json_option
@click.pass_context
def gallery_list(ctx: click.Context, as_json: bool) -> None:
    """List the galleries.

    \b
    Example:
      rmvdb gallery list
    """
    app = _app(ctx)
    rows = [
        {
            "name": row.name,
            "model": (plan := app.registry.plan(row.name)).legs[0].model,
            "collections": [leg.collection for leg in plan.legs],
            "epoch": plan.epoch,
            "source": row.source,
        }
        for row in app.registry.galleries()
    ]
    terminal.print_rows(rows, as_json)


@gallery.command("show")
@click.argument("name", required=False)
@json_option
@click.pass_context
def gallery_show(ctx: click.Context, name: str | None, as_json: bool) -> None:
    """Show a gallery: its collections, its records, its source.

    \b
    Example:
      rmvdb gallery show photos
    """
    app = _app(ctx)
    row = app.registry.gallery(app.gallery_name(name))
    collections = [
        {
            "name": each.name,
            "model": each.model,
            "records": app.store.count(each.name),
            "adopted": each.adopted,
            "dim": each.schema["dim"],
            "metric": each.schema["metric"],
            "search": each.search,
        }
        for each in _collections(app, row)
    ]
    shown = {"name": row.name, "source": row.source, "id_type": row.id_type, "epoch": row.epoch}
    if as_json:
        terminal.print_json(shown | {"collections": collections})
        return
    click.echo("  ".join(f"{key}: {'none' if value is None else value}" for key, value in shown.items()))
    terminal.print_rows(collections, as_json=False)


def _collections(app: App, row: GalleryRow) -> list[CollectionRow]:
    return [each for each in app.registry.collections(row.id) if each.dropped_at is None and app.store.exists(each.name)]


@gallery.command("source")
@click.argument("name")
@click.argument("spec")
@click.pass_context
def gallery_source(ctx: click.Context, name: str, spec: str) -> None:
    """Say where a gallery's items come from; a few are embedded and compared with the vectors that are stored.

    \b
    Example:
      rmvdb gallery source photos "folder:photos/{id}.jpg"
    """
    from rmvdb import catalog, sources

    app = _app(ctx)
    row, source = app.registry.gallery(name), sources.load(spec, base=app.base)
    compared = catalog.check_vectors(app.registry, app.store, app.encoder, row, source)
    app.registry.set_source(name, spec)
    click.echo(f"gallery {name}: items come from {spec}; {compared}")


@gallery.command("remove")
@click.argument("name")
@click.option("--drop", is_flag=True, help="Drop the collections that rmvdb made, too; one that was adopted always stays.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.pass_context
def gallery_remove(ctx: click.Context, name: str, drop: bool, yes: bool) -> None:
    """Forget a gallery and its history; its collections stay, unless --drop is given. It asks.

    \b
    Example:
      rmvdb gallery remove photos
    """
    from rmvdb import catalog

    app = _app(ctx)
    row = app.registry.gallery(name)
    app.registry.refuse_used(name)
    going = [each.name for each in _collections(app, row) if drop and not each.adopted]
    what = f" and drop {' and '.join(going)} with {counted(sum(map(app.store.count, going)), 'record')}" if going else ""
    if not yes:
        _agree(f"Forget gallery {name}{what}? Nothing brings it back", "forgotten", "rmvdb gallery remove --yes")
    left = catalog.remove_gallery(app.registry, app.store, row, drop=drop)
    stays = f"; {' and '.join(left)} {'stays' if len(left) == 1 else 'stay'} in the engine" if left else ""
    click.echo(f"gallery {name} is forgotten{stays}")


# --- the upgrade ------------------------------------------------------------------------------------------------------


def _sample_options(most: int, *query_log: str) -> tuple[Callable[..., Any], ...]:
    """What a plan and a simulation are asked alike, with so many records sampled by default; `query_log` are its names."""
    return (
        gallery_option,
        click.option("--from", "from_version", required=True, help="The model version the gallery holds."),
        click.option("--to", "to_version", required=True, help="The model version it shall hold."),
        click.option("--labels", metavar="FIELD", help="The field with a record's class or identity, if it has one."),
        click.option(
            "--sample", type=click.IntRange(min=1), default=most, show_default=True, help="Records to train and measure on."
        ),
        click.option(
            "--side", metavar="FIELD", help="The field with a list of numbers that helps the method fct, if there is one."
        ),
        click.option(
            *query_log,
            "query_log",
            metavar="FILE",
            help='Queries without answers to train ψ on, too, a line each: {"item": "a text"}.',
        ),
        click.option("--paper", is_flag=True, help="Train with the paper's settings as printed."),
        click.option("--seed", type=int, default=0, show_default=True, help="Of the sample, the split and the training."),
    )


_PLAN_OPTIONS = (
    *_sample_options(20_000, "--query-log", "--queries"),
    click.option(
        "--method",
        type=click.Choice((AUTO, *METHODS)),
        default=AUTO,
        show_default=True,
        help="How the old part is searched; auto compares naive, identity, rqt and rm on the sample.",
    ),
    click.option(
        "--order", type=click.Choice(ORDERS), help="What is backfilled first [default: the first the version can give]."
    ),
    click.option(
        "--instant-rollback",
        is_flag=True,
        help="Empty a copy and keep the original current, so that rmvdb rollback takes a moment.",
    ),
    click.option("--tune", is_flag=True, help="Train with a few other settings, too, and take those that are worth most."),
    click.option("--again", is_flag=True, help="Make the plan anew, even if one is kept."),
)


def _with(options: Iterable[Callable[..., Any]]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator that gives a command these options, in their order."""
    return lambda command: functools.reduce(lambda made, option: option(made), reversed(tuple(options)), command)


def _question(gallery: str, options: dict[str, Any], *, method: str = AUTO) -> Question:
    from rmvdb.methods import Method
    from rmvdb.planning import Question

    return Question(gallery=gallery, method=None if method == AUTO else Method(method), **options)


@main.command()
@_with(_sample_options(2000, "--query-log"))
@click.option(
    "--methods",
    metavar="NAMES",
    callback=_some("method", METHODS),
    default="all",
    show_default=True,
    help=f"Some of {','.join(METHODS)}, or all.",
)
@click.option(
    "--orders",
    metavar="NAMES",
    callback=_some("order", ORDERS),
    help=f"Some of {','.join(ORDERS)}, or all [default: all that can be given].",
)
@click.option(
    "--queries", "file", metavar="FILE", help='Queries with known answers, a line each: {"item": "a text", "answers": [7, 42]}.'
)
@click.option("--png", type=click.Path(dir_okay=False, path_type=Path), help="Draw the curves into this file, too.")
@json_option
@click.pass_context
def simulate(
    ctx: click.Context,
    /,
    gallery: str | None,
    methods: tuple[str, ...],
    orders: tuple[str, ...],
    file: str | None,
    png: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Compare every method and order on a sample, with what others do, and recommend one. Changes nothing.

    A query should find the records of its --labels; or the answers that --queries gives, which are put into the sample (an item
    is the file of that name, else a text); or, without both, what lies nearest by the new model.

    \b
    Example:
      rmvdb simulate --from v1 --to v2 --labels category --png curves.png
      rmvdb simulate --from v1 --to v2 --queries judged.jsonl --methods naive,rqt,rm
    """
    from rmvdb import sources
    from rmvdb.methods import Method

    if png is not None:
        from rmvdb import picture

        picture.check(png)
    app = _app(ctx)
    name = app.gallery_name(gallery)
    with terminal.progress(quiet=as_json) as report:
        conductor = app.conductor(name, report=report)
        found = conductor.simulate(
            conductor.resolve(_question(name, options)),
            methods=[Method(method) for method in methods],
            orders=orders,
            queries=sources.queries(Path(file)) if file else (),
        ).to_json()
    if png is not None:
        picture.draw(found, png)
    if as_json:
        terminal.print_json(found)
    else:
        terminal.print_comparison(found)


@main.command()
@_with(_PLAN_OPTIONS)
@json_option
@click.pass_context
def plan(ctx: click.Context, /, gallery: str | None, as_json: bool, again: bool, method: str, **options: Any) -> None:
    """Train into a cache and show what an upgrade would do: held-out quality, curve, cost. Changes nothing.

    \b
    Example:
      rmvdb plan --from v1 --to v2 --labels category
    """
    app = _app(ctx)
    name = app.gallery_name(gallery)
    with terminal.progress(quiet=as_json) as report:
        conductor = app.conductor(name, report=report)
        found = conductor.plan(conductor.resolve(_question(name, options, method=method)), again=again)
    if as_json:
        from dataclasses import asdict

        terminal.print_json(asdict(found))
    else:
        terminal.print_plan(found)


@main.command()
@_with(_PLAN_OPTIONS)
@click.option("--until", type=click.FloatRange(0, 1), default=1.0, show_default=True, help="Stop at this share of the gallery.")
@click.option("--no-cutover", is_flag=True, help="Leave both collections in service at the end.")
@click.option("--detach", is_flag=True, help="Plan and deploy, then leave the backfill to workers.")
@click.option("--execute", is_flag=True, help="Agree that records leave a collection that rmvdb did not make.")
@force_option
@click.pass_context
def upgrade(
    ctx: click.Context,
    /,
    gallery: str | None,
    again: bool,
    method: str,
    until: float,
    no_cutover: bool,
    detach: bool,
    execute: bool,
    force: bool,
    **options: Any,
) -> None:
    """Plan, deploy, backfill and cut over; Ctrl-C stops it, the same command goes on.

    It takes the place of an upgrade that is unfinished, and goes on from where that one is.

    \b
    Example:
      rmvdb upgrade --from v1 --to v2
      rmvdb upgrade --from v1 --to v2 --method rm --labels category --until 0.5
    """
    app = _app(ctx)
    name = app.gallery_name(gallery)
    with terminal.stoppable() as stop, terminal.progress() as report:
        conductor = app.conductor(name, say=report.say, report=report, stop=stop)
        row = _begun(app, name, options["from_version"], options["to_version"])
        if row is None:
            if _is_done(app, name, options["from_version"], options["to_version"]):
                report.say(f"gallery {name} holds {options['to_version']} already")
                return
            question = conductor.resolve(_question(name, options, method=method))
            found = conductor.plan(question, again=again)
            report.show(lambda: terminal.print_plan(found))
            row = conductor.begin(question, found, app.worker(), until=until, cutover=not no_cutover, execute=execute)
        else:
            _refuse_another_way(row, method, options)
            report.say(f"going on with upgrade {row.id} by {row.method} in {row.order} order: {row.phase}")
            app.registry.set_upgrade(row.id, plan=row.plan | {"until": until, "cutover": not no_cutover})
            if execute:
                for collection in row.old_collections:
                    app.registry.allow_removal(collection)
            row = app.registry.upgrade(row.id)
        _go_on(app, conductor, row, report, detach=detach, force=force)


def _begun(app: App, gallery: str, from_version: str, to_version: str) -> UpgradeRow | None:
    """The upgrade that this command goes on with, where the gallery is in it."""
    row = app.registry.active_upgrade(app.registry.gallery(gallery).id)
    app.registry.version(from_version)
    app.registry.version(to_version)
    if row is None or row.undoes is not None:
        return None
    sources = set().union(*(_names(app, leg["model"]) for leg in row.plan["before"]))
    return row if from_version in sources and to_version in _names(app, row.to_version) else None


#: What is asked of an upgrade, besides method and order, only where it begins.
_FROM_THE_START = ("labels", "side", "query_log", "instant_rollback", "paper", "tune")


def _refuse_another_way(row: UpgradeRow, method: str, options: dict[str, Any]) -> None:
    """An upgrade goes on as it began: UsageError where something else is asked for."""
    question, order = row.plan["question"], options["order"]
    for name, asked, known in (
        ("method", None if method == AUTO else method, (question["method"], row.method)),
        ("order", order, (question["order"], row.order)),
    ):
        if asked not in (None, *known):
            raise errors.UsageError(
                f"Upgrade {row.id} was begun by the {name} {known[1]}, not {asked}; leave --{name} out to go on, or end it "
                "first: rmvdb rollback"
            )
    for name in _FROM_THE_START:
        if options[name] and options[name] != question[name]:
            raise errors.UsageError(
                f"Upgrade {row.id} was begun {'with another' if question[name] else 'without'} --{name.replace('_', '-')}; "
                "leave it out to go on, or end it first: rmvdb rollback"
            )


def _names(app: App, version: str) -> set[str]:
    return {version, app.registry.version(version).base or version}


def _is_done(app: App, gallery: str, from_version: str, to_version: str) -> bool:
    legs = app.registry.plan(gallery).legs
    return len(legs) == 1 and from_version != to_version and to_version in _names(app, legs[0].model)


def _go_on(app: App, conductor: Any, row: UpgradeRow, report: Any, *, detach: bool, force: bool) -> None:
    from rmvdb.status import both

    if detach:
        conductor.launch(row, app.worker(), force=force)
        report.say("deployed; the backfill waits for a worker: rmvdb worker")
        return
    row = conductor.advance(row, app.worker(), force=force)
    if conductor.stop.is_set():
        raise errors.Stopped("Stopped; the same command goes on from here")
    if row.phase == "ended":
        raise errors.WrongPhase(f"Upgrade {row.id} has ended meanwhile; see what took its place: rmvdb history")
    if row.phase == "cut over":
        report.say(_what_now(row))
    elif row.phase == "serving both":
        now = app.registry.progress(row.id)
        report.say(
            f"{now.done} of {counted(now.total, 'record is', 'records are')} re-embedded (t = {now.t:.2f}); {both(row.searched)}"
        )


def _what_now(row: UpgradeRow) -> str:
    back = "; until then rmvdb rollback leads back" if row.undoes is None else ""
    return f"rmvdb cleanup drops {' and '.join(row.leaving)}{back}"


@main.command()
@gallery_option
@click.pass_context
def pause(ctx: click.Context, gallery: str | None) -> None:
    """Let no further batch begin; what is in hand is finished. Searches go on as they are.

    \b
    Example:
      rmvdb pause
    """
    _set(ctx, gallery, "paused", paused=True)


@main.command()
@gallery_option
@click.pass_context
def resume(ctx: click.Context, gallery: str | None) -> None:
    """Go on after a pause.

    \b
    Example:
      rmvdb resume
    """
    _set(ctx, gallery, "no longer paused", paused=False)


@main.command()
@gallery_option
@click.option("--rate", type=AtLeastZero(), help="Records a second that each worker stays below.")
@click.option("--nice", type=AtLeastZero(max=1), help="Share of its time, 0 to 1, in which each worker copies.")
@click.option("--p99-ms", type=AtLeastZero(), help="Milliseconds; no batch begins while the p99 of a client's searches is above.")
@click.pass_context
def throttle(ctx: click.Context, gallery: str | None, rate: float | None, nice: float | None, p99_ms: float | None) -> None:
    """Limit the backfill, at once and for every worker; 0 lifts a limit, one that is not named stays as it is.

    Only beginning to copy is held back: what is in hand is finished, and what is copied leaves the old collection.

    \b
    Example:
      rmvdb throttle --rate 200
      rmvdb throttle --nice 0.5 --p99-ms 80
      rmvdb throttle --rate 0
    """
    asked = {name: value for name, value in (("rate", rate), ("nice", nice), ("p99_ms", p99_ms)) if value is not None}
    if not asked:
        raise errors.UsageError("Nothing to limit was named; give --rate, --nice or --p99-ms, with 0 to lift a limit")
    _set(ctx, gallery, ", ".join(f"{name} {f'{value:g}' if value else 'lifted'}" for name, value in asked.items()), **asked)


def _set(ctx: click.Context, gallery: str | None, words: str, **values: Any) -> None:
    app, row = _active(ctx, gallery)
    if row.phase in ("cut over", "cleaning up"):
        raise errors.WrongPhase(f"The upgrade is {row.phase}: no batch is left to hold back")
    app.registry.set_upgrade(row.id, note=words, **values)
    click.echo(f"upgrade {row.from_version} → {row.to_version}: {words}")


def _active(ctx: click.Context, gallery: str | None) -> tuple[App, UpgradeRow]:
    app = _app(ctx)
    name = app.gallery_name(gallery)
    row = app.registry.active_upgrade(app.registry.gallery(name).id)
    if row is None:
        raise errors.WrongPhase(f"Gallery {name!r} is in no upgrade; begin one: rmvdb upgrade --from OLD --to NEW")
    return app, row


@main.command()
@gallery_option
@click.option("--sample", type=click.IntRange(min=0), default=200, show_default=True, help="Records to embed again.")
@json_option
@click.pass_context
def verify(ctx: click.Context, gallery: str | None, sample: int, as_json: bool) -> None:
    """Compare the new collection with what it was filled from; exits with 1 if anything differs.

    \b
    Example:
      rmvdb verify --sample 1000
    """
    app, row = _active(ctx, gallery)
    with terminal.progress(quiet=as_json) as report:
        found = app.conductor(gallery, report=report).verify(row, sample=sample)
    if as_json:
        terminal.print_json(found.to_json())
    else:
        for example in found.examples:
            click.echo(f"differs: {example}")
        click.echo(
            f"{counted(found.records, 'record')}, {found.fields_compared} compared, {found.embedded_again} embedded again: "
            f"{counted(found.problems, 'difference')}"
        )
    ctx.exit(0 if found.ok else 1)


@main.command()
@gallery_option
@force_option
@click.pass_context
def cutover(ctx: click.Context, gallery: str | None, force: bool) -> None:
    """Verify, then search the new collection alone.

    \b
    Example:
      rmvdb cutover
    """
    app, row = _active(ctx, gallery)
    with terminal.stoppable() as stop, terminal.progress() as report:
        conductor = app.conductor(gallery, say=report.say, report=report, stop=stop)
        app.registry.set_upgrade(row.id, plan=row.plan | {"cutover": True})
        conductor.cut_over(app.registry.upgrade(row.id), app.worker(), force=force)
        report.say(_what_now(app.registry.upgrade(row.id)))


@main.command()
@gallery_option
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.pass_context
def cleanup(ctx: click.Context, gallery: str | None, yes: bool) -> None:
    """Drop the old collections, the archive and the work list. There is no way back from here; it asks.

    \b
    Example:
      rmvdb cleanup --yes
    """
    app, row = _active(ctx, gallery)
    if row.phase not in ("cut over", "cleaning up"):
        raise errors.WrongPhase(f"The upgrade is {row.phase}; clean up comes after cut-over: rmvdb cutover")
    old, begun = " and ".join(row.leaving), row.phase == "cleaning up"
    if not (yes or begun):
        _agree(f"Drop {old} and the archive? rmvdb rollback is impossible afterwards", "dropped", "rmvdb cleanup --yes")
    with terminal.stoppable() as stop, terminal.progress() as report:
        app.conductor(gallery, say=report.say, report=report, stop=stop).clean_up(row)


@main.command()
@gallery_option
@force_option
@click.pass_context
def rollback(ctx: click.Context, gallery: str | None, force: bool) -> None:
    """Go back to the old model: an upgrade whose vectors come from the archive. Ctrl-C stops it, the same command goes on.

    Back from an upgrade that took the place of another, that other one goes on after rmvdb cleanup.

    \b
    Example:
      rmvdb rollback
    """
    app, row = _active(ctx, gallery)
    with terminal.stoppable() as stop, terminal.progress() as report:
        conductor = app.conductor(gallery, say=report.say, report=report, stop=stop)
        back = row if row.undoes is not None else conductor.roll_back(row)
        if back is not None:
            _go_on(app, conductor, back, report, detach=False, force=force)


@main.command()
@gallery_option
@click.option("--watch", is_flag=True, help="Repeat every second until the upgrade is cut over, or Ctrl-C.")
@json_option
@click.pass_context
def status(ctx: click.Context, gallery: str | None, watch: bool, as_json: bool) -> None:
    """Show how far the upgrade is, who works on it, and why it is not faster.

    \b
    Example:
      rmvdb status --watch
      rmvdb status --json
    """
    import time

    from rmvdb.status import status as read

    app = _app(ctx)
    row = app.registry.gallery(app.gallery_name(gallery))
    while True:
        now = read(app.registry, app.registry.gallery(row.name))
        if as_json:
            click.echo(json.dumps(now.to_json()))
        else:
            if watch and sys.stdout.isatty():
                click.clear()
            terminal.print_status(now)
        if not watch or now.phase in ("", "cut over", "cleaning up", "ended"):
            return
        time.sleep(1)


@main.command()
@gallery_option
@json_option
@click.pass_context
def history(ctx: click.Context, gallery: str | None, as_json: bool) -> None:
    """Show what happened to the gallery's upgrades, and when.

    \b
    Example:
      rmvdb history
    """
    import datetime as dt

    app = _app(ctx)
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
    terminal.print_rows(rows, as_json)


@main.group()
def quarantine() -> None:
    """Records that could not be re-embedded."""


@quarantine.command("list")
@gallery_option
@json_option
@click.pass_context
def quarantine_list(ctx: click.Context, gallery: str | None, as_json: bool) -> None:
    """List the quarantined records and why each is.

    \b
    Example:
      rmvdb quarantine list
    """
    app, row = _active(ctx, gallery)
    terminal.print_rows([{"id": each.record, "reason": each.reason} for each in app.registry.quarantined(row.id)], as_json)


@quarantine.command("retry")
@gallery_option
@click.argument("ids", nargs=-1)
@click.pass_context
def quarantine_retry(ctx: click.Context, gallery: str | None, ids: tuple[str, ...]) -> None:
    """Put records (all, if none is named) back on the work list, once their items are mended.

    \b
    Example:
      rmvdb quarantine retry
    """
    app, row = _active(ctx, gallery)
    chosen = _quarantined(app, row, ids)
    app.registry.release(row.id, chosen, again=True)
    click.echo(
        f"{counted(len(chosen), 'record is', 'records are')} on the work list again; rmvdb upgrade or rmvdb worker goes on"
    )


@quarantine.command("drop")
@gallery_option
@click.argument("ids", nargs=-1)
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.pass_context
def quarantine_drop(ctx: click.Context, gallery: str | None, ids: tuple[str, ...], yes: bool) -> None:
    """Delete quarantined records (all, if none is named) from the gallery. It asks.

    \b
    Example:
      rmvdb quarantine drop 17 42
    """
    app, row = _active(ctx, gallery)
    chosen = _quarantined(app, row, ids)
    if chosen and not yes:
        _agree(f"Delete {counted(len(chosen), 'record')} from the gallery for good?", "deleted", "rmvdb quarantine drop --yes")
    with app.client(gallery) as client:
        client.delete(chosen)
    app.registry.release(row.id, chosen, again=False)
    click.echo(f"{counted(len(chosen), 'record is', 'records are')} deleted")


def _quarantined(app: App, row: UpgradeRow, ids: tuple[str, ...]) -> list[Any]:
    known = [each.record for each in app.registry.quarantined(row.id)]
    if unknown := sorted(set(ids) - set(known)):
        raise errors.UnknownName("quarantined record", unknown[0], known)
    numbers = app.registry.collection(row.old_collections[0]).schema["id_type"] == "INT64"
    return [int(each) if numbers else each for each in ids or known]


@main.command()
@gallery_option
@click.argument("item")
@click.option("--limit", type=click.IntRange(min=1), default=10, show_default=True, help="How many hits.")
@click.option("--filter", "expression", default="", help="A Milvus filter expression.")
@click.option("--field", "fields", multiple=True, help="A field to show; * shows all.")
@click.option("--explain", is_flag=True, help="Show the legs, and raw and calibrated distances.")
@json_option
@click.pass_context
def search(
    ctx: click.Context,
    gallery: str | None,
    item: str,
    limit: int,
    expression: str,
    fields: tuple[str, ...],
    explain: bool,
    as_json: bool,
) -> None:
    """Search with a file or a text.

    \b
    Example:
      rmvdb search query.jpg --limit 5 --explain
    """
    app = _app(ctx)
    with app.client(gallery) as client:
        hits = client.search(_item(app, item, client.plan.embedders), limit=limit, filter=expression, output_fields=fields)
        legs = [
            {
                "collection": leg.collection,
                "model": leg.model,
                "embedder": leg.embedder,
                "transforms": len(leg.transforms),
                "calibrated": leg.calibration is not None,
            }
            for leg in client.plan.legs
        ]
    rows = [
        {"id": hit.id, "distance": round(hit.distance, 6)}
        | ({"raw": round(hit.raw, 6), "leg": hit.leg} if explain else {})
        | ({"fields": dict(hit.fields)} if fields else {})
        for hit in hits
    ]
    if as_json:
        terminal.print_json({"legs": legs, "hits": rows} if explain else {"hits": rows})
        return
    if explain:
        terminal.print_rows(legs, as_json=False)
    terminal.print_rows(rows, as_json=False)


def _item(app: App, text: str, versions: Iterable[str]) -> Path | str:
    """The file of that name, else a text: UsageError where a model embeds pictures, so that it must be a file."""
    if Path(text).is_file():
        return Path(text)
    if pictures := [name for name in versions if app.registry.version(name).probe_kind == "image"]:
        raise errors.UsageError(f"There is no file {text!r}, and {pictures[0]} embeds pictures; name a file that holds one")
    return text


@main.command()
@click.option("--gallery", "-g", "galleries", multiple=True, help="Which galleries [default: all].")
@click.option("--window", metavar="CRON", help="Work for an hour from each firing: '0 1-6 * * *' is 01:00 to 07:00.")
@click.pass_context
def worker(ctx: click.Context, galleries: tuple[str, ...], window: str | None) -> None:
    """Stay, and work on every upgrade: backfill, complete, verify, cut over. Ctrl-C ends it after the batches in hand.

    \b
    Example:
      rmvdb worker --window "0 1-6 * * *"
    """
    from rmvdb.scheduler import Scheduler, Window

    app = _app(ctx)
    for name in galleries:
        app.registry.gallery(name)
    scheduler = Scheduler(app, galleries=galleries, window=Window(window), say=lambda words: click.echo(words))
    with terminal.stoppable() as stop:
        click.echo("worker started; Ctrl-C ends it")
        scheduler.run(stop)
    click.echo("worker ended")


def _agree(question: str, done: str, command: str) -> None:
    """Ask; NeedsConsent for a no, and where nobody is there to answer."""
    try:
        agreed = click.confirm(question)
    except click.Abort:
        click.echo()
        agreed = False
    if not agreed:
        raise errors.NeedsConsent(f"Nothing was {done}; run {command} to agree")


def _json_object(text: str, option: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as exc:
        raise errors.UsageError(f'{option} {text!r} is not JSON ({exc.msg}); write {{"name": value}}') from exc
    if not isinstance(value, dict):
        raise errors.UsageError(f'{option} {text!r} is not an object; write {{"name": value}}')
    return value


def _field(text: str) -> Any:
    import re

    from rmvdb.types import Field

    match = re.fullmatch(r"(\w+):(\w+)(?:\((\d+)\))?", text)
    if match is None:
        raise errors.UsageError(f"--field {text!r} is no field; write NAME:TYPE, such as label:INT64 or caption:VARCHAR(500)")
    name, kind, length = match.groups()
    if (kind := kind.upper()) not in FIELDS:
        raise errors.UnknownName(f"type of --field {name}", kind, FIELDS)
    if length is not None and not (kind == "VARCHAR" and 1 <= int(length) <= 65_535):
        raise errors.UsageError(f"--field {text!r} cannot be that long; only VARCHAR has a length, from 1 to 65535")
    return Field(name=name, type=kind, params={"max_length": int(length or 512)} if kind == "VARCHAR" else {})
