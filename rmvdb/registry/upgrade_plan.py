"""The plan of an upgrade, as its row keeps it: the question, the goal, and the legs of each epoch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import Any

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from rmvdb import errors
from rmvdb.types import Leg

#: The version of the stored form. A row of an rmvdb that wrote none counts as 1.
VERSION = 1


class EpochName(StrEnum):
    """One serving plan of an upgrade. The names are stored."""

    #: In force when the upgrade began. The work list is made from its collections.
    BEFORE = "before"
    #: In force from deploy to cut-over, or until `switch` is reached.
    SERVING = "serving"
    #: Takes the place of `SERVING` once `switch` is reached.
    LATER = "later"
    #: In force from cut-over on.
    FINAL = "final"
    #: In force while the original is copied.
    COPYING = "copying"
    #: In force again if the upgrade is given up while the original is copied.
    UNTOUCHED = "untouched"
    #: In force from clean-up on, if the original was kept.
    ALONE = "alone"
    #: In force after a roll back to the original that was kept.
    ORIGINAL = "original"


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="ignore", ser_json_inf_nan="constants", populate_by_name=True))
class UpgradePlan:
    """The question, the goal and the epochs of an upgrade. `dataclasses.replace` gives a changed one."""

    version: int = VERSION
    #: Legs, then mirrors, by epoch.
    epochs: Mapping[EpochName, tuple[Leg, ...]] = Field(default_factory=dict)
    #: The share of the gallery at which the backfill stops.
    until: float = 1.0
    #: Whether the cut-over follows the backfill.
    cutover: bool = True
    #: Whether any number of records may be gone from the old collections.
    accept_missing: bool = False
    #: The share at which `LATER` takes the place of `SERVING`; None if the plan has no schedule, or the switch was made.
    switch: float | None = None
    #: `planning.Question` as JSON; empty for a roll back.
    question: Mapping[str, Any] = Field(default_factory=dict)
    #: `prediction.Prediction` as JSON; None if the gallery was too small to measure on.
    prediction: Mapping[str, Any] | None = None
    cost: Mapping[str, Any] | None = None
    #: SHA-256 of the packed ids of the records that ψ and ρ were trained on.
    trained_on: str | None = None
    #: SHA-256 of the first hits that the old collections gave to known queries before deploy.
    answered: str | None = None
    #: SHA-256 of h, which lifts the original's vectors into the new space.
    lift: str | None = None
    #: For a roll back through the archive: the transforms (new → old) that replace v1's embedder if it is gone.
    fallback_transforms: tuple[str, ...] | None = Field(
        default=None,
        validation_alias="stand_in",
        serialization_alias="stand_in",  # the stored name
    )

    def legs(self, epoch: EpochName) -> tuple[Leg, ...]:
        """Return the legs of an epoch, then its mirrors."""
        return self.epochs[epoch]

    def with_epoch(self, epoch: EpochName, legs: Sequence[Leg]) -> UpgradePlan:
        """Return this plan with other legs of one epoch."""
        return replace(self, epochs={**self.epochs, epoch: tuple(legs)})

    def to_json(self) -> dict[str, Any]:
        """Return JSON values in the form that every released version reads: each epoch is a key, and a None is left out.

        A leg keeps its None. It leaves out an unused blend and unused rescoring, which released versions do not know.
        """
        plain: dict[str, Any] = _PLAN.dump_python(self, mode="json", by_alias=True)
        epochs: dict[str, Any] = plain.pop("epochs")
        for leg in (leg for legs in epochs.values() for leg in legs):
            for name in ("blend", "rescore"):
                if not leg[name]:
                    del leg[name]
        return {name: value for name, value in plain.items() if value is not None} | epochs

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> UpgradePlan:
        """Undo `to_json`.

        Raises:
            RegistryError: a later rmvdb wrote it, or it is damaged.
        """
        if (version := value.get("version", VERSION)) != VERSION:
            raise errors.RegistryError(
                f"The registry holds an upgrade's plan of version {version}, and this rmvdb reads version {VERSION}; update this "
                "rmvdb, or end the upgrade with the version that began it"
            )
        epochs = {name: value[name] for name in EpochName if name in value}
        try:
            return _PLAN.validate_python({**value, "epochs": epochs})
        except ValidationError as exc:
            first = exc.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"]))
            raise errors.RegistryError(f"The registry holds a damaged plan of an upgrade: {where}: {first['msg']}") from exc


_PLAN = TypeAdapter(UpgradePlan)
