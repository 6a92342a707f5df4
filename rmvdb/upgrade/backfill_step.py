"""The work on the batches of an upgrade, and the task that they are given."""

from __future__ import annotations

from collections.abc import Callable

from rmvdb.backfill.batches import Backfill
from rmvdb.backfill.task import Task
from rmvdb.backfill.worker import Worker
from rmvdb.registry.tables import UpgradeRow
from rmvdb.types import BatchState, Progress
from rmvdb.upgrade.context import UpgradeContext


def task(context: UpgradeContext, upgrade: UpgradeRow) -> Task:
    """Return the upgrade as its batches see it."""
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
        fallback_transforms=upgrade.plan.fallback_transforms or (),
        cache_vectors_from=upgrade.original if upgrade.lift else None,
        missing=1.0 if upgrade.plan.accept_missing else context.services.missing,
    )


def each_batch(context: UpgradeContext, upgrade: UpgradeRow) -> Backfill:
    """Return the service that copies and retires each batch."""
    chain = context.services.loaded_models.chain(upgrade.to_version)
    return Backfill(
        registry=context.registry,
        store=context.store,
        loaded_models=context.services.loaded_models,
        source=context.services.source,
        archive=context.services.archive,
        cache=context.services.cache(chain.embedder),
    )


def backfill(
    context: UpgradeContext,
    upgrade: UpgradeRow,
    worker: Worker,
    *,
    until: float | None = None,
    grows: Callable[[], bool] = lambda: False,
) -> Progress:
    """Work on batches until all are retired, the share `until` is reached, or it is stopped; not while the work list `grows`.

    None means the share that the upgrade was asked for, or the share at which its schedule switches. A worker that is not patient
    also stops in a pause.
    """
    if until is None:
        switch, until = upgrade.plan.switch, upgrade.plan.until
        until = until if switch is None else min(switch, until)

    def progress(now: Progress) -> None:
        if not grows():  # before, the total is not known, and the listing reports its own progress
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
        grows=grows,
    )


def unfinished(context: UpgradeContext, upgrade: UpgradeRow) -> bool:
    """Whether any batch is not retired yet."""
    return bool(context.registry.counts(upgrade.id).keys() - {BatchState.RETIRED})
