"""Linear maps from the new space to the old one, fitted in closed form: other people's ψ, to compare with."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from rmvdb.learning.method import Pairs
from rmvdb.learning.training import REACHED, Space
from rmvdb.learning.transforms import Config, Network, Transform
from rmvdb.types import Metric, Vectors

Floats = npt.NDArray[np.float64]
#: Weight of ‖W‖² against the squared error on vectors of length 1.
ALPHA = 1.0


def procrustes(pairs: Pairs, *, old_metric: Metric, new_metric: Metric) -> Transform:
    """Fit the orthogonal map nearest to f_n → f_o: W = UVᵀ for F_nᵀF_o = USVᵀ (Schönemann, Psychometrika 1966).

    It keeps lengths and angles, as far as the dimensions allow: if they differ, W is semi-orthogonal, and still has the largest
    tr(Wᵀ F_nᵀ F_o). For an L2 gallery both spaces are centred first, because L2 distances do not depend on an origin.
    """
    x, y, config = _spaces(pairs, old_metric, new_metric)
    middle = (x.mean(axis=0), y.mean(axis=0)) if old_metric is Metric.L2 else (np.zeros(x.shape[1]), np.zeros(y.shape[1]))
    product = (x - middle[0]).T @ (y - middle[1])
    if new_metric is Metric.LORENTZ:
        product[0] = 0  # time follows from space, so the map must not mix it in
    u, _, vt = np.linalg.svd(product, full_matrices=False)
    weight = u @ vt  # (d_new, d_old)
    if new_metric is Metric.LORENTZ:
        weight[0] = 0
    return _transform(config, weight, middle[1] - middle[0] @ weight)


def ridge(pairs: Pairs, *, old_metric: Metric, new_metric: Metric, alpha: float = ALPHA) -> Transform:
    """Fit the linear map with the least ‖XW + b − Y‖² + α‖W‖² (Hoerl and Kennard, Technometrics 1970); b is not shrunk."""
    x, y, config = _spaces(pairs, old_metric, new_metric)
    x_mean, y_mean = x.mean(axis=0), y.mean(axis=0)
    centred = x - x_mean
    weight = np.linalg.solve(centred.T @ centred + alpha * np.eye(x.shape[1]), centred.T @ (y - y_mean))  # (d_new, d_old)
    return _transform(config, weight, y_mean - x_mean @ weight)


def _spaces(pairs: Pairs, old_metric: Metric, new_metric: Metric) -> tuple[Floats, Floats, Config]:
    """Return new and old vectors (n, d) on ψ's scale, and the config of a `Network` that maps between them."""
    old, new = Space.of(pairs.old, old_metric), Space.of(pairs.new, new_metric)
    config = Config(
        d_in=pairs.new.shape[1],
        d_out=pairs.old.shape[1],
        blocks=1,
        input_scale=None if new_metric is Metric.COSINE else new.scale,
        output=REACHED[old_metric],
        output_scale=old.scale,
    )
    y = _scaled(pairs.old, old)
    return _scaled(pairs.new, new), y[:, 1:] if old_metric is Metric.LORENTZ else y, config


def _scaled(vectors: Vectors, space: Space) -> Floats:
    if space.metric is Metric.COSINE:
        vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    return vectors.astype(np.float64) / space.scale


def _transform(config: Config, weight: Floats, bias: Floats) -> Transform:
    network = Network(config, folded=True)
    parts = {"body.0.weight": weight.T, "body.0.bias": bias}
    network.load_state_dict({name: torch.from_numpy(part.astype(np.float32)) for name, part in parts.items()})
    return Transform(network)
