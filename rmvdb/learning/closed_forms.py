"""ψ in closed form: maps from the new space to the old one that need no training.

COSINE and IP: vectors are fitted by their directions, since a query's length ranks nothing, and means are means of directions.
The old mean in a query favours the records that lie that way, so adding it back is a switch. For IP a mapped query gets the mean
length of the old vectors.

L2: distances depend on lengths, and on no origin. So vectors keep their lengths and are always centred, and the old mean is
always added back: there `centred` is `procrustes`. An orthogonal map into L2 has a factor, by which mapped vectors spread as far
as the old ones. The factor of least squares would be smaller, and would draw every query to the middle.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from rmvdb.errors import PlanRefused, UnknownName
from rmvdb.learning.kept_pairs import Kept, KeptConfig, KeptPairs
from rmvdb.learning.method import METHODS, Method, Pairs
from rmvdb.learning.space import REACHED
from rmvdb.learning.transforms import Config, Transform, Weights
from rmvdb.types import Metric, Vectors

Floats = npt.NDArray[np.float64]
#: A fitted map, and the settings that tell it from others of its method.
Variant = tuple[dict[str, float | bool], Transform]

#: λ of `ridge`, in units of the mean eigenvalue of the new vectors' covariance.
LAMBDAS = tuple(10 ** (half / 2) for half in range(-8, 5))
#: The share of the pairs by which λ is chosen, and how many of them are enough.
HELD_OUT, MOST_HELD_OUT = 0.15, 1000
#: w and τ of `neighbours`.
WEIGHTS, TAUS = (0.2, 0.5, 0.8), (0.05, 0.1)
#: Pairs that `neighbours` keeps at most, since each takes room and time with every query.
MOST_KEPT = 20_000


def variants(method: Method, pairs: Pairs, *, old_metric: Metric, new_metric: Metric, seed: int = 0) -> list[Variant]:
    """Fit every variant of a method on all pairs. The default one comes first.

    - `procrustes`: norm(x̂ R), R = UVᵀ of the SVD of X_nᵀX_o (Schönemann, Psychometrika 1966). Between two dimensions R is
      semi-orthogonal.
    - `ridge`: norm(x̂ W + b), with the least ‖XW + b − Y‖² + λ‖W‖² (Hoerl and Kennard, Technometrics 1970). λ is chosen by the
      distances of 15 % of the pairs, which are held out; then all are fitted.
    - `centred`: norm((x̂ − μ_n) R), R of centred vectors; without and with the old mean μ_o added.
    - `neighbours`: between `centred` and the old vectors of the ten nearest pairs, by w (see `kept_pairs`). It keeps at most
      20,000 pairs, drawn by `seed`.

    Raises: PlanRefused for LORENTZ, and if there are too few pairs or they are not finite; UnknownName for any other method.
    """
    if not METHODS[method].closed_form:
        raise UnknownName("method in closed form", method.value, [each for each in METHODS if each.is_closed_form])
    if Metric.LORENTZ in (old_metric, new_metric):
        raise PlanRefused(
            f"The method {method} adds and turns vectors, which leads off the hyperboloid that holds those of LORENTZ; "
            "choose naive, or a method that is trained"
        )
    pairs.check()
    new, old = _Side.of(pairs.new, new_metric), _Side.of(pairs.old, old_metric)
    match method:
        case Method.PROCRUSTES:
            return [({}, _procrustes(new, old))]
        case Method.RIDGE:
            return [_ridge(new, old, seed)]
        case Method.CENTRED:
            return list(_centred(new, old))
    return list(_neighbours(new, old, seed))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Side:
    """The vectors of one space as they are fitted: of length 1 (COSINE, IP), or in units of their spread (L2)."""

    metric: Metric
    #: (n, d)
    vectors: Floats
    #: (d,)
    mean: Floats
    #: L2: the root of the mean squared distance from the mean, which divides the vectors. Else the mean length.
    scale: float

    @classmethod
    def of(cls, vectors: Vectors, metric: Metric) -> _Side:
        exact = vectors.astype(np.float64)
        lengths = np.linalg.norm(exact, axis=1, keepdims=True)  # (n, 1)
        if metric is Metric.L2:
            scale = float(np.sqrt(np.square(exact - exact.mean(axis=0)).sum(axis=1).mean())) or 1.0
            exact /= scale
        else:
            scale = 1.0 if metric is Metric.COSINE else float(lengths.mean()) or 1.0
            exact /= np.maximum(lengths, 1e-12)
        return cls(metric=metric, vectors=exact, mean=exact.mean(axis=0), scale=scale)

    @property
    def centred(self) -> Floats:
        return self.vectors - self.mean

    @property
    def input_scale(self) -> float | None:
        return self.scale if self.metric is Metric.L2 else None

    def take(self, rows: npt.NDArray[np.intp]) -> _Side:
        return replace(self, vectors=self.vectors[rows], mean=self.vectors[rows].mean(axis=0))


def _procrustes(new: _Side, old: _Side) -> Transform:
    if Metric.L2 in (new.metric, old.metric):  # X_n centred and X_o not, or the reverse, have the same product as both centred
        return next(_centred(new, old))[1]
    rotation = _orthogonal(new.vectors, old.vectors)
    return _affine(new, old, rotation, np.zeros(old.vectors.shape[1]))


def _centred(new: _Side, old: _Side) -> Iterator[Variant]:
    rotation = _rotation(new, old)
    for old_mean in (True,) if old.metric is Metric.L2 else (False, True):
        bias = -new.mean @ rotation + (old.mean if old_mean else 0)
        yield {"old_mean": old_mean}, _affine(new, old, rotation, bias)


def _ridge(new: _Side, old: _Side, seed: int) -> Variant:
    rows = np.random.default_rng(seed).permutation(len(new.vectors))
    out = min(MOST_HELD_OUT, max(1, round(HELD_OUT * len(rows))))
    check, kept = rows[:out], rows[out:]
    path = _RidgePath.of(new.take(kept), old.take(kept))
    turned = path.turned(new.vectors[check])
    distances = [_distance(path.mapped(turned, each), old.vectors[check], old.metric) for each in LAMBDAS]
    best = LAMBDAS[int(np.argmin(distances))]
    return {"lambda": best}, _affine(new, old, *_RidgePath.of(new, old).affine(best))


def _neighbours(new: _Side, old: _Side, seed: int) -> Iterator[Variant]:
    kept = _kept_pairs(new, old, seed)
    for weight in WEIGHTS:
        for tau in TAUS:
            config = KeptConfig(
                d_in=new.vectors.shape[1],
                d_out=old.vectors.shape[1],
                weight=weight,
                tau=tau,
                input_scale=new.input_scale,
                normalises=old.metric is not Metric.L2,
                output_scale=old.scale,
            )
            yield {"weight": weight, "tau": tau}, Transform(KeptPairs(config, kept))


def _kept_pairs(new: _Side, old: _Side, seed: int) -> Kept:
    count = len(new.vectors)
    rows = np.arange(count)
    if count > MOST_KEPT:
        rows = np.sort(np.random.default_rng(seed).choice(count, MOST_KEPT, replace=False))
    shift = old.mean * old.scale if old.metric is Metric.L2 else np.zeros_like(old.mean)
    arrays = (new.mean, _rotation(new, old), new.centred[rows], old.centred[rows], shift)
    centre, rotation, x, y, added = (np.ascontiguousarray(each, dtype=np.float32) for each in arrays)
    return Kept(centre=centre, rotation=rotation, new=x, old=y, shift=added)


def _rotation(new: _Side, old: _Side) -> Floats:
    """Return the orthogonal map of centred vectors, (d_new, d_old), into L2 with the factor that keeps the old spread."""
    x, y = new.centred, old.centred
    rotation = _orthogonal(x, y)
    if old.metric is Metric.L2 and (reached := float(np.linalg.norm(x @ rotation))):
        rotation *= float(np.linalg.norm(y)) / reached
    return rotation


def _orthogonal(x: Floats, y: Floats) -> Floats:
    with _one_thread():
        u, _, vt = torch.linalg.svd(torch.from_numpy(x).T @ torch.from_numpy(y), full_matrices=False)
        product: Floats = (u @ vt).numpy()  # (d_new, d_old)
    return product


@contextmanager
def _one_thread() -> Iterator[None]:
    """Keep a decomposition to one thread: several wait for each other in every step, and ten times as long on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@dataclass(frozen=True, kw_only=True, slots=True)
class _RidgePath:
    """The solutions for every λ, from one eigendecomposition of the new vectors' covariance. The bias is not shrunk."""

    #: (d_new,), (d_new, d_new), and the eigenvectors' product with X_nᵀX_o, (d_new, d_old).
    values: Floats
    vectors: Floats
    product: Floats
    means: tuple[Floats, Floats]

    @classmethod
    def of(cls, new: _Side, old: _Side) -> _RidgePath:
        x, y = torch.from_numpy(new.centred), torch.from_numpy(old.centred)
        with _one_thread():
            values, vectors = torch.linalg.eigh(x.T @ x)
            product = vectors.T @ (x.T @ y)
        return cls(values=values.numpy(), vectors=vectors.numpy(), product=product.numpy(), means=(new.mean, old.mean))

    def turned(self, x: Floats) -> Floats:
        """Return the new vectors (n, d_new) less their mean, along the eigenvectors."""
        return (x - self.means[0]) @ self.vectors

    def mapped(self, turned: Floats, lam: float) -> Floats:
        """Map what `turned` gives to the old space, (n, d_old)."""
        return turned @ self._solution(lam) + self.means[1]

    def affine(self, lam: float) -> tuple[Floats, Floats]:
        """Return W (d_new, d_old) and b (d_old,)."""
        weight = self.vectors @ self._solution(lam)
        return weight, self.means[1] - self.means[0] @ weight

    def _solution(self, lam: float) -> Floats:
        shrunk = np.maximum(self.values, 0) + lam * (self.values.mean() or 1.0)
        result: Floats = self.product / shrunk[:, None]
        return result


def _distance(mapped: Floats, old: Floats, metric: Metric) -> float:
    if metric is Metric.L2:
        return float(np.square(mapped - old).sum(axis=1).mean())
    lengths = np.maximum(np.linalg.norm(mapped, axis=1) * np.linalg.norm(old, axis=1), 1e-12)
    return float(1 - (np.sum(mapped * old, axis=1) / lengths).mean())


def _affine(new: _Side, old: _Side, weight: Floats, bias: Floats) -> Transform:
    config = Config(
        d_in=weight.shape[0],
        d_out=weight.shape[1],
        blocks=1,
        input_scale=new.input_scale,
        output=REACHED[old.metric],
        output_scale=old.scale,
    )
    parts = {"body.0.weight": weight.T, "body.0.bias": bias}
    arrays = {name: np.ascontiguousarray(part, dtype=np.float32) for name, part in parts.items()}
    return Transform(Weights(config=config, arrays=arrays))
