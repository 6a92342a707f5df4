"""HBCT: in hyperbolic space the new embedding lies in the cone of the old one, which pulls as far as it is certain.

Bui et al., Learning Along the Arrow of Time: Hyperbolic Geometry for Backward-Compatible Representation Learning, ICML 2025:

    Eq. 13  L = CE of the hyperbolic classifier (Eq. 9) + λ (L_entail + L_contrast), λ = 0.3

h_n and h_o are points of the Lorentz model: both models end in `lorentz.Lift`. Retrieval is by d_L.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from rmvdb.learning.losses import lorentz

TEMPERATURE = 0.5
BETA = 0.01


class Classifier(nn.Module):
    """Eq. 9: hyperbolic multinomial logistic regression, points (n, d + 1) to logits (n, C).

    A class is a hyperplane with normal w ∈ R^d, shifted by a ∈ R from the origin; its logit is ‖w‖ times the signed distance:
    (‖w‖/√K) arcsinh( √K (cosh(√K a)⟨w, h_space⟩ − sinh(√K a)‖w‖h_time) / ‖w‖ ).
    """

    def __init__(self, dim: int, classes: int, *, curvature: float = 1.0, steepness: float = 1.0) -> None:
        """Take d as `dim`, without the time. The normals begin `steepness` times as long as usual.

        A point that is clipped to ζ has no logit above about ‖w‖ζ: all classes begin level, and the normals must grow before the
        classes separate. In 200 epochs they do. A training of a few epochs needs longer normals, and then the pull towards an old
        model weighs less.
        """
        super().__init__()
        self.curvature = curvature
        self.normal = nn.Parameter(torch.empty(classes, dim).uniform_(-1, 1) * steepness / math.sqrt(dim))
        self.shift = nn.Parameter(torch.empty(classes).uniform_(-1, 1) / math.sqrt(dim))

    def forward(self, h: Tensor) -> Tensor:
        """Return the logits of every class."""
        root = math.sqrt(self.curvature)
        length = self.normal.norm(dim=1).clamp_min(1e-12)  # (C,)
        time, space = h[..., :1], h[..., 1:]  # (n, 1), (n, d)
        along = space @ self.normal.T / length  # (n, C)
        shift = root * self.shift
        logits: Tensor = length / root * torch.asinh(root * (shift.cosh() * along - shift.sinh() * time))
        return logits


def entailment(new: Tensor, old: Tensor, *, epsilon: float = 0.1, curvature: float = 1.0) -> Tensor:
    """Compute section 4.2: the mean of max(0, ext(h_o, h_n) − aper(h_o)), points (B, d + 1) twice to ()."""
    angle = lorentz.exterior_angle(old, new, curvature=curvature)  # (B,)
    return (angle - lorentz.aperture(old, epsilon=epsilon, curvature=curvature)).clamp_min(0).mean()


def contrast(new: Tensor, old: Tensor, *, temperature: float = TEMPERATURE, beta: float = BETA, curvature: float = 1.0) -> Tensor:
    """Compute Eq. 12 (RINCE), the mean over the batch, points (B, d + 1) twice to ():

    −(1/q) e^{−q d(h_n, h_o)} + (1/q) (β Σ_{h'_o ∈ B} e^{−d(h_n, h'_o)})^q, with d = d_L/τ and q = Uncertainty(h_o).
    """
    q = lorentz.uncertainty(old, curvature=curvature)  # (B,)
    own = lorentz.distance(new, old, curvature=curvature) / temperature  # (B,)
    others = lorentz.distances(new, old, curvature=curvature) / temperature  # (B, B)
    everything = math.log(beta) + (-others).logsumexp(1)  # (B,)
    # As q goes to 0 both terms go to infinity and their difference to InfoNCE, so 1/q is taken off each.
    return ((torch.expm1(q * everything) - torch.expm1(-q * own)) / q).mean()


def loss(new: Tensor, old: Tensor, *, temperature: float = TEMPERATURE, curvature: float = 1.0) -> Tensor:
    """Compute L_entail + L_contrast, points (B, d + 1) twice to ()."""
    return entailment(new, old, curvature=curvature) + contrast(new, old, temperature=temperature, curvature=curvature)
