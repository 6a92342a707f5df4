"""Made-up pictures of the papers' data sets."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from examples.paper_tables.data import Pictures

CLASSES, EACH = 6, 40
#: A folder's reader of pictures that a small network can tell apart: each class has its own colours.
READER = f"""
import numpy as np

def cifar100(split):
    rng = np.random.default_rng(split == "test")
    labels = np.tile(np.arange({CLASSES}), {EACH})
    colours = np.random.default_rng(7).integers(40, 215, ({CLASSES}, 1, 1, 3))
    images = colours[labels] + rng.integers(-40, 40, (len(labels), 32, 32, 3))
    return images.astype(np.uint8), labels, [str(n) for n in range({CLASSES})]

def omniglot():
    labels = np.repeat(np.arange(16), 6)
    names = [f"alphabet{{n // 4}}/character{{n % 4}}" for n in range(16)]
    ink = np.zeros((96, 105, 105), dtype=bool)
    ink[:, :50] = True
    ink |= np.random.default_rng(0).random((96, 1, 105)) < 0.3
    return ink, labels, np.tile(np.arange(6), 16), np.array(names), np.arange(16) < 12
"""


def made(labels: list[int], **rest: np.ndarray) -> Pictures:
    """Return pictures of noise with these labels."""
    images = np.random.default_rng(0).integers(0, 256, (len(labels), 3, 32, 32), dtype=np.uint8)
    return Pictures(images=images, labels=np.array(labels), **rest)


def written(path: Path, colour: int | np.ndarray) -> None:
    """Write a picture of one colour, or of these."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.broadcast_to(colour, (20, 10, 3)).astype(np.uint8)).save(path)
