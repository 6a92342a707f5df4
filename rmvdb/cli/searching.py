"""The `rmvdb search` command."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rmvdb import errors
from rmvdb.cli import output
from rmvdb.cli.context import open_app
from rmvdb.cli.options import gallery_option, json_option

if TYPE_CHECKING:
    from rmvdb.app.wiring import App


@click.command()
@gallery_option
@click.argument("item")
@click.option("--limit", type=click.IntRange(min=1), default=10, show_default=True, help="How many hits.")
@click.option("--filter", "expression", default="", help="A Milvus filter expression.")
@click.option("--field", "fields", multiple=True, help="A field to show. * shows all.")
@click.option("--explain", is_flag=True, help="Show the legs, and the raw and calibrated distances.")
@json_option
def search(
    gallery: str | None,
    item: str,
    limit: int,
    expression: str,
    fields: tuple[str, ...],
    explain: bool,
    as_json: bool,
) -> None:
    """Search for a file or a text.

    \b
    Example:
      rmvdb search query.jpg --limit 5 --explain
    """
    app = open_app()
    with app.client(app.gallery_name(gallery)) as client:
        hits = client.search(_item(app, item, client.plan.embedders), limit=limit, filter=expression, output_fields=fields)
        legs = [
            {
                "collection": leg.collection,
                "model": leg.model,
                "embedder": f"{leg.embedder} + {leg.blend.embedder}" if leg.blend else leg.embedder,
                "transforms": len(leg.transforms),
                "calibrated": leg.calibration is not None,
            }
            for leg in client.plan.legs
        ]
    rows = [
        {"id": hit.id, "distance": _shown(hit.distance)}
        | ({"raw": _shown(hit.raw), "leg": hit.leg} if explain else {})
        | ({"fields": dict(hit.fields)} if fields else {})
        for hit in hits
    ]
    if as_json:
        output.print_json({"legs": legs, "hits": rows} if explain else {"hits": rows})
        return
    if explain:
        output.print_rows(legs, as_json=False)
    output.print_rows(rows, as_json=False)


def _shown(distance: float) -> float:
    return round(distance, 6) + 0.0  # not -0.0, though the cosine of a vector with itself may be a little above 1


def _item(app: App, text: str, versions: Iterable[str]) -> Path | str:
    """Return the file of that name, else a text. Raise UsageError if a model embeds pictures, because a text is no picture."""
    from rmvdb.items.queries import item_of

    if isinstance(item := item_of(text), Path):
        return item
    rows = [app.registry.version(name) for name in versions]
    if pictures := [row.name for row in rows if row.probe_kind == "image" and not row.has_own_queries]:
        raise errors.UsageError(f"There is no file {text!r}, and {pictures[0]} embeds pictures; name a file that holds one")
    return item
