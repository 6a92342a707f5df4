"""The upgrade from one old model to new ones, method by method, measured while the gallery is re-embedded."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import numpy as np

from examples.paper_tables.models import Recipe, Say, Workshop
from examples.paper_tables.remembered import Remembered
from examples.paper_tables.rows import Ground, Legs, Row, measured, row, tuned
from examples.paper_tables.tasks import Task
from rmvdb.learning import training
from rmvdb.learning.training import Fitted, Method, Pairs, TrainingSettings
from rmvdb.planning import curve as simulated
from rmvdb.planning.curve import UNCALIBRATED, Calibrations, Curve
from rmvdb.types import Metric

#: The share of the kept pictures that ψ and ρ learn from; on the others calibrations are fitted and judged.
LEARNT = 0.75


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a row is trained: everything but the seed."""

    method: Method
    settings: TrainingSettings = field(default_factory=TrainingSettings)
    #: Without labels distances are calibrated by their distribution, as a plan's are, and judged by the new model's nearest.
    labels: bool = True
    calibrate: bool = True
    #: Whether there is a ρ; None: as the method has it.
    head: bool | None = None
    #: The most pairs that ψ and ρ learn from.
    pairs: int | None = None
    #: The new model; and a model whose embeddings h knows beside the old ones.
    new: str = "new"
    side: str | None = None

    @property
    def variants(self) -> list[Plan]:
        """The trainings to choose from, as `rmvdb plan` does: a contrast of classes alone, and with Eq. 9 beside it."""
        if not (self.labels and self.method.contrasts and self.settings.pull is None):
            return [self]
        return [replace(self, settings=replace(self.settings, pull=pull)) for pull in (0.0, 1.0)]


