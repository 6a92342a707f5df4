"""Chooses the weights that a training keeps: the ones that do best on held-out pairs. The first weights compete, too."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from rmvdb.learning.method import Pairs

#: The share of the pairs that are held out, and how many of them are enough: a check costs their square.
HELD_OUT, MOST_HELD_OUT = 0.15, 1000
#: How often a training is checked, and after how many checks without a better one it ends.
CHECKS, PATIENCE = 40, 10
#: How many nearest records are compared, at most a quarter of all.
NEAREST = 10


def split(pairs: Pairs, seed: int) -> tuple[Pairs, Pairs]:
    """Return the pairs to train on, and those that are held out: 15 %, at most 1,000."""
    rows = np.random.default_rng(seed).permutation(len(pairs))
    out = min(MOST_HELD_OUT, max(2, round(HELD_OUT * len(rows))))
    return pairs.take(rows[out:]), pairs.take(rows[:out])


class Best:
    """The weights of a module that did best in a check so far."""

    def __init__(self, module: torch.nn.Module, check: Callable[[], float]) -> None:
        """Check the module as it is."""
        self._module, self._check = module, check
        self._value, self._since = -np.inf, 0
        self.look()
        #: Whether no later weights were better than the first ones.
        self.is_start = True

    @property
    def is_final(self) -> bool:
        """Tell whether the last checks found nothing better."""
        return self._since >= PATIENCE

    def look(self) -> None:
        """Check the module, and keep its weights if they are better than any before."""
        self._module.eval()
        with torch.no_grad():
            value = self._check()
        self._module.train()
        self._since += 1
        if value > self._value:
            self._value, self._since, self.is_start = value, 0, False
            self._weights = copy.deepcopy(self._module.state_dict())

    def restore(self) -> None:
        """Give the module the best weights."""
        self._module.load_state_dict(self._weights)


def nearest(distances: Tensor) -> Tensor:
    """Return, for each record, which others are its nearest, (n, n), by distances (n, n)."""
    others = distances.clone().fill_diagonal_(torch.inf)
    count = max(1, min(NEAREST, (len(others) - 1) // 4))
    near = torch.zeros_like(others, dtype=torch.bool)
    return near.scatter_(1, others.topk(count, dim=1, largest=False).indices, True)


def overlap(distances: Tensor, near: Tensor) -> float:
    """Return the share of the nearest that are among the right ones `near`, (n, n)."""
    neighbours = nearest(distances)
    return float((neighbours & near).sum() / near.sum())


def precision(distances: Tensor, relevant: Tensor) -> float:
    """Return the mean average precision of rankings by distances (Q, G), over the queries with a relevant record."""
    hits = relevant.gather(1, distances.argsort(dim=1, stable=True)).double()  # (Q, G)
    among = hits.cumsum(1) / torch.arange(1, hits.shape[1] + 1)
    counts = hits.sum(1)
    some = counts > 0
    return float(((among * hits).sum(1)[some] / counts[some]).mean()) if some.any() else 0.0
