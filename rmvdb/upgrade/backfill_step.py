"""The batches of an upgrade: what they are told of it, and the work on them."""

from __future__ import annotations

from rmvdb.backfill.batches import Backfill, Task
from rmvdb.backfill.worker import Worker
from rmvdb.registry.tables import UpgradeRow
from rmvdb.types import BatchState, Progress
from rmvdb.upgrade.context import Lead


def task(lead: Lead, upgrade: UpgradeRow) -> Task:
    """The upgrade as its batches see it."""
    old = [lead.registry.collection(each) for each in upgrade.old_collections]
    back = lead.registry.upgrade(upgrade.undoes).old_collections if upgrade.undoes else [upgrade.new_collection]
    return Task(
        upgrade=upgrade.id,
        gallery=lead.gallery.name,
        old=tuple(upgrade.old_collections),
        new=tuple(back),
        version=upgrade.to_version,
        grace=lead.registry.plan(lead.gallery.name).grace,
        removal_allowed=all(not each.adopted or each.removal_allowed for each in old),
        undoes=upgrade.undoes,
        stand_in=tuple(upgrade.plan.get("stand_in", ())),
        known_by=upgrade.original if upgrade.lift else None,
        missing=1.0 if upgrade.plan.get("accept_missing") else lead.hands.missing,
    )


def each_batch(lead: Lead, upgrade: UpgradeRow) -> Backfill:
    """What is done with each batch."""
    chain = lead.hands.encoder.chain(upgrade.to_version)
    return Backfill(
        registry=lead.registry,
        store=lead.store,
        encoder=lead.hands.encoder,
        source=lead.hands.source,
        archive=lead.hands.archive,
        cache=lead.hands.cache(chain.embedder),
    )


def backfill(lead: Lead, upgrade: UpgradeRow, worker: Worker, *, until: float | None = None) -> Progress:
    """Work on batches until all are retired, or the share `until` is reached, or it is stopped.

    None: the share that was asked for, or that at which a schedule switches; every worker stops there, and one that is not
    patient in a pause.
    """
    if until is None:
        switch = upgrade.plan.get("switch")
        until = upgrade.plan["until"] if switch is None else min(switch, upgrade.plan["until"])

    def progress(now: Progress) -> None:
        lead.report("backfilling", now.done, now.total)
        if worker.patient:
            lead.hear_pause(worker.paused)

    return worker.run(
        task(lead, upgrade),
        each_batch(lead, upgrade),
        until=until,
        patient=worker.patient,
        stop=lead.stop,
        progress=progress,
    )


def unfinished(lead: Lead, upgrade: UpgradeRow) -> bool:
    """Whether a batch is not retired yet."""
    return bool(lead.registry.counts(upgrade.id).keys() - {BatchState.RETIRED})
