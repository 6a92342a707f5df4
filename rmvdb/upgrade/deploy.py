"""Deploy an upgrade: make the collections, copy an original that is kept, then search both."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict

from rmvdb.registry.tables import UpgradeRow
from rmvdb.registry.upgrade_plan import EpochName
from rmvdb.types import Phase
from rmvdb.upgrade import change_epoch, keep_original, same_queries
from rmvdb.upgrade.context import UpgradeContext
from rmvdb.upgrade.copy_collection import CopyPosition
from rmvdb.upgrade.report import COUNTS
from rmvdb.upgrade.status import searched


def deploy(context: UpgradeContext, upgrade: UpgradeRow, *, force: bool = False) -> None:
    """Make the new collection, then serve both. A roll back to an original that was kept only changes the epoch."""
    if upgrade.phase != Phase.PLANNED:
        return
    if upgrade.undoes is not None and upgrade.original:
        _serve_original(context, upgrade, force=force)
        return
    copied = None
    if upgrade.original and context.registry.plan(context.gallery.name).legs[0].collection != upgrade.new_collection:
        copied = _copy_original(context, upgrade, force=force)
    if upgrade.undoes is None and not upgrade.in_place:  # also after a crash, which may have left it half made
        change_epoch.create(context, upgrade.new_collection, upgrade.to_version, like=upgrade.old_collections[0])
    same_queries.ask_old(context, upgrade)
    change_epoch.serve(context, upgrade, EpochName.SERVING, force=force, expected_epoch=copied)
    if upgrade.original:  # writes by the plan before have ended by now
        expired_writes = context.registry.expired_writes(context.gallery.name)
        # Another leader may have re-embedded records there by now.
        still_leads = functools.partial(context.registry.refuse_overtaken, upgrade.id, context.leader_token)
        keep_original.mirror(context, upgrade).finish(upgrade.old_collections[0], expired_writes, still_leads)
    served = searched(context.registry.plan(context.gallery.name))
    context.registry.set_upgrade(
        upgrade.id, phase=Phase.SERVING_BOTH, was=Phase.PLANNED, note=served, leader_token=context.leader_token
    )
    by = context.registry.plan(context.gallery.name).embedders
    context.say(f"{served}; queries are embedded by {' and '.join(by)} from now on")


def _copy_original(context: UpgradeContext, upgrade: UpgradeRow, *, force: bool) -> int:
    """Copy the original. Meanwhile the original is searched, and both are written. Later the batches empty the copy, not the
    original.

    Return the epoch in which this holds. A write in another epoch does not reach the copy.
    """
    copy, original = upgrade.old_collections[0], str(upgrade.original)
    change_epoch.create(context, copy, upgrade.to_version if upgrade.lift else upgrade.from_version, like=original)
    epoch = change_epoch.serve(context, upgrade, EpochName.COPYING, force=force)
    step = f"{'lifting' if upgrade.lift else 'copying'} {original}"
    begun = _copied_to(context, upgrade.id, epoch)
    context.say(f"{step} into {copy}{', from where it stood' if begun else ''}")

    def progress(at: CopyPosition) -> None:
        position = asdict(at) | {"epoch": epoch, "at": context.registry.now()}
        context.registry.set_upgrade(upgrade.id, copying=position, leader_token=context.leader_token)
        context.report(step, at.done, at.total)

    keep_original.mirror(context, upgrade).copy(copy, functools.partial(_copy_permit, context, upgrade), progress, begun)
    grace = context.registry.plan(context.gallery.name).grace
    context.say(f"{copy} holds what {original} holds; waiting {grace:g} s, until every search would see it")
    context.stop.wait(grace)
    context.check_stop()
    return epoch


def _copied_to(context: UpgradeContext, upgrade: int, epoch: int) -> CopyPosition | None:
    """Return where a copy was interrupted in this epoch. In another epoch it begins at the first record.

    After a long interruption another pass follows, because other programs may have changed the original meanwhile.
    """
    position = {"at": 0.0, "changed": True} | dict(context.registry.upgrade(upgrade).copying or {})
    long = context.registry.now() - position.pop("at") > COUNTS
    if position.pop("epoch", None) != epoch:
        return None
    return CopyPosition(**position | {"changed": long or position["changed"]})


@contextmanager
def _copy_permit(context: UpgradeContext, upgrade: UpgradeRow, count: int) -> Iterator[None]:
    """Wait until so many records of the original may be copied. `rmvdb throttle` and `rmvdb pause` apply to them, too."""
    limits: AbstractContextManager[None] = nullcontext()
    if context.worker is not None:
        gallery, check = context.gallery.name, context.check_stop
        limits = context.worker.within_limits(upgrade.id, gallery, count=count, stop=context.stop, check=check)
    with limits:
        context.check_stop()
        context.registry.refuse_ended(upgrade.id)
        context.registry.refuse_overtaken(upgrade.id, context.leader_token)  # another leader may empty the copy by now
        yield


def _serve_original(context: UpgradeContext, upgrade: UpgradeRow, *, force: bool) -> None:
    """Do all of a roll back to an original that was kept."""
    change_epoch.serve(context, upgrade, EpochName.ORIGINAL, force=force)
    change_epoch.move_aliases(context, upgrade)
    served = searched(context.registry.plan(context.gallery.name), by_name=True)
    cut_over = {"phase": Phase.CUT_OVER, "listed": True}
    context.registry.set_upgrade(upgrade.id, was=Phase.PLANNED, note=served, leader_token=context.leader_token, **cut_over)
    context.say(f"rolled back: {served} now")
