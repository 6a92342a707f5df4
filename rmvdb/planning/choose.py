"""Compare methods and orders side by side, and choose one."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rmvdb.learning.method import METHODS, Method
from rmvdb.planning import quality
from rmvdb.planning.held_out import LEAST_TO_CHOOSE
from rmvdb.planning.predict import Measured, Prediction, Trial, finite
from rmvdb.planning.simulate import Curve, Summary, summary
from rmvdb.planning.verdict import ends
from rmvdb.text import counted

#: The methods that `auto` compares: no training, no ψ at all if the spaces can be compared, the ψ that trains fastest and needs
#: no labels, and the ψ that gains most, which is `mcl` if ρ is not shown to help. The others are the paper's steps between these.
CANDIDATES = tuple(method for method, spec in METHODS.items() if spec.is_candidate)


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One way to serve the gallery while it is re-embedded; shares of 1."""

    #: A method; `old`, `new` and `ideal` for one model alone, `ideal` with ρ.
    name: str
    #: The backfill order; None if it makes no difference.
    order: str | None
    curve: Summary
    #: 95 % bootstrap intervals over queries: of both areas, of M_0 − M_old and of M_1 − M_new, in mAP.
    auc_map: tuple[float, float]
    auc_cmc: tuple[float, float]
    start: tuple[float, float]
    end: tuple[float, float]
    #: The share of queries that are right by the old model and wrong at each t.
    negative_flips: list[float]
    calibrated: bool
    #: The t until which each model embeds the queries for its own leg. None without a schedule.
    switch: float | None = None
    #: Whether its method is worth most with this order.
    best: bool = True
    #: The areas of mAP and CMC@1 less their falls, on records or queries that are not measured on. Methods are chosen by it.
    merit: float | None = None
    #: ok, warn or refuse, and why; None for one model alone.
    verdict: str | None = None
    reason: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """The rows of a comparison and the recommended method."""

    rows: list[Row]
    recommended: Prediction
    #: What counts as relevant: `labels`, `answers` (of queries from a file), or `neighbours` by the new model.
    relevance: str
    #: Records of the sample that could not be embedded, and those without a label, which were left out of it.
    skipped: int = 0
    unlabelled: int = 0

    def to_json(self) -> dict[str, Any]:
        """As JSON values; NaN as None."""
        told = self.recommended.to_json()
        names = ("method", "order", "switch", "verdict", "reason", "choice", "merit")
        counts = {name: told[name] for name in ("trained", "logged", "held_out", "evaluated", "seed")}
        rows: list[dict[str, Any]] = finite([asdict(row) for row in self.rows])
        return {
            "relevance": self.relevance,
            **counts,
            "skipped": self.skipped,
            "unlabelled": self.unlabelled,
            "recommended": {name: told[name] for name in names},
            "rows": rows,
        }


def compare(trial: Trial, methods: Sequence[Method], *, unable: Collection[Method] = (), declared: bool = False) -> Comparison:
    """Compare every method with every order of the trial, and each model alone.

    It recommends the method that `chosen` takes, with the order that suits it best, and never one of `unable`, which cannot
    be served here.
    """
    steps = [(method, order) for method in dict.fromkeys(methods) for order in trial.orders]
    known: dict[tuple[Method, str], Prediction] = {}
    for done, (method, order) in enumerate(steps):
        trial.progress("measuring", done, len(steps))
        found = trial.predict(method, order)
        known.setdefault((found.method, order), found)  # without ρ two methods may be the same
    trial.progress("measuring", len(steps), len(steps))
    told = list(known.values())
    if Method.NAIVE not in unable:
        told += [later for each in told if (later := schedule(trial, each))]
    best = {(each.method, each.switch is None): each for each in sorted(told, key=_worth)}
    methods_ = (replace(_of_method(trial, each), best=best[each.method, each.switch is None] is each) for each in told)
    rows = [*_levels(trial, told), *methods_]
    able = [method for method in methods if method not in unable] or list(methods)
    first = chosen(trial, [method for method in CANDIDATES if method in able] or able, declared=declared)
    worth = [each for each in told if each.method not in unable and each.verdict != "refuse"]
    return Comparison(rows=rows, recommended=with_order(first, worth), relevance=trial.relevance)


def with_order(first: Prediction, others: Sequence[Prediction]) -> Prediction:
    """Return `first`, which was chosen in one order, in its best order. `choice` names a method that is worth more still."""
    best = max([first, *(each for each in others if each.method is first.method)], key=_worth)
    said = [first.choice]
    if best.order != first.order:
        said.append(
            f"{_name(best)} is worth more in the order {best.order} ({_points(best.merit)}; {first.order} {_points(first.merit)})"
        )
    if more := [each for each in others if _worth(each) > _worth(best)]:
        most = max(more, key=_worth)
        said.append(f"{_name(most)} is worth more still ({_points(most.merit)}): --method {most.method} --order {most.order}")
    return replace(best, choice="; ".join(said))


def chosen(trial: Trial, candidates: Sequence[Method], *, declared: bool = False) -> Prediction:
    """Choose a method in the first order: `identity` if the models are `declared` to be comparable and it is not refused.

    If there is too little to choose by, it is the last candidate, unless that is refused.
    """
    if not declared or Method.IDENTITY not in candidates:
        return _chosen(trial, candidates)
    told = trial.predict(Method.IDENTITY)
    if told.verdict != "refuse":
        return replace(told, choice="the new model is declared to be compatible with the old one, so nothing is trained")
    told = _chosen(trial, [method for method in candidates if method is not Method.IDENTITY] or candidates)
    return replace(told, choice=f"the new model is declared to be compatible, but would start below the old one; {told.choice}")


def _chosen(trial: Trial, candidates: Sequence[Method]) -> Prediction:
    if trial.held_out < LEAST_TO_CHOOSE:
        most = trial.predict(candidates[-1])
        if most.verdict != "refuse":
            few = counted(trial.held_out, "record to choose a method by is", "records to choose a method by are")
            return replace(most, choice=f"{few} too few; it is the one that gains most in general")
    told = [trial.predict(method) for method in candidates]
    # `auto` tries identity without being asked. That it is refused is no news.
    told = [each for each in told if each.method is not Method.IDENTITY or each.verdict != "refuse"] or told
    if Method.NAIVE in candidates:
        told += [later for each in told if (later := schedule(trial, each))]
    return recommend(told, seed=trial.seed)


def schedule(trial: Trial, told: Prediction) -> Prediction | None:
    """Return the same method on a schedule over t if `told` starts below the present quality on the mean, surely or not."""
    return trial.scheduled(told) if told.curve.map[0] < told.map_old else None


def recommend(told: Sequence[Prediction], *, seed: int) -> Prediction:
    """Return the prediction that is worth most and is not refused, or a cheaper one that ties with it. `choice` has the reason.

    It is chosen by `merit`, on which no measured query has an influence. The intervals in the reason are of measured queries.
    """
    allowed = [each for each in told if each.verdict != "refuse"] or list(told)
    best = max(allowed, key=_worth)
    tied = {each.method: gap for each in allowed if _cost(each) < _cost(best) and (gap := _tie(best, each, seed))}
    if not tied:
        return replace(best, choice=_because(best, told, allowed, seed))
    cheaper = max((each for each in allowed if each.method in tied and _cost(each) < _cost(best)), key=_worth)
    low, high = tied[cheaper.method]
    return replace(
        cheaper,
        choice=f"{_because(best, told, allowed, seed)}; {_name(cheaper)} is taken: it embeds each query once, not twice, and "
        f"lies within the noise of the queries to choose by ({_points(low, '+')} to {_points(high, '+')})",
    )


def _cost(told: Prediction) -> tuple[int, int]:
    """Return the extractions and searches that a query costs until cut-over."""
    return 2 if told.method is Method.NAIVE or told.switch is not None else 1, 1 if told.fitted.lift else 2


