"""The status of a gallery, for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rmvdb.cli.output import duration, echo
from rmvdb.text import counted

if TYPE_CHECKING:
    from rmvdb.upgrade.status import Status


def print_status(now: Status) -> None:
    """Print the status of a gallery, for people."""
    echo(
        f"gallery {now.gallery}: epoch {now.epoch}, served from {', '.join(leg['collection'] for leg in now.legs)}, "
        f"{counted(now.clients, 'client')}"
    )
    if now.kept_queries:
        echo(f"queries: {now.kept_queries:,} kept, the oldest {now.oldest_query_days:.1f} days old")
    if now.gone_back:
        echo(f"stopped: {now.gone_back}")
    if now.rescoring is not None:
        echo(_rescoring(now.rescoring))
    if now.upgrade is None:
        echo("no upgrade yet")
        return
    what = "roll back" if now.rolls_back else "upgrade"
    echo(f"{what} {now.upgrade}: {now.from_version} → {now.to_version}, {now.method}, {now.order} order")
    echo(f"phase: {now.phase} — {now.doing}")
    if now.phase in ("serving both", "cut over") and now.total:
        speed = f", {now.rate:.0f} records/s" if now.rate else ""
        eta = f", {duration(now.eta)} left" if now.eta else ""
        far = f"t = {now.t:.3f}: {now.done} of {now.total}{speed}{eta}"
        if not now.listed:
            far = f"{now.done} re-embedded, the rest is not listed yet"
        echo(f"{far}; {now.quarantined} quarantined, {counted(now.writes_open, 'write')} open")
    for each in now.workers or []:
        echo(f"worker: {each}")
    for each in now.silent or []:
        echo(f"worker: {each}")
    if now.held_back:
        echo(f"held back: {now.held_back}")
    if now.stopped:
        echo(f"stopped: {now.stopped}")


def _rescoring(figures: Mapping[str, float | None]) -> str:
    searches, share, embedded = figures["searches"] or 0, figures["from_cache"], figures["embedded_per_query"]
    if not searches:
        return f"rescoring: {figures['candidates']:g} candidates a query; no search was rescored in the last 30 s"
    cached = "" if share is None else f", {round(100 * share)} % of the vectors from cache"
    return (
        f"rescoring: {counted(round(searches), 'search', 'searches')} in the last 30 s, {embedded or 0:.3g} items embedded "
        f"per query{cached}, {figures['p50_ms'] or 0:.3g} ms in the median"
    )
