"""ℓ2: the plainest compatibility, and HBCT's first baseline (Bui et al., ICML 2025, section 5.1).

L = CE(W_n f_n, y) + λ ‖f_n − f_o‖²
"""

from __future__ import annotations

from torch import Tensor


def loss(new: Tensor, old: Tensor) -> Tensor:
    """Compute the mean of ‖f_n − f_o‖² over the batch, (B, d) and (B, d) to ()."""
    return (new - old).square().sum(1).mean()
