"""HOC: an old embedding finds its own new one among those of other classes.

Biondi et al., Stationary Representations: Optimally Approximating Compatibility and Implications for Improved Model
Replacements, CVPR 2024, Eq. 4, here without its fixed simplex classifier, as HBCT compares it:

    λ CE + (1 − λ) mean_i L_i,   L_i = −μ⟨f̂_o,i, f̂_n,i⟩ + log Σ_j exp(μ⟨f̂_o,i, f̂_n,j⟩ · 1[y_i ≠ y_j]),   μ = 10, λ = 0.1

The indicator stands inside the exponential: records of i's own class, itself among them, add exp(0) = 1 each.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import normalize

MU = 10.0


def loss(new: Tensor, old: Tensor, labels: Tensor, *, mu: float = MU) -> Tensor:
    """Compute the mean of L_i over the batch, (B, d), (B, d) and (B,) to ()."""
    similarity = mu * normalize(old, dim=1) @ normalize(new, dim=1).T  # (B, B)
    same = labels[:, None] == labels[None, :]  # (B, B)
    return (similarity.masked_fill(same, 0).logsumexp(1) - similarity.diagonal()).mean()
