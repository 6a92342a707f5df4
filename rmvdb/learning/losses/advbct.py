"""AdvBCT: the new embeddings cannot be told from the old ones, and each stays near the old centre of its class.

Pan et al., Boundary-Aware Backward-Compatible Representation via Adversarial Learning in Image Retrieval, CVPR 2023:

    L = CE + L_b + L_adv · (E − e + 1)/E in epoch e = 1 … E

    L_adv = CE(D(R_α(f_n)), new) + CE(D(f_o), old), D a discriminator d → 100 → 2, R_α the gradient reversal,
            α = 2/(1 + e^{−10p}) − 1, p the share of the training that is done
    L_b   = mean over the violators of max(‖f̂_n − c_y‖ − r_y, 0), c_y the mean of f̂_o over class y,
            r_y = r_y^max ± σ(w_y)·|r_y^max − T|, plus where r_y^max < T; w is learnt, T = 1
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from rmvdb.learning.losses.classes import class_means

HIDDEN = 100
#: T: the radius that a class's boundary may move towards.
THRESHOLD = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """The progress of a training."""

    #: p: the share that is done, 0 … below 1.
    done: float
    #: (E − e + 1)/E: 1 in the first epoch, 1/E in the last.
    left: float


class _Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, alpha: float) -> Tensor:
        ctx.alpha = alpha
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return -ctx.alpha * grads[0], None


def reverse_gradient(x: Tensor, alpha: float) -> Tensor:
    """Apply R_α: return x unchanged, and multiply its gradient by −α."""
    result: Tensor = _Reverse.apply(x, alpha)  # type: ignore[no-untyped-call]
    return result


def strength(done: float) -> float:
    """Return α, how strongly the model works against the discriminator once the share `done` of the training is done."""
    return 2 / (1 + math.exp(-10 * done)) - 1


class Discriminator(nn.Sequential):
    """Embeddings (B, d) to logits (B, 2): new, old."""

    def __init__(self, dim: int) -> None:
        super().__init__(nn.Linear(dim, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 2))


def adversarial(new: Tensor, old: Tensor, discriminator: nn.Module, *, alpha: float) -> Tensor:
    """Compute L_adv, (B, d) and (B, d) to (). Lowering it teaches the discriminator and makes `new` look like `old`."""
    is_new = torch.zeros(len(new), dtype=torch.long, device=new.device)
    guesses = discriminator(reverse_gradient(new, alpha)), discriminator(old)  # (B, 2) each
    return cross_entropy(guesses[0], is_new) + cross_entropy(guesses[1], 1 - is_new)


class Boundary(nn.Module):
    """L_b: a ball around the old centre of each class, whose radius is learnt between r_y^max and T."""

    centres: Tensor
    largest: Tensor
    known: Tensor

    def __init__(self, old: Tensor, labels: Tensor, *, classes: int) -> None:
        """Take f_o (n, d) and the labels (n,) of the first C classes. A class with fewer than two records has no ball."""
        super().__init__()
        unit = normalize(old, dim=1)
        centres, counts = class_means(unit, labels, classes=classes)
        inside = labels < classes
        distances = (unit[inside] - centres[labels[inside]]).norm(dim=1)
        self.register_buffer("centres", centres)  # (C, d)
        self.register_buffer("largest", distances.new_zeros(classes).scatter_reduce(0, labels[inside], distances, "amax"))
        self.register_buffer("known", counts > 1)  # (C,)
        self.weight = nn.Parameter(torch.empty(classes).uniform_(-1, 1))

    def radii(self) -> Tensor:
        """Return r_y of every class, (C,). One line covers plus and minus: from r_y^max towards T."""
        return self.largest + self.weight.sigmoid() * (THRESHOLD - self.largest)

    def forward(self, new: Tensor, labels: Tensor) -> Tensor:
        """Map (B, d) and (B,) to (); 0 if no embedding is outside its ball."""
        inside = labels < len(self.known)
        new, labels = new[inside], labels[inside]
        distances = (normalize(new, dim=1) - self.centres[labels]).norm(dim=1)
        excess: Tensor = ((distances - self.radii()[labels]) * self.known[labels]).clamp_min(0)
        return excess.sum() / (excess > 0).sum().clamp_min(1)


class AdvBCT(nn.Module):
    """L_b + L_adv · (E − e + 1)/E, with its own parameters: the discriminator and the radii."""

    def __init__(self, old: Tensor, labels: Tensor, *, classes: int) -> None:
        """Take f_o (n, d) and the labels (n,) of the training data. The old model knows the first C classes."""
        super().__init__()
        self.discriminator = Discriminator(old.shape[1])
        self.boundary = Boundary(old, labels, classes=classes)

    def forward(self, new: Tensor, old: Tensor, labels: Tensor, at: Moment) -> Tensor:
        """Map (B, d), (B, d) and (B,) to ()."""
        told_apart = adversarial(new, old, self.discriminator, alpha=strength(at.done))
        outside: Tensor = self.boundary(new, labels)
        return outside + at.left * told_apart
