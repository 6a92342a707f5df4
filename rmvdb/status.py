"""What is true of a gallery right now. Reads the registry alone, so that it answers at once and while the engine is away."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rmvdb.plural import counted
from rmvdb.registry import Registry
from rmvdb.tables import GalleryRow, UpgradeRow
from rmvdb.types import BatchState, Phase, Progress, ServingPlan

#: Seconds without a heartbeat after which a worker counts as gone.
SILENT = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Status:
    """One gallery and its upgrade: the one it is in, else its latest."""

    gallery: str
    epoch: int
    #: Collection and model version of each leg, newest first.
    legs: list[dict[str, str]]
    #: Collections that are kept current and not searched.
    mirrors: list[str]
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
    #: Records a second over the last minute, and seconds to the last record; None below 1 %, and where nobody works on it.
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
        "mirrors": [leg.collection for leg in plan.mirrors],
        "clients": len(registry.clients(gallery.id)),
    }
    active = registry.active_upgrade(gallery.id)
    upgrades = registry.upgrades(gallery.id) if active is None else [active]
    if not upgrades:
        return Status(**base)
    return Status(**base, **_of_upgrade(registry, gallery, upgrades[-1], plan))


def rests(row: UpgradeRow, states: Collection[BatchState], now: Progress) -> bool:
    """Whether all that was asked for is done and no batch is in hand: it is re-embedded so far, or waits for its cut-over."""
    if row.phase != Phase.SERVING_BOTH or not row.listed or set(states) - {BatchState.PENDING, BatchState.RETIRED}:
        return False
    until, switch = row.plan.get("until", 1.0), row.plan.get("switch")
    if (switch is not None and now.t >= switch) or (row.plan.get("cutover", True) and until >= 1.0):
        return False
    return BatchState.PENDING not in states or now.t >= until


def _of_upgrade(registry: Registry, gallery: GalleryRow, row: UpgradeRow, plan: ServingPlan) -> dict[str, Any]:
    now, counts = registry.progress(row.id), registry.counts(row.id)
    workers = registry.workers(row.id, within=SILENT)
    ended = row.phase == Phase.ENDED
    unfinished = bool(counts.keys() - {BatchState.RETIRED})
    attended = bool(workers) or (row.conductor is not None and (row.conductor_until or 0.0) > registry.now())
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
        "doing": _doing(row, now, unfinished, resting, plan),
        "t": 1.0 if row.phase in (Phase.CUT_OVER, Phase.CLEANING_UP) else now.t if row.listed else 0.0,
        "done": now.done,
        "total": now.total,
        "rate": now.rate,
        "eta": now.eta if unfinished and attended and not (ended or row.paused) else None,
        "quarantined": now.quarantined,
        "writes_open": len(registry.open_writes(gallery.id)),
        "batches": {state.value: batches for state, (batches, _) in counts.items()},
        "workers": [f"{each.id}{f' ({each.note})' if each.note else ''}" for each in workers],
        "held_back": "; ".join(_held_back(gallery, row, [each.note for each in workers], unattended=unattended)),
        "stopped": "" if ended else row.reason,
        "prediction": row.plan.get("prediction"),
    }


def _doing(row: UpgradeRow, now: Progress, unfinished: bool, resting: bool, plan: ServingPlan) -> str:
    legs = [leg.collection for leg in plan.legs]
    match row.phase:
        case Phase.PLANNED:
            copied = f"; {_copying(row, plan.epoch)}" if row.original and row.undoes is None else ""
            return f"planned; nothing is served differently yet{copied}"
        case Phase.CUT_OVER:
            return f"{only(legs)}; rmvdb cleanup makes it final"
        case Phase.CLEANING_UP:
            return f"{' and '.join(row.leaving)} and the archive are being dropped; rmvdb cleanup goes on"
        case Phase.ENDED:
            return f"no upgrade is on; {only(legs)}"
    if not row.listed:
        return f"{both(legs)}; the work list is not made yet"
    if unfinished:
        asked = ", as far as was asked; rmvdb upgrade goes on" if resting else ""
        return f"{both(legs)}; {now.done} of {counted(now.total, 'record is', 'records are')} re-embedded{asked}"
    if row.verifying:
        return f"every listed record is moved; {row.verifying['fields_compared']} of {counted(now.total, 'record')} verified"
    return "every listed record is moved; not verified, not cut over"


def _copying(row: UpgradeRow, epoch: int) -> str:
    at = row.copying or {}
    far = f", {at['done']} of {counted(at['total'], 'record')}" if at.get("epoch") == epoch else ""
    return f"{row.original} is {'compared with its copy' if far and at['passes'] else 'being copied'}{far}"


def both(legs: Sequence[object]) -> str:
    """That the old and the new collections are searched, however many there are: a lifted one is both."""
    if len(legs) == 1:
        return "one collection is searched"
    return f"{'both' if len(legs) == 2 else len(legs)} collections are searched"


def only(legs: Sequence[str]) -> str:
    """That nothing but these collections is searched."""
    return f"only {' and '.join(legs)} {'is' if len(legs) == 1 else 'are'} searched"


def _held_back(gallery: GalleryRow, row: UpgradeRow, notes: Sequence[str], *, unattended: bool) -> list[str]:
    """Why nothing, or less than could be, is copied; nothing is once the gallery is cut over."""
    lost = ["the registry was lost and its work is being made again: rmvdb registry rebuild"] if gallery.rebuilding else []
    if row.phase not in (Phase.PLANNED, Phase.SERVING_BOTH):
        return lost
    paused = ["paused; rmvdb resume goes on"] if row.paused else []
    waiting = ["waiting for a worker: run rmvdb worker or rmvdb upgrade"] if unattended and not row.paused else []
    return [*lost, *paused, *dict.fromkeys(filter(None, notes)), *waiting]
