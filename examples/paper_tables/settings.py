"""The tables that can be made: which data set, which pictures for which model, which rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from examples.paper_tables import data, tasks
from examples.paper_tables.backfill import Plan, Upgrade
from examples.paper_tables.data import DataSet
from examples.paper_tables.models import DIM
from examples.paper_tables.rows import Row, measured, quality, row
from examples.paper_tables.scales import SEQUENCE
from examples.paper_tables.tasks import Task
from rmvdb import metrics
from rmvdb.learning.training import Method, TrainingSettings
from rmvdb.planning.curve import UNCALIBRATED
from rmvdb.planning.orders.table import Known, make_order
from rmvdb.types import Metric, Record

#: ψ, and where the method has one ρ, for a new model that was trained without a thought of the old one.
TRAINED = (Method.RQT, Method.CL_S, Method.CL_M, Method.MCL, Method.RM)
#: HBCT's Table 1: each space with its own old model and its own new one trained alone.
SPACES = {"": ("l2", "bct", "ract", "advbct", "hoc"), "-hyperbolic": ("hbct-no-entail", "hbct")}
#: The one difference from FCT's table: `training` makes h four times as wide as the new space.
LIFTED = f"the hidden layers of h (fct, fct-side, bict) have a width of {4 * DIM}, FCT's of 2,048"
#: The rows, one after the other. `Row` and `compatibility` say which keys each dictionary has.
Rows = Iterator[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One table."""

    about: str
    read: Callable[[Path], DataSet]
    split: Callable[..., Task]
    rows: Callable[[Upgrade, TrainingSettings], Rows]
    #: Whether the new model's architecture is larger than the old one's.
    wider: bool = False
    #: The share of the training pictures kept from the models; none where no ψ is trained.
    kept: float = tasks.KEPT
    #: How many rows it has, where heads can be measured; and whether the losses' weights are searched for them.
    count: int = 0
    weighs: bool = False


def methods(upgrade: Upgrade, settings: TrainingSettings) -> Rows:
    """The first paper's table: rank merge and what it is compared with."""
    yield from _rank_merge(upgrade, settings, TRAINED)
    for name in ("bct", "ract"):
        yield asdict(upgrade.compatible(name))
    fct = Plan(method=Method.FCT, settings=settings)
    yield asdict(upgrade.planned("fct", fct))
    yield asdict(upgrade.planned("fct-side", replace(fct, side="side")))
    yield asdict(upgrade.planned("bict", replace(fct, new="bict")))
    yield asdict(_without_labels(upgrade, settings))


def identities(upgrade: Upgrade, settings: TrainingSettings) -> Rows:
    """Identities that no model has seen: rank merge with labels, and what it is without."""
    yield from _rank_merge(upgrade, settings, (Method.RQT, Method.RM))
    yield asdict(_without_labels(upgrade, settings))


def open_classes(upgrade: Upgrade, settings: TrainingSettings) -> Rows:
    """The paper's Figure 9: no class in common."""
    yield from _rank_merge(upgrade, settings, (Method.RQT, Method.MCL, Method.RM))
    for name in ("bct", "ract"):
        yield asdict(upgrade.compatible(name))


def _rank_merge(upgrade: Upgrade, settings: TrainingSettings, trained: Sequence[Method]) -> Rows:
    """Both models alone, the naive merge of them, and these methods."""
    yield from map(asdict, upgrade.alone())
    yield asdict(upgrade.planned("naive", Plan(method=Method.NAIVE, calibrate=False)))
    for method in trained:
        yield asdict(upgrade.planned(method, Plan(method=method, settings=settings)))


def _without_labels(upgrade: Upgrade, settings: TrainingSettings) -> Row:
    return upgrade.planned("mcl, no labels", Plan(method=Method.MCL, settings=settings, labels=False))


def orders(upgrade: Upgrade, settings: TrainingSettings) -> Rows:
    """Rank merge, as a plan takes it, with every backfill order (the paper's appendix A); random order once a seed."""
    plan = Plan(method=Method.RM, settings=settings)
    best = [upgrade.best(plan, seed) for seed in upgrade.seeds]
    shares = {
        "calibrated": float(np.mean([scales is not UNCALIBRATED for _, scales in best])),
        "regression": float(np.mean([each.settings.pull == 1.0 for each, _ in best])),
    }
    yield from map(asdict, upgrade.alone())
    for name, confidences in _confidences(upgrade).items():
        curves = [
            measured(upgrade.served(each, seed), upgrade.ordered(confidence), scales)
            for (each, scales), seed, confidence in zip(best, upgrade.seeds, confidences, strict=True)
        ]
        yield asdict(row(f"rm, {name}", curves, upgrade.base, **shares))


