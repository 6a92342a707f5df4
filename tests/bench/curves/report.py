"""Rows, tables and the picture of what was measured."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

#: Colours that differ in lightness too, so that the picture can be read without them.
COLOURS = {"auto": "#0b6e4f", "naive": "#d1495b", "blend": "#edae49"}
OTHER, LEVEL = "#8d99ae", "#30638e"
#: The aims, by case: Gain with one model a query, with two, and with rescoring 20; and then M_0 as a share of v2 alone.
AIMS: dict[str, tuple[float | None, ...]] = {
    "a": (0.85, 0.85, 1.0, 0.99),
    "b": (None, 0.44, 0.9, 0.95),
    "c": (None, 0.33, 1.0, 0.97),
    "d": (0.7, 0.7, None, None),
}
#: The numbers of a row, medians over the seeds.
NUMBERS = ("M_old", "M_new", "M_0", "gain", "fall", "extractions", "items", "ms", "plan_seconds")


def rows(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each case and way: medians over its seeds."""
    keys = dict.fromkeys((run["case"], run["method"], run["rescore"], run["log"]) for run in runs)
    return [_row(key, [run for run in runs if key == (run["case"], run["method"], run["rescore"], run["log"])]) for key in keys]


def _row(key: tuple[str, str, int | None, bool], runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    case, method, rescore, log = key
    row: dict[str, Any] = {"case": case, "method": method, "rescore": rescore, "log": log}
    if failed := [run["error"] for run in runs if "error" in run]:
        return {**row, "error": failed[0]}
    row |= {name: round(statistics.median(run[name] for run in runs), 4) for name in NUMBERS}
    row["curve"] = [[round(statistics.median(at), 4) for at in zip(*moment, strict=True)] for moment in _moments(runs)]
    row["seeds"] = len(runs)
    row["never_below_old"] = all(run["M_0"] >= run["M_old"] for run in runs)
    row["chosen"] = ", ".join(dict.fromkeys(_chosen(run) for run in runs))
    row["warned"] = sum(run["about"]["verdict"] == "warn" for run in runs)
    return row


def _chosen(run: Mapping[str, Any]) -> str:
    rescoring = run["about"]["rescore"]
    return f"{run['chosen']} in {run['order']} order{f', rescoring {rescoring}' if rescoring else ''}"


def _moments(runs: Sequence[Mapping[str, Any]]) -> Iterable[tuple[Any, ...]]:
    return zip(*(run["points"] for run in runs), strict=True)


def gain(run: Mapping[str, Any]) -> float:
    """Return the area above v1 alone, as a share of what v2 alone is above it."""
    difference = run["M_new"] - run["M_old"]
    return float((run["area"] - run["M_old"]) / difference) if difference else float("nan")


def markdown(found: Mapping[str, Any]) -> str:
    """Return a table of the aims, and one for each case."""
    aimed = [name for name in found["cases"] if name in AIMS and any(row["case"] == name for row in found["rows"])]
    return "\n\n".join([*([_beside_aims(found, aimed)] if aimed else []), *(_table(found, name) for name in found["cases"])])


def _beside_aims(found: Mapping[str, Any], cases: Iterable[str]) -> str:
    head = (
        "| case | one model a query | two | rescoring 20 | its M_0, of v2 alone | `auto` without rescoring | `auto` |",
        "|---|---|---|---|---|---|---|",
    )
    return "\n".join((*head, *(_aims_line(name, [row for row in found["rows"] if row["case"] == name]) for name in cases)))


def _aims_line(case: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the best method of each kind that does not start below v1, and the aim if that falls short of it."""
    plain = [row for row in rows if "error" not in row and not row["log"]]
    named = [row for row in plain if row["method"] != "auto" and row["never_below_old"]]
    by_models = [[row for row in named if row["rescore"] == 0 and round(row["extractions"]) == models] for models in (1, 2)]
    rescored = [row for row in named if row["rescore"]]
    best = [
        *(max((row["gain"] for row in some), default=None) for some in (*by_models, rescored)),
        max((row["M_0"] / row["M_new"] for row in rescored), default=None),
    ]
    cells = [_aimed(value, aim) for value, aim in zip(best, AIMS[case], strict=True)]
    autos = [next((row["gain"] for row in plain if (row["method"], row["rescore"]) == ("auto", k)), None) for k in (0, None)]
    return f"| {' | '.join([case, *cells, *(_aimed(value, None) for value in autos)])} |"


def _aimed(value: float | None, aim: float | None) -> str:
    shown = "none" if value is None else f"{value:.2f}".replace("-", "−")
    return shown if aim is None or (value is not None and round(value, 2) >= aim) else f"**{shown}** (aim {aim:.2f})"


def _table(found: Mapping[str, Any], name: str) -> str:
    case = found["cases"][name]
    if "skipped" in case:
        return f"{case['title']}: not measured, since {case['skipped']}"
    mine = [row for row in found["rows"] if row["case"] == name]
    whole = next((row for row in mine if "error" not in row and not row["log"]), None)
    ends = "nothing was measured"
    if whole:
        ends = f"v1 alone {whole['M_old']:.3f}, v2 alone {whole['M_new']:.3f}; seeds: {whole['seeds']}"
    lines = [
        f"**{case['title']}**, {case['metric']}: {case['records']:,} records, {case['queries']} queries; {ends}",
        "",
        "| method | rescoring | models that embed a query, records embedded for it | M_0 | Gain | largest fall | ms |",
        "|---|---|---|---|---|---|---|",
        *(_line(row) for row in mine),
    ]
    return "\n".join(lines)


def _line(row: Mapping[str, Any]) -> str:
    rescore = "as planned" if row["rescore"] is None else str(row["rescore"] or "none")
    method = f"`{row['method']}`" + (", with a log of other queries" if row["log"] else "")
    if "error" in row:
        return f"| {method} | {rescore} | {row['error']} | | | | |"
    if row["method"] == "auto":
        method += f" ({row['chosen']})"
    if row["warned"]:
        method += f"; {row['warned']} of {row['seeds']} plans warn"
    cost = f"{row['extractions']:.0f}, {row['items']:.1f}"
    gain = f"{row['gain']:.2f}".replace("-", "−")
    return f"| {method} | {rescore} | {cost} | {row['M_0']:.3f} | {gain} | {row['fall']:.3f} | {row['ms']:.0f} |"


def picture(found: Mapping[str, Any], file: Path) -> None:
    """Draw a panel for each case that was measured: quality over t by each way, between v1 alone and v2 alone."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = [name for name in found["cases"] if any(row["case"] == name and "error" not in row for row in found["rows"])]
    if not names:
        return
    figure, axes = pyplot.subplots(1, len(names), figsize=(4.2 * len(names), 4.4), layout="constrained", squeeze=False)
    for axis, name in zip(axes[0], names, strict=True):
        case = found["cases"][name]
        mine = [row for row in found["rows"] if row["case"] == name and "error" not in row and not row["log"]]
        for row in sorted(mine, key=lambda each: each["method"] == "auto"):
            _draw(axis, row)
        for key, line in (("M_new", "--"), ("M_old", ":")):
            axis.axhline(mine[0][key], color=LEVEL, linestyle=line, linewidth=1.2)
        axis.set_title(case["title"].replace(": ", "\n"), fontsize=9)
        axis.set(xlabel="t, share re-embedded", ylabel=case["metric"], xlim=(-0.02, 1.02))
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    handles = {label: line for axis in axes[0] for line, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=6, frameon=False, fontsize=8)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)
    pyplot.close(figure)


def _draw(axis: Any, row: Mapping[str, Any]) -> None:
    rescored = row["rescore"] not in (None, 0)
    default = row["method"] == "auto" and row["rescore"] is None
    label = "default" if default else f"{row['method']}{', rescoring' if rescored else ''}"
    colour = COLOURS.get(row["method"], OTHER)
    axis.plot(
        *zip(*row["curve"], strict=True),
        color=colour,
        linewidth=2.4 if default else 1.1,
        linestyle="-" if not rescored else "-.",
        marker="o" if default else None,
        markersize=4,
        label=label if row["method"] in COLOURS else "other methods",
    )
