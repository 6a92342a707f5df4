"""The losses of "Metric Compatible Training for Online Backfilling in Large-Scale Retrieval" (Seo et al., WACV), by equation.

Each takes distance matrices (B, B), anchors in rows: `d_old[i, k] = dist(rev_i, f_o,k)`, `d_new[i, k] = dist(new_i, new_k)`,
and `same[i, k]`, whether k is of i's class. `s = exp(−dist/τ)`; the paper has no temperature, that is τ = 1.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from rmvdb.learning.losses import lorentz
from rmvdb.types import Metric

#: The logarithm of an empty sum: exp of it is 0 in float32, and, unlike −inf, it leaves gradients finite.
NOTHING = -1e9


def distances(a: Tensor, b: Tensor, *, metric: Metric, scale: float = 1.0) -> Tensor:
    """Compute distances of every a (A, d) to every b (B, d) as (A, B), in units of `scale`, the typical norm of the space.

    COSINE: 1 − cos. IP: 1 − ⟨a, b⟩. L2: half of the squared L2 distance. On the unit sphere the three are equal.
    LORENTZ, in units of 1/√K: cosh d − 1, whose gradient is finite at 0, too.
    """
    if metric is Metric.LORENTZ:
        return -lorentz.as_query(a / scale) @ (b / scale).T - 1
    if metric is Metric.COSINE:
        a, b, scale = torch.nn.functional.normalize(a, dim=1), torch.nn.functional.normalize(b, dim=1), 1.0
    dots = (a / scale) @ (b / scale).T  # (A, B)
    if metric is not Metric.L2:
        return 1 - dots
    squares_a, squares_b = a.square().sum(1) / scale**2, b.square().sum(1) / scale**2  # (A,), (B,)
    return ((squares_a[:, None] + squares_b[None, :]) / 2 - dots).clamp_min(0)


def paired(a: Tensor, b: Tensor, *, metric: Metric, scale: float = 1.0) -> Tensor:
    """Compute distances of a_i to b_i, (B, d) and (B, d) to (B,): the diagonal of `distances`."""
    if metric is Metric.L2:
        return (a - b).square().sum(1) / (2 * scale**2)
    if metric is Metric.LORENTZ:
        return lorentz.inner(a - b, a - b) / (2 * scale**2)
    if metric is Metric.COSINE:
        a, b, scale = torch.nn.functional.normalize(a, dim=1), torch.nn.functional.normalize(b, dim=1), 1.0
    return 1 - (a * b).sum(1) / scale**2


def rqt(d_pair: Tensor) -> Tensor:
    """Compute Eq. 9: the mean of dist(ψ(f_n), f_o) over the batch, (B,) to ()."""
    return d_pair.mean()


def cl_s(d_old: Tensor, same: Tensor, *, temperature: float = 1.0, mining: bool = True) -> Tensor:
    """Compute Eq. 10: −log P_old / (P_old + N_old), mean over the anchors."""
    p_old, n_old = _old(d_old, same, temperature, mining)
    return _term(p_old, n_old)


def cl_m(d_old: Tensor, d_new: Tensor, same: Tensor, *, temperature: float = 1.0, mining: bool = True) -> Tensor:
    """Compute Eq. 14: −log P_old / (P_old + N_old) − log P_new / (P_new + N_new), mean over the anchors."""
    p_old, n_old = _old(d_old, same, temperature, mining)
    p_new, n_new = _new(d_new, same, temperature, mining)
    return _term(p_old, n_old) + _term(p_new, n_new)


def mcl(d_old: Tensor, d_new: Tensor, same: Tensor, *, temperature: float = 1.0, mining: bool = True) -> Tensor:
    """Compute Eq. 11: −log P_old / (P_old + N_old + N_new) − log P_new / (P_new + N_new + N_old), mean over the anchors."""
    p_old, n_old = _old(d_old, same, temperature, mining)
    p_new, n_new = _new(d_new, same, temperature, mining)
    negatives = torch.logaddexp(n_old, n_new)  # (B,)
    return _term(p_old, negatives) + _term(p_new, negatives)


def hardest_half(d: Tensor, allowed: Tensor, *, farthest: bool) -> Tensor:
    """Choose by footnote 2: of each anchor's allowed k the farther (or nearer) half, rounded up, as (B, B) bool.

    Ties at the end of the half are all chosen.
    """
    keys = (-d if farthest else d).detach().masked_fill(~allowed, torch.inf)  # (B, B): the hardest are the smallest
    # numpy sorts rows ten times as fast as torch does on a CPU, and this is most of a step's time.
    ranked = torch.from_numpy(np.sort(keys.cpu().numpy(), axis=1)).to(keys.device)  # (B, B)
    end = ((allowed.sum(1, keepdim=True) + 1) // 2 - 1).clamp_min(0)  # (B, 1)
    return allowed & (keys <= ranked.gather(1, end))


def _old(d_old: Tensor, same: Tensor, temperature: float, mining: bool) -> tuple[Tensor, Tensor]:
    # The pair (i, i) counts: rev_i and f_o,i come from different models.
    return _sums(d_old, same, ~same, temperature, mining)


def _new(d_new: Tensor, same: Tensor, temperature: float, mining: bool) -> tuple[Tensor, Tensor]:
    self_pair = torch.eye(len(same), dtype=torch.bool, device=same.device)
    return _sums(d_new, same & ~self_pair, ~same, temperature, mining)


def _sums(d: Tensor, positive: Tensor, negative: Tensor, temperature: float, mining: bool) -> tuple[Tensor, Tensor]:
    """Return the logarithms of P and N, (B,) each; NOTHING if an anchor has none."""
    if mining:
        positive, negative = hardest_half(d, positive, farthest=True), hardest_half(d, negative, farthest=False)
    logs = -d / temperature  # (B, B)
    return torch.logsumexp(logs.masked_fill(~positive, NOTHING), 1), torch.logsumexp(logs.masked_fill(~negative, NOTHING), 1)


def _term(positives: Tensor, negatives: Tensor) -> Tensor:
    """Compute the mean of −log P / (P + N) over the anchors that have a positive; 0 if none has."""
    anchors = positives > NOTHING / 2  # (B,)
    losses = torch.nn.functional.softplus(negatives - positives)  # −log P/(P+N) = log(1 + N/P)
    return torch.where(anchors, losses, 0).sum() / anchors.sum().clamp_min(1)
