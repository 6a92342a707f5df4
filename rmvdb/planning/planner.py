"""Makes a plan: question, sample, candidates, the choice, the files. Values move forward only."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from rmvdb import errors
from rmvdb.learning.method import METHODS, Method, Pairs, TrainingSettings
from rmvdb.planning import trial as trials
from rmvdb.planning.candidates import RESCORED, Choice, candidates, sure_to_start
from rmvdb.planning.choose import CANDIDATES, chosen
from rmvdb.planning.comparison import Comparison, rows_of
from rmvdb.planning.orders.table import ORDERS, Known, make_order, order_spec, possible_orders
from rmvdb.planning.part import OlderCollection
from rmvdb.planning.plan import Plan, PlanStore, Unmeasured
from rmvdb.planning.prediction import Prediction, predict
from rmvdb.planning.question import Question
from rmvdb.planning.sample import Sample, Sampler, side_of, vectors_of
from rmvdb.planning.split import MOST_HELD_OUT
from rmvdb.planning.trial import Candidate
from rmvdb.protocols import Classifier, Order, Source, VectorStore
from rmvdb.serving.loaded_models import LoadedModels
from rmvdb.storage.artifacts import Artifacts
from rmvdb.storage.embedding_cache import EmbeddingCache
from rmvdb.text import counted
from rmvdb.types import Id, Leg, Metric, Query, ReportProgress

if TYPE_CHECKING:
    from rmvdb.registry.tables import VersionRow

#: Records of the newest old collection to calibrate and to measure on, however small a part of the gallery they are.
LEAST_HELD_OUT = 30
#: A third version ends what the plan in force does for searches beside its legs, and no figure of a plan compares with that.
ENDS = (
    "The plan in force serves a blend or rescores, which ends when this upgrade is deployed. The figures compare with searches "
    "without it"
)
#: Why no map serves alone for texts. Asked texts differ from stored ones, so records tell too little of how a map treats them.
UNKNOWN_QUERIES = (
    f"Both models embed each query, because fewer than {trials.LEAST_LOGGED} real queries are known to try a map on: give "
    "--queries FILE, or let clients keep some: [search] keep_queries"
)
#: More queries with answers narrow the interval, but cost their number times the sample in memory.
MOST_JUDGED = 2000
#: The part of the time that may go into embedding the sample.
EMBEDDING = 0.5


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
        rescore_ms: float = 100.0,
    ) -> None:
        """Take the services. `cache` gives the kept embeddings of a version. `rescore_ms`: how long one search may rescore."""
        self._store, self._loaded_models = store, loaded_models
        self._plans = PlanStore(artifacts, folder)
        self._rescore_ms = rescore_ms
        self._sampler = Sampler(store=store, loaded_models=loaded_models, source=source, cache=cache)

    def plan(
        self,
        question: Question,
        legs: Sequence[Leg],
        to: VersionRow,
        *,
        classifiers: Sequence[Classifier | None],
        seen: Set[Id] = frozenset(),
        log: Sequence[Query] = (),
        again: bool = False,
        report: ReportProgress = lambda *_: None,
    ) -> Plan:
        """Plan the upgrade of the collections of these legs, newest first, to version `to`. Take a kept plan unless `again`.

        `seen`: the records that the transforms in service were trained on. `log`: queries of real searches, without answers.

        Raises PlanRefused if the sample is too small, ModelError and SourceError for a broken embedder or source, UsageError for
        queries that cannot be measured by.
        """
        counts = [self._store.count(leg.collection) for leg in legs]
        if not again and (kept := self._plans.kept(question, log, records=sum(counts))):
            return kept
        known = _known(question, legs, classifiers)
        if question.order is not None:
            _refuse_order(question.order, known)
        if len(legs) > 1:
            _refuse_too_few(question, legs[0], counts[0])
        if question.method and question.method.lifts:
            # This model keeps the original current. If it cannot be loaded, that is a ModelError here, not later.
            self._loaded_models.embedder(legs[0].embedder)
        sizes, held_out = _sizes(question.sample, counts)
        methods = (question.method,) if question.method else self._able(legs, to)
        sample = self._sample(question, legs, to, sizes, seen, log, report, methods=methods)
        prediction = self._build_prediction(question, legs, to, sample, known, held_out, counts, methods, report)
        return self._plans.write(question, log, prediction, sample, self._cost(question, legs, counts, sample))

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
        log: Sequence[Query] = (),
        report: ReportProgress = lambda *_: None,
    ) -> Comparison:
        """Compare methods and orders (none: all that are possible) on a sample as for a plan. Keep nothing but embeddings.

        Raises the errors of `plan`.
        """
        able = set(self._able(legs, to))
        methods = _possible(methods, legs, set(CANDIDATES) - able)
        known = _known(question, legs, classifiers)
        for name in orders:
            _refuse_order(name, known)
        counts = [self._store.count(leg.collection) for leg in legs]
        sizes, held_out = _sizes(question.sample, counts)
        sample = self._sample(question, legs, to, sizes, seen, log, report, methods=methods)
        trial = self._trial(question, legs, to, sample, self._confidences(known, sample, orders), held_out, sum(counts), report)
        both = Method.NAIVE in able
        made = candidates(trial, Choice(methods=tuple(methods), both=both, rescore=self._rescore(question, sample), every=True))
        told = [predict(trial, each) for each in made]
        by_candidate = dict(zip(map(id, made), told, strict=True))
        servable = [each for each in made if both or not METHODS[each.method].needs_old_embedders] or made
        free = self._knows_queries(to, trial)
        return Comparison(
            rows=rows_of(trial, told),
            recommended=_chosen(legs, to, trial, servable, lambda each: by_candidate[id(each)], free=free),
            relevance=trial.relevance,
            objective=trial.objective,
            skipped=sample.skipped,
            unlabelled=sample.unlabelled,
        )

    def order(
        self,
        question: Question,
        leg: Leg,
        classifier: Classifier | None,
        name: str,
        look: Callable[[], None] = lambda: None,
    ) -> Order:
        """Make the backfill order of that name for a collection. It learns from a sample, if it learns anything.

        `look` is called now and then while the sample is drawn. It may raise to end this.

        If an earlier rmvdb chose an order that is gone since, it is the first that is possible. If the sample teaches it nothing,
        it is `random`.
        """
        (known,) = _known(question, [leg], [classifier])
        name = name if name in ORDERS else possible_orders([known])[0]
        try:
            return make_order(name, self._sampler.drawn(leg.collection, question.sample, question.seed, look), known)
        except errors.PlanRefused:  # what is left in this collection teaches it nothing, and the upgrade is deployed by now
            return make_order("random", [], known)

    # --- question to sample -------------------------------------------------------------------------------------------

    def _sample(
        self,
        question: Question,
        legs: Sequence[Leg],
        to: VersionRow,
        sizes: Sequence[int],
        seen: Set[Id],
        log: Sequence[Query],
        report: ReportProgress,
        *,
        methods: Sequence[Method],
    ) -> Sample:
        """Draw a sample to fit these methods on.

        If there are queries with answers, they are searched for in place of the records, and their answers join the sample.
        """
        asked = question.asked() or (list(log) if self._unasked(legs[0]) is None else [])
        judged = _drawn([each for each in asked if each.answers], MOST_JUDGED, question.seed)
        logged = [each for each in asked if not each.answers and any(method.trains_reverse for method in methods)]
        if judged or logged:
            self._refuse_unasked(legs[0])
        sample = self._sampler.sample(
            question.to_version,
            legs,
            sizes,
            seen,
            report,
            seed=question.seed,
            queries=judged,
            logged=[each.item for each in _drawn(logged, question.sample, question.seed)],
            labels=question.labels,
            side=question.side,
            texts=to.probe_kind == "text",
            seconds=60 * question.minutes * EMBEDDING,
        )
        if logged and sample.logged is None and question.queries is not None:
            raise errors.PlanRefused(
                f"No query without answers in {question.queries} can be embedded by both models, such as "
                f"{str(logged[0].item)!r:.60}; correct the file, or leave --queries out"
            )
        return sample

    def _unasked(self, newest: Leg) -> errors.ModelError | None:
        """Return why the model in service cannot embed queries, None if it can."""
        try:
            self._loaded_models.embedder(newest.embedder)
        except errors.ModelError as exc:
            return exc
        return None

    def _refuse_unasked(self, newest: Leg) -> None:
        """Raise PlanRefused if the model in service cannot embed queries."""
        if why := self._unasked(newest):
            raise errors.PlanRefused(
                f"{newest.embedder} must embed the queries, too, but cannot be loaded ({why}); "
                "bring its embedder back, or leave --queries out"
            ) from why

    # --- sample to prediction -----------------------------------------------------------------------------------------

    def _build_prediction(
        self,
        question: Question,
        legs: Sequence[Leg],
        to: VersionRow,
        sample: Sample,
        known: Sequence[Known],
        held_out: int | None,
        counts: Sequence[int],
        methods: Sequence[Method],
        report: ReportProgress,
    ) -> Prediction | Unmeasured:
        """Choose among these methods, the orders that are possible, schedules and rescoring."""
        orders = [question.order] if question.order else possible_orders(known)
        if len(sample.rows(0)) < trials.LEAST_PAIRS and question.method and not question.method.has_transforms:
            return self._unmeasured(question, legs, Metric(to.metric), sample, orders[0])
        trial = self._trial(question, legs, to, sample, self._confidences(known, sample, orders), held_out, sum(counts), report)
        both = Method.NAIVE in self._able(legs, to)
        free = question.method is not None or self._knows_queries(to, trial)
        if not free:  # the others could not be chosen
            declared = _is_declared(legs, to)
            specs = {method: METHODS[method] for method in methods}
            if any(spec.embeds_twice for spec in specs.values()):
                methods = [method for method, spec in specs.items() if spec.embeds_twice or (declared and spec.shares_space)]
        made = candidates(trial, Choice(methods=tuple(methods), both=both, rescore=self._rescore(question, sample)))
        report("measuring", 0, 1)
        told = _chosen(legs, to, trial, made, functools.partial(predict, trial), free=free)
        report("measuring", 1, 1)
        return told

    def _knows_queries(self, to: VersionRow, trial: trials.Trial) -> bool:
        """Return whether the trial measures as searches will.

        Records stand badly for queries that are texts or that are embedded their own way, unless labels tell what is right.
        """
        asks_texts = to.probe_kind == "text" or self._loaded_models.chain(to.name).has_own_queries
        return not asks_texts or trial.by_log or trial.relevance != "neighbours"

    def _trial(
        self,
        question: Question,
        legs: Sequence[Leg],
        to: VersionRow,
        sample: Sample,
        confidences: Mapping[str, npt.NDArray[np.float32]],
        held_out: int | None,
        records: int,
        report: ReportProgress,
    ) -> trials.Trial:
        return trials.Trial(
            _pairs(question, sample),
            confidences=confidences,
            old_metric=legs[0].metric,
            new_metric=Metric(to.metric),
            settings=TrainingSettings.paper(seed=question.seed) if question.paper else TrainingSettings(seed=question.seed),
            seed=question.seed,
            seen=sample.seen,
            behind=self._behind(legs, sample),
            held_out=held_out,
            queries=sample.queries,
            logged=sample.logged,
            calibrate=not question.paper,
            objective=question.objective,
            gallery=records,
            seconds=60 * question.minutes * (1 - EMBEDDING),
            progress=report,
        )

    def _confidences(self, known: Sequence[Known], sample: Sample, orders: Sequence[str]) -> dict[str, npt.NDArray[np.float32]]:
        """Return every record's confidence by each order, (n,). Each collection's own records teach it."""
        names = orders or possible_orders(known)
        found = {name: np.zeros(len(sample.records), dtype=np.float32) for name in names}
        for name in names:
            for at, each in enumerate(known):
                if held := sample.held(at):
                    found[name][sample.rows(at)] = make_order(name, held, each).confidence(held)
        return found

    def _rescore(self, question: Question, sample: Sample) -> tuple[int, ...]:
        """Return how many records a search may rescore: as many as this machine embeds in the time that a search has for it."""
        if question.rescore is not None:
            return (question.rescore,)
        if question.paper or not sample.per_second:
            return (0,)
        return (0, *(count for count in RESCORED if count / sample.per_second <= self._rescore_ms / 1000))

    def _able(self, legs: Sequence[Leg], to: VersionRow) -> tuple[Method, ...]:
        """Return the methods to choose from. Some need every embedder in service, identity a space like the newest."""
        able, newest = list(CANDIDATES), legs[0]
        if (self._loaded_models.chain(newest.model).dim, newest.metric) != (to.dim, to.metric):
            able = [method for method in able if not METHODS[method].shares_space]
        try:
            for leg in legs:
                self._loaded_models.embedder(leg.embedder)
        except errors.ModelError:
            able = [method for method in able if not METHODS[method].needs_old_embedders]
        return tuple(able)

    def _unmeasured(self, question: Question, legs: Sequence[Leg], new_metric: Metric, sample: Sample, order: str) -> Unmeasured:
        """Return `naive` for a small gallery. Raises PlanRefused if its metrics differ and no scale can be fitted."""
        try:
            return Unmeasured(
                order=order,
                rescore=question.rescore or 0,
                calibrations=trials.unmeasured(
                    _pairs(question, sample),
                    old_metric=legs[0].metric,
                    new_metric=new_metric,
                    behind=self._behind(legs, sample),
                ),
            )
        except errors.PlanRefused as exc:
            metrics = " and ".join(dict.fromkeys([*(leg.metric.value for leg in legs), new_metric.value]))
            raise errors.PlanRefused(
                f"{counted(len(sample.records), 'record is', 'records are')} too few to bring distances of {metrics} to one "
                "scale; write more, or add a gallery of the new model and fill it"
            ) from exc

    def _behind(self, legs: Sequence[Leg], sample: Sample) -> list[OlderCollection]:
        return [self._behind_at(legs, at, sample) for at in range(1, len(legs))]

    def _behind_at(self, legs: Sequence[Leg], at: int, sample: Sample) -> OlderCollection:
        held = sample.leg == at
        vectors = np.zeros((len(held), self._loaded_models.chain(legs[at].model).dim), dtype=np.float32)
        if held.any():
            vectors[held] = np.stack(vectors_of(sample.held(at)))
        return OlderCollection(
            metric=legs[at].metric,
            held=held,
            vectors=vectors,
            lead=functools.partial(self._loaded_models.apply, legs[at].transforms_after(legs[0]) or ()),
            own_queries=sample.own_queries.get(at),
            as_queries=sample.as_queries_behind.get(at),
        )

    # --- cost ---------------------------------------------------------------------------------------------------------

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


def _chosen(
    legs: Sequence[Leg],
    to: VersionRow,
    trial: trials.Trial,
    made: Sequence[Candidate],
    told: Callable[[Candidate], Prediction],
    *,
    free: bool,
) -> Prediction:
    """Choose one of these candidates. Unless `free`, it is sure to start where the old model is, or declared to be compatible."""
    declared = _is_declared(legs, to)
    some = made if free else sure_to_start(made)
    if declared and not free:
        some = [*some, *(each for each in made if METHODS[each.method].shares_space and each not in some)]
    best = chosen(some, told, objective=trial.objective, declared=declared, seed=trial.seed)
    if any(leg.blend or leg.rescore for leg in legs):
        best = replace(best, warnings=[*best.warnings, ENDS])
    if trial.untried:
        untried = ", ".join(trial.untried)
        best = replace(best, warnings=[*best.warnings, f"there was no time to try {untried}; give more with --minutes"])
    if free or best.extractions == 1:
        return best
    return replace(best, choice=f"{best.choice}. {UNKNOWN_QUERIES}")


def _drawn(queries: Sequence[Query], most: int, seed: int) -> list[Query]:
    """Draw at most so many queries, and keep their order."""
    rows = np.random.default_rng(seed).permutation(len(queries))[:most]
    return [queries[row] for row in sorted(rows.tolist())]


def _pairs(question: Question, sample: Sample) -> Pairs:
    return Pairs(
        old=sample.own_queries[0],
        new=sample.new,
        labels=np.array([str(each.fields[question.labels]) for each in sample.records]) if question.labels else None,
        as_queries=sample.as_queries,
        side=side_of(sample.records, question.side) if question.side else None,
    )


def _sizes(most: int, counts: Sequence[int]) -> tuple[list[int], int | None]:
    """Return how many records to sample of each old collection, and how many of the newest to hold out in each of two parts.

    At most `most` of the newest, which is trained on. The others are only held out, in numbers that make the held-out part a
    small gallery in the proportions of the large one.
    """
    newest = min(most, counts[0])
    if len(counts) == 1:
        return [newest], None
    held_out = min(newest // 5, max(LEAST_HELD_OUT, MOST_HELD_OUT * counts[0] // max(sum(counts), 1)))
    others = (min(2 * held_out * count // max(counts[0], 1), 2 * MOST_HELD_OUT) for count in counts[1:])
    return [newest, *others], held_out


def _refuse_too_few(question: Question, leg: Leg, records: int) -> None:
    needed, instead = trials.LEAST_PAIRS, ", or use --method naive"
    if question.method and not question.method.has_transforms:
        needed, instead = 1, ""
    if records < needed:
        raise errors.PlanRefused(
            f"Collection {leg.collection!r} holds {counted(records, 'record')} of {leg.model}, and a plan needs {needed} or "
            f"more; continue its own upgrade first{instead}, or give it up: rmvdb rollback"
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
