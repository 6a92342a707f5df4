"""The arithmetic of rows, by models whose vectors are known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from examples.paper_tables import models, rows, settings
from examples.paper_tables.backfill import Plan, Upgrade
from examples.paper_tables.rows import Ground, Legs
from examples.paper_tables.scales import Scale
from examples.paper_tables.tasks import Task
from rmvdb.learning.training import Fitted, Method
from rmvdb.planning import curve as simulated
from rmvdb.planning import quality
from rmvdb.types import Metric
from tests.support.paper_pictures import made


def test_a_row_is_what_simulate_measures_in_one_piece(
    legs: tuple[Legs, Ground, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    (both, ground, labels), itself = legs, np.eye(60, dtype=bool)
    monkeypatch.setattr(rows, "AT_ONCE", 7)
    found = rows.measured(both, ground)
    whole = simulated.curve(
        both.old_q,
        both.old_g,
        both.new_q,
        both.new_g,
        labels[:, None] == labels[None, :],
        ground.order,
        old_metric=Metric.COSINE,
        new_metric=Metric.COSINE,
        leave_out=itself,
    )
    assert found.map == whole.map
    row = rows.row("naive", [found], found)
    summary = simulated.summary(whole, old=whole.map[0], new=whole.map[-1])
    assert (row.auc_map, row.auc_cmc, row.gain) == (summary.auc_map, summary.auc_cmc, summary.gain)
    flips = [quality.negative_flips(whole.top1[0], now) for now in whole.top1]
    assert row.flips_curve == pytest.approx(flips)
    assert row.flips == max(flips)
    assert (row.seeds, row.spread["gain"]) == (1, 0.0)


def test_the_models_alone_gain_nothing_and_everything(legs: tuple[Legs, Ground, np.ndarray]) -> None:
    base = rows.measured(legs[0], legs[1])
    old, new = rows.row("old", [base.held(0)], base), rows.row("new", [base.held(-1)], base)
    assert old.gain == pytest.approx(0, abs=1e-12)
    assert new.gain == pytest.approx(1)
    several = rows.row("rm", [base.held(0), base.held(-1)], base)
    assert several.gain == pytest.approx(0.5)
    assert several.spread["gain"] == pytest.approx(np.sqrt(0.5))
    assert several.flips_curve == pytest.approx([(a + b) / 2 for a, b in zip(old.flips_curve, new.flips_curve, strict=True)])


def test_calibration_is_kept_only_where_it_helps_the_other_half(legs: tuple[Legs, Ground, np.ndarray]) -> None:
    both, ground, _ = legs
    same = replace(both, old_q=both.new_q, old_g=both.new_g)
    assert rows.tuned(same, ground)[1] == simulated.UNCALIBRATED
    # Distances of half the size: the old leg takes every first place until it is calibrated.
    shrunk = replace(both, old_q=both.old_q * 0.1, old_g=both.old_g * 0.1, old_metric=Metric.L2, new_metric=Metric.L2)
    worth, scales = rows.tuned(shrunk, ground)
    assert None not in scales
    assert rows.tuned(shrunk, ground, calibrate=False)[1] == simulated.UNCALIBRATED
    assert rows.tuned(shrunk, ground, calibrate=False)[0] < worth


class Shelf:
    """A workshop that has the vectors of every model by its name, the same of every part."""

    def __init__(self, vectors: dict[str, np.ndarray]) -> None:
        self.vectors = vectors

    def embedded(self, recipe: models.Recipe, part: str) -> models.Embedded:
        return models.Embedded(vectors=self.vectors[recipe.name], score=np.arange(60))


def upgraded(labels: np.ndarray, recipes: dict[str, models.Recipe], vectors: dict[str, np.ndarray], **rest: object) -> Upgrade:
    """Return an upgrade of 60 pictures, which are learnt, kept and searched, by models whose vectors are known."""
    part = made(labels.tolist())
    task = Task(old=part, new=part, shared=True, pairs=part, gallery=part, queries=None, mirrored=False, steps=(part,) * 3)
    return Upgrade(task=task, workshop=Shelf(vectors), recipes=recipes, seeds=[0], **rest)


@pytest.mark.parametrize("better", [0.0, 1.0])
def test_a_contrast_of_classes_stands_alone_or_beside_a_regression_whichever_is_worth_more(
    legs: tuple[Legs, Ground, np.ndarray], tiny: Scale, better: float
) -> None:
    class Psi:
        def __init__(self, sign: int) -> None:
            self.sign = sign

        def apply(self, vectors: np.ndarray) -> np.ndarray:
            return self.sign * legs[0].old_q[: len(vectors)]

    plan = Plan(method=Method.MCL, settings=tiny.settings)
    assert [each.settings.pull for each in plan.variants] == [0.0, 1.0]
    fits = {(each, 0): Fitted(reverse=Psi(1 if each.settings.pull == better else -1)) for each in plan.variants}
    found = upgraded(legs[2], tiny.recipes(), {"old": legs[0].old_g, "new": legs[0].new_g}, fits=fits).planned("mcl", plan)
    assert found.regression == better
    assert found.curve[0] > 0.25


def test_a_new_models_queries_search_its_own_gallery_and_that_of_each_model_before_it(
    legs: tuple[Legs, Ground, np.ndarray], tiny: Scale
) -> None:
    _, ground, labels = legs
    recipes, rng = tiny.recipes() | tiny.sequence(3), np.random.default_rng(5)
    vectors = {name: rng.normal(size=(60, 8)) + rng.uniform(1, 3) * np.eye(8)[labels] for name in recipes}
    for name in (name for name, recipe in recipes.items() if recipe.zeta is not None):
        vectors[name] = np.column_stack([np.sqrt(1 + np.square(vectors[name]).sum(1)), vectors[name]])  # on the hyperboloid
    upgrade = upgraded(labels, recipes, vectors)

    def quality(queries: str, gallery: str) -> tuple[float, float]:
        metric = Metric.COSINE if recipes[gallery].zeta is None else Metric.LORENTZ
        return rows.quality(vectors[queries], vectors[gallery], ground, metric)

    found = {each["method"]: each for each in settings.compatibility(upgrade, tiny.settings)}
    for name, old in (("bct", "old"), ("hbct", "old-hyperbolic")):
        assert (found[name]["self_cmc"], found[name]["self_map"]) == quality(name, name)
        assert (found[name]["cross_cmc"], found[name]["cross_map"]) == quality(name, old) != quality(name, name)
    row = upgrade.compatible("bct")
    for at, gallery in ((0, "old"), (-1, "bct")):
        assert (row.curve_cmc[at], row.curve[at]) == pytest.approx(quality("bct", gallery))
    for each in settings.sequence(upgrade, tiny.settings):
        chain = [f"alone{'-hyperbolic' * (each['method'] == 'hbct')} 0", *(f"{each['method']} {step}" for step in (1, 2))]
        assert each["self_cmc"] == [quality(name, name)[0] for name in chain]
        assert each["cross_cmc"] == [[quality(chain[i], chain[j])[0] for j in range(i)] for i in (1, 2)]


def test_a_lifted_gallery_is_searched_by_the_new_models_queries(legs: tuple[Legs, Ground, np.ndarray]) -> None:
    class Doubled:
        def apply(self, vectors: np.ndarray) -> np.ndarray:
            return 2 * vectors[:, :8]

    served = legs[0].served(Fitted(lift=Doubled()), side=np.zeros((60, 3), dtype=np.float32))
    assert np.array_equal(served.old_q, legs[0].new_q)
    assert np.array_equal(served.old_g, 2 * legs[0].old_g)


def test_rows_without_labels_are_calibrated_by_the_new_models_neighbours(
    legs: tuple[Legs, Ground, np.ndarray], tiny: Scale
) -> None:
    upgrade = upgraded(legs[2], tiny.recipes(), {"old": legs[0].old_g, "new": legs[0].new_g})
    plan, check = Plan(method=Method.MCL, settings=tiny.settings), upgrade.halves[1]
    labels, without = (upgrade.check_ground(replace(plan, labels=each)) for each in (True, False))
    same = legs[2][check][:, None] == legs[2][check][None, :]
    assert np.array_equal(labels.relevance, same & ~np.eye(len(check), dtype=bool))
    assert np.array_equal(
        without.relevance,
        simulated.neighbours(legs[0].new_g[check], legs[0].new_g[check], metric=Metric.COSINE, itself=np.arange(len(check))),
    )
    assert not np.array_equal(without.relevance, labels.relevance)
    assert np.array_equal(without.order, labels.order)
