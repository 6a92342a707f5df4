"""Fits ψ (`reverse`) and ρ (`head`) on pairs of old and new vectors of the same records."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum

import faiss
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rmvdb import hyperbolic, losses, metrics
from rmvdb.errors import Mismatch, PlanRefused
from rmvdb.transforms import Config, Network, Norm, Transform
from rmvdb.types import Metric, Vectors

#: Called with (done, total) steps.
Report = Callable[[int, int], None]


#: What length vectors have that are to be compared with those of a gallery.
REACHED = {Metric.COSINE: Norm.FIXED, Metric.IP: Norm.FIXED, Metric.L2: Norm.FREE, Metric.LORENTZ: Norm.LIFTED}


class Method(StrEnum):
    """How the old part of the gallery is searched with a new query; METHODS has the table."""

    #: Both models embed the query; nothing is trained.
    NAIVE = "naive"
    #: ψ is the identity: the new model was trained to be comparable with the old one (BCT and its kin).
    IDENTITY = "identity"
    #: ψ by regression, Eq. 9.
    RQT = "rqt"
    #: ψ by contrast within the old space, Eq. 10.
    CL_S = "cl-s"
    #: ψ and ρ, each by contrast in its own space, Eq. 14.
    CL_M = "cl-m"
    #: ψ by contrast across both spaces, Eq. 11.
    MCL = "mcl"
    #: ψ and ρ by contrast across both spaces, Eq. 11-13.
    RM = "rm"

    @property
    def has_head(self) -> bool:
        """Whether it trains a ρ, so that the new vectors change."""
        return self in (Method.CL_M, Method.RM)

    @property
    def headless(self) -> Method:
        """The same loss without ρ, which leaves the new model's vectors as they are."""
        return {Method.CL_M: Method.CL_S, Method.RM: Method.MCL}.get(self, self)


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How to train; the defaults are what held up best on held-out pairs, `paper()` is what the paper prints."""

    epochs: int = 50
    #: Small samples are gone through more often, until this many steps are made.
    least_steps: int = 400
    lr: float = 1e-3
    batch: int = 512
    #: 1 to 5, of Linear → BatchNorm → ReLU, the last one Linear only.
    blocks: int = 2
    #: Width between blocks; None is twice the wider of the two spaces.
    hidden: int | None = None
    #: τ in s = exp(−dist/τ).
    temperature: float = 0.1
    #: Footnote 2: only the harder half of the positives and of the negatives counts.
    mining: bool = True
    #: ρ(x) = x̂ + MLP(x̂), starting at the identity.
    residual: bool = True
    #: k-means clusters of the new space that stand in for classes where there are no labels; None is 3 √n.
    clusters: int | None = None
    #: Weight of Eq. 9 beside the contrast where there are no labels: clusters alone forget which record is which.
    pull: float = 1.0
    seed: int = 0

    @classmethod
    def paper(cls, *, blocks: int = 2, seed: int = 0) -> Settings:
        """The paper's appendix B.2, as printed: no temperature, no residual, learning rate 1e-4, 50 epochs."""
        return cls(least_steps=0, lr=1e-4, batch=128, blocks=blocks, temperature=1.0, residual=False, seed=seed)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pairs:
    """Old and new vectors of the same records, row by row."""

    #: (n, d_old)
    old: Vectors
    #: (n, d_new)
    new: Vectors
    #: (n,) classes or identities; None where nobody knows them.
    labels: npt.NDArray[np.generic] | None = None

    def __post_init__(self) -> None:
        rows = {len(self.old), len(self.new), *([] if self.labels is None else [len(self.labels)])}
        if len(rows) > 1 or self.old.ndim != 2 or self.new.ndim != 2:
            shapes = [self.old.shape, self.new.shape, None if self.labels is None else self.labels.shape]
            raise Mismatch(f"Pairs go row by row, but have the shapes {shapes}; give each record one old and one new vector")

    def __len__(self) -> int:
        return len(self.old)

    def take(self, rows: npt.NDArray[np.intp]) -> Pairs:
        """The pairs of these rows."""
        return Pairs(old=self.old[rows], new=self.new[rows], labels=None if self.labels is None else self.labels[rows])


