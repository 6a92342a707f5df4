"""Hyperbolic space in the Lorentz model, as HBCT uses it (Bui et al., ICML 2025, section 2.2; curvature −K).

A point is h = [h_time, h_space] of d + 1 numbers with ⟨h, h⟩_L = −1/K, where ⟨x, y⟩_L = ⟨x_space, y_space⟩ − x_time y_time.
A function of pairs takes (n, d + 1) twice and gives (n,); its plural takes (A, d + 1) and (B, d + 1) and gives (A, B).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


def exp0(z: Tensor, *, curvature: float = 1.0) -> Tensor:
    """Compute Eq. 5 at the origin, (n, d) to (n, d + 1): [cosh(√K‖z‖)/√K, sinh(√K‖z‖)/(√K‖z‖) · z]."""
    root = math.sqrt(curvature)
    length = root * z.norm(dim=-1, keepdim=True)  # (n, 1)
    safe = length.clamp_min(1e-12)  # sinh(x)/x is 1 there, and its gradient finite
    return torch.cat([length.cosh() / root, safe.sinh() / safe * z], dim=-1)


class Lift(nn.Module):
    """The end of a hyperbolic model: embeddings z (n, d) to points (n, d + 1).

    It divides z by √d and then shortens it to ζ at most, which keeps everything well-conditioned (section 4.4). The paper takes
    ζ = 1.0 for the old model and 0.2 more for the next one.
    """

    def __init__(self, *, zeta: float = 1.0, curvature: float = 1.0) -> None:
        super().__init__()
        self.zeta = zeta
        self.curvature = curvature

    def forward(self, z: Tensor) -> Tensor:
        """Return exp0 of the clipped z."""
        z = z / math.sqrt(z.shape[-1])
        length = z.norm(dim=-1, keepdim=True).clamp_min(1e-12)
        return exp0(z * (self.zeta / length).clamp_max(1), curvature=self.curvature)


def inner(x: Tensor, y: Tensor) -> Tensor:
    """Compute Eq. 1: ⟨x, y⟩_L of pairs."""
    return (x[..., 1:] * y[..., 1:]).sum(-1) - x[..., 0] * y[..., 0]


def as_query(h: Tensor) -> Tensor:
    """Return [−h_time, h_space]: its plain inner product with a stored point is ⟨·,·⟩_L, so the metric IP ranks by distance."""
    return torch.cat([-h[..., :1], h[..., 1:]], dim=-1)


def distance(x: Tensor, y: Tensor, *, curvature: float = 1.0) -> Tensor:
    """Compute Eq. 3 of pairs: arccosh(−K⟨x, y⟩_L)/√K, from x − y, so that near points keep their digits."""
    difference = x - y
    rounding = torch.finfo(x.dtype).eps ** 2
    return _arccosh1p(curvature / 2 * inner(difference, difference), rounding) / math.sqrt(curvature)


def distances(x: Tensor, y: Tensor, *, curvature: float = 1.0) -> Tensor:
    """Compute Eq. 3 of every x with every y. In float32 it is noise below about 1e-3."""
    return _arccosh1p(-curvature * (as_query(x) @ y.T) - 1, torch.finfo(x.dtype).eps) / math.sqrt(curvature)


def _arccosh1p(u: Tensor, rounding: float) -> Tensor:
    """Compute arccosh(1 + u); 0, without a gradient, if u is only rounding."""
    some = u > rounding
    v = torch.where(some, u, 1.0)  # a gradient of infinity, times 0, would be NaN
    return torch.where(some, torch.log1p(v + v.sqrt() * (v + 2).sqrt()), 0.0)


def uncertainty(h: Tensor, *, curvature: float = 1.0) -> Tensor:
    """Compute Eq. 10: 1 − ‖h_space‖/h_time, (n, d + 1) to (n,); 1 at the origin, towards 0 far out.

    It is written as 1/(K h_time (h_time + ‖h_space‖)), which is the same on the hyperboloid and loses no digits far out.
    """
    time, length = h[..., 0], h[..., 1:].norm(dim=-1)
    result: Tensor = 1 / (curvature * time * (time + length))
    return result


def aperture(h: Tensor, *, epsilon: float = 0.1, curvature: float = 1.0) -> Tensor:
    """Compute Eq. 11: half the angle of h's entailment cone, (n, d + 1) to (n,); π/2 if ‖h_space‖ is below 2ε/√K."""
    sine: Tensor = 2 * epsilon / (math.sqrt(curvature) * h[..., 1:].norm(dim=-1))  # (n,)
    return sine.clamp_max(1).asin()


def exterior_angle(apex: Tensor, point: Tensor, *, curvature: float = 1.0) -> Tensor:
    """Compute ext(apex, point) = π − ∠(origin, apex, point) of pairs, in 0 … π; 0 for the apex itself.

    The paper prints it as an arccos. Its sine and cosine, times the same length, are ‖p⊥‖ and √K(h_time p∥ − ‖h_space‖ p_time),
    where p∥ and p⊥ are the parts of the point's space along and across the apex's: their arctan has no pole and needs no clamp.
    """
    length = apex[..., 1:].norm(dim=-1)
    direction = apex[..., 1:] / length.clamp_min(1e-12)[..., None]
    along = (direction * point[..., 1:]).sum(-1)
    across = (point[..., 1:] - along[..., None] * direction).norm(dim=-1)
    outwards = math.sqrt(curvature) * (apex[..., 0] * along - length * point[..., 0])
    apart = across.square() + outwards.square() > 1e-8  # nearer than that the angle is noise and its gradient has no bound
    return torch.where(apart, torch.atan2(across, torch.where(apart, outwards, 1.0)), 0.0)


def holds(h: Tensor, *, curvature: float = 1.0) -> bool:
    """Tell whether ⟨h, h⟩_L is −1/K for all (n, d + 1), as far as rounding allows."""
    deviation = (curvature * inner(h, h) + 1).abs() / (1 + curvature * h[..., 0].square())  # (n,)
    return bool((deviation < 1e-3).all() and (h[..., 0] > 0).all())
