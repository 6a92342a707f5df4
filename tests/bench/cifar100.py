"""Rank merge on CIFAR-100: two small networks trained apart, every method over the whole backfill.

    python tests/bench/cifar100.py DATA_FOLDER [--out FILE.json]

DATA_FOLDER holds a `load.py` whose `cifar100(split)` gives images (n, 32, 32, 3), labels (n,) and names. The old network
knows 50 classes, the new one all 100 (the paper's extended-class setting). ψ and ρ learn from training images that neither
network saw, calibrations from 2,000 test images (in the rows without labels by the new network's neighbours), and 3,000 other
test images are queries and gallery. Under ten minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import runpy
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from rmvdb.learning import calibration, geometry, training
from rmvdb.learning.method import Fitted, Method, Pairs, TrainingSettings
from rmvdb.planning import curve as simulated
from rmvdb.planning.curve import UNCALIBRATED
from rmvdb.planning.orders.centroid import Centroid
from rmvdb.planning.orders.classification_score import ClassificationScore
from rmvdb.planning.orders.cluster import Cluster
from rmvdb.planning.orders.random import Random
from rmvdb.types import Metric, Record

COSINE = Metric.COSINE
EPOCHS, BATCH, DIM = 7, 128, 128
N_PAIRS, N_CALIBRATE, N_EVALUATE = 8000, 2000, 3000


class Small(nn.Module):
    """Four convolutions to an embedding (n, DIM), and a linear classifier on it."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        widths = [3, 32, 64, 128, 128]
        blocks: list[nn.Module] = []
        for number, (into, out) in enumerate(pairwise(widths)):
            blocks += [nn.Conv2d(into, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU()]
            blocks += [nn.MaxPool2d(2)] if number < 3 else [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        self.body = nn.Sequential(*blocks, nn.Linear(widths[-1], DIM))
        self.classifier = nn.Linear(DIM, classes)

    def forward(self, images: Tensor) -> Tensor:
        """(n, 3, 32, 32) to class scores (n, classes)."""
        return self.classifier(self.body(images))

    @torch.inference_mode()
    def embed(self, images: Tensor) -> np.ndarray:
        """(n, 3, 32, 32) to (n, DIM)."""
        self.eval()
        return torch.cat([self.body(part) for part in images.split(500)]).numpy()

    @torch.inference_mode()
    def scores(self, vectors: np.ndarray) -> np.ndarray:
        """Class probabilities of embeddings."""
        return self.classifier(torch.from_numpy(vectors)).softmax(1).numpy()


def train(images: Tensor, labels: Tensor, classes: int, seed: int) -> Small:
    torch.manual_seed(seed)
    network = Small(classes).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4, nesterov=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=EPOCHS * (len(images) // BATCH), pct_start=0.2)
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(images))[: len(images) // BATCH * BATCH].view(-1, BATCH):
            flipped = torch.rand(BATCH, 1, 1, 1) < 0.5
            batch = torch.where(flipped, images[rows].flip(3), images[rows]).contiguous(memory_format=torch.channels_last)
            with torch.autocast("cpu", torch.bfloat16):
                loss = nn.functional.cross_entropy(network(batch), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return network.eval()


@dataclass(frozen=True, kw_only=True)
class Data:
    pairs: Pairs
    calibrate: Pairs
    evaluate: Pairs
    old: Small

    def records(self) -> list[Record]:
        part = self.evaluate
        return [
            Record(id=row, vector=vector, fields={"class": int(label)})
            for row, (vector, label) in enumerate(zip(part.old, part.labels, strict=True))
        ]


def tensor(images: np.ndarray) -> Tensor:
    scaled = (torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255 - 0.48) / 0.25
    return scaled.contiguous(memory_format=torch.channels_last)


def prepare(folder: Path) -> Data:
    load = runpy.run_path(str(folder / "load.py"))["cifar100"]
    images, labels, _ = load("train")
    test_images, test_labels, _ = load("test")
    rows = np.random.default_rng(0).permutation(len(images))
    seen, unseen = rows[:40_000], rows[40_000 : 40_000 + N_PAIRS]
    half = seen[labels[seen] < 50]
    old = train(tensor(images[half]), torch.from_numpy(labels[half]), 50, seed=1)
    new = train(tensor(images[seen]), torch.from_numpy(labels[seen]), 100, seed=2)
    test = np.random.default_rng(1).permutation(len(test_images))

    def embedded(some: np.ndarray, their_labels: np.ndarray) -> Pairs:
        return Pairs(old=old.embed(tensor(some)), new=new.embed(tensor(some)), labels=their_labels)

    calibrate, evaluate = test[:N_CALIBRATE], test[N_CALIBRATE : N_CALIBRATE + N_EVALUATE]
    return Data(
        pairs=embedded(images[unseen], labels[unseen]),
        calibrate=embedded(test_images[calibrate], test_labels[calibrate]),
        evaluate=embedded(test_images[evaluate], test_labels[evaluate]),
        old=old,
    )


def legs(fitted: Fitted, part: Pairs) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    final = fitted.final(part.new)
    if fitted.lift is not None:
        return final, fitted.lifted(part.old), final, final
    return (part.old if fitted.reverse is None else fitted.reverse.apply(final)), part.old, final, final


def calibrations(fitted: Fitted, part: Pairs) -> simulated.Calibrations:
    if fitted.lift is not None:  # a lifted gallery is of one space with the new one, and served as one leg
        return UNCALIBRATED
    others = ~np.eye(len(part), dtype=bool)
    relevant = alike(part)[others]
    old_q, old_g, new_q, new_g = legs(fitted, part)
    old = calibration.fit(geometry.distances(old_q, old_g, metric=COSINE)[others], relevant)
    return old, calibration.fit(geometry.distances(new_q, new_g, metric=COSINE)[others], relevant)


def alike(part: Pairs) -> np.ndarray:
    """(n, n): images of one class, else the nearest by the new network, as in a plan."""
    if part.labels is None:
        return simulated.neighbours(part.new, part.new, metric=COSINE, itself=np.arange(len(part)))
    return part.labels[:, None] == part.labels[None, :]


def measure(fitted: Fitted, part: Pairs, confidence: np.ndarray, scales: simulated.Calibrations) -> simulated.Curve:
    return simulated.curve(
        *legs(fitted, part),
        part.labels[:, None] == part.labels[None, :],
        np.argsort(confidence, kind="stable"),
        scales,
        old_metric=COSINE,
        new_metric=COSINE,
        leave_out=np.eye(len(part), dtype=bool),
    )


def fits(data: Data) -> Iterator[tuple[str, Fitted, Pairs]]:
    """Return the trained transforms by name, and the part to calibrate them on."""
    unlabelled = replace(data.pairs, labels=None)
    plans = {method.value: (data.pairs, method, TrainingSettings()) for method in Method if method is not Method.IDENTITY}
    plans["rm --paper"] = (data.pairs, Method.RM, TrainingSettings.paper())
    plans["mcl, no labels"] = (unlabelled, Method.MCL, TrainingSettings())
    plans["rm, no labels"] = (unlabelled, Method.RM, TrainingSettings())
    for name, (pairs, method, settings) in plans.items():
        start = time.perf_counter()
        fitted = training.fit(pairs, method=method, old_metric=COSINE, new_metric=COSINE, settings=settings)
        yield name, fitted, data.calibrate if pairs.labels is not None else replace(data.calibrate, labels=None)
        print(f"{name}: {time.perf_counter() - start:.0f} s", file=sys.stderr)


def confidences(data: Data) -> dict[str, np.ndarray]:
    """Of every order, (n,); random order three times."""
    records = data.records()
    found = {
        "classification": ClassificationScore(classifier=data.old).confidence(records),
        "centroid": Centroid.learned(records, label_field="class").confidence(records),
        "cluster": Cluster.learned(records).confidence(records),
    }
    return found | {f"random {seed}": Random(seed=seed).confidence(records) for seed in range(3)}


@dataclass(frozen=True, kw_only=True)
class Table:
    """Measures, prints and remembers one row at a time."""

    part: Pairs
    #: mAP of the two models.
    old: float
    new: float
    rows: list[dict[str, object]] = field(default_factory=list)

    def row(
        self, name: str, kind: str, fitted: Fitted, confidence: np.ndarray, scales: simulated.Calibrations = UNCALIBRATED
    ) -> simulated.Summary:
        found = simulated.summary(measure(fitted, self.part, confidence, scales), old=self.old, new=self.new)
        maps = " ".join(f"{100 * found.map[at]:5.1f}" for at in (0, 1, 5, 9, 10))
        print(
            f"{name:<16} {kind:<15} {100 * found.auc_map:7.1f} {100 * found.auc_cmc:8.1f} {100 * found.gain:6.0f} %"
            f" {100 * found.largest_fall:6.2f} {100 * found.largest_fall_cmc:6.2f}   {maps}",
            flush=True,
        )
        self.rows.append({"name": name, "kind": kind, **asdict(found)})
        return found

    def header(self, cmc: list[float]) -> None:
        print(f"old {100 * self.old:.1f} {100 * cmc[0]:.1f}   new {100 * self.new:.1f} {100 * cmc[-1]:.1f}   (mAP, CMC@1)")
        print(f"{'':<32} AUC_mAP  AUC_CMC     Gain   fall in mAP, CMC   mAP at t = 0, 0.1, 0.5, 0.9, 1")


def promises(results: dict[str, simulated.Summary], orders: dict[str, float], old: float, new: float) -> dict[str, bool]:
    rm = results["rm"]
    return {
        "Gain of rm > rqt > naive": rm.gain > results["rqt"].gain > results["naive"].gain,
        "classification score ≥ random order": orders["classification"] >= orders["random"],
        "rm starts no lower than the old model": rm.map[0] >= old,
        "rm ends no lower than the new model": rm.map[-1] >= new,
        "rm falls by no more than half a point of mAP": rm.largest_fall <= 0.005,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, default=Path("cifar100.json"))
    asked = parser.parse_args()
    start = time.perf_counter()
    data = prepare(asked.folder)
    print(f"networks: {time.perf_counter() - start:.0f} s", file=sys.stderr)
    confidence = confidences(data)
    base = measure(Fitted(), data.evaluate, confidence["classification"], UNCALIBRATED)
    table = Table(part=data.evaluate, old=base.map[0], new=base.map[-1])
    table.header(base.cmc)
    results, made = {}, {}
    for name, fitted, check in fits(data):
        made[name] = fitted
        results[name] = table.row(name, "raw", fitted, confidence["classification"])
        table.row(name, "calibrated", fitted, confidence["classification"], calibrations(fitted, check))
    areas = {name: table.row("rm, by order", name, made["rm"], values).auc_map for name, values in confidence.items()}
    orders = {
        name.split()[0]: float(np.mean([area for each, area in areas.items() if each.split()[0] == name.split()[0]]))
        for name in areas
    }
    kept = promises(results, orders, table.old, table.new)
    for promise, held in kept.items():
        print(f"{'kept' if held else 'BROKEN':<7} {promise}")
    seconds = time.perf_counter() - start
    print(f"{seconds:.0f} seconds")
    found = {"old": table.old, "new": table.new, "rows": table.rows, "orders": orders, "promises": kept, "seconds": seconds}
    asked.out.write_text(json.dumps(found, indent=1))
    sys.exit(0 if all(kept.values()) else 1)


if __name__ == "__main__":
    main()
