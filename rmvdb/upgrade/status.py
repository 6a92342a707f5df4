"""The state of a gallery right now. It reads only the registry, so it answers at once, also while the engine is away."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rmvdb.registry.registry import Registry
from rmvdb.registry.tables import GalleryRow, UpgradeRow, WorkerRow
from rmvdb.text import counted
from rmvdb.types import BatchState, Phase, Progress, ServingPlan
from rmvdb.upgrade.report import COUNTS

#: Seconds without a heartbeat after which a worker counts as silent (one comes every 10), and for how long it is shown.
SILENT, SILENT_SHOWN_FOR = 12.0, 86400.0
#: The most silent workers that are shown, the latest first.
MOST_SILENT = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Status:
    """One gallery, and the upgrade that it is in or its latest one."""

    gallery: str
    epoch: int
    #: Collection and model version of each leg, newest first.
    legs: list[dict[str, str]]
    #: Collections that get every write and are not searched.
    mirrors: list[str]
    clients: int
    #: The figures of rescoring in the last half minute; None if the plan asks for none and no search did.
    rescoring: dict[str, float | None] | None = None
    #: The sign that the registry has gone back; empty if there is none.
    gone_back: str = ""
    #: None if the gallery never had one.
    upgrade: int | None = None
    from_version: str = ""
    to_version: str = ""
    rolls_back: bool = False
    method: str = ""
    order: str = ""
    phase: str = ""
    #: The current activity, in words.
    doing: str = ""
    #: Whether the work list is complete. Before that, the total is unknown.
    listed: bool = False
    #: The share of records in the new collection, 0 to 1; 0 before the work list is complete.
    t: float = 0.0
    done: int = 0
    total: int = 0
    #: Records a second while records were copied, over the last minute.
    rate: float | None = None
    #: Seconds until it reaches `until`. None below 1 %, without a worker, and once it is reached.
    eta: float | None = None
    quarantined: int = 0
    writes_open: int = 0
    batches: dict[str, int] | None = None
    workers: list[str] | None = None
    #: Workers that were killed or are cut off, with the seconds since their last heartbeat.
    silent: list[str] | None = None
    #: The reason why it is slower than possible; empty if there is none.
    held_back: str = ""
    #: The reason why it stopped; empty if it did not.
    stopped: str = ""
    prediction: dict[str, Any] | None = None
    #: How many of its queries clients have kept, and the days since the oldest was asked.
    kept_queries: int = 0
    oldest_query_days: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the status as JSON values."""
        return asdict(self)


def status(registry: Registry, gallery: GalleryRow) -> Status:
    """Return the status of one gallery."""
    plan, queries = registry.plan(gallery.name), registry.count_queries(gallery.name)
    clients = registry.clients(gallery.id)
    base: dict[str, Any] = {
        "gallery": gallery.name,
        "epoch": plan.epoch,
        "legs": [{"collection": leg.collection, "model": leg.model} for leg in plan.legs],
        "mirrors": [leg.collection for leg in plan.mirrors],
        "clients": len(clients),
        "kept_queries": queries.count,
        "oldest_query_days": queries.oldest_days,
        "rescoring": rescoring(plan, [row.rescoring for row in clients if row.rescoring]),
        "gone_back": (trace := registry.trace(gallery.name)).trouble or behind(plan.epoch, trace.reported),
    }
    row = latest(registry.upgrades(gallery.id))
    if row is None:
        return Status(**base)
    return Status(**base, **_of_upgrade(registry, gallery, row, plan))


def rescoring(plan: ServingPlan, reports: Sequence[Mapping[str, float]]) -> dict[str, float | None] | None:
    """Sum up what the clients report of rescoring: `RescoreFigures.latest` of each that rescored a search lately."""
    if not plan.rescore and not reports:
        return None
    total = {name: sum(each[name] for each in reports) for name in ("searches", "queries", "embedded", "cached")}
    looked = total["embedded"] + total["cached"]
    return {
        "candidates": plan.rescore,
        "searches": total["searches"],
        "embedded_per_query": round(total["embedded"] / total["queries"], 3) if total["queries"] else None,
        "from_cache": round(total["cached"] / looked, 4) if looked else None,
        # The median of the slowest client: the medians of several clients cannot be joined.
        "p50_ms": max((each["p50_ms"] for each in reports), default=None),
    }


