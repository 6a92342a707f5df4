"""rmvdb beside embedflow, isotrieve and a plain switch of an alias, in one run on one gallery.

    make others DATA=FOLDER                          Cranfield; FOLDER holds a `load.py` with `cranfield()`
    python -m tests.bench.others --case m --records 100 --out some.json      made sentences: no files

Each system is made anew for each t. The models come from PyPI, once, as `make curves` gets them.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

# Before torch is imported: threads that spin while they wait take the time of the others.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

from tests.bench.curves.cases import CASES, Case, Sizes
from tests.bench.others import measure, report
from tests.bench.others.ours import Rmvdb
from tests.bench.others.rivals import Alias, Embedflow, Isotrieve, Transformed
from tests.bench.page import into_page

ROOT = Path(__file__).parents[3]
TS = [0.0, 0.2, 0.5, 0.8, 1.0]
SYSTEMS: Mapping[str, Callable[[Case, Path], Any]] = {
    "alias switch": Alias,
    "isotrieve, mapped records": Transformed,
    "isotrieve, mapped queries": Isotrieve,
    "embedflow": Embedflow,
    "embedflow, every candidate at once": partial(Embedflow, sync=50),
    "rmvdb, default plan": Rmvdb,
    "rmvdb, rescoring 20": lambda case, at: Rmvdb(case, at, "--rescore", "20"),
    "rmvdb, no rescoring": lambda case, at: Rmvdb(case, at, "--rescore", "0"),
}


def main() -> int:
    """Measure, and write JSON and table after each system; 1 if a system failed."""
    asked = _arguments()
    torch.set_num_threads(1)
    at = Path(tempfile.mkdtemp(prefix="rmvdb-others-"))
    os.chdir(at)  # embedflow writes logs where it runs
    try:
        (at / "data").mkdir()
        case = some(CASES[asked.case](0, at / "data", asked.data, Sizes(texts=asked.records or 300)), asked.records)
        found: dict[str, Any] = {
            "title": case.title,
            "metric": case.metric,
            "records": len(case.records),
            "queries": len(case.queries),
            "ts": TS,
            "versions": {name: _version(name) for name in ("rmvdb", "embedflow", "isotrieve", "pymilvus", "milvus-lite")},
            "systems": _kept(asked),
        }
        for name in asked.systems:
            found["systems"][name] = _measured(case, SYSTEMS[name], at / f"system{list(SYSTEMS).index(name)}")
            asked.out.parent.mkdir(parents=True, exist_ok=True)
            asked.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
            print(name, found["systems"][name], flush=True)
        print(report.markdown(found))
        if asked.page:
            into_page(asked.page, "others", report.markdown(found))
        return int(any("error" in system for system in found["systems"].values()))
    finally:
        os.chdir(ROOT)
        shutil.rmtree(at, ignore_errors=True)


def _kept(asked: argparse.Namespace) -> dict[str, Any]:
    """Return what an earlier call measured of systems that this one does not measure again."""
    if not asked.keep or not asked.out.exists():
        return {}
    kept: dict[str, Any] = json.loads(asked.out.read_text(encoding="utf-8"))["systems"]
    return {name: system for name, system in kept.items() if name not in asked.systems}


def some(case: Case, records: int | None) -> Case:
    """Return the case with its first records alone."""
    if records is None or records >= len(case.records):
        return case
    return replace(case, records=case.records[:records], relevant=case.relevant[:, :records])


def _measured(case: Case, make: Callable[[Case, Path], Any], at: Path) -> dict[str, Any]:
    moments = []
    for number, t in enumerate(TS):
        try:
            moments.append(measure.moment(case, make, at / str(number), t))
        except Exception as exc:  # noqa: BLE001 -- other programs' errors are of any kind, and the table says which
            return {"error": f"{type(exc).__name__}: {exc}".splitlines()[0], "moments": moments}
        print(f"  {moments[-1]}", flush=True)
    return {"moments": moments}


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("TEST_DATA", "data")), help="the folder of load.py")
    parser.add_argument("--case", default="b", choices=["b", "c", "m"], help="(default: %(default)s)")
    parser.add_argument("--records", type=int, help="the first of the case's records (default: all)")
    parser.add_argument("--systems", type=lambda text: text.split(";"), default=list(SYSTEMS), help="names, between semicolons")
    parser.add_argument("--keep", action="store_true", help="the other systems' rows of --out stay")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "others.json")
    parser.add_argument("--page", type=Path, help="a page of the documentation that gets the table")
    asked = parser.parse_args()
    asked.data, asked.out = asked.data.absolute(), asked.out.absolute()
    asked.page = asked.page and asked.page.absolute()
    return asked


if __name__ == "__main__":
    sys.exit(main())
