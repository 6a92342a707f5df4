"""The legs of each epoch of an upgrade, made from its plan alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rmvdb.planning.plan import Plan
from rmvdb.registry.tables import VersionRow
from rmvdb.registry.upgrade_plan import EpochName
from rmvdb.types import Leg, Metric


def served(collection: str, old: Sequence[Leg], version: VersionRow, plan: Plan) -> dict[EpochName, Sequence[Leg]]:
    """Return the legs of each epoch from deploy to the end."""
    new = leg_of(version, collection)
    if plan.lift:
        return {EpochName.SERVING: [new], EpochName.FINAL: [new]}
    reached = [with_new_queries(leg, old[0], new, plan.reverse) if plan.reverse else leg for leg in old]
    serving = _calibrated(new, reached, plan.calibrations)
    if plan.switch is None:
        return {EpochName.SERVING: serving, EpochName.FINAL: [new]}
    return {EpochName.SERVING: _calibrated(new, old, plan.early), EpochName.LATER: serving, EpochName.FINAL: [new]}


def leg_of(version: VersionRow, collection: str) -> Leg:
    """Return the leg of a collection that is searched with its own version's queries."""
    return Leg(
        collection=collection,
        model=version.name,
        metric=Metric(version.metric),
        embedder=version.base or version.name,
        transforms=(version.head,) if version.head else (),
    )


def with_new_queries(leg: Leg, newest: Leg, new: Leg, reverse: str) -> Leg:
    """Return an old leg with the new model's queries, by ψ and the transforms behind it. If none lead there, nothing changes."""
    rest = leg.transforms_after(newest)
    return leg if rest is None else replace(leg, embedder=new.embedder, transforms=(*new.transforms, reverse, *rest))


def _calibrated(new: Leg, old: Sequence[Leg], calibrations: Sequence[str | None]) -> list[Leg]:
    """Return the new leg, then the old ones. The calibrations are in a plan's order: that of the new leg comes last."""
    *scales, last = calibrations
    return [replace(leg, calibration=scale) for leg, scale in zip((new, *old), (last, *scales), strict=True)]
