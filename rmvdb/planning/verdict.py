"""Whether a predicted upgrade keeps the promise that quality never falls."""

from __future__ import annotations

from typing import Literal

from rmvdb.learning.method import Method
from rmvdb.planning import quality
from rmvdb.planning.quality import Floats
from rmvdb.planning.simulate import Curve

#: A fall of less than half a point is not worth a warning.
TOLERATED_FALL = 0.005


def verdict_of(
    method: Method, measured: Curve, start: Floats, end: Floats, *, without: str, before: str, seed: int
) -> tuple[Literal["ok", "warn", "refuse"], str]:
    """Judge by promise 7 of the design: M_0 ≥ M_old, M_t rises, M_1 ≥ M_new, each within the noise of the sample."""
    (low, high), (_, end_high) = (quality.bootstrap(v, seed=seed) for v in (start, end))
    span = f"mAP at the start {_points(low)} to {_points(high)} points against {before}"
    if high < 0:
        return "refuse", f"{method} would start below {before} ({span}){without}; the method naive would not"
    if end_high < 0:
        lost = f"{_points(quality.mean(end))} points of mAP"
        return "warn", f"{method} would end below the new model ({lost}); the method {method.headless} would not"
    if low < 0:
        return "warn", f"{method} may start below {before} ({span}){without}; the method naive would not"
    if lost := _fallen(measured, seed):
        return (
            "warn",
            f"{method} would fall by {lost} on its way{without}; another order, or the method {_other(method)}, may not",
        )
    return "ok", f"{method} starts no lower than {before}, rises, and ends no lower than the new model{without}"


def _fallen(measured: Curve, seed: int) -> str:
    """Name the falls of the curve, in points, that are more than chance and worth a warning."""
    curves = (("mAP", measured.map, measured.precision), ("CMC@1", measured.cmc, measured.top1))
    falls = ((name, quality.largest_fall(means), values) for name, means, values in curves)
    large = [(name, fall, values) for name, fall, values in falls if fall > TOLERATED_FALL]
    sure = [(name, fall) for name, fall, values in large if fall > quality.fall_by_chance(values, seed=seed)]
    return " and ".join(f"{100 * fall:.1f} points of {name}" for name, fall in sure)


def _other(method: Method) -> Method:
    return Method.RM if method is Method.NAIVE else Method.NAIVE


def _points(share: float) -> str:
    return f"{100 * share:+.1f}"


def ends(measured: Curve, naive: Curve) -> tuple[Floats, Floats]:
    """Return average precision at the start less the old model's, and at the end less the new model's, (Q,) each."""
    return measured.precision[0] - naive.precision[0], measured.precision[-1] - naive.precision[-1]
