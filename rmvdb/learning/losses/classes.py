"""What a class looks like in an embedding space."""

from __future__ import annotations

import torch
from torch import Tensor


def class_means(vectors: Tensor, labels: Tensor, *, classes: int) -> tuple[Tensor, Tensor]:
    """The mean (C, d) of each class's vectors (n, d), and how many it has (C,); 0 where it has none.

    Records of other classes than the first C count for nothing.
    """
    known = labels < classes  # (n,)
    vectors, labels = vectors[known], labels[known]
    counts = torch.bincount(labels, minlength=classes)
    sums = vectors.new_zeros(classes, vectors.shape[1]).index_add(0, labels, vectors)
    return sums / counts.clamp_min(1)[:, None], counts