def ablation(upgrade: Upgrade, settings: TrainingSettings) -> Rows:
    """Measure what each part of the default settings adds, with labels and without."""
    yield from map(asdict, upgrade.alone())
    yield asdict(upgrade.planned("naive", Plan(method=Method.NAIVE)))
    yield asdict(upgrade.planned("rqt", Plan(method=Method.RQT, settings=settings)))
    beside = replace(settings, pull=1.0)
    cl_s = Plan(method=Method.CL_S, settings=beside)
    yield asdict(upgrade.planned("cl-s", cl_s))
    yield asdict(upgrade.planned("cl-s, with ρ", replace(cl_s, head=True)))
    for kind, plan in {
        "rm": Plan(method=Method.RM, settings=beside),
        "mcl, no labels": Plan(method=Method.MCL, settings=settings, labels=False),
    }.items():
        yield asdict(upgrade.planned(kind, plan))
        for what, variant in _variants(plan, len(upgrade.halves[0])).items():
            yield asdict(upgrade.planned(f"{kind}: {what}", variant))
    yield asdict(upgrade.planned("rm, no labels", Plan(method=Method.RM, settings=settings, labels=False)))
    yield asdict(upgrade.planned("rm, as printed", Plan(method=Method.RM, settings=TrainingSettings.paper(), calibrate=False)))


