"""Items to vectors. Each embedder and each chain of transforms runs once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar, cast

import numpy as np

from rmvdb import errors
from rmvdb.canonical.vectors import unrankable
from rmvdb.items.check import CheckedEmbedder, embed_checked
from rmvdb.items.kinds import REQUIRED
from rmvdb.items.query_embedder import QueryEmbedder
from rmvdb.protocols import Embedder
from rmvdb.serving.blend import blended
from rmvdb.timing import ProcessLock, uptime
from rmvdb.types import Item, Leg, ServingPlan, Vectors

if TYPE_CHECKING:
    from rmvdb.learning.references import LegScale, Scale
    from rmvdb.learning.transforms import Transform

T = TypeVar("T")

#: Libraries that load models are not safe for several threads at once.
_one_model_at_a_time = ProcessLock(threading.RLock)


@dataclass(frozen=True, kw_only=True, slots=True)
class Chain:
    """How a model version makes its own vectors: its embedder, then its head if it has one."""

    #: The version whose embedder runs (the base of a version with a head).
    embedder: str
    dim: int
    head: str | None = None
    #: Whether that embedder embeds queries by `embed_queries`.
    has_own_queries: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Made:
    """The vectors that a leg's own model makes of some items."""

    #: The version whose embedder made them.
    embedder: str
    #: The embedder's vectors (n, its dim), and those to store (n, dim of the leg).
    raw: Vectors
    vectors: Vectors
    #: Why an item has no vector, by its place. Its rows say nothing.
    failed: Mapping[int, str]


