"""What an upgrade would do: sample, train, predict the curve, count the cost. Changes nothing but its own cache."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Sequence
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
from rmvdb.training import Method, Pairs, Settings
from rmvdb.types import Id, Leg, Metric, Record, Vectors

if TYPE_CHECKING:
    from rmvdb.tables import VersionRow

log = logging.getLogger(__name__)

#: Called with what is being done and how far it is.
Report: TypeAlias = Callable[[str, int, int], None]
#: Records read and embedded at once while sampling.
CHUNK = 500


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """What is asked of a plan; the same question has the same answer until the cache is cleared."""

    gallery: str
    from_version: str
    to_version: str
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
    #: Of the old and of the new leg.
    calibrations: tuple[str | None, str | None]
    #: `simulate.Prediction` as JSON; None where the gallery is too small to measure on.
    prediction: dict[str, Any] | None
    #: records, embedded_per_second, seconds, vector_bytes, archive_bytes.
    cost: dict[str, float]
    #: Records of the sample that could not be embedded.
    skipped: int
    made_at: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """Records with their vectors in both spaces."""

    records: list[Record]
    #: (n, d_old), (n, d_new)
    old: Vectors
    new: Vectors
    skipped: int
    per_second: float | None


class Planner:
    """Makes plans and keeps them in a folder."""

    def __init__(
        self,
        *,
        store: VectorStore,
        encoder: Encoder,
        artifacts: Artifacts,
        source: Source | None,
        cache: EmbeddingCache,
        folder: Path,
    ) -> None:
        self._store, self._encoder, self._artifacts = store, encoder, artifacts
        self._source, self._cache, self._folder = source, cache, folder

    def plan(
        self,
        question: Question,
        leg: Leg,
        to: VersionRow,
        *,
        classifier: Classifier | None,
        again: bool = False,
        report: Report = lambda *_: None,
    ) -> Plan:
        """The plan for upgrading the collection of `leg` to version `to`: from the cache, or made (`again`: in any case).

        Raises PlanRefused where the sample is too small, ModelError and SourceError for a broken embedder or source.
        """
        if not again and (kept := self.kept(question)):
            return kept
        sample = self._sample(question, leg, report)
        order_name, order = self.order(question, leg, classifier, sample)
        prediction = self._predict(question, leg, Metric(to.metric), sample, order, report)
        plan = self._written(question, leg, prediction, sample, order_name)
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
        self, question: Question, leg: Leg, classifier: Classifier | None, sample: Sample | None = None
    ) -> tuple[str, Order]:
        """The backfill order and its name; what it learns from, it reads from the sample or from the collection."""
        name = question.order or ("classification-score" if classifier else "centroid" if question.labels else "cluster")
        if name not in ORDERS:
            raise errors.UnknownName("order", name, ORDERS)
        records = sample.records if sample else self._records(question, leg)
        return name, make_order(
            name, records, classifier=classifier, label_field=question.labels, metric=leg.metric, seed=question.seed
        )

    def _pointer(self, question: Question) -> Path:
        return self._folder / question.key

    # --- sample -------------------------------------------------------------------------------------------------------

    def _ids(self, question: Question, leg: Leg) -> list[Id]:
        """A uniform sample of ids by one streaming pass, sorted; the same gallery and seed give the same sample."""
        rng = np.random.default_rng(question.seed)
        kept: list[tuple[float, Id]] = []
        for page in self._store.scan(leg.collection):
            kept += zip(rng.random(len(page)).tolist(), (record.id for record in page), strict=True)
            if len(kept) > 4 * question.sample:
                kept = sorted(kept, key=lambda each: each[0])[: question.sample]
        chosen = sorted(kept, key=lambda each: each[0])[: question.sample]
        return sorted((id for _, id in chosen), key=lambda id: (str(type(id)), id))

    def _records(self, question: Question, leg: Leg) -> list[Record]:
        ids = self._ids(question, leg)
        chunks = (ids[start : start + CHUNK] for start in range(0, len(ids), CHUNK))
        return [record for chunk in chunks for record in self._store.get(leg.collection, chunk, vector=True)]

    def _sample(self, question: Question, leg: Leg, report: Report) -> Sample:
        records = self._records(question, leg)
        found: dict[Id, Vectors] = {}
        started, fresh = time.monotonic(), 0
        for start in range(0, len(records), CHUNK):
            report("embedding the sample", start, len(records))
            chunk = records[start : start + CHUNK]
            known = self._cache.get([record.id for record in chunk], _old(chunk))
            made = self._embedded(question.to_version, [record for record in chunk if record.id not in known])
            fresh += len(made)
            found |= known | made
        report("embedding the sample", len(records), len(records))
        usable = [record for record in records if record.id in found]
        if not usable:
            raise errors.PlanRefused(
                f"Gallery {question.gallery!r} has no record that could be embedded; add records, then plan again"
            )
        return Sample(
            records=usable,
            old=_old(usable),
            new=np.stack([found[record.id] for record in usable]),
            skipped=len(records) - len(usable),
            per_second=fresh / max(time.monotonic() - started, 1e-9) if fresh else None,
        )

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
        self._cache.put(ids, _old([there[at] for at in good]), vectors[good])
        return dict(zip(ids, vectors[good], strict=True))

    # --- predict ------------------------------------------------------------------------------------------------------

    def _predict(
        self, question: Question, leg: Leg, new_metric: Metric, sample: Sample, order: Order, report: Report
    ) -> simulate.Prediction | None:
        if len(sample.records) < simulate.LEAST_PAIRS and question.method is Method.NAIVE:
            return None  # nothing to train, and too few to measure on
        pairs = Pairs(old=sample.old, new=sample.new, labels=_labels(sample.records, question.labels))
        return simulate.predict(
            pairs,
            method=question.method,
            confidence=order.confidence(sample.records),
            old_metric=leg.metric,
            new_metric=new_metric,
            settings=Settings.paper(seed=question.seed) if question.paper else Settings(seed=question.seed),
            seed=question.seed,
            progress=lambda done, total: report("training", done, total),
        )

    def _written(self, question: Question, leg: Leg, prediction: simulate.Prediction | None, sample: Sample, order: str) -> Plan:
        put = self._artifacts.put
        head = prediction.fitted.head if prediction else None
        reverse = prediction.fitted.reverse if prediction else None
        old, new = prediction.calibrations if prediction else (None, None)
        return Plan(
            question=asdict(question),
            method=prediction.method if prediction else question.method,
            order=order,
            head=put(head.to_bytes(), suffix="safetensors") if head else None,
            reverse=put(reverse.to_bytes(), suffix="safetensors") if reverse else None,
            calibrations=(
                put(old.to_bytes(), suffix="json") if old else None,
                put(new.to_bytes(), suffix="json") if new else None,
            ),
            prediction=prediction.to_json() if prediction else None,
            cost=self._cost(leg, sample),
            skipped=sample.skipped,
            made_at=time.time(),
        )

    def _cost(self, leg: Leg, sample: Sample) -> dict[str, float]:
        records = self._store.count(leg.collection)
        seconds = {"embedded_per_second": sample.per_second, "seconds": records / sample.per_second} if sample.per_second else {}
        return {
            "records": records,
            "vector_bytes": 4.0 * records * sample.new.shape[1],
            "archive_bytes": 4.0 * records * sample.old.shape[1],
            **seconds,
        }


def _old(records: Sequence[Record]) -> Vectors:
    return (
        np.stack([record.vector for record in records if record.vector is not None]) if records else np.empty((0, 0), np.float32)
    )


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
