"""Roll back: an upgrade in the other direction, whose vectors come from the archive."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rmvdb import errors
from rmvdb.learning.method import Method
from rmvdb.registry.shared_queries import refuse_paused
from rmvdb.registry.tables import UpgradeRow
from rmvdb.registry.upgrade_plan import EpochName, UpgradePlan
from rmvdb.types import Phase
from rmvdb.upgrade import change_epoch, clean_up, deploy
from rmvdb.upgrade.context import UpgradeContext
from rmvdb.upgrade.keep_original import beside


def roll_back(context: UpgradeContext, upgrade: UpgradeRow, *, force: bool = False) -> UpgradeRow | None:
    """Begin the upgrade back. Return None if nothing had been deployed. `force`: do not wait for clients.

    Raises:
        WrongPhase: the upgrade is a roll back already.
    """
    if upgrade.undoes is not None:
        raise errors.WrongPhase("This is a roll back already; wait until it has ended, clean up, then upgrade again")
    if upgrade.makes_way and context.registry.end_making_way(upgrade.id):
        upgrade = context.registry.upgrade(upgrade.id)
    refuse_paused(upgrade)
    context.owner.settle(context.gallery.name)
    if upgrade.phase == Phase.PLANNED:
        if _abandon(context, upgrade, force=force):
            return None
        # It is served already, but its phase does not say so yet.
        deploy.deploy(context, context.registry.upgrade(upgrade.id), force=force)
        upgrade = context.registry.upgrade(upgrade.id)
    _expect_collections(context, upgrade)
    if upgrade.original:
        return _back_to_original(context, upgrade)
    new, *old = upgrade.plan.legs(EpochName.SERVING)
    final = upgrade.plan.legs(EpochName.BEFORE)
    fallback_transforms = old[0].transforms_after(new) or ()
    if context.can_load(old[0].model):
        old[0] = replace(old[0], write_with=old[0].model)  # writes during the roll back get v1's own vectors, not ψ's
    elif upgrade.method != Method.NAIVE:  # the new model alone still embeds the queries
        old = [replace(leg, blend=None) for leg in old]
        final = tuple(old) if len(old) > 1 else (replace(old[0], calibration=None),)
    # An older upgrade may have blended in a model that cannot be loaded any more.
    final = tuple(replace(leg, blend=None) if leg.blend and not context.can_load(leg.blend.embedder) else leg for leg in final)
    context.say(f"rolling back to {upgrade.from_version}")
    return _undo(
        context,
        upgrade,
        old_collections=[upgrade.new_collection],
        new_collection=upgrade.old_collections[0],
        order="archive",
        # The collection that records leave comes last: it is read first.
        plan=UpgradePlan(
            epochs={EpochName.SERVING: (*old, new), EpochName.FINAL: final}, fallback_transforms=fallback_transforms
        ),
    )


def standing_in(context: UpgradeContext, upgrade: UpgradeRow) -> int:
    """Count the records that keep ψ's vector: if v1 cannot be loaded, those written since the upgrade began."""
    if upgrade.undoes is None or upgrade.plan.fallback_transforms is None or upgrade.plan.legs(EpochName.SERVING)[0].write_with:
        return 0
    there: dict[str, bool] = {}
    for number in (upgrade.undoes, upgrade.id):
        after = 0
        while page := context.registry.written(number, after=after):
            there |= {row.record: row.kind == "upsert" for row in page if row.done}
            after = page[-1].id
    return sum(there.values())


def _expect_collections(context: UpgradeContext, upgrade: UpgradeRow) -> None:
    """Raise CollectionMissing if a collection is gone that the roll back would serve: every search would fail."""
    change_epoch.expect_unchanged(context)
    for name in [upgrade.original] if upgrade.original else upgrade.old_collections:
        if not context.store.exists(name):
            raise errors.CollectionMissing(
                f"Collection {name!r}, to which records would go back, is gone; rmvdb verify --repair makes it again, then run "
                "rmvdb rollback"
            )


def _back_to_original(context: UpgradeContext, upgrade: UpgradeRow) -> UpgradeRow:
    context.say(f"rolling back to {upgrade.from_version}, which {upgrade.original} was kept for")
    return _undo(
        context,
        upgrade,
        old_collections=beside(upgrade),
        new_collection=upgrade.original,
        order="none",
        plan=UpgradePlan(epochs={EpochName.ORIGINAL: upgrade.plan.legs(EpochName.ORIGINAL)}),
    )


def _undo(context: UpgradeContext, upgrade: UpgradeRow, **values: Any) -> UpgradeRow:
    return context.registry.supersede(
        upgrade.id,
        epoch=context.registry.plan(context.gallery.name).epoch,
        note=f"a roll back to {upgrade.from_version} takes its place",
        gallery_id=context.gallery.id,
        from_version=upgrade.to_version,
        to_version=upgrade.from_version,
        undoes=upgrade.id,
        phase=Phase.PLANNED,
        method=upgrade.method,
        **values,
    )


def _abandon(context: UpgradeContext, upgrade: UpgradeRow, *, force: bool) -> bool:
    note = "nothing had been deployed; the upgrade is given up"
    if upgrade.original and context.registry.plan(context.gallery.name).legs[0].collection != upgrade.new_collection:
        try:
            change_epoch.serve(context, upgrade, EpochName.UNTOUCHED, force=force)  # from here on no client writes to the copy
        except errors.WrongPhase:
            if context.registry.upgrade(upgrade.id).phase != Phase.ENDED:  # another process gave it up meanwhile
                raise
    if not context.registry.abandon(upgrade.id, note=note):
        return False
    clean_up.drop_given_up(context)  # last: until the upgrade has ended, another process may resume this
    clean_up.forget_ended(context)
    clean_up.say_ended(context, note, upgrade.supersedes)
    return True
