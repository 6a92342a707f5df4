"""The methods by name, what they are trained on and how, and what comes of it; without torch, which only training needs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from rmvdb.errors import Mismatch
from rmvdb.types import Vectors

if TYPE_CHECKING:
    from rmvdb.learning.transforms import Transform


class Method(StrEnum):
    """How the old part of the gallery is searched with a new query; docs/choosing.md has the table."""

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
    #: No ψ: h lifts the old gallery into the new space (Ramanujan et al., CVPR 2022).
    FCT = "fct"

    @property
    def trains_reverse(self) -> bool:
        """Whether it trains a ψ."""
        return self not in (Method.NAIVE, Method.IDENTITY, Method.FCT)

    @property
    def has_head(self) -> bool:
        """Whether it trains a ρ, so that the new vectors change."""
        return self in (Method.CL_M, Method.RM)

    @property
    def contrasts(self) -> bool:
        """Whether it learns from which records are of one class."""
        return self in (Method.CL_S, Method.CL_M, Method.MCL, Method.RM)

    @property
    def headless(self) -> Method:
        """The same loss without ρ, which leaves the new model's vectors as they are."""
        return {Method.CL_M: Method.CL_S, Method.RM: Method.MCL}.get(self, self)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingSettings:
    """How to train; the defaults are what held up best on held-out pairs, `paper()` is what the paper prints."""

    epochs: int = 50
    #: Small samples are gone through more often, until this many steps are made.
    least_steps: int = 400
    lr: float = 1e-3
    batch: int = 512
    #: 1 to 5, of Linear → BatchNorm → ReLU, the last one Linear only.
    blocks: int = 2
    #: Width between blocks; None is twice the wider of the two spaces (fct: four times the new one).
    hidden: int | None = None
    #: τ in s = exp(−dist/τ).
    temperature: float = 0.1
    #: Footnote 2: only the harder half of the positives and of the negatives counts.
    mining: bool = True
    #: ρ(x) = x̂ + MLP(x̂), starting at the identity.
    residual: bool = True
    #: k-means clusters of the new space that stand in for classes where there are no labels; None is 3 √n.
    clusters: int | None = None
    #: Weight of Eq. 9 beside the contrast: classes alone forget which record is which. None: 0 with labels, where a
    #: plan tries 1, too, and 1 with clusters.
    pull: float | None = None
    seed: int = 0

    @classmethod
    def paper(cls, *, blocks: int = 2, seed: int = 0) -> TrainingSettings:
        """The paper's appendix B.2, as printed: no temperature, no residual, learning rate 1e-4, 50 epochs."""
        return cls(least_steps=0, lr=1e-4, batch=128, blocks=blocks, temperature=1.0, residual=False, pull=0.0, seed=seed)

    def weight_of_pull(self, *, labelled: bool) -> float:
        """`pull`, or what it is where it is None."""
        if self.pull is not None:
            return self.pull
        return 0.0 if labelled else 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Pairs:
    """Old and new vectors of the same records, row by row."""

    #: (n, d_old)
    old: Vectors
    #: (n, d_new)
    new: Vectors
    #: (n,) classes or identities; None where nobody knows them.
    labels: npt.NDArray[np.generic] | None = None
    #: (n, d_side) what else is known of the records, by which h may lift them; None where nothing is.
    side: Vectors | None = None

    def __post_init__(self) -> None:
        rows = {len(each) for each in (self.old, self.new, self.labels, self.side) if each is not None}
        if len(rows) > 1 or self.old.ndim != 2 or self.new.ndim != 2:
            shapes = [self.old.shape, self.new.shape, None if self.labels is None else self.labels.shape]
            raise Mismatch(f"Pairs go row by row, but have the shapes {shapes}; give each record one old and one new vector")

    def __len__(self) -> int:
        return len(self.old)

    def take(self, rows: npt.NDArray[np.intp]) -> Pairs:
        """The pairs of these rows."""
        labels = None if self.labels is None else self.labels[rows]
        return Pairs(old=self.old[rows], new=self.new[rows], labels=labels, side=None if self.side is None else self.side[rows])


@dataclass(frozen=True, kw_only=True, slots=True)
class Fitted:
    """What was trained."""

    #: ρ: new → final new; None leaves the new model as it is.
    head: Transform | None = None
    #: ψ: final new → old; None where the old model embeds the query too.
    reverse: Transform | None = None
    #: h: old → new, of what is stored; with it queries need no ψ.
    lift: Transform | None = None

    def final(self, new: Vectors) -> Vectors:
        """What is stored and searched in the new collection: ρ(f_n), (n, d_new) to (n, d_new)."""
        return new if self.head is None else self.head.apply(new)

    def lifted(self, old: Vectors, side: Vectors | None = None) -> Vectors:
        """What the old part of the gallery is searched in: h(f_o), (n, d_old) to (n, d_new); as it is where there is no h."""
        return old if self.lift is None else self.lift.apply(old if side is None else np.concatenate([old, side], axis=1))