class LoadedModels:
    """Makes vectors for the legs of a plan. Loads each model once and keeps it. Safe to share between threads.

    `load_embedder` returns a version's embedder, whose module `import_embedder` imports first. `load_chain` returns how a version
    makes its vectors, `load_artifact` the checked bytes of an artifact, `load_digests` the digest of each version, by name.
    `check_embedder` compares an embedder with its registration. `load_embedder` has done so, too.
    """

    def __init__(
        self,
        *,
        load_embedder: Callable[[str], Embedder],
        load_chain: Callable[[str], Chain],
        load_artifact: Callable[[str], bytes],
        import_embedder: Callable[[str], object] = lambda _: None,
        load_digests: Callable[[], Mapping[str, str]] = dict,
        check_embedder: Callable[[str, Embedder], object] = lambda *_: None,
    ) -> None:
        self._load_embedder, self._import_embedder = load_embedder, import_embedder
        self._load_chain = load_chain
        self._load_artifact, self._load_digests = load_artifact, load_digests
        self._check_embedder = check_embedder
        self._checked: dict[str, float] = {}
        self._digests: Mapping[str, str] = {}
        self._loaded: dict[tuple[str, str], object] = {}
        self._loading: dict[tuple[str, str], threading.Lock] = {}
        self._lock = threading.Lock()

    def prepare(self, plan: ServingPlan) -> None:
        """Load the models and artifacts of the plan's queries and mirrors. Raises the errors of loading."""
        self.refresh()
        for leg in plan.write_targets:
            version, transforms = self._writes(leg)
            asking = leg.blend
            for each in {leg.embedder, version, *([asking.embedder] if asking else [])}:
                self.embedder(each)
                self.chain(each)
            for sha256 in (*leg.transforms, *transforms, *(asking.transforms if asking else ())):
                self._transform(sha256)
            self._calibration(leg)

    def refresh(self) -> None:
        """Drop the models of versions that were removed, or whose name another version has now."""
        before, self._digests = self._digests, self._load_digests()
        changed = {name for name, digest in before.items() if digest != self._digests.get(name)}
        with self._lock:
            for kind, name in list(self._loaded):
                if kind in (Embedder.__name__, Chain.__name__) and name in changed:
                    del self._loaded[kind, name]

    def _note(self, version: str) -> None:
        """Note a version's digest when one of its parts is first loaded."""
        if version not in self._digests:
            self._digests = {**self._load_digests(), **self._digests}

    def embed(self, version: str, items: Sequence[Item], *, confirm: bool = False) -> Vectors:
        """Embed items with a version's embedder. Return its raw vectors (n, dim).

        `confirm` embeds one of the items again, to check that the rows are in the order of the items.

        Raises:
            ItemError: one item fails.
            ModelError: all items fail.
        """
        return CheckedEmbedder(self.embedder(version), dim=self.chain(version).dim, confirm=confirm).embed(items)

    def embed_queries(self, version: str, items: Sequence[Item]) -> Vectors:
        """Embed queries with a version's embedder: by `embed_queries`, if it was registered with that. Raises as `embed`."""
        return CheckedEmbedder(self.query_embedder(version), dim=self.chain(version).dim).embed(items)

    def queries(self, plan: ServingPlan, items: Sequence[Item], embedded: MutableMapping[str, Vectors]) -> dict[str, Vectors]:
        """Return the query vectors (n, dim of the leg) of each leg, by collection. `embedded` keeps each embedder's vectors."""
        for version in plan.embedders:
            if version not in embedded:
                embedded[version] = self.embed_queries(version, items)
        own = [(embedded[leg.embedder], leg.transforms) for leg in plan.legs]
        others = {leg.collection: (embedded[leg.blend.embedder], leg.blend.transforms) for leg in plan.legs if leg.blend}
        made = self._chains([*own, *others.values()])
        other = dict(zip(others, made[len(own) :], strict=True))
        return {
            leg.collection: blended(vectors, other[leg.collection], leg.blend.weight, leg.metric) if leg.blend else vectors
            for leg, vectors in zip(plan.legs, made, strict=False)
        }

    def vectors(self, plan: ServingPlan, vectors: Vectors, model: str) -> dict[str, Vectors]:
        """Return the query vectors of each leg from vectors (n, dim) of a named model.

        A blend has a part of each of two models. Here the part that this model reaches serves alone.

        Raises:
            Mismatch: the vectors do not fit the model, or no transform leads from it to a leg.
        """
        starts = [(vectors, self._rest(plan, leg, model)) for leg in plan.legs]
        dim = self.chain(model).dim
        if vectors.ndim != 2 or vectors.shape[1] != dim:
            raise errors.Mismatch(
                f"A vector of model {model!r} has dimension {dim}, not shape {vectors.shape}; name the model that made it"
            )
        if not np.isfinite(vectors).all():
            raise errors.Mismatch("A vector to search with has values that are not finite; correct the code that made it")
        return dict(zip((leg.collection for leg in plan.legs), self._chains(starts), strict=True))

    def stored(self, leg: Leg, items: Sequence[Item], embedded: MutableMapping[str, Vectors]) -> Vectors:
        """Return the vectors (n, dim of the leg) to write into a leg's collection for these items."""
        version, transforms = self._writes(leg)
        if version not in embedded:
            # A batch as small as the probes needs no check: loading the model compared its rows.
            embedded[version] = self.embed(version, items, confirm=len(items) > REQUIRED)
        return self.apply(transforms, embedded[version])

    def made(self, leg: Leg, items: Sequence[Item]) -> Made:
        """Embed items as a write into a leg's collection does, and say which of them cannot be embedded.

        Raises:
            ModelError: the model is broken.
        """
        version, transforms = self._writes(leg)
        raw, failed = embed_checked(self.embedder(version), items, self.chain(version).dim)
        good = [at for at in range(len(items)) if at not in failed]
        vectors = np.full((len(items), self.chain(leg.model).dim), np.nan, np.float32)
        if good:
            vectors[good] = self.apply(transforms, raw[good])
        odd = {at: f"its vector {why}" for at, why in unrankable(vectors, leg.metric).items()}
        return Made(embedder=version, raw=raw, vectors=vectors, failed={**odd, **failed})

    def _writes(self, leg: Leg) -> tuple[str, tuple[str, ...]]:
        """Return the version that embeds for a write into a leg's collection, and the transforms after it.

        A blended leg is written as it was before the upgrade, by the model that the blend loads anyway.
        """
        if not leg.write_with:
            part = leg.blend or leg
            return part.embedder, part.transforms
        chain = self.chain(leg.write_with)
        return chain.embedder, (chain.head,) if chain.head else ()

    def apply_head(self, version: str, raw: Vectors) -> Vectors:
        """Return a version's own vectors from its embedder's: its head applied, if it has one."""
        head = self.chain(version).head
        return self.apply((head,) if head else (), raw)

    def apply(self, transforms: Sequence[str], vectors: Vectors) -> Vectors:
        """Apply the transforms, one after the other."""
        for sha256 in transforms:
            vectors = self._transform(sha256).apply(vectors)
        return vectors

    def lift(self, sha256: str, vectors: Vectors, known: Sequence[object]) -> Vectors:
        """Apply h to stored vectors, (n, d_old) to (n, d_new), each with its side information: a list of numbers, else zeros."""
        transform = self._transform(sha256)
        width = transform.config.side
        side = [each if isinstance(each, list) and len(each) == width else [0.0] * width for each in known]
        return transform.apply(np.hstack([vectors, np.array(side, dtype=np.float32).reshape(len(vectors), width)]))

    def scales(self, legs: Sequence[Leg], queries: Mapping[str, Vectors]) -> list[Scale | None]:
        """Return how to bring each leg's distances to the common scale. `queries`: its query vectors (Q, d), by collection."""
        found = [self._calibration(leg) for leg in legs]
        if not any(found):
            return [None] * len(legs)
        from rmvdb.learning import references

        return references.scales(found, [queries[leg.collection] for leg in legs])

    def _calibration(self, leg: Leg) -> LegScale | None:
        """Return what brings this leg's distances to the common scale, if it has anything."""
        if leg.calibration is None:
            return None
        from rmvdb.learning import references

        sha256 = leg.calibration
        return cast("LegScale", self._keep(object, sha256, lambda: references.read(self._load_artifact(sha256))))

    def _rest(self, plan: ServingPlan, leg: Leg, model: str) -> tuple[str, ...]:
        if (rest := _transforms(plan, leg, model)) is not None:
            return rest
        known = {each for start in plan.legs for each in (start.embedder, start.model)}
        able = sorted(each for each in known if None not in [_transforms(plan, each_leg, each) for each_leg in plan.legs])
        way_out = f"search with vectors of {' or '.join(able)}" if able else "search by an item until one collection is left"
        raise errors.Mismatch(f"No transform leads from vectors of model {model!r} to collection {leg.collection!r}; {way_out}")

    def _chains(self, starts: Sequence[tuple[Vectors, tuple[str, ...]]]) -> list[Vectors]:
        """Apply to each of these vectors its transforms."""
        # ρ is a prefix of ψ∘ρ, so the vectors of one leg are the start of the next.
        made: dict[tuple[int, tuple[str, ...]], Vectors] = {}

        def chain(vectors: Vectors, transforms: tuple[str, ...]) -> Vectors:
            if not transforms:
                return vectors
            if (at := (id(vectors), transforms)) not in made:
                made[at] = self._transform(transforms[-1]).apply(chain(vectors, transforms[:-1]))
            return made[at]

        return [chain(*start) for start in starts]

    def embedder(self, version: str) -> Embedder:
        """Return the embedder of a version, loaded once.

        Raises:
            ModelError: it cannot be loaded.
        """
        self._note(version)
        if ("Embedder", version) not in self._loaded:
            self._import_embedder(version)  # without a lock: a thread that imports it right now may wait for this embedder

        def load() -> Embedder:
            with _one_model_at_a_time.now:
                return self._load_embedder(version)

        return self._keep(Embedder, version, load)  # type: ignore[type-abstract]

    def check(self, version: str, *, every: float = 0.0) -> None:
        """Compare a loaded embedder with its registration again, at most once in so many seconds.

        It may read its weights at each call, or lie behind a network, and be another model by now.

        Raises:
            ModelError: it gives other vectors than when it was registered.
        """
        embedder, now = self.embedder(version), uptime()
        if now - self._checked.setdefault(version, now) >= every:
            self._check_embedder(version, embedder)
            self._checked[version] = now

    def query_embedder(self, version: str) -> Embedder:
        """Return the embedder of a version's queries. Raises ModelError if it cannot be loaded."""
        embedder, chain = self.embedder(version), self.chain(version)
        return QueryEmbedder(embedder, dim=chain.dim) if chain.has_own_queries else embedder

    def chain(self, version: str) -> Chain:
        """Return how a version makes its own vectors."""
        self._note(version)
        return self._keep(Chain, version, lambda: self._load_chain(version))

    def _transform(self, sha256: str) -> Transform:
        from rmvdb.learning.transforms import Transform

        return self._keep(Transform, sha256, lambda: Transform.from_bytes(self._load_artifact(sha256)))

    def _keep(self, kind: type[T], name: str, load: Callable[[], T]) -> T:
        at = (kind.__name__, name)
        if (ready := self._loaded.get(at)) is not None:
            return ready  # type: ignore[return-value]
        with self._lock:
            loading = self._loading.setdefault(at, threading.Lock())
        with loading:  # only this model: searches go on while the next one loads
            loaded = self._loaded.get(at)
            if loaded is None:
                loaded = self._loaded[at] = load()
            return loaded  # type: ignore[return-value]


def _transforms(plan: ServingPlan, leg: Leg, model: str) -> tuple[str, ...] | None:
    """Return the transforms from a model's vectors to a leg's queries. None if nothing leads there."""
    if model == leg.embedder:
        return leg.transforms
    if leg.blend and model == leg.blend.embedder:
        return leg.blend.transforms
    for start in plan.legs:
        if start.model == model and (rest := leg.transforms_after(start)) is not None:
            return rest
    return () if model == leg.model else None