def _variants(plan: Plan, pairs: int) -> dict[str, Plan]:
    """One part changed at a time."""
    base = plan.settings

    def other(**changed: object) -> Plan:
        return replace(plan, settings=replace(base, **changed))

    found = {"temperature 1": other(temperature=1.0)}
    found |= {"no mining": other(mining=False), "no calibration": replace(plan, calibrate=False)}
    found |= {f"{blocks} block{'s' * (blocks > 1)}": other(blocks=blocks) for blocks in (1, 3)}
    found[f"{pairs // 4} pairs"] = replace(plan, pairs=pairs // 4)
    found["no pull"] = other(pull=0.0)
    return found | ({"pull 3": other(pull=3.0), "no residual": other(residual=False)} if plan.method.has_head else {})


def compatibility(upgrade: Upgrade, settings: TrainingSettings) -> Rows:
    """HBCT's Table 1: what searches its own gallery, the old one, and what the loss costs and gives."""
    for space, names in SPACES.items():
        old, alone = f"old{space}", f"new{space}"
        metric = Metric.LORENTZ if space else Metric.COSINE
        ground = upgrade.ground
        start = quality(*_searched(upgrade, old, old), ground, metric)
        ideal = quality(*_searched(upgrade, alone, alone), ground, metric)
        yield {"method": old, "self_cmc": start[0], "self_map": start[1]}
        for name in (alone, *names):
            own, cross = (quality(*_searched(upgrade, name, to), ground, metric) for to in (name, old))
            yield {"method": name, **_compared(own, cross, start, ideal)}


def sequence(upgrade: Upgrade, settings: TrainingSettings) -> Rows:
    """HBCT's Figure 5: CMC@1 and its P_com, queries of a later model (rows) in the gallery of an earlier one (columns)."""
    steps = range(len(upgrade.task.steps))
    ground = upgrade.ordered(np.zeros(len(upgrade.task.gallery)))
    for space, names in SEQUENCE.items():
        metric = Metric.LORENTZ if space else Metric.COSINE

        def first(queries: str, gallery: str, metric: Metric = metric) -> float:
            return quality(*_searched(upgrade, queries, gallery), ground, metric)[0]

        alone = [f"alone{space} {step}" for step in steps]
        ideal = [first(name, name) for name in alone]
        for name in names:
            chain = [alone[0], *(f"{name} {step}" for step in steps[1:])]
            own = [first(model, model) for model in chain]
            cross = [[first(chain[i], chain[j]) for j in range(i)] for i in steps[1:]]
            gone = [
                [metrics.p_com(found, old=own[j], alone=ideal[i]) for j, found in enumerate(row)]
                for i, row in enumerate(cross, start=1)
            ]
            yield {"method": name, "self_cmc": own, "alone_cmc": ideal, "cross_cmc": cross, "p_com": gone}


def _searched(upgrade: Upgrade, queries: str, gallery: str) -> tuple[np.ndarray, np.ndarray]:
    legs = upgrade.legs("searched", old=gallery, new=queries)
    return legs.new_q, legs.old_g


def _compared(
    own: tuple[float, float], cross: tuple[float, float], start: tuple[float, float], ideal: tuple[float, float]
) -> dict:
    found: dict[str, float] = {}
    for at, name in enumerate(("cmc", "map")):
        found |= {f"self_{name}": own[at], f"cross_{name}": cross[at]}
        found[f"p_up_{name}"] = metrics.p_up(own[at], alone=ideal[at])
        found[f"p_com_{name}"] = metrics.p_com(cross[at], old=start[at], alone=ideal[at])
    return found


def _confidences(upgrade: Upgrade) -> dict[str, list[np.ndarray]]:
    """Every order's confidence of the gallery, (n,), once a seed."""
    old = upgrade.workshop.embedded(upgrade.recipes["old"], "gallery")
    labels = upgrade.task.gallery.labels.tolist()
    records = [Record(id=n, vector=vector, fields={"class": labels[n]}) for n, vector in enumerate(old.vectors)]
    found = {"classification-score": [old.score] * len(upgrade.seeds)}
    for name in ("centroid", "cluster", "random"):
        made = [make_order(name, records, Known(metric=Metric.COSINE, label_field="class", seed=seed)) for seed in upgrade.seeds]
        found[name] = [order.confidence(records) for order in made]
    return found


SETTINGS: dict[str, Setting] = {
    "cifar100-extended-class": Setting(
        about=f"rank merge's Table 1: 50 → 100 classes, the same architecture; {LIFTED}",
        read=data.cifar100,
        split=tasks.extended_class,
        rows=methods,
        count=14,
    ),
    "cifar100-extended-class-wider": Setting(
        about=f"rank merge's Table A2: the same with a larger new model; {LIFTED}",
        read=data.cifar100,
        split=tasks.extended_class,
        rows=methods,
        wider=True,
        count=14,
    ),
    "cifar100-ext-class": Setting(
        about="HBCT's Table 1: the old model knows half of the classes",
        read=data.cifar100,
        split=tasks.extended_class,
        rows=compatibility,
        kept=0.0,
        count=11,
        weighs=True,
    ),
    "cifar100-ext-data": Setting(
        about="HBCT's Table 1: the old model knows 30 % of the pictures",
        read=data.cifar100,
        split=tasks.extended_data,
        rows=compatibility,
        kept=0.0,
        count=11,
        weighs=True,
    ),
    "cifar100-open-class": Setting(
        about="rank merge's Figure 9: the models have no class in common",
        read=data.cifar100,
        split=tasks.open_class,
        rows=open_classes,
    ),
    "cifar100-orders": Setting(
        about="rank merge's appendix A: which records first", read=data.cifar100, split=tasks.extended_class, rows=orders
    ),
    "cifar100-ablation": Setting(
        about="what temperature, mining, calibration, depth and sample size add, with labels and without",
        read=data.cifar100,
        split=tasks.extended_class,
        rows=ablation,
    ),
    "cifar100-five-updates": Setting(
        about="HBCT's Figure 5: 20 more classes with each update, a larger architecture from the third model on",
        read=data.cifar100,
        split=tasks.sequence,
        rows=sequence,
        wider=True,
        kept=0.0,
    ),
    "omniglot-open-identities": Setting(
        about="identities that no model has seen; the old model knows a third of the alphabets",
        read=data.omniglot,
        split=lambda found, sizes, kept: tasks.extended_class(found, sizes, kept=kept, share=1 / 3),
        rows=identities,
    ),
    "market1501-extended-class": Setting(
        about=f"rank merge's Table 1 on Market-1501; {LIFTED}", read=data.market1501, split=tasks.extended_class, rows=methods
    ),
    "tinyimagenet-ext-class": Setting(
        about="HBCT's Table 1 on TinyImageNet",
        read=data.tinyimagenet,
        split=tasks.extended_class,
        rows=compatibility,
        kept=0.0,
        count=11,
        weighs=True,
    ),
}
