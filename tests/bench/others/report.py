"""The table of what was measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: The moment whose milliseconds and extractions stand in the table.
MIDDLE = 0.5
NOTHING = "—"


def markdown(found: Mapping[str, Any]) -> str:
    """Return the table."""
    ts = found["ts"]
    about = f"**{found['title']}**, {found['metric']}: {found['records']:,} records, {found['queries']} queries"
    head = ["", *(f"t = {t:g}" for t in ts), "ms", "extractions", "records/s", "changed records found: at once, at the end"]
    lines = [about, "", f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    return "\n".join([*lines, *(_line(name, found["systems"][name], ts) for name in found["systems"])])


def _line(name: str, system: Mapping[str, Any], ts: list[float]) -> str:
    if "error" in system:
        return f"| {name} | {system['error']} |" + " |" * (len(ts) + 3)
    moments = {each["t"]: each for each in system["moments"]}
    middle = moments.get(MIDDLE, {})
    rates = [each["records_per_s"] for each in system["moments"] if "records_per_s" in each]
    cells = [
        name,
        *(f"{moments[t]['quality']:.3f}" if t in moments else NOTHING for t in ts),
        f"{middle['ms']:.0f}" if middle else NOTHING,
        f"{middle['extractions']:.1f}" if middle else NOTHING,
        f"{rates[0]:.0f}" if rates else NOTHING,
        f"{middle['found_at_once']}, {middle['found_after']} of {middle['written']}" if "written" in middle else NOTHING,
    ]
    return f"| {' | '.join(cells)} |"
