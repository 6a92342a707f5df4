"""The `rmvdb gallery` commands: galleries."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from rmvdb import errors
from rmvdb.cli import output, progress
from rmvdb.cli.context import allow, open_app
from rmvdb.cli.options import json_option
from rmvdb.items import sources
from rmvdb.text import counted

if TYPE_CHECKING:
    from rmvdb.app.wiring import App
    from rmvdb.protocols import Source
    from rmvdb.registry.tables import CollectionRow, GalleryRow


@click.group()
def gallery() -> None:
    """Add, list, show, settle, take and remove galleries."""


@gallery.command("add")
@click.argument("name")
@click.option("--model", "version", required=True, help="The model version of its vectors.")
@click.option("--collection", help="Adopt this existing Milvus collection unchanged [default: create one].")
@click.option("--source", metavar="SPEC", help=f"Where items come from: {sources.forms()}.")
@click.option("--id-type", type=click.Choice(["INT64", "VARCHAR"]), help="The type of ids in a new collection [default: INT64].")
@click.option(
    "--field",
    "fields",
    multiple=True,
    metavar="NAME:TYPE",
    help="A typed scalar field, such as VARCHAR(200) or INT64. Other fields are dynamic.",
)
def gallery_add(
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
    from rmvdb.catalog import checks, galleries
    from rmvdb.types import IdType

    app, compared = open_app(), list[str]()
    try:
        row = galleries.add_gallery(
            app.registry,
            app.store,
            app.loaded_models,
            name=name,
            model=version,
            collection=collection,
            id_type=IdType(id_type) if id_type else None,
            fields=[_field(each) for each in fields],
            source=source,
            loaded_source=_source(app, source) if source else None,
            chosen_index=app.settings.index_for(name),
            times=app.times,
            say=compared.append,
        )
    except errors.CollectionMissing as exc:
        where = f"milvus.uri in {app.file or 'rmvdb.toml'} is {app.milvus_shown!r}"
        raise errors.CollectionMissing(f"{exc}. {where}: name your Milvus there if the collection is in another one") from exc
    allow(app, sources.code_of(source))
    _tell_of(app, row, compared)
    if checks.UNCOMPARED in compared:
        _as_doctor_finds(app, row)


def _tell_of(app: App, row: GalleryRow, compared: Sequence[str]) -> None:
    """Say which collection a gallery has now, how that is searched, and how its vectors compare with its items."""
    added = app.registry.collections(row.id)[-1]
    whose = "adopted" if added.adopted else "made by rmvdb"
    output.echo(f"gallery {row.name}: collection {added.name} ({whose}), model version {added.model}")
    chosen = app.settings.index_for(row.name)
    if added.adopted and chosen.search and not added.search:
        output.echo(
            f"  its index is of type {app.store.index(added.name).type} and index.search for {chosen.type}: it is searched with "
            "Milvus' own search parameters"
        )
    for each in compared:
        output.echo(f"  {each}")


def _as_doctor_finds(app: App, row: GalleryRow) -> None:
    """Raise the error of doctor if the source has no item for any of these records."""
    from rmvdb.app.doctor import check_source

    try:
        check_source(app, row)
    except errors.SourceError as exc:
        raise errors.SourceError(f"{exc} (the gallery is added all the same)") from exc


@gallery.command("list")
@json_option
def gallery_list(as_json: bool) -> None:
    """List the galleries.

    \b
    Example:
      rmvdb gallery list
    """
    app = open_app()
    rows = [
        {
            "name": row.name,
            "model": (plan := app.registry.plan(row.name)).legs[0].model,
            "collections": [leg.collection for leg in plan.legs],
            "epoch": plan.epoch,
            "source": row.source and sources.shown(row.source),
        }
        for row in app.registry.galleries()
    ]
    if not rows:
        app.manifest.check_forgotten()
    output.print_rows(rows, as_json)


@gallery.command("show")
@click.argument("name", required=False)
@json_option
def gallery_show(name: str | None, as_json: bool) -> None:
    """Show the collections, records and source of a gallery.

    \b
    Example:
      rmvdb gallery show photos
    """
    app = open_app()
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
    source = row.source and sources.shown(row.source)
    shown = {"name": row.name, "source": source, "id_type": row.id_type, "epoch": row.epoch}
    if as_json:
        output.print_json(shown | {"collections": collections})
        return
    output.echo("  ".join(f"{key}: {'none' if value is None else value}" for key, value in shown.items()))
    output.print_rows(collections, as_json=False)


@gallery.command("source")
@click.argument("name")
@click.argument("spec")
def gallery_source(name: str, spec: str) -> None:
    """Set where a gallery's items come from. rmvdb embeds a few of them and compares them with the stored vectors.

    \b
    Example:
      rmvdb gallery source photos "folder:photos/{id}.jpg"
    """
    from rmvdb.catalog import checks
    from rmvdb.registry.mark import Owner

    app = open_app()
    row, source = app.registry.gallery(name), _source(app, spec)
    Owner(app.registry, app.store).expect(name)
    compared = checks.check_vectors(app.registry, app.store, app.loaded_models, row, source)
    app.registry.set_source(name, spec)
    allow(app, sources.code_of(spec))
    output.echo(f"gallery {name}: items come from {spec}; {compared}")


@gallery.command("settle")
@click.argument("name", required=False)
def gallery_settle(name: str | None) -> None:
    """Wait until searches find every record of a gallery. A Milvus server flushes fresh rows and indexes them.

    Run it after you filled a collection by another program. It writes no record. Ctrl-C stops the wait, and Milvus goes on.

    \b
    Example:
      rmvdb gallery settle photos
    """
    from rmvdb.catalog import galleries

    app = open_app()
    name = app.gallery_name(name)
    with progress.stoppable() as stop, progress.reporting() as report:

        def indexed(collection: str, done: int, total: int) -> None:
            if stop.is_set():
                raise errors.Stopped("Stopped. Milvus continues to index; run the same command to wait for it")
            report(f"indexing {collection}", done, total)

        count = galleries.settle_gallery(app.registry, app.store, name, indexed)
    output.echo(f"gallery {name}: searches find {counted(count, 'record')}")


@gallery.command("take")
@click.argument("name")
@click.option(
    "--from-lost-registry",
    is_flag=True,
    help="The registry that owns the gallery is lost for good. It may be a newer state of this registry.",
)
@click.option("--yes", is_flag=True, help="Do not ask.")
def gallery_take(name: str, from_lost_registry: bool, yes: bool) -> None:
    """Take a gallery from a registry that is lost for good.

    It asks first. Then it waits until no write or batch of the other registry can be under way.

    \b
    Example:
      rmvdb gallery take photos --from-lost-registry
    """
    app = open_app()
    if not from_lost_registry:
        raise errors.UsageError(
            f"rmvdb takes gallery {name!r} only if its registry is lost for good; if it is, add --from-lost-registry, else use "
            "that registry"
        )
    if not yes:
        output.agree(
            f"Take gallery {name} from its registry? If that registry is still in use, you lose records",
            "taken",
        )
    with progress.stoppable() as stop, progress.reporting() as report:
        taken = app.rebuild(say=report.say, report=report, stop=stop).take(name)
    owned = f"{' and '.join(taken)} {'is' if len(taken) == 1 else 'are'} this registry's"
    if name in {row.name for row in app.registry.galleries()}:
        output.echo(f"gallery {name} is taken: {owned}")
    elif len(held := {each: count for each in taken if (count := app.store.count(each))}) < 2:
        first = next(iter(held), taken[0])
        output.echo(
            f"gallery {name} is taken: {owned}; continue with rmvdb gallery add {name} --collection {first} --model VERSION"
        )
    else:
        parts = " and ".join(f"{counted(count, 'record')} in {each}" for each, count in held.items())
        output.echo(f"gallery {name} is taken: {owned}")
        output.echo(
            f"An upgrade was half way: the gallery's records lie in {len(held)} collections, {parts}. Join them first, as "
            "docs/how-to/recover-a-registry.md says: a gallery of one of them misses the records of the others"
        )


@gallery.command("remove")
@click.argument("name")
@click.option("--drop", is_flag=True, help="Also drop the collections that rmvdb made. An adopted collection always stays.")
@click.option("--yes", is_flag=True, help="Do not ask.")
def gallery_remove(name: str, drop: bool, yes: bool) -> None:
    """Remove a gallery and its history. Its collections stay, unless you give --drop. It asks first.

    \b
    Example:
      rmvdb gallery remove photos
    """
    from rmvdb.catalog import galleries

    app = open_app()
    row = app.registry.gallery(name)
    app.registry.refuse_used(name)
    going = [each.name for each in _collections(app, row) if drop and not each.adopted]
    what = f" and drop {' and '.join(going)} with {counted(sum(map(app.store.count, going)), 'record')}" if going else ""
    if not yes:
        output.agree(f"Forget gallery {name}{what}? You cannot undo it", "forgotten")
    left = galleries.remove_gallery(app.registry, app.store, row, drop=drop)
    stays = f"; {' and '.join(left)} {'stays' if len(left) == 1 else 'stay'} in the engine" if left else ""
    output.echo(f"gallery {name} is forgotten{stays}")


def _source(app: App, spec: str) -> Source:
    sources.refuse_password(spec)
    return sources.load(spec, base=app.base)


def _collections(app: App, row: GalleryRow) -> list[CollectionRow]:
    return [each for each in app.registry.collections(row.id) if each.dropped_at is None and app.store.exists(each.name)]


FIELDS = ("BOOL", "INT8", "INT16", "INT32", "INT64", "FLOAT", "DOUBLE", "VARCHAR", "JSON")


def _field(text: str) -> Any:
    from rmvdb.types import Field

    match = re.fullmatch(r"(\w+):(\w+)(?:\((\d+)\))?", text)
    if match is None:
        raise errors.UsageError(
            f"--field {text!r} does not describe a field; write NAME:TYPE, such as label:INT64 or caption:VARCHAR(500)"
        )
    name, kind, length = match.groups()
    if (kind := kind.upper()) not in FIELDS:
        raise errors.UnknownName(f"type of --field {name}", kind, FIELDS)
    if length is not None and not (kind == "VARCHAR" and 1 <= int(length) <= 65_535):
        raise errors.UsageError(f"--field {text!r} cannot be that long; only VARCHAR has a length, from 1 to 65535")
    return Field(name=name, type=kind, params={"max_length": int(length or 512)} if kind == "VARCHAR" else {})
