"""The legs of each epoch of an upgrade, from its plan alone."""

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
    """A collection of vectors of this version, asked with its own queries."""
    return Leg(
        collection=collection,
        model=version.name,
        metric=Metric(version.metric),
        embedder=version.base or version.name,
        transforms=(version.head,) if version.head else (),
    )


def with_new_queries(leg: Leg, newest: Leg, new: Leg, reverse: str) -> Leg:
    """An old leg with the new model's queries, by ψ and what leads on from there; as it is where nothing leads to it."""
    rest = leg.transforms_after(newest)
    return leg if rest is None else replace(leg, embedder=new.embedder, transforms=(*new.transforms, reverse, *rest))


def _calibrated(new: Leg, old: Sequence[Leg], calibrations: Sequence[str | None]) -> list[Leg]:
    """The new leg, then the old ones; the calibrations are in a plan's order, that of the new one last."""
    *scales, last = calibrations
    return [replace(leg, calibration=scale) for leg, scale in zip((new, *old), (last, *scales), strict=True)]
