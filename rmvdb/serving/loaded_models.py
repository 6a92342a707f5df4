"""From items to vectors: each embedder runs once, each chain of transforms once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from rmvdb import errors
from rmvdb.items.check import CheckedEmbedder
from rmvdb.items.kinds import REQUIRED
from rmvdb.protocols import Embedder
from rmvdb.types import Item, Leg, ServingPlan, Vectors

if TYPE_CHECKING:
    from rmvdb.learning.calibration import Calibration
    from rmvdb.learning.transforms import Transform

T = TypeVar("T")

#: Libraries that load models are not made for several threads of a process at once.
_one_model_at_a_time = threading.RLock()


@dataclass(frozen=True, kw_only=True, slots=True)
class Chain:
    """How a model version's own vectors are made: its embedder, then its head where it has one."""

    #: The version whose embedder runs (the base of a version with a head).
    embedder: str
    dim: int
    head: str | None = None


class LoadedModels:
    """Makes vectors for the legs of a plan. Loads what it needs once and keeps it; safe to share between threads.

    `load_embedder` gives the embedder of a version name, whose module `import_embedder` imports first, `load_chain` how a
    version's vectors are made, `load_artifact` the checked bytes of an artifact, `load_digests` what each version is, by name.
    """

    def __init__(
        self,
        *,
        load_embedder: Callable[[str], Embedder],
        load_chain: Callable[[str], Chain],
        load_artifact: Callable[[str], bytes],
        import_embedder: Callable[[str], object] = lambda _: None,
        load_digests: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        self._load_embedder, self._import_embedder = load_embedder, import_embedder
        self._load_chain = load_chain
        self._load_artifact, self._load_digests = load_artifact, load_digests
        self._digests: Mapping[str, str] = {}
        self._kept: dict[tuple[str, str], object] = {}
        self._loading: dict[tuple[str, str], threading.Lock] = {}
        self._lock = threading.Lock()

    def prepare(self, plan: ServingPlan) -> None:
        """Load everything that the plan's queries and mirrors need; raises what loading raises."""
        self.refresh()
        for leg in plan.write_targets:
            version, transforms = self._writes(leg)
            for each in {leg.embedder, version}:
                self.embedder(each)
            for sha256 in (*leg.transforms, *transforms):
                self._transform(sha256)
            self.calibration(leg)

    def refresh(self) -> None:
        """Let go of what was loaded of a version that is forgotten by now, or that another one has the name of."""
        before, self._digests = self._digests, self._load_digests()
        others = {name for name, digest in before.items() if digest != self._digests.get(name)}
        with self._lock:
            for kind, name in list(self._kept):
                if kind in (Embedder.__name__, Chain.__name__) and name in others:
                    del self._kept[kind, name]

    def _note(self, version: str) -> None:
        """What a version is when something of it is first loaded."""
        if version not in self._digests:
            self._digests = {**self._load_digests(), **self._digests}

    def embed(self, version: str, items: Sequence[Item], *, confirm: bool = False) -> Vectors:
        """Raw vectors (n, dim) of a version's embedder; ItemError where one item fails, ModelError where all do.

        `confirm` embeds one of the items once more, to see that the rows are in the order of the items.
        """
        return CheckedEmbedder(self.embedder(version), dim=self.chain(version).dim, confirm=confirm).embed(items)

    def queries(self, plan: ServingPlan, items: Sequence[Item], embedded: MutableMapping[str, Vectors]) -> dict[str, Vectors]:
        """The query vectors (n, dim of the leg) of each leg, by collection; `embedded` keeps what each embedder gave."""
        for version in plan.embedders:
            if version not in embedded:
                embedded[version] = self.embed(version, items)
        return self._chains(plan, {(leg.collection): (embedded[leg.embedder], leg.transforms) for leg in plan.legs})

    def vectors(self, plan: ServingPlan, vectors: Vectors, model: str) -> dict[str, Vectors]:
        """The query vectors of each leg from vectors (n, dim) of a named model; Mismatch where no transform leads there."""
        starts = {leg.collection: (vectors, self._rest(plan, leg, model)) for leg in plan.legs}
        dim = self.chain(model).dim
        if vectors.ndim != 2 or vectors.shape[1] != dim:
            raise errors.Mismatch(
                f"A vector of model {model!r} has dimension {dim}, not shape {vectors.shape}; name the model that made it"
            )
        if not np.isfinite(vectors).all():
            raise errors.Mismatch("A vector to search with has values that are not finite; mend what made it")
        return self._chains(plan, starts)

    def stored(self, leg: Leg, items: Sequence[Item], embedded: MutableMapping[str, Vectors]) -> Vectors:
        """What is written into a leg's collection for these items, (n, dim of the leg)."""
        version, transforms = self._writes(leg)
        if version not in embedded:
            # The rows of a batch as small as the probes were compared when the model was loaded.
            embedded[version] = self.embed(version, items, confirm=len(items) > REQUIRED)
        return self.apply(transforms, embedded[version])

    def _writes(self, leg: Leg) -> tuple[str, tuple[str, ...]]:
        """Whose embedder makes what is written into a leg's collection, and the transforms behind it."""
        if not leg.write_with:
            return leg.embedder, leg.transforms
        chain = self.chain(leg.write_with)
        return chain.embedder, (chain.head,) if chain.head else ()

    def apply_head(self, version: str, raw: Vectors) -> Vectors:
        """A version's own vectors from what its embedder gave: its head applied where it has one."""
        head = self.chain(version).head
        return self.apply((head,) if head else (), raw)

    def apply(self, transforms: Sequence[str], vectors: Vectors) -> Vectors:
        """The transforms one after the other."""
        for sha256 in transforms:
            vectors = self._transform(sha256).apply(vectors)
        return vectors

    def lift(self, sha256: str, vectors: Vectors, known: Sequence[object]) -> Vectors:
        """h of stored vectors, (n, d_old) to (n, d_new), each with its side information: a list of numbers, else zeros."""
        transform = self._transform(sha256)
        width = transform.config.side
        side = [each if isinstance(each, list) and len(each) == width else [0.0] * width for each in known]
        return transform.apply(np.hstack([vectors, np.array(side, dtype=np.float32).reshape(len(vectors), width)]))

    def calibration(self, leg: Leg) -> Calibration | None:
        """The map from this leg's distances to the common scale, where it has one."""
        if leg.calibration is None:
            return None
        from rmvdb.learning.calibration import Calibration

        sha256 = leg.calibration
        return self._keep(Calibration, sha256, lambda: Calibration.from_bytes(self._load_artifact(sha256)))

    def _rest(self, plan: ServingPlan, leg: Leg, model: str) -> tuple[str, ...]:
        if model == leg.embedder:
            return leg.transforms
        for start in plan.legs:
            if start.model == model and (rest := leg.transforms_after(start)) is not None:
                return rest
        if model == leg.model:
            return ()
        known = sorted({each.embedder for each in plan.legs} | {plan.legs[0].model})
        raise errors.Mismatch(
            f"No transform leads from vectors of model {model!r} to collection {leg.collection!r}; "
            f"search with vectors of {' or '.join(known)}"
        )

    def _chains(self, plan: ServingPlan, starts: Mapping[str, tuple[Vectors, tuple[str, ...]]]) -> dict[str, Vectors]:
        # ρ is a prefix of ψ∘ρ: what was computed for one leg is where the next one goes on.
        made: dict[tuple[int, tuple[str, ...]], Vectors] = {}

        def chain(vectors: Vectors, transforms: tuple[str, ...]) -> Vectors:
            if not transforms:
                return vectors
            if (at := (id(vectors), transforms)) not in made:
                made[at] = self._transform(transforms[-1]).apply(chain(vectors, transforms[:-1]))
            return made[at]

        return {leg.collection: chain(*starts[leg.collection]) for leg in plan.legs}

    def embedder(self, version: str) -> Embedder:
        """The embedder of a version, loaded once; ModelError where it cannot be loaded."""
        self._note(version)
        if ("Embedder", version) not in self._kept:
            self._import_embedder(version)  # under no lock: whoever is importing it just now may be waiting for this embedder

        def load() -> Embedder:
            with _one_model_at_a_time:
                return self._load_embedder(version)

        return self._keep(Embedder, version, load)  # type: ignore[type-abstract]

    def chain(self, version: str) -> Chain:
        """How a version's own vectors are made."""
        self._note(version)
        return self._keep(Chain, version, lambda: self._load_chain(version))

    def _transform(self, sha256: str) -> Transform:
        from rmvdb.learning.transforms import Transform

        return self._keep(Transform, sha256, lambda: Transform.from_bytes(self._load_artifact(sha256)))

    def _keep(self, kind: type[T], name: str, load: Callable[[], T]) -> T:
        at = (kind.__name__, name)
        with self._lock:
            loading = self._loading.setdefault(at, threading.Lock())
        with loading:  # of this one only: searches go on while the next model is loaded
            found = self._kept.get(at)
            if found is None:
                found = self._kept[at] = load()
            return found  # type: ignore[return-value]
