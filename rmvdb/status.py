"""What is true of a gallery right now. Reads the registry alone, so that it answers at once and while the engine is away."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from rmvdb.registry import Registry
from rmvdb.tables import GalleryRow, UpgradeRow
from rmvdb.types import BatchState, Phase, Progress

#: Seconds without a heartbeat after which a worker counts as gone.
SILENT = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Status:
    """One gallery and its latest upgrade."""

    gallery: str
    epoch: int
    #: Collection and model version of each leg, newest first.
    legs: list[dict[str, str]]
    clients: int
    #: None where the gallery never had one.
    upgrade: int | None = None
    from_version: str = ""
    to_version: str = ""
    rolls_back: bool = False
    method: str = ""
    order: str = ""
    phase: str = ""
    #: What happens in this phase, in words: never more than is true.
    doing: str = ""
    #: The share of records found in the new collection, 0 to 1.
    t: float = 0.0
    done: int = 0
    total: int = 0
    #: Records a second over the last minute, and seconds to the last record; None below 1 %.
    rate: float | None = None
    eta: float | None = None
    quarantined: int = 0
    writes_open: int = 0
    batches: dict[str, int] | None = None
    workers: list[str] | None = None
    #: Why it does not go as fast as it could; empty where it does.
    held_back: str = ""
    #: Why it stopped; empty where it did not.
    stopped: str = ""
    prediction: dict[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


def status(registry: Registry, gallery: GalleryRow) -> Status:
    """The status of one gallery."""
    plan = registry.plan(gallery.name)
    base: dict[str, Any] = {
        "gallery": gallery.name,
        "epoch": plan.epoch,
        "legs": [{"collection": leg.collection, "model": leg.model} for leg in plan.legs],
        "clients": len(registry.clients(gallery.id)),
    }
    upgrades = registry.upgrades(gallery.id)
    return Status(**base, **_of_upgrade(registry, gallery, upgrades[-1])) if upgrades else Status(**base)


def _of_upgrade(registry: Registry, gallery: GalleryRow, row: UpgradeRow) -> dict[str, Any]:
    now, counts = registry.progress(row.id), registry.counts(row.id)
    workers = registry.workers(row.id, within=SILENT)
    ended = row.phase == Phase.ENDED
    return {
        "upgrade": row.id,
        "from_version": row.from_version,
        "to_version": row.to_version,
        "rolls_back": row.undoes is not None,
        "method": row.method,
        "order": row.order,
        "phase": row.phase,
        "doing": _doing(row, now, bool(counts.keys() - {BatchState.RETIRED})),
        "t": 1.0 if row.phase == Phase.CUT_OVER else now.t if row.listed else 0.0,
        "done": now.done,
        "total": now.total,
        "rate": now.rate,
        "eta": None if ended or row.paused else now.eta,
        "quarantined": now.quarantined,
        "writes_open": registry.open_count(gallery.id),
        "batches": {state.value: batches for state, (batches, _) in counts.items()},
        "workers": [f"{each.id}{f' ({each.note})' if each.note else ''}" for each in workers],
        "held_back": "" if ended else _held_back(row, [each.note for each in workers], counts.keys() - {BatchState.RETIRED}),
        "stopped": "" if ended else row.reason,
        "prediction": row.plan.get("prediction"),
    }


def _doing(row: UpgradeRow, now: Progress, unfinished: bool) -> str:
    match row.phase:
        case Phase.PLANNED:
            return "planned; nothing is served differently yet"
        case Phase.CUT_OVER:
            return f"only {row.new_collection} is searched; rmvdb cleanup makes it final"
        case Phase.ENDED:
            return "ended"
    if not row.listed:
        return "both collections are searched; the work list is being made"
    if unfinished:
        return f"both collections are searched; {now.done} of {now.total} records are re-embedded"
    return "every listed record is moved; not verified, not cut over"


def _held_back(row: UpgradeRow, notes: list[str], unfinished: set[BatchState]) -> str:
    reasons = []
    if row.paused:
        reasons.append("paused; rmvdb resume goes on")
    if row.rate:
        reasons.append(f"throttled to {row.rate:g} records/s")
    reasons += [note for note in notes if note]
    if not notes and (unfinished or not row.listed) and row.phase != Phase.CUT_OVER:
        reasons.append("waiting for a worker: run rmvdb worker or rmvdb upgrade")
    return "; ".join(reasons)
