"""Embedders of texts and of pictures, good ones and bad ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image

from rmvdb.types import Item, Vectors


def pixels(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image.resize((8, 8)), np.float32)).permute(2, 0, 1) / 255


def small_net(*, seed: int = 0, dim: int = 4) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Dropout(0.5), torch.nn.Flatten(), torch.nn.Linear(144, dim)
    )


def pictures(n: int) -> list[Image.Image]:
    values = np.random.default_rng(0).integers(0, 256, (n, 16, 16, 3), dtype=np.uint8)
    return [Image.fromarray(value) for value in values]


class Words:
    """Embeds texts; `bad` raises and `nan` gives NaN, as real embedders do."""

    def __init__(self, *, dim: int = 3) -> None:
        self.dim = dim
        self.calls = 0

    def embed(self, items: Sequence[Item]) -> Vectors:
        self.calls += 1
        if "bad" in items:
            raise ValueError("bad cannot be read")
        vectors = np.array([[len(item), hash_of(item), 1][: self.dim] for item in items], np.float32).reshape(-1, self.dim)
        vectors[[item == "nan" for item in items], 0] = np.nan
        vectors[[item == "inf" for item in items], 1] = -np.inf
        return vectors


def hash_of(text: str) -> int:
    return sum(map(ord, text)) % 97


class Gives:
    """An embedder that gives what it was told to."""

    def __init__(self, output: Callable[[Sequence[Item]], Any]) -> None:
        self.embed = output
