"""Training a new model whose embeddings can be compared with an old model's: classification and a compatibility loss."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sized
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
#: f_n (B, d), f_o (B, d), labels (B,) and the progress of the training, to a loss ().
Pull: TypeAlias = Callable[[Tensor, Tensor, Tensor, Moment], Tensor]


class Loss(StrEnum):
    """The loss that is added to the classification. Each has its paper and formula in `losses`."""

    #: None: for an old model, or for a new one that need not be comparable.
    PLAIN = "plain"
    L2 = "l2"
    BCT = "bct"
    RACT = "ract"
    HOC = "hoc"
    ADVBCT = "advbct"
    #: Both models end in `losses.lorentz.Lift`; the classifier is `losses.hbct.Classifier`.
    HBCT = "hbct"
    #: The contrast of hbct alone: the ablation in HBCT's Table 1.
    HBCT_NO_ENTAIL = "hbct-no-entail"

    @property
    def weights(self) -> tuple[float, float]:
        """Return the weights of the classification and of the pull to the old model, as the loss's paper has them."""
        return LOSSES[self].weights if self in LOSSES else (1.0, 1.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """An embedding model with its classifier."""

    #: Items (n, …) to embeddings (n, d).
    module: nn.Module
    #: Embeddings to logits (n, classes). If an old model's is lost, class means of its embeddings replace it.
    classifier: nn.Module | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How to train. The defaults are those with which HBCT compares all losses (section 5.1)."""

    epochs: int = 200
    batch: int = 128
    lr: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 5e-4
    #: Weights of the classification and of the pull to the old model; None takes the paper's.
    weights: tuple[float, float] | None = None
    #: τ of ract, hoc (its 1/μ) and hbct; None takes the paper's.
    temperature: float | None = None
    #: K of hbct's space, whose curvature is −K.
    curvature: float = 1.0
    #: Processes that load items; 0 loads them in this one.
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
    """Train `model` in place on items with labels, and return it in evaluation mode.

    If the dataset has a `collate_fn`, that makes batches of items, as in torch's DataLoader.
    `old` is frozen for good: evaluation mode, no gradients. Its classes are the first of the new ones; if they are not, leave its
    classifier out. The same modules, items and settings give the same weights on a CPU.

    Raises: UnknownName for another loss, UsageError if something is missing, Mismatch if shapes, labels or spaces do not fit,
    ModelError if the loss is no longer finite.
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
    """Return all items' embeddings (n, d), in order, and labels (n,), on the CPU. The module stays in evaluation mode."""
    module.eval()
    device = _device(module)
    with torch.no_grad():
        parts = [(module(x.to(device)).cpu(), y) for x, y in _loader(items, batch_size=batch)]
    return torch.cat([vectors for vectors, _ in parts]), torch.cat([labels for _, labels in parts])


class _Criterion:
    """The loss of a batch, classification and pull, and the modules that learn from it."""

    def __init__(self, model: Model, items: Items, loss: Loss, old: Model | None, settings: Settings) -> None:
        self._model, self._old = model, old
        self._pull = None if old is None or loss is Loss.PLAIN else LOSSES[loss].make(old, items, settings)
        self._weights = settings.weights or loss.weights
        parts = (model.module, model.classifier, self._pull)
        self.learnt = nn.ModuleList([part for part in parts if isinstance(part, nn.Module)])

    def __call__(self, x: Tensor, labels: Tensor, at: Moment) -> Tensor:
        """Return the loss () of items (B, …) and labels (B,)."""
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
    loader = _loader(items, batch_sampler=_batches(_count(items), parts, settings), num_workers=settings.loaders)
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


def _loader(items: Items, **how: Any) -> DataLoader[Any]:
    """Load batches. A dataset that gives whole batches has a `collate_fn` of its own."""
    return DataLoader(items, collate_fn=getattr(items, "collate_fn", None), **how)


def _moment(step: int, parts: int, epochs: int) -> Moment:
    """Return the progress before a step, counted from 0, of a training with `parts` steps an epoch."""
    return Moment(done=step / (parts * epochs), left=(epochs - step // parts) / epochs)


def _batches(count: int, parts: int, settings: Settings) -> Iterator[list[int]]:
    """Return row numbers of every batch of a training: each row once an epoch, in batches of nearly one size."""
    rng = np.random.default_rng(settings.seed)
    for _ in range(settings.epochs):
        for rows in np.array_split(rng.permutation(count), parts):
            yield rows.tolist()


@dataclass(frozen=True, kw_only=True, slots=True)
class LossSpec:
    """A compatibility loss: its weights, and how it is made."""

    #: Of the classification and of the pull to the old model, as the loss's paper has them.
    weights: tuple[float, float] = (1.0, 1.0)
    #: Return the pull of an old model, for these items and settings; an nn.Module if it learns something, too.
    make: Callable[[Model, Items, Settings], Pull]


def _l2(old: Model, items: Items, settings: Settings) -> Pull:
    return lambda f_n, f_o, labels, at: l2.loss(f_n, f_o)


def _bct(old: Model, items: Items, settings: Settings) -> Pull:
    classifier = _old_classifier(old, items)
    return lambda f_n, f_o, labels, at: bct.loss(f_n, labels, classifier)


def _ract(old: Model, items: Items, settings: Settings) -> Pull:
    tau = settings.temperature or ract.TEMPERATURE
    return lambda f_n, f_o, labels, at: ract.loss(f_n, f_o, labels, temperature=tau)


def _hoc(old: Model, items: Items, settings: Settings) -> Pull:
    mu = 1 / settings.temperature if settings.temperature else hoc.MU
    return lambda f_n, f_o, labels, at: hoc.loss(f_n, f_o, labels, mu=mu)


def _advbct(old: Model, items: Items, settings: Settings) -> Pull:
    vectors, labels = embed(old.module, items)
    return advbct.AdvBCT(vectors, labels, classes=_classes(old, vectors, labels))


def _hyperbolic(loss: Callable[..., Tensor]) -> Callable[[Model, Items, Settings], Pull]:
    """Return what makes a hyperbolic loss, which refuses points that are not on its hyperboloid."""

    def make(old: Model, items: Items, settings: Settings) -> Pull:
        tau, curvature = settings.temperature or hbct.TEMPERATURE, settings.curvature

        def pull(f_n: Tensor, f_o: Tensor, labels: Tensor, at: Moment) -> Tensor:
            for name, points in (("new", f_n), ("old", f_o)):
                if not lorentz.holds(points.detach(), curvature=curvature):
                    raise Mismatch(
                        f"The {name} model's embeddings are not points of the hyperboloid with K = {curvature}; "
                        f"end it with losses.lorentz.Lift(curvature={curvature})"
                    )
            return loss(f_n, f_o, temperature=tau, curvature=curvature)

        return pull

    return make


#: A loss is a file of `losses` and one row here. `plain` has no pull.
LOSSES: Mapping[Loss, LossSpec] = {
    Loss.L2: LossSpec(make=_l2),
    Loss.BCT: LossSpec(make=_bct),
    Loss.RACT: LossSpec(make=_ract),
    Loss.HOC: LossSpec(weights=(0.1, 0.9), make=_hoc),
    Loss.ADVBCT: LossSpec(make=_advbct),
    Loss.HBCT: LossSpec(weights=(1.0, 0.3), make=_hyperbolic(hbct.loss)),
    Loss.HBCT_NO_ENTAIL: LossSpec(weights=(1.0, 0.3), make=_hyperbolic(hbct.contrast)),
}


def _old_classifier(old: Model, items: Items) -> nn.Module:
    if old.classifier is not None:
        return old.classifier
    return bct.Prototypes(*embed(old.module, items)).to(_device(old.module))


def _classes(old: Model, vectors: Tensor, labels: Tensor) -> int:
    """Return how many classes the old model knows; without its classifier, all of them."""
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
        raise UsageError(f"The loss {loss.value!r} pulls towards an old model; give one as old")
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
    """Seed random numbers inside the block, and leave the caller's as they are."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield
