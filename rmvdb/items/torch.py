"""Embedders that run a torch module. Only making one imports torch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rmvdb.items.check import as_array, wrong_shape
from rmvdb.items.pictures import read_item
from rmvdb.types import Item, Vectors

if TYPE_CHECKING:
    import torch


class TorchEmbedder:
    """A torch module with its preprocessing, in batches, without gradients, in evaluation mode, float32 out.

    Many threads may use one: they prepare items at the same time and run the module in turn.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        preprocess: Callable[[Any], Any],
        *,
        dim: int | None = None,
        device: str = "auto",
        batch_size: int = 64,
        read: Callable[[Item], Any] = read_item,
    ) -> None:
        """Move the module to `device` ("auto": CUDA, Apple's GPU or the CPU).

        `preprocess` makes a tensor (or an array) from what `read` returns: a PIL image in RGB, a text, or the item itself.
        If you give `dim`, another dimension raises ModelError.
        """
        self.device = _device(device)
        self.module = module.to(self.device).eval()
        self.dim = dim
        self.batch_size = batch_size
        self._preprocess = preprocess
        self._read = read
        self._lock = threading.Lock()

    def embed(self, items: Sequence[Item]) -> Vectors:
        """Return vectors (n, dim) of n items, in order. Errors of reading and preprocessing pass through."""
        starts = range(0, len(items), self.batch_size)
        parts = [self._embed_batch(items[start : start + self.batch_size]) for start in starts]
        return np.concatenate(parts) if parts else np.empty((0, self.dim or 0), np.float32)

    def _embed_batch(self, items: Sequence[Item]) -> Vectors:
        import torch

        batch = torch.stack([torch.as_tensor(self._preprocess(self._read(item))) for item in items])  # (n, …)
        with self._lock, torch.inference_mode():
            output = self.module(batch.to(self.device))  # (n, dim)
        vectors = as_array(output)
        if vectors.ndim != 2 or (self.dim is not None and vectors.shape[1] != self.dim):
            raise wrong_shape(vectors, len(items), self.dim)
        return vectors


def _device(name: str) -> torch.device:
    import torch

    if name != "auto":
        return torch.device(name)
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
