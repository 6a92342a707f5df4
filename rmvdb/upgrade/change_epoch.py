"""Make collections, put serving plans in force at a new epoch, and move aliases."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rmvdb import errors
from rmvdb.catalog.checks import check_unchanged
from rmvdb.engines import index_rules
from rmvdb.registry.tables import UpgradeRow, VersionRow
from rmvdb.registry.upgrade_plan import EpochName
from rmvdb.timing import uptime
from rmvdb.types import Leg, Metric, Phase
from rmvdb.upgrade.context import UpgradeContext

#: Seconds that a plan may wait for its clients before the status says so.
USUAL = 3.0
#: Seconds for which a worker with other galleries waits until clients can serve the one collection that is left.
LONG_PATIENCE = 300.0


def expect_unchanged(context: UpgradeContext) -> None:
    """Compare the served collections with the registered ones, by the schema that each has now.

    Another collection may have taken the name in the months that a worker runs.

    Raises:
        CollectionChanged: a collection is not the registered one.
        CollectionMissing: a collection is gone.
        NotOwner: another registry has taken the gallery.
    """
    context.owner.expect(context.gallery.name)
    plan = context.registry.plan(context.gallery.name)
    for leg in (*plan.legs, *plan.mirrors):
        try:
            check_unchanged(context.store, context.registry.collection(leg.collection))
        except errors.CollectionMissing as exc:
            raise errors.CollectionMissing(
                f"{exc}; if it was filled by an upgrade: rmvdb verify --repair makes it again and puts back what was moved there"
            ) from exc


def check_index(context: UpgradeContext, version: VersionRow) -> None:
    """Raise ConfigError if a collection of this version cannot have the index of new collections."""
    metric = Metric(version.metric).stored
    index_rules.check(context.services.index, dim=version.dim, metric=metric, engine=context.store.version())


def create(context: UpgradeContext, collection: str, model: str, *, like: str) -> None:
    """Make and register a collection for a model's vectors, like another one in everything else. It can be run again.

    Raises:
        AlreadyExists: a collection of that name holds records, and the registry does not know it.
    """
    version = context.registry.version(model)
    there = context.store.describe(like)  # it may have got fields since it was registered
    schema = replace(there, collection=collection, dim=version.dim, metric=Metric(version.metric).stored)
    check_index(context, version)
    context.say(
        f"creating collection {schema.collection} ({schema.dim} dimensions, {schema.metric}, {context.services.index.type})"
    )
    context.store.create(schema, context.services.index, like=like)
    # Count first: another process registers a collection before it fills it.
    if context.store.count(collection) and collection not in _known(context):
        raise errors.AlreadyExists(
            f"Collection {collection!r} exists already and holds records; drop it, or give up the upgrade with rmvdb rollback"
        )
    context.owner.take(context.gallery.name, collection, epoch=context.registry.plan(context.gallery.name).epoch)
    context.registry.add_collection(context.gallery.id, model=model, schema=schema, search=context.services.index.search)


def _known(context: UpgradeContext) -> set[str]:
    return {row.name for row in context.registry.collections(context.gallery.id)}


def is_ours(context: UpgradeContext, upgrade: UpgradeRow, collection: str) -> bool:
    """Whether the collection of an upgrade that never served can be dropped: it is a copy that the registry knows, or empty.

    The collection of another gallery, registry or program may have its name by now. The mark says whose it is. A collection
    without one is ours if the registry knows it, or if it has a name that no other program would choose.
    """
    mark, known = context.owner.read(collection), collection in _known(context)
    if mark is not None and not context.owner.owns(context.gallery.name, mark):
        return False
    if mark is None and not known and not re.search(rf"_u{upgrade.id}_[0-9a-f]{{6}}$", collection):  # as `collection_name` ends
        return False
    try:
        return bool(upgrade.original and known) or not context.store.count(collection)
    except errors.EngineError:  # it is not loaded, or does not exist
        return False


def serve(
    context: UpgradeContext, upgrade: UpgradeRow, which: EpochName, *, force: bool = False, expected_epoch: int | None = None
) -> int:
    """Put one serving plan of the upgrade in force, once every client can serve it; return its epoch.

    Raises:
        WrongPhase: another epoch than `expected_epoch` is in force, or the upgrade has left the phase that its row says.
    """
    legs = upgrade.plan.legs(which)
    return _put_in_force(
        context,
        upgrade,
        legs,
        context.services.times,
        force=force,
        expected_epoch=expected_epoch,
        must_not_serve=upgrade.new_collection if which == EpochName.COPYING else None,
        # An epoch that serves one collection waits longer: hours of copying or comparing lie before it.
        deferrable=which == EpochName.COPYING or _searches_several(legs),
    )


def prolong(context: UpgradeContext, upgrade: UpgradeRow, *, force: bool = False) -> None:
    """Serve the same plan with longer times, if the settings are longer by now.

    Shorter times count from the next plan on. Otherwise two processes with different settings would change them without end.
    """
    plan = context.registry.plan(context.gallery.name)
    before = {name: float(getattr(plan, name)) for name in context.services.times}
    times = {name: max(before[name], seconds) for name, seconds in context.services.times.items()}
    if times != before:
        legs = [*plan.legs, *plan.mirrors]
        deferrable = _searches_several(legs)
        _put_in_force(context, upgrade, legs, times, force=force, expected_epoch=plan.epoch, deferrable=deferrable)


def _searches_several(legs: Sequence[Leg]) -> bool:
    """Whether the legs that are searched hold vectors of several models."""
    return len({leg.model for leg in legs if leg.searched}) > 1


def _put_in_force(
    context: UpgradeContext,
    upgrade: UpgradeRow,
    legs: Sequence[Leg],
    times: Mapping[str, float],
    *,
    force: bool,
    expected_epoch: int | None = None,
    must_not_serve: str | None = None,
    deferrable: bool,
) -> int:
    """Announce a plan and put it in force; return its epoch.

    `expected_epoch`: the epoch that must be in force. `must_not_serve`: the collection that must not be served first yet.
    `deferrable`: give up after the context's patience, and not after a longer one.

    Raises:
        WrongPhase: one of these does not hold.
        NotServed: the plan waited for too long.
    """
    name = context.gallery.name
    asks: dict[str, Any] = {"upgrade": upgrade.id, "phase": upgrade.phase, "leader_token": context.leader_token}
    epoch = context.registry.announce(name, legs, times, must_not_serve=must_not_serve, expected_epoch=expected_epoch, **asks)
    if force:
        say_forced(context, epoch)
    said, noted, began = "", "", uptime()
    while waiting := context.registry.activate(name, epoch, force=force, **asks):
        if waiting[0] != said:
            said = waiting[0]
            context.announce(f"epoch {epoch} waits: {said}")
        context.check_stop()
        waited = uptime() - began
        why = f"Epoch {epoch} waits: {said}; end that process, or do not wait for clients: {_forced(upgrade)}"
        if waited > (context.patience if deferrable else max(context.patience, LONG_PATIENCE)):
            raise errors.NotServed(why)
        if waited > USUAL and noted != said:
            context.registry.set_upgrade(upgrade.id, reason=why, leader_token=context.leader_token)
            noted = said
        context.stop.wait(0.1)
    context.owner.settle(name)
    if noted or upgrade.reason:  # from this try, or from an earlier one that was deferred
        context.registry.set_upgrade(upgrade.id, reason="", leader_token=context.leader_token)
    return epoch


def _forced(upgrade: UpgradeRow) -> str:
    """Return the command that goes on with the upgrade without its clients."""
    if upgrade.phase in (Phase.CUT_OVER, Phase.CLEANING_UP):
        return "rmvdb cleanup --force"
    if upgrade.undoes is not None:
        return "rmvdb rollback --force"
    return f"rmvdb upgrade --from {upgrade.from_version} --to {upgrade.to_version} --force"


def say_forced(context: UpgradeContext, epoch: int) -> None:
    """Name the clients whose searches will fail because the epoch does not wait for them."""
    if unready := context.registry.unready(context.gallery.name, epoch):
        context.say(f"forced: searches of these clients fail until they can serve epoch {epoch}: {'; '.join(unready)}")


def drop(context: UpgradeContext, collection: str) -> None:
    """Drop a collection and its mark."""
    context.store.drop(collection)
    context.owner.release(collection)
    context.registry.mark_dropped(collection)


def move_aliases(context: UpgradeContext, upgrade: UpgradeRow) -> None:
    """Point the aliases of the old collections at the new one, unless another conductor has taken over."""
    context.registry.refuse_ended(upgrade.id)
    context.registry.refuse_overtaken(upgrade.id, context.leader_token)
    for each in upgrade.leaving:
        say_moved(context, context.store.move_aliases(each, upgrade.new_collection), upgrade.new_collection)


def say_moved(context: UpgradeContext, aliases: Sequence[str], collection: str) -> None:
    """Name the aliases that stand for a collection from now on, if there are any."""
    if aliases:
        what = f"the alias {aliases[0]} now stands" if len(aliases) == 1 else f"the aliases {', '.join(aliases)} now stand"
        context.say(f"{what} for {collection}")
