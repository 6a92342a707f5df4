"""One case with one seed, in a process of its own."""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from examples.pretrained.files import Missing
from rmvdb.errors import RmvdbError
from tests.bench.curves import report
from tests.bench.curves.cases import CASES, Case, Sizes
from tests.bench.curves.run import Ends, Failed, Way, ends, upgrade


def measured(name: str, seed: int, data: Path, sizes: Sizes, ways: Sequence[Way]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Run every way for one case and seed, in a process of its own."""
    torch.set_num_threads(1)
    at = Path(tempfile.mkdtemp(prefix="rmvdb-curves-"))
    try:
        (at / "data").mkdir()
        case = CASES[name](seed, at / "data", data, sizes)
        alone = ends(case, at / "alone")
        runs = [_run(way, seed, at / f"way{number}", case, alone, sizes.ts) for number, way in enumerate(ways)]
        about = {"title": case.title, "metric": case.metric, "records": len(case.records), "queries": len(case.queries)}
        return {"name": name, **about}, runs
    except (Missing, Failed, RmvdbError) as exc:
        print(f"case {name} is not measured: {exc}", file=sys.stderr, flush=True)
        return {"name": name, "title": name, "skipped": str(exc), "failed": not isinstance(exc, Missing)}, []
    finally:
        shutil.rmtree(at, ignore_errors=True)


def _run(way: Way, seed: int, at: Path, case: Case, alone: Ends, ts: Sequence[float]) -> dict[str, Any]:
    run: dict[str, Any] = {"case": case.name, "seed": seed, **asdict(way)}
    began = time.monotonic()
    try:
        found = upgrade(case, way, seed, at, ts)
    except (Failed, RmvdbError) as exc:
        run["error"] = str(exc)
    else:
        new = alone.quality(found.pop("measured"))["M_new"]
        run |= {**found, "M_old": found["start"], "M_new": new, "M_0": found["points"][0][1]}
        run["gain"] = report.gain(run)
    run["seconds"] = round(time.monotonic() - began, 1)
    shutil.rmtree(at, ignore_errors=True)
    print(_line(run), flush=True)
    return run


def _line(run: dict[str, Any]) -> str:
    way = f"{run['case']} seed {run['seed']} {run['method']}{' +log' if run['log'] else ''} rescore {run['rescore']}"
    if "error" in run:
        return f"{way}: {run['error']}"
    curve = " ".join(f"{value:.3f}" for _, value in run["points"])
    return (
        f"{way}: {run['chosen']}, {run['order']}: old {run['M_old']:.3f} new {run['M_new']:.3f} curve {curve} "
        f"gain {run['gain']:.2f} {run['ms']:.0f} ms; plan {run['plan_seconds']:.0f} s of {run['seconds']:.0f} s"
    )
