"""BCT: the old classifier must work on the new embeddings.

Shen et al., Towards Backward-Compatible Representation Learning, CVPR 2020:

    L = CE(W_n f_n, y) + λ CE(W_o f_n, y), λ = 1, the second term over the samples of old classes

If the new classes are not the old ones, W_o is made of the mean of f_o over each class of the new data.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from rmvdb.learning.losses.classes import class_means


def loss(new: Tensor, labels: Tensor, classifier: Callable[[Tensor], Tensor]) -> Tensor:
    """Compute CE(W_o f_n, y), the mean over the samples whose class the old classifier knows; 0 if the batch has none.

    `new` is (B, d), `labels` (B,); `classifier` turns (B, d) into logits of the first classes (B, C_old).
    """
    logits = classifier(new)  # (B, C_old)
    known = labels < logits.shape[1]  # (B,)
    return nn.functional.cross_entropy(logits[known], labels[known], reduction="sum") / known.sum().clamp_min(1)


class Prototypes(nn.Module):
    """W_o made of class means: (B, d) to logits (B, C). A class without records is never chosen."""

    weight: Tensor
    known: Tensor

    def __init__(self, old: Tensor, labels: Tensor) -> None:
        """Take f_o (n, d) and the labels (n,) of the new data."""
        super().__init__()
        weight, counts = class_means(old, labels, classes=int(labels.max()) + 1)
        self.register_buffer("weight", weight)  # (C, d)
        self.register_buffer("known", counts > 0)  # (C,)

    def forward(self, new: Tensor) -> Tensor:
        """Return the logits W_o f_n."""
        return (new @ self.weight.T).masked_fill(~self.known, -torch.inf)
