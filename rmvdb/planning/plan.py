"""Predict what an upgrade does: sample, train, measure the curve, count the cost. Changes nothing but its own cache."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rmvdb import errors
from rmvdb.items.queries import read_queries
from rmvdb.learning.calibration import Calibration
from rmvdb.learning.method import METHODS, Fitted, Method, Pairs, TrainingSettings
from rmvdb.planning import choose, predict, simulate
from rmvdb.planning.orders.table import ORDERS, Known, make_order, order_spec, possible_orders
from rmvdb.planning.sample import Sample, Sampler, side_of, vectors_of
from rmvdb.protocols import Classifier, Order, Source, VectorStore
from rmvdb.registry.codec import pack_ids
from rmvdb.serving.loaded_models import LoadedModels
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
    """The question that a plan answers. The same question has the same answer until the cache is cleared."""

    gallery: str
    from_version: str
    to_version: str
    #: The collections that the upgrade would empty, newest first.
    old: tuple[str, ...] = ()
    #: `VersionRow.digest` of the new version, then of the versions in these collections.
    versions: tuple[str, ...] = ()
    #: None takes the method of `choose.CANDIDATES` that is worth most on the sample.
    method: Method | None = None
    #: None takes the first order that is possible.
    order: str | None = None
    #: The scalar field that holds a record's class or identity.
    labels: str | None = None
    #: How many records to train and measure on.
    sample: int = 20_000
    #: Train with the paper's settings as printed, and merge distances as they are.
    paper: bool = False
    seed: int = 0
    #: Keep the original collection whole, and empty a copy of it.
    instant_rollback: bool = False
    #: The field with a record's side information, a list of numbers, which helps `fct` to lift it.
    side: str | None = None
    #: A file of queries for `read_queries`. Queries with answers choose and measure, the others train ψ.
    queries: str | None = None

    @classmethod
    def of_upgrade(cls, values: Mapping[str, Any]) -> Question:
        """Return the question that a registered upgrade was planned for, perhaps by an earlier rmvdb.

        Options that are gone since are left out. If its order is gone, records are listed in the default order.
        """
        known = {name: value for name, value in values.items() if name in {field.name for field in fields(cls)}}
        return cls(**known | {"order": known["order"] if known["order"] in ORDERS else None})

    @property
    def key(self) -> str:
        """Return the name under which the answer is kept. A file of queries counts by its content, not by its name."""
        told = asdict(self)
        if self.queries is not None:
            told["queries"] = [(str(each.item), type(each.item).__name__, each.answers) for each in self.asked()]
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:24]

    def asked(self) -> list[Query]:
        """Read the queries of the file, if there is one. Raises UsageError if the file has none."""
        return [] if self.queries is None else read_queries(Path(self.queries))


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """How queries reach the old collections, from deploy or from the stage before on."""

    #: SHA-256 of ψ. None: each model embeds the queries for its own collection.
    reverse: str | None = None
    #: The weight of the old model's own query vector beside ψ's. None: ψ alone.
    blend: float | None = None
    #: One for each old leg, newest first, then one for the new leg.
    calibrations: tuple[str | None, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The answer: the trained files by SHA-256, and the quality and cost to expect."""

    question: dict[str, Any]
    method: str
    order: str
    head: str | None
    #: One stage, or two with a schedule: the first until `switch`.
    stages: tuple[Stage, ...]
    #: SHA-256 of the packed ids of the records that ψ or h was trained on. None if nothing was trained.
    trained_on: str | None
    #: `predict.Prediction` as JSON. None if the gallery is too small to measure on.
    prediction: dict[str, Any] | None
    #: records, embedded_per_second, seconds, vector_bytes, archive_bytes, and copy_bytes if a copy is made.
    cost: dict[str, float]
    #: Records of the sample that could not be embedded.
    skipped: int
    made_at: float
    #: Records left out of the sample because they have no label.
    unlabelled: int = 0
    #: The t from which on the second stage serves. None without a schedule.
    switch: float | None = None
    #: h, which lifts the old collection's vectors.
    lift: str | None = None
    #: How many of the old collections' best candidates each search embeds anew and ranks by their true distance. 0: none.
    rescore: int = 0

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Plan:
        """Read what `asdict` wrote as JSON. Raises TypeError or KeyError for another form."""
        stages = tuple(Stage(**each | {"calibrations": tuple(each["calibrations"])}) for each in value["stages"])
        return cls(**{**value, "stages": stages})


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
    ) -> None:
        """Take the services. `cache` gives the kept embeddings of a model version."""
        self._store, self._loaded_models, self._artifacts, self._folder = store, loaded_models, artifacts, folder
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
        """Plan the upgrade of the collections of these legs, newest first, to version `to`. Take a kept plan unless `again`.

        `seen`: the records that the transforms in service were trained on.

        Raises PlanRefused if the sample is too small, ModelError and SourceError for a broken embedder or source, UsageError for
        queries that cannot be measured by.
        """
        if not again and (kept := self.kept(question)):
            return kept
        known = _known(question, legs, classifiers)
        if question.order is not None:
            _refuse_order(question.order, known)
        counts = [self._store.count(leg.collection) for leg in legs]
        if len(legs) > 1:
            _refuse_too_few(question, legs[0], counts[0])
        if question.method and question.method.lifts:
            # This model keeps the original current. If it cannot be loaded, that is a ModelError here, not later.
            self._loaded_models.embedder(legs[0].embedder)
        sizes, held_out = _sizes(question.sample, counts)
        sample = self._sample(question, legs, sizes, seen, report, methods=[question.method or Method.RM])
        order, confidence = self._confidence(question, legs, classifiers, sample)
        told = few = None
        if len(sample.rows(0)) >= predict.LEAST_PAIRS or not question.method or question.method.has_transforms:
            trial = self._trial(question, legs, Metric(to.metric), sample, {order: confidence}, held_out, report)
            told = self._predicted(trial, question.method, self._able(legs, to), declared=_is_declared(legs, to))
        elif sample.records:  # nothing to train, and too little to measure on
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
        """Compare methods and orders (none: all that are possible) on a sample as for a plan. Keep nothing but embeddings.

        Raises the errors of `plan`.
        """
        unable = set(choose.CANDIDATES) - set(self._able(legs, to))
        methods = _possible(methods, legs, unable)
        known = _known(question, legs, classifiers)
        for name in orders:
            _refuse_order(name, known)
        counts = [self._store.count(leg.collection) for leg in legs]
        sizes, held_out = _sizes(question.sample, counts)
        sample = self._sample(question, legs, sizes, seen, report, methods=methods)
        names = orders or possible_orders(known)
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
        """Draw a sample to train these methods on.

        If there are queries with answers, they are searched for in place of the records, and their answers join the sample.
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
        """Raise PlanRefused if the model in service cannot embed queries."""
        try:
            self._loaded_models.embedder(newest.embedder)
        except errors.ModelError as exc:
            raise errors.PlanRefused(
                f"{newest.embedder} must embed the queries, too, but cannot be loaded ({exc}); "
                "bring its embedder back, or leave --queries out"
            ) from exc

    def kept(self, question: Question) -> Plan | None:
        """Return the plan that was made for this question, if all of its files are there."""
        try:
            data = json.loads(self._artifacts.get(self._pointer(question).read_text()))
            return Plan.from_json(data)
        except (OSError, KeyError, TypeError, errors.ArtifactError):  # it is gone, or an earlier rmvdb wrote it
            return None

    def order(
        self, question: Question, leg: Leg, classifier: Classifier | None, records: Sequence[Record] | None = None
    ) -> tuple[str, Order]:
        """Make the backfill order of a collection, with its name. It learns from `records`, or from a sample."""
        (known,) = _known(question, [leg], [classifier])
        name = question.order or possible_orders([known])[0]
        if records is None:
            records = self._sampler.records(leg.collection, question.sample, question.seed)
        return name, make_order(name, records, known)

    def _confidence(
        self, question: Question, legs: Sequence[Leg], classifiers: Sequence[Classifier | None], sample: Sample
    ) -> tuple[str, npt.NDArray[np.float32]]:
        """Return the names of the collections' orders, and every record's confidence by the order of its collection, (n,)."""
        found, names = np.zeros(len(sample.records), dtype=np.float32), []
        for at, (leg, classifier) in enumerate(zip(legs, classifiers, strict=True)):
            if held := sample.held(at):
                name, order = self.order(question, leg, classifier, held)
                found[sample.rows(at)] = order.confidence(held)
                names.append(name)
        return ", ".join(dict.fromkeys(names)), found

    @staticmethod
    def _predicted(trial: predict.Trial, method: Method | None, able: Sequence[Method], *, declared: bool) -> predict.Prediction:
        """Predict this method, on a schedule if that pays and every embedder can be loaded. None: choose a method."""
        if method is None:
            return choose.chosen(trial, able, declared=declared)
        told = trial.predict(method)
        return (choose.schedule(trial, told) if Method.NAIVE in able else None) or told

    def _able(self, legs: Sequence[Leg], to: VersionRow) -> list[Method]:
        """Return the methods to choose from. naive needs every embedder in service, identity a space like the newest."""
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
        """Return the calibrations of `naive` for a small gallery. Raises PlanRefused if no scale can be fitted."""
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

        last = Stage(
            reverse=kept(fitted.reverse),
            calibrations=_put(put, told.calibrations if told else few or (None,) * (len(legs) + 1)),
        )
        trained_on = pack_ids([sample.records[row].id for row in told.seen]) if told and (fitted.reverse or fitted.lift) else None
        return Plan(
            question=asdict(question),
            method=told.method if told else Method.NAIVE,
            order=order,
            head=kept(fitted.head),
            lift=kept(fitted.lift),
            stages=(*([Stage(calibrations=_put(put, told.early))] if told and told.early else []), last),
            switch=told.switch if told else None,
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
            # A lifted copy is re-embedded in place, so `vector_bytes` counts it already.
            **({"copy_bytes": held} if question.instant_rollback and not lifts else {}),
            **seconds,
        }


def _is_declared(legs: Sequence[Leg], to: VersionRow) -> bool:
    """Return whether the new model is declared to be comparable with the newest one in service."""
    return to.compatible_with == legs[0].model


def _drawn(logged: Sequence[Query], question: Question) -> list[Item]:
    """Draw at most as many queries as records are sampled."""
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
    """Return how many records to sample of each old collection, and how many of the newest to hold out in each of two parts.

    At most `most` of the newest, which is trained on. The others are only held out, in numbers that make the held-out part a
    small gallery in the proportions of the large one.
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
    """Leave out the methods that these collections do not allow. A method that is named alone is refused later, by its fit."""
    if len(methods) > 1:
        methods = [method for method in methods if not METHODS[method].shares_space or method not in unable]
    if len(legs) > 1 and not (methods := [method for method in methods if not method.lifts]):
        raise errors.UsageError(f"The method fct lifts one collection, and the gallery lies in {len(legs)}; name another one")
    return list(methods)


def _known(question: Question, legs: Sequence[Leg], classifiers: Sequence[Classifier | None]) -> list[Known]:
    """Return what an order may know of each old collection."""
    return [
        Known(metric=leg.metric, classifier=classifier, label_field=question.labels, seed=question.seed)
        for leg, classifier in zip(legs, classifiers, strict=True)
    ]


def _refuse_order(name: str, collections: Sequence[Known]) -> None:
    """Raise what `make_order` would for this name, before anything is embedded."""
    for known in collections:
        order_spec(name).refuse(known)