@dataclass(frozen=True, kw_only=True)
class Upgrade:
    """An old model, a new one, and the pictures on which methods are compared."""

    task: Task
    workshop: Workshop
    recipes: dict[str, Recipe]
    seeds: Sequence[int]
    say: Say = print
    #: Trained plans: the same plan with and without calibration is trained once.
    fits: dict[tuple[Plan, int], Fitted] = field(default_factory=dict)
    #: Where measured rows are kept; None keeps none.
    remembered: Remembered | None = None

    def legs(self, part: Literal["searched", "pairs"], *, old: str = "old", new: str = "new") -> Legs:
        """The searched part, or the kept pairs, as two models see it."""
        gallery: Literal["gallery", "pairs"] = "gallery" if part == "searched" else "pairs"
        queries: Literal["gallery", "pairs", "queries"] = "queries" if part == "searched" and self.task.queries else gallery
        old_q, old_g = (self.workshop.embedded(self.recipes[old], each).vectors for each in (queries, gallery))
        new_q, new_g = (self.workshop.embedded(self.recipes[new], each).vectors for each in (queries, gallery))
        metrics = [Metric.COSINE if self.recipes[name].zeta is None else Metric.LORENTZ for name in (old, new)]
        return Legs(old_q=old_q, old_g=old_g, new_q=new_q, new_g=new_g, old_metric=metrics[0], new_metric=metrics[1])

    @functools.cached_property
    def ground(self) -> Ground:
        """The records to find, re-embedded in the order of the old model's classification score."""
        return self.ordered(self.workshop.embedded(self.recipes["old"], "gallery").score)

    def ordered(self, confidence: np.ndarray) -> Ground:
        """The same in another order."""
        return Ground.of(self.task.gallery, self.task.queries, confidence)

    @functools.cached_property
    def base(self) -> Curve:
        """Both models, each for its own part: from the old model alone to the new one alone."""
        return measured(self.legs("searched"), self.ground)

    @functools.cached_property
    def halves(self) -> tuple[np.ndarray, np.ndarray]:
        """Rows of the kept pictures: learnt from, and calibrated on."""
        rows = np.arange(len(self.task.pairs))
        return rows[: round(LEARNT * len(rows))], rows[round(LEARNT * len(rows)) :]

    def alone(self) -> list[Row]:
        """The old model for ever, and the new one from the first minute."""
        return [row("old", [self.base.held(0)], self.base), row("new", [self.base.held(-1)], self.base)]

    def compatible(self, name: str) -> Row:
        """A new model that was trained to be comparable: its queries search both parts."""
        legs = self.legs("searched", new=name)
        return row(name, [measured(replace(legs, old_q=legs.new_q), self.ground)], self.base)

    def planned(self, name: str, plan: Plan) -> Row:
        """The row of one method, ψ and ρ trained once a seed."""
        if self.remembered is None:
            return self._planned(name, plan)
        return self.remembered.row(name, self._depends_on(plan), lambda: self._planned(name, plan))

    def _depends_on(self, plan: Plan) -> dict[str, Any]:
        """All that a row of this plan depends on, but for the code."""
        models = [self.recipes[each] for each in ("old", "new", plan.new, plan.side) if each]
        files = [self.workshop.name(each, part) for each in models for part in ("pairs", "gallery")]
        return {"plan": asdict(plan), "seeds": list(self.seeds), "embeddings": files}

    def _planned(self, name: str, plan: Plan) -> Row:
        seeds = self.seeds if plan.method is not Method.NAIVE else self.seeds[:1]
        curves, calibrated, regression = zip(*(self._once(name, plan, seed) for seed in seeds), strict=True)
        return row(name, curves, self.base, calibrated=float(np.mean(calibrated)), regression=float(np.mean(regression)))

    def _once(self, name: str, plan: Plan, seed: int) -> tuple[Curve, bool, bool]:
        """The curve; whether it is calibrated; whether a regression stood beside the contrast."""
        self.say(f"{name}, seed {seed}")
        best, scales = self.best(plan, seed)
        curve = measured(self.served(best, seed), self.ground, scales)
        beside = plan.method.contrasts and best.settings.weight_of_pull(labelled=plan.labels) > 0
        return curve, scales is not UNCALIBRATED, beside

    def best(self, plan: Plan, seed: int) -> tuple[Plan, Calibrations]:
        """The variant that is worth most on the kept pictures that it has not learnt from, and its calibrations."""
        tried = [(*self._tuned(each, seed), each) for each in plan.variants]
        _, scales, best = max(tried, key=lambda each: each[0])
        return best, scales

    def served(self, plan: Plan, seed: int) -> Legs:
        """The searched part by what was trained."""
        return self.legs("searched", new=plan.new).served(self._fitted(plan, seed), self._side(plan, "gallery"))

    def _tuned(self, plan: Plan, seed: int) -> tuple[float, Calibrations]:
        """Return its worth on the kept pictures that it has not learnt from, and the calibrations."""
        fitted, (_, check) = self._fitted(plan, seed), self.halves
        if fitted.lift is not None:  # a lifted gallery is of one space with the new one
            return 0.0, UNCALIBRATED
        legs = self.legs("pairs", new=plan.new).take(check, check).served(fitted)
        return tuned(legs, self.check_ground(plan), calibrate=plan.calibrate, labels=plan.labels)

    def _fitted(self, plan: Plan, seed: int) -> Fitted:
        plan = replace(plan, calibrate=True)
        if (plan, seed) not in self.fits:
            self.fits[plan, seed] = self.fit(plan, seed)
        return self.fits[plan, seed]

    def fit(self, plan: Plan, seed: int) -> Fitted:
        """ψ and ρ, or h, from pictures that no model has learnt."""
        legs, rows, side = self.legs("pairs", new=plan.new), self.halves[0][: plan.pairs], self._side(plan, "pairs")
        labels = self.task.pairs.labels[rows] if plan.labels else None
        return training.fit(
            Pairs(old=legs.old_g[rows], new=legs.new_g[rows], labels=labels, side=None if side is None else side[rows]),
            method=plan.method,
            old_metric=legs.old_metric,
            new_metric=legs.new_metric,
            settings=replace(plan.settings, seed=seed),
            head=plan.head,
        )

    def _side(self, plan: Plan, part: Literal["pairs", "gallery"]) -> np.ndarray | None:
        return None if plan.side is None else self.workshop.embedded(self.recipes[plan.side], part).vectors

    def check_ground(self, plan: Plan) -> Ground:
        """Return the records that unlearnt kept pictures should find: those of their class, else the new model's nearest."""
        check = self.halves[1]
        ground = Ground.of(self.task.pairs.take(check), None, self.workshop.embedded(self.recipes["old"], "pairs").score[check])
        if plan.labels:
            return ground
        legs = self.legs("pairs", new=plan.new)
        return replace(
            ground,
            relevance=simulated.neighbours(
                legs.new_g[check], legs.new_g[check], metric=legs.new_metric, itself=np.arange(len(check))
            ),
        )
