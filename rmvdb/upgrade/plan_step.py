"""Resolve which upgrade is meant, and predict what it does. Only caches change."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Sequence
from dataclasses import replace

from rmvdb import errors
from rmvdb.catalog.checks import check_made
from rmvdb.catalog.versions import check_model
from rmvdb.engines import index_rules
from rmvdb.items.check import TOLERANCE
from rmvdb.learning.method import Method
from rmvdb.planning.comparison import Comparison
from rmvdb.planning.plan import Plan
from rmvdb.planning.planner import Planner
from rmvdb.planning.question import Question
from rmvdb.protocols import Classifier
from rmvdb.registry.codec import leg_to_json, unpack_ids
from rmvdb.registry.shared_queries import refuse_paused
from rmvdb.registry.tables import UpgradeRow, VersionRow
from rmvdb.registry.upgrade_plan import EpochName, UpgradePlan
from rmvdb.types import Id, Leg, Phase, Query
from rmvdb.upgrade import change_epoch
from rmvdb.upgrade.context import UpgradeContext

#: The option that makes a copy, without and with h.
_COPIES = ("--instant-rollback", "--method fct")
#: The most kept queries that a plan reads.
MOST_KEPT = 20_000


def resolve(context: UpgradeContext, question: Question) -> Question:
    """Complete a question: `from` is the newest version that the gallery holds, `old` the collections that would be emptied.

    Raises:
        UsageError: there is no upgrade between these versions.
        Mismatch: the gallery holds no vectors of `from`.
        UpgradeRunning: the gallery is in an upgrade that cannot be superseded.
    """
    if context.registry.version(question.from_version).name == context.registry.version(question.to_version).name:
        raise errors.UsageError(f"An upgrade leads to another version; --from and --to both say {question.to_version!r}")
    legs = context.registry.plan(context.gallery.name).legs
    superseded(context, legs, question.to_version)
    lifts = question.method is Method.FCT  # it lifts a copy, and keeps the original whole beside it
    if (lifts or question.instant_rollback) and len(legs) > 1:
        raise errors.UsageError(
            f"Gallery {context.gallery.name!r} lies in {len(legs)} collections, and {_COPIES[lifts]} copies one; "
            "end the upgrade that is on, or leave the option out"
        )
    _refuse_rescore(context, question, legs)
    if question.side and question.method not in (None, Method.FCT):
        raise errors.UsageError(f"Only the method fct uses side information, not {question.method}; leave --side out")
    models = {name: leg.model for leg in reversed(legs) for name in (leg.model, context.registry.version(leg.model).base) if name}
    base = context.registry.version(question.to_version).base
    if question.to_version in models or base in models:
        raise errors.UsageError(
            f"Gallery {context.gallery.name!r} holds vectors of {question.to_version!r} already; name another version by --to"
        )
    if question.from_version not in models:
        raise errors.Mismatch(
            f"Gallery {context.gallery.name!r} holds vectors of {legs[0].model!r}, not of {question.from_version!r}; "
            f"use --from {legs[0].model}"
        )
    if base:
        raise errors.UsageError(
            f"{question.to_version} is {base} with a head that another upgrade trained, and a plan cannot measure that; "
            f"use --to {base}"
        )
    return replace(
        question,
        from_version=legs[0].model,
        added=context.gallery.created_at,
        served=tuple(json.dumps([leg.embedder, leg.transforms, leg_to_json(leg).get("blend"), leg.rescore]) for leg in legs),
        rescores=bool(context.services.rescore_ms),
        old=tuple(leg.collection for leg in legs),
        versions=tuple(context.registry.version(name).digest for name in (question.to_version, *(leg.model for leg in legs))),
        instant_rollback=question.instant_rollback or lifts,
    )


def _refuse_rescore(context: UpgradeContext, question: Question, legs: Sequence[Leg]) -> None:
    """Raise UsageError if searches could not rescore so many records."""
    if not question.rescore:
        return
    if question.method is Method.FCT:
        raise errors.UsageError("The method fct searches one collection, so a search rescores nothing; leave --rescore out")
    if not context.services.rescore_ms:
        raise errors.UsageError("search.rescore_ms is 0, so no search is rescored; raise it, or leave --rescore out")
    there = [context.store.index(leg.collection) for leg in legs]
    most = min(index_rules.reach(each).most for each in (*there, context.services.index))
    if question.rescore > most:
        raise errors.UsageError(
            f"--rescore is {question.rescore}, but a search gives at most {most} hits with these indexes; ask for fewer"
        )


def plan(context: UpgradeContext, question: Question, *, again: bool = False) -> Plan:
    """Predict what the upgrade does. Only the cache of plans and embeddings changes."""
    if question.side and question.method is None:
        raise errors.UsageError("Only the method fct uses side information, and auto does not try it; add --method fct")
    _refuse_paper(question, [question.method])
    legs, to = _looked_at(context, question)
    for version in (to, context.registry.version(legs[0].model)) if question.instant_rollback else (to,):
        change_epoch.check_index(context, version)
    return planner(context).plan(
        question,
        legs,
        to,
        classifiers=_classifiers(context, legs),
        seen=_trained_on(context),
        log=[] if question.queries else kept_queries(context),
        again=again,
        report=context.report_or_stop,
    )


def simulate(
    context: UpgradeContext,
    question: Question,
    *,
    methods: Sequence[Method] = tuple(Method),
    orders: Sequence[str] = (),
) -> Comparison:
    """Predict what every method and order does; no orders means all that the gallery can have. Only cached embeddings change."""
    if question.side and Method.FCT not in methods:
        raise errors.UsageError("Only the method fct uses side information; add it to --methods, or leave --side out")
    _refuse_paper(question, methods)
    legs, to = _looked_at(context, question)
    return planner(context).compare(
        question,
        legs,
        to,
        classifiers=_classifiers(context, legs),
        methods=methods,
        orders=orders,
        seen=_trained_on(context),
        log=[] if question.queries else kept_queries(context),
        report=context.report,
    )


def _refuse_paper(question: Question, methods: Sequence[Method | None]) -> None:
    if question.paper and set(methods) == {Method.FCT}:
        raise errors.UsageError("The method fct is always trained with its own paper's settings; leave --paper out")


def _looked_at(context: UpgradeContext, question: Question) -> tuple[Sequence[Leg], VersionRow]:
    """Compare the legs in force and the new version with the registry, and return both."""
    legs = old_legs(context, question)
    to = context.registry.version(question.to_version)
    change_epoch.expect_unchanged(context)
    check_model(context.registry.version(to.base or to.name), context.services.loaded_models.embedder(to.base or to.name))
    return legs, to


def expect_model(context: UpgradeContext, upgrade: UpgradeRow) -> None:
    """Check that the model which fills the new collection is still the same.

    Raises:
        ModelError: it is not the registered one.
        Mismatch: no probe item fits it, and it makes other vectors of a few items than it did before.
    """
    to = context.registry.version(upgrade.to_version)
    embedder = context.services.loaded_models.embedder(to.base or to.name)
    source = context.services.source
    if check_model(context.registry.version(to.base or to.name), embedder) or source is None or upgrade.lift:
        return
    try:
        models, made = context.services.loaded_models, upgrade.new_collection
        leave_out = functools.partial(context.registry.announced, upgrade.id)  # rmvdb itself made the vectors of the others
        check_made(context.store, models, made, to, source, agrees=TOLERANCE, leave_out=leave_out)
    except errors.SourceError as exc:
        context.say(f"could not check that {to.name} is still the same model: {exc}")


def kept_queries(context: UpgradeContext) -> list[Query]:
    """Return the queries that this gallery's clients kept, without answers."""
    days = context.services.queries_days
    return context.registry.kept_queries(context.gallery.name, max_age_days=days, limit=MOST_KEPT)


