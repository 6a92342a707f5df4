"""RACT: the new embedding is drawn to its old one and kept from other classes, old and new.

Zhang et al., Hot-Refresh Model Upgrades with Regression-Alleviating Compatible Training in Image Retrieval, ICLR 2022:

    L_i = −log( e^{s_ii/τ} / (e^{s_ii/τ} + Σ_{k: y_k≠y_i} e^{⟨f̂_n,i, f̂_o,k⟩/τ} + Σ_{k: y_k≠y_i} e^{⟨f̂_n,i, f̂_n,k⟩/τ}) )

with s_ii = ⟨f̂_n,i, f̂_o,i⟩, and only the 10 nearest of each of the two kinds of negatives.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize

#: The paper tries 0.01 to 1; its code starts from this.
TEMPERATURE = 0.05


def loss(new: Tensor, old: Tensor, labels: Tensor, *, temperature: float = TEMPERATURE, hardest: int = 10) -> Tensor:
    """Compute the mean of L_i over the batch, (B, d), (B, d) and (B,) to (); 0 for an anchor without negatives."""
    new, old = normalize(new, dim=1), normalize(old, dim=1)
    same = labels[:, None] == labels[None, :]  # (B, B)
    positive = (new * old).sum(1, keepdim=True)  # (B, 1)
    negatives = [_hardest(new @ others.T, same, hardest) for others in (old, new)]  # (B, ≤ hardest) each
    logits = torch.cat([positive, *negatives], dim=1) / temperature
    return (logits.logsumexp(1) - logits[:, 0]).mean()


def _hardest(similarity: Tensor, same: Tensor, count: int) -> Tensor:
    """Return the `count` nearest of other classes, filled up with −inf."""
    return similarity.masked_fill(same, -torch.inf).topk(min(count, len(same)), dim=1).values
