"""Measure: make bench [ROWS="search own_time"] [RECORDS=1000000 DIM=768 T=0.9].

A line of JSON for each row as soon as it is measured, on the standard output; at the end a table, on the other one.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

from tests.bench.speed.row import Options, Row
from tests.bench.speed.rows import FAMILIES


def main(words: Sequence[str] | None = None) -> list[Row]:
    """Measure the families that the words name, or all."""
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument("--rows", nargs="*", choices=list(FAMILIES), default=list(FAMILIES), help="the families to measure")
    parser.add_argument("--small", action="store_true", help="a few records and calls, to see that it runs")
    for each in fields(Options):
        parser.add_argument(f"--{each.name}", type=type(each.default), help=f"default: {each.default}")
    asked = vars(parser.parse_args(words))
    chosen = {each.name: asked[each.name] for each in fields(Options) if asked[each.name] is not None}
    options = replace(Options.small() if asked["small"] else Options(), **chosen)
    rows = []
    for family in asked["rows"]:
        for row in FAMILIES[family](options):
            print(row.to_json(), flush=True)
            rows.append(row)
    print(table(rows, options), file=sys.stderr)
    return rows


def table(rows: Sequence[Row], options: Options) -> str:
    """Return a Markdown table of the rows, with the machine, the versions and the size above it."""
    lines = [machine(), f"{options.records:,} records × {options.dim}, t = {options.t:g}, {options.calls} calls a side", ""]
    lines += ["| row | rmvdb | against | ratio | target | |", "|---|---|---|---|---|---|"]
    for row in rows:
        other = "" if row.theirs is None else f"{_shown(row.theirs, row.theirs_spread)} {row.unit} {row.against}"
        sign = "≤" if row.better == "lower" else "≥"
        ratio = "" if row.theirs is None else f"{row.ratio:.2f}"
        met = "met" if row.is_met else "missed"
        lines += [
            f"| {row.name} | {_shown(row.ours, row.ours_spread)} {row.unit} | {other} | {ratio} | {sign} {row.target:g} | {met} |"
        ]
    return "\n".join(lines)


def machine() -> str:
    """Return the processor, its cores, how busy they are, and the versions of what takes part."""
    info = Path("/proc/cpuinfo")
    names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    model = names[0] if names else platform.processor() or platform.machine()
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("rmvdb", "pymilvus", "numpy", "sqlalchemy"))
    return f"{model}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; Python {platform.python_version()}, {versions}"


def _shown(value: float, between: tuple[float, float] | None) -> str:
    return f"{value:.3g}" if between is None else f"{value:.3g} ({between[0]:.3g} to {between[1]:.3g})"


if __name__ == "__main__":
    main()