def _classifiers(context: UpgradeContext, legs: Sequence[Leg]) -> list[Classifier | None]:
    return [context.services.classifier(context.registry.version(leg.model)) for leg in legs]


def _trained_on(context: UpgradeContext) -> set[Id]:
    """Return the records that the transforms in service were trained on."""
    served = _transforms(context.registry.plan(context.gallery.name).legs)
    plans = [row.plan for row in context.registry.upgrades(context.gallery.id)]
    serving = [plan for plan in plans if served & _own_transforms(plan)]
    files = {plan.trained_on for plan in serving if plan.trained_on}
    return {id for file in files for id in unpack_ids(context.services.artifacts.get(file))}


def _own_transforms(plan: UpgradePlan) -> set[str]:
    """Return the transforms of an upgrade's epochs that were not in service before."""
    before = _transforms(plan.legs(EpochName.BEFORE)) if EpochName.BEFORE in plan.epochs else set()
    return _transforms(leg for legs in plan.epochs.values() for leg in legs) - before


def _transforms(legs: Iterable[Leg]) -> set[str]:
    return {each for leg in legs for each in (*leg.transforms, *(leg.blend.transforms if leg.blend else ()))}


def superseded(context: UpgradeContext, legs: Sequence[Leg], to_version: str) -> UpgradeRow | None:
    """Return the unfinished upgrade whose place another, to `to_version`, may take, or None.

    Raises:
        UpgradeRunning: no other upgrade may take its place.
    """
    row = context.registry.active_upgrade(context.gallery.id)
    if row is None:
        return None
    if row.phase == Phase.SERVING_BOTH and row.undoes is None and not row.original and len(legs) > 1:
        if not row.makes_way:
            refuse_paused(row)
        return row
    to = context.registry.version(row.to_version)
    if row.undoes is None and to_version in (to.name, to.base):
        raise errors.UpgradeRunning(
            f"Another command has just begun the upgrade of gallery {context.gallery.name!r} to {to_version} ({row.phase}); run "
            "the same command again to work on it, too"
        )
    what = "a roll back" if row.undoes else "an upgrade"
    whole = " that keeps the original, so that no other can take its place" if row.original and not row.undoes else ""
    way_out = "rmvdb cleanup, or rmvdb rollback"
    if row.undoes:
        way_out = "rmvdb cleanup" if row.phase == Phase.CUT_OVER else "rmvdb rollback, then rmvdb cleanup"
    raise errors.UpgradeRunning(
        f"Gallery {context.gallery.name!r} is in {what} from {row.from_version} to {row.to_version} ({row.phase}){whole}; "
        f"end it first: {way_out}"
    )


def old_legs(context: UpgradeContext, question: Question) -> tuple[Leg, ...]:
    """Return the legs in force, newest first.

    Raises:
        Mismatch: they changed since the question was resolved.
    """
    legs = context.registry.plan(context.gallery.name).legs
    if question.old != tuple(leg.collection for leg in legs):
        raise errors.Mismatch(f"Gallery {context.gallery.name!r} is served differently since; run the same command again")
    return legs


def planner(context: UpgradeContext) -> Planner:
    """Return the planner of this gallery."""
    return Planner(
        store=context.store,
        loaded_models=context.services.loaded_models,
        artifacts=context.services.artifacts,
        source=context.services.source,
        cache=context.services.cache,
        folder=context.services.folder / "plans",
        rescore_ms=context.services.rescore_ms,
    )
