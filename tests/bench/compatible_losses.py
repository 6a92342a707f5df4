"""Trains new models whose vectors can be compared with an old model's, by each loss of rmvdb.learning.losses; says what it is
worth.

    python tests/bench/compatible_losses.py

The old model has learnt scikit-learn's digits 0 to 4, the new ones all ten. `self` searches a gallery of new vectors with new
queries, `cross` a gallery of the old model's vectors with new queries: what an application would see if it deployed the new model
and re-embedded nothing. P_up is what the loss costs the new model, P_com how much of the way from the old model to the new one it
goes without re-embedding (HBCT, Eq. 14 and 15), both of mAP. Hyperbolic models are compared with hyperbolic ones.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import Subset, TensorDataset

from rmvdb import compatible, metrics
from rmvdb.compatible import Loss, Model, Settings
from rmvdb.learning.losses import hbct, lorentz
from rmvdb.types import Metric

DIM = 32
OLD_CLASSES, CLASSES = 5, 10
#: Of the hidden layers of the old model and of the new ones.
WIDTHS = (32, 128)
#: mAP and CMC@1, shares of 1.
Quality = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One model's line of the table; shares of 1, None if there is nothing to compare with."""

    name: str
    self_map: float
    self_cmc: float
    cross_map: float | None = None
    cross_cmc: float | None = None
    p_up: float | None = None
    p_com: float | None = None


def digits(seed: int) -> tuple[Subset, Subset, Subset]:
    """Pictures with labels, shuffled: what the old model learns, what the new ones learn, what is searched."""
    from sklearn.datasets import load_digits

    found = load_digits()
    whole = TensorDataset(torch.from_numpy(found.data).float() / 8 - 1, torch.from_numpy(found.target).long())
    rows = np.random.default_rng(seed).permutation(len(whole))
    taught, searched = rows[:1000], rows[1000:]
    return Subset(whole, taught[found.target[taught] < OLD_CLASSES]), Subset(whole, taught), Subset(whole, searched)


def model(*, width: int, classes: int, zeta: float | None, seed: int) -> Model:
    """Return a small network with its classifier; hyperbolic if it has a ζ."""
    torch.manual_seed(seed)
    layers = [nn.Linear(64, width), nn.BatchNorm1d(width), nn.ReLU()]
    layers += [nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, DIM)]
    if zeta is None:
        return Model(module=nn.Sequential(*layers), classifier=nn.Linear(DIM, classes, bias=False))
    return Model(module=nn.Sequential(*layers, lorentz.Lift(zeta=zeta)), classifier=hbct.Classifier(DIM, classes))


def quality(queries: Model, gallery: Model, items: Subset) -> Quality:
    """mAP and CMC@1 where every item is searched among all others."""
    (q, labels), (g, _) = compatible.embed(queries.module, items), compatible.embed(gallery.module, items)
    hyperbolic = q.shape[1] == DIM + 1
    metric = Metric.IP if hyperbolic else Metric.COSINE  # ⟨q, g⟩_L is an inner product, and ranks as d_L does
    distance = metrics.distances((lorentz.as_query(q) if hyperbolic else q).numpy(), g.numpy(), metric=metric)
    np.fill_diagonal(distance, np.inf)
    relevant = (labels[:, None] == labels[None, :]).numpy()
    precision, first = metrics.average_precision(distance, relevant), metrics.cmc(distance, relevant, k=1)
    return metrics.mean(precision), metrics.mean(first)


def compare(losses: list[Loss], *, hyperbolic: bool, settings: Settings) -> Iterator[Row]:
    """Yield the old model, the new one trained alone, and the new one trained by each loss."""
    few, many, searched = digits(settings.seed)
    zetas = (1.0, 1.2) if hyperbolic else (None, None)
    space = ", hyperbolic" if hyperbolic else ""
    old = model(width=WIDTHS[0], classes=OLD_CLASSES, zeta=zetas[0], seed=settings.seed)
    compatible.train(old, few, settings=settings, progress=line(f"old{space}"))
    start = quality(old, old, searched)
    yield Row(name=f"old{space}", self_map=start[0], self_cmc=start[1])
    alone: Quality | None = None
    for loss in [Loss.PLAIN, *losses]:
        new = model(width=WIDTHS[1], classes=CLASSES, zeta=zetas[1], seed=settings.seed + 1)
        compatible.train(new, many, loss=loss, old=old, settings=settings, progress=line(f"{loss}{space}"))
        own, cross = quality(new, new, searched), quality(new, old, searched)
        alone = alone or own
        yield row(f"{loss}{space}", own=own, cross=cross, start=start, alone=alone)


def row(name: str, *, own: Quality, cross: Quality, start: Quality, alone: Quality) -> Row:
    """Return a new model's line: `start` is the old model's quality, `alone` that of the new one trained without it."""
    return Row(
        name=name,
        self_map=own[0],
        self_cmc=own[1],
        cross_map=cross[0],
        cross_cmc=cross[1],
        p_up=metrics.p_up(own[0], alone=alone[0]),
        p_com=metrics.p_com(cross[0], old=start[0], alone=alone[0]),
    )


def line(name: str) -> Callable[[int, int, float], None]:
    """Return a training's progress on one line of the terminal."""
    began = time.perf_counter()

    def report(step: int, steps: int, loss: float) -> None:
        if step % 20 == 0 or step == steps:
            took = f"loss {loss:.3f}, {time.perf_counter() - began:.1f} s"
            print(f"\r{name}: step {step} of {steps}, {took}", end="\n" if step == steps else "", file=sys.stderr)

    return report


def table(rows: list[Row]) -> str:
    """Return the rows as Markdown, in percent; P_up and P_com as shares."""
    lines = ["| | self mAP | self CMC@1 | cross mAP | cross CMC@1 | P_up | P_com |", "|---|---|---|---|---|---|---|"]
    for row in rows:
        shares = [row.self_map, row.self_cmc, row.cross_map, row.cross_cmc]
        cells = ["" if share is None else f"{100 * share:.1f}" for share in shares]
        cells += ["" if each is None else f"{each:.3f}" for each in (row.p_up, row.p_com)]
        lines.append(f"| {' | '.join([row.name, *cells])} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="also write the table to this file")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    settings = Settings(epochs=asked.epochs, lr=asked.lr, seed=asked.seed)
    euclidean = [Loss.L2, Loss.BCT, Loss.RACT, Loss.HOC, Loss.ADVBCT]
    rows = [*compare(euclidean, hyperbolic=False, settings=settings), *compare([Loss.HBCT], hyperbolic=True, settings=settings)]
    print(table(rows))
    if asked.json:
        asked.json.write_text(json.dumps([asdict(row) for row in rows], indent=2))


if __name__ == "__main__":
    main()