def behind(epoch: int, reported: int) -> str:
    """Say that clients have served a later epoch than the registry knows; empty if they have not."""
    if reported <= epoch:
        return ""
    return (
        f"a client served by epoch {reported}, which this registry, at epoch {epoch}, does not know: it has gone back; put the "
        "newer database back, or empty this one and run rmvdb registry rebuild"
    )


def rests(row: UpgradeRow, states: Collection[BatchState], now: Progress) -> bool:
    """Whether the upgrade has done what it was asked to and no batch is in hand. Its cut-over may be left."""
    if row.phase != Phase.SERVING_BOTH or not row.listed or set(states) - {BatchState.PENDING, BatchState.RETIRED}:
        return False
    until, switch = row.plan.until, row.plan.switch
    if (switch is not None and now.t >= switch) or (row.plan.cutover and until >= 1.0):
        return False
    return BatchState.PENDING not in states or now.t >= until


def _of_upgrade(registry: Registry, gallery: GalleryRow, row: UpgradeRow, plan: ServingPlan) -> dict[str, Any]:
    now, counts = registry.progress(row.id), registry.counts(row.id)
    at, today, heard = registry.now(), registry.today(), registry.workers(row.id, within=SILENT_SHOWN_FOR)
    workers = [each for each in heard if each.heard_at > today - SILENT]
    ended = row.phase == Phase.ENDED
    unfinished = bool(counts.keys() - {BatchState.RETIRED})
    attended = bool(workers) or (row.conductor is not None and (row.conductor_until or 0.0) > at)
    resting = rests(row, counts, now)
    unattended = (unfinished or not row.listed) and not attended and not resting
    return {
        "upgrade": row.id,
        "from_version": row.from_version,
        "to_version": row.to_version,
        "rolls_back": row.undoes is not None,
        "method": row.method,
        "order": row.order,
        "phase": row.phase,
        "doing": _doing(row, now, unfinished, resting, plan, at),
        "listed": row.listed,
        "t": 1.0 if row.phase in (Phase.CUT_OVER, Phase.CLEANING_UP) else now.t if row.listed else 0.0,
        "done": now.done,
        "total": now.total,
        "rate": now.rate,
        "eta": _eta(row, now) if unfinished and attended and not (ended or row.paused or resting) else None,
        "quarantined": now.quarantined,
        "writes_open": len(registry.open_writes(gallery.id)),
        "batches": {state.value: batches for state, (batches, _) in counts.items()},
        "workers": [f"{each.id}{f' ({each.note})' if each.note else ''}" for each in workers],
        "silent": [] if ended else _silent(heard, today),
        "held_back": "; ".join(
            [*_held_back(gallery, row, [each.note for each in workers], unattended=unattended), *registry.jumps()]
        ),
        "stopped": "" if ended else row.reason,
        "prediction": row.plan.prediction,
    }


def _eta(row: UpgradeRow, now: Progress) -> float | None:
    """Return the seconds until the last record that was asked for is copied. Quarantined records stay."""
    left = min(row.plan.until * now.total - now.done, now.left)
    return left / now.rate if now.eta is not None and now.rate and left > 0 else None


def _silent(heard: Sequence[WorkerRow], today: float) -> list[str]:
    silent = sorted((row for row in heard if row.heard_at <= today - SILENT), key=lambda row: -row.heard_at)
    words = [f"{row.id}, silent since {today - row.heard_at:.0f} s" for row in silent[:MOST_SILENT]]
    return words + ([f"and {counted(len(silent) - MOST_SILENT, 'other')}, for longer"] if len(silent) > MOST_SILENT else [])