@dataclass(frozen=True, kw_only=True, slots=True)
class Fitted:
    """What was trained."""

    #: ρ: new → final new; None leaves the new model as it is.
    head: Transform | None = None
    #: ψ: final new → old; None where the old model embeds the query too.
    reverse: Transform | None = None

    def final(self, new: Vectors) -> Vectors:
        """What is stored and searched in the new collection: ρ(f_n), (n, d_new) to (n, d_new)."""
        return new if self.head is None else self.head.apply(new)


@dataclass(frozen=True, kw_only=True, slots=True)
class Space:
    """A vector space: how it is compared, and the typical norm in it (LORENTZ: 1/√K)."""

    metric: Metric
    scale: float = field(default=1.0)

    @classmethod
    def of(cls, vectors: Vectors, metric: Metric) -> Space:
        """Measured on a sample (n, d)."""
        if metric is Metric.LORENTZ:
            return cls(metric=metric, scale=hyperbolic.radius(vectors))
        norm = float(np.linalg.norm(vectors, axis=1).mean())
        return cls(metric=metric, scale=1.0 if metric is Metric.COSINE or norm == 0 else norm)


def fit(
    pairs: Pairs, *, method: Method, old_metric: Metric, new_metric: Metric, settings: Settings, progress: Report | None = None
) -> Fitted:
    """Train ψ and, where the method has one, ρ; the same pairs and settings always give the same transforms.

    Raises PlanRefused where the pairs are too few or not finite.
    """
    if method is Method.NAIVE:
        return Fitted()
    _check(pairs)
    if method is Method.IDENTITY:
        return Fitted(reverse=_identity(pairs, old_metric, new_metric))
    old_space, new_space = Space.of(pairs.old, old_metric), Space.of(pairs.new, new_metric)
    groups = _groups(pairs, new_metric, settings)
    with torch.random.fork_rng(devices=[]):  # the caller's random numbers are none of our business
        torch.manual_seed(settings.seed)
        reverse = Network(_reverse(pairs, old_space, new_space, settings))
        head = Network(_head(pairs, new_space, settings)) if method.has_head else None
        _train(pairs, groups, reverse, head, method, (old_space, new_space), settings, progress)
    return Fitted(head=None if head is None else Transform(head), reverse=Transform(reverse))


def _train(
    pairs: Pairs,
    groups: npt.NDArray[np.int64],
    reverse: Network,
    head: Network | None,
    method: Method,
    spaces: tuple[Space, Space],
    settings: Settings,
    progress: Report | None,
) -> None:
    f_o, f_n, y = torch.from_numpy(pairs.old), torch.from_numpy(pairs.new), torch.from_numpy(groups)  # (n, d_o) (n, d_n) (n,)
    old_space, new_space = spaces
    pull = settings.pull if pairs.labels is None and method is not Method.RQT else 0.0
    modules = torch.nn.ModuleList([reverse] if head is None else [reverse, head]).train()
    optimizer = torch.optim.Adam(modules.parameters(), lr=settings.lr)
    parts = math.ceil(len(pairs) / settings.batch)
    total = parts * max(settings.epochs, math.ceil(settings.least_steps / parts))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=total)
    for step, rows in enumerate(_batches(groups, parts, total, settings.seed), start=1):
        old, new, same = f_o[rows], f_n[rows], y[rows, None] == y[None, rows]  # (B, d_o), (B, d_n), (B, B)
        final = new if head is None else head(new)  # (B, d_n)
        rev = reverse(final)  # (B, d_o)
        loss = _loss(method, rev, final, old, same, old_space, new_space, settings)
        if pull:
            d_pair = losses.paired(rev, old, metric=old_space.metric, scale=old_space.scale)  # (B,)
            loss = loss + pull * losses.rqt(d_pair) / settings.temperature
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        if progress:
            progress(step, total)


