"""Every method and order side by side, with what others do, and which of them to take."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rmvdb.learning.method import METHODS, Fitted, Method
from rmvdb.planning import quality
from rmvdb.planning.predict import LEAST_TO_CHOOSE, Measured, Prediction, Trial, ends, finite
from rmvdb.planning.simulate import Curve, Summary, summary
from rmvdb.serving.merge import reciprocal_ranks
from rmvdb.text import counted

#: What is compared where the method is left to rmvdb: no training, no ψ where the spaces can be compared, the ψ that is trained
#: fastest and needs no labels, and the one that gains most, which is `mcl` where ρ isn't shown to help. The others are the
#: paper's steps between these.
CANDIDATES = tuple(method for method, spec in METHODS.items() if spec.is_candidate)
#: What others do.
RRF, PROCRUSTES, RIDGE = "rrf", "procrustes", "ridge"
#: Settings of ψ and ρ that are worth a try, one at a time: what moved Gain most from one pair of models to another.
BLOCKS = ({"blocks": 1}, {"blocks": 3})
CONTRAST = ({"temperature": 0.05}, {"temperature": 0.2}, {"mining": False}, {"pull": 0.3}, {"pull": 3.0})
HEAD = ({"residual": False},)


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One way to serve the gallery while it is re-embedded; shares of 1."""

    #: A method; `old`, `new` and `ideal` for one model alone, `ideal` with ρ; `rrf`, `procrustes`, `ridge` for what others do.
    name: str
    #: The backfill order; None where it makes no difference.
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
    #: The t until which each model embeds the queries for its own leg, where the method begins with that.
    switch: float | None = None
    #: Whether its method is worth most with this order.
    best: bool = True
    #: What a method is chosen by, of records or queries that are not measured on: areas of mAP and CMC@1 less their falls.
    merit: float | None = None
    #: ok, warn or refuse, and why; None for what rmvdb does not serve.
    verdict: str | None = None
    reason: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """What was compared, and which to take."""

    rows: list[Row]
    recommended: Prediction
    #: What a query should find: `labels`, `answers` (of queries that are no records), or `neighbours` by the new model.
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
    """Every method, and what others do, with every order of the trial, and the models alone.

    Recommended is what `chosen` takes of them, with the order that suits it best; those that are `unable` to be served here
    never are.
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
    rows += [row for name, founds in _others(trial) for row in _of_others(trial, name, founds)]
    able = [method for method in methods if method not in unable] or list(methods)
    first = chosen(trial, [method for method in CANDIDATES if method in able] or able, declared=declared)
    worth = [each for each in told if each.method not in unable and each.verdict != "refuse"]
    return Comparison(rows=rows, recommended=with_order(first, worth), relevance=trial.relevance)


def with_order(first: Prediction, others: Sequence[Prediction]) -> Prediction:
    """The `first`, which was chosen in one order, in its best one of these; others that are worth more are named in `choice`."""
    best = max([first, *(each for each in others if each.method is first.method)], key=_worth)
    said = [first.choice]
    if best.order != first.order:
        said.append(f"it is worth more in the order {best.order} ({_points(best.merit)}; {first.order} {_points(first.merit)})")
    if more := [each for each in others if _worth(each) > _worth(best)]:
        most = max(more, key=_worth)
        said.append(f"{_name(most)} is worth more still ({_points(most.merit)}): --method {most.method} --order {most.order}")
    return replace(best, choice="; ".join(said))


def chosen(trial: Trial, candidates: Sequence[Method], *, declared: bool = False) -> Prediction:
    """The method to take with the first order: `identity` where the models are `declared` to be comparable and it isn't refused.

    Where there is too little to choose by it is the last of the candidates, if that isn't refused.
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
    # Nobody said that the models are comparable, and it is no news that they are not.
    told = [each for each in told if each.method is not Method.IDENTITY or each.verdict != "refuse"] or told
    if Method.NAIVE in candidates:
        told += [later for each in told if (later := schedule(trial, each))]
    return recommend(told, seed=trial.seed)


def schedule(trial: Trial, told: Prediction) -> Prediction | None:
    """The same method on a schedule over t, where `told` starts below what is served now: on the mean, be it sure or not."""
    return trial.scheduled(told) if told.curve.map[0] < told.map_old else None


