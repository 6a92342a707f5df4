"""`make curves` in its small form, which needs no files: the quality of an upgrade at each moment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(600)
def test_the_curve_of_an_upgrade_is_measured_by_the_real_commands(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.bench.curves", "--small", "--out", str(tmp_path / "curves.json")]
    run = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "CURVES_CACHE": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    found = json.loads((tmp_path / "curves.json").read_text())
    assert {(row["case"], row["method"]) for row in found["rows"]} == {(c, m) for c in "dm" for m in ("auto", "naive")}
    for row in found["rows"]:
        assert [t for t, _ in row["curve"]] == pytest.approx([0, 0.5, 1], abs=0.05)
        assert row["M_old"] < row["M_new"]
    for row in (each for each in found["rows"] if each["method"] == "naive"):
        # Both models embed the query: at the start v1's gallery answers alone, at the end v2's does.
        assert row["M_0"] == pytest.approx(row["M_old"], abs=1e-6)
        assert row["curve"][-1][1] == pytest.approx(row["M_new"], abs=0.01)
        assert row["extractions"] == 2
    assert (tmp_path / "curves.md").read_text().count("| `naive` | ") == 2
    assert (tmp_path / "curves.png").stat().st_size > 10_000
