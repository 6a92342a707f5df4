"""A plan as it is written: the chosen candidate's files by SHA-256, and the quality and cost to expect."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rmvdb import errors
from rmvdb.learning.method import Fitted, Method
from rmvdb.learning.references import LegScale, References
from rmvdb.planning.curve import Calibrations
from rmvdb.planning.prediction import Prediction
from rmvdb.planning.question import Question
from rmvdb.planning.sample import Sample
from rmvdb.registry.codec import pack_ids
from rmvdb.storage import files
from rmvdb.storage.artifacts import Artifacts
from rmvdb.types import Query

if TYPE_CHECKING:
    from rmvdb.learning.transforms import Transform


#: Seconds for which a plan is taken again.
LASTS = 86_400.0
#: The share by which a gallery may grow or shrink before it is planned for anew.
GROWTH = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """How queries reach the old collections, from deploy or from the stage before on."""

    #: SHA-256 of ψ. None: each model embeds the queries for its own collection.
    reverse: str | None = None
    #: The weight of the old model's own query vector beside ψ's. None: ψ alone.
    blend: float | None = None
    #: One for each old leg, newest first, then one for the new leg.
    calibrations: tuple[str | None, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The answer: the trained files by SHA-256, and the quality and cost to expect."""

    question: dict[str, Any]
    method: str
    order: str
    head: str | None
    #: One stage, or two with a schedule: the first until `switch`.
    stages: tuple[Stage, ...]
    #: SHA-256 of the packed ids of the records that ψ or h was trained on. None if nothing was trained.
    trained_on: str | None
    #: `prediction.Prediction` as JSON. None if the gallery is too small to measure on.
    prediction: dict[str, Any] | None
    #: records, embedded_per_second, seconds, vector_bytes, archive_bytes, and copy_bytes if a copy is made.
    cost: dict[str, float]
    #: Records of the sample that could not be embedded.
    skipped: int
    made_at: float
    #: Records left out of the sample because they have no label.
    unlabelled: int = 0
    #: The t from which on the second stage serves. None without a schedule.
    switch: float | None = None
    #: h, which lifts the old collection's vectors.
    lift: str | None = None
    #: How many of the old collections' best candidates each search rescores. 0: none.
    rescore: int = 0

    @property
    def age(self) -> float:
        """Return the seconds since it was made."""
        return time.time() - self.made_at

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Plan:
        """Undo `asdict` after JSON. Raises TypeError or KeyError for another form."""
        stages = tuple(Stage(**each | {"calibrations": tuple(each["calibrations"])}) for each in value["stages"])
        return cls(**{**value, "stages": stages})


@dataclass(frozen=True, kw_only=True, slots=True)
class Unmeasured:
    """The choice for a gallery that is too small to measure on: `naive`, with calibrations if its metrics differ."""

    order: str
    calibrations: Calibrations
    method: Method = Method.NAIVE
    fitted: Fitted = field(default_factory=Fitted)
    early: Fitted | None = None
    early_calibrations: Calibrations = ()
    switch: float | None = None
    rescore: int = 0


class PlanStore:
    """Keeps plans in a folder, each under its question."""

    def __init__(self, artifacts: Artifacts, folder: Path) -> None:
        self._artifacts, self._folder = artifacts, folder

    def kept(self, question: Question, log: Sequence[Query] = (), *, records: int) -> Plan | None:
        """Return the plan that was made for this question within a day, if all of its files are there.

        The gallery then had about as many `records`. Queries that clients have kept since make no difference, until their number
        passes the next power of two.
        """
        try:
            plan = Plan.from_json(json.loads(self._artifacts.get(self._pointer(question, log).read_text())))
        except (OSError, KeyError, TypeError, errors.ArtifactError):  # it is gone, or an earlier rmvdb wrote it
            return None
        before = plan.cost["records"]
        return plan if plan.age < LASTS and abs(records - before) <= GROWTH * before else None

    def write(
        self,
        question: Question,
        log: Sequence[Query],
        told: Prediction | Unmeasured,
        sample: Sample,
        cost: Mapping[str, float],
    ) -> Plan:
        """Write the transforms and calibrations, and the plan that names them."""
        put = self._artifacts.put
        plan = self._written(question, told, sample, cost)
        data = json.dumps(asdict(plan)).encode()
        files.durable_write(self._pointer(question, log), put(data, suffix="json").encode())
        return plan

    def _written(self, question: Question, told: Prediction | Unmeasured, sample: Sample, cost: Mapping[str, float]) -> Plan:
        fitted = told.fitted
        trained_on = None
        if isinstance(told, Prediction) and (fitted.reverse or fitted.lift):
            trained_on = self._artifacts.put(pack_ids([sample.records[row].id for row in told.seen]), suffix="ids")
        first = [self._stage(told.early, told.early_calibrations)] if told.early else []
        return Plan(
            question=asdict(question),
            method=told.method,
            order=told.order,
            head=self._kept(fitted.head),
            lift=self._kept(fitted.lift),
            stages=(*first, self._stage(fitted, told.calibrations)),
            switch=told.switch,
            rescore=told.rescore,
            trained_on=trained_on,
            prediction=told.to_json() if isinstance(told, Prediction) else None,
            cost=dict(cost),
            skipped=sample.skipped,
            unlabelled=sample.unlabelled,
            made_at=time.time(),
        )

    def _stage(self, fitted: Fitted, calibrations: Calibrations) -> Stage:
        return Stage(reverse=self._kept(fitted.reverse), blend=fitted.blend, calibrations=_put(self._artifacts.put, calibrations))

    def _kept(self, transform: Transform | None) -> str | None:
        return self._artifacts.put(transform.to_bytes(), suffix="safetensors") if transform else None

    def _pointer(self, question: Question, log: Sequence[Query]) -> Path:
        return self._folder / (f"{question.key}-{len(log).bit_length()}" if log else question.key)


def _put(put: Callable[..., str], calibrations: Sequence[LegScale | None]) -> tuple[str | None, ...]:
    suffixes = ("safetensors" if isinstance(each, References) else "json" for each in calibrations)
    return tuple(
        put(each.to_bytes(), suffix=suffix) if each else None for each, suffix in zip(calibrations, suffixes, strict=True)
    )