def tuned(trial: Trial, told: Prediction) -> Prediction:
    """The same method with those settings, among few, that are worth most; its `tuned` says which.

    Chosen by `merit` as methods are, so what it is measured on has no say; `told` where none is worth more.
    """
    tries = _tries(told.method) if math.isfinite(told.merit) else []
    base = replace(trial.settings, pull=told.tuned.get("pull", trial.settings.weight_of_pull(labelled=told.labelled)))
    found = [told]
    for done, change in enumerate(tries):
        trial.progress("trying settings", done, len(tries))
        other = trial.with_settings(replace(base, **change))
        again = other.predict(told.asked, told.order)
        scheduled = other.scheduled(again) if told.switch is not None else None
        found.append(replace(scheduled or again, tuned=told.tuned | change))
    best = max([each for each in found if each.verdict != "refuse"] or found, key=_worth)
    if tries:
        trial.progress("trying settings", len(tries), len(tries))
        words = f"of {len(found)} settings {_settings(best)} are worth most ({_points(best.merit)}, the defaults "
        words += f"{_points(told.merit)})"
        best = replace(best, choice="; ".join(filter(None, [told.choice, words])))
    return best


def _tries(method: Method) -> list[dict[str, Any]]:
    if not method.trains_reverse:
        return []
    return [*BLOCKS, *(CONTRAST if method.contrasts else ()), *(HEAD if method.has_head else ())]


def _settings(told: Prediction) -> str:
    return " ".join(f"{name}={value}" for name, value in told.tuned.items()) or "the defaults"


def recommend(told: Sequence[Prediction], *, seed: int) -> Prediction:
    """The one that is worth most among those that are not refused, with the reason in `choice`; after a tie a cheaper one.

    It is chosen by `merit`, which no measured query has a say in; the intervals it is compared by are of those.
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
    """Extractions and searches that a query costs until cut-over."""
    return 2 if told.method is Method.NAIVE or told.switch is not None else 1, 1 if told.fitted.lift else 2


def _tie(best: Prediction, other: Prediction, seed: int) -> tuple[float, float] | None:
    """The interval of what `best` is worth more than the other by the queries to choose by, where that may be nothing."""
    if not len(best.chosen_by) or best.chosen_by.shape != other.chosen_by.shape:
        return None
    low, high = quality.bootstrap(best.chosen_by - other.chosen_by, seed=seed)
    return (low, high) if low <= 0 else None


def _because(best: Prediction, told: Sequence[Prediction], allowed: Sequence[Prediction], seed: int) -> str:
    words = f"{_name(best)} is worth most on what was kept to choose by (AUC of mAP + CMC@1 {_points(best.merit)}"
    others = [each for each in allowed if (each.method, each.switch) != (best.method, best.switch)]
    if others:
        second = max(others, key=_worth)
        words += f", less its falls; {_name(second)} {_points(second.merit)}"
    words += ")"
    refused = dict.fromkeys(_name(each) for each in told if each.verdict == "refuse" and each is not best)
    if refused:
        words += f"; {' and '.join(refused)} would start below what is served now"
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
    """The old model, the new one, and ρ on it, each alone for ever."""
    naive = trial.naive(trial.orders[0])
    heads = {each.method: each for each in told if each.fitted.head is not None and each.order == trial.orders[0]}
    alone = {"old": naive.curve.held(0), "new": naive.curve.held(-1)}
    if heads:
        best = max(heads.values(), key=_worth)
        alone["ideal"] = best.measured.held(-1)
    for name, curve in alone.items():
        row = _row(trial, name, replace(naive, curve=curve), order=trial.orders[0])
        yield replace(row, order=None, merit=None, calibrated=False)


def _others(trial: Trial) -> Iterator[tuple[str, dict[str, Measured]]]:
    """What others do, by name, each with every order."""
    from rmvdb.learning import bridges  # here, so that commands that train nothing do not wait for torch

    part = trial.train
    yield RRF, {order: trial.measure(RRF, Fitted(), order, fuse=reciprocal_ranks) for order in trial.orders}
    for name, fit in ((PROCRUSTES, bridges.procrustes), (RIDGE, bridges.ridge)):
        fitted = Fitted(reverse=fit(part.pairs, old_metric=part.old_metric, new_metric=part.new_metric))
        yield name, {order: trial.measure(name, fitted, order) for order in trial.orders}


def _of_others(trial: Trial, name: str, founds: Mapping[str, Measured]) -> Iterator[Row]:
    best = max(founds, key=lambda order: _or_nothing(founds[order].merit))
    for order, found in founds.items():
        yield replace(_row(trial, name, found, order=order), best=order == best)


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
    """What is not a number is worth nothing."""
    return -math.inf if math.isnan(merit) else merit


def _rank(told: Prediction) -> int:
    return list(Method).index(told.method)


def _name(told: Prediction) -> str:
    return str(told.method) if told.switch is None else f"{told.method} from t = {told.switch:g} on"


def _points(share: float, sign: str = "") -> str:
    return f"{100 * share:{sign}.1f}"
