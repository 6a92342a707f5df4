"""`python -m tests.model`: how many states each scenario has."""

from __future__ import annotations

from tests.model.checker import check
from tests.model.test_model import SCENARIOS

for name, scenario in SCENARIOS.items():
    print(f"{check(scenario).states:9,}  {name}", flush=True)
