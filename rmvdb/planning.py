"""What an upgrade would do: sample, train, predict the curve, count the cost. Changes nothing but its own cache."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from rmvdb import errors, files, simulate
from rmvdb.archive import EmbeddingCache
from rmvdb.artifacts import Artifacts
from rmvdb.embedders import embed_checked
from rmvdb.encoding import Encoder
from rmvdb.ordering import ORDERS, Order, make_order
from rmvdb.protocols import Classifier, Source, VectorStore
from rmvdb.registry import pack_ids
from rmvdb.training import Method, Pairs, Settings
from rmvdb.types import Id, Leg, Metric, Record, Vectors

if TYPE_CHECKING:
    from rmvdb.tables import VersionRow

log = logging.getLogger(__name__)

#: Called with what is being done and how far it is.
Report: TypeAlias = Callable[[str, int, int], None]
#: Records read and embedded at once while sampling.
CHUNK = 500
#: Records of the newest old collection to calibrate and to measure on, however small a part of the gallery they are.
LEAST_HELD_OUT = 30


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """What is asked of a plan; the same question has the same answer until the cache is cleared."""

    gallery: str
    from_version: str
    to_version: str
    #: The collections that it would empty, newest first.
    old: tuple[str, ...] = ()
    method: Method = Method.RM
    #: None chooses the first that the old version can give.
    order: str | None = None
    #: The scalar field that holds a record's class or identity.
    labels: str | None = None
    #: How many records to train and measure on.
    sample: int = 20_000
    #: The paper's settings as printed.
    paper: bool = False
    seed: int = 0
    #: Whether the original collection is kept whole, and a copy of it is emptied.
    instant_rollback: bool = False

    @property
    def key(self) -> str:
        """A name for the answer."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:24]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The answer: what was trained, by SHA-256, and what it is expected to do."""

    question: dict[str, Any]
    method: str
    order: str
    head: str | None
    reverse: str | None
    #: Of the old legs, newest first, then of the new one.
    calibrations: tuple[str | None, ...]
    #: SHA-256 of the packed ids of the records that ψ and ρ were trained on, where anything was trained.
    trained_on: str | None
    #: `simulate.Prediction` as JSON; None where the gallery is too small to measure on.
    prediction: dict[str, Any] | None
    #: records, embedded_per_second, seconds, vector_bytes, archive_bytes; copy_bytes where a copy is made.
    cost: dict[str, float]
    #: Records of the sample that could not be embedded.
    skipped: int
    made_at: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """Records with their vectors in the spaces that they are, or will be, searched in."""

    records: list[Record]
    #: Which of the old legs each is in, and whether an earlier training has seen it, (n,).
    leg: npt.NDArray[np.intp]
    seen: npt.NDArray[np.bool_]
    #: Their queries, (n, d), of each old leg that has an embedder of its own, by its number: the stored vector where it is there.
    asked: dict[int, Vectors]
    #: (n, d_new)
    new: Vectors
    skipped: int
    per_second: float | None

    def rows(self, leg: int) -> npt.NDArray[np.intp]:
        """Those that are in this leg, (m,)."""
        return np.flatnonzero(self.leg == leg)

    def held(self, leg: int) -> list[Record]:
        """The records of `rows`."""
        return [self.records[row] for row in self.rows(leg)]


