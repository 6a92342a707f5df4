"""The candidates of a question, fitted and measured, cheap ones first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rmvdb.errors import PlanRefused
from rmvdb.learning.method import METHODS, Method
from rmvdb.planning.trial import Candidate, Trial

#: How many of the best candidates go on to the next round.
BEST = 2
#: The numbers of candidates that a search may rescore.
RESCORED = (5, 10, 20, 50)


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The methods, orders and options to choose from."""

    methods: tuple[Method, ...]
    #: Empty: all orders of the trial.
    orders: tuple[str, ...] = ()
    #: Whether every old model can embed queries.
    both: bool = True
    #: How many records a search may rescore, 0 among them if it need not.
    rescore: tuple[int, ...] = (0,)
    #: Whether every method is measured in every order, not the best alone.
    every: bool = False


def candidates(trial: Trial, choice: Choice) -> list[Candidate]:
    """Fit and measure every method in the first order, then the best of them in other orders, on schedules and with rescoring.

    Raises PlanRefused if no method can be fitted.
    """
    orders = choice.orders or trial.orders
    made = _scheduled(trial, _made(trial, choice.methods, orders[0]), choice)
    best = [each for each in made if each.switch is None] if choice.every else _best(made)
    more = [trial.in_order(each, order) for each in best for order in orders[1:]]
    made += _scheduled(trial, more, choice)
    several = [each for each in _best(made, most=2 * BEST) if not each.method.lifts]  # a lifted gallery is one collection
    counts = [count for count in choice.rescore if count and (len(choice.rescore) == 1 or trial.distinguishes(count))]
    rescored = [trial.rescored(each, count) for each in several for count in counts]
    return [each for each in made if 0 in choice.rescore or each.method.lifts] + rescored


def sure_to_start(made: Sequence[Candidate]) -> list[Candidate]:
    """Leave out maps, and blends whose ranks stand as they are, where the queries are unknown: a blend has a part of a map, too.

    The old model's own query starts exactly where the old model is. If every best hit is rescored, a blend decides only which
    are found. If nothing else was made, because these were asked for, nothing is left out.
    """
    twice = [each for each in made if METHODS[each.method].embeds_twice] or list(made)
    return [each for each in twice if each.rescore or each.measured.fitted.blend is None] or twice


def _made(trial: Trial, methods: Sequence[Method], order: str) -> list[Candidate]:
    """Fit the methods, the cheap ones first. Of methods that come down to the same, return one."""
    made: dict[Method, Candidate] = {}
    refused: list[PlanRefused] = []
    for done, method in enumerate(sorted(methods, key=list(METHODS).index)):
        trial.progress("fitting methods", done, len(methods))
        if trial.is_late and method.has_transforms and any(each.has_transforms for each in made):
            trial.untried.append(method)
            continue
        try:
            candidate = trial.candidate(method, order)
        except PlanRefused as exc:  # of these spaces there is no such map
            refused.append(exc)
        else:
            made.setdefault(candidate.method, candidate)
    trial.progress("fitting methods", len(methods), len(methods))
    if not made:
        raise refused[0]
    return list(made.values())


def _scheduled(trial: Trial, made: Sequence[Candidate], choice: Choice) -> list[Candidate]:
    """Return the candidates, and schedules of those that a start by both models would raise."""
    blends = [each for each in made if each.method is Method.BLEND]
    later = [trial.scheduled(each, blends) for each in made] if choice.both else []
    return [*made, *(each for each in later if each)]


def _best(made: Sequence[Candidate], most: int = BEST) -> list[Candidate]:
    """Return the best candidates that embed a query once, and the best of all, without schedules."""
    whole = sorted((each for each in made if each.switch is None), key=lambda each: each.merit, reverse=True)
    once = [each for each in whole if each.extractions == 1]
    return list({id(each): each for each in (*whole[:most], *once[:most])}.values())
