"""The legs of each epoch of an upgrade, made from its plan alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rmvdb.planning.plan import Plan, Stage
from rmvdb.registry.tables import VersionRow
from rmvdb.registry.upgrade_plan import EpochName
from rmvdb.types import Blend, Leg, Metric


def served(collection: str, old: Sequence[Leg], version: VersionRow, plan: Plan) -> dict[EpochName, Sequence[Leg]]:
    """Return the legs of each epoch from deploy to the end."""
    new = leg_of(version, collection)
    if plan.lift:
        return {EpochName.SERVING: [new], EpochName.FINAL: [new]}
    epochs = [EpochName.SERVING] if plan.switch is None else [EpochName.SERVING, EpochName.LATER]
    # On this leg alone, so that rescoring ends with the cut-over, and with the upgrade that another one supersedes.
    rescoring, old = replace(new, rescore=plan.rescore), [replace(leg, rescore=0) for leg in old]
    stages = {epoch: _served(old, rescoring, stage) for epoch, stage in zip(epochs, plan.stages, strict=True)}
    return {**stages, EpochName.FINAL: [new]}


def _served(old: Sequence[Leg], new: Leg, stage: Stage) -> list[Leg]:
    # A plan measures without the blends of the upgrade before, so they end where this one begins.
    plain = [replace(leg, blend=None) for leg in old]
    reached = [_reached(leg, plain[0], new, stage) for leg in plain]
    return _calibrated(new, reached, stage.calibrations)


def _reached(leg: Leg, newest: Leg, new: Leg, stage: Stage) -> Leg:
    """Return an old leg with the queries of this stage. The old part of a blend is the leg's former query."""
    reached = with_new_queries(leg, newest, new, stage.reverse) if stage.reverse else leg
    if stage.blend is None or reached is leg:
        return reached
    return replace(reached, blend=Blend(embedder=leg.embedder, transforms=leg.transforms, weight=stage.blend))


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
