"""Points of hyperbolic space in the Lorentz model (Bui et al., ICML 2025, section 2.2), in an engine with inner products.

A point is h = [h_time, h_space], (d + 1,), with h_time > 0 and ⟨h, h⟩_L = ‖h_space‖² − h_time² = −1/K. The inner product of
[−h_time, h_space] with a stored point is ⟨·, ·⟩_L, and Eq. 3, d_L = arccosh(−K⟨·, ·⟩_L)/√K, falls with it: a collection with the
metric IP ranks by d_L. The query tells K. In float32, distances below about 1e-3 are noise.

This file uses numpy, so that an application that searches needs no torch. `losses.lorentz` has the same with gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from rmvdb.types import Hit, Vectors

Floats = npt.NDArray[np.float64]


def hold(points: Vectors) -> npt.NDArray[np.bool_]:
    """Tell which rows lie on one common hyperboloid, as far as rounding allows: (n, d + 1) to (n,)."""
    time = points[:, 0].astype(np.float64)
    square = _negative_square(points)  # (n,) 1/K
    close = np.abs(square - np.median(square)) <= 1e-3 * np.square(time)
    return np.asarray((np.median(square) > 0) & (time > 0) & close, dtype=np.bool_)


def as_queries(points: Vectors) -> Vectors:
    """Return the queries that an engine with inner products takes for these points, (n, d + 1): their time is negated."""
    return np.concatenate([-points[:, :1], points[:, 1:]], axis=1)


def distances(queries: Vectors, gallery: Vectors) -> npt.NDArray[np.float32]:
    """Compute Eq. 3 of every query (Q, d + 1) to every point of the gallery (G, d + 1), as (Q, G)."""
    products = (as_queries(queries) @ gallery.T).astype(np.float64)
    return _geodesic(products, _negative_square(queries)[:, None]).astype(np.float32)


def measured(hits_of_queries: Sequence[Sequence[Hit]], queries: Vectors) -> list[list[Hit]]:
    """Give the hits of an inner-product search with `as_queries(queries)` their distance on the hyperboloid."""
    squares = _negative_square(queries)
    lengths = [
        _geodesic(-np.array([hit.distance for hit in hits]), square)
        for hits, square in zip(hits_of_queries, squares, strict=True)
    ]
    return [
        [replace(hit, distance=float(length)) for hit, length in zip(hits, row, strict=True)]
        for hits, row in zip(hits_of_queries, lengths, strict=True)
    ]


def certainty(points: Vectors) -> npt.NDArray[np.float32]:
    """Compute ‖h_space‖/h_time, 1 − Eq. 10, (n, d + 1) to (n,): 0 at the origin, towards 1 far out."""
    length = np.linalg.norm(points[:, 1:].astype(np.float64), axis=1)
    return np.asarray(length / np.maximum(points[:, 0], 1e-12), dtype=np.float32)


def flat(points: Vectors) -> Vectors:
    """Return the points' coordinates in the tangent space at the origin, log_0: (n, d + 1) to (n, d), lengths kept."""
    unit = np.sqrt(np.maximum(_negative_square(points), 1e-12))[:, None]  # (n, 1) 1/√K
    space = points[:, 1:].astype(np.float64) / unit
    length = np.maximum(np.linalg.norm(space, axis=1, keepdims=True), 1e-12)
    return np.asarray(unit * np.arcsinh(length) / length * space, dtype=np.float32)


def radius(points: Vectors) -> float:
    """Return 1/√K of points (n, d + 1)."""
    return float(np.sqrt(max(np.median(_negative_square(points)), 1e-12)))


def _negative_square(points: Vectors) -> Floats:
    """Return each point's 1/K, (n,)."""
    exact = points.astype(np.float64)
    found: Floats = np.square(exact[:, 0]) - np.square(exact[:, 1:]).sum(axis=1)
    return found


def _geodesic(products: Floats, square: Floats | float) -> Floats:
    # A query off the hyperboloid, such as zeros, has no curvature. Its hits keep the engine's ranking.
    square = np.maximum(square, 1e-12)
    found: Floats = np.arccosh(np.maximum(-products / square, 1)) * np.sqrt(square)
    return found
