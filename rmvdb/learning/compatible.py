"""Trains a new model whose embeddings can be compared with an old model's: classification and a compatibility loss by name."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sized
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from rmvdb.errors import Mismatch, ModelError, UnknownName, UsageError
from rmvdb.learning.losses import advbct, bct, hbct, hoc, l2, lorentz, ract
from rmvdb.learning.losses.advbct import Moment

#: (item, label) by number: tensors that can be stacked, and 0, 1, …
Items: TypeAlias = Dataset[Any]
#: Called with (step, steps, loss) after each step.
ReportLoss: TypeAlias = Callable[[int, int, float], None]
#: f_n (B, d), f_o (B, d), labels (B,) and where the training stands, to a loss ().
Pull: TypeAlias = Callable[[Tensor, Tensor, Tensor, Moment], Tensor]


class Loss(StrEnum):
    """What is added to the classification; each has its paper and formula in `losses`."""

    #: Nothing: for an old model, or a new one that heeds none.
    PLAIN = "plain"
    L2 = "l2"
    BCT = "bct"
    RACT = "ract"
    HOC = "hoc"
    ADVBCT = "advbct"
    #: Both models end in `losses.lorentz.Lift`; the classifier is `losses.hbct.Classifier`.
    HBCT = "hbct"
    #: Its contrast alone: the ablation in HBCT's Table 1.
    HBCT_NO_ENTAIL = "hbct-no-entail"

    @property
    def weights(self) -> tuple[float, float]:
        """Of the classification and of the pull to the old model, as the loss's paper has them."""
        hyperbolic = dict.fromkeys((Loss.HBCT, Loss.HBCT_NO_ENTAIL), (1.0, 0.3))
        return {Loss.HOC: (0.1, 0.9), **hyperbolic}.get(self, (1.0, 1.0))


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """An embedding model with its classifier."""

    #: Items (n, …) to embeddings (n, d).
    module: nn.Module
    #: Embeddings to logits (n, classes). An old model's may be lost: class means of its embeddings stand in.
    classifier: nn.Module | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How to train; the defaults are those with which HBCT compares all losses (section 5.1)."""

    epochs: int = 200
    batch: int = 128
    lr: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 5e-4
    #: Of the classification and of the pull to the old model; None is what the loss's paper has.
    weights: tuple[float, float] | None = None
    #: τ of ract, hoc (its 1/μ) and hbct; None is what the loss's paper has.
    temperature: float | None = None
    #: K of hbct's space, whose curvature is −K.
    curvature: float = 1.0
    #: Processes that load items; with 0 this one does.
    loaders: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("epochs", "batch", "lr", "curvature"):
            if not getattr(self, name) > 0:
                raise UsageError(f"{name} must be above 0, not {getattr(self, name)}")


def train(
    model: Model,
    items: Items,
    *,
    loss: str = Loss.PLAIN,
    old: Model | None = None,
    settings: Settings | None = None,
    progress: ReportLoss | None = None,
) -> Model:
    """Train `model` in place on items with labels, and give it back in evaluation mode.

    `old` is frozen for good: evaluation mode, no gradients. Its classes are the first of the new ones; where they are not, give
    it without its classifier. The same modules, items and settings give the same weights on a CPU.

    Raises UnknownName for another loss, UsageError where something is missing, Mismatch where shapes, labels or spaces do not
    fit, ModelError where the loss is no longer finite.
    """
    chosen, settings = _chosen(loss), settings or Settings()
    _check(model, items, chosen, old)
    device = _device(model.module)
    if old is not None:
        _freeze(old, device)
    with _seeded(device, settings.seed):
        criterion = _Criterion(model, items, chosen, old, settings)
        criterion.learnt.to(device).train()
        _fit(criterion, items, settings, device, progress)
        criterion.learnt.eval()
    return model


def embed(module: nn.Module, items: Items, *, batch: int = 512) -> tuple[Tensor, Tensor]:
    """The embeddings (n, d) of all items in order, and their labels (n,), on the CPU; leaves the module in evaluation mode."""
    module.eval()
    device = _device(module)
    with torch.no_grad():
        parts = [(module(x.to(device)).cpu(), y) for x, y in DataLoader(items, batch_size=batch)]
    return torch.cat([vectors for vectors, _ in parts]), torch.cat([labels for _, labels in parts])


class _Criterion:
    """Classification and pull of a batch, and the modules that learn from it."""

    def __init__(self, model: Model, items: Items, loss: Loss, old: Model | None, settings: Settings) -> None:
        self._model, self._old = model, old
        self._pull = None if old is None else _pull(loss, old, items, settings)
        self._weights = settings.weights or loss.weights
        parts = (model.module, model.classifier, self._pull)
        self.learnt = nn.ModuleList([part for part in parts if isinstance(part, nn.Module)])

    def __call__(self, x: Tensor, labels: Tensor, at: Moment) -> Tensor:
        """Items (B, …) and labels (B,) to the loss ()."""
        new = self._model.module(x)  # (B, d)
        classification = self._classification(new, labels)
        if self._pull is None or self._old is None:
            return classification
        old = self._old.module(x)  # (B, d)
        if new.shape != old.shape:
            raise Mismatch(
                f"The new model's embeddings have {new.shape[1]} numbers, the old one's {old.shape[1]}; make the new one as wide"
            )
        return self._weights[0] * classification + self._weights[1] * self._pull(new, old, labels, at)

    def _classification(self, new: Tensor, labels: Tensor) -> Tensor:
        classifier = cast(nn.Module, self._model.classifier)
        logits = classifier(new)  # (B, C)
        if not 0 <= int(labels.min()) <= int(labels.max()) < logits.shape[1]:
            raise Mismatch(
                f"The labels of a batch go from {int(labels.min())} to {int(labels.max())}, "
                f"but the classifier has {logits.shape[1]} classes; number them from 0"
            )
        return nn.functional.cross_entropy(logits, labels)


def _fit(criterion: _Criterion, items: Items, settings: Settings, device: torch.device, progress: ReportLoss | None) -> None:
    parts = math.ceil(_count(items) / settings.batch)
    total = parts * settings.epochs
    optimizer = torch.optim.SGD(
        criterion.learnt.parameters(), lr=settings.lr, momentum=settings.momentum, weight_decay=settings.weight_decay
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=total)
    loader = DataLoader(items, batch_sampler=_batches(_count(items), parts, settings), num_workers=settings.loaders)
    for step, (x, labels) in enumerate(loader):
        loss = criterion(x.to(device), labels.to(device), _moment(step, parts, settings.epochs))
        if not torch.isfinite(loss):
            raise ModelError(f"The loss became {loss.item()} in step {step + 1} of {total}; give a smaller lr than {settings.lr}")
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        if progress:
            progress(step + 1, total, loss.item())


def _moment(step: int, parts: int, epochs: int) -> Moment:
    """Before a step, counted from 0, of a training with `parts` steps an epoch."""
    return Moment(done=step / (parts * epochs), left=(epochs - step // parts) / epochs)


def _batches(count: int, parts: int, settings: Settings) -> Iterator[list[int]]:
    """Row numbers of every batch of a training; each row once an epoch, in batches of nearly one size."""
    rng = np.random.default_rng(settings.seed)
    for _ in range(settings.epochs):
        for rows in np.array_split(rng.permutation(count), parts):
            yield rows.tolist()


def _pull(loss: Loss, old: Model, items: Items, settings: Settings) -> Pull | None:
    """The compatibility loss of that name; an nn.Module where it learns something, too."""
    tau, curvature = settings.temperature, settings.curvature
    match loss:
        case Loss.PLAIN:
            return None
        case Loss.L2:
            return lambda new, old, labels, at: l2.loss(new, old)
        case Loss.BCT:
            classifier = _old_classifier(old, items)
            return lambda new, _, labels, at: bct.loss(new, labels, classifier)
        case Loss.RACT:
            return lambda new, old, labels, at: ract.loss(new, old, labels, temperature=tau or ract.TEMPERATURE)
        case Loss.HOC:
            return lambda new, old, labels, at: hoc.loss(new, old, labels, mu=1 / tau if tau else hoc.MU)
        case Loss.ADVBCT:
            vectors, labels = embed(old.module, items)
            return advbct.AdvBCT(vectors, labels, classes=_classes(old, vectors, labels))
        case Loss.HBCT:
            return lambda new, old, labels, at: _hyperbolic(hbct.loss, new, old, tau or hbct.TEMPERATURE, curvature)
        case Loss.HBCT_NO_ENTAIL:
            return lambda new, old, labels, at: _hyperbolic(hbct.contrast, new, old, tau or hbct.TEMPERATURE, curvature)


def _old_classifier(old: Model, items: Items) -> nn.Module:
    if old.classifier is not None:
        return old.classifier
    return bct.Prototypes(*embed(old.module, items)).to(_device(old.module))


def _hyperbolic(loss: Callable[..., Tensor], new: Tensor, old: Tensor, temperature: float, curvature: float) -> Tensor:
    for name, points in (("new", new), ("old", old)):
        if not lorentz.holds(points.detach(), curvature=curvature):
            raise Mismatch(
                f"The {name} model's embeddings are no points of the hyperboloid with K = {curvature}; "
                f"end it with losses.lorentz.Lift(curvature={curvature})"
            )
    return loss(new, old, temperature=temperature, curvature=curvature)


def _classes(old: Model, vectors: Tensor, labels: Tensor) -> int:
    """How many classes the old model knows; without its classifier, all that there are."""
    if old.classifier is None:
        return int(labels.max()) + 1
    with torch.no_grad():
        logits = old.classifier(vectors[:1].to(_device(old.module)))  # (1, C_old)
    return int(logits.shape[1])


def _chosen(loss: str) -> Loss:
    names = [each.value for each in Loss]
    if loss not in names:
        raise UnknownName("loss", loss, names)
    return Loss(loss)


def _check(model: Model, items: Items, loss: Loss, old: Model | None) -> None:
    if model.classifier is None:
        raise UsageError("The new model has no classifier; give it one, such as torch.nn.Linear(dim, classes, bias=False)")
    if old is None and loss is not Loss.PLAIN:
        raise UsageError(f"The loss {loss.value!r} pulls towards an old model, and there is none; give it as old")
    if not _count(items):
        raise UsageError("There are 0 items to train on; give a dataset of items and labels")


def _count(items: Items) -> int:
    return len(cast(Sized, items))


def _freeze(old: Model, device: torch.device) -> None:
    for part in (old.module, old.classifier):
        if part is not None:
            part.to(device).eval().requires_grad_(False)


def _device(module: nn.Module) -> torch.device:
    return next((each.device for each in module.parameters()), torch.device("cpu"))


@contextlib.contextmanager
def _seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Seeded random numbers inside; the caller's are none of our business."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield
