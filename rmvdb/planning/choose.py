"""Choose one candidate: the one that is worth most, or a cheaper one within the noise. Nothing is fitted or measured here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from rmvdb.learning.method import METHODS, Method
from rmvdb.planning import quality
from rmvdb.planning.objective import Objective
from rmvdb.planning.prediction import Prediction
from rmvdb.planning.trial import Candidate

#: The methods that `auto` compares. The others are the papers' steps between these.
CANDIDATES = tuple(method for method, spec in METHODS.items() if spec.is_candidate)


def chosen(
    candidates: Sequence[Candidate],
    predict: Callable[[Candidate], Prediction],
    *,
    objective: Objective,
    declared: bool = False,
    seed: int,
) -> Prediction:
    """Predict the candidates in the order of preference, and return the first that is ok; else the best that is not refused.

    They are preferred by the part to choose by, on which no measured query has an influence. If the models are `declared` to be
    comparable, `identity` comes first.
    """
    passed: list[Prediction] = []
    before = ""
    if declared and (same := [each for each in candidates if each.method is Method.IDENTITY]):
        told = predict(max(same, key=_worth))
        if told.verdict != "refuse":
            return replace(told, choice="the new model is declared to be compatible with the old one, so nothing is trained")
        before = "the new model is declared to be compatible, but would start below the old one. "
        candidates = [each for each in candidates if each.method is not Method.IDENTITY] or candidates
    for candidate, why in preferred(candidates, objective=objective, seed=seed):
        told = predict(candidate)
        told = replace(told, choice=f"{before}{why}{_passed_over(passed)}")
        if told.verdict == "ok":
            return told
        passed.append(told)
    return next((told for told in passed if told.verdict == "warn"), passed[0])


def preferred(candidates: Sequence[Candidate], *, objective: Objective, seed: int) -> Iterator[tuple[Candidate, str]]:
    """Yield all candidates, the preferred one first, each with the reason for it."""
    left = list(candidates)
    while left:
        best, why = _preferred(left, objective, seed)
        yield best, why
        left.remove(best)


def _preferred(candidates: Sequence[Candidate], objective: Objective, seed: int) -> tuple[Candidate, str]:
    best = max(candidates, key=_worth)
    why = _because(best, candidates, objective)
    gaps = {at: gap for at, each in enumerate(candidates) if each.cost < best.cost and (gap := _tie(best, each, seed))}
    if not gaps:
        return best, why
    at = min(gaps, key=lambda at: (candidates[at].cost, *(-each for each in _worth(candidates[at]))))
    cheaper, (low, high) = candidates[at], gaps[at]
    return cheaper, (
        f"{why}. {cheaper.name} is cheaper and is taken: a query embeds {_items(cheaper)}, not {_items(best)}, and the "
        f"difference lies within the noise ({_points(low, '+')} to {_points(high, '+')})"
    )


def _worth(candidate: Candidate) -> tuple[float, float]:
    """Return the merit; of two that are worth the same, the cheaper one is worth more."""
    return candidate.merit, -float(candidate.cost[0])


def _tie(best: Candidate, other: Candidate, seed: int) -> tuple[float, float] | None:
    """Return the interval of the lead of `best` on the queries to choose by, or None if it surely leads.

    The lead is that of the areas, less the difference of the falls.
    """
    one, two = best.measured.chosen_by, other.measured.chosen_by
    if not len(one) or one.shape != two.shape:
        return None
    lead = one - two
    falls = best.merit - other.merit - quality.mean(lead)
    low, high = (bound + falls for bound in quality.bootstrap(lead, seed=seed))
    return (low, high) if low <= 0 else None


def _because(best: Candidate, candidates: Sequence[Candidate], objective: Objective) -> str:
    words = f"{best.name} is worth most on the queries to choose by (AUC of {objective} less its fall: {_points(best.merit)}"
    others = [each for each in candidates if each.method is not best.method]
    if others:
        second = max(others, key=_worth)
        words += f", against {_points(second.merit)} of {second.name}"
    return f"{words})"


def _passed_over(passed: Sequence[Prediction]) -> str:
    refused = dict.fromkeys(
        str(each.method) for each in passed if each.verdict == "refuse" and each.method is not Method.IDENTITY
    )
    warned = dict.fromkeys(str(each.method) for each in passed if each.verdict == "warn")
    words = f". The plan refuses {' and '.join(refused)}" if refused else ""
    return words + (f". There is a warning about {' and '.join(warned)}" if warned else "")


def _items(candidate: Candidate) -> str:
    count = candidate.cost[0]
    return f"{count} item{'s' if count > 1 else ''}" if candidate.rescore else {1: "once", 2: "twice"}[count]


def _points(share: float, sign: str = "") -> str:
    return f"{100 * share:{sign}.1f}"
