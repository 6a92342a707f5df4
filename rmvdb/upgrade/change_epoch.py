"""Which collections there are, and which of them are searched: made, put in force at a new epoch, found by their aliases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rmvdb import errors
from rmvdb.catalog.checks import check_unchanged
from rmvdb.engines import index_rules
from rmvdb.registry.codec import leg_from_json, schema_from_json
from rmvdb.registry.tables import UpgradeRow, VersionRow
from rmvdb.timing import uptime
from rmvdb.types import Leg, Metric
from rmvdb.upgrade.context import UpgradeContext

#: Seconds for which a plan may wait for its clients before the status says so.
USUAL = 3.0


def expect_unchanged(context: UpgradeContext) -> None:
    """CollectionChanged where what is served is not what was registered; it is read by the schema that it has now: in the months
    of a worker another collection may have had its name. NotOwner where another registry has taken it."""
    context.owner.expect(context.gallery.name)
    plan = context.registry.plan(context.gallery.name)
    for leg in (*plan.legs, *plan.mirrors):
        check_unchanged(context.store, context.registry.collection(leg.collection))


def check_index(context: UpgradeContext, version: VersionRow) -> None:
    """ConfigError where a collection of this version cannot have the index that new ones shall have."""
    metric = Metric(version.metric).stored
    index_rules.check(context.services.index, dim=version.dim, metric=metric, engine=context.store.version())


def create(context: UpgradeContext, collection: str, model: str, *, like: str) -> None:
    """Make a collection for vectors of that model and everything else as in `like`, and register it; again after a crash, too."""
    old, version = schema_from_json(context.registry.collection(like).schema), context.registry.version(model)
    schema = replace(old, collection=collection, dim=version.dim, metric=Metric(version.metric).stored)
    check_index(context, version)
    context.say(
        f"creating collection {schema.collection} ({schema.dim} dimensions, {schema.metric}, {context.services.index.type})"
    )
    context.store.create(schema, context.services.index)
    if context.store.count(collection) and collection not in _known(context):  # in this order: it is known before it is filled
        raise errors.AlreadyExists(
            f"Collection {collection!r} is there already and holds records; give the upgrade up with rmvdb rollback, or drop it"
        )
    context.owner.take(context.gallery.name, collection, epoch=context.registry.plan(context.gallery.name).epoch)
    context.registry.add_collection(context.gallery.id, model=model, schema=schema, search=context.services.index.search)


def _known(context: UpgradeContext) -> set[str]:
    return {row.name for row in context.registry.collections(context.gallery.id)}


def is_ours(context: UpgradeContext, upgrade: UpgradeRow, collection: str) -> bool:
    """Whether nothing is lost with what was made for an upgrade that never served: a copy that is known, or an empty one."""
    try:
        return bool(upgrade.original and collection in _known(context)) or not context.store.count(collection)
    except errors.EngineError:  # not loaded, or not there
        return False


def serve(context: UpgradeContext, upgrade: UpgradeRow, which: str, *, force: bool = False, after: int | None = None) -> int:
    """Put the serving plan of that name in the upgrade's plan in force, once everybody is ready for it; its epoch.

    WrongPhase where another epoch than `after` was in force, or the upgrade has left the phase that it is handed in.
    """
    legs = [leg_from_json(leg) for leg in upgrade.plan[which]]
    served = upgrade.new_collection if which == "copying" else None
    return _put_in_force(context, upgrade, legs, context.services.times, force=force, unless=served, after=after)


def prolong(context: UpgradeContext, upgrade: UpgradeRow, *, force: bool = False) -> None:
    """Serve the same again where longer times are set by now; shorter ones count from the next plan on, lest two processes that
    are set differently change them without end."""
    plan = context.registry.plan(context.gallery.name)
    before = {name: float(getattr(plan, name)) for name in context.services.times}
    times = {name: max(before[name], seconds) for name, seconds in context.services.times.items()}
    if times != before:
        _put_in_force(context, upgrade, [*plan.legs, *plan.mirrors], times, force=force, after=plan.epoch)


def _put_in_force(
    context: UpgradeContext, upgrade: UpgradeRow, legs: Sequence[Leg], times: Mapping[str, float], *, force: bool, **only: Any
) -> int:
    name = context.gallery.name
    asks: dict[str, Any] = {"upgrade": upgrade.id, "phase": upgrade.phase, "leader_token": context.leader_token}
    epoch = context.registry.announce(name, legs, times, **only, **asks)
    if force:
        say_forced(context, epoch)
    told, noted, began = "", "", uptime()
    # What serves a collection alone, after it was verified or copied for hours, waits here; the rest may be put off.
    put_off = only.get("unless") is not None or len({leg.model for leg in legs if leg.searched}) > 1
    while waiting := context.registry.activate(name, epoch, force=force, **asks):
        if waiting[0] != told:
            told = waiting[0]
            context.say(f"epoch {epoch} waits: {told}")
        context.check_stop()
        waited = uptime() - began
        why = f"Epoch {epoch} waits: {told}; end whoever holds it up, or do not wait for clients: rmvdb upgrade --force"
        if waited > context.patience and put_off:
            raise errors.NotServed(why)
        if waited > USUAL and noted != told:
            context.registry.set_upgrade(upgrade.id, reason=why, leader_token=context.leader_token)
            noted = told
        context.stop.wait(0.1)
    context.owner.settle(name)
    if noted or upgrade.reason:  # of this try, or of one before that was put off
        context.registry.set_upgrade(upgrade.id, reason="", leader_token=context.leader_token)
    return epoch


def say_forced(context: UpgradeContext, epoch: int) -> None:
    """Name the clients whose searches will fail because nothing waits for them."""
    if unready := context.registry.unready(context.gallery.name, epoch):
        context.say(f"forced: searches of these clients fail until they can serve epoch {epoch}: {'; '.join(unready)}")


def drop(context: UpgradeContext, collection: str) -> None:
    """Drop a collection with its mark."""
    context.store.drop(collection)
    context.owner.release(collection)
    context.registry.mark_dropped(collection)


def move_aliases(context: UpgradeContext, upgrade: UpgradeRow) -> None:
    """Other programs find the records by the names that they know, unless another conductor has gone on."""
    context.registry.refuse_ended(upgrade.id)
    context.registry.refuse_overtaken(upgrade.id, context.leader_token)
    for each in upgrade.leaving:
        say_moved(context, context.store.move_aliases(each, upgrade.new_collection), upgrade.new_collection)


def say_moved(context: UpgradeContext, aliases: Sequence[str], collection: str) -> None:
    """Which names stand for it from now on, if any."""
    if aliases:
        what = f"the alias {aliases[0]} now stands" if len(aliases) == 1 else f"the aliases {', '.join(aliases)} now stand"
        context.say(f"{what} for {collection}")
