"""`make stress`: the promises under load and faults, on every engine and registry in turn. The last line is JSON."""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.stress import engines
from tests.stress.parts import Broken
from tests.stress.run import Run
from tests.support.milvus_server import unavailable
from tests.support.project import Project
from tests.support.scratch import prefer_memory

COUNTED = ("searches", "writes", "failed_writes", "excused", "kills", "suspensions", "pauses", "locks", "restarts", "checkpoints")
COUNTED += ("upgrades", "rollbacks", "instant", "lifted", "scheduled", "poison", "intrusions", "jumps", "freezes")
COUNTED += ("registry_back", "engine_back", "rebuilds")
WRONG = ("lost", "duplicated", "stale_reads", "resurrected", "failed_searches", "poisoned", "adopted")


def main() -> int:
    """Run every combination that was asked for; 1 if anything was not as it must be."""
    options = _options()
    if options.seconds <= 600:  # a longer one may fill it
        prefer_memory()
    total: dict[str, Any] = {"records": options.records, **dict.fromkeys((*COUNTED, *WRONG), 0)}
    pairs = [(engine, registry) for engine in options.engine for registry in options.registry]
    if reason := unavailable() if "server" in options.engine else "":
        print(f"no run on a server: {reason}", flush=True)
        pairs = [pair for pair in pairs if "server" not in pair]
        if not pairs or os.environ.get("CI", "").lower() in ("1", "true", "yes"):
            return 1
    total |= {"engines": sorted({pair[0] for pair in pairs}), "registries": sorted({pair[1] for pair in pairs})}
    for engine, registry in pairs:
        seconds = options.seconds / len(pairs)
        again = f"--engine {engine} --registry {registry} --seconds {seconds:g} --records {options.records} --seed {options.seed}"
        again += " --instant-rollback" * options.instant_rollback + " --roll-back" * options.roll_back
        again += f" --method {options.method}" * bool(options.method)
        print(f"== {engine} and {registry}: python -m tests.stress {again}", flush=True)
        try:
            # It is filled before, and what is under way comes to its end; neither takes half as long.
            with _over_within(2 * seconds + 2400 + options.records / 10):
                counts = run(engine, registry, seconds=seconds, options=options)
        except Broken as exc:
            print(f"{exc}\n{json.dumps(total | {'broken': 1})}", flush=True)
            return 1
        if idle := [name for name in ("searches", "writes") if not counts[name]]:
            print(f"{engine}: it counted no {' and no '.join(idle)}, so it shows nothing", flush=True)
            total["broken"] = 1
        if any(counts[name] for name in WRONG):
            print(f"{engine}: went wrong; the same choices again: python -m tests.stress {again}", flush=True)
        for name in (*COUNTED, *WRONG):
            total[name] += counts[name]
    print(json.dumps(total))
    return int(any(total[name] for name in WRONG) or "broken" in total)


@contextmanager
def _over_within(seconds: float) -> Iterator[None]:
    """End the process if it takes longer, and print where each of its threads was."""
    faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def run(engine: str, registry: str, *, seconds: float, options: argparse.Namespace) -> dict[str, int]:
    """One run in a folder of its own, which stays where something went wrong; its counts."""
    folder = Path(tempfile.mkdtemp(prefix="rmvdb-stress-"))
    started = time.monotonic()

    def say(words: str) -> None:
        print(f"{time.monotonic() - started:7.1f}  {engine}: {words}", flush=True)

    with engines.engine(engine, folder) as store, engines.registry(registry, folder) as database:
        project = Project(folder, milvus=store.address, registry=database.address, batch=250, retry_for=40.0)
        made = Run(
            project=project,
            engine=store,
            registry=database,
            records=options.records,
            seconds=seconds,
            seed=options.seed,
            instant_rollback=options.instant_rollback,
            roll_back=options.roll_back,
            method=options.method,
            say=say,
        )
        try:
            counts = made.run()
        except BaseException:
            print(f"{engine}: seed {options.seed} repeats this; its folder is {folder}", flush=True)
            raise
        finally:
            for example in made.verdict.examples:
                say(example)
            project.stop_engine()
    if not (made.verdict.problems or made.adopted):
        shutil.rmtree(folder)
    return counts


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.stress", description=__doc__)
    parser.add_argument(
        "--seconds", type=float, default=600.0, help="of all runs together, each from its first deployment on [600]"
    )
    parser.add_argument("--records", type=int, default=20_000, help="in the gallery at the beginning [20000]")
    parser.add_argument("--engine", nargs="*", choices=("lite", "server"), default=["lite", "server"])
    parser.add_argument("--registry", nargs="*", choices=("sqlite", "postgres"), default=["sqlite", "postgres"])
    parser.add_argument("--instant-rollback", action="store_true", help="every upgrade keeps the original whole")
    parser.add_argument("--roll-back", action="store_true", help="every upgrade is rolled back, on the way or at its end")
    parser.add_argument("--method", choices=("naive", "rqt", "mcl", "fct"), help="of every upgrade [the seed chooses]")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10**6), help="repeats a run's choices [random]")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
