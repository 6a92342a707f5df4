"""The pictures of a table in parts: some teach the models, some teach ψ and ρ, and some are searched."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from examples.paper_tables.data import DataSet, Pictures
from rmvdb.errors import UsageError

#: The share of the training pictures that no model learns. A model is surer of pictures that it has learnt by heart than of a
#: gallery, so ψ and ρ must learn from others.
KEPT = 0.2
SEED = 0


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The most pictures of each part. None takes all of them."""

    taught: int | None = None
    paired: int | None = None
    searched: int | None = None


@dataclass(frozen=True, kw_only=True)
class Task:
    """The parts. No picture is in two of them, but the new model may learn pictures of the old one, too."""

    #: The pictures that each model learns. Classes are numbered from 0. If the new model learns those of the old model, they come
    #: first.
    old: Pictures
    new: Pictures
    #: Whether the new model learns the old model's classes.
    shared: bool
    #: The pictures that ψ, ρ, h and the calibrations learn.
    pairs: Pictures
    gallery: Pictures
    #: None if every picture of the gallery is searched for among the others.
    queries: Pictures | None
    #: Whether a mirrored picture stays in its class.
    mirrored: bool
    #: The pictures that each model of a sequence learns: those of the model before it, and more.
    steps: tuple[Pictures, ...] = ()

    @property
    def taught(self) -> dict[str, Pictures]:
        """Return the pictures that models learn, by the names that recipes give them."""
        return {"old": self.old, "new": self.new} | {str(number): step for number, step in enumerate(self.steps)}


def extended_class(data: DataSet, sizes: Sizes, *, kept: float = KEPT, share: float = 0.5) -> Task:
    """Let the old model learn the first classes, or the first families of classes (alphabets). The new model learns all."""
    families = data.train.labels if data.families is None else data.families
    first = np.unique(families)[: int(share * len(np.unique(families)))]
    return _task(data, sizes, kept, known=np.unique(data.train.labels[np.isin(families, first)]))


def extended_data(data: DataSet, sizes: Sizes, *, kept: float = KEPT, share: float = 0.3) -> Task:
    """Let both models learn all classes, the old one from a random part of the pictures."""
    return _task(data, sizes, kept, known=np.unique(data.train.labels), share=share)


def open_class(data: DataSet, sizes: Sizes, *, kept: float = KEPT, share: float = 0.3) -> Task:
    """Let the old model learn a random part of the classes, and the new model the others."""
    classes = np.random.default_rng(SEED).permutation(np.unique(data.train.labels))
    return _task(data, sizes, kept, known=np.sort(classes[: int(share * len(classes))]), apart=True)


def sequence(data: DataSet, sizes: Sizes, *, kept: float = KEPT, count: int = 5) -> Task:
    """Make a sequence of `count` models. Each learns as many more classes as the first one has."""
    whole = extended_class(data, sizes, kept=kept, share=1 / count)
    first = len(np.unique(whole.old.labels))
    steps = [whole.new.take(np.flatnonzero(whole.new.labels < first * (number + 1))) for number in range(count - 1)]
    return replace(whole, steps=(*steps, whole.new))


def _task(data: DataSet, sizes: Sizes, kept: float, *, known: np.ndarray, share: float = 1.0, apart: bool = False) -> Task:
    """Make the parts. The old model sees a `share` of the pictures of `known` classes. If `apart`, the new model sees none."""
    taught, paired = _held_back(data, kept)
    taught, paired = taught[: sizes.taught], paired[: sizes.paired]
    pictures = data.train.take(taught)
    old = pictures.take(np.flatnonzero(np.isin(pictures.labels, known)))
    old = old.take(np.arange(len(old))[: round(share * len(old))])
    new = pictures.take(np.flatnonzero(~np.isin(pictures.labels, known))) if apart else pictures
    if not (len(old) and len(new)):
        raise UsageError(f"{len(old)} pictures for the old model and {len(new)} for the new one are too few; give more pictures")
    gallery, queries = _searched(data, sizes.searched)
    return Task(
        old=_numbered(old, known),
        new=_numbered(new, np.empty(0) if apart else known),
        shared=not apart,
        pairs=data.train.take(paired),
        gallery=gallery,
        queries=queries,
        mirrored=data.mirrored,
    )


def _held_back(data: DataSet, kept: float) -> tuple[np.ndarray, np.ndarray]:
    """Shuffle the training pictures. Return the rows for the models, and the rows that are kept from them."""
    rows = np.random.default_rng(SEED).permutation(len(data.train))
    if not _open(data):
        cut = len(rows) - round(kept * len(rows))
        return rows[:cut], rows[cut:]
    # No model has seen the identities that are searched. So the kept pictures have identities that no model has seen, too.
    identities = np.random.default_rng(SEED).permutation(np.unique(data.train.labels))
    unseen = np.isin(data.train.labels[rows], identities[len(identities) - round(kept * len(identities)) :])
    return rows[~unseen], _side_by_side(data.train, rows[unseen], identities)


def _searched(data: DataSet, most: int | None) -> tuple[Pictures, Pictures | None]:
    """Return gallery and queries. Open identities are taken whole, so that each query has something to find."""
    if most is None or most >= len(data.gallery):
        return data.gallery, data.queries
    rows = np.random.default_rng(SEED).permutation(len(data.gallery))
    if not _open(data):
        return data.gallery.take(rows[:most]), data.queries
    identities = np.random.default_rng(SEED).permutation(np.unique(data.gallery.labels))
    counts = np.cumsum([(data.gallery.labels == each).sum() for each in identities])
    chosen = identities[counts <= most]
    gallery = data.gallery.take(np.flatnonzero(np.isin(data.gallery.labels, chosen)))
    return gallery, data.queries and data.queries.take(np.flatnonzero(np.isin(data.queries.labels, chosen)))


def _side_by_side(pictures: Pictures, rows: np.ndarray, identities: np.ndarray) -> np.ndarray:
    """Sort the rows by identity, in the order of `identities`. So the first rows hold whole identities."""
    place = {identity: number for number, identity in enumerate(identities.tolist())}
    return rows[np.argsort([place[label] for label in pictures.labels[rows].tolist()], kind="stable")]


def _open(data: DataSet) -> bool:
    """Return whether the identities are open: no model learns one that is searched."""
    return not np.isin(data.gallery.labels, data.train.labels).any()


def _numbered(pictures: Pictures, first: np.ndarray) -> Pictures:
    """Number the classes from 0, beginning with those of `first`."""
    found = np.unique(pictures.labels)
    order = np.concatenate([first[np.isin(first, found)], found[~np.isin(found, first)]]) if len(first) else found
    place = {label: number for number, label in enumerate(order.tolist())}
    labels = np.array([place[label] for label in pictures.labels.tolist()], dtype=np.int64)
    return Pictures(images=pictures.images, labels=labels, cameras=pictures.cameras)