def _loss(
    method: Method, rev: Tensor, final: Tensor, old: Tensor, same: Tensor, old_space: Space, new_space: Space, settings: Settings
) -> Tensor:
    if method is Method.RQT:
        return losses.rqt(losses.paired(rev, old, metric=old_space.metric, scale=old_space.scale))
    d_old = losses.distances(rev, old, metric=old_space.metric, scale=old_space.scale)  # (B, B)
    if method is Method.CL_S:
        return losses.cl_s(d_old, same, temperature=settings.temperature, mining=settings.mining)
    d_new = losses.distances(final, final, metric=new_space.metric, scale=new_space.scale)  # (B, B)
    contrast = losses.cl_m if method is Method.CL_M else losses.mcl
    return contrast(d_old, d_new, same, temperature=settings.temperature, mining=settings.mining)


def _batches(groups: npt.NDArray[np.int64], parts: int, total: int, seed: int) -> Iterator[Tensor]:
    """Row numbers of `total` batches; every row once an epoch, in batches of nearly one size."""
    rng = np.random.default_rng(seed)
    for _ in range(total // parts):
        for rows in np.array_split(rng.permutation(len(groups)), parts):
            yield torch.from_numpy(rows)


def _groups(pairs: Pairs, new_metric: Metric, settings: Settings) -> npt.NDArray[np.int64]:
    """What counts as one class, (n,): the labels, or else clusters of the new space."""
    if pairs.labels is not None:
        return np.asarray(np.unique(pairs.labels, return_inverse=True)[1], dtype=np.int64).reshape(-1)
    vectors = np.ascontiguousarray(metrics.comparable(pairs.new, new_metric), dtype=np.float32)
    count = settings.clusters or round(3 * math.sqrt(len(pairs)))
    kmeans = faiss.Kmeans(
        vectors.shape[1],
        min(count, len(pairs)),
        niter=20,
        seed=settings.seed,
        min_points_per_centroid=1,
        spherical=new_metric in (Metric.COSINE, Metric.IP),
    )
    kmeans.train(vectors)
    return np.asarray(kmeans.assign(vectors)[1], dtype=np.int64)


def _reverse(pairs: Pairs, old_space: Space, new_space: Space, settings: Settings) -> Config:
    d_in, d_out = pairs.new.shape[1], pairs.old.shape[1]
    return Config(
        d_in=d_in,
        d_out=d_out,
        blocks=settings.blocks,
        hidden=settings.hidden or 2 * max(d_in, d_out),
        input_scale=None if new_space.metric is Metric.COSINE else new_space.scale,
        output=REACHED[old_space.metric],
        output_scale=old_space.scale,
    )


def _head(pairs: Pairs, new_space: Space, settings: Settings) -> Config:
    dim = pairs.new.shape[1]
    return Config(
        d_in=dim,
        d_out=dim,
        blocks=settings.blocks,
        hidden=settings.hidden or 2 * dim,
        residual=settings.residual,
        input_scale=None if new_space.metric is Metric.COSINE else new_space.scale,
        output=Norm.KEPT if new_space.metric is Metric.IP else REACHED[new_space.metric],
        output_scale=new_space.scale,
    )


def _identity(pairs: Pairs, old_metric: Metric, new_metric: Metric) -> Transform:
    d_in, d_out = pairs.new.shape[1], pairs.old.shape[1]
    if (d_in, new_metric) != (d_out, old_metric):
        raise PlanRefused(
            f"The method identity compares vectors as they are, and {d_in} dimensions of {new_metric} cannot be "
            f"compared with {d_out} of {old_metric}; choose another method"
        )
    network = Network(Config(d_in=d_in, d_out=d_out, blocks=1, input_scale=1.0, output=Norm.FREE), folded=True)
    network.load_state_dict({"body.0.weight": torch.eye(d_in), "body.0.bias": torch.zeros(d_in)})
    return Transform(network)


def _check(pairs: Pairs) -> None:
    if len(pairs) < 8:
        raise PlanRefused(f"{len(pairs)} pairs are too few to train on; give a larger sample, or plan with the method naive")
    for name, vectors in (("old", pairs.old), ("new", pairs.new)):
        if not np.isfinite(vectors).all():
            raise PlanRefused(f"The {name} vectors of the sample hold NaN or infinite values; mend the {name} model's embedder")
