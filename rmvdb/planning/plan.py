"""Predict what an upgrade does: sample, train, measure the curve, count the cost. Changes nothing but its own cache."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rmvdb import errors
from rmvdb.items.queries import read_queries
from rmvdb.learning.calibration import Calibration
from rmvdb.learning.method import METHODS, Fitted, Method, Pairs, TrainingSettings
from rmvdb.planning import choose, predict, simulate
from rmvdb.planning.orders import ORDERS, ByTraffic, Order, make_order
from rmvdb.planning.sample import Sample, Sampler, side_of, vectors_of
from rmvdb.protocols import Classifier, Source, VectorStore
from rmvdb.registry.codec import pack_ids
from rmvdb.serving.loaded_models import LoadedModels
from rmvdb.serving.traffic import TRAFFIC
from rmvdb.storage import files
from rmvdb.storage.artifacts import Artifacts
from rmvdb.storage.embedding_cache import EmbeddingCache
from rmvdb.text import counted
from rmvdb.types import Id, Item, Leg, Metric, Query, Record, ReportProgress

if TYPE_CHECKING:
    from rmvdb.learning.transforms import Transform
    from rmvdb.registry.tables import VersionRow

log = logging.getLogger(__name__)

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
    #: What the version to come, and those of these collections, are (`VersionRow.digest`).
    versions: tuple[str, ...] = ()
    #: None takes the one of `choose.CANDIDATES` that is worth most on the sample.
    method: Method | None = None
    #: None chooses the first that the old version can give.
    order: str | None = None
    #: The scalar field that holds a record's class or identity.
    labels: str | None = None
    #: How many records to train and measure on.
    sample: int = 20_000
    #: The paper's settings as printed, and distances merged as they are.
    paper: bool = False
    #: Try a few other settings of ψ and ρ, and take those that are worth most.
    tune: bool = False
    seed: int = 0
    #: Whether the original collection is kept whole, and a copy of it is emptied.
    instant_rollback: bool = False
    #: The field with a record's side information, a list of numbers, by which `fct` may lift it.
    side: str | None = None
    #: A file of queries, as `read_queries` reads it: those with answers are chosen and measured by, the others trained on.
    queries: str | None = None

    @property
    def key(self) -> str:
        """A name for the answer; of the file of queries its content counts, not its name."""
        told = asdict(self)
        if self.queries is not None:
            told["queries"] = [(str(each.item), type(each.item).__name__, each.answers) for each in self.asked()]
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:24]

    def asked(self) -> list[Query]:
        """The queries of the file, if there is one; UsageError where it has none."""
        return [] if self.queries is None else read_queries(Path(self.queries))


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
    #: `predict.Prediction` as JSON; None where the gallery is too small to measure on.
    prediction: dict[str, Any] | None
    #: records, embedded_per_second, seconds, vector_bytes, archive_bytes; copy_bytes where a copy is made.
    cost: dict[str, float]
    #: Records of the sample that could not be embedded.
    skipped: int
    made_at: float
    #: Records that were drawn and left out, because they have no label.
    unlabelled: int = 0
    #: The t until which each model embeds the queries for its own leg, and the calibrations then; None: as the method says all
    #: the while.
    switch: float | None = None
    early: tuple[str | None, ...] = ()
    #: h, which lifts what the old collection holds.
    lift: str | None = None


class Planner:
    """Makes plans and keeps them in a folder."""

    def __init__(
        self,
        *,
        store: VectorStore,
        loaded_models: LoadedModels,
        artifacts: Artifacts,
        source: Source | None,
        cache: Callable[[str], EmbeddingCache],
        folder: Path,
        traffic: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        """`cache` gives the embeddings that are kept of a model version, `traffic` what searches find, by key."""
        self._store, self._loaded_models, self._artifacts, self._folder = store, loaded_models, artifacts, folder
        self._traffic = traffic
        self._sampler = Sampler(store=store, loaded_models=loaded_models, source=source, cache=cache)

    def plan(
        self,
        question: Question,
        legs: Sequence[Leg],
        to: VersionRow,
        *,
        classifiers: Sequence[Classifier | None],
        seen: Set[Id] = frozenset(),
        again: bool = False,
        report: ReportProgress = lambda *_: None,
    ) -> Plan:
        """The plan for upgrading the collections of these legs, newest first, to version `to`: from the cache, or made (`again`:
        in any case). `seen`: the records that what is served now was trained on.

        Raises PlanRefused where the sample is too small, ModelError and SourceError for a broken embedder or source, UsageError
        for queries that cannot be measured by.
        """
        if not again and (kept := self.kept(question)):
            return kept
        self._refuse_order(question.order, question, legs, classifiers)
        counts = [self._store.count(leg.collection) for leg in legs]
        if len(legs) > 1:
            _refuse_too_few(question, legs[0], counts[0])
        if question.method and question.method.lifts:
            self._loaded_models.embedder(
                legs[0].embedder
            )  # the original is kept current by it; ModelError where it cannot be loaded
        sizes, held_out = _sizes(question.sample, counts)
        sample = self._sample(question, legs, sizes, seen, report, methods=[question.method or Method.RM])
        order, confidence = self._confidence(question, legs, classifiers, sample)
        told = few = None
        if len(sample.rows(0)) >= predict.LEAST_PAIRS or not question.method or question.method.has_transforms:
            trial = self._trial(question, legs, Metric(to.metric), sample, {order: confidence}, held_out, report)
            told = self._predicted(trial, question.method, self._able(legs, to), declared=_is_declared(legs, to))
            told = choose.tuned(trial, told) if question.tune else told
        elif sample.records:  # nothing is to be trained, and there is too little to measure on
            few = self._few(question, legs, Metric(to.metric), sample)
        plan = self._written(question, legs, told, few, sample, order, counts)
        data = json.dumps(asdict(plan)).encode()
        files.durable_write(self._pointer(question), self._artifacts.put(data, suffix="json").encode())
        return plan

    def compare(
        self,
        question: Question,
        legs: Sequence[Leg],
        to: VersionRow,
        *,
        classifiers: Sequence[Classifier | None],
        methods: Sequence[Method] = tuple(Method),
        orders: Sequence[str] = (),
        seen: Set[Id] = frozenset(),
        report: ReportProgress = lambda *_: None,
    ) -> choose.Comparison:
        """Methods and orders (none: all that can be given) side by side, on a sample as for a plan; only embeddings are kept.

        Raises what `plan` raises.
        """
        unable = set(choose.CANDIDATES) - set(self._able(legs, to))
        methods = _possible(methods, legs, unable)
        for name in orders:
            self._refuse_order(name, question, legs, classifiers)
        counts = [self._store.count(leg.collection) for leg in legs]
        sizes, held_out = _sizes(question.sample, counts)
        sample = self._sample(question, legs, sizes, seen, report, methods=methods)
        able = [name for name in ORDERS if _can_be_given(name, question, legs, classifiers)]
        names = orders or [*able, *([TRAFFIC] if self._traffic() else [])]
        confidences = {name: self._confidence(replace(question, order=name), legs, classifiers, sample)[1] for name in names}
        trial = self._trial(question, legs, Metric(to.metric), sample, confidences, held_out, report)
        if Method.NAIVE in unable:
            unable |= {method for method, spec in METHODS.items() if spec.needs_old_embedders}
        found = choose.compare(trial, methods, unable=unable, declared=_is_declared(legs, to))
        return replace(found, skipped=sample.skipped, unlabelled=sample.unlabelled)

    def _sample(
        self,
        question: Question,
        legs: Sequence[Leg],
        sizes: Sequence[int],
        seen: Set[Id],
        report: ReportProgress,
        *,
        methods: Sequence[Method],
    ) -> Sample:
        """A sample to train these methods on. The queries with answers, which are put into it, are searched for in place of the
        records themselves.
        """
        asked = question.asked()
        judged = [each for each in asked if each.answers]
        logged = [each for each in asked if not each.answers and any(method.trains_reverse for method in methods)]
        if judged or logged:
            self._refuse_unasked(legs[0])
        return self._sampler.sample(
            question.to_version,
            legs,
            sizes,
            seen,
            report,
            seed=question.seed,
            queries=judged,
            logged=_drawn(logged, question),
            labels=question.labels,
            side=question.side,
        )

    def _refuse_unasked(self, newest: Leg) -> None:
        """PlanRefused where the model in service cannot embed queries."""
        try:
            self._loaded_models.embedder(newest.embedder)
        except errors.ModelError as exc:
            raise errors.PlanRefused(
                f"The queries have to be embedded by {newest.embedder}, too, which cannot be loaded ({exc}); "
                "bring its embedder back, or leave --queries out"
            ) from exc

    def kept(self, question: Question) -> Plan | None:
        """The plan that was made for this question, if it is still whole."""
        try:
            data = json.loads(self._artifacts.get(self._pointer(question).read_text()))
        except (OSError, errors.ArtifactError):
            return None
        return Plan(**data | {name: tuple(data[name]) for name in ("calibrations", "early")})

    def order(
        self, question: Question, leg: Leg, classifier: Classifier | None, records: Sequence[Record] | None = None
    ) -> tuple[str, Order]:
        """The backfill order of a collection and its name; it learns from these records, or from a sample of the collection."""
        if question.order == TRAFFIC:
            _, others = self.order(replace(question, order=None), leg, classifier, records)
            return TRAFFIC, ByTraffic.learned(self._traffic(), others)
        name = question.order or next(each for each in ORDERS if _can_be_given(each, question, [leg], [classifier]))
        if name not in ORDERS:
            raise errors.UnknownName("order", name, (*ORDERS, TRAFFIC))
        if records is None:
            records = self._sampler.records(leg.collection, question.sample, question.seed)
        return name, make_order(
            name, records, classifier=classifier, label_field=question.labels, metric=leg.metric, seed=question.seed
        )

    def _refuse_order(
        self, name: str | None, question: Question, legs: Sequence[Leg], classifiers: Sequence[Classifier | None]
    ) -> None:
        """What `order` would raise for this name, before anything is embedded."""
        if name == TRAFFIC and not self._traffic():
            raise errors.PlanRefused(
                f"No search of gallery {question.gallery!r} has been counted yet, as the order traffic needs; let applications "
                "search for some minutes (search.traffic must not be 0), or choose another --order"
            )
        if name not in (None, TRAFFIC) and (name not in ORDERS or not _can_be_given(name, question, legs, classifiers)):
            for leg, classifier in zip(legs, classifiers, strict=True):
                self.order(replace(question, order=name), leg, classifier, [])

    def _confidence(
        self, question: Question, legs: Sequence[Leg], classifiers: Sequence[Classifier | None], sample: Sample
    ) -> tuple[str, npt.NDArray[np.float32]]:
        """Of every record by the order of the collection that holds it, (n,), and the names of these orders.

        Of the order traffic it is that of the others: what is found is measured by queries of the sample.
        """
        if question.order == TRAFFIC:
            return TRAFFIC, self._confidence(replace(question, order=None), legs, classifiers, sample)[1]
        found, names = np.zeros(len(sample.records), dtype=np.float32), []
        for at, (leg, classifier) in enumerate(zip(legs, classifiers, strict=True)):
            if held := sample.held(at):
                name, order = self.order(question, leg, classifier, held)
                found[sample.rows(at)] = order.confidence(held)
                names.append(name)
        return ", ".join(dict.fromkeys(names)), found

    @staticmethod
    def _predicted(trial: predict.Trial, method: Method | None, able: Sequence[Method], *, declared: bool) -> predict.Prediction:
        """The method that was asked for, on a schedule where it needs one and every embedder is there; else the chosen one."""
        if method is None:
            return choose.chosen(trial, able, declared=declared)
        told = trial.predict(method)
        return (choose.schedule(trial, told) if Method.NAIVE in able else None) or told

    def _able(self, legs: Sequence[Leg], to: VersionRow) -> list[Method]:
        """The methods to choose from: naive needs every embedder that is in service, identity a space like the newest."""
        able, newest = list(choose.CANDIDATES), legs[0]
        if (self._loaded_models.chain(newest.model).dim, newest.metric) != (to.dim, to.metric):
            able = [method for method in able if not METHODS[method].shares_space]
        try:
            for leg in legs:
                self._loaded_models.embedder(leg.embedder)
        except errors.ModelError:
            able = [method for method in able if not METHODS[method].needs_old_embedders]
        return able

    def _pointer(self, question: Question) -> Path:
        return self._folder / question.key

    # --- predict ------------------------------------------------------------------------------------------------------

    def _trial(
        self,
        question: Question,
        legs: Sequence[Leg],
        new_metric: Metric,
        sample: Sample,
        confidences: Mapping[str, npt.NDArray[np.float32]],
        held_out: int | None,
        report: ReportProgress,
    ) -> predict.Trial:
        return predict.Trial(
            _pairs(question, sample),
            confidences=confidences,
            old_metric=legs[0].metric,
            new_metric=new_metric,
            settings=TrainingSettings.paper(seed=question.seed) if question.paper else TrainingSettings(seed=question.seed),
            seed=question.seed,
            seen=sample.seen,
            behind=self._behind(legs, sample),
            held_out=held_out,
            queries=sample.queries,
            logged=sample.logged,
            calibrate=not question.paper,
            progress=report,
        )

    def _few(self, question: Question, legs: Sequence[Leg], new_metric: Metric, sample: Sample) -> simulate.Calibrations:
        """How the legs of `naive` are merged; PlanRefused where nothing brings their distances to one scale."""
        try:
            return predict.unmeasured(
                _pairs(question, sample),
                old_metric=legs[0].metric,
                new_metric=new_metric,
                behind=self._behind(legs, sample),
            )
        except errors.PlanRefused as exc:
            metrics = " and ".join(dict.fromkeys([*(leg.metric.value for leg in legs), new_metric.value]))
            raise errors.PlanRefused(
                f"{counted(len(sample.records), 'record is', 'records are')} too few to bring distances of {metrics} to one "
                "scale; write more, or add a gallery of the new model and fill it"
            ) from exc

    def _behind(self, legs: Sequence[Leg], sample: Sample) -> list[simulate.OlderCollection]:
        return [self._behind_at(legs, at, sample) for at in range(1, len(legs))]

    def _behind_at(self, legs: Sequence[Leg], at: int, sample: Sample) -> simulate.OlderCollection:
        held = sample.leg == at
        vectors = np.zeros((len(held), self._loaded_models.chain(legs[at].model).dim), dtype=np.float32)
        if held.any():
            vectors[held] = np.stack(vectors_of(sample.held(at)))
        return simulate.OlderCollection(
            metric=legs[at].metric,
            held=held,
            vectors=vectors,
            lead=functools.partial(self._loaded_models.apply, legs[at].transforms_after(legs[0]) or ()),
            asked=sample.asked.get(at),
        )

    def _written(
        self,
        question: Question,
        legs: Sequence[Leg],
        told: predict.Prediction | None,
        few: simulate.Calibrations | None,
        sample: Sample,
        order: str,
        counts: Sequence[int],
    ) -> Plan:
        put = self._artifacts.put
        fitted = told.fitted if told else Fitted()

        def kept(transform: Transform | None) -> str | None:
            return put(transform.to_bytes(), suffix="safetensors") if transform else None

        trained_on = pack_ids([sample.records[row].id for row in told.seen]) if told and (fitted.reverse or fitted.lift) else None
        return Plan(
            question=asdict(question),
            method=told.method if told else Method.NAIVE,
            order=order,
            head=kept(fitted.head),
            reverse=kept(fitted.reverse),
            lift=kept(fitted.lift),
            calibrations=_put(put, told.calibrations if told else few or (None,) * (len(legs) + 1)),
            switch=told.switch if told else None,
            early=_put(put, told.early if told else ()),
            trained_on=put(trained_on, suffix="ids") if trained_on else None,
            prediction=told.to_json() if told else None,
            cost=self._cost(question, legs, counts, sample),
            skipped=sample.skipped,
            unlabelled=sample.unlabelled,
            made_at=time.time(),
        )

    def _cost(self, question: Question, legs: Sequence[Leg], counts: Sequence[int], sample: Sample) -> dict[str, float]:
        records, dims = sum(counts), [self._loaded_models.chain(leg.model).dim for leg in legs]
        seconds = {"embedded_per_second": sample.per_second, "seconds": records / sample.per_second} if sample.per_second else {}
        held = 4.0 * sum(count * dim for count, dim in zip(counts, dims, strict=True))
        made = 4.0 * records * sample.new.shape[1]
        lifts = question.method is not None and question.method.lifts
        copied = made if lifts else held
        return {
            "records": records,
            "vector_bytes": made,
            "archive_bytes": copied if question.instant_rollback else held,
            # A lifted copy is re-embedded in place: it is what `vector_bytes` counts.
            **({"copy_bytes": held} if question.instant_rollback and not lifts else {}),
            **seconds,
        }


def _is_declared(legs: Sequence[Leg], to: VersionRow) -> bool:
    """Whether the new model is declared to be comparable with the newest one in service."""
    return to.compatible_with == legs[0].model


def _drawn(logged: Sequence[Query], question: Question) -> list[Item]:
    """At most as many of the queries as records are sampled."""
    rows = np.random.default_rng(question.seed).permutation(len(logged))[: question.sample]
    return [logged[row].item for row in sorted(rows.tolist())]


def _pairs(question: Question, sample: Sample) -> Pairs:
    return Pairs(
        old=sample.asked[0],
        new=sample.new,
        labels=np.array([str(each.fields[question.labels]) for each in sample.records]) if question.labels else None,
        side=side_of(sample.records, question.side) if question.side else None,
    )


def _put(put: Callable[..., str], calibrations: Sequence[Calibration | None]) -> tuple[str | None, ...]:
    return tuple(put(each.to_bytes(), suffix="json") if each else None for each in calibrations)


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
    needed, instead = predict.LEAST_PAIRS, ", or use --method naive"
    if question.method and not question.method.has_transforms:
        needed, instead = 1, ""
    if records < needed:
        raise errors.PlanRefused(
            f"Collection {leg.collection!r} holds {counted(records, 'record')} of {leg.model}, {needed} or more are needed to go "
            f"on from; let its own upgrade go on first{instead}, or give it up: rmvdb rollback"
        )


def _possible(methods: Sequence[Method], legs: Sequence[Leg], unable: Set[Method]) -> list[Method]:
    """Those of several methods that these collections can be searched with; what is named alone is refused where it is fitted."""
    if len(methods) > 1:
        methods = [method for method in methods if not METHODS[method].shares_space or method not in unable]
    if len(legs) > 1 and not (methods := [method for method in methods if not method.lifts]):
        raise errors.UsageError(f"The method fct lifts one collection, and the gallery lies in {len(legs)}; name another one")
    return list(methods)


def _can_be_given(order: str, question: Question, legs: Sequence[Leg], classifiers: Sequence[Classifier | None]) -> bool:
    """Whether every old version can give a backfill order of that name."""
    needed = {
        "classification-score": all(classifiers),
        "centroid": question.labels is not None,
        "uncertainty": all(leg.metric is Metric.LORENTZ for leg in legs),
    }
    return needed.get(order, True)
