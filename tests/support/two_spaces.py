"""Made-up vectors of two models, and settings by which a transform between them is trained in a moment."""

import numpy as np

from rmvdb.learning.method import Pairs, TrainingSettings
from rmvdb.types import Metric

QUICK = TrainingSettings(epochs=1, least_steps=120, batch=128, lr=3e-3, pull=0.0)


COSINE = {"old_metric": Metric.COSINE, "new_metric": Metric.COSINE}


def pairs(n=600, classes=6, seed=0, *, labels=True, noise=4.0):
    """Return a new space that separates the classes, and an old one that is a poorer view of it."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, classes, n)
    centres, view = np.random.default_rng(99).normal(size=(classes, 12)), np.random.default_rng(98).normal(size=(12, 8))
    new = centres[y] + 0.7 * rng.normal(size=(n, 12))
    old = new @ view + noise * rng.normal(size=(n, 8))
    return Pairs(old=old.astype(np.float32), new=new.astype(np.float32), labels=y if labels else None)


def strangers(n=400):
    """Two spaces that have nothing to do with each other: no ψ can help."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, 4, n)
    spaces = [rng.normal(size=(n, 40)).astype(np.float32) for _ in range(2)]
    spaces[0][np.arange(n), y] += 4
    return Pairs(old=spaces[0], new=spaces[1], labels=y)


def spaces(queries=40, records=1200, seed=0):
    """Queries and records in two spaces of unlike clusters: how near a query's nearest are differs from query to query."""
    rng = np.random.default_rng(seed)

    def of(dim, widths):
        centres = rng.normal(size=(8, dim))
        groups = np.arange(queries + records) % 8
        vectors = centres[groups] + np.array(widths)[groups][:, None] * rng.normal(size=(queries + records, dim))
        unit = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)
        return unit[:queries], unit[queries:]

    return of(24, np.linspace(0.2, 1.2, 8)), of(32, np.linspace(1.2, 0.2, 8))
