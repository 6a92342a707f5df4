"""ψ, and ψ after ρ, of one query, against nothing but their matrix products."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from rmvdb.learning.transforms import Transform
from rmvdb.types import Vectors
from tests.bench.speed.row import Options, Row, compared, in_turns
from tests.bench.speed.world import psi, vectors


def measure(options: Options) -> Iterator[Row]:
    """Measure for the dimension of the options and for 768."""
    for dim in sorted({options.dim, 768}):
        query = vectors(1, dim, seed=5)
        chains = {"ψ": [psi(dim)], "ψ∘ρ": [psi(dim, residual=True, seed=1), psi(dim)]}
        for name, chain in chains.items():
            weights = [each for transform in chain for each in _weights(transform)]
            sides = partial(_applied, chain, query), partial(_products, weights, query)
            ours, theirs = in_turns(*sides, calls=2 * options.calls)
            yield compared(f"{name} of one query, {dim}", ours, theirs, against="numpy's products", target=1.5)


def _weights(transform: Transform) -> list[Vectors]:
    """Return the matrices of a network's layers, (in, out)."""
    rng = np.random.default_rng(0)
    dim = transform.config.d_in
    return [rng.normal(size=shape).astype(np.float32) for shape in ((dim, 2 * dim), (2 * dim, dim))]


def _applied(chain: Sequence[Transform], x: Vectors) -> Vectors:
    for transform in chain:
        x = transform.apply(x)
    return x


def _products(weights: Sequence[Vectors], x: Vectors) -> Vectors:
    for weight in weights:
        x = x @ weight
    return x
