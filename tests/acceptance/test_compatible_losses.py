"""The comparison of the losses for compatible models, run as its reader runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    """The table's lines by name, after a short training."""
    written = tmp_path_factory.mktemp("compatible") / "table.json"
    command = [sys.executable, "tests/bench/compatible_losses.py", "--epochs", "15", "--json", str(written)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    found = {row["name"]: row for row in json.loads(written.read_text())}
    assert all(f"| {name} |" in ran.stdout for name in found)
    return found


@pytest.mark.parametrize("loss", ["l2", "bct", "ract", "hoc", "advbct", "hbct, hyperbolic"])
def test_every_loss_finds_far_more_in_the_old_gallery_than_a_model_trained_alone(rows: dict[str, dict], loss: str) -> None:
    plain = rows["plain, hyperbolic" if "hyperbolic" in loss else "plain"]
    assert rows[loss]["cross_map"] > plain["cross_map"] + 0.2
    assert rows[loss]["cross_cmc"] > plain["cross_cmc"] + 0.2
    assert rows[loss]["p_com"] > plain["p_com"] + 0.5


def test_the_models_trained_alone_are_the_measure_of_the_others(rows: dict[str, dict]) -> None:
    for space in ("", ", hyperbolic"):
        old, plain = rows[f"old{space}"], rows[f"plain{space}"]
        assert plain["self_map"] > old["self_map"] + 0.1
        assert plain["p_up"] == 0
        assert plain["p_com"] < 0
