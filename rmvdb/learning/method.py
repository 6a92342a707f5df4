"""The methods by name, and the values that training takes and returns.

The command line reads the names, so this file imports neither torch nor numpy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from rmvdb.errors import Mismatch, PlanRefused
from rmvdb.text import counted

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from rmvdb.learning.transforms import Transform
    from rmvdb.types import Vectors


class Method(StrEnum):
    """How the old part of the gallery is searched with a new query; docs/choosing.md has the table."""

    NAIVE = "naive"
    IDENTITY = "identity"
    PROCRUSTES = "procrustes"
    RIDGE = "ridge"
    CENTRED = "centred"
    NEIGHBOURS = "neighbours"
    BLEND = "blend"
    RQT = "rqt"
    CL_S = "cl-s"
    CL_M = "cl-m"
    MCL = "mcl"
    RM = "rm"
    FCT = "fct"

    @property
    def trains_reverse(self) -> bool:
        """Tell whether it makes a ψ from pairs, by training or in closed form."""
        return METHODS[self].loss is not None or self.is_closed_form or self.blends

    @property
    def is_closed_form(self) -> bool:
        """Tell whether its ψ is computed from pairs at once."""
        return METHODS[self].closed_form

    @property
    def blends(self) -> bool:
        """Tell whether the old model's own query vector is a part of the query."""
        return METHODS[self].blends

    @property
    def trains(self) -> bool:
        """Tell whether it makes anything from pairs."""
        return self.trains_reverse or self.lifts

    @property
    def has_transforms(self) -> bool:
        """Tell whether queries or records pass a transform."""
        return METHODS[self].has_transforms

    @property
    def has_head(self) -> bool:
        """Tell whether it trains a ρ, so that the new vectors change."""
        return METHODS[self].has_head

    @property
    def contrasts(self) -> bool:
        """Tell whether it learns from the classes of records."""
        return METHODS[self].loss not in (None, "rqt")

    @property
    def lifts(self) -> bool:
        """Tell whether it trains h, which lifts a copy of the old collection."""
        return METHODS[self].lifts

    @property
    def headless(self) -> Method:
        """Return the method with the same loss without ρ, which leaves the new model's vectors as they are."""
        return METHODS[self].headless or self


@dataclass(frozen=True, kw_only=True, slots=True)
class MethodSpec:
    """The properties of a method that planning, training and upgrading ask for."""

    #: The loss that trains ψ, and ρ if the method has one: a name in `training.OBJECTIVES`. None trains neither.
    loss: str | None = None
    #: Whether its ψ is computed from pairs at once, by `closed_forms.variants`. It reads no labels.
    closed_form: bool = False
    #: Whether it trains a ρ, so that the new vectors change.
    has_head: bool = False
    #: The method with the same loss without ρ, if that is another one.
    headless: Method | None = None
    #: Whether queries or records pass a transform. A plan without one needs no pairs.
    has_transforms: bool = True
    #: Whether it needs the embedders of the old models, to embed each query or to keep the original current.
    needs_old_embedders: bool = False
    #: Whether it compares new vectors with old ones as they are, so that both must lie in one space.
    shares_space: bool = False
    #: Whether it trains h, which lifts a copy of one old collection.
    lifts: bool = False
    #: Whether each old leg has one query vector of both models.
    blends: bool = False
    #: Whether both models embed each query.
    embeds_twice: bool = False
    #: Whether `auto` compares it with others on the sample.
    is_candidate: bool = False


