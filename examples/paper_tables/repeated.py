"""The rows of a table whose every model is trained once a seed: heads are, because they take seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from examples.paper_tables.backfill import Upgrade
from examples.paper_tables.models import Recipe, Say, Workshop
from examples.paper_tables.remembered import Remembered
from examples.paper_tables.scales import Scale
from examples.paper_tables.settings import Rows, Setting
from examples.paper_tables.tasks import Task
from examples.paper_tables.weighing import GRIDS, searched

#: Of which the standard deviation over the seeds is told.
SPREAD = ("auc_map", "auc_cmc", "gain", "p_up_cmc", "p_com_cmc", "p_up_map", "p_com_map")


@dataclass
class Left:
    """Says how much of a table is still to do."""

    total: int
    say: Say
    done: int = 0
    began: float = field(default_factory=time.perf_counter)

    def step(self) -> None:
        """One part more is done."""
        self.done += 1
        minutes = (time.perf_counter() - self.began) / self.done * (self.total - self.done) / 60
        self.say(f"{self.done} of {self.total} parts done, about {minutes:.0f} min left")


def measured(
    chosen: Setting, scale: Scale, task: Task, workshop: Workshop, *, seeds: int, remembered: Remembered, say: Say
) -> tuple[list[dict[str, Any]], dict[str, Recipe]]:
    """Return the rows, each the mean over the seeds, and the recipes of the first seed."""
    left = Left(total=seeds * chosen.count + (sum(map(len, GRIDS.values())) if chosen.weighs else 0), say=say)

    def upgrade(seed: int, weighed: dict[str, Recipe]) -> Upgrade:
        recipes = scale.recipes(seed, weighed)
        return Upgrade(task=task, workshop=workshop, recipes=recipes, seeds=[seed], say=say, remembered=remembered)

    first = upgrade(0, {})
    found = {each.recipe.name: each.recipe for each in searched(first, left.step)} if chosen.weighs else {}
    tables = [list(_counted(chosen.rows(upgrade(seed, found), scale.settings), left.step)) for seed in range(seeds)]
    return [mean(list(rows)) for rows in zip(*tables, strict=True)], scale.recipes(0, found)


def _counted(rows: Rows, step: Callable[[], None]) -> Iterator[dict[str, Any]]:
    for row in rows:
        step()
        yield row


def mean(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """One row of those that each seed gave: means, standard deviations, and how many there are."""
    found = {name: _middle([row[name] for row in rows]) for name in rows[0] if name not in ("seeds", "spread")}
    several = len(rows) > 1
    spread = {name: float(np.std([row[name] for row in rows], ddof=1)) if several else 0.0 for name in SPREAD if name in rows[0]}
    return {**found, "seeds": len(rows), "spread": spread}


def _middle(values: list[Any]) -> Any:
    return values[0] if isinstance(values[0], str) else np.mean(values, axis=0).tolist()
