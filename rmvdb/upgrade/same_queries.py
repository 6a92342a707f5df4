"""The same queries, asked of the old collections before deploy and of the new one before cut-over.

Verification searches for records by their own vectors. This asks what people ask, through the index and with the parameters of
their searches. It reports and decides nothing: fewer common hits may be better ones.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from rmvdb import errors
from rmvdb.items.digest import item_digest
from rmvdb.learning.hyperbolic import as_queries, measured
from rmvdb.planning import quality
from rmvdb.planning.question import Question
from rmvdb.registry.codec import key
from rmvdb.registry.tables import UpgradeRow
from rmvdb.registry.upgrade_plan import EpochName
from rmvdb.serving.merge import merge_each
from rmvdb.text import counted
from rmvdb.types import Hit, Id, Item, Leg, Metric, Query, ServingPlan
from rmvdb.upgrade import plan_step
from rmvdb.upgrade.context import UpgradeContext

#: The hits of a query that are compared, and the most queries.
LIMIT, MOST = 10, 200
#: Why queries are not asked: an embedder or an item is gone, or the engine refuses. The upgrade goes on without.
_NOT_ASKED = (errors.ModelError, errors.ItemError, errors.ArtifactError, errors.EngineError)


def ask_old(context: UpgradeContext, upgrade: UpgradeRow) -> None:
    """Keep the first hits of the collections in service, if there are queries with answers or kept ones."""
    served = context.registry.plan(context.gallery.name)
    if upgrade.undoes is not None or upgrade.plan.answered or served.legs[0].collection == upgrade.new_collection:
        return
    if not (asked := _queries(context, upgrade)):
        return
    try:
        first = _first(context, served, [each.item for each in asked.values()])
    except _NOT_ASKED as exc:
        context.say(f"old and new will not be compared by queries: {exc}")
        return
    data = json.dumps(dict(zip(asked, first, strict=True))).encode()
    sha256 = context.services.artifacts.put(data, suffix=".json")
    context.registry.add_artifact(sha256=sha256, kind="answers", suffix="json", size=len(data))
    context.registry.add_contents(sha256, data)
    plan = replace(context.registry.upgrade(upgrade.id).plan, answered=sha256)
    context.registry.set_upgrade(upgrade.id, plan=plan, leader_token=context.leader_token)


def compare(context: UpgradeContext, upgrade: UpgradeRow) -> str:
    """Say how the first hits of the new collection differ from the kept ones. Empty if none were kept."""
    if not upgrade.plan.answered:
        return ""
    legs = tuple(leg for leg in upgrade.plan.legs(EpochName.FINAL) if leg.searched)
    alone = replace(context.registry.plan(context.gallery.name), legs=legs, mirrors=())
    try:
        before: dict[str, list[Id]] = json.loads(context.services.artifacts.get(upgrade.plan.answered))
        asked = {name: each for name, each in _queries(context, upgrade).items() if name in before}
        after = dict(zip(asked, _first(context, alone, [each.item for each in asked.values()]), strict=True)) if asked else {}
    except _NOT_ASKED as exc:
        return f"old and new could not be compared by queries: {exc}"
    # A record that was written since may be found by what it is now.
    written = context.registry.announced(upgrade.id, {id for name in asked for id in (*before[name], *after[name])})
    old, new = ({name: {id for id in found[name] if key(id) not in written} for name in asked} for found in (before, after))
    shared = [len(old[name] & new[name]) / len(old[name]) for name in asked if old[name]]
    if not shared:
        return ""
    words = f"{counted(len(shared), 'query', 'queries')}: old and new share {np.mean(shared):.0%} of the first {LIMIT} hits"
    return words + _answered({name: set(each.answers) for name, each in asked.items() if each.answers}, old, new)


def _answered(answers: Mapping[str, set[Id]], old: Mapping[str, set[Id]], new: Mapping[str, set[Id]]) -> str:
    """Say for how many queries an answer is among the first hits."""
    if not answers:
        return ""
    was, now = (np.array([bool(found[name] & right) for name, right in answers.items()], float) for found in (old, new))
    low, high = quality.bootstrap(now - was)
    return f"; an answer is among them for {was.mean():.0%} by old and {now.mean():.0%} by new ({low:+.0%} to {high:+.0%})"


def _queries(context: UpgradeContext, upgrade: UpgradeRow) -> dict[str, Query]:
    """Return the queries by the digest of their items: those with answers, else kept ones."""
    try:
        judged = [each for each in Question.of_upgrade(upgrade.plan.question).asked() if each.answers]
    except errors.UsageError:  # the file is gone
        judged = []
    some = (judged or plan_step.kept_queries(context))[:MOST]
    return {digest.hex(): each for each in some if (digest := item_digest(each.item)) is not None}


def _first(context: UpgradeContext, plan: ServingPlan, items: Sequence[Item]) -> list[list[Id]]:
    """Return the first hits of each query by this plan."""
    context.announce(
        f"asking {counted(len(items), 'known query', 'known queries')} of {' and '.join(leg.collection for leg in plan.legs)}"
    )
    models = context.services.loaded_models
    vectors = models.queries(plan, items, {})

    def hits(leg: Leg) -> list[list[Hit]]:
        own, hyperbolic = vectors[leg.collection], leg.metric is Metric.LORENTZ
        params = context.registry.collection(leg.collection).search
        queries = as_queries(own) if hyperbolic else own
        found = context.store.search(leg.collection, queries, limit=LIMIT, search=params, strong=True)
        return measured(found, own) if hyperbolic else found

    legs = [hits(leg) for leg in plan.legs]
    scales = [
        None if scale is None else functools.partial(scale, counts=list(map(len, found)))
        for scale, found in zip(models.scales(plan.legs, vectors), legs, strict=True)
    ]
    return [[hit.id for hit in merged] for merged in merge_each(legs, scales, limit=LIMIT)]