def _tie(best: Prediction, other: Prediction, seed: int) -> tuple[float, float] | None:
    """Return the interval of the lead of `best` on the queries to choose by, or None if it surely leads."""
    if not len(best.chosen_by) or best.chosen_by.shape != other.chosen_by.shape:
        return None
    low, high = quality.bootstrap(best.chosen_by - other.chosen_by, seed=seed)
    return (low, high) if low <= 0 else None


def _because(best: Prediction, told: Sequence[Prediction], allowed: Sequence[Prediction], seed: int) -> str:
    words = f"{_name(best)} is worth most on the part kept to choose by (AUC of mAP + CMC@1 {_points(best.merit)}"
    others = [each for each in allowed if (each.method, each.switch) != (best.method, best.switch)]
    if others:
        second = max(others, key=_worth)
        words += f", less its falls; {_name(second)} {_points(second.merit)}"
    words += ")"
    refused = dict.fromkeys(_name(each) for each in told if each.verdict == "refuse" and each is not best)
    if refused:
        words += f"; {' and '.join(refused)} would start below the present quality"
    simpler = [each for each in others if _rank(each) < _rank(best)]
    for each in sorted(simpler, key=_rank):
        low, high = quality.bootstrap(best.measured.merit - each.measured.merit, seed=seed)
        if low <= 0:
            return words + (
                f"; {_name(each)}, which is simpler, lies within the noise of the measured queries "
                f"({_points(low, '+')} to {_points(high, '+')})"
            )
    return words


def _of_method(trial: Trial, told: Prediction) -> Row:
    found = trial.measure(told.method, told.fitted, told.order)
    row = _row(trial, told.method, replace(found, curve=told.measured), order=told.order)
    return replace(row, verdict=told.verdict, reason=told.reason, switch=told.switch, merit=told.merit)


def _levels(trial: Trial, told: Sequence[Prediction]) -> Iterator[Row]:
    """Yield the rows of the old model, the new one, and ρ on it, each alone at every t."""
    naive = trial.naive(trial.orders[0])
    heads = {each.method: each for each in told if each.fitted.head is not None and each.order == trial.orders[0]}
    alone = {"old": naive.curve.held(0), "new": naive.curve.held(-1)}
    if heads:
        best = max(heads.values(), key=_worth)
        alone["ideal"] = best.measured.held(-1)
    for name, curve in alone.items():
        row = _row(trial, name, replace(naive, curve=curve), order=trial.orders[0])
        yield replace(row, order=None, merit=None, calibrated=False)


def _row(trial: Trial, name: str, found: Measured, *, order: str | None = None) -> Row:
    order = order or trial.orders[0]
    naive, curve, seed = trial.naive(order).curve, found.curve, trial.seed
    start, end = ends(curve, naive)
    return Row(
        name=str(name),
        order=order,
        curve=summary(curve, old=naive.map[0], new=naive.map[-1]),
        auc_map=quality.bootstrap(quality.areas(curve.ts, curve.precision), seed=seed),
        auc_cmc=quality.bootstrap(quality.areas(curve.ts, curve.top1), seed=seed),
        start=quality.bootstrap(start, seed=seed),
        end=quality.bootstrap(end, seed=seed),
        negative_flips=_flips(naive, curve),
        calibrated=any(found.calibrations),
        merit=found.merit,
    )


def _flips(naive: Curve, curve: Curve) -> list[float]:
    return [quality.negative_flips(naive.top1[0], now) for now in curve.top1]


def _worth(told: Prediction) -> float:
    return _or_nothing(told.merit)


def _or_nothing(merit: float) -> float:
    """Return the merit, or minus infinity for NaN."""
    return -math.inf if math.isnan(merit) else merit


def _rank(told: Prediction) -> int:
    return list(Method).index(told.method)


def _name(told: Prediction) -> str:
    return str(told.method) if told.switch is None else f"{told.method} from t = {told.switch:g} on"


def _points(share: float, sign: str = "") -> str:
    return f"{100 * share:{sign}.1f}"
