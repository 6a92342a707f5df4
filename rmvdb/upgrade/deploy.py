"""From planned to served: the collections are made, the original is copied where it is kept, and both are searched."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict

from rmvdb.registry.tables import UpgradeRow
from rmvdb.types import Phase
from rmvdb.upgrade import change_epoch, keep_original
from rmvdb.upgrade.context import Lead
from rmvdb.upgrade.copy_collection import Position
from rmvdb.upgrade.status import searched


def deploy(lead: Lead, upgrade: UpgradeRow, *, force: bool = False) -> None:
    """Make the new collection, then serve both."""
    if upgrade.phase != Phase.PLANNED:
        return
    if upgrade.undoes is not None and upgrade.original:
        _serve_original(lead, upgrade, force=force)
        return
    copied = None
    if upgrade.original and lead.registry.plan(lead.gallery.name).legs[0].collection != upgrade.new_collection:
        copied = _copy_original(lead, upgrade, force=force)
    if upgrade.undoes is None and not upgrade.in_place:  # again after a crash, which may have left it half made
        change_epoch.create(lead, upgrade.new_collection, upgrade.to_version, like=upgrade.old_collections[0])
    change_epoch.serve(lead, upgrade, "serving", force=force, after=copied)
    if upgrade.original:  # whoever wrote by the plan before has ended by now
        cut_off = lead.registry.cut_off(lead.gallery.name)
        may = functools.partial(lead.registry.refuse_overtaken, upgrade.id, lead.baton)  # what is there may be re-embedded by now
        keep_original.mirror(lead, upgrade).finish(upgrade.old_collections[0], cut_off, may)
    served = searched(lead.registry.plan(lead.gallery.name))
    lead.registry.set_upgrade(upgrade.id, phase=Phase.SERVING_BOTH, was=Phase.PLANNED, note=served, baton=lead.baton)
    by = dict.fromkeys(leg["embedder"] for leg in upgrade.plan["serving"] if leg.get("searched", True))
    lead.say(f"{served}; queries are embedded by {' and '.join(by)} from now on")


def _copy_original(lead: Lead, upgrade: UpgradeRow, *, force: bool) -> int:
    """Make the copy that is emptied in place of the original, while the original is searched and both are written.

    The epoch in which that is so: what is written in another one does not reach the copy.
    """
    copy, original = upgrade.old_collections[0], str(upgrade.original)
    change_epoch.create(lead, copy, upgrade.to_version if upgrade.lift else upgrade.from_version, like=original)
    epoch = change_epoch.serve(lead, upgrade, "copying", force=force)
    what = f"{'lifting' if upgrade.lift else 'copying'} {original}"
    begun = _copied_to(lead, upgrade.id, epoch)
    lead.say(f"{what} into {copy}{', from where it stood' if begun else ''}")

    def progress(at: Position) -> None:
        lead.registry.set_upgrade(upgrade.id, copying=asdict(at) | {"epoch": epoch}, baton=lead.baton)
        lead.report(what, at.done, at.total)

    keep_original.mirror(lead, upgrade).copy(copy, functools.partial(_turn, lead, upgrade), progress, begun)
    grace = lead.registry.plan(lead.gallery.name).grace
    lead.say(f"{copy} holds what {original} holds; waiting {grace:g} s, until every search would see it")
    lead.stop.wait(grace)
    lead.check_stop()
    return epoch


def _copied_to(lead: Lead, upgrade: int, epoch: int) -> Position | None:
    """Where a copy was interrupted in this epoch; it begins anew in another one."""
    kept = dict(lead.registry.upgrade(upgrade).copying or {})
    return Position(**kept) if kept.pop("epoch", None) == epoch else None


@contextmanager
def _turn(lead: Lead, upgrade: UpgradeRow, count: int) -> Iterator[None]:
    """So many records of the original may be copied now; `rmvdb throttle` and `rmvdb pause` hold for them as for a batch."""
    worker = lead.worker
    with worker.within_limits(upgrade.id, lead.gallery.name, count=count, stop=lead.stop) if worker else nullcontext():
        lead.check_stop()
        lead.registry.refuse_ended(upgrade.id)
        lead.registry.refuse_overtaken(upgrade.id, lead.baton)  # the copy may be being emptied by now
        yield


def _serve_original(lead: Lead, upgrade: UpgradeRow, *, force: bool) -> None:
    """All of a roll back where the original was kept."""
    change_epoch.serve(lead, upgrade, "original", force=force)
    change_epoch.move_aliases(lead, upgrade)
    served = searched(lead.registry.plan(lead.gallery.name), by_name=True)
    cut_over = {"phase": Phase.CUT_OVER, "listed": True}
    lead.registry.set_upgrade(upgrade.id, was=Phase.PLANNED, note=served, baton=lead.baton, **cut_over)
    lead.say(f"rolled back: {served} now")
