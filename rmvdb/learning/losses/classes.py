"""Class means in an embedding space."""

from __future__ import annotations

import torch
from torch import Tensor


def class_means(vectors: Tensor, labels: Tensor, *, classes: int) -> tuple[Tensor, Tensor]:
    """Return each class's mean vector (C, d) and its number of records (C,), from vectors (n, d). A class without records has 0.

    Only the first C classes count.
    """
    known = labels < classes  # (n,)
    vectors, labels = vectors[known], labels[known]
    counts = torch.bincount(labels, minlength=classes)
    sums = vectors.new_zeros(classes, vectors.shape[1]).index_add(0, labels, vectors)
    return sums / counts.clamp_min(1)[:, None], counts