class Planner:
    """Makes plans and keeps them in a folder."""

    def __init__(
        self,
        *,
        store: VectorStore,
        encoder: Encoder,
        artifacts: Artifacts,
        source: Source | None,
        cache: Callable[[str], EmbeddingCache],
        folder: Path,
    ) -> None:
        """`cache` gives the embeddings that are kept of a model version."""
        self._store, self._encoder, self._artifacts = store, encoder, artifacts
        self._source, self._cache, self._folder = source, functools.cache(cache), folder

    def plan(
        self,
        question: Question,
        legs: Sequence[Leg],
        to: VersionRow,
        *,
        classifiers: Sequence[Classifier | None],
        seen: Set[Id] = frozenset(),
        again: bool = False,
        report: Report = lambda *_: None,
    ) -> Plan:
        """The plan for upgrading the collections of these legs, newest first, to version `to`: from the cache, or made (`again`:
        in any case). `seen`: the records that what is served now was trained on.

        Raises PlanRefused where the sample is too small, ModelError and SourceError for a broken embedder or source.
        """
        if not again and (kept := self.kept(question)):
            return kept
        counts = [self._store.count(leg.collection) for leg in legs]
        if len(legs) > 1:
            _refuse_too_few(question, legs[0], counts[0])
        sizes, held_out = _sizes(question.sample, counts)
        sample = self._sample(question, legs, sizes, seen, report)
        orders = {
            at: self.order(question, leg, classifier, held)
            for at, (leg, classifier) in enumerate(zip(legs, classifiers, strict=True))
            if (held := sample.held(at))
        }
        confidence = _confidence(sample, {at: order for at, (_, order) in orders.items()})
        prediction = self._predict(question, legs, Metric(to.metric), sample, confidence, held_out, report)
        names = ", ".join(dict.fromkeys(name for name, _ in orders.values()))
        plan = self._written(question, legs, prediction, sample, names, counts)
        data = json.dumps(asdict(plan)).encode()
        files.durable_write(self._pointer(question), self._artifacts.put(data, suffix="json").encode())
        return plan

    def kept(self, question: Question) -> Plan | None:
        """The plan that was made for this question, if it is still whole."""
        try:
            data = json.loads(self._artifacts.get(self._pointer(question).read_text()))
        except (OSError, errors.ArtifactError):
            return None
        return Plan(**data | {"calibrations": tuple(data["calibrations"])})

    def order(
        self, question: Question, leg: Leg, classifier: Classifier | None, records: Sequence[Record] | None = None
    ) -> tuple[str, Order]:
        """The backfill order of a collection and its name; it learns from these records, or from a sample of the collection."""
        name = question.order or ("classification-score" if classifier else "centroid" if question.labels else "cluster")
        if name not in ORDERS:
            raise errors.UnknownName("order", name, ORDERS)
        if records is None:
            records = self._records(leg.collection, question.sample, question.seed)
        return name, make_order(
            name, records, classifier=classifier, label_field=question.labels, metric=leg.metric, seed=question.seed
        )

    def _pointer(self, question: Question) -> Path:
        return self._folder / question.key

    # --- sample -------------------------------------------------------------------------------------------------------

    def _ids(self, collection: str, most: int, seed: int, without: Set[Id]) -> list[Id]:
        """A uniform sample of ids by one streaming pass, sorted; the same collection and seed give the same sample."""
        rng = np.random.default_rng(seed)
        kept: list[tuple[float, Id]] = []
        for page in self._store.scan(collection):
            drawn = zip(rng.random(len(page)).tolist(), (record.id for record in page), strict=True)
            kept += [(place, id) for place, id in drawn if id not in without]
            if len(kept) > 4 * most:
                kept = sorted(kept, key=lambda each: each[0])[:most]
        chosen = sorted(kept, key=lambda each: each[0])[:most]
        return sorted((id for _, id in chosen), key=lambda id: (str(type(id)), id))

    def _records(self, collection: str, most: int, seed: int, without: Set[Id] = frozenset()) -> list[Record]:
        ids = self._ids(collection, most, seed, without)
        chunks = (ids[start : start + CHUNK] for start in range(0, len(ids), CHUNK))
        return [record for chunk in chunks for record in self._store.get(collection, chunk, vector=True)]

    def _sample(self, question: Question, legs: Sequence[Leg], sizes: Sequence[int], seen: Set[Id], report: Report) -> Sample:
        held = [
            self._records(leg.collection, size, question.seed, without=seen if at else frozenset())
            for at, (leg, size) in enumerate(zip(legs, sizes, strict=True))
        ]
        # A record in two collections, as a client's write leaves it, counts where it is newest.
        home = {record.id: (at, record) for at, records in reversed(list(enumerate(held))) for record in records}
        records = [record for _, record in home.values()]
        started = time.monotonic()
        new, fresh = self._embed_all(question.to_version, records, functools.partial(report, "embedding the sample"))
        per_second = fresh / max(time.monotonic() - started, 1e-9) if fresh else None
        asked = {at: self._asked(leg, held[at], records, report) for at, leg in enumerate(legs) if not at or _own(leg, legs[0])}
        usable = [id for id in home if all(id in found for found in (new, *asked.values()))]
        if not usable:
            raise errors.PlanRefused(
                f"Gallery {question.gallery!r} has no record that could be embedded; add records, then plan again"
            )
        return Sample(
            records=[home[id][1] for id in usable],
            leg=np.array([home[id][0] for id in usable]),
            seen=np.array([id in seen for id in usable]),
            asked={at: np.stack([found[id] for id in usable]) for at, found in asked.items()},
            new=np.stack([new[id] for id in usable]),
            skipped=len(records) - len(usable),
            per_second=per_second,
        )

    def _asked(self, leg: Leg, held: Sequence[Record], records: Sequence[Record], report: Report) -> dict[Id, Vectors]:
        """What this leg is asked with for each of these records: its own vector where the leg holds it, else a new one."""
        own = {record.id: record.vector for record in held if record.vector is not None}
        others = [record for record in records if record.id not in own]
        raw, _ = self._embed_all(leg.embedder, others, functools.partial(report, f"embedding the sample by {leg.embedder}"))
        if raw:
            own |= zip(raw, self._encoder.apply(leg.transforms, np.stack(list(raw.values()))), strict=True)
        return own

    def _embed_all(
        self, version: str, records: Sequence[Record], report: Callable[[int, int], None]
    ) -> tuple[dict[Id, Vectors], int]:
        """Raw vectors of a version by id, of the records that have one, and how many of them were not known before."""
        found: dict[Id, Vectors] = {}
        fresh = 0
        for start in range(0, len(records), CHUNK):
            report(start, len(records))
            chunk = records[start : start + CHUNK]
            known = self._cache(version).get([record.id for record in chunk], _vectors(chunk))
            made = self._embedded(version, [record for record in chunk if record.id not in known])
            fresh += len(made)
            found |= known | made
        report(len(records), len(records))
        return found, fresh

    def _embedded(self, version: str, records: Sequence[Record]) -> dict[Id, Vectors]:
        """Raw new vectors by id, kept so that the backfill need not compute them again."""
        if not records:
            return {}
        if self._source is None:
            raise errors.SourceError("The gallery has no source to re-embed from; give it one: rmvdb gallery source NAME SPEC")
        items = self._source.load(records)
        there = [record for record in records if record.id in items]
        if not there:
            raise errors.SourceError(
                f"The source has an item of none of {len(records)} records, such as {records[0].id!r}; "
                "mend the source, then plan again"
            )
        vectors, bad = embed_checked(
            self._encoder.embedder(version), [items[record.id] for record in there], self._encoder.chain(version).dim
        )
        good = [at for at in range(len(there)) if at not in bad]
        ids = [there[at].id for at in good]
        self._cache(version).put(ids, _vectors([there[at] for at in good]), vectors[good])
        return dict(zip(ids, vectors[good], strict=True))

    # --- predict ------------------------------------------------------------------------------------------------------

    def _predict(
        self,
        question: Question,
        legs: Sequence[Leg],
        new_metric: Metric,
        sample: Sample,
        confidence: npt.NDArray[np.float32],
        held_out: int | None,
        report: Report,
    ) -> simulate.Prediction | None:
        if len(sample.rows(0)) < simulate.LEAST_PAIRS and question.method is Method.NAIVE:
            return None  # nothing to train, and too few to measure on
        return simulate.predict(
            Pairs(old=sample.asked[0], new=sample.new, labels=_labels(sample.records, question.labels)),
            method=question.method,
            confidence=confidence,
            old_metric=legs[0].metric,
            new_metric=new_metric,
            settings=Settings.paper(seed=question.seed) if question.paper else Settings(seed=question.seed),
            seed=question.seed,
            seen=sample.seen,
            behind=[self._behind(legs, at, sample) for at in range(1, len(legs))],
            held_out=held_out,
            progress=lambda done, total: report("training", done, total),
        )

    def _behind(self, legs: Sequence[Leg], at: int, sample: Sample) -> simulate.Behind:
        held = sample.leg == at
        vectors = np.zeros((len(held), self._encoder.chain(legs[at].model).dim), dtype=np.float32)
        if held.any():
            vectors[held] = np.stack(_vectors(sample.held(at)))
        return simulate.Behind(
            metric=legs[at].metric,
            held=held,
            vectors=vectors,
            lead=functools.partial(self._encoder.apply, legs[at].beyond(legs[0]) or ()),
            asked=sample.asked.get(at),
        )

    def _written(
        self,
        question: Question,
        legs: Sequence[Leg],
        prediction: simulate.Prediction | None,
        sample: Sample,
        order: str,
        counts: Sequence[int],
    ) -> Plan:
        put = self._artifacts.put
        head = prediction.fitted.head if prediction else None
        reverse = prediction.fitted.reverse if prediction else None
        calibrations = prediction.calibrations if prediction else (None,) * (len(legs) + 1)
        trained_on = pack_ids([sample.records[row].id for row in prediction.seen]) if prediction and reverse else None
        return Plan(
            question=asdict(question),
            method=prediction.method if prediction else question.method,
            order=order,
            head=put(head.to_bytes(), suffix="safetensors") if head else None,
            reverse=put(reverse.to_bytes(), suffix="safetensors") if reverse else None,
            calibrations=tuple(put(each.to_bytes(), suffix="json") if each else None for each in calibrations),
            trained_on=put(trained_on, suffix="ids") if trained_on else None,
            prediction=prediction.to_json() if prediction else None,
            cost=self._cost(question, legs, counts, sample),
            skipped=sample.skipped,
            made_at=time.time(),
        )

    def _cost(self, question: Question, legs: Sequence[Leg], counts: Sequence[int], sample: Sample) -> dict[str, float]:
        records, dims = sum(counts), [self._encoder.chain(leg.model).dim for leg in legs]
        seconds = {"embedded_per_second": sample.per_second, "seconds": records / sample.per_second} if sample.per_second else {}
        held = 4.0 * sum(count * dim for count, dim in zip(counts, dims, strict=True))
        return {
            "records": records,
            "vector_bytes": 4.0 * records * sample.new.shape[1],
            "archive_bytes": held,
            **({"copy_bytes": held} if question.instant_rollback else {}),
            **seconds,
        }


