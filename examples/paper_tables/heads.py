"""Heads on the features of frozen networks: models that are strong and learn in seconds on a CPU."""

from __future__ import annotations

from torch import Tensor, nn

from examples.paper_tables.features import COMPONENTS, columns

HIDDEN = 256
#: Features that are hidden from a head at random while it learns.
DROPOUT = 0.5


class Head(nn.Module):
    """Features (n, widths) of a task to embeddings (n, dim), by those of one network."""

    def __init__(self, name: str, *, dim: int) -> None:
        super().__init__()
        self.columns = columns(name)
        self.body = nn.Sequential(
            nn.BatchNorm1d(COMPONENTS, affine=False),
            nn.Dropout(DROPOUT),
            nn.Linear(COMPONENTS, HIDDEN),
            nn.BatchNorm1d(HIDDEN),
            nn.ReLU(),
            nn.Linear(HIDDEN, dim),
        )

    def forward(self, seen: Tensor) -> Tensor:
        embeddings: Tensor = self.body(seen[:, self.columns])
        return embeddings
