"""The same queries, asked of the old collections before deploy and of the new one before cut-over.

Verification searches for records by their own vectors. This asks what people ask, through the index and with the parameters of
their searches. It reports and decides nothing: fewer common hits may be better ones.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from rmvdb import errors
from rmvdb.learning.hyperbolic import as_queries, measured
from rmvdb.planning import quality
from rmvdb.planning.question import Question
from rmvdb.registry.codec import key
from rmvdb.registry.tables import UpgradeRow
from rmvdb.registry.upgrade_plan import EpochName
from rmvdb.serving.merge import merge_each
from rmvdb.text import counted
from rmvdb.types import Hit, Id, Leg, Metric, Query, ServingPlan
from rmvdb.upgrade.context import UpgradeContext

#: The hits of a query that are compared, and the most queries.
LIMIT, MOST = 10, 200
#: The hits that are asked for: some may be records that were written meanwhile, which do not count.
ASKED_FOR = 2 * LIMIT
#: Queries that may fail to be embedded. They are left out.
FAILING = 5
#: Why queries are not asked: a file, an embedder or an item is gone, or the engine refuses. The upgrade goes on without.
_NOT_ASKED = (errors.UsageError, errors.ModelError, errors.ItemError, errors.ArtifactError, errors.EngineError, OSError)


def ask_old(context: UpgradeContext, upgrade: UpgradeRow) -> None:
    """Keep the first hits of the collections in service, if there are queries with answers or kept ones.

    A worker that stays does not: it would keep the old model in memory for this alone.
    """
    served = context.registry.plan(context.gallery.name)
    stays = context.worker is not None and not context.worker.patient
    if stays or upgrade.undoes is not None or upgrade.plan.answered or served.legs[0].collection == upgrade.new_collection:
        return
    try:
        file, asked = _judged(upgrade)
        asked = asked or _kept(context)
        if not asked:
            return
        answers = {"file": file, "hits": _hits(context, served, asked)}
    except _NOT_ASKED as exc:
        context.say(f"old and new will not be compared by queries: {exc}")
        return
    data = json.dumps(answers).encode()
    sha256 = context.services.artifacts.put(data, suffix=".json")
    context.registry.add_artifact(sha256=sha256, kind="answers", suffix="json", size=len(data))
    context.registry.add_contents(sha256, data)
    plan = replace(context.registry.upgrade(upgrade.id).plan, answered=sha256)
    context.registry.set_upgrade(upgrade.id, plan=plan, leader_token=context.leader_token)


def difference(context: UpgradeContext, upgrade: UpgradeRow) -> str:
    """Say, and return, how the first hits of new differ from the kept ones of old. Empty if there is nothing to compare."""
    if not upgrade.plan.answered:
        return ""
    try:
        words = _difference(context, upgrade, json.loads(context.services.artifacts.get(upgrade.plan.answered)))
    except _NOT_ASKED as exc:
        words = f"old and new could not be compared by queries: {exc}"
    if words:
        context.say(words)
    return words


def _judged(upgrade: UpgradeRow) -> tuple[str, dict[str, Query]]:
    """Return the queries with answers of `--queries`, by their number, and the SHA-256 of the file. Nothing without a file."""
    question = Question.of_upgrade(upgrade.plan.question)
    if question.queries is None:
        return "", {}
    judged = {str(number): each for number, each in enumerate(question.asked()) if each.answers}
    return hashlib.sha256(Path(question.queries).read_bytes()).hexdigest(), dict(islice(judged.items(), MOST))


def _kept(context: UpgradeContext, numbers: list[int] | None = None) -> dict[str, Query]:
    """Return kept queries by number: a sample, or the numbered ones as far as they are still kept."""
    days = context.services.queries_days
    found = context.registry.numbered_queries(context.gallery.name, max_age_days=days, limit=MOST, numbers=numbers)
    return {str(number): query for number, query in found.items()}


def _difference(context: UpgradeContext, upgrade: UpgradeRow, answers: Mapping[str, Any]) -> str:
    """Return the sentence. Empty if nothing is left to compare."""
    before: dict[str, list[Id]] = answers["hits"]
    file, asked = _judged(upgrade) if answers["file"] else ("", _kept(context, [int(number) for number in before]))
    if file != answers["file"]:
        raise errors.UsageError("the file of queries has changed")
    asked = {number: each for number, each in asked.items() if number in before}
    if not asked:
        return ""
    legs = tuple(leg for leg in upgrade.plan.legs(EpochName.FINAL) if leg.searched)
    after = _hits(context, replace(context.registry.plan(context.gallery.name), legs=legs, mirrors=()), asked)
    # A record that was written since may be found by what it is now.
    some = {id for number in after for id in (*before[number], *after[number], *asked[number].answers)}
    written = context.registry.announced(upgrade.id, some)

    pairs = {number: (_first(before[number], written), _first(after[number], written)) for number in after}
    pairs = {number: pair for number, pair in pairs.items() if pair[0]}
    if not pairs:
        return ""
    shared = np.mean([len(old & new) / len(old) for old, new in pairs.values()])
    words = f"{counted(len(pairs), 'query', 'queries')}: old and new share {shared:.0%} of the first {LIMIT} hits"
    right = {number: {id for id in asked[number].answers if key(id) not in written} for number in pairs}
    return words + _say_right([(right[number], *pair) for number, pair in pairs.items() if right[number]])


def _first(found: list[Id], written: Mapping[str, Any]) -> set[Id]:
    """Return the first hits that were not written meanwhile."""
    return set(islice((id for id in found if key(id) not in written), LIMIT))


def _say_right(compared: list[tuple[set[Id], set[Id], set[Id]]]) -> str:
    """Say for how many queries an answer is among the first hits, from the answers and the hits of old and of new."""
    if not compared:
        return ""
    was, now = (np.array([bool(hits[0] & hits[side]) for hits in compared], float) for side in (1, 2))
    low, high = quality.bootstrap(now - was)
    return f"; an answer is among them for {was.mean():.0%} by old and {now.mean():.0%} by new ({low:+.0%} to {high:+.0%})"


def _hits(context: UpgradeContext, plan: ServingPlan, asked: Mapping[str, Query]) -> dict[str, list[Id]]:
    """Return the first hits of each query by this plan, without the few queries that cannot be embedded."""
    context.announce(f"asking {counted(len(asked), 'known query', 'known queries')} of {plan.legs[0].collection}")
    models = context.services.loaded_models
    numbers = list(asked)
    for left in reversed(range(FAILING + 1)):
        try:
            vectors = models.queries(plan, [asked[number].item for number in numbers], {})
            break
        except errors.ItemError as exc:
            if exc.at is None or not left or len(numbers) == 1:
                raise
            del numbers[exc.at]

    def of_leg(leg: Leg) -> list[list[Hit]]:
        own, hyperbolic = vectors[leg.collection], leg.metric is Metric.LORENTZ
        params = context.registry.collection(leg.collection).search
        queries = as_queries(own) if hyperbolic else own
        found = context.store.search(leg.collection, queries, limit=ASKED_FOR, search=params, strong=True)
        return measured(found, own) if hyperbolic else found

    legs = [of_leg(leg) for leg in plan.legs]
    scales = [
        None if scale is None else functools.partial(scale, counts=list(map(len, found)))
        for scale, found in zip(models.scales(plan.legs, vectors), legs, strict=True)
    ]
    merged = merge_each(legs, scales, limit=ASKED_FOR)
    return {number: [hit.id for hit in hits] for number, hits in zip(numbers, merged, strict=True)}
