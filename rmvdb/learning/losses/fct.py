"""FCT: the loss of h, which lifts an old gallery into the new space (Ramanujan et al., CVPR 2022, section 3).

L = ‖φ_new(x) − h(φ_old(x), side(x))‖², in the terms of the new space: on vectors of length 1, half of it is 1 − cos.
"""

from __future__ import annotations

from torch import Tensor

from rmvdb.learning.losses.rank_merge import paired
from rmvdb.types import Metric


def loss(lifted: Tensor, new: Tensor, *, metric: Metric, scale: float = 1.0) -> Tensor:
    """Compute the mean over the batch, (B, d) and (B, d) to (). `scale` is the typical norm of the new space.

    An IP gallery ranks by the length of its records, too. Its loss is half of the squared L2 distance.
    """
    return paired(lifted, new, metric=Metric.L2 if metric is Metric.IP else metric, scale=scale).mean()