#: A method is one row here, and its loss one row in `training.OBJECTIVES`.
METHODS: Mapping[Method, MethodSpec] = {
    # Both models embed the query. Nothing is trained.
    Method.NAIVE: MethodSpec(has_transforms=False, needs_old_embedders=True, embeds_twice=True, is_candidate=True),
    # ψ is the identity: the new model was trained to be comparable with the old one (BCT and its kin).
    Method.IDENTITY: MethodSpec(shares_space=True, is_candidate=True),
    # ψ in closed form: the formulas are in `closed_forms`.
    Method.PROCRUSTES: MethodSpec(closed_form=True, is_candidate=True),
    Method.RIDGE: MethodSpec(closed_form=True, is_candidate=True),
    Method.CENTRED: MethodSpec(closed_form=True, is_candidate=True),
    Method.NEIGHBOURS: MethodSpec(closed_form=True, is_candidate=True),
    # One query vector of both models' for each old leg, with the best ψ in closed form.
    Method.BLEND: MethodSpec(needs_old_embedders=True, blends=True, embeds_twice=True, is_candidate=True),
    # ψ by regression, Eq. 9.
    Method.RQT: MethodSpec(loss="rqt", is_candidate=True),
    # ψ by contrast within the old space, Eq. 10.
    Method.CL_S: MethodSpec(loss="cl_s"),
    # ψ and ρ, each by contrast in its own space, Eq. 14.
    Method.CL_M: MethodSpec(loss="cl_m", has_head=True, headless=Method.CL_S),
    # ψ by contrast across both spaces, Eq. 11.
    Method.MCL: MethodSpec(loss="mcl"),
    # ψ and ρ by contrast across both spaces, Eq. 11-13.
    Method.RM: MethodSpec(loss="mcl", has_head=True, headless=Method.MCL, is_candidate=True),
    # Without ψ: h lifts the old gallery into the new space (Ramanujan et al., CVPR 2022).
    Method.FCT: MethodSpec(lifts=True, needs_old_embedders=True),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingSettings:
    """How to train. The defaults did best on held-out pairs; `paper()` has what the paper prints."""

    epochs: int = 50
    #: Small samples are repeated for more epochs, until training has made this many steps.
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
    #: Without labels, k-means clusters of the new space stand in for classes; None is 3 √n.
    clusters: int | None = None
    #: Weight of Eq. 9 beside the contrast: classes alone forget which record is which. None is 1 with clusters and 0 with labels;
    #: with labels a plan tries 1, too.
    pull: float | None = None
    seed: int = 0

    @classmethod
    def paper(cls, *, blocks: int = 2, seed: int = 0) -> TrainingSettings:
        """Return the paper's appendix B.2, as printed: no temperature, no residual, learning rate 1e-4, 50 epochs."""
        return cls(least_steps=0, lr=1e-4, batch=128, blocks=blocks, temperature=1.0, residual=False, pull=0.0, seed=seed)

    def weight_of_pull(self, *, labelled: bool) -> float:
        """Return `pull`, or the weight that None stands for."""
        if self.pull is not None:
            return self.pull
        return 0.0 if labelled else 1.0


#: With fewer pairs nothing is learnt.
LEAST_PAIRS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Pairs:
    """Old and new vectors of the same records, row by row."""

    #: (n, d_old)
    old: Vectors
    #: (n, d_new)
    new: Vectors
    #: (n,) classes or identities; None if they are unknown.
    labels: npt.NDArray[np.generic] | None = None
    #: (n, d_side) side information of the records, which helps h; None if there is none.
    side: Vectors | None = None
    #: The records as queries. None: a record's vector is its query.
    as_queries: AsQueries | None = None

    def __post_init__(self) -> None:
        rows = {len(each) for each in (self.old, self.new, self.labels, self.side) if each is not None}
        if len(rows) > 1 or self.old.ndim != 2 or self.new.ndim != 2:
            shapes = [self.old.shape, self.new.shape, None if self.labels is None else self.labels.shape]
            raise Mismatch(f"Pairs go row by row, but have the shapes {shapes}; give each record one old and one new vector")

    def __len__(self) -> int:
        return len(self.old)

    def check(self) -> None:
        """Raise PlanRefused if there are too few pairs to learn from, or if they are not finite."""
        import numpy as np

        if len(self) < LEAST_PAIRS:
            raise PlanRefused(
                f"{counted(len(self), 'pair is', 'pairs are')} too few to train on; give a larger sample, "
                "or plan with the method naive"
            )
        for name, vectors in (("old", self.old), ("new", self.new)):
            if not np.isfinite(vectors).all():
                raise PlanRefused(
                    f"The {name} vectors of the sample hold NaN or infinite values; fix the {name} model's embedder"
                )
        if self.side is not None and not np.isfinite(self.side).all():
            raise PlanRefused("The side information of the sample holds NaN or infinite values; correct the field that has it")

    def take(self, rows: npt.NDArray[np.intp]) -> Pairs:
        """Return the pairs of these rows."""
        labels = None if self.labels is None else self.labels[rows]
        asked = None if self.as_queries is None else self.as_queries.take(rows)
        side = None if self.side is None else self.side[rows]
        return Pairs(old=self.old[rows], new=self.new[rows], labels=labels, side=side, as_queries=asked)


@dataclass(frozen=True, kw_only=True, slots=True)
class AsQueries:
    """Records embedded as queries, row by row, NaN for those that were not."""

    #: (n, d_old)
    old: Vectors
    #: (n, d_new)
    new: Vectors
    #: Whether queries are excerpts of their records' texts, which these records answer. Else each is its record's own item.
    excerpts: bool
    #: Which queries are their records' own items all the same, (n,), such as short texts. None: none of the excerpts is.
    whole: npt.NDArray[np.bool_] | None = None

    def take(self, rows: npt.NDArray[np.intp]) -> AsQueries:
        """Return these rows."""
        whole = None if self.whole is None else self.whole[rows]
        return AsQueries(old=self.old[rows], new=self.new[rows], excerpts=self.excerpts, whole=whole)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fitted:
    """The transforms of a method."""

    #: ρ: new → final new; None leaves the new model as it is.
    head: Transform | None = None
    #: ψ: final new → old; None if the old model embeds the query, too.
    reverse: Transform | None = None
    #: h: old → new, for stored vectors; queries then need no ψ.
    lift: Transform | None = None
    #: The weight of the old model's own query beside ψ's, from 0 to 1. None: the query is ψ's alone, or the old model's if there
    #: is no ψ.
    blend: float | None = None

    def final(self, new: Vectors) -> Vectors:
        """Return the vectors that the new collection stores and searches: ρ(f_n), (n, d_new) to (n, d_new)."""
        return new if self.head is None else self.head.apply(new)

    def lifted(self, old: Vectors, side: Vectors | None = None) -> Vectors:
        """Return the vectors in which the old part of the gallery is searched: h(f_o), (n, d_old) to (n, d_new), or f_o without
        h."""
        if self.lift is None:
            return old
        import numpy as np

        return self.lift.apply(old if side is None else np.concatenate([old, side], axis=1))
