"""Training ψ (`reverse`) and ρ (`head`), or h (`lift`), on pairs of old and new vectors of the same records."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rmvdb.errors import PlanRefused
from rmvdb.learning import geometry, hyperbolic, losses
from rmvdb.learning.losses import fct
from rmvdb.learning.method import METHODS, Fitted, Method, Pairs, TrainingSettings
from rmvdb.learning.transforms import Config, Network, Norm, Transform
from rmvdb.text import counted
from rmvdb.types import Metric, Vectors

with warnings.catch_warnings(action="ignore"):  # which say nothing to rmvdb's users
    import faiss

#: Called with (done, total) steps.
ReportSteps = Callable[[int, int], None]


#: The length of vectors that are compared with a gallery's.
REACHED = {Metric.COSINE: Norm.FIXED, Metric.IP: Norm.FIXED, Metric.L2: Norm.FREE, Metric.LORENTZ: Norm.LIFTED}


@dataclass(frozen=True, kw_only=True, slots=True)
class Space:
    """A vector space: how it is compared, and the typical norm in it (LORENTZ: 1/√K)."""

    metric: Metric
    scale: float = field(default=1.0)

    @classmethod
    def of(cls, vectors: Vectors, metric: Metric) -> Space:
        """Measure the space on a sample (n, d)."""
        if metric is Metric.LORENTZ:
            return cls(metric=metric, scale=hyperbolic.radius(vectors))
        norm = float(np.linalg.norm(vectors, axis=1).mean())
        return cls(metric=metric, scale=1.0 if metric is Metric.COSINE or norm == 0 else norm)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Batch:
    """Vectors of one batch, and their distances, each computed only if a loss asks for it."""

    #: ψ of the final new vectors, (B, d_old).
    rev: Tensor
    #: ρ of the new vectors, or the new vectors themselves, (B, d_new).
    final: Tensor
    #: (B, d_old)
    old: Tensor
    #: Whether two records are of one class, (B, B).
    same: Tensor
    old_space: Space
    new_space: Space

    @property
    def d_pair(self) -> Tensor:
        """Return the distances of ψ(f_n,i) to f_o,i, (B,)."""
        return losses.paired(self.rev, self.old, metric=self.old_space.metric, scale=self.old_space.scale)

    @property
    def d_old(self) -> Tensor:
        """Return the distances of every ψ(f_n,i) to every f_o,k, (B, B)."""
        return losses.distances(self.rev, self.old, metric=self.old_space.metric, scale=self.old_space.scale)

    @property
    def d_new(self) -> Tensor:
        """Return the distances of the new vectors to each other, (B, B)."""
        return losses.distances(self.final, self.final, metric=self.new_space.metric, scale=self.new_space.scale)


#: The losses of ψ and ρ by the names in `METHODS`: of a batch, the temperature τ, and whether only hard pairs count.
OBJECTIVES: Mapping[str, Callable[[_Batch, float, bool], Tensor]] = {
    "rqt": lambda batch, tau, mining: losses.rqt(batch.d_pair),
    "cl_s": lambda batch, tau, mining: losses.cl_s(batch.d_old, batch.same, temperature=tau, mining=mining),
    "cl_m": lambda batch, tau, mining: losses.cl_m(batch.d_old, batch.d_new, batch.same, temperature=tau, mining=mining),
    "mcl": lambda batch, tau, mining: losses.mcl(batch.d_old, batch.d_new, batch.same, temperature=tau, mining=mining),
}


def fit(
    pairs: Pairs,
    *,
    method: Method,
    old_metric: Metric,
    new_metric: Metric,
    settings: TrainingSettings,
    head: bool | None = None,
    logged: Pairs | None = None,
    progress: ReportSteps | None = None,
) -> Fitted:
    """Train the transforms of a method. The same pairs and settings always give the same transforms.

    `head` says whether to train a ρ, whatever the method has. `logged` are queries of unknown class to train on beside the
    records, because ψ is applied to queries.

    Raises: PlanRefused if there are too few pairs, or if they are not finite.
    """
    spec = METHODS[method]
    if not spec.has_transforms:
        return Fitted()
    _check(pairs)
    if spec.shares_space:
        return Fitted(reverse=_identity(pairs, old_metric, new_metric))
    old_space, new_space = Space.of(pairs.old, old_metric), Space.of(pairs.new, new_metric)
    if spec.lifts:
        return Fitted(lift=_lift(pairs, old_space, new_space, settings, progress))
    groups = _groups(pairs, new_metric, settings)
    if logged is not None:
        pairs, groups = _beside(pairs, groups, logged)
    with torch.random.fork_rng(devices=[]):  # the caller's random numbers stay as they are
        torch.manual_seed(settings.seed)
        reverse = Network(_reverse(pairs, old_space, new_space, settings))
        rho = Network(_head(pairs, new_space, settings)) if (spec.has_head if head is None else head) else None
        _train(pairs, groups, reverse, rho, method, (old_space, new_space), settings, progress)
    return Fitted(head=None if rho is None else Transform(rho), reverse=Transform(reverse))


def _train(
    pairs: Pairs,
    groups: npt.NDArray[np.int64],
    reverse: Network,
    head: Network | None,
    method: Method,
    spaces: tuple[Space, Space],
    settings: TrainingSettings,
    progress: ReportSteps | None,
) -> None:
    f_o, f_n, y = torch.from_numpy(pairs.old), torch.from_numpy(pairs.new), torch.from_numpy(groups)  # (n, d_o) (n, d_n) (n,)
    old_space, new_space = spaces
    objective = OBJECTIVES[str(METHODS[method].loss)]
    pull = settings.weight_of_pull(labelled=pairs.labels is not None) if method.contrasts else 0.0
    modules = torch.nn.ModuleList([reverse] if head is None else [reverse, head])

    def loss(rows: Tensor) -> Tensor:
        old, new, same = f_o[rows], f_n[rows], y[rows, None] == y[None, rows]  # (B, d_o), (B, d_n), (B, B)
        final = new if head is None else head(new)  # (B, d_n)
        batch = _Batch(rev=reverse(final), final=final, old=old, same=same, old_space=old_space, new_space=new_space)
        value = objective(batch, settings.temperature, settings.mining)
        return value + pull * losses.rqt(batch.d_pair) / settings.temperature if pull else value

    _descend(modules, loss, len(pairs), settings, progress)


def _lift(
    pairs: Pairs, old_space: Space, new_space: Space, settings: TrainingSettings, progress: ReportSteps | None
) -> Transform:
    """Train h by Adam at 5e-4 in batches of 1,024 for 80 epochs, as FCT prints. `settings` gives width, least steps and seed."""
    settings = replace(settings, lr=5e-4, batch=1024, epochs=80)
    f_o, f_n = torch.from_numpy(pairs.old), torch.from_numpy(pairs.new)  # (n, d_o) (n, d_n)
    if pairs.side is not None:
        f_o = torch.cat([f_o, torch.from_numpy(pairs.side)], dim=1)  # (n, d_o + d_side)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        network = Network(_lifting(pairs, old_space, new_space, settings))

        def loss(rows: Tensor) -> Tensor:
            return fct.loss(network(f_o[rows]), f_n[rows], metric=new_space.metric, scale=new_space.scale)

        _descend(network, loss, len(pairs), settings, progress)
    return Transform(network)


def _descend(
    module: torch.nn.Module,
    loss: Callable[[Tensor], Tensor],
    pairs: int,
    settings: TrainingSettings,
    progress: ReportSteps | None,
) -> None:
    """Minimise the loss of batches of rows, by Adam with cosine annealing."""
    module.train()
    optimizer = torch.optim.Adam(module.parameters(), lr=settings.lr)
    parts = math.ceil(pairs / settings.batch)
    total = parts * max(settings.epochs, math.ceil(settings.least_steps / parts))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=total)
    for step, rows in enumerate(_batches(pairs, parts, total, settings.seed), start=1):
        value = loss(rows)
        optimizer.zero_grad()
        value.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        if progress:
            progress(step, total)


def _batches(pairs: int, parts: int, total: int, seed: int) -> Iterator[Tensor]:
    """Return row numbers of `total` batches: every row once an epoch, in batches of nearly one size."""
    rng = np.random.default_rng(seed)
    for _ in range(total // parts):
        for rows in np.array_split(rng.permutation(pairs), parts):
            yield torch.from_numpy(rows)


def _groups(pairs: Pairs, new_metric: Metric, settings: TrainingSettings) -> npt.NDArray[np.int64]:
    """Return each record's class, (n,): its label, or else its cluster in the new space."""
    if pairs.labels is not None:
        return np.asarray(np.unique(pairs.labels, return_inverse=True)[1], dtype=np.int64).reshape(-1)
    vectors = np.ascontiguousarray(geometry.comparable(pairs.new, new_metric), dtype=np.float32)
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


