"""Which pictures each model learns, which are kept from both to learn ψ and ρ on, and which are searched."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from examples.paper_tables.data import DataSet, Pictures
from rmvdb.errors import UsageError

#: The share of the training pictures that no model learns: on what a model has learnt by heart it is surer than on a gallery.
KEPT = 0.2
SEED = 0


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The most pictures of each part; None for all that there are."""

    taught: int | None = None
    paired: int | None = None
    searched: int | None = None


@dataclass(frozen=True, kw_only=True)
class Task:
    """The parts; no picture is in two of them, but what the old model learns the new one may learn, too."""

    #: What the models learn, classes numbered from 0: those of the old model first, where the new one has them, too.
    old: Pictures
    new: Pictures
    #: Whether it has.
    shared: bool
    #: What ψ, ρ, h and the calibrations learn.
    pairs: Pictures
    gallery: Pictures
    #: None: every picture of the gallery is searched for among the others.
    queries: Pictures | None
    mirrored: bool
    #: What the models of a sequence learn, each what the one before it did and more.
    steps: tuple[Pictures, ...] = ()

    @property
    def taught(self) -> dict[str, Pictures]:
        """What models learn, by the names that recipes have for it."""
        return {"old": self.old, "new": self.new} | {str(number): step for number, step in enumerate(self.steps)}


def extended_class(data: DataSet, sizes: Sizes, *, kept: float = KEPT, share: float = 0.5) -> Task:
    """The old model learns the first classes, or the first families of them (alphabets), the new one all."""
    families = data.train.labels if data.families is None else data.families
    first = np.unique(families)[: int(share * len(np.unique(families)))]
    return _task(data, sizes, kept, known=np.unique(data.train.labels[np.isin(families, first)]))


def extended_data(data: DataSet, sizes: Sizes, *, kept: float = KEPT, share: float = 0.3) -> Task:
    """Both models learn all classes, the old one from a random part of the pictures."""
    return _task(data, sizes, kept, known=np.unique(data.train.labels), share=share)


def open_class(data: DataSet, sizes: Sizes, *, kept: float = KEPT, share: float = 0.3) -> Task:
    """The old model learns a random part of the classes, the new one the others."""
    classes = np.random.default_rng(SEED).permutation(np.unique(data.train.labels))
    return _task(data, sizes, kept, known=np.sort(classes[: int(share * len(classes))]), apart=True)


def sequence(data: DataSet, sizes: Sizes, *, kept: float = KEPT, count: int = 5) -> Task:
    """So many models, each with as many more classes as the first one has."""
    whole = extended_class(data, sizes, kept=kept, share=1 / count)
    first = len(np.unique(whole.old.labels))
    steps = [whole.new.take(np.flatnonzero(whole.new.labels < first * (number + 1))) for number in range(count - 1)]
    return replace(whole, steps=(*steps, whole.new))


def _task(data: DataSet, sizes: Sizes, kept: float, *, known: np.ndarray, share: float = 1.0, apart: bool = False) -> Task:
    """`known` are the old model's classes, of which it sees a `share` of the pictures; `apart`: the new model sees none."""
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
    """Rows of the training pictures, shuffled: for the models, and kept from them."""
    rows = np.random.default_rng(SEED).permutation(len(data.train))
    if not _open(data):
        cut = len(rows) - round(kept * len(rows))
        return rows[:cut], rows[cut:]
    # What is searched has identities that nobody has seen, and so has what is kept.
    identities = np.random.default_rng(SEED).permutation(np.unique(data.train.labels))
    unseen = np.isin(data.train.labels[rows], identities[len(identities) - round(kept * len(identities)) :])
    return rows[~unseen], _side_by_side(data.train, rows[unseen], identities)


def _searched(data: DataSet, most: int | None) -> tuple[Pictures, Pictures | None]:
    """Gallery and queries; of open identities only whole ones, so that there is something to find."""
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
    """The rows sorted by identity, identities as given: the first so many rows hold whole ones."""
    place = {identity: number for number, identity in enumerate(identities.tolist())}
    return rows[np.argsort([place[label] for label in pictures.labels[rows].tolist()], kind="stable")]


def _open(data: DataSet) -> bool:
    return not np.isin(data.gallery.labels, data.train.labels).any()


def _numbered(pictures: Pictures, first: np.ndarray) -> Pictures:
    """Classes numbered from 0, those of `first` first."""
    found = np.unique(pictures.labels)
    order = np.concatenate([first[np.isin(first, found)], found[~np.isin(found, first)]]) if len(first) else found
    place = {label: number for number, label in enumerate(order.tolist())}
    labels = np.array([place[label] for label in pictures.labels.tolist()], dtype=np.int64)
    return Pictures(images=pictures.images, labels=labels, cameras=pictures.cameras)
