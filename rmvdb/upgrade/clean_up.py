"""The end of an upgrade: the old collections are dropped, and you cannot roll back any more."""

from __future__ import annotations

from collections.abc import Iterator

from rmvdb import errors
from rmvdb.registry.tables import UpgradeRow
from rmvdb.registry.upgrade_plan import EpochName
from rmvdb.text import counted
from rmvdb.types import Phase
from rmvdb.upgrade import change_epoch, keep_original, lost
from rmvdb.upgrade.context import UpgradeContext
from rmvdb.upgrade.status import quarantine_way

#: Seconds between two transactions that forget rows of ended upgrades, so that others get SQLite's lock.
BETWEEN = 0.02


def clean_up(context: UpgradeContext, upgrade: UpgradeRow, *, accept_missing: bool = False, force: bool = False) -> None:
    """Drop the old collections, the archive, the work list and the intents. You cannot roll back afterwards.

    If a rolled back upgrade had superseded another one, that other one goes on. `accept_missing`: records that were moved and are
    gone from the new collection were deleted. `force`: do not wait for clients.

    Raises:
        VerifyFailed: such records are gone, and the archive may be the last to hold them.
    """
    context.owner.settle(context.gallery.name)
    drop_given_up(context)
    if upgrade.phase == Phase.CUT_OVER:
        _wait_for_older_searches(context)
        # First what is lost: an engine that has gone back holds it in the old collections, where it must not be taken for late.
        _expect_all_there(context, upgrade, accept_missing=accept_missing)
        _refuse_late(context, upgrade)
    context.registry.begin_clean_up(upgrade.id)
    if upgrade.original and upgrade.undoes is None:
        change_epoch.serve(context, context.registry.upgrade(upgrade.id), EpochName.ALONE, force=force)
    dropped, served = upgrade.leaving, context.registry.plan(context.gallery.name).legs[0].collection
    for collection in dropped:
        if context.registry.collection(collection).dropped_at is not None:
            continue  # by an earlier try: another program may have made one of this name since
        # A conductor that was suspended between its check and its call may have moved them back.
        change_epoch.say_moved(context, context.store.move_aliases(collection, served), served)
        change_epoch.drop(context, collection)
    done = _ended_with(context, upgrade)
    for each in done:
        context.services.archive.clear(context.gallery.name, str(each.id))
    note = f"{' and '.join(dropped)} and the archive are gone"
    resume = done[-1].supersedes if upgrade.undoes else None
    context.registry.end(*(each.id for each in done), note=note, resume=resume)
    say_ended(context, note, resume)
    context.say("kept for another upgrade: history, model versions, transforms and cache; rmvdb gc removes unneeded parts")
    forget_ended(context)  # last: of millions of writes it takes minutes, and nothing waits for it


def _expect_all_there(context: UpgradeContext, upgrade: UpgradeRow, *, accept_missing: bool) -> None:
    """Nothing leaves the archive before the new collection has been asked for it: the engine may have gone back since."""
    ending = _ended_with(context, upgrade)
    if upgrade.undoes is not None and ending[-1].original:
        return  # no batch ever took a record out of the original, which other programs may have changed
    if not (gone := lost.unserved(context, ending)):
        return
    context.registry.refuse_ended(upgrade.id)  # another clean-up may forget its writes just now
    what = f"{counted(len(gone), 'record')} that moved or {'was' if len(gone) == 1 else 'were'} written, such as {gone[0]!r}"
    if not accept_missing:
        raise errors.VerifyFailed(
            f"{upgrade.new_collection} has lost {what}; run rmvdb verify --repair or rmvdb rollback to put back what is left of "
            "them, or rmvdb cleanup --accept-missing if another program deleted them"
        )
    context.say(f"taken for deleted: {what}")


def forget_ended(context: UpgradeContext) -> None:
    """Delete the work lists and intents of upgrades that have ended, a little at a time. If stopped, the next upgrade goes on."""
    while not context.stop.is_set() and context.registry.forget_ended(context.gallery.id):
        context.stop.wait(BETWEEN)


def drop_given_up(context: UpgradeContext) -> list[str]:
    """Drop the collections of upgrades that ended before they served anything. Return their names.

    Giving up ends the upgrade first. A process that gives an upgrade up may be killed before it drops anything. Then the next
    process does.
    """
    dropped = []
    for upgrade, collection in _given_up(context):
        if context.store.exists(collection):
            if not change_epoch.is_ours(context, upgrade, collection):
                if context.owner.read(collection) is None:
                    context.say(f"{collection} stays: it may be another program's; drop it if nothing uses it")
                continue
            context.say(f"dropping {collection}, whose upgrade was given up")
            context.store.drop(collection)
            dropped.append(collection)
        context.owner.release(collection)
        context.registry.mark_dropped(collection)  # even if nothing else was left to do
    return dropped


def _given_up(context: UpgradeContext) -> Iterator[tuple[UpgradeRow, str]]:
    """Find collections of such upgrades that are not known to be dropped.

    A collection that was never registered counts only if it belongs to the latest upgrade.
    """
    rows, plan = context.registry.upgrades(context.gallery.id), context.registry.plan(context.gallery.name)
    unavailable = {row.name: row.dropped_at is not None for row in context.registry.collections(context.gallery.id)}
    unavailable |= {leg.collection: True for leg in (*plan.legs, *plan.mirrors)}  # in service
    for row in rows:
        left = [each for each in row.made if not unavailable.get(each, row is not rows[-1])]
        if left and row.phase == Phase.ENDED and _was_never_served(context, row):
            yield from ((row, each) for each in left)


def _was_never_served(context: UpgradeContext, upgrade: UpgradeRow) -> bool:
    return {row.phase for row in context.registry.history(upgrade.id)} <= {Phase.PLANNED, Phase.ENDED}


def _refuse_late(context: UpgradeContext, upgrade: UpgradeRow) -> None:
    there = [collection for collection in upgrade.leaving if context.store.exists(collection)]  # another clean-up may be ahead
    if upgrade.original:  # a roll back leaves the collections beside it as they are
        late = {each: keep_original.late_records(context, upgrade) for each in there if each == upgrade.original}
    else:
        late = {collection: context.store.count(collection) for collection in there}
    if found := next(filter(late.get, late), None):
        collection, left = found, late[found]
        way = "rmvdb verify --repair moves them"
        if context.registry.quarantined(upgrade.id):
            way = f"some are quarantined: {quarantine_way(upgrade)}"
        if upgrade.original:
            way = "write such records through rmvdb's client, remove them there"
        raise errors.WrongPhase(f"{counted(left, 'record')} came into {collection!r} after cut-over; {way}, then clean up again")


def _ended_with(context: UpgradeContext, upgrade: UpgradeRow) -> list[UpgradeRow]:
    """Return the upgrade and the upgrades that end with it: the one that it undid, or the ones that it superseded."""
    if upgrade.undoes is not None:
        return [upgrade, context.registry.upgrade(upgrade.undoes)]
    ended = [upgrade]
    while (before := ended[-1].supersedes) is not None:
        ended.append(context.registry.upgrade(before))
    return ended


def say_ended(context: UpgradeContext, note: str, resume: int | None) -> None:
    """Say the note, and which upgrade goes on."""
    context.say(note)
    if resume is not None:
        row = context.registry.upgrade(resume)
        context.say(f"the upgrade from {row.from_version} to {row.to_version} is on again: rmvdb upgrade, or rmvdb rollback")


def _wait_for_older_searches(context: UpgradeContext) -> None:
    """Wait for one grace after the cut-over: searches that began before it still read the old collections."""
    began = context.registry.now()
    # A rebuilt registry does not know when the plan came into force.
    since = context.registry.gallery(context.gallery.name).served_since or began
    grace = context.registry.plan(context.gallery.name).grace
    while (left := since + grace - context.registry.now()) > 0:
        context.announce(f"waiting {left:.0f} s for searches that began before")
        context.stop.wait(left)
        context.check_stop()
