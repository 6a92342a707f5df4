"""Register an upgrade. It replaces an unfinished one."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from rmvdb import errors
from rmvdb.backfill.worker import Worker
from rmvdb.catalog.checks import check_ids
from rmvdb.catalog.galleries import collection_name
from rmvdb.planning.plan import Plan
from rmvdb.planning.question import Question
from rmvdb.registry.tables import TAKES_ITS_PLACE, UpgradeRow, VersionRow
from rmvdb.registry.upgrade_plan import EpochName, UpgradePlan
from rmvdb.registry.upgrades import COUNTS_AS_KILLED
from rmvdb.timing import uptime
from rmvdb.types import MARK_PREFIX, Leg, Phase
from rmvdb.upgrade import backfill_step, clean_up, plan_step
from rmvdb.upgrade.context import UpgradeContext
from rmvdb.upgrade.copy_collection import epochs_with_copy
from rmvdb.upgrade.epoch_legs import leg_of, served

#: The names that Milvus takes for a collection.
_COLLECTION = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,254}")


def begin(
    context: UpgradeContext,
    question: Question,
    plan: Plan,
    worker: Worker,
    *,
    until: float = 1.0,
    cutover: bool = True,
    execute: bool = False,
    collection: str | None = None,
) -> UpgradeRow:
    """Register the upgrade. It replaces an unfinished one. The serving plan stays the same.

    `collection` names the new collection. Without it, the name is made from the gallery's and the version's.

    Raises:
        PlanRefused: the plan would lower the quality.
        NeedsConsent: records would leave a collection that rmvdb did not make.
        CannotAdopt: an old collection holds an id that cannot be moved.
        UsageError, AlreadyExists: the new collection cannot have that name.
        Stopped: it should stop.
    """
    context.check_stop()
    if collection is not None:
        check_name(context, collection)
    _check_verdict(plan)
    context.owner.settle(context.gallery.name)
    clean_up.drop_given_up(context)
    clean_up.forget_ended(context)
    epoch = context.registry.plan(context.gallery.name).epoch
    legs = plan_step.old_legs(context, question)
    for leg in () if question.instant_rollback else legs:
        _check_consent(context, leg.collection, execute=execute)
    for leg in legs:
        check_ids(context.store, leg.collection)
    version = _register_version(context, question, plan)
    # A mirror is written by its own model if that can be loaded, else by ψ. Nothing may be loaded inside a transaction.
    v1_writes = question.instant_rollback and (plan.stages[-1].reverse is None or context.can_load(legs[0].model))

    def details(number: int) -> dict[str, Any]:
        made = _details(context.gallery.name, number, question, plan, legs, version, v1_writes=v1_writes, collection=collection)
        return made | {"plan": replace(made["plan"], until=until, cutover=cutover)}

    # A registry that is lost may have left an archive under the next number. This upgrade must not take it for its own.
    above = context.services.archive.last_upgrade(context.gallery.name)
    values = {
        "gallery_id": context.gallery.id,
        "from_version": legs[0].model,
        "to_version": version.name,
        "phase": Phase.PLANNED,
        "method": plan.method,
        "order": plan.order,
    }
    before = plan_step.superseded(context, legs, question.to_version)
    if before is None:
        return context.registry.add_upgrade(details, above=above, **values)
    with _making_way(context, before, worker, version.name):
        note = f"superseded by the upgrade to {version.name}"
        return context.registry.supersede(before.id, details, epoch=epoch, note=note, supersedes=before.id, above=above, **values)


def _check_verdict(plan: Plan) -> None:
    """Raise PlanRefused if the plan would lower the quality."""
    if plan.prediction and plan.prediction["verdict"] == "refuse":
        raise errors.PlanRefused(plan.prediction["reason"])


def check_name(context: UpgradeContext, collection: str) -> None:
    """Raise UsageError if Milvus does not take the name, AlreadyExists if a collection has or had it."""
    if not _COLLECTION.fullmatch(collection) or collection.startswith(MARK_PREFIX):
        raise errors.UsageError(
            f"A new collection cannot be called {collection!r}: use at most 255 letters, digits and underscores, with no digit "
            f"in front, and do not begin with {MARK_PREFIX}"
        )
    galleries = context.registry.galleries()
    known = {row.name for gallery in galleries for row in context.registry.collections(gallery.id)}
    if collection in known or context.store.exists(collection):
        raise errors.AlreadyExists(f"Collection {collection!r} exists, or existed; give the new one another name")


def _details(
    gallery: str,
    number: int,
    question: Question,
    plan: Plan,
    legs: Sequence[Leg],
    version: VersionRow,
    *,
    v1_writes: bool,
    collection: str | None,
) -> dict[str, Any]:
    """Return the columns of the upgrade of this number: its collections, and the legs of each of its epochs. `v1_writes`: v1
    itself writes a mirror."""
    chosen, copy = (collection_name(gallery, name, f"u{number}") for name in (version.name, legs[0].model))
    collection = collection or chosen
    # The collections that the work list is made from. They are also emptied, unless the copy is lifted: confidence needs the old
    # model's vectors.
    listed = [replace(legs[0], collection=copy)] if question.instant_rollback and not plan.lift else legs
    old = [leg_of(version, collection)] if plan.lift else listed  # in place, the new collection's own vectors are replaced
    epochs = {EpochName.BEFORE: listed, **served(collection, old, version, plan)}
    if question.instant_rollback:
        mirror = legs[0] if v1_writes else replace(epochs[EpochName.SERVING][-1], collection=legs[0].collection)
        epochs |= epochs_with_copy(legs[0], old[0], epochs, replace(mirror, calibration=None, blend=None))
    kept_plan = UpgradePlan(
        epochs={name: tuple(some) for name, some in epochs.items()},
        question=plan.question,
        prediction=plan.prediction,
        cost=plan.cost,
        trained_on=plan.trained_on,
        switch=plan.switch,
        lift=plan.lift,
    )
    return {"new_collection": collection, "old_collections": [leg.collection for leg in old], "plan": kept_plan}


@contextmanager
def _making_way(context: UpgradeContext, upgrade: UpgradeRow, worker: Worker, version: str) -> Iterator[None]:
    """Let the begun batches of an upgrade end and no other begin, so that each of their records is in one collection."""
    context.say(f"the upgrade to {version} takes the place of that to {upgrade.to_version}; its begun batches end first")
    heartbeat = _Heartbeat(context, upgrade.id, f"{TAKES_ITS_PLACE}{worker.name}")
    task, each_batch = backfill_step.task(context, upgrade), backfill_step.each_batch(context, upgrade)
    try:
        heartbeat.beat()  # first: if none comes, others let the upgrade continue
        context.registry.make_way(upgrade.id, note=f"paused, to make way for the upgrade to {version}")
        worker.run(task, each_batch, until=0.0, stop=context.stop, progress=heartbeat.beat)
        context.check_stop()
        yield
    except BaseException:
        heartbeat.end()
        context.registry.end_making_way(upgrade.id, note=f"the upgrade to {version} did not take its place")
        raise
    heartbeat.end()


class _Heartbeat:
    """The signs of life of a command that takes an upgrade's place."""

    def __init__(self, context: UpgradeContext, upgrade: int, name: str) -> None:
        self._registry, self._upgrade, self._name = context.registry, upgrade, name
        self._last = float("-inf")

    def beat(self, _: object = None) -> None:
        """Send one, unless the last was a moment ago.

        Raises:
            WrongPhase: the upgrade continues. This command was suspended, and counted as killed, or a user resumed the upgrade.
        """
        if uptime() - self._last < COUNTS_AS_KILLED / 6:
            return
        begun, self._last = self._last > float("-inf"), uptime()
        self._registry.renew(self._name, self._upgrade, lease=COUNTS_AS_KILLED)
        if begun and not self._registry.upgrade(self._upgrade).paused:
            raise errors.WrongPhase(f"Upgrade {self._upgrade} continues by now; run the same command again")

    def end(self) -> None:
        """Send no more."""
        self._registry.retire_worker(self._name)


