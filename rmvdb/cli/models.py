"""The `rmvdb model` commands: model versions."""

from __future__ import annotations

import json
from typing import Any

import click

from rmvdb import errors
from rmvdb.cli import output
from rmvdb.cli.context import allow, open_app
from rmvdb.cli.options import json_option
from rmvdb.items.kinds import KINDS


@click.group()
def model() -> None:
    """Add, list and remove model versions."""


@model.command("add")
@click.argument("name")
@click.option(
    "--embedder", required=True, metavar="PACKAGE.MODULE:OBJECT", help="An object with embed(items), or a callable that makes it."
)
@click.option("--options", default="{}", help="Keyword arguments for that callable, as JSON.")
@click.option(
    "--classifier", metavar="PACKAGE.MODULE:OBJECT", help="An object with scores(vectors), for --order classification-score."
)
@click.option(
    "--metric",
    type=click.Choice(["COSINE", "IP", "L2", "LORENTZ"]),
    default="COSINE",
    show_default=True,
    help="How vectors compare. LORENTZ: points (time, space) of a hyperboloid, in an IP collection.",
)
@click.option("--dim", type=click.IntRange(min=1), help="Dimension [default: measured].")
@click.option("--kind", type=click.Choice(list(KINDS)), help="The kind of its items [default: rmvdb finds out].")
@click.option("--compatible-with", metavar="VERSION", help="The version that this model was trained to be compatible with.")
def model_add(
    name: str,
    embedder: str,
    options: str,
    classifier: str | None,
    metric: str,
    dim: int | None,
    kind: Any,
    compatible_with: str | None,
) -> None:
    """Register a model version. rmvdb loads it, probes it and takes its fingerprint.

    If the object also has embed_queries(items), that method embeds queries.

    \b
    Example:
      rmvdb model add v2 --embedder app.models:v2 --classifier app.models:v2_head
    """
    from rmvdb.catalog import versions
    from rmvdb.types import Metric

    app = open_app()
    row = versions.add_version(
        app.registry,
        name=name,
        spec=embedder,
        options=_json_object(options, "--options"),
        classifier=classifier,
        metric=Metric(metric),
        dim=dim,
        kind=kind,
        compatible_with=compatible_with,
    )
    allow(app, embedder, classifier)
    weights = f", weights {row.fingerprint[:12]}" if row.fingerprint else ""
    declared = f", compatible with {row.compatible_with}" if row.compatible_with else ""
    queries = ", queries: by embed_queries" if row.has_own_queries else ""
    output.echo(f"model version {row.name}: {row.dim} dimensions, {row.metric}{weights}{declared}{queries}")


@model.command("list")
@json_option
def model_list(as_json: bool) -> None:
    """List the model versions.

    \b
    Example:
      rmvdb model list --json
    """
    names = ("name", "dim", "metric", "embedder", "classifier", "base", "compatible_with", "fingerprint")
    app = open_app()
    rows = [
        {name: getattr(row, name) for name in names} | {"queries": "embed_queries" if row.has_own_queries else "embed"}
        for row in app.registry.versions()
    ]
    if not rows:
        app.manifest.check_forgotten()
    output.print_rows(rows, as_json)


@model.command("remove")
@click.argument("name")
def model_remove(name: str) -> None:
    """Remove a model version that no gallery uses or has used.

    \b
    Example:
      rmvdb model remove v2
    """
    open_app().registry.remove_version(name)
    output.echo(f"model version {name} is forgotten")


def _json_object(text: str, option: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as exc:
        raise errors.UsageError(f'{option} {text!r} is not JSON ({exc.msg}); write {{"name": value}}') from exc
    if not isinstance(value, dict):
        raise errors.UsageError(f'{option} {text!r} is not an object; write {{"name": value}}')
    return value
