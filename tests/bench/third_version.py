"""A third version in the middle of v1 → v2, on handwritten digits: what composing ψ_3→2 and ψ_2→1 costs, and what it saves.

    python tests/bench/third_version.py [--at 0.4]

Three small networks trained apart from each other: v1 knows the digits 0-4, v2 0-7, v3 all ten. The gallery is 1,197 pictures
that none of them saw; the share `--at` of it, least sure first, is v2's, the rest still v1's. For each pair of methods: mAP as it
is searched before v3 comes, mAP the moment after (and the 95 % interval of the difference), and at the end, on records that
nothing was trained on. About a minute.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from sklearn.datasets import load_digits

import demo_models
from rmvdb.learning.method import Method, Pairs, TrainingSettings
from rmvdb.planning.part import OlderCollection
from rmvdb.planning.trial import Trial
from rmvdb.types import Metric, Vectors

COSINE = {"old_metric": Metric.COSINE, "new_metric": Metric.COSINE}
#: Classes that each version knows, its channels and its dimension.
VERSIONS = ((5, (4, 8), 32), (8, (8, 16), 48), (10, (16, 32), 64))
TAUGHT = 600


def network(number: int, images: np.ndarray, labels: np.ndarray) -> demo_models.Net:
    classes, widths, dim = VERSIONS[number]
    shape = demo_models.Shape(side=8, channels=1, widths=widths, dim=dim, classes=classes)
    known = labels < classes
    return demo_models.train(shape, images[known], labels[known], epochs=15 + 5 * number, seed=number)[0]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--at", type=float, default=0.4, help="share of the gallery that v1 → v2 has moved")
    at = parser.parse_args().at
    found = load_digits()
    images, labels = (found.images * 255 / 16).round().astype(np.uint8), found.target.astype(np.int64)
    rows = np.random.default_rng(0).permutation(len(labels))
    taught, gallery = rows[:TAUGHT], rows[TAUGHT:]
    networks = [network(number, images[taught], labels[taught]) for number in range(len(VERSIONS))]
    with torch.inference_mode():
        embedded = [net(demo_models._pixels(images[gallery])) for net in networks]
        sure = networks[0].logits(embedded[0]).softmax(1).max(1).values.numpy()
    v1, v2, v3 = (each.numpy() for each in embedded)
    print("v1 → v2   v2 → v3   before   start   (against before)   end   v3 alone   verdict")
    for first in (Method.RM, Method.RQT, Method.NAIVE):
        second(first, at, v1, v2, v3, labels[gallery], sure)


def second(first: Method, at: float, v1: Vectors, v2: Vectors, v3: Vectors, labels: np.ndarray, sure: np.ndarray) -> None:
    pairs = Pairs(old=v1, new=v2, labels=labels)
    plan = Trial(pairs, confidences={"score": sure}, settings=TrainingSettings(), **COSINE).predict(first)
    seen = np.isin(np.arange(len(labels)), plan.seen) & (first is not Method.NAIVE)
    held = np.argsort(np.argsort(sure)) >= at * len(labels)  # by v1 still
    used = ~(held & seen)
    reverse = plan.fitted.reverse
    behind = OlderCollection(
        metric=Metric.COSINE,
        held=held[used],
        vectors=v1[used],
        lead=reverse.apply if reverse else lambda vectors: vectors,
        own_queries=None if reverse else v1[used],
    )
    pairs = Pairs(old=plan.fitted.final(v2)[used], new=v3[used], labels=labels[used])
    trial = Trial(
        pairs, confidences={"score": sure[used]}, settings=TrainingSettings(), seen=seen[used], behind=[behind], **COSINE
    )
    for method in (Method.RM, Method.MCL, Method.RQT, Method.NAIVE):
        told = trial.predict(method)
        low, high = (100 * bound for bound in told.start)
        print(
            f"{plan.method:10}{told.method:10}{100 * told.map_old:6.1f}{100 * told.curve.map[0]:8.1f}   "
            f"{f'[{low:+.1f}, {high:+.1f}]':17}{100 * told.curve.map[-1]:6.1f}{100 * told.map_new:10.1f}    {told.verdict}",
            flush=True,
        )


if __name__ == "__main__":
    main()
