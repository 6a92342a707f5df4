"""The things that the demo promises."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
KEPT: dict[str, Any] = {
    **dict.fromkeys(("failed", "missed", "duplicates", "writes_failed", "writes_unseen", "largest_fall"), 0),
    "M_old": 50.5,
    "M_0": 81.0,
    "M_1": 96.1,
    "M_offline": 96.1,
    "M_new": 83.3,
}


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(EXAMPLES))  # its parts import one another by their names
    import demo_report

    yield demo_report
    for name in [name for name in sys.modules if name.startswith("demo_")]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("area", "broken"),
    [
        ({}, []),
        ({"without_rescoring": 89.9}, []),  # the two curves are some searches apart
        ({"without_rescoring": 91.0}, ["the area under rmvdb's curve is below that of without_rescoring"]),
        ({"naive_calibrated": 89.8}, ["the area under rmvdb's curve is below that of naive_calibrated"]),
    ],
)
def test_a_curve_above_rmvdbs_is_named(report: ModuleType, area: dict[str, float], broken: list[str]) -> None:
    areas = {"rm": 89.7, "without_rescoring": 88.0, "naive": 38.7, "naive_calibrated": 69.4} | area
    assert report.failures({**KEPT, "AUC": {name: {"mAP": value} for name, value in areas.items()}}) == broken


def test_each_broken_promise_is_named(report: ModuleType) -> None:
    areas = {name: {"mAP": 80.0} for name in ("rm", "without_rescoring", "naive", "naive_calibrated")}
    broken = {"missed": 3, "M_0": 50.0, "largest_fall": 0.7, "M_1": 80.0, "AUC": areas}
    assert report.failures({**KEPT, **broken}) == [
        "3 records were missed by searches",
        "M_0 is 50.00, below M_old, 50.50",
        "mAP fell by 0.70 points from one step to the next",
        "M_1 is 16.10 points away from M_offline",
        "M_1 is 80.00, below M_new, 83.30",
    ]