def _sizes(most: int, counts: Sequence[int]) -> tuple[list[int], int | None]:
    """How many records to sample of each old collection that holds so many, and how many of the newest to hold out, twice.

    `most` of the newest, which is trained on; of the others, none of which is, as many as make what is held out a small gallery
    in the proportions of the large one.
    """
    newest = min(most, counts[0])
    if len(counts) == 1:
        return [newest], None
    held_out = min(newest // 5, max(LEAST_HELD_OUT, simulate.MOST_HELD_OUT * counts[0] // max(sum(counts), 1)))
    others = (min(2 * held_out * count // max(counts[0], 1), 2 * simulate.MOST_HELD_OUT) for count in counts[1:])
    return [newest, *others], held_out


def _refuse_too_few(question: Question, leg: Leg, records: int) -> None:
    needed, instead = (1, "") if question.method is Method.NAIVE else (simulate.LEAST_PAIRS, ", or use --method naive")
    if records < needed:
        raise errors.PlanRefused(
            f"Collection {leg.collection!r} holds {records} records of {leg.model}, {needed} or more are needed to go on from; "
            f"let its own upgrade go on first{instead}, or give it up: rmvdb rollback"
        )


def _own(leg: Leg, newest: Leg) -> bool:
    """Whether no transform leads from the queries of the newest leg to this one."""
    return leg.beyond(newest) is None


def _confidence(sample: Sample, orders: Mapping[int, Order]) -> npt.NDArray[np.float32]:
    """Of every record by the order of the collection that holds it, (n,)."""
    found = np.zeros(len(sample.records), dtype=np.float32)
    for at, order in orders.items():
        found[sample.rows(at)] = order.confidence(sample.held(at))
    return found


def _vectors(records: Sequence[Record]) -> list[Vectors]:
    return [record.vector for record in records if record.vector is not None]


def _labels(records: Sequence[Record], field: str | None) -> npt.NDArray[np.generic] | None:
    if field is None:
        return None
    missing = [record.id for record in records if record.fields.get(field) is None]
    if missing:
        raise errors.UsageError(
            f"{len(missing)} records of the sample, such as {missing[0]!r}, have no field {field!r}; "
            "name another --labels, or leave it out"
        )
    return np.array([str(record.fields[field]) for record in records])
