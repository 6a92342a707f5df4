"""The demo's pictures in four parts that share nothing, by a fixed seed.

    taught    the two models learn from these; never in the gallery
    labelled  in the gallery with their class: the plan trains ψ and ρ and calibrates on these
    plain     in the gallery without a class: their ranks are the measured quality
    queries   the demo searches for these; never in the gallery

So neither the queries nor the records that the curve is measured on were seen by a model, by training or by calibration.
"""

from __future__ import annotations

import runpy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image


@dataclass(frozen=True, kw_only=True)
class Part:
    """Pictures (n, side, side[, 3]) of uint8 and their classes (n,)."""

    images: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)

    def of_classes(self, count: int) -> Part:
        """Return the pictures of the first classes."""
        chosen = self.labels < count
        return Part(images=self.images[chosen], labels=self.labels[chosen])


@dataclass(frozen=True, kw_only=True)
class Pictures:
    """A set of pictures in its parts, and what suits it."""

    name: str
    classes: int
    taught: Part
    labelled: Part
    plain: Part
    queries: Part
    #: Channels of the blocks of v1 and of v2, dimensions, and how often each goes through its training pictures.
    widths: tuple[tuple[int, ...], tuple[int, ...]]
    dims: tuple[int, int]
    epochs: tuple[int, int]
    #: Records in a batch, and seconds that the backfill shall last, so that it can be watched.
    batch: int
    backfill: float


def digits(seed: int) -> Pictures:
    """scikit-learn's handwritten digits: 1,797 pictures of 8 x 8, which come with the package."""
    from sklearn.datasets import load_digits

    found = load_digits()
    whole = Part(images=(found.images * 255 / 16).round().astype(np.uint8), labels=found.target.astype(np.int64))
    taught, labelled, plain, queries = _split(whole, (600, 500, 500, 197), seed)
    return Pictures(
        name="handwritten digits",
        classes=10,
        taught=taught,
        labelled=labelled,
        plain=plain,
        queries=queries,
        widths=((4, 8), (16, 32)),
        dims=(32, 64),
        epochs=(15, 25),
        batch=20,
        backfill=35.0,
    )


def cifar100(folder: Path, seed: int) -> Pictures:
    """CIFAR-100 as `load.py` in a folder reads it: `cifar100("train" or "test")` gives images, labels and the classes' names."""
    load = _reader(folder / "load.py")
    taught = Part(**dict(zip(("images", "labels"), load("train")[:2], strict=True)))
    test = Part(**dict(zip(("images", "labels"), load("test")[:2], strict=True)))
    labelled, plain, queries = _split(test, (5000, 2000, 300), seed)
    return Pictures(
        name="CIFAR-100",
        classes=100,
        taught=taught,
        labelled=labelled,
        plain=plain,
        queries=queries,
        widths=((12, 24, 48), (24, 48, 96)),
        dims=(64, 128),
        epochs=(2, 3),
        batch=100,
        backfill=180.0,
    )


def write(pictures: Pictures, folder: Path) -> None:
    """The gallery as photos/{id}.png, labelled ones first, and the queries as queries/{number}.png."""
    for name, parts in (("photos", (pictures.labelled, pictures.plain)), ("queries", (pictures.queries,))):
        (folder / name).mkdir()
        for number, image in enumerate(image for part in parts for image in part.images):
            Image.fromarray(image).save(folder / name / f"{number}.png")


def _split(whole: Part, sizes: tuple[int, ...], seed: int) -> list[Part]:
    rows = np.random.default_rng(seed).permutation(len(whole))
    cuts = np.cumsum(sizes)
    chosen = np.split(rows[: cuts[-1]], cuts[:-1])
    return [Part(images=whole.images[each], labels=whole.labels[each]) for each in chosen]


def _reader(path: Path) -> Callable[..., Any]:
    if not path.is_file():
        raise SystemExit(f"{path} is not there; name a folder whose load.py has cifar100(split)")
    return runpy.run_path(str(path))["cifar100"]
