"""Side information for FCT: an embedding learnt without labels (SimCLR, Chen et al., ICML 2020)."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import affine_grid, cross_entropy, dropout, grid_sample, normalize

TEMPERATURE = 0.5
BATCH = 256
#: The share of features that one look at them does not see.
HIDDEN = 0.3


def train(module: nn.Module, images: Tensor, *, dim: int, mirrored: bool, epochs: int, lr: float, seed: int) -> None:
    """Train a module whose embeddings have `dim` numbers on pictures of uint8 (n, 3, h, w) or features (n, width), in place."""
    torch.manual_seed(seed)
    head = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, dim)).to(images.device)
    learnt = nn.ModuleList([module, head]).train()
    optimizer = torch.optim.SGD(learnt.parameters(), lr=lr, momentum=0.9, weight_decay=5e-4)
    parts = max(1, math.ceil(len(images) / BATCH))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs * parts)
    rng = np.random.default_rng(seed)
    for _ in range(epochs):
        for rows in np.array_split(rng.permutation(len(images)), parts):
            batch = images[torch.from_numpy(rows).to(images.device)]
            views = torch.cat([view(batch, mirrored=mirrored), view(batch, mirrored=mirrored)])  # (2B, 3, h, w)
            loss = nt_xent(head(module(views)))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    module.eval()


def nt_xent(vectors: Tensor, *, temperature: float = TEMPERATURE) -> Tensor:
    """Eq. 1, (2B, d) to (): row i and row B + i are views of one picture, everything else is a negative."""
    unit = normalize(vectors, dim=1)
    logits = (unit @ unit.T / temperature).fill_diagonal_(-torch.inf)  # (2B, 2B)
    half = len(vectors) // 2
    partners = torch.arange(len(vectors), device=vectors.device).roll(half)
    return cross_entropy(logits, partners)


def view(images: Tensor, *, mirrored: bool) -> Tensor:
    """One random look at each picture, uint8 (n, 3, h, w): a part of 20 to 100 % of it, its colours shaken, one in five grey.

    Features (n, width) have no parts: a look at them sees 70 % of them.
    """
    if images.ndim == 2:
        return dropout(images, HIDDEN)
    n, device = len(images), images.device
    side = (0.2 + 0.8 * torch.rand(n, device=device)).sqrt()
    turned = torch.where(torch.rand(n, device=device) < 0.5, -1.0, 1.0) if mirrored else torch.ones(n, device=device)
    theta = torch.zeros(n, 2, 3, device=device)
    theta[:, 0, 0], theta[:, 1, 1] = side * turned, side
    theta[:, :, 2] = (2 * torch.rand(n, 2, device=device) - 1) * (1 - side)[:, None]
    grid = affine_grid(theta, list(images.shape), align_corners=False)
    seen = grid_sample(images.float(), grid, align_corners=False, padding_mode="border")
    return _shaken(seen).clamp(0, 255).round().byte()


def _shaken(x: Tensor) -> Tensor:
    brightness, contrast, saturation = (0.6 + 0.8 * torch.rand(3, len(x), 1, 1, 1, device=x.device)).unbind()
    x = x * brightness
    x = (x - x.mean((1, 2, 3), keepdim=True)) * contrast + x.mean((1, 2, 3), keepdim=True)
    grey = x.mean(1, keepdim=True)
    saturation = torch.where(torch.rand_like(saturation) < 0.2, 0.0, saturation)
    return (x - grey) * saturation + grey
