"""The weight λ and the temperature τ of each loss, searched as HBCT does it (section 5.1), on kept pictures."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from examples.paper_tables.backfill import Upgrade
from examples.paper_tables.models import Recipe
from examples.paper_tables.rows import Ground, quality
from rmvdb import metrics
from rmvdb.errors import ModelError
from rmvdb.types import Metric

#: Ten combinations of each loss: λ within 0 to 1, for losses that contrast τ of 0.5 and 1.
WEIGHTS = (0.003, 0.01, 0.03, 0.06, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0)
CONTRASTED = [(weight, tau) for tau in (0.5, 1.0) for weight in (0.1, 0.3, 0.5, 0.7, 1.0)]
GRIDS: dict[str, list[tuple[float, float | None]]] = {
    **{name: [(weight, None) for weight in WEIGHTS] for name in ("l2", "bct", "advbct")},
    **dict.fromkeys(("ract", "hoc"), CONTRASTED),
}
#: A run hurts the new model where its P_up is below this: the lowest of the runs that HBCT's Table 1 shows.
HURT = -0.05


@dataclass(frozen=True, kw_only=True)
class Tried:
    """A run on the kept pictures: the means of CMC@1's and mAP's P_up and P_com. Both are -inf if the training diverged."""

    recipe: Recipe
    p_up: float
    p_com: float


def searched(upgrade: Upgrade, done: Callable[[], None]) -> Iterator[Tried]:
    """Give the best run of each loss. `done` is called after each run."""
    for name, grid in GRIDS.items():
        tried = []
        for weight, tau in grid:
            recipe = replace(upgrade.recipes[name], weights=(1.0, weight), temperature=tau)
            try:
                tried.append(_tried(upgrade, recipe))
            except ModelError:
                tried.append(Tried(recipe=recipe, p_up=-math.inf, p_com=-math.inf))
            done()
        chosen = best(tried)
        upgrade.say(f"{name}: {_told(chosen)}, of {'; '.join(map(_told, tried))}")
        yield chosen


def best(tried: Sequence[Tried]) -> Tried:
    """Return the highest P_com among the runs that do not hurt the new model; if all do, the run that hurts it least."""
    fine = [each for each in tried if each.p_up >= HURT]
    return max(fine, key=lambda each: each.p_com) if fine else max(tried, key=lambda each: each.p_up)


def _tried(upgrade: Upgrade, recipe: Recipe) -> Tried:
    ground = Ground.of(upgrade.task.pairs, None, np.zeros(len(upgrade.task.pairs)))
    own, old, alone = (upgrade.workshop.embedded(each, "pairs").vectors for each in _models(upgrade, recipe))

    def found(queries: np.ndarray, gallery: np.ndarray) -> np.ndarray:
        return np.array(quality(queries, gallery, ground, Metric.COSINE))

    start, ideal = found(old, old), found(alone, alone)
    return Tried(
        recipe=recipe,
        p_up=_mean(metrics.p_up(each, alone=best) for each, best in zip(found(own, own), ideal, strict=True)),
        p_com=_mean(
            metrics.p_com(each, old=low, alone=best) for each, low, best in zip(found(own, old), start, ideal, strict=True)
        ),
    )


def _models(upgrade: Upgrade, recipe: Recipe) -> tuple[Recipe, Recipe, Recipe]:
    return recipe, upgrade.recipes["old"], upgrade.recipes["new"]


def _mean(values: Iterator[float]) -> float:
    return float(np.mean(list(values)))


def _told(tried: Tried) -> str:
    tau = "" if tried.recipe.temperature is None else f" τ {tried.recipe.temperature:g}"
    came = "diverged" if tried.p_up == -math.inf else f"P_up {tried.p_up:z.3f}, P_com {tried.p_com:z.3f}"
    return f"λ {(tried.recipe.weights or (1, 1))[1]:g}{tau}: {came}"
