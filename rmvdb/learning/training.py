"""Training ψ (`reverse`) and ρ (`head`), or h (`lift`), on pairs of old and new vectors of the same records."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rmvdb.errors import Mismatch, PlanRefused
from rmvdb.learning import closed_forms, geometry, losses, stopping
from rmvdb.learning.losses import fct
from rmvdb.learning.method import METHODS, Fitted, Method, Pairs, TrainingSettings
from rmvdb.learning.network import Network
from rmvdb.learning.space import REACHED, Space
from rmvdb.learning.transforms import Config, Norm, Transform, Weights
from rmvdb.types import Metric

with warnings.catch_warnings(action="ignore"):  # they mean nothing to rmvdb's users
    import faiss

#: Called with (done, total) steps.
ReportSteps = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Clock:
    """How a training reports its steps, and when it must end."""

    progress: ReportSteps | None
    #: As `time.monotonic` gives it; None for no end.
    end: float | None

    @property
    def is_over(self) -> bool:
        return self.end is not None and time.monotonic() >= self.end

    def report(self, done: int, total: int) -> None:
        if self.progress:
            self.progress(done, total)


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
    start: Transform | Method | None = None,
    seconds: float | None = None,
) -> Fitted:
    """Train the transforms of a method. The same pairs and settings always give the same transforms, if time does not run out.

    `head` says whether to train a ρ, whatever the method has. `logged` are queries of unknown class to train on beside the
    records, because ψ is applied to queries. A method in closed form gives its first variant.

    `start` is a linear ψ, or a method that gives one: `procrustes`, `ridge`, `centred`. ψ(x) = norm(W x̂ + b + MLP(x̂)) starts
    there, and ρ at the identity. 15 % of the pairs are held out, and the weights that do best on them are kept, the first ones
    among them. A method is fitted on the other pairs. If nothing is better, it is fitted on all, and there is no ρ. A ψ that has
    seen the pairs held out looks better than it is, the more so the fewer pairs and the more dimensions there are, and then
    hardly anything beats it. Without labels, the best weights are those by which ψ's ten nearest records contain most of the new
    model's ten nearest. If the method learns from labels, the best weights have the highest mean average precision, since labels
    lead away from the new model's neighbours.

    After `seconds` the training ends with the best weights so far; without `start`, with the last ones.

    Raises: PlanRefused if there are too few pairs, or if they are not finite; Mismatch if ψ cannot start at `start`.
    """
    spec = METHODS[method]
    if not spec.has_transforms:
        return Fitted()
    pairs.check()
    if spec.shares_space:
        return Fitted(reverse=_identity(pairs, old_metric, new_metric))
    if spec.closed_form:
        return Fitted(reverse=_in_closed_form(method, pairs, logged, (old_metric, new_metric), settings.seed))
    spaces = Space.of(pairs.old, old_metric), Space.of(pairs.new, new_metric)
    clock = _Clock(progress=progress, end=None if seconds is None else time.monotonic() + seconds)
    if spec.lifts:
        return Fitted(lift=_lift(pairs, spaces, settings, clock))
    has_head = spec.has_head if head is None else head
    with torch.random.fork_rng(devices=[]):  # the caller's random numbers stay as they are
        torch.manual_seed(settings.seed)
        if start is not None:
            return _fit_from(start, pairs, logged, method, has_head, spaces, settings, clock)
        course = _course(pairs, logged, method, spaces, settings, has_head=has_head)
        _descend(course.modules, course.loss, len(course.pairs), settings, clock)
    return course.fitted()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Course:
    """A training: its networks, its pairs and its loss."""

    pairs: Pairs
    #: Each pair's class, (n,).
    groups: npt.NDArray[np.int64]
    reverse: Network
    head: Network | None
    #: A name in `OBJECTIVES`, and the weight of Eq. 9 beside it.
    loss_name: str
    pull: float
    old_space: Space
    new_space: Space
    settings: TrainingSettings

    @property
    def modules(self) -> torch.nn.ModuleList:
        return torch.nn.ModuleList([self.reverse] if self.head is None else [self.reverse, self.head])

    def loss(self, rows: Tensor) -> Tensor:
        f_o, f_n, y = (torch.from_numpy(each) for each in (self.pairs.old, self.pairs.new, self.groups))  # (n, d_o) (n, d_n) (n,)
        batch = self.batch(f_o[rows], f_n[rows], y[rows])
        value = OBJECTIVES[self.loss_name](batch, self.settings.temperature, self.settings.mining)
        return value + self.pull * losses.rqt(batch.d_pair) / self.settings.temperature if self.pull else value

    def batch(self, old: Tensor, new: Tensor, groups: Tensor) -> _Batch:
        """Map new vectors (B, d_new) of records with old vectors (B, d_old) and classes (B,)."""
        same = groups[:, None] == groups[None, :]  # (B, B)
        final = new if self.head is None else self.head(new)  # (B, d_n)
        rev = self.reverse(final)
        return _Batch(rev=rev, final=final, old=old, same=same, old_space=self.old_space, new_space=self.new_space)

    def fitted(self) -> Fitted:
        return Fitted(head=None if self.head is None else Transform(self.head), reverse=Transform(self.reverse))


def _course(
    pairs: Pairs,
    logged: Pairs | None,
    method: Method,
    spaces: tuple[Space, Space],
    settings: TrainingSettings,
    *,
    has_head: bool,
    start: Transform | None = None,
) -> _Course:
    """Make fresh networks and classes, ψ from `start` if there is one."""
    old_space, new_space = spaces
    groups = _groups(pairs, new_space.metric, settings)
    labelled = pairs.labels is not None
    if logged is not None:
        pairs, groups = _beside(pairs, groups, logged)
    return _Course(
        pairs=pairs,
        groups=groups,
        reverse=Network(_reverse(pairs, old_space, new_space, settings)) if start is None else _started(start, settings),
        head=Network(_head(pairs, new_space, settings)) if has_head else None,
        loss_name=str(METHODS[method].loss),
        pull=settings.weight_of_pull(labelled=labelled) if method.contrasts else 0.0,
        old_space=old_space,
        new_space=new_space,
        settings=settings,
    )


def _in_closed_form(method: Method, pairs: Pairs, logged: Pairs | None, metrics: tuple[Metric, Metric], seed: int) -> Transform:
    every = pairs if logged is None else _together(pairs, logged)
    return closed_forms.variants(method, every, old_metric=metrics[0], new_metric=metrics[1], seed=seed)[0][1]


def _fit_from(
    start: Transform | Method,
    pairs: Pairs,
    logged: Pairs | None,
    method: Method,
    has_head: bool,
    spaces: tuple[Space, Space],
    settings: TrainingSettings,
    clock: _Clock,
) -> Fitted:
    """Train from `start`, and keep the weights that do best on held-out pairs."""
    metrics = spaces[0].metric, spaces[1].metric
    every, (pairs, held_out) = pairs, stopping.split(pairs, settings.seed)
    first = _in_closed_form(start, pairs, logged, metrics, settings.seed) if isinstance(start, Method) else start
    _refuse_start(first, pairs)
    settings = replace(settings, residual=True)  # another ρ would not begin at the identity
    course = _course(pairs, logged, method, spaces, settings, has_head=has_head, start=first)
    modules = course.modules
    best = stopping.Best(modules, _check_of(course, held_out, by_class=method.contrasts and held_out.labels is not None))
    _descend(modules, course.loss, len(course.pairs), settings, clock, best)
    if not best.is_start:
        return course.fitted()
    whole = _in_closed_form(start, every, logged, metrics, settings.seed) if isinstance(start, Method) else first
    return Fitted(reverse=whole)


def _check_of(course: _Course, held_out: Pairs, *, by_class: bool) -> Callable[[], float]:
    """Return the quality of ψ, and of ρ if it is trained, on held-out pairs, as a function of the weights at that time."""
    old, new = torch.from_numpy(held_out.old), torch.from_numpy(held_out.new)
    space = course.new_space
    groups = torch.from_numpy(_groups(held_out, space.metric, course.settings) if by_class else np.arange(len(held_out)))
    near = stopping.nearest(losses.distances(new, new, metric=space.metric, scale=space.scale))

    def check() -> float:
        batch = course.batch(old, new, groups)
        if not by_class:
            return sum(stopping.overlap(each, near) for each in ([batch.d_old, batch.d_new] if course.head else [batch.d_old]))
        # A record counts as of its own class in the old space, as in Eq. 10: ψ is to find it, too.
        others = batch.same.clone().fill_diagonal_(False)
        alone = batch.d_new.clone().fill_diagonal_(torch.inf)
        return stopping.precision(batch.d_old, batch.same) + (stopping.precision(alone, others) if course.head else 0.0)

    return check


def _started(start: Transform, settings: TrainingSettings) -> Network:
    """Return W x̂ + b + MLP(x̂) with a fresh MLP that gives 0."""
    config, linear = start.config, start.linear
    assert isinstance(config, Config) and linear is not None  # noqa: S101, PT018  `_refuse_start` has seen to it
    hidden = settings.hidden or 2 * max(config.d_in, config.d_out)
    network = Network(replace(config, blocks=settings.blocks, hidden=hidden, skip=True))
    assert network.skip is not None  # noqa: S101
    network.skip.load_state_dict({name: torch.tensor(each) for name, each in zip(("weight", "bias"), linear, strict=True)})
    return network


def _refuse_start(start: Transform, pairs: Pairs) -> None:
    shape = (pairs.new.shape[1], pairs.old.shape[1])
    if start.linear is None:
        raise Mismatch("ψ can only start at a linear map; give it one of procrustes, ridge or centred")
    if (start.config.d_in, start.config.d_out) != shape:
        raise Mismatch(f"ψ maps {shape[0]} to {shape[1]} dimensions, but its start {start.config.d_in} to {start.config.d_out}")


def _lift(pairs: Pairs, spaces: tuple[Space, Space], settings: TrainingSettings, clock: _Clock) -> Transform:
    """Train h by Adam at 5e-4 in batches of 1,024 for 80 epochs, as FCT prints. `settings` gives width, least steps and seed."""
    settings = replace(settings, lr=5e-4, batch=1024, epochs=80)
    old_space, new_space = spaces
    f_o, f_n = torch.from_numpy(pairs.old), torch.from_numpy(pairs.new)  # (n, d_o) (n, d_n)
    if pairs.side is not None:
        f_o = torch.cat([f_o, torch.from_numpy(pairs.side)], dim=1)  # (n, d_o + d_side)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        network = Network(_lifting(pairs, old_space, new_space, settings))

        def loss(rows: Tensor) -> Tensor:
            return fct.loss(network(f_o[rows]), f_n[rows], metric=new_space.metric, scale=new_space.scale)

        _descend(network, loss, len(pairs), settings, clock)
    return Transform(network)


def _descend(
    module: torch.nn.Module,
    loss: Callable[[Tensor], Tensor],
    pairs: int,
    settings: TrainingSettings,
    clock: _Clock,
    best: stopping.Best | None = None,
) -> None:
    """Minimise the loss of batches of rows, by Adam with cosine annealing. `best` may end it early, and the clock does."""
    module.train()
    optimizer = torch.optim.Adam(module.parameters(), lr=settings.lr)
    parts = math.ceil(pairs / settings.batch)
    total = parts * max(settings.epochs, math.ceil(settings.least_steps / parts))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=total)
    between = math.ceil(total / stopping.CHECKS)
    for step, rows in enumerate(_batches(pairs, parts, total, settings.seed), start=1):
        value = loss(rows)
        optimizer.zero_grad()
        value.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        clock.report(step, total)
        if best and (clock.is_over or step % between == 0 or step == total):
            best.look()
        if clock.is_over or (best and best.is_final):
            clock.report(total, total)
            break
    if best:
        best.restore()


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
    classes = groups.max() + 1 + np.arange(len(logged), dtype=np.int64)
    groups = np.concatenate([groups, classes])
    old, new = np.concatenate([pairs.old, logged.old]), np.concatenate([pairs.new, logged.new])
    return Pairs(old=old, new=new, labels=None if pairs.labels is None else groups), groups


def _together(pairs: Pairs, logged: Pairs) -> Pairs:
    return Pairs(old=np.concatenate([pairs.old, logged.old]), new=np.concatenate([pairs.new, logged.new]))


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
    arrays = {"body.0.weight": np.eye(d_in, dtype=np.float32), "body.0.bias": np.zeros(d_in, np.float32)}
    config = Config(d_in=d_in, d_out=d_out, blocks=1, input_scale=1.0, output=Norm.FREE)
    return Transform(Weights(config=config, arrays=arrays))