def _beside(pairs: Pairs, groups: npt.NDArray[np.int64], logged: Pairs) -> tuple[Pairs, npt.NDArray[np.int64]]:
    """Put queries beside the records, each a class of its own, whose only positive is its own old vector.

    Eq. 9 for the queries, instead or in addition, was tried on made queries that are unlike records: it comes nearer to the old
    model's own neighbours, but loses more records of the same class than that gains.
    """
    own = groups.max() + 1 + np.arange(len(logged), dtype=np.int64)
    groups = np.concatenate([groups, own])
    old, new = np.concatenate([pairs.old, logged.old]), np.concatenate([pairs.new, logged.new])
    return Pairs(old=old, new=new, labels=None if pairs.labels is None else groups), groups


def _reverse(pairs: Pairs, old_space: Space, new_space: Space, settings: TrainingSettings) -> Config:
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


def _head(pairs: Pairs, new_space: Space, settings: TrainingSettings) -> Config:
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


def _lifting(pairs: Pairs, old_space: Space, new_space: Space, settings: TrainingSettings) -> Config:
    d_in, d_out = pairs.old.shape[1], pairs.new.shape[1]
    return Config(
        d_in=d_in,
        d_out=d_out,
        blocks=3,
        hidden=settings.hidden or 4 * d_out,
        branches=True,
        side=0 if pairs.side is None else pairs.side.shape[1],
        input_scale=None if old_space.metric is Metric.COSINE else old_space.scale,
        output=Norm.FREE if new_space.metric is Metric.IP else REACHED[new_space.metric],
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
        raise PlanRefused(
            f"{counted(len(pairs), 'pair is', 'pairs are')} too few to train on; give a larger sample, "
            "or plan with the method naive"
        )
    for name, vectors in (("old", pairs.old), ("new", pairs.new)):
        if not np.isfinite(vectors).all():
            raise PlanRefused(f"The {name} vectors of the sample hold NaN or infinite values; fix the {name} model's embedder")
    if pairs.side is not None and not np.isfinite(pairs.side).all():
        raise PlanRefused("The side information of the sample holds NaN or infinite values; correct the field that has it")