def _listing(row: UpgradeRow) -> str:
    """Say how far the work list is, and which process makes it."""
    if row.listing is None:
        return "the work list is not made yet"
    by = f", by {row.conductor.rsplit(':', 1)[0]}" if row.conductor else ""
    return f"listing: {row.listing['done']:,} of {row.listing['total']:,} records{by}"


def _doing(row: UpgradeRow, now: Progress, unfinished: bool, resting: bool, plan: ServingPlan, at: float) -> str:
    match row.phase:
        case Phase.PLANNED:
            copied = f"; {_copying(row, plan.epoch)}" if row.original and row.undoes is None else ""
            return f"planned; searches are as before{copied}"
        case Phase.CUT_OVER:
            return f"{searched(plan, by_name=True)}; rmvdb cleanup makes it final"
        case Phase.CLEANING_UP:
            return f"{' and '.join(row.leaving)} and the archive are being dropped; to continue, run rmvdb cleanup"
        case Phase.ENDED:
            return f"no upgrade is on; {searched(plan, by_name=True)}"
    if not row.listed:
        return f"{searched(plan)}; {_listing(row)}"
    if unfinished:
        until = ", as far as --until says; to continue, run rmvdb upgrade" if resting else ""
        return f"{searched(plan)}; {now.done} of {counted(now.total, 'record is', 'records are')} re-embedded{until}"
    if row.verifying and at - row.verifying["at"] < COUNTS:
        return f"every listed record is moved; {row.verifying['fields_compared']} of {counted(now.total, 'record')} verified"
    return "every listed record is moved; not verified, not cut over"


def _copying(row: UpgradeRow, epoch: int) -> str:
    at = row.copying or {}
    far = f", {at['done']} of {counted(at['total'], 'record')}" if at.get("epoch") == epoch else ""
    return f"{row.original} is {'compared with its copy' if far and at['passes'] else 'being copied'}{far}"


def quarantine_way(upgrade: UpgradeRow) -> str:
    """Say what leads on from quarantined records."""
    if upgrade.phase == Phase.CUT_OVER:
        return "correct their items and run rmvdb verify --repair, or delete them: rmvdb quarantine drop"
    return "rmvdb quarantine list, then retry or drop"


def searched(plan: ServingPlan, *, by_name: bool = False) -> str:
    """Say which collections a search by this plan looks into: the one sentence of command line, history and status."""
    names = [leg.collection for leg in plan.legs]
    if len(names) == 1:
        return f"only {names[0]} is searched"
    if by_name:
        return f"{', '.join(names[:-1])} and {names[-1]} are searched"
    return f"{'both' if len(names) == 2 else len(names)} collections are searched"


def latest(upgrades: Sequence[UpgradeRow]) -> UpgradeRow | None:
    """Return the running upgrade, or the one that ended last, which need not be the one that began last."""
    return max(upgrades, key=lambda row: (row.phase != Phase.ENDED, row.ended_at or 0.0, row.id), default=None)


def _held_back(gallery: GalleryRow, row: UpgradeRow, notes: Sequence[str], *, unattended: bool) -> list[str]:
    """Return the reasons why the backfill is slow or stands still. After the cut-over there are none."""
    lost = ["the registry was lost and its work is being made again: rmvdb registry rebuild"] if gallery.rebuilding else []
    if row.phase not in (Phase.PLANNED, Phase.SERVING_BOTH):
        return lost
    killed = "if that command was killed, it continues with a worker, or by rmvdb resume"
    why = f"paused while another upgrade takes its place; {killed}" if row.makes_way else "paused; to continue, run rmvdb resume"
    paused = [why] if row.paused else []
    waiting = ["waiting for a worker: run rmvdb worker or rmvdb upgrade"] if unattended and not row.paused else []
    return [*lost, *paused, *dict.fromkeys(filter(None, notes)), *waiting]