def _check_consent(context: UpgradeContext, collection: str, *, execute: bool) -> None:
    row = context.registry.collection(collection)
    if execute:
        context.registry.allow_removal(collection)
    elif row.adopted and not row.removal_allowed:
        raise errors.NeedsConsent(
            f"Collection {collection!r} was not made by rmvdb, and its records will leave it one by one (rmvdb rollback "
            "brings them back until rmvdb cleanup); run the same command with --execute to agree"
        )


def _register_version(context: UpgradeContext, question: Question, plan: Plan) -> VersionRow:
    calibrations = ((each, "calibration") for stage in plan.stages for each in stage.calibrations)
    reverses = ((stage.reverse, "reverse") for stage in plan.stages)
    made = ((plan.head, "head"), (plan.lift, "lift"), (plan.trained_on, "ids"), *reverses)
    for sha256, kind in (*made, *calibrations):
        if sha256:
            path, data = context.services.artifacts.path(sha256), context.services.artifacts.get(sha256)
            context.services.artifacts.put(data, suffix=path.suffix)  # a bucket lacks it if another machine ran gc since the plan
            context.registry.add_artifact(sha256=sha256, kind=kind, suffix=path.suffix[1:], size=len(data))
            context.registry.add_contents(sha256, data)
    base = context.registry.version(question.to_version)
    if plan.head is None:
        return base
    same = ("embedder", "options", "dim", "metric", "fingerprint", "probes", "probe_kind", "query_probes")
    return context.registry.add_version(
        name=f"{base.name}+{plan.head[:8]}",
        base=base.name,
        head=plan.head,
        classifier=None,  # h reads the vectors before ρ
        compatible_with=None,
        **{name: getattr(base, name) for name in same},
    )
