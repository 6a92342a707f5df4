"""The batches of an upgrade: what they are told of it, and the work on them."""

from __future__ import annotations

from rmvdb.backfill.batches import Backfill
from rmvdb.backfill.task import Task
from rmvdb.backfill.worker import Worker
from rmvdb.registry.tables import UpgradeRow
from rmvdb.types import BatchState, Progress
from rmvdb.upgrade.context import UpgradeContext


def task(context: UpgradeContext, upgrade: UpgradeRow) -> Task:
    """The upgrade as its batches see it."""
    old = [context.registry.collection(each) for each in upgrade.old_collections]
    back = context.registry.upgrade(upgrade.undoes).old_collections if upgrade.undoes else [upgrade.new_collection]
    return Task(
        upgrade=upgrade.id,
        gallery=context.gallery.name,
        old=tuple(upgrade.old_collections),
        new=tuple(back),
        version=upgrade.to_version,
        grace=context.registry.plan(context.gallery.name).grace,
        removal_allowed=all(not each.adopted or each.removal_allowed for each in old),
        undoes=upgrade.undoes,
        fallback_transforms=tuple(upgrade.plan.get("stand_in", ())),
        cache_vectors_from=upgrade.original if upgrade.lift else None,
        missing=1.0 if upgrade.plan.get("accept_missing") else context.services.missing,
    )


def each_batch(context: UpgradeContext, upgrade: UpgradeRow) -> Backfill:
    """What is done with each batch."""
    chain = context.services.loaded_models.chain(upgrade.to_version)
    return Backfill(
        registry=context.registry,
        store=context.store,
        loaded_models=context.services.loaded_models,
        source=context.services.source,
        archive=context.services.archive,
        cache=context.services.cache(chain.embedder),
    )


def backfill(context: UpgradeContext, upgrade: UpgradeRow, worker: Worker, *, until: float | None = None) -> Progress:
    """Work on batches until all are retired, or the share `until` is reached, or it is stopped.

    None: the share that was asked for, or that at which a schedule switches; every worker stops there, and one that is not
    patient in a pause.
    """
    if until is None:
        switch = upgrade.plan.get("switch")
        until = upgrade.plan["until"] if switch is None else min(switch, upgrade.plan["until"])

    def progress(now: Progress) -> None:
        context.report("backfilling", now.done, now.total)
        if worker.patient:
            context.hear_pause(worker.paused)

    return worker.run(
        task(context, upgrade),
        each_batch(context, upgrade),
        until=until,
        patient=worker.patient,
        stop=context.stop,
        progress=progress,
    )


def unfinished(context: UpgradeContext, upgrade: UpgradeRow) -> bool:
    """Whether a batch is not retired yet."""
    return bool(context.registry.counts(upgrade.id).keys() - {BatchState.RETIRED})
