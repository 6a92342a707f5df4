"""The `rmvdb quarantine` commands: records that could not be re-embedded."""

from __future__ import annotations

from textwrap import shorten
from typing import TYPE_CHECKING, Any

import click

from rmvdb import errors
from rmvdb.cli import output
from rmvdb.cli.context import active_upgrade, conducting
from rmvdb.cli.options import gallery_option, json_option
from rmvdb.text import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rmvdb.app.wiring import App
    from rmvdb.registry.tables import UpgradeRow
    from rmvdb.types import Id

#: Characters of a reason that the list shows.
_REASON = 300


@click.group()
def quarantine() -> None:
    """List, retry and drop records that could not be re-embedded."""


@quarantine.command("list")
@gallery_option
@json_option
def quarantine_list(gallery: str | None, as_json: bool) -> None:
    """List the quarantined records and the reason for each. A long reason is cut, but not in --json.

    \b
    Example:
      rmvdb quarantine list
    """
    app, row = active_upgrade(gallery)
    rows = app.registry.quarantined(row.id)
    reasons = [each.reason if as_json else shorten(each.reason, _REASON, placeholder=" …") for each in rows]
    output.print_rows([{"id": each.record, "reason": why} for each, why in zip(rows, reasons, strict=True)], as_json)


@quarantine.command("retry")
@gallery_option
@click.argument("ids", nargs=-1)
def quarantine_retry(gallery: str | None, ids: tuple[str, ...]) -> None:
    """Put records back on the work list after you corrected their items. Without IDS: all records.

    \b
    Example:
      rmvdb quarantine retry
    """
    app, row = active_upgrade(gallery)
    chosen = _quarantined(app, row, ids)
    app.registry.release(row.id, chosen, requeue=True)
    if chosen:
        _no_longer_stopped(app, row)
    output.echo(
        f"{counted(len(chosen), 'record is', 'records are')} on the work list again; to continue, run "
        f"{'rmvdb verify --repair' if row.phase == 'cut over' else 'rmvdb upgrade or rmvdb worker'}"
    )


@quarantine.command("drop")
@gallery_option
@click.argument("ids", nargs=-1)
@click.option("--yes", is_flag=True, help="Do not ask.")
def quarantine_drop(gallery: str | None, ids: tuple[str, ...], yes: bool) -> None:
    """Delete quarantined records from the gallery. Without IDS: all. Records written or retried since then stay. It asks first.

    \b
    Example:
      rmvdb quarantine drop 17 42
    """
    from rmvdb.registry.codec import key

    app, row = active_upgrade(gallery)
    chosen = _quarantined(app, row, ids)
    if chosen and not yes:
        output.agree(f"Delete {counted(len(chosen), 'record')} from the gallery for good?", "deleted")

    def unchanged(ids: Sequence[Id]) -> list[Id]:
        aside = {each.record for each in app.registry.quarantined(row.id)}
        written = app.registry.last_done(row.id, ids)
        return [id for id in ids if key(id) in aside and written.get(key(id)) != "upsert"]

    with app.client(gallery) as client:
        going = client.delete_those(chosen, unchanged)
    deleted = set(going)
    aside = {each.record for each in app.registry.quarantined(row.id)}
    written = [id for id in chosen if id not in deleted and key(id) in aside]
    # After the cut-over no client writes the old collection: a batch takes them out there, because it finds them deleted.
    app.registry.release(row.id, going, requeue=row.phase == "cut over")
    app.registry.release(row.id, written, requeue=True)
    if row.phase == "cut over":
        with conducting(app, gallery) as (conductor, _):
            conductor.backfill(row, app.worker(), until=1.0)
    if chosen:
        _no_longer_stopped(app, row)
    since = f"; {counted(len(written), 'record was', 'records were')} written since, and left" if written else ""
    output.echo(f"{counted(len(going), 'record is', 'records are')} deleted{since}")


def _no_longer_stopped(app: App, row: UpgradeRow) -> None:
    """Take back why the upgrade stopped: its sentence counts records that are not quarantined any more."""
    if row.reason:
        app.registry.set_upgrade(row.id, reason="")


def _quarantined(app: App, row: UpgradeRow, ids: tuple[str, ...]) -> list[Any]:
    known = [each.record for each in app.registry.quarantined(row.id)]
    if unknown := sorted(set(ids) - set(known)):
        shown = ", ".join(known[:10]) + (" …" if len(known) > 10 else "") if known else "none"
        raise errors.UnknownName("quarantined record", unknown[0], (), hint=f"quarantined are {shown}: rmvdb quarantine list")
    numbers = app.registry.collection(row.old_collections[0]).schema["id_type"] == "INT64"
    return [int(each) if numbers else each for each in dict.fromkeys(ids or known)]
